//! Quotas that requests bring: each customer has its own, under one policy name.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Headers, Key, MemoryLimiter, Mode, OnError, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, MonotonicClock},
    key,
    limiter::{FallbackLimiter, Limiter},
    middleware::{InFlight, Overrides, Usage},
    observe::{NotCharged, Observer, Outcome, OutcomeKind, SetupWarning, SetupWarningKind, Stats},
};

use crate::support::{Scripted, memory, waiting::Skipping};

const HOUR: Duration = Duration::from_secs(3_600);

/// The database's entry of a customer.
#[derive(Clone, Copy)]
struct Customer(Quota);

fn quota_of(request: &tower_ratelimit::Head<'_>) -> Option<Quota> {
    request.extensions.get::<Customer>().map(|customer| customer.0)
}

fn customer() -> Rule {
    Rule::quota_from("customer", quota_of).unwrap()
}

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::from("not over while it is not read"))))
}

async fn send<L: Limiter + 'static>(layer: &RateLimitLayer<L>, request: Request<Body>) -> Response<Body> {
    layer.layer(tower::service_fn(answer)).oneshot(request).await.unwrap()
}

fn of(user: &'static str, quota: impl Into<Option<Quota>>) -> Request<Body> {
    let mut request = Request::new(Body::default());
    request.headers_mut().insert("user", http::HeaderValue::from_static(user));
    if let Some(quota) = quota.into() {
        request.extensions_mut().insert(Customer(quota));
    }
    request
}

#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<SetupWarning>>>);

impl Observer for Warnings {
    fn on_setup_warning(&self, warning: &SetupWarning) {
        self.0.lock().unwrap().push(warning.clone());
    }
}

fn header<'a>(response: &'a Response<Body>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// Returns `RateLimit-Policy` and `RateLimit`.
async fn headers<L: Limiter + 'static>(layer: &RateLimitLayer<L>, request: Request<Body>) -> (String, String) {
    let response = send(layer, request).await;
    (header(&response, "ratelimit-policy").to_owned(), header(&response, "ratelimit").to_owned())
}

#[tokio::test]
async fn own_quota_is_in_headers_and_used_units_stay_when_it_changes() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer(), key::header("user"));
    let window = |limit| Quota::fixed_window(limit, HOUR).unwrap();
    for (user, quota, policy, left) in [
        ("a", Quota::per_hour(7_300), "q=7300;w=3600", 7_299),
        ("b", Quota::per_hour(5), "q=5;w=3600", 4),
        ("a", Quota::per_hour(100), "q=100;w=3600", 98),
        ("a", window(10), "q=10;w=3600", 7),
        ("a", Quota::per_hour(1_000_000), "q=1000000;w=3600", 999_996),
        ("b", Quota::per_hour(5), "q=5;w=3600", 3),
    ] {
        let (policies, limits) = headers(&layer, of(user, quota)).await;
        assert_eq!(policies, format!("\"customer\";{policy}"));
        assert!(limits.starts_with(&format!("\"customer\";r={left};")), "{limits} for {quota}");
    }
    // Used units are seen without a request, too.
    let (policy, status) = layer.peek(&Key::of("a").unwrap()).await.unwrap().remove(0);
    assert!(policy.has_quota_of_request());
    assert_eq!(status.limit() - status.remaining(), 4);
    layer.reset(&Key::of("a").unwrap()).await.unwrap();
    assert_eq!(headers(&layer, of("a", Quota::per_hour(50))).await.1, "\"customer\";r=49;t=3528");
}

