//! Callers that hold the futures of checks, drop them, send thousands at once, and use
//! them from another runtime.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{poll_fn, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    OnError, Policy, Quota, RateLimitLayer, RedisLimiter, Rule, key as extract,
    limiter::{Charge, Limiter, Refund, Reply, StoreErrorKind, redis::RedisLimiterBuilder},
    observe::Stats,
    quota::Anchor,
};

use super::{LONG, MINUTE, calls, connect, connected, eventually, key, passes, patient, policy, take};
use crate::support::proxy::{Fault, Proxy};
use crate::support::redis_server::Server;

/// It begins with the first request, so that it does not end while a test runs.
fn lasting(limit: u64) -> Quota {
    Quota::fixed_window(limit, 30 * 24 * 60 * MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

async fn used(limiter: &RedisLimiter, policy: &Policy, name: &str) -> u64 {
    let peeked = limiter.peek(&[Charge::new(policy, &key(name)).cost(0)]).await.unwrap();
    policy.quota().capacity() - peeked.charges()[0].remaining()
}

async fn status(layer: &RateLimitLayer<RedisLimiter>, name: &str) -> StatusCode {
    let inner = service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty()))));
    let request = Request::builder().header("name", name).body(Body::empty()).unwrap();
    layer.layer(inner).oneshot(request).await.unwrap().status()
}

/// With the default deadline: a check that waits for the held ones fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_checks_let_others_pass() {
    let server = Server::start();
    let limiter = connected(patient(), &server.url()).await;
    let policy = policy("held", lasting(1_000));
    let mut held = Vec::new();
    for number in 0..50 {
        let Reply::Later(mut future) = limiter.take(&[Charge::new(&policy, &key(&number.to_string()))]) else {
            panic!("Redis decides")
        };
        // Another thread may be so quick that the answer is there already.
        if poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await {
            held.push(future);
        }
        for _ in 0..10 {
            assert!(tokio::time::timeout(LONG / 6, passes(&limiter, &policy, "other")).await.unwrap());
        }
    }
    for future in held {
        assert!(future.await.unwrap().is_allowed(), "its answer was kept");
    }
}

/// A client that disconnects during the round trip is not charged, because its request never
/// reaches the service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_dropped_in_flight_is_refunded() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(patient(), &proxy.url()).await;
    let direct = connected(patient(), &server.url()).await;
    let policy = policy("dropped", lasting(1_000));
    let layer = RateLimitLayer::new(limiter.clone(), Rule::from(policy.clone()), |_: &_| key("all"));
    for _ in 0..5 {
        proxy.hold(true);
        let requests: Vec<_> = (0..20)
            .map(|_| {
                let layer = layer.clone();
                tokio::spawn(async move { status(&layer, "all").await })
            })
            .collect();
        eventually("they ask", async || limiter.waiting() == 20).await;
        requests.iter().for_each(tokio::task::JoinHandle::abort);
        for request in requests {
            assert!(request.await.unwrap_err().is_cancelled());
        }
        let before = calls(&server);
        proxy.hold(false);
        eventually("the calls in flight are made", async || calls(&server) > before).await;
        eventually("all is refunded", async || limiter.waiting() == 0).await;
        assert_eq!(used(&direct, &policy, "all").await, 0);
    }
}

/// Whatever moment a caller leaves at: what is used is what callers were granted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_dropped_at_any_moment_leave_exact_counts() {
    let server = Server::start();
    let limiter = connected(patient().max_denials(0), &server.url()).await;
    let policies = [policy("first", lasting(100_000)), policy("second", lasting(100_000))];
    let admitted = Arc::new(AtomicU64::new(0));
    for round in 0..200_u64 {
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let (limiter, policies, admitted) = (limiter.clone(), policies.clone(), Arc::clone(&admitted));
                tokio::spawn(async move {
                    let key = key("all");
                    let charges = policies.each_ref().map(|policy| Charge::new(policy, &key));
                    let decision = limiter.take(&charges).await.unwrap();
                    admitted.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
                })
            })
            .collect();
        for _ in 0..round % 40 {
            tokio::task::yield_now().await;
        }
        tasks.iter().step_by(2).for_each(tokio::task::JoinHandle::abort);
        for task in tasks {
            let _ = task.await;
        }
    }
    eventually("all is refunded", async || limiter.waiting() == 0).await;
    let admitted = admitted.load(Ordering::Relaxed);
    assert!((2_000..4_000).contains(&admitted), "{admitted}");
    for policy in &policies {
        assert_eq!(used(&limiter, policy, "all").await, admitted, "{}", policy.name());
    }
}

