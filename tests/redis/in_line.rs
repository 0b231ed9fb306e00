//! Requests that wait in line for places on Redis, of one process and of several.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::limiter::{Charge, Limiter, Place};
use tower_ratelimit::{Key, Policy, Quota, RateLimitLayer, RedisLimiter, Rule, Wait, key};

use super::{LONG, connected, patient, policy};
use crate::support::hold_in_line;
use crate::support::proxy::{Fault, Proxy};
use crate::support::redis_server::Server;

fn at_once(limit: u64, wait: Duration) -> Quota {
    Quota::concurrent(limit).max_wait(wait).unwrap()
}

async fn process(server: &Server) -> RedisLimiter {
    connected(patient(), &server.url()).await
}

async fn on_redis() -> (RedisLimiter, Server) {
    let server = Server::start();
    (process(&server).await, server)
}

crate::lines::promises_of_lines!(on_redis, #[tokio::test]);

async fn wait_until(is_so: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < LONG, "it does not happen");
        sleep(Duration::from_millis(2)).await;
    }
}

/// Returns how many units are left for a newcomer.
async fn left(limiter: &RedisLimiter, policy: &Policy) -> u64 {
    let key = Key::global();
    limiter.peek(&[Charge::new(policy, &key).cost(0)]).await.unwrap().charges()[0].remaining()
}

/// A process whose requests hold their places until their responses are dropped.
struct Office {
    layer: RateLimitLayer<RedisLimiter>,
    started: Arc<Mutex<Vec<usize>>>,
}

impl Office {
    fn of(limiter: RedisLimiter, rule: Rule) -> Self {
        let layer = RateLimitLayer::new(limiter, rule, key::global()).timer(TokioTimer::new());
        layer.check().unwrap();
        Self { layer, started: Arc::default() }
    }

    /// Sends a request with this number.
    fn send(&self, number: usize) -> JoinHandle<Response<Body>> {
        let started = Arc::clone(&self.started);
        let service = self.layer.layer(service_fn(move |_: Request<Body>| {
            started.lock().unwrap().push(number);
            std::future::ready(Ok::<_, Infallible>(Response::new(Body::from("done"))))
        }));
        tokio::spawn(async move { service.oneshot(Request::new(Body::empty())).await.unwrap() })
    }

    /// Sends a request that has to wait in line behind others.
    async fn send_in_line(&self, number: usize) -> JoinHandle<Response<Body>> {
        let waiting = self.layer.waiting();
        let sent = self.send(number);
        wait_until(async || self.layer.waiting() == waiting + 1).await;
        sent
    }
}

#[tokio::test]
async fn place_of_another_process_is_waited_for() {
    let server = Server::start();
    let (one, other) = (process(&server).await, process(&server).await);
    let policy = policy("renders", at_once(1, LONG));
    let held = Place::take(&one, &policy, &Key::global(), 1).await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let (other, policy) = (other.clone(), policy.clone());
        async move { hold_in_line(&other, &policy, &Key::global(), 1).await }
    });
    wait_until(async || other.hooks().place_lines().unwrap().waiting(&policy, &Key::global()) == 1).await;
    drop(held);
    let place = waiting.await.unwrap().unwrap().expect("it came free");
    let denied = Place::take(&one, &policy, &Key::global(), 1).await.unwrap().unwrap_err();
    assert_eq!(denied.wait(), Wait::Unknown);
    drop(place);
    wait_until(async || Place::take(&one, &policy, &Key::global(), 1).await.unwrap().is_ok()).await;
}