#[tokio::test]
async fn own_quota_refuses_and_names_the_request_s_quota() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer(), key::header("user"));
    for at in 0..4 {
        let response = send(&layer, of("a", Quota::per_hour(3))).await;
        assert_eq!(response.status() == StatusCode::OK, at < 3);
        if at == 3 {
            assert_eq!(header(&response, "retry-after"), "1200");
            assert_eq!(header(&response, "ratelimit-policy"), "\"customer\";q=3;w=3600");
            let status = response.extensions().get::<Outcome>().unwrap().policies()[0].clone();
            assert_eq!(status.policy().quota(), &Quota::per_hour(3));
            assert!(!status.policy().has_quota_of_request());
        }
    }
    // The same request passes at once when the customer has more.
    assert_eq!(send(&layer, of("a", Quota::per_hour(4))).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn request_without_a_quota_is_not_charged_and_explained_so() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer(), key::header("user"));
    for request in [of("a", None), Request::new(Body::default())] {
        let (parts, _) = request.into_parts();
        let explanation = layer.explain(&parts).await;
        assert!(explanation.passes());
        assert_eq!(explanation.rules()[0].not_charged(), Some(NotCharged::NoQuota));
        assert!(explanation.to_string().contains("customer: does not apply: the request brings no quota"));
        let response = send(&layer, Request::from_parts(parts, Body::default())).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().get("ratelimit").is_none());
    }
    let (parts, _) = of("a", Quota::per_hour(3)).into_parts();
    let explanation = layer.explain(&parts).await;
    assert!(explanation.to_string().contains("3 per hour, token bucket: 2 of 3 left"), "{explanation}");
    assert_eq!(layer.peek(&Key::of("a").unwrap()).await.unwrap()[0].1.reset_after(), Some(Duration::ZERO));
}

#[tokio::test]
async fn own_quota_that_a_limiter_does_not_support_is_reported() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer(), key::header("user"));
    assert_eq!(send(&layer, of("a", Quota::per_hour(3))).await.status(), StatusCode::OK);
    assert_eq!(layer.check(), Ok(()));
    let dear = Quota::sliding_log(1_000_000, HOUR).unwrap();
    for _ in 0..2 {
        let (parts, _) = of("a", dear).into_parts();
        assert!(layer.explain(&parts).await.failure().is_some());
        let response = send(&layer, Request::from_parts(parts, Body::default())).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let warning = layer.check().unwrap_err();
        assert_eq!(warning.kind(), SetupWarningKind::UnsupportedQuota);
        assert!(warning.to_string().contains("customer"), "{warning}");
    }
    assert_eq!(send(&layer, of("a", Quota::per_hour(3))).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn own_quotas_are_charged_together_with_other_rules() {
    let login = customer().block("customer-block", Quota::block(2, HOUR, HOUR).unwrap()).unwrap();
    let everyone = Rule::new("all", Quota::per_hour(1_000)).unwrap();
    let layer =
        RateLimitLayer::new(memory(&ManualClock::new()), everyone, key::global()).and(login, key::header("user"));
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let response = send(&layer, of("a", Quota::per_hour(1))).await;
        let kind = response.extensions().get::<Outcome>().map(Outcome::kind);
        statuses.push((header(&response, "ratelimit-policy").to_owned(), kind));
    }
    let listed = "\"all\";q=1000;w=3600, \"customer\";q=1;w=3600".to_owned();
    let kinds = [None, Some(OutcomeKind::Limited), Some(OutcomeKind::Blocked), Some(OutcomeKind::Blocked)];
    assert_eq!(statuses, kinds.map(|kind| (listed.clone(), kind)));
    // A refused request took nothing of the shared quota.
    assert_eq!(layer.peek(&Key::global()).await.unwrap()[0].1.remaining(), 999);
    let free = send(&layer, of("b", None)).await;
    assert_eq!(header(&free, "ratelimit-policy"), "\"all\";q=1000;w=3600");
}

