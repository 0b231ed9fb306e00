//! A `QuotaSwitch` changes a quota while requests come.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, ServiceExt};
use tower_ratelimit::{
    ConfigErrorKind, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::{Charge, Decision, Limiter, Refund, Reply, UnsupportedQuota, UnsupportedQuotaKind},
    middleware::{QuotaSwitch, Usage},
    observe::Outcome,
};

use crate::rules_file::{Interrupt, Interrupted};
use crate::support::{Scripted, memory};

const MINUTE: Duration = Duration::from_secs(60);

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::default()))
}

fn request() -> Request<Body> {
    Request::new(Body::default())
}

async fn send<L: Limiter + Clone>(layer: &RateLimitLayer<L>) -> Response<()> {
    layer.layer(tower::service_fn(answer)).oneshot(request()).await.unwrap().map(drop)
}

fn header<'a>(response: &'a Response<()>, name: &str) -> &'a str {
    response.headers()[name].to_str().unwrap()
}

fn switched(quota: &QuotaSwitch) -> Rule {
    Rule::switched("api", quota).unwrap()
}

/// Returns what is left of the shared quota.
async fn left<L: Limiter + Clone>(layer: &RateLimitLayer<L>) -> u64 {
    layer.peek(&Key::global()).await.unwrap()[0].1.remaining()
}

#[tokio::test]
async fn switch_applies_to_headers_and_existing_services() {
    let quota = QuotaSwitch::new(Quota::per_minute(100));
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global())
        .and(switched(&quota), key::global());
    let (clone, before) = (layer.clone(), layer.layer(tower::service_fn(answer)));
    let names = |layer: &RateLimitLayer<MemoryLimiter>| -> Vec<(String, u64)> {
        layer.policies().iter().map(|policy| (policy.name().to_owned(), policy.quota().limit())).collect()
    };
    let named = |limit| vec![("api".to_owned(), limit), ("api-2".to_owned(), limit)];
    assert_eq!(names(&layer), named(100));
    assert_eq!(header(&send(&layer).await, "ratelimit-policy"), "\"api\";q=100;w=60, \"api-2\";q=100;w=60");

    assert_eq!(quota.clone().set(Quota::per_minute(20)).unwrap(), Quota::per_minute(100));
    assert_eq!(quota.get(), Quota::per_minute(20));
    assert_eq!((names(&layer), names(&clone)), (named(20), named(20)));
    for response in [send(&layer).await, send(&clone).await, before.oneshot(request()).await.unwrap().map(drop)] {
        assert_eq!(header(&response, "ratelimit-policy"), "\"api\";q=20;w=60, \"api-2\";q=20;w=60");
    }
    assert_eq!(left(&layer).await, 16);
    let head = request().into_parts().0;
    assert_eq!(layer.admit(&head).await.unwrap().outcome().policies()[0].decision().limit(), 20);

    // A layer that is built after a change has the current quota.
    let later = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global());
    let rule = switched(&quota);
    quota.set(Quota::per_minute(30)).unwrap();
    let latest = RateLimitLayer::new(memory(&ManualClock::new()), rule, key::global()).expose_outcome(true);
    assert_eq!([&later, &latest].map(|layer| layer.policies()[0].quota().limit()), [30, 30]);
}

#[tokio::test]
async fn switch_keeps_what_was_used_between_all_algorithms() {
    let words = [
        "100 per minute",
        "40 per minute",
        "100 per minute, gcra, burst 50",
        "100 per minute, leaky bucket",
        "100 per minute, step bucket, from the first request",
        "60 per minute, fixed window",
        "100 per minute, from the first request, fixed window",
        "100 per minute, sliding window",
        "100 per minute, 6 buckets, sliding window",
        "60 per hour, sliding log",
    ];
    for from in words {
        for to in words {
            let [from, to]: [Quota; 2] = [from, to].map(|words| words.parse().unwrap());
            let quota = QuotaSwitch::new(from);
            let layer = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global());
            for _ in 0..30 {
                assert_eq!(send(&layer).await.status(), StatusCode::OK);
            }
            quota.set(to).unwrap();
            assert_eq!(left(&layer).await, to.capacity() - 30, "{from} to {to}");
            assert_eq!(send(&layer).await.status(), StatusCode::OK);
            quota.set(from).unwrap();
            assert_eq!(left(&layer).await, from.capacity() - 31, "{from} to {to} and back");
        }
    }
}

