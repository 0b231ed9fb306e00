//! Retries around a layer are charged for each attempt, and retries inside it once, in every mode.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::retry::{Policy as Retries, RetryLayer};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, Timer},
    key,
    limiter::{Blocks, Meters},
    observe::{Outcome, OutcomeKind},
};

use crate::support::waiting::Skipping;

const MINUTE: Duration = Duration::from_secs(60);

type Answer = Response<Body>;

/// Retries requests that were not served, up to this number.
#[derive(Clone)]
struct Again(u32);

impl<B> Retries<Request<String>, Response<B>, Infallible> for Again {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Request<String>, answer: &mut Result<Response<B>, Infallible>) -> Option<Ready<()>> {
        let served = answer.as_ref().is_ok_and(|response| response.status().is_success());
        if served || self.0 == 0 {
            return None;
        }
        self.0 -= 1;
        Some(ready(()))
    }

    fn clone_request(&mut self, request: &Request<String>) -> Option<Request<String>> {
        let mut copy = Request::new(String::new());
        copy.extensions_mut().clone_from(request.extensions());
        Some(copy)
    }
}

/// A service that fails this many times before it serves.
fn failing(
    times: u64,
) -> impl Service<Request<String>, Response = Answer, Error = Infallible, Future = Ready<Result<Answer, Infallible>>> + Clone
{
    let left = Arc::new(AtomicU64::new(times));
    service_fn(move |_: Request<String>| {
        let mut response = Response::new(Body::empty());
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        ready(Ok(response))
    })
}

fn memory() -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap()
}

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

fn client(limit: u64) -> Rule {
    rule("client", Quota::fixed_window(limit, MINUTE).unwrap())
}

fn layer(limiter: &MemoryLimiter, rule: impl Into<RuleOf>) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(limiter.clone(), rule.into().0, key::global()).expose_outcome(true)
}

/// A rule, or a policy turned into one.
struct RuleOf(Rule);

impl From<Rule> for RuleOf {
    fn from(rule: Rule) -> Self {
        Self(rule)
    }
}

impl From<Policy> for RuleOf {
    fn from(policy: Policy) -> Self {
        Self(Rule::from(policy))
    }
}

fn used(limiter: &MemoryLimiter, policy: &Policy) -> u64 {
    policy.quota().capacity() - limiter.peek_one(policy, &Key::global(), 0).remaining()
}

/// Sends a request that is retried around the layer, to a service that fails this many times.
async fn around(layer: RateLimitLayer<MemoryLimiter>, attempts: u32, failures: u64) -> Answer {
    let stack = ServiceBuilder::new().layer(RetryLayer::new(Again(attempts - 1))).layer(layer);
    stack.service(failing(failures)).oneshot(Request::new(String::new())).await.unwrap()
}

/// Sends a request that is retried inside the layer, to a service that fails this many times.
async fn within(layer: RateLimitLayer<MemoryLimiter>, attempts: u32, failures: u64) -> Answer {
    let again = RetryLayer::new(Again(attempts - 1)).layer(failing(failures));
    layer.layer(again).oneshot(Request::new(String::new())).await.unwrap()
}

fn kind(answer: &Answer) -> OutcomeKind {
    answer.extensions().get::<Outcome>().unwrap().kind()
}

#[tokio::test]
async fn retries_are_charged_once_inside_a_layer_and_each_around_it() {
    for (mode, third) in [
        (Mode::Enforce, OutcomeKind::Limited),
        (Mode::Degrade, OutcomeKind::Degraded),
        (Mode::Shadow, OutcomeKind::ShadowLimited),
    ] {
        let (one, each) = (memory(), memory());
        let rule = || client(2).mode(mode);
        let answer = within(layer(&one, rule()), 3, 2).await;
        assert_eq!(
            (answer.status(), kind(&answer), used(&one, &client(2).policies()[0])),
            (StatusCode::OK, OutcomeKind::Allowed, 1)
        );
        // Two attempts fail and are charged. The third exceeds the quota and is not charged.
        let answer = around(layer(&each, rule()), 3, 2).await;
        assert_eq!((answer.status() == StatusCode::OK, kind(&answer)), (mode != Mode::Enforce, third));
        assert_eq!(used(&each, &client(2).policies()[0]), 2, "in {mode:?}");
    }
}

