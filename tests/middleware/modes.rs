//! The modes of a rule: enforce refuses, degrade passes and informs the service, shadow only
//! reports.

use std::convert::Infallible;
use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response, StatusCode};
use proptest::prelude::*;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Headers, Key, MemoryLimiter, Mode, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::Limiter,
    middleware::{Jitter, ModeSwitch},
    observe::{Observed, Observer, Outcome, OutcomeKind},
    quota::{Anchor, Oldest},
};

use crate::support::{self, Scripted, config, name_outcome};

async fn send<L: Limiter + 'static>(layer: &RateLimitLayer<L>, user: Option<&str>) -> Response<Body> {
    let mut request = Request::new(Body::default());
    if let Some(user) = user {
        request.headers_mut().insert("x-user", HeaderValue::from_str(user).unwrap());
    }
    layer.layer(tower::service_fn(name_outcome)).oneshot(request).await.unwrap()
}

fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(name, Quota::per_minute(limit)).unwrap()
}

fn memory() -> (MemoryLimiter, ManualClock) {
    let clock = ManualClock::new();
    (support::memory(&clock), clock)
}

/// The observed outcomes, with the exceeded policies and those near their limit.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Observer for Log {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        let names = |names: Vec<&str>| names.join(",");
        let exceeded = names(outcome.exceeded().map(|status| status.policy().name()).collect());
        let near = outcome.policies().iter().filter(|status| status.is_near());
        let near = names(near.map(|status| status.policy().name()).collect());
        self.0.lock().unwrap().push(format!("{} over[{exceeded}] near[{near}]", outcome.kind().as_str()));
    }
}

#[tokio::test]
async fn shadow_rule_passes_and_shows_in_the_outcome_only() {
    let (limiter, _) = memory();
    let log = Log::default();
    let layer = RateLimitLayer::new(limiter, rule("api", 1).mode(Mode::Shadow), key::global()).observer(log.clone());
    for _ in 0..2 {
        let response = send(&layer, None).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().is_empty(), "clients are not told of a limit that is not there yet");
        assert!(response.extensions().get::<Outcome>().is_none());
    }
    assert_eq!(log.take(), ["allowed over[] near[]", "shadow_limited over[api] near[]"]);
}

#[tokio::test]
async fn degrading_rule_passes_and_informs_the_service() {
    let (limiter, _) = memory();
    let layer = RateLimitLayer::new(limiter, rule("api", 1).mode(Mode::Degrade), key::global());
    let first = send(&layer, None).await;
    assert!(!first.headers().contains_key("seen") && first.extensions().get::<Outcome>().is_none());
    let second = send(&layer, None).await;
    assert_eq!((second.status(), &second.headers()["seen"]), (StatusCode::OK, &HeaderValue::from_static("degraded")));
    let outcome = second.extensions().get::<Outcome>().expect("its response has it too");
    assert_eq!((outcome.kind(), outcome.violated().count(), outcome.exceeded().count()), (OutcomeKind::Degraded, 0, 1));
    assert_eq!(second.headers()["ratelimit"], "\"api\";r=0;t=60", "what is left is told as it is");
    assert!(!second.headers().contains_key("retry-after"));
}

/// A cache would serve the degraded response to clients within their quota.
#[tokio::test]
async fn degraded_response_is_stored_only_if_the_service_says_so() {
    for own in [None, Some("max-age=60")] {
        let service = tower::service_fn(move |_: Request<Body>| {
            let mut response = Response::new(Body::default());
            let own = own.map(HeaderValue::from_static);
            own.into_iter().for_each(|own| drop(response.headers_mut().insert("cache-control", own)));
            ready(Ok::<_, Infallible>(response))
        });
        for rule in [rule("api", 1).mode(Mode::Degrade), rule("api", 1).mode(Mode::Degrade).settle_by_usage()] {
            let layer = RateLimitLayer::new(memory().0, rule, key::global());
            for expected in [own, own.or(Some("no-store"))] {
                let response = layer.layer(service).oneshot(Request::new(Body::default())).await.unwrap();
                let told = response.headers().get("cache-control").map(|value| value.to_str().unwrap());
                assert_eq!((response.status(), told), (StatusCode::OK, expected));
            }
        }
    }
}

