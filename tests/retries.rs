//! What a request is charged that is tried again: around a layer each attempt is a request of its own, within it all are
//! one. So in every mode.

#[path = "support/waiting.rs"]
mod waiting;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tower::retry::{Policy as Retries, RetryLayer};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::middleware::Body;
use tower_ratelimit::{
    Blocks, Key, ManualClock, MemoryLimiter, Meters, Mode, Outcome, OutcomeKind, Policy, Quota, RateLimitLayer, Rule,
    Timer, key,
};
use waiting::Skipping;

const MINUTE: Duration = Duration::from_secs(60);

type Served = Response<Full<Bytes>>;
type Answer = Response<Body<Full<Bytes>>>;

/// Tries again what was not served, so often.
#[derive(Clone)]
struct Again(u32);

impl<B> Retries<Request<()>, Response<B>, Infallible> for Again {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Request<()>, answer: &mut Result<Response<B>, Infallible>) -> Option<Ready<()>> {
        let served = answer.as_ref().is_ok_and(|response| response.status().is_success());
        if served || self.0 == 0 {
            return None;
        }
        self.0 -= 1;
        Some(ready(()))
    }

    fn clone_request(&mut self, request: &Request<()>) -> Option<Request<()>> {
        let mut copy = Request::new(());
        copy.extensions_mut().clone_from(request.extensions());
        Some(copy)
    }
}

/// A service that fails so often before it serves.
fn failing(
    times: u64,
) -> impl Service<Request<()>, Response = Served, Error = Infallible, Future = Ready<Result<Served, Infallible>>> + Clone
{
    let left = Arc::new(AtomicU64::new(times));
    service_fn(move |_: Request<()>| {
        let mut response = Response::new(Full::default());
        if left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        ready(Ok(response))
    })
}

fn memory() -> MemoryLimiter {
    MemoryLimiter::builder().capacity(1_000).clock(ManualClock::new()).build().unwrap()
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).unwrap()
}

fn client(limit: u64) -> Policy {
    policy("client", Quota::fixed_window(limit, MINUTE).unwrap())
}

fn layer(limiter: &MemoryLimiter, rule: impl Into<RuleOf>) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(limiter.clone(), rule.into().0, key::global()).expose_outcome(true)
}

/// A rule, or a policy as one.
struct RuleOf(Rule);

impl From<Rule> for RuleOf {
    fn from(rule: Rule) -> Self {
        Self(rule)
    }
}

impl From<Policy> for RuleOf {
    fn from(policy: Policy) -> Self {
        Self(Rule::new(policy))
    }
}

fn used(limiter: &MemoryLimiter, policy: &Policy) -> u64 {
    policy.quota().capacity() - limiter.peek_one(policy, &Key::global(), 0).remaining()
}

/// A request that is tried again around the layer, with a service that fails so often.
async fn around(layer: RateLimitLayer<MemoryLimiter>, attempts: u32, failures: u64) -> Answer {
    let stack = ServiceBuilder::new().layer(RetryLayer::new(Again(attempts - 1))).layer(layer);
    stack.service(failing(failures)).oneshot(Request::new(())).await.unwrap()
}

/// The same within it.
async fn within(layer: RateLimitLayer<MemoryLimiter>, attempts: u32, failures: u64) -> Answer {
    let again = RetryLayer::new(Again(attempts - 1)).layer(failing(failures));
    layer.layer(again).oneshot(Request::new(())).await.unwrap()
}

fn kind(answer: &Answer) -> OutcomeKind {
    answer.extensions().get::<Outcome>().unwrap().kind()
}

#[tokio::test]
async fn within_a_layer_all_attempts_are_one_charge_and_around_it_each_is_its_own_in_every_mode() {
    for (mode, third) in [
        (Mode::Enforce, OutcomeKind::Limited),
        (Mode::Degrade, OutcomeKind::Degraded),
        (Mode::Shadow, OutcomeKind::ShadowLimited),
    ] {
        let (one, each) = (memory(), memory());
        let rule = || client(2).mode(mode);
        let answer = within(layer(&one, rule()), 3, 2).await;
        assert_eq!((answer.status(), kind(&answer), used(&one, &client(2))), (StatusCode::OK, OutcomeKind::Allowed, 1));
        // Two fail and are charged; the third is beyond the quota, and takes nothing.
        let answer = around(layer(&each, rule()), 3, 2).await;
        assert_eq!((answer.status() == StatusCode::OK, kind(&answer)), (mode != Mode::Enforce, third));
        assert_eq!(used(&each, &client(2)), 2, "in {mode:?}");
    }
}