#[tokio::test]
async fn own_quotas_are_settled_refunded_and_shadowed() {
    let tokens = customer().cost(|_| 10).settle_by_usage();
    let limiter = memory(&ManualClock::new());
    let layer = RateLimitLayer::new(limiter.clone(), tokens, key::header("user"));
    let uses = |units| {
        layer.layer(tower::service_fn(move |request: Request<Body>| {
            request.extensions().get::<Usage>().unwrap().set(units);
            ready(Ok::<_, Infallible>(Response::new(Body::empty())))
        }))
    };
    let quota = Quota::per_hour(100);
    let left = |limiter: &tower_ratelimit::MemoryLimiter| {
        limiter.peek_one(&Policy::new("customer", quota).unwrap(), &Key::of("a").unwrap(), 0).remaining()
    };
    drop(uses(4).oneshot(of("a", quota)).await.unwrap());
    assert_eq!(left(&limiter), 96);
    drop(uses(30).oneshot(of("a", quota)).await.unwrap());
    assert_eq!(left(&limiter), 66);
    let shadow = RateLimitLayer::new(limiter.clone(), customer().cost(|_| 70).mode(Mode::Shadow), key::header("user"));
    assert_eq!(send(&shadow, of("a", quota)).await.status(), StatusCode::OK);
    assert_eq!(left(&limiter), 66);
    let refunds = RateLimitLayer::new(limiter.clone(), customer().refund_when(|_| true), key::header("user"));
    assert_eq!(send(&refunds, of("a", quota)).await.status(), StatusCode::OK);
    assert_eq!(left(&limiter), 66);
    let admitting = RateLimitLayer::new(limiter.clone(), customer(), key::header("user"));
    let (parts, _) = of("a", quota).into_parts();
    admitting.admit(&parts).await.unwrap().refund();
    assert_eq!(left(&limiter), 66);
}

#[tokio::test]
async fn override_gives_a_single_key_its_own_quota_for_a_time() {
    let clock = ManualClock::new();
    let overrides = Overrides::new().clock(clock.clone());
    let rule = Rule::quota_from("customer", overrides.or(key::header("user"), quota_of)).unwrap();
    let layer = RateLimitLayer::new(memory(&clock), rule, key::header("user"));
    let quota = async |user| headers(&layer, of(user, Quota::per_day(5))).await.0;
    let usual = "\"customer\";q=5;w=86400";
    assert_eq!((quota("a").await.as_str(), quota("b").await.as_str()), (usual, usual));
    overrides.set("a", Quota::per_hour(7_300), HOUR).unwrap();
    assert_eq!(quota("a").await, "\"customer\";q=7300;w=3600");
    assert_eq!(quota("b").await, usual);
    clock.advance(HOUR);
    assert_eq!(quota("a").await, usual);
}

#[tokio::test]
async fn own_quotas_may_be_of_requests_in_flight() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer(), key::header("user"));
    let first = send(&layer, of("a", Quota::concurrent(1))).await;
    let refused = send(&layer, of("a", Quota::concurrent(1))).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let problem = refused.into_body().collect().await.unwrap().to_bytes();
    let problem = std::str::from_utf8(&problem).unwrap();
    assert!(problem.contains("\"detail\":\"1 of 1 requests are in progress\""), "{problem}");
    assert_eq!(send(&layer, of("a", Quota::concurrent(2))).await.status(), StatusCode::OK);
    assert_eq!(send(&layer, of("a", Quota::per_hour(2))).await.status(), StatusCode::OK, "rates are another count");
    layer.reset(&Key::of("a").unwrap()).await.unwrap();
    assert_eq!(send(&layer, of("a", Quota::concurrent(1))).await.status(), StatusCode::OK);
    drop(first);
}