#[tokio::test]
async fn refunded_attempts_leave_one_charge() {
    let limiter = memory();
    let rule = client(2).refund_when(|response| response.status.is_server_error());
    let answer = around(layer(&limiter, rule), 5, 4).await;
    assert_eq!((answer.status(), used(&limiter, &client(2).policies()[0])), (StatusCode::OK, 1));
}

#[tokio::test]
async fn retries_are_metered_once_inside_a_layer_and_each_around_it() {
    let meter = || Policy::new("over", Quota::meter(10, 60 * MINUTE).unwrap()).unwrap();
    for (attempts_metered, is_around) in [(4, true), (1, false)] {
        let limiter = memory();
        let rule = || client(1).overage(meter().name(), *meter().quota()).unwrap();
        assert!(limiter.take_one(&client(1).policies()[0], &Key::global(), 1).is_allowed());
        let asked = layer(&limiter, rule());
        let answer = if is_around { around(asked, 4, 3).await } else { within(asked, 4, 3).await };
        assert_eq!((answer.status(), kind(&answer)), (StatusCode::OK, OutcomeKind::Overage));
        let meters = Meters::new(limiter, meter()).unwrap();
        assert_eq!(meters.usage(&Key::global()).await.unwrap(), attempts_metered);
    }
}

#[tokio::test]
async fn client_that_retries_at_once_blocks_itself() {
    let block = || Policy::new("block", Quota::block(3, MINUTE, 10 * MINUTE).unwrap()).unwrap();
    let limiter = memory();
    assert!(limiter.take_one(&client(1).policies()[0], &Key::global(), 1).is_allowed());
    let answer = around(layer(&limiter, client(1).block(block().name(), *block().quota()).unwrap()), 5, 0).await;
    assert_eq!((answer.status(), kind(&answer)), (StatusCode::TOO_MANY_REQUESTS, OutcomeKind::Blocked));
    assert_eq!(answer.headers()["retry-after"], "600");
    let blocks = Blocks::new(limiter, block()).unwrap();
    assert_eq!(blocks.blocked_for(&Key::global()).await.unwrap(), Some(10 * MINUTE));
}

#[tokio::test]
async fn retries_wait_once_inside_a_queue_and_each_around_it() {
    let queue = || rule("queue", Quota::leaky_queue(60, 60 * MINUTE).unwrap().queue(5).unwrap());
    for (minutes, places, is_around) in [(3, 4, true), (0, 1, false)] {
        let (limiter, timer) = (memory(), Skipping::default());
        let asked = layer(&limiter, queue()).timer(timer.clone());
        let answer = if is_around { around(asked, 4, 3).await } else { within(asked, 4, 3).await };
        assert_eq!(answer.status(), StatusCode::OK);
        // The limiter's clock stands still: the first departs at once, and each further one a
        // minute later.
        let expected: u32 = (0..=minutes).sum();
        assert_eq!(timer.now(), expected * MINUTE, "around: {is_around}");
        assert_eq!(used(&limiter, &queue().policies()[0]), places);
    }
}

#[tokio::test]
async fn outer_layer_keeps_its_charge_whatever_attempts_do() {
    for room in [0, 1] {
        let meter = || Policy::new("over", Quota::meter(10, 60 * MINUTE).unwrap()).unwrap();
        let limiter = memory();
        let outer = layer(&limiter, client(1).overage(meter().name(), *meter().quota()).unwrap());
        let inner = RateLimitLayer::new(memory(), rule("inner", Quota::per_hour(2)), key::global());
        let stack = ServiceBuilder::new().layer(outer).layer(RetryLayer::new(Again(2))).layer(inner);
        // The first request uses up the outer quota, so the second one is metered.
        let service = stack.service(failing(if room == 0 { 1 } else { 0 }));
        assert_eq!(service.clone().oneshot(Request::new(String::new())).await.unwrap().status(), StatusCode::OK);
        let meters = Meters::new(limiter, meter()).unwrap();
        let answer = service.clone().oneshot(Request::new(String::new())).await.unwrap();
        assert_eq!(answer.status() == StatusCode::OK, room == 1);
        assert_eq!(meters.usage(&Key::global()).await.unwrap(), 1);
    }
}