#[tokio::test]
async fn switch_to_less_than_was_used_forgets_nothing() {
    let quota = QuotaSwitch::new(Quota::per_minute(100));
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global());
    for _ in 0..80 {
        send(&layer).await;
    }
    quota.set(Quota::per_minute(10)).unwrap();
    assert_eq!(send(&layer).await.status(), StatusCode::TOO_MANY_REQUESTS);
    quota.set(Quota::per_minute(100)).unwrap();
    assert_eq!(left(&layer).await, 20);
}

#[test]
fn limiter_that_panics_keeps_no_other_layer_from_the_quota() {
    let quota = QuotaSwitch::new(Quota::per_minute(5));
    let interrupt: Arc<Mutex<Option<Interrupt>>> = Arc::default();
    let limiter = Interrupted { limiter: memory(&ManualClock::new()), interrupt: Arc::clone(&interrupt) };
    let first = RateLimitLayer::new(limiter, switched(&quota), key::global());
    let second = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global());
    let limits = || [first.policies()[0].quota().limit(), second.policies()[0].quota().limit()];
    assert_eq!(limits(), [5, 5]);
    // It says that it supports the quota, and panics when the layer takes it.
    let then = Arc::clone(&interrupt);
    let panics = || std::panic::resume_unwind(Box::new("the limiter panics"));
    *interrupt.lock().unwrap() = Some(Box::new(move || *then.lock().unwrap() = Some(Box::new(panics))));
    assert_eq!(quota.set(Quota::per_minute(9)).unwrap(), Quota::per_minute(5));
    assert_eq!((limits(), interrupt.lock().unwrap().is_none()), ([5, 9], true));
}

/// Supports buckets only.
#[derive(Clone)]
pub(crate) struct Buckets(pub(crate) Scripted);

impl Limiter for Buckets {
    type Error = <Scripted as Limiter>::Error;
    type Future<T: Send + 'static> = <Scripted as Limiter>::Future<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.0.take(charges)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.0.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Self::Error, Self::Future<()>> {
        self.0.refund(refunds)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Self::Error, Self::Future<()>> {
        self.0.reset(policy, key)
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        if quota.algorithm() == tower_ratelimit::quota::Algorithm::TokenBucket {
            return Ok(());
        }
        Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, "it has buckets only"))
    }
}

#[tokio::test]
async fn switch_refuses_what_cannot_be_and_changes_nothing() {
    let quota = QuotaSwitch::new(Quota::per_minute(5));
    let all = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global());
    let buckets = RateLimitLayer::new(Buckets(Scripted::new()), switched(&quota), key::global());
    let error = quota.set(Quota::sliding_log(9, MINUTE).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Unsupported);
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.ends_with("it has buckets only") && !error.to_string().contains(&source), "{error}: {source}");
    for other in [Quota::block(3, MINUTE, MINUTE).unwrap(), Quota::meter(3, MINUTE).unwrap()] {
        let error = quota.set(other).unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::Combination);
        assert!(error.to_string().contains("use a policy of another name"), "{error}");
    }
    assert_eq!(quota.get(), Quota::per_minute(5));
    assert_eq!([all.policies()[0].quota().limit(), buckets.policies()[0].quota().limit()], [5, 5]);
    // A dropped layer is not asked.
    drop(buckets);
    quota.set(Quota::sliding_log(9, MINUTE).unwrap()).unwrap();
    assert_eq!(all.policies()[0].quota().limit(), 9);
}