/// A layer watches its first requests, and prepares them in another way.
#[tokio::test]
async fn handle_of_places_comes_with_requests_that_bring_such_a_limit() {
    let limiter = Scripted::new();
    let rule = customer().cost(|request| u64::from(!request.headers.contains_key("free")));
    let layer = RateLimitLayer::new(limiter.clone(), rule, key::header("user")).on_error(OnError::Allow);
    let has_handle = |request: Request<Body>| {
        let has_handle = request.extensions().get::<InFlight>().is_some();
        ready(Ok::<_, Infallible>(Response::new(Body::from(has_handle.to_string()))))
    };
    let service = layer.layer(tower::service_fn(has_handle));
    let send = async |quota: Option<Quota>, is_free: bool| {
        let mut request = of("a", quota);
        if is_free {
            request.headers_mut().insert("free", http::HeaderValue::from_static(""));
        }
        let response = service.clone().oneshot(request).await.unwrap();
        response.into_body().collect().await.unwrap().to_bytes()
    };
    for at in 0..600 {
        limiter.fail(at % 2 == 1);
        for is_free in [false, true] {
            assert_eq!(send(Some(Quota::concurrent(1_000)), is_free).await, "true", "{at}, {is_free}");
            assert_eq!(send(Some(Quota::per_hour(1_000)), is_free).await, "false", "{at}, {is_free}");
            assert_eq!(send(None, is_free).await, "false", "{at}, {is_free}");
        }
    }
}

#[tokio::test]
async fn own_queue_without_a_timer_is_reported() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer(), key::header("user"));
    assert_eq!(layer.check(), Ok(()));
    send(&layer, of("a", Quota::leaky_queue(1, HOUR).unwrap())).await;
    assert_eq!(layer.check().unwrap_err().kind(), SetupWarningKind::NoTimer);
}

/// Sends requests with these quotas. Returns the warnings that the layer's observer got.
async fn warnings_of<L: Limiter + 'static>(layer: RateLimitLayer<L>, quotas: &[Quota]) -> Vec<SetupWarning> {
    let warnings = Warnings::default();
    let layer = layer.observer(warnings.clone());
    let service = layer.layer(tower::service_fn(answer));
    for quota in quotas {
        service.clone().oneshot(of("a", *quota)).await.unwrap();
    }
    let reported = warnings.0.lock().unwrap();
    assert_eq!(layer.check().err().as_ref(), reported.first());
    reported.clone()
}

#[tokio::test]
async fn own_quota_is_checked_as_that_of_a_rule() {
    let layer = |rule| RateLimitLayer::new(memory(&ManualClock::new()), rule, key::header("user"));
    let per_minute = Quota::per_minute(60);
    let (indebted, closed) = (per_minute, Quota::per_minute(0));
    let forgetful = per_minute.max_debt(0).unwrap();
    let bytes: Quota = "100 MiB per hour".parse().unwrap();
    let (queue, places) = (Quota::leaky_queue(1, HOUR).unwrap(), Quota::concurrent(5));
    let waits = places.max_wait(HOUR).unwrap();
    let settled = customer().settle_by_usage();
    let by_status = customer().charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    for (rule, quota, found) in [
        (settled.clone(), forgetful, Some((SetupWarningKind::NoDebt, "\"customer\" reserves"))),
        (settled.clone(), indebted, None),
        (settled.clone(), closed, None),
        (settled.clone(), Quota::unlimited(), None),
        (customer(), forgetful, None),
        (customer(), bytes, Some((SetupWarningKind::NoCost, "(100 MiB per hour, token bucket) counts bytes"))),
        (customer().cost(|_| 7), bytes, None),
        (settled, places, Some((SetupWarningKind::NoEffect, "\"customer\" limits requests in flight"))),
        (by_status, places, None), // other customers may have rates
        (customer().until_head(), per_minute, None),
        (customer(), queue, Some((SetupWarningKind::NoTimer, "leaky queue"))),
        (customer(), waits, Some((SetupWarningKind::NoTimer, "lets requests wait"))),
    ] {
        let reported = warnings_of(layer(rule), &[indebted, quota, quota]).await;
        assert_eq!(
            reported.iter().map(SetupWarning::kind).collect::<Vec<_>>(),
            Vec::from_iter(found.map(|found| found.0))
        );
        let text = reported.first().map(SetupWarning::to_string).unwrap_or_default();
        assert!(text.contains(found.map_or("", |found| found.1)), "{text}");
    }
    let evenly = MemoryLimiter::builder().max_keys(1_000).clock(MonotonicClock::new()).build().unwrap();
    let evenly = RateLimitLayer::new(evenly, customer(), key::header("user"));
    let reported = warnings_of(evenly, &[indebted, Quota::per_calendar_month(5)]).await;
    assert!(matches!(&reported[..], [only] if only.kind() == SetupWarningKind::CalendarNotFollowed), "{reported:?}");
    let metered = customer().overage("over", Quota::meter(5, HOUR).unwrap()).unwrap();
    let reported = warnings_of(layer(metered).timer(Skipping::default()), &[indebted, waits]).await;
    assert!(matches!(&reported[..], [only] if only.to_string().contains("metered and never wait")), "{reported:?}");
    let beside = customer().settle_by_usage();
    let beside = RateLimitLayer::new(memory(&ManualClock::new()), beside, key::header("user"))
        .and(Rule::new("all", Quota::per_hour(10_000)).unwrap(), key::global());
    let reported = warnings_of(beside, &[indebted, forgetful]).await;
    assert_eq!(reported.len(), 1, "one of several rules, too: {reported:?}");
}