#[tokio::test]
async fn refusal_by_an_enforcing_rule_charges_no_rule() {
    let (limiter, _) = memory();
    let shadow = rule("shadow", 9);
    let layer = RateLimitLayer::new(limiter.clone(), shadow.clone().mode(Mode::Shadow), key::global())
        .and(rule("degrade", 1).mode(Mode::Degrade), key::global())
        .and(rule("enforce", 2), key::global());
    let kinds = ["degraded", "degraded"];
    assert!(!send(&layer, None).await.headers().contains_key("seen"));
    assert_eq!(send(&layer, None).await.headers()["seen"], kinds[0]);
    let refused = send(&layer, None).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let outcome = refused.extensions().get::<Outcome>().unwrap();
    assert_eq!(outcome.violated().map(|status| status.policy().name()).collect::<Vec<_>>(), ["enforce"]);
    assert_eq!(outcome.binding().unwrap().policy().name(), "enforce");
    assert!(!refused.headers()["ratelimit"].to_str().unwrap().contains("shadow"));
    assert_eq!(limiter.peek_one(&shadow.policies()[0], &Key::global(), 1).remaining(), 6, "9, less 2, less the peek's");
}

#[derive(Clone)]
struct Own;

#[tokio::test]
async fn refusal_carries_its_outcome_and_no_request_extensions() {
    let layer = RateLimitLayer::new(memory().0, rule("api", 1), key::global());
    for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let mut request = Request::new(Body::default());
        request.extensions_mut().insert(Own);
        let response = layer.layer(tower::service_fn(name_outcome)).oneshot(request).await.unwrap();
        assert_eq!(response.status(), status);
        assert!(response.extensions().get::<Own>().is_none());
        assert_eq!(response.extensions().len(), usize::from(status != StatusCode::OK));
    }
}

#[tokio::test]
async fn jitter_spreads_refused_clients_and_is_stable_for_each() {
    let jitter = Headers::default().jitter(Jitter::percent(100));
    let quota = Quota::fixed_window(1, Duration::from_secs(1_000)).unwrap();
    let layer = RateLimitLayer::new(memory().0, quota, key::header("x-user")).headers(jitter);
    let mut told = std::collections::BTreeSet::new();
    for user in 0..20 {
        let user = Some(user.to_string());
        assert_eq!(send(&layer, user.as_deref()).await.status(), StatusCode::OK);
        let first = send(&layer, user.as_deref()).await.headers()["retry-after"].clone();
        assert_eq!(send(&layer, user.as_deref()).await.headers()["retry-after"], first);
        told.insert(first.to_str().unwrap().to_owned());
    }
    assert!(told.len() > 10, "{told:?}");
}