#[tokio::test]
async fn switch_in_two_layers_is_no_contradiction() {
    let (limiter, quota) = (memory(&ManualClock::new()), QuotaSwitch::new(Quota::per_minute(5)));
    let layer = || RateLimitLayer::new(limiter.clone(), switched(&quota), key::global());
    let (one, two) = (layer(), layer());
    let on_its_way = one.layer(tower::service_fn(answer)).oneshot(request());
    for limit in [5, 7, 9] {
        quota.set(Quota::per_minute(limit)).unwrap();
        send(&one).await;
        assert!(one.check().is_ok() && two.check().is_ok(), "{:?} {:?}", one.check(), two.check());
    }
    drop(on_its_way);
    let other = RateLimitLayer::new(limiter, Rule::new("api", Quota::per_minute(3)).unwrap(), key::global());
    assert_eq!(other.check().unwrap_err().kind().as_str(), "two-quotas");
}

#[tokio::test]
async fn request_is_settled_after_a_change_and_loses_no_usage() {
    for (from, to, others) in [(10, 1_000, 500), (1_000, 10, 9)] {
        let (limiter, quota) = (memory(&ManualClock::new()), QuotaSwitch::new(Quota::per_minute(from)));
        let layer = RateLimitLayer::new(limiter.clone(), switched(&quota).settle_by_usage(), key::global());
        let given: Arc<Mutex<Option<Usage>>> = Arc::default();
        let service = layer.layer(tower::service_fn(|request: Request<Body>| {
            *given.lock().unwrap() = request.extensions().get().cloned();
            std::future::ready(Ok::<_, Infallible>(Response::new(Body::from("not empty"))))
        }));
        let open = service.oneshot(request()).await.unwrap();
        quota.set(Quota::per_minute(to)).unwrap();
        let other = RateLimitLayer::new(limiter, switched(&quota), key::global());
        for _ in 0..others {
            assert_eq!(send(&other).await.status(), StatusCode::OK);
        }
        let bill = given.lock().unwrap().take().unwrap();
        assert!(bill.set(3));
        drop(open);
        quota.set(Quota::per_minute(1_000)).unwrap();
        assert_eq!(left(&other).await, 1_000 - others - 3, "{from} to {to}");
    }
}

/// Threads charge while another thread changes the quota back and forth.
#[test]
fn requests_see_no_half_of_a_change_and_none_is_lost_or_doubled() {
    const MOST: u64 = 2_000;
    let (small, large) = (Quota::per_hour(10), Quota::per_hour(2_000));
    let quota = QuotaSwitch::new(large);
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), switched(&quota), key::global())
        .and(switched(&quota), key::global())
        .expose_outcome(true);
    let (done, passed, kinds) = (AtomicBool::new(false), AtomicU64::new(0), [const { AtomicU64::new(0) }; 2]);
    let runtime = Arc::new(tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (layer, runtime) = (layer.clone(), Arc::clone(&runtime));
                let (passed, kinds) = (&passed, &kinds);
                scope.spawn(move || {
                    let met = || kinds.iter().all(|kind| kind.load(Ordering::Relaxed) > 0);
                    // The thread that changes the quota may get the processor late.
                    for sent in 0.. {
                        if sent >= 3_000 && met() {
                            break;
                        }
                        let response = runtime.block_on(send(&layer));
                        passed.fetch_add(u64::from(response.status() == StatusCode::OK), Ordering::Relaxed);
                        let limit = response.extensions().get::<Outcome>().unwrap().policies()[0].decision().limit();
                        kinds[usize::from(limit == MOST)].fetch_add(1, Ordering::Relaxed);
                        let policies = format!("\"api\";q={limit};w=3600, \"api-2\";q={limit};w=3600");
                        assert_eq!(header(&response, "ratelimit-policy"), policies);
                    }
                })
            })
            .collect();
        let (quota, done) = (&quota, &done);
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                quota.set(small).unwrap();
                thread::yield_now();
                quota.set(large).unwrap();
                thread::sleep(Duration::from_micros(200));
            }
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        done.store(true, Ordering::Relaxed);
    });
    quota.set(large).unwrap();
    let passed = passed.into_inner();
    let left = runtime.block_on(left(&layer));
    assert_eq!(passed + left, MOST, "{passed} passed");
}

