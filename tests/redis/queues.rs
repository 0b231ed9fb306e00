//! A leaky queue of several processes: Redis decides when each request departs, and a waiting
//! request sends no command.

use std::convert::Infallible;
use std::future::{Future, poll_fn, ready};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, Policy, Quota, RateLimitLayer, RedisLimiter, Rule,
    clock::{ManualClock, MonotonicClock, TokioTimer},
    key,
    limiter::{Charge, Limiter, Refund},
};

#[cfg(feature = "rules")]
use tower_ratelimit::rules::Rules;

use super::{LONG, calls, connected, eventually, patient, policy};
use crate::support::proxy::Proxy;
use crate::support::redis_server::Server;

/// The time between two departures.
const INTERVAL: Duration = Duration::from_millis(10);

/// A process with its own limiter and its waiting requests.
struct Process {
    layer: RateLimitLayer<RedisLimiter>,
    departures: Arc<Mutex<Vec<Instant>>>,
    /// The requests that are being polled.
    polled: Arc<AtomicUsize>,
}

impl Process {
    /// The server's own clock can be adjusted while the test measures, so the processes have a clock.
    async fn start(server: &Server, policy: &Policy, clock: &MonotonicClock) -> Self {
        let limiter = connected(patient().clock(clock.clone()), &server.url()).await;
        let layer = RateLimitLayer::new(limiter, Rule::from(policy.clone()), key::global()).timer(TokioTimer::new());
        Self::new(layer)
    }

    fn new(layer: RateLimitLayer<RedisLimiter>) -> Self {
        Self { layer, departures: Arc::default(), polled: Arc::default() }
    }

    fn send(&self) -> JoinHandle<StatusCode> {
        let departures = Arc::clone(&self.departures);
        let service = self.layer.layer(service_fn(move |_: Request<Body>| {
            departures.lock().unwrap().push(Instant::now());
            ready(Ok::<_, Infallible>(Response::new(Body::empty())))
        }));
        let polled = Arc::clone(&self.polled);
        tokio::spawn(async move {
            let mut response = pin!(service.oneshot(Request::new(Body::empty())));
            let response = poll_fn(|cx| {
                polled.fetch_add(1, Ordering::SeqCst);
                let response = response.as_mut().poll(cx);
                polled.fetch_sub(1, Ordering::SeqCst);
                response
            });
            response.await.unwrap().status()
        })
    }