#[tokio::test]
async fn own_quotas_are_reported_once_however_many_are_wrong() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), customer().settle_by_usage(), key::header("user"));
    let quotas: Vec<Quota> = (1..10_000).map(|limit| Quota::per_minute(limit).max_debt(0).unwrap()).collect();
    assert_eq!(warnings_of(layer, &quotas).await.len(), 1);
}

#[tokio::test]
async fn fallback_gives_each_process_its_share_of_own_quotas() {
    let clock = ManualClock::new();
    let first = Scripted::default();
    first.fail(true);
    let limiter = FallbackLimiter::new(first, memory(&clock), NonZeroU32::new(3).unwrap());
    let layer = RateLimitLayer::new(limiter, customer(), key::header("user"));
    let mut passed = 0;
    while send(&layer, of("a", Quota::per_hour(9))).await.status() == StatusCode::OK {
        passed += 1;
    }
    assert_eq!(passed, 3);
}

#[tokio::test]
async fn statistics_and_layers_know_own_quotas_by_their_name() {
    let stats = Stats::new();
    let limiter = memory(&ManualClock::new());
    let rule = || customer().warn_at_percent(50);
    let layer = RateLimitLayer::new(limiter.clone(), rule(), key::header("user")).observer(stats.clone());
    for limit in [1, 10] {
        for _ in 0..2 {
            send(&layer, of("a", Quota::per_hour(limit))).await;
        }
    }
    let snapshot = stats.snapshot();
    let names: Vec<&str> = snapshot.policies().iter().map(|policy| policy.name()).collect();
    assert_eq!(names, ["customer"]);
    assert_eq!((snapshot.policies()[0].refused(), snapshot.policies()[0].units()), (1, 3));
    // Two layers with own quotas agree, and one with a fixed quota does not.
    let other = RateLimitLayer::new(limiter.clone(), rule(), key::header("user"));
    let _serving = [&layer, &other].map(|layer| layer.layer(tower::service_fn(answer)));
    assert_eq!(other.check(), Ok(()));
    let fixed = Rule::new("customer", Quota::per_hour(5)).unwrap();
    let fixed = RateLimitLayer::new(limiter, fixed, key::header("user")).headers(Headers::none());
    let warning = fixed.check().unwrap_err();
    assert_eq!(warning.kind(), SetupWarningKind::TwoQuotas);
    assert!(warning.to_string().contains("the quota of each request"), "{warning}");
}

#[tokio::test]
async fn nested_layers_have_own_quotas_and_refund_them() {
    let limiter = memory(&ManualClock::new());
    let inner = RateLimitLayer::new(limiter.clone(), customer(), key::header("user"));
    let team = Rule::quota_from("team", |_| Quota::per_hour(9)).unwrap();
    let outer = RateLimitLayer::new(limiter.clone(), team, key::global()).refund_nested(true);
    let service = outer.layer(inner.layer(tower::service_fn(answer)));
    for status in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS, StatusCode::TOO_MANY_REQUESTS] {
        let response = service.clone().oneshot(of("a", Quota::per_hour(1))).await.unwrap();
        assert_eq!(response.status(), status);
        let listed = header(&response, "ratelimit-policy");
        assert_eq!(listed, "\"customer\";q=1;w=3600, \"team\";q=9;w=3600");
    }
    let team = Policy::new("team", Quota::per_hour(9)).unwrap();
    assert_eq!(limiter.peek_one(&team, &Key::global(), 0).remaining(), 8);
}