#[tokio::test]
async fn request_is_answered_under_the_quota_it_was_charged_under() {
    let quota = QuotaSwitch::new(Quota::per_minute(10));
    let rule = switched(&quota).refund_when(|response| response.status == StatusCode::INTERNAL_SERVER_ERROR);
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule, key::global()).expose_outcome(true);
    let service = tower::service_fn(move |_: Request<Body>| {
        quota.set(Quota::per_minute(1_000)).unwrap();
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        ready(Ok::<_, Infallible>(response))
    });
    let response = layer.layer(service).oneshot(request()).await.unwrap().map(drop);
    let status = &response.extensions().get::<Outcome>().unwrap().policies()[0];
    assert_eq!(
        (status.policy().quota().limit(), status.decision().limit(), status.decision().remaining()),
        (10, 10, 10)
    );
    assert!(header(&response, "ratelimit").contains("r=10"), "{response:?}");
}

fn fails(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    ready(Ok(response))
}

fn refunded_if_it_fails(rule: Rule) -> Rule {
    rule.refund_when(|response| response.status == StatusCode::INTERNAL_SERVER_ERROR)
}

type Answered = Result<Response<Body>, Infallible>;

/// Returns a service that changes the quota before it answers.
fn during(
    quota: &QuotaSwitch,
    next: Quota,
    then: fn(Request<Body>) -> Ready<Answered>,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone {
    let quota = quota.clone();
    tower::service_fn(move |request: Request<Body>| {
        quota.set(next).unwrap();
        then(request)
    })
}

#[tokio::test]
async fn refund_is_kept_when_the_algorithm_changes() {
    let words = [
        "10 per minute",
        "10 per minute, gcra, burst 10",
        "10 per minute, leaky bucket",
        "10 per minute, leaky queue",
        "10 per minute, step bucket, from the first request",
        "10 per minute, fixed window",
        "10 per hour, from the first request, fixed window",
        "10 per minute, sliding window",
        "10 per minute, 6 buckets, sliding window",
        "10 per hour, sliding log",
    ];
    for from in words {
        for to in words {
            let [from, to]: [Quota; 2] =
                [from.to_owned(), to.replace("10", "1000")].map(|words| words.parse().unwrap());
            let quota = QuotaSwitch::new(from);
            let rule = refunded_if_it_fails(switched(&quota));
            let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule, key::global());
            layer.layer(during(&quota, to, fails)).oneshot(request()).await.unwrap();
            assert_eq!(left(&layer).await, to.capacity(), "{from} to {to}");
        }
    }
}

#[tokio::test]
async fn shares_are_settled_in_the_units_they_were_charged_in() {
    fn costs_six(request: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
        request.extensions().get::<Usage>().unwrap().set(6);
        answer(request)
    }
    let [small, large] = [10, 1_000].map(|limit| Quota::per_minute(limit).in_proportion().unwrap());
    for (rule, then, expected) in [
        (refunded_if_it_fails as fn(Rule) -> Rule, fails as fn(_) -> _, 1_000),
        (Rule::settle_by_usage, costs_six, 400),
    ] {
        let quota = QuotaSwitch::new(small);
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule(switched(&quota)), key::global());
        layer.layer(during(&quota, large, then)).oneshot(request()).await.unwrap();
        assert_eq!(left(&layer).await, expected, "the quota changed");

        // A plan that stays, beside a policy whose quota may change.
        let plans = Rule::plans_in_proportion("api", [Quota::per_minute(10), Quota::per_minute(1_000)], |_| 0);
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule(plans.unwrap()), key::global())
            .and(Rule::switched("other", &quota).unwrap(), key::global());
        layer.layer(tower::service_fn(then)).oneshot(request()).await.unwrap();
        assert_eq!(left(&layer).await, expected / 100, "a plan of the same name has more");
    }
}