    /// Waits until this number of requests wait in their lines or have departed. A request counts as waiting just
    /// before it joins its line, in one poll.
    async fn until_admitted(&self, count: usize) {
        tokio::time::timeout(LONG, async {
            while self.layer.waiting() + self.departures().len() < count || self.polled.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await
        .expect("they are answered");
    }

    fn departures(&self) -> Vec<Instant> {
        self.departures.lock().unwrap().clone()
    }
}

fn queue(length: u64) -> Policy {
    let quota = Quota::leaky_queue(1, INTERVAL).and_then(|quota| quota.queue(length)).expect("the quota is possible");
    policy("queue", quota)
}

async fn all_pass(sent: impl IntoIterator<Item = JoinHandle<StatusCode>>) {
    for sent in sent {
        assert_eq!(tokio::time::timeout(LONG, sent).await.expect("nobody waits for ever").unwrap(), StatusCode::OK);
    }
}

/// The first n depart no earlier than n − 1 intervals after the beginning. The clock returns whole microseconds.
fn keep_the_rate(begin: Instant, departures: impl IntoIterator<Item = Instant>) {
    let mut departures: Vec<Instant> = departures.into_iter().collect();
    departures.sort();
    for (place, at) in (0_u32..).zip(departures) {
        assert!(at - begin + Duration::from_micros(1) >= INTERVAL * place, "the {place}th at {:?}", at - begin);
    }
}

#[tokio::test]
async fn queue_of_two_processes_keeps_one_rate_when_requests_leave() {
    let (server, policy, clock) = (Server::start(), queue(100), MonotonicClock::new());
    let (first, second) =
        (Process::start(&server, &policy, &clock).await, Process::start(&server, &policy, &clock).await);
    let begin = Instant::now();
    let (mut leave, mut stay) = (Vec::new(), Vec::new());
    for _ in 0..25 {
        leave.push(first.send());
        stay.push(second.send());
    }
    first.until_admitted(25).await;
    second.until_admitted(25).await;
    leave.split_off(20).iter().for_each(JoinHandle::abort);
    all_pass(leave.into_iter().chain(stay)).await;
    assert_eq!((first.layer.waiting(), second.layer.waiting()), (0, 0));
    keep_the_rate(begin, first.departures().into_iter().chain(second.departures()));
    assert_eq!(second.departures().len(), 25);
}

#[tokio::test]
async fn stopped_server_keeps_no_request_waiting() {
    let (server, policy, clock) = (Server::start(), queue(100), MonotonicClock::new());
    let process = Process::start(&server, &policy, &clock).await;
    let begin = Instant::now();
    let mut sent: Vec<_> = (0..60).map(|_| process.send()).collect();
    process.until_admitted(60).await;
    server.pause();
    sent.split_off(50).iter().for_each(JoinHandle::abort);
    all_pass(sent).await;
    keep_the_rate(begin, process.departures());
    server.resume();
}

/// Waits until the next request would wait for no longer than this.
async fn next_waits(limiter: &RedisLimiter, policy: &Policy, at_most: Duration) {
    let began = Instant::now();
    loop {
        let decision = limiter.peek(&[Charge::new(policy, &Key::global())]).await.expect("Redis answers");
        let wait = decision.charges()[0].delay();
        if wait <= at_most {
            return;
        }
        assert!(began.elapsed() < LONG, "the next request waits for {wait:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// On one thread, so that all checks are there when the first call is sent.
#[tokio::test]
async fn checks_of_one_call_that_are_dropped_free_all_slots() {
    let (server, minute) = (Server::start(), Duration::from_secs(60));
    let proxy = Proxy::start(server.port());
    let limiter = connected(patient(), &proxy.url()).await;
    let quota = Quota::leaky_queue(1, minute).and_then(|quota| quota.queue(200)).expect("the quota is possible");
    let (policy, before) = (policy("queue", quota), calls(&server));
    proxy.hold(true);
    let checks: Vec<_> = (0..50)
        .map(|_| {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            tokio::spawn(async move { limiter.take(&[Charge::new(&policy, &Key::global())]).await })
        })
        .collect();
    eventually("they ask", async || limiter.waiting() == 50).await;
    tokio::task::yield_now().await; // to the flight
    checks.iter().for_each(JoinHandle::abort);
    for check in checks {
        assert!(check.await.is_err(), "it was aborted");
    }
    proxy.hold(false);
    eventually("all is refunded", async || limiter.waiting() == 0).await;
    let left = limiter.peek(&[Charge::new(&policy, &Key::global()).cost(0)]).await.expect("Redis answers");
    assert_eq!(left.charges()[0].remaining(), 201);
    // One call took for the first check and one for the others, one refunded the newest slot and one the others, and
    // one looked.
    assert_eq!(calls(&server) - before, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn requests_that_leave_on_several_threads_free_all_slots() {
    let (server, clock) = (Server::start(), MonotonicClock::new());
    let minute = Duration::from_secs(60);
    let quota = Quota::leaky_queue(1, minute).and_then(|quota| quota.queue(200)).expect("the quota is possible");
    let limiter = connected(patient().clock(clock.clone()), &server.url()).await;
    for round in 0..20 {
        let policy = policy(&format!("queue-{round}"), quota);
        let layer =
            RateLimitLayer::new(limiter.clone(), Rule::from(policy.clone()), key::global()).timer(TokioTimer::new());
        let process = Process::new(layer);
        all_pass([process.send()]).await;
        let sent: Vec<_> = (0..150).map(|_| process.send()).collect();
        process.until_admitted(151).await;
        sent.iter().for_each(JoinHandle::abort);
        for sent in sent {
            assert!(sent.await.is_err(), "it was aborted");
        }
        assert_eq!(process.layer.waiting(), 0);
        next_waits(&limiter, &policy, minute).await;
    }
}

/// Refunds that come one by one, the oldest slot first, and with slots of another process among them.
#[tokio::test]
async fn slots_refunded_in_any_order_are_all_free() {
    let (server, clock) = (Server::start(), ManualClock::new());
    let quota =
        Quota::leaky_queue(7, Duration::from_secs(60)).and_then(|quota| quota.queue(200)).expect("it is possible");
    let limiter = async || connected(patient().clock(clock.clone()), &server.url()).await;
    let (own, other, policy) = (limiter().await, limiter().await, policy("queue", quota));
    let take = async |limiter: &RedisLimiter, cost| {
        let mut decision =
            limiter.take(&[Charge::new(&policy, &Key::global()).cost(cost)]).await.expect("Redis answers");
        let receipt = decision.charge_mut(0).and_then(|charge| charge.take_receipt()).expect("there is room");
        Refund::new(policy.clone(), Key::global(), receipt)
    };
    let left = async || {
        let peeked = own.peek(&[Charge::new(&policy, &Key::global()).cost(0)]).await.expect("Redis answers");
        peeked.charges()[0].remaining()
    };
    let mut slots = Vec::new();
    for cost in [1, 2, 1, 3, 1, 1] {
        slots.push(take(&own, cost).await);
    }
    for (slot, free) in slots.into_iter().zip([192, 192, 192, 192, 192, 201]) {
        own.refund(vec![slot]).await.expect("Redis answers");
        assert_eq!(left().await, free, "no earlier slot is free before the later ones");
    }

    let [first, second] = [take(&own, 1).await, take(&own, 1).await];
    let [theirs, last] = [take(&other, 1).await, take(&own, 1).await];
    for (limiter, slot, free) in [(&own, first, 197), (&own, last, 198), (&own, second, 198), (&other, theirs, 199)] {
        limiter.refund(vec![slot]).await.expect("Redis answers");
        assert_eq!(left().await, free);
    }
    clock.advance(Duration::from_secs(60));
    assert_eq!(left().await, 201);
}

/// The rules of a file are replaced while requests wait. Requests of the old and of the new rules leave together, the
/// others depart.
#[cfg(feature = "rules")]
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_leave_after_a_reload_free_all_slots() {
    let server = Server::start();
    let limiter = connected(patient(), &server.url()).await;
    for round in 0..20 {
        let text = |name: String, length: u64| {
            format!("rules: [{{name: {name}, quota: '1 per minute, queue {length}, leaky queue', key: global}}]")
        };
        let (old, new) = match round % 2 {
            0 => (text(format!("q-{round}"), 100), text(format!("q-{round}"), 200)),
            _ => (text(format!("q-{round}"), 100), text(format!("n-{round}, was: q-{round}"), 200)),
        };
        let rules = Rules::from_text(old).expect("the rules are valid");
        let layer = rules.layer(limiter.clone()).expect("the rules are supported").timer(TokioTimer::new());
        let process = Process::new(layer);
        all_pass([process.send()]).await;
        let mut sent: Vec<_> = (0..60).map(|_| process.send()).collect();
        process.until_admitted(61).await;
        rules.replace(new).expect("the rules are valid");
        sent.extend((0..60).map(|_| process.send()));
        process.until_admitted(121).await;
        if round % 4 < 2 {
            sent.reverse();
        }
        sent.iter().for_each(JoinHandle::abort);
        for sent in sent {
            assert!(sent.await.is_err(), "it was aborted");
        }
        eventually("all is refunded", async || limiter.waiting() == 0).await;
        let left = process.layer.peek(&Key::global()).await.expect("Redis answers");
        assert_eq!(left[0].1.remaining(), 200, "in round {round}");
    }
}

/// Waiting requests, and requests whose checks are under way or answered at any moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn waiters_and_checks_that_leave_together_free_all_slots() {
    let (server, minute) = (Server::start(), Duration::from_secs(60));
    let quota = Quota::leaky_queue(1, minute).and_then(|quota| quota.queue(200)).expect("the quota is possible");
    let limiter = connected(patient(), &server.url()).await;
    for round in 0..60 {
        let policy = policy(&format!("queue-{round}"), quota);
        let layer =
            RateLimitLayer::new(limiter.clone(), Rule::from(policy.clone()), key::global()).timer(TokioTimer::new());
        let process = Process::new(layer);
        all_pass([process.send()]).await;
        let mut sent: Vec<_> = (0..100).map(|_| process.send()).collect();
        process.until_admitted(101).await;
        for at in 0..90 {
            sent.push(process.send());
            if at % 30 == round % 30 {
                tokio::task::yield_now().await;
            }
        }
        if round % 3 == 0 {
            sent.reverse();
        }
        sent.iter().for_each(JoinHandle::abort);
        for sent in sent {
            assert!(sent.await.is_err(), "it was aborted");
        }
        assert_eq!(process.layer.waiting(), 0);
        eventually("all is refunded", async || limiter.waiting() == 0).await;
        let left = limiter.peek(&[Charge::new(&policy, &Key::global()).cost(0)]).await.expect("Redis answers");
        // One request departed.
        assert_eq!(left.charges()[0].remaining(), 200, "in round {round}");
    }
}