#[tokio::test]
async fn attempts_that_fail_and_are_given_back_leave_one_charge() {
    let limiter = memory();
    let rule = client(2).give_back_when(|response| response.status.is_server_error());
    let answer = around(layer(&limiter, rule), 5, 4).await;
    assert_eq!((answer.status(), used(&limiter, &client(2))), (StatusCode::OK, 1));
}

#[tokio::test]
async fn each_attempt_beyond_a_quota_is_metered_around_a_layer_and_one_of_them_within_it() {
    let meter = || policy("over", Quota::meter(10, 60 * MINUTE).unwrap());
    for (attempts_metered, is_around) in [(4, true), (1, false)] {
        let limiter = memory();
        let rule = || client(1).overage(meter()).unwrap();
        assert!(limiter.take_one(&client(1), &Key::global(), 1).is_allowed());
        let asked = layer(&limiter, rule());
        let answer = if is_around { around(asked, 4, 3).await } else { within(asked, 4, 3).await };
        assert_eq!((answer.status(), kind(&answer)), (StatusCode::OK, OutcomeKind::Overage));
        let meters = Meters::new(limiter, meter()).unwrap();
        assert_eq!(meters.usage(&Key::global()).await.unwrap(), attempts_metered);
    }
}

#[tokio::test]
async fn who_tries_again_at_once_when_it_is_refused_blocks_itself() {
    let block = || policy("block", Quota::block(3, MINUTE, 10 * MINUTE).unwrap());
    let limiter = memory();
    assert!(limiter.take_one(&client(1), &Key::global(), 1).is_allowed());
    let answer = around(layer(&limiter, client(1).block(block()).unwrap()), 5, 0).await;
    assert_eq!((answer.status(), kind(&answer)), (StatusCode::TOO_MANY_REQUESTS, OutcomeKind::Blocked));
    assert_eq!(answer.headers()["retry-after"], "600");
    let blocks = Blocks::new(limiter, block()).unwrap();
    assert_eq!(blocks.blocked_for(&Key::global()).await.unwrap(), Some(10 * MINUTE));
}

#[tokio::test]
async fn each_attempt_around_a_queue_waits_for_a_departure_of_its_own_and_those_within_it_for_none() {
    let queue = || policy("queue", Quota::leaky_queue(60, 60 * MINUTE).unwrap().queue(5).unwrap());
    for (minutes, places, is_around) in [(3, 4, true), (0, 1, false)] {
        let (limiter, timer) = (memory(), Skipping::default());
        let asked = layer(&limiter, queue()).delay(timer.clone());
        let answer = if is_around { around(asked, 4, 3).await } else { within(asked, 4, 3).await };
        assert_eq!(answer.status(), StatusCode::OK);
        // The limiter's clock stands still: the first departs at once, each behind it a minute after the last.
        let expected: u32 = (0..=minutes).sum();
        assert_eq!(timer.now(), expected * MINUTE, "around: {is_around}");
        assert_eq!(used(&limiter, &queue()), places);
    }
}

#[tokio::test]
async fn an_outer_layer_keeps_its_charge_whatever_becomes_of_attempts() {
    for room in [0, 1] {
        let meter = || policy("over", Quota::meter(10, 60 * MINUTE).unwrap());
        let limiter = memory();
        let outer = layer(&limiter, client(1).overage(meter()).unwrap());
        let inner = RateLimitLayer::new(memory(), policy("inner", Quota::per_hour(2)), key::global());
        let stack = ServiceBuilder::new().layer(outer).layer(RetryLayer::new(Again(2))).layer(inner);
        // The first request uses up the outer quota, so the second one is metered.
        let service = stack.service(failing(if room == 0 { 1 } else { 0 }));
        assert_eq!(service.clone().oneshot(Request::new(())).await.unwrap().status(), StatusCode::OK);
        let meters = Meters::new(limiter, meter()).unwrap();
        let answer = service.clone().oneshot(Request::new(())).await.unwrap();
        assert_eq!(answer.status() == StatusCode::OK, room == 1);
        assert_eq!(meters.usage(&Key::global()).await.unwrap(), 1);
    }
}