/// The results of requests that were sent at once.
struct Burst {
    /// The number of requests that passed, keyed by key.
    passed: HashMap<u64, u64>,
    failed: u64,
    /// The calls that were under way when all requests waited.
    held: u64,
    calls: u64,
}

/// Sends requests at once, of which `waiting` have to wait for Redis.
async fn burst(builder: RedisLimiterBuilder, requests: u64, keys: u64, waiting: usize) -> Burst {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let stats = Stats::new();
    let limiter = connected(builder.observer(stats.clone()), &proxy.url()).await;
    let layer = RateLimitLayer::new(limiter.clone(), Rule::from(policy("burst", lasting(10))), extract::header("name"));
    let layer = layer.on_error(OnError::Allow);
    let before = calls(&server);
    proxy.hold(true);
    let sent = (0..requests).map(|number| {
        let layer = layer.clone();
        tokio::spawn(async move { (number % keys, status(&layer, &(number % keys).to_string()).await) })
    });
    let sent: Vec<_> = sent.collect();
    eventually("they wait, or have failed", async || {
        let ended = sent.iter().filter(|request| request.is_finished()).count();
        limiter.waiting() == waiting && ended + waiting == sent.len()
    })
    .await;
    let held = stats.snapshot().store_load().expect("Redis is a store").calls_in_flight as u64;
    proxy.hold(false);
    let (mut passed, mut failed) = (HashMap::new(), 0);
    for request in sent {
        match request.await.unwrap() {
            (key, StatusCode::OK) => *passed.entry(key).or_default() += 1,
            (_, status) => failed += u64::from(status == StatusCode::SERVICE_UNAVAILABLE),
        }
    }
    Burst { passed, failed, held, calls: calls(&server) - before }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_passes_no_limit_although_failures_are_allowed() {
    for (requests, keys) in [(2_000, 50), (5_000, 1)] {
        let Burst { passed, failed, .. } = burst(patient().max_in_flight(1_024), requests, keys, 1_024).await;
        assert!(passed.values().all(|passed| *passed == 10) && passed.len() == keys as usize, "{passed:?}");
        assert_eq!(failed, requests - 1_024);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_on_one_key_takes_few_calls() {
    let Burst { passed, failed, held, calls } = burst(patient().max_in_flight(10_000), 5_000, 1, 5_000).await;
    assert_eq!((passed[&0], failed), (10, 0));
    // Each call that was held took long, and so lets one call more be under way. When the first check is denied, twice as
    // many are, and all other checks wait. On a busy machine as many again may have been sent before that denial is
    // read. If each check were sent, it would be 80 calls.
    assert!(calls <= 4 * held && held < 10, "{calls} calls, of which {held} were held");
}

#[test]
fn limiter_is_used_from_a_runtime_that_is_not_its_own() {
    let multi = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let current = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (server, own) = (Server::start(), multi());
    let limiter = own.block_on(connect(&server));
    let policy = policy("runtimes", lasting(1_000));
    let checks = async || {
        for _ in 0..20 {
            assert!(passes(&limiter, &policy, "a").await);
        }
    };
    for other in [&multi(), &current] {
        other.block_on(checks());
    }
    own.shutdown_background();
    let began = tokio::time::Instant::now();
    current.block_on(async {
        eventually("checks fail once the runtime has ended", async || {
            take(&limiter, &policy, "a", 1).await.is_err_and(|error| error.kind() == StoreErrorKind::Unavailable)
        })
        .await;
        for _ in 0..2_000 {
            let error = take(&limiter, &policy, "a", 1).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        }
    });
    // Twenty seconds are the deadline of one check.
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    assert_eq!(limiter.waiting(), 0);
}

/// A queue has one refund under way at a time, and the others wait for its end.
#[test]
fn queued_refunds_end_when_the_runtime_has_ended() {
    const SLOTS: u64 = 2_000;
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (server, own, other) = (Server::start(), runtime(), runtime());
    let proxy = other.block_on(async { Proxy::start(server.port()) });
    let limiter = own.block_on(connected(patient(), &proxy.url()));
    let hour = Duration::from_secs(3_600);
    let policy = policy("queue", Quota::leaky_queue(1, hour).and_then(|quota| quota.queue(SLOTS)).unwrap());
    other.block_on(async {
        let mut slots = Vec::new();
        for _ in 0..SLOTS {
            let mut decision = take(&limiter, &policy, "all", 1).await.unwrap();
            slots.extend(decision.charge_mut(0).and_then(|charge| charge.take_receipt()));
        }
        proxy.hold(true);
        let refund = |slot| limiter.refund(vec![Refund::new(policy.clone(), key("all"), slot)]);
        // Slots that do not lie side by side are refunded one by one.
        let refunds: Vec<_> = slots.into_iter().rev().step_by(2).map(refund).collect();
        eventually("one is under way", async || limiter.waiting() == 1).await;
        own.shutdown_background();
        for refund in refunds {
            let ended = tokio::time::timeout(LONG, refund).await.expect("no refund waits for ever");
            assert_eq!(ended.unwrap_err().kind(), StoreErrorKind::Unavailable);
        }
        eventually("nothing waits", async || limiter.waiting() == 0).await;
    });
}

/// The accounts of a connection that is slow, stops, loses answers and ends: no unit is admitted
/// that is not counted, and at most one call's checks are counted for nothing for each lost answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accounts_are_exact_behind_a_bad_connection() {
    const TASKS: u64 = 16;
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let deadline = Duration::from_millis(300);
    let limiter = connected(RedisLimiter::builder().max_denials(0).deadline(deadline), &proxy.url()).await;
    let direct = connected(patient(), &server.url()).await;
    let policy = policy("accounts", lasting(1_000_000));
    for fault in [None, Some(Fault::Lose), Some(Fault::Cut(20)), Some(Fault::Reset), Some(Fault::Repeat)] {
        let (stop, name) = (Arc::new(std::sync::atomic::AtomicBool::new(false)), format!("{fault:?}"));
        let admitted = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let (limiter, policy, stop, name) = (limiter.clone(), policy.clone(), Arc::clone(&stop), name.clone());
                let admitted = Arc::clone(&admitted);
                tokio::spawn(async move {
                    let mut failed = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let began = tokio::time::Instant::now();
                        match take(&limiter, &policy, &name, 1).await {
                            Ok(decision) => {
                                admitted.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
                            }
                            Err(_) => failed += 1,
                        }
                        assert!(began.elapsed() < LONG, "a check hangs");
                        sleep(Duration::from_millis(1)).await;
                    }
                    failed
                })
            })
            .collect();
        for _ in 0..5 {
            match &fault {
                // Answers are late, but within the deadline.
                None => {
                    proxy.hold(true);
                    sleep(deadline / 10).await;
                    proxy.hold(false);
                }
                Some(fault) => proxy.fault(fault.clone()),
            }
            sleep(deadline / 5).await;
        }
        proxy.behave();
        let before = admitted.load(Ordering::Relaxed);
        eventually("checks are admitted again", async || admitted.load(Ordering::Relaxed) > before).await;
        stop.store(true, Ordering::Relaxed);
        let mut failed = 0;
        for task in tasks {
            failed += task.await.expect("no check panics");
        }
        eventually("nothing waits", async || limiter.waiting() == 0).await;
        let (used, admitted) = (used(&direct, &policy, &name).await, admitted.load(Ordering::Relaxed));
        assert!((admitted..=admitted + failed).contains(&used), "{name}: {used}, {admitted}, {failed}");
    }
}