/// A caller that gives up is asked no more, and nobody waits for it.
#[tokio::test]
async fn line_that_its_process_left_is_forgotten() {
    let server = Server::start();
    let (one, other) = (process(&server).await, process(&server).await);
    let policy = policy("renders", at_once(2, LONG));
    let held = Place::take(&one, &policy, &Key::global(), 2).await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let (other, policy) = (other.clone(), policy.clone());
        async move { hold_in_line(&other, &policy, &Key::global(), 2).await }
    });
    let lines = other.hooks().place_lines().unwrap();
    wait_until(async || lines.waiting(&policy, &Key::global()) == 1).await;
    drop(held);
    waiting.abort();
    drop(waiting.await);
    assert_eq!(lines.waiting(&policy, &Key::global()), 0);
    wait_until(async || left(&one, &policy).await == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_call_does_not_end_the_wait_in_line() {
    let mut server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(patient().deadline(Duration::from_secs(1)), &proxy.url()).await;
    let quota = at_once(1, LONG);
    let (office, one) = (Office::of(limiter, Rule::new("exports", quota).unwrap()), process(&server).await);
    let exports = policy("exports", quota);
    let held = Place::take(&one, &exports, &Key::global(), 1).await.unwrap().unwrap();
    let waiting = office.send_in_line(0).await;
    for fault in [Fault::Lose, Fault::Reset, Fault::Cut(7)] {
        proxy.fault(fault);
        sleep(Duration::from_millis(1_400)).await;
    }
    proxy.behave();
    assert_eq!(office.layer.waiting(), 1);
    drop(held);
    let running = waiting.await.unwrap();
    assert_eq!(running.status(), StatusCode::OK);
    // A server that is away ends the wait, long before its time.
    let waiting = office.send_in_line(1).await;
    server.kill();
    assert_eq!(waiting.await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    drop(running);
}

#[tokio::test]
async fn reset_on_redis_lets_the_line_pass() {
    let server = Server::start();
    let limiter = process(&server).await;
    let policy = policy("renders", at_once(1, LONG));
    let held = Place::take(&limiter, &policy, &Key::global(), 1).await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let (limiter, policy) = (limiter.clone(), policy.clone());
        async move { hold_in_line(&limiter, &policy, &Key::global(), 1).await }
    });
    wait_until(async || limiter.hooks().place_lines().unwrap().waiting(&policy, &Key::global()) == 1).await;
    limiter.reset(&policy, &Key::global()).await.unwrap();
    let place = waiting.await.unwrap().unwrap().expect("it was reset");
    drop(held);
    assert_eq!(left(&limiter, &policy).await, 0, "a late return frees nothing");
    drop(place);
    wait_until(async || left(&limiter, &policy).await == 1).await;
}

/// The first in line of all processes goes away, while Redis keeps what is free for it.
#[tokio::test]
async fn process_that_left_the_line_holds_no_other_up() {
    let server = Server::start();
    let (one, leaves, waits) = (process(&server).await, process(&server).await, process(&server).await);
    let (policy, key) = (policy("renders", at_once(2, LONG)), Key::global());
    let in_line = |limiter: &RedisLimiter, cost| {
        let (limiter, policy) = (limiter.clone(), policy.clone());
        tokio::spawn(async move { hold_in_line(&limiter, &policy, &Key::global(), cost).await })
    };
    let mut times = Vec::new();
    for _ in 0..5 {
        let held = Place::take(&one, &policy, &key, 1).await.unwrap().unwrap();
        let first = in_line(&leaves, 2);
        wait_until(async || left(&one, &policy).await == 0).await;
        let second = in_line(&waits, 1);
        wait_until(async || waits.hooks().place_lines().unwrap().waiting(&policy, &key) == 1).await;
        leaves.hooks().place_lines().unwrap().wake_first(&policy, &key); // Redis hears of it anew, which would last for a second
        let kept = Instant::now();
        sleep(Duration::from_millis(50)).await;
        let is_kept = kept.elapsed() < Duration::from_millis(500); // or the machine stopped meanwhile
        assert!(!second.is_finished() || !is_kept, "one is free, and kept for the first");
        first.abort();
        assert!(first.await.is_err());
        let began = Instant::now();
        let place = second.await.unwrap().unwrap().expect("one is free");
        times.push(began.elapsed());
        drop((place, held));
        wait_until(async || left(&one, &policy).await == 2).await;
    }
    times.sort();
    println!("the next process got the place after {times:.0?}");
    assert!(times[2] < Duration::from_millis(750), "a poll of at most 500 ms: {times:?}");
}