#[tokio::test]
async fn mode_switch_loses_no_state_while_requests_come() {
    let (limiter, _) = memory();
    let mode = ModeSwitch::new(Mode::Shadow);
    let layer = RateLimitLayer::new(limiter, rule("api", 3).mode(&mode), key::global());
    for _ in 0..3 {
        assert_eq!(send(&layer, None).await.status(), StatusCode::OK);
    }
    assert_eq!(mode.set(Mode::Enforce), Mode::Shadow);
    assert_eq!(send(&layer, None).await.status(), StatusCode::TOO_MANY_REQUESTS, "what passed in shadow was charged");
    mode.set(Mode::Degrade);
    assert_eq!(send(&layer, None).await.headers()["seen"], "degraded");
    mode.set(Mode::Shadow);
    assert_eq!(send(&layer, None).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn milder_mode_of_layer_and_rule_holds() {
    let (limiter, _) = memory();
    let whole = ModeSwitch::default();
    let layer = RateLimitLayer::new(limiter, rule("enforce", 0), key::global())
        .and(rule("degrade", 0).mode(Mode::Degrade), key::global())
        .mode(whole.clone())
        .expose_outcome(true);
    assert_eq!(send(&layer, None).await.status(), StatusCode::TOO_MANY_REQUESTS);
    whole.set(Mode::Degrade);
    assert_eq!(send(&layer, None).await.headers()["seen"], "degraded");
    whole.set(Mode::Shadow);
    assert_eq!(send(&layer, None).await.headers()["seen"], "shadow_limited");
}

#[tokio::test]
async fn missing_key_refuses_in_enforce_mode_only() {
    for (mode, kind) in [(Mode::Shadow, "shadow_limited"), (Mode::Degrade, "degraded")] {
        let (limiter, _) = memory();
        let alone = RateLimitLayer::new(limiter.clone(), rule("user", 1).mode(mode), key::header("x-user"))
            .expose_outcome(true);
        assert_eq!(send(&alone, None).await.headers()["seen"], kind);
        let layer = alone.and(rule("all", 1), key::global());
        assert_eq!(send(&layer, None).await.headers()["seen"], kind);
        assert_eq!(send(&layer, None).await.status(), StatusCode::TOO_MANY_REQUESTS);
        let enforced = layer.and(rule("user", 1), key::header("x-user"));
        assert_eq!(send(&enforced, None).await.status(), StatusCode::BAD_REQUEST);
    }
}

#[tokio::test]
async fn failing_limiter_refuses_only_what_a_rule_could_refuse() {
    let limiter = Scripted::new();
    limiter.fail(true);
    let shadow = RateLimitLayer::new(limiter, rule("api", 1).mode(Mode::Shadow), key::global()).expose_outcome(true);
    assert_eq!(send(&shadow, None).await.headers()["seen"], "failed_open");
    let with_another = shadow.and(rule("all", 1), key::global());
    assert_eq!(send(&with_another, None).await.status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn request_without_a_key_stays_degraded_if_the_limiter_fails() {
    let limiter = Scripted::new();
    limiter.fail(true);
    let layer = RateLimitLayer::new(limiter, rule("user", 1).mode(Mode::Degrade), key::header("x-user"))
        .and(rule("all", 1).mode(Mode::Shadow), key::global())
        .expose_outcome(true);
    assert_eq!(send(&layer, None).await.headers()["seen"], "degraded");
    assert_eq!(send(&layer, Some("ann")).await.headers()["seen"], "failed_open");
}

#[tokio::test]
async fn warning_comes_at_the_configured_percentage() {
    let (limiter, clock) = memory();
    let log = Log::default();
    let layer = RateLimitLayer::new(limiter, rule("api", 4).warn_at_percent(25), key::global()).observer(log.clone());
    for _ in 0..5 {
        send(&layer, None).await;
    }
    let expected = ["allowed over[] near[]"; 2].into_iter();
    let near = ["allowed over[] near[api]", "allowed over[] near[api]", "limited over[api] near[api]"];
    assert_eq!(log.take(), expected.chain(near).collect::<Vec<_>>());
    clock.advance(Duration::from_secs(60));
    send(&layer, None).await;
    assert_eq!(log.take(), ["allowed over[] near[]"]);
}

#[tokio::test]
async fn warning_is_compared_without_rounding() {
    // One of 3 is 33.3 percent, which is above 33 percent and not above 34.
    for (percent, expected) in [(33, "allowed over[] near[]"), (34, "allowed over[] near[api]")] {
        let (limiter, _) = memory();
        let log = Log::default();
        let rule = rule("api", 3).warn_at_percent(percent);
        let layer = RateLimitLayer::new(limiter, rule, key::global()).observer(log.clone());
        send(&layer, None).await;
        send(&layer, None).await;
        assert_eq!(log.take().pop().unwrap(), expected, "{percent}");
    }
}

#[tokio::test]
async fn refunded_request_over_a_quota_is_reported_as_such() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        let rule = rule("api", 1).mode(Mode::Degrade).refund_when(|response| response.headers.contains_key("seen"));
        let layer = RateLimitLayer::new(limiter.clone(), rule, key::global());
        send(&layer, None).await;
        let response = send(&layer, None).await;
        let outcome = response.extensions().get::<Outcome>().unwrap();
        assert_eq!((outcome.kind(), outcome.exceeded().count()), (OutcomeKind::Degraded, 1));
        assert_eq!(response.headers()["ratelimit"], "\"api\";r=0;t=3", "nothing was taken, so nothing is back");
        assert_eq!(limiter.used(), 1);
    }
}

#[tokio::test]
async fn degradation_reaches_the_service_through_inner_layers() {
    for degrading in [0, 1] {
        let (limiter, _) = memory();
        let mode = |at| if at == degrading { Mode::Degrade } else { Mode::Enforce };
        let layer = |name: &str, at, limit| {
            RateLimitLayer::new(limiter.clone(), rule(name, limit).mode(mode(at)), key::global()).expose_outcome(true)
        };
        let limits = if degrading == 0 { [0, 9] } else { [9, 0] };
        let (outer, inner) = (layer("outer", 0, limits[0]), layer("inner", 1, limits[1]));
        let service = outer.layer(inner.layer(tower::service_fn(name_outcome)));
        let response = service.oneshot(Request::new(Body::default())).await.unwrap();
        assert_eq!(response.headers()["seen"], "degraded");
        assert_eq!(response.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Degraded);
    }
}

fn quotas() -> Vec<Quota> {
    let second = Duration::from_secs(1);
    vec![
        Quota::token_bucket(7, second).unwrap().burst(3).unwrap(),
        Quota::step_bucket(3, second).unwrap().anchor(Anchor::FirstRequest).unwrap(),
        Quota::gcra(5, second).unwrap(),
        Quota::leaky_bucket(3, second).unwrap(),
        Quota::leaky_queue(3, second).unwrap().queue(4).unwrap(),
        Quota::fixed_window(3, second).unwrap(),
        Quota::fixed_window(3, second).unwrap().count_denied().unwrap(),
        Quota::sliding_window(4, second).unwrap().oldest(Oldest::Counted).unwrap(),
        Quota::sliding_window(4, second).unwrap().buckets(4).unwrap().count_denied().unwrap(),
        Quota::sliding_log(4, second).unwrap(),
        Quota::sliding_log(4, second).unwrap().count_denied().unwrap(),
    ]
}

/// Returns what the only policy decided, without the receipt.
#[derive(Clone, Default)]
struct Decisions(Arc<Mutex<Vec<String>>>);

impl Observer for Decisions {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        self.0.lock().unwrap().push(format!("{:?}", outcome.policies()[0].decision()));
    }
}

/// Advances the time, sets the mode and sends a request of this cost. Returns the policy's
/// decisions.
fn played(quota: Quota, steps: impl Iterator<Item = (u64, u64, Mode)>) -> Vec<String> {
    let (limiter, clock) = memory();
    let (mode, decisions) = (ModeSwitch::default(), Decisions::default());
    let rule = Rule::from(quota).mode(&mode).cost(|request| *request.extensions.get().unwrap());
    let layer = RateLimitLayer::new(limiter, rule, key::global()).observer(decisions.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (wait, cost, now) in steps {
        clock.advance(Duration::from_micros(wait));
        mode.set(now);
        let mut request = Request::new(Body::default());
        request.extensions_mut().insert(cost);
        runtime.block_on(layer.layer(tower::service_fn(name_outcome)).oneshot(request)).unwrap();
    }
    std::mem::take(&mut *decisions.0.lock().unwrap())
}

fn modes() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Enforce), Just(Mode::Degrade), Just(Mode::Shadow)]
}

proptest! {
    #![proptest_config(config(16))]

    /// For any algorithm, any traffic, and any switch of the mode on the way.
    #[test]
    fn alone_a_policy_decides_alike_in_each_mode(
        steps in proptest::collection::vec((0_u64..700_000, 0_u64..6, modes()), 1..40),
    ) {
        for quota in quotas() {
            let in_mode = |mode| played(quota, steps.iter().map(|(wait, cost, _)| (*wait, *cost, mode)));
            let enforced = in_mode(Mode::Enforce);
            prop_assert_eq!(enforced.len(), steps.len());
            prop_assert_eq!(&enforced, &in_mode(Mode::Shadow), "{}", quota);
            prop_assert_eq!(&enforced, &in_mode(Mode::Degrade), "{}", quota);
            prop_assert_eq!(&enforced, &played(quota, steps.iter().copied()), "{}", quota);
        }
    }
}