#[tokio::test]
async fn unlimited_quota_counts_and_never_refuses() {
    let clock = ManualClock::new();
    let limiter = memory(&clock);
    let layer = RateLimitLayer::new(limiter.clone(), customer().cost(|_| 1_000_000), key::header("user"));
    for _ in 0..3 {
        let response = send(&layer, of("a", Quota::unlimited())).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().get("ratelimit").is_none() && response.headers().get("ratelimit-policy").is_none());
    }
    let (parts, _) = of("a", Quota::unlimited()).into_parts();
    let explanation = layer.explain(&parts).await;
    assert!(explanation.to_string().contains("unlimited: 4000000 used in this minute"), "{explanation}");
    let json: serde_json::Value = serde_json::from_str(&explanation.to_json()).unwrap();
    let status = &json["rules"][0]["statuses"][0];
    assert_eq!((&status["limit"], &status["remaining"], &status["used"]), (&().into(), &().into(), &4_000_000.into()));
    let unlimited = Policy::new("customer", Quota::unlimited()).unwrap();
    assert!(limiter.take_one(&unlimited, &Key::of("a").unwrap(), u64::MAX).is_allowed(), "whatever it costs");
    assert!(limiter.take_one(&unlimited, &Key::of("a").unwrap(), u64::MAX).is_allowed());
    clock.advance(Duration::from_secs(60));
    let used = limiter.peek_one(&unlimited, &Key::of("a").unwrap(), 0);
    assert_eq!(used.limit(), used.remaining(), "a minute has begun");
}

#[tokio::test]
async fn unlimited_plan_keeps_the_usage_of_a_minute() {
    let clock = ManualClock::new();
    let plans = [Quota::fixed_window(100, HOUR).unwrap(), Quota::unlimited()];
    let plan = |request: &tower_ratelimit::Head<'_>| usize::from(request.headers.contains_key("large"));
    let rule = Rule::plans("customer", plans, plan).unwrap();
    assert_eq!(rule.policies()[0].quota(), &plans[0], "no plan has to remember what is unlimited");
    let layer = RateLimitLayer::new(memory(&clock), rule, key::header("user"));
    let large = |is_large| {
        let mut request = of("a", None);
        if is_large {
            request.headers_mut().insert("large", http::HeaderValue::from_static("1"));
        }
        request
    };
    for _ in 0..20 {
        send(&layer, large(false)).await;
    }
    for _ in 0..30 {
        assert_eq!(send(&layer, large(true)).await.status(), StatusCode::OK);
    }
    assert!(headers(&layer, large(false)).await.1.starts_with("\"customer\";r=49;"));
    for _ in 0..1_000 {
        assert_eq!(send(&layer, large(true)).await.status(), StatusCode::OK);
    }
    assert_eq!(send(&layer, large(false)).await.status(), StatusCode::TOO_MANY_REQUESTS);
    clock.advance(Duration::from_secs(120));
    assert_eq!(send(&layer, large(false)).await.status(), StatusCode::OK, "that minute no longer counts");
}

#[test]
fn settled_rule_without_a_fixed_limit_is_no_misconfiguration() {
    let own = Rule::quota_from("own", |_| Quota::per_minute(60)).unwrap();
    for rule in [own, Rule::new("unlimited", Quota::unlimited()).unwrap()] {
        let layer = RateLimitLayer::new(tower_ratelimit::MemoryLimiter::new(), rule.settle_by_usage(), key::global());
        assert_eq!(layer.check().map_err(|warning| warning.to_string()), Ok(()));
    }
}
