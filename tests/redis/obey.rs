//! Clients that obey share a quota of their own in Redis, as processes do.

use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Quota, RedisLimiter, Rule,
    client::{ObeyError, ObeyErrorKind, ObeyLayer},
    clock::{ManualClock, MonotonicClock, TokioTimer},
};

use super::{MINUTE, connected, patient, policy};
use crate::support::redis_server::Server;

/// Lets each client send requests, one after the other. Returns what became of them, and the instants
/// at which the server got those that were sent.
async fn send(clients: &[ObeyLayer], each: usize) -> (Vec<Result<(), ObeyErrorKind>>, Vec<Instant>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for client in clients {
        let seen = Arc::clone(&seen);
        let client = client.layer(service_fn(move |_: Request<()>| {
            seen.lock().unwrap().push(Instant::now());
            ready(Ok::<_, Infallible>(Response::new(())))
        }));
        tasks.spawn(async move {
            let mut answers = Vec::new();
            for _ in 0..each {
                let request = Request::get("http://example.org/").body(()).unwrap();
                let answer = client.clone().oneshot(request).await;
                answers.push(match answer {
                    Ok(_) => Ok(()),
                    Err(error) => Err(error.downcast_ref::<ObeyError>().expect("the server does not fail").kind()),
                });
            }
            answers
        });
    }
    let answers = tasks.join_all().await.concat();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    (answers, seen)
}

fn layers(limiters: &[RedisLimiter], quota: Quota, max_wait: Duration) -> Vec<ObeyLayer> {
    let layer = |limiter: &RedisLimiter| {
        let layer = ObeyLayer::new(TokioTimer::new()).own_quota(limiter.clone(), Rule::from(policy("vendor", quota)));
        layer.expect("Redis supports every quota").max_wait(max_wait)
    };
    limiters.iter().map(layer).collect()
}

#[tokio::test]
async fn clients_together_send_as_much_as_their_quota_allows() {
    let (server, clock) = (Server::start(), ManualClock::new());
    let mut limiters = Vec::new();
    for _ in 0..10 {
        // Denials are not cached here, because their clock is not the advanced one.
        limiters.push(connected(patient().clock(clock.clone()).max_denials(0), &server.url()).await);
    }
    let quota = Quota::fixed_window(23, MINUTE).unwrap();
    for window in 0..3 {
        // A layer remembers until when the quota is used up, by its own timer.
        let (answers, seen) = send(&layers(&limiters, quota, Duration::ZERO), 5).await;
        assert_eq!(seen.len(), 23, "window {window}");
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 23);
        assert_eq!(answers.iter().filter(|answer| **answer == Err(ObeyErrorKind::TooLong)).count(), 27);
        clock.advance(MINUTE);
    }
}

#[tokio::test]
async fn clients_that_wait_send_all_at_the_rate_of_their_quota() {
    // The server's own clock can be adjusted meanwhile.
    let (server, clock) = (Server::start(), MonotonicClock::new());
    let mut limiters = Vec::new();
    for _ in 0..10 {
        limiters.push(connected(patient().clock(clock.clone()), &server.url()).await);
    }
    let quota = Quota::per_second(40).burst(10).unwrap();
    let start = Instant::now();
    let (answers, seen) = send(&layers(&limiters, quota, MINUTE), 4).await;
    assert_eq!(answers, [Ok(()); 40]);
    assert_eq!(seen.len(), 40);
    for (nth, at) in seen.iter().enumerate() {
        let after = at.duration_since(start) + Duration::from_micros(1); // the clock returns whole microseconds
        assert!(after >= Duration::from_millis(25) * (nth as u32).saturating_sub(9), "request {nth}: {after:?}");
    }
    println!("40 requests left within {:?}", start.elapsed());
}
