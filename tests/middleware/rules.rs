//! Rules: which requests they apply to, what they charge, and what happens to a request without a
//! key.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Head, Headers, Key, MemoryLimiter, MissingKey, Mode, OnError, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::{FallbackLimiter, Limiter},
    middleware::{Access, AccessList},
    observe::{LimiterEvent, Observed, Observer, Outcome, OutcomeKind},
};

use crate::support::{Broken, Scripted, memory, name_outcome};

async fn send<L: Limiter + 'static>(layer: &RateLimitLayer<L>, request: Request<Body>) -> Response<Body> {
    layer.layer(tower::service_fn(name_outcome)).oneshot(request).await.unwrap()
}

fn get(uri: &str) -> Request<Body> {
    Request::builder().uri(uri).body(Body::default()).unwrap()
}

fn with(name: &'static str, value: &str) -> Request<Body> {
    Request::builder().header(name, value).body(Body::default()).unwrap()
}

fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(name, Quota::per_minute(limit)).unwrap()
}

fn outcome<B>(response: &Response<B>) -> OutcomeKind {
    response.extensions().get::<Outcome>().expect("the outcome is there").kind()
}

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
        self.0.lock().unwrap().push(outcome.kind().as_str().to_owned());
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().push(format!("{event:?}"));
    }
}

#[tokio::test]
async fn several_policies_are_one_all_or_nothing_decision() {
    let limiter = Scripted::new();
    let layer = RateLimitLayer::new(limiter.clone(), rule("wide", 10), key::global())
        .and(rule("narrow", 1), key::header("x-user"));
    assert_eq!(send(&layer, with("x-user", "ann")).await.status(), StatusCode::OK);
    let refused = send(&layer, with("x-user", "ann")).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(limiter.used(), 2, "the refused request took nothing");
    let status = refused.extensions().get::<Outcome>().unwrap();
    assert_eq!(status.violated().map(|status| status.policy().name()).collect::<Vec<_>>(), ["narrow"]);
    assert_eq!(send(&layer, with("x-user", "bob")).await.status(), StatusCode::OK);
    assert!(limiter.takes().iter().all(|take| take.len() == 2), "one call for each request");
}

#[tokio::test]
async fn header_fields_are_on_allowed_responses_too() {
    let layer = RateLimitLayer::new(Scripted::new(), rule("api", 10), key::global());
    let response = send(&layer, get("/")).await;
    let field = response.headers()["ratelimit"].to_str().unwrap();
    assert!(field.contains("\"api\"") && field.contains("r=9"), "{field}");
    assert!(!response.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn rule_applies_only_when_its_predicate_holds() {
    let limiter = Scripted::new();
    let search = rule("search", 1).when(|request| request.uri.path().starts_with("/search"));
    let layer = RateLimitLayer::new(limiter.clone(), search, key::global()).expose_outcome(true);
    let exempt = send(&layer, get("/home")).await;
    assert_eq!((exempt.status(), outcome(&exempt)), (StatusCode::OK, OutcomeKind::Exempt));
    assert!(exempt.headers().keys().all(|name| name == "seen"), "{:?}", exempt.headers());
    assert!(limiter.takes().is_empty());
    assert_eq!(send(&layer, get("/search?q=a")).await.status(), StatusCode::OK);
    assert_eq!(send(&layer, get("/search?q=a")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn request_without_a_key_is_refused_and_not_charged() {
    let limiter = Scripted::new();
    let layer = RateLimitLayer::new(limiter.clone(), rule("all", 10), key::global())
        .and(rule("user", 10), key::header("x-user"));
    let refused = send(&layer, get("/")).await;
    assert_eq!((refused.status(), outcome(&refused)), (StatusCode::BAD_REQUEST, OutcomeKind::KeyMissing));
    assert!(limiter.takes().is_empty());
}

#[tokio::test]
async fn requests_without_a_key_can_share_a_key_of_their_own() {
    let limiter = Scripted::new();
    let layer =
        RateLimitLayer::new(limiter.clone(), rule("user", 1).missing_key(MissingKey::Shared), key::header("x-user"));
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::OK);
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let shared = limiter.takes()[0][0].1.clone();
    let absent: Option<u8> = None;
    let others =
        [Key::global(), Key::of("").unwrap(), Key::of([0_u8; 0]).unwrap(), Key::of(key::OrAbsent(absent)).unwrap()];
    assert!(!others.contains(&shared));
}

#[tokio::test]
async fn rule_can_exempt_requests_without_a_key() {
    let limiter = Scripted::new();
    let user = rule("user", 0).missing_key(MissingKey::Exempt);
    let layer = RateLimitLayer::new(limiter.clone(), rule("all", 1), key::global()).and(user, key::header("x-user"));
    assert_eq!(send(&layer, with("x-user", "ann")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::OK);
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn cost_of_zero_passes_and_too_high_a_cost_never_does() {
    let limiter = Scripted::new();
    let cost = |request: &tower_ratelimit::Head<'_>| match request.uri.path() {
        "/free" => 0,
        "/dear" => u64::MAX,
        _ => 3,
    };
    let layer = RateLimitLayer::new(limiter.clone(), rule("units", 3).cost(cost), key::global());
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::OK);
    assert_eq!(send(&layer, get("/free")).await.status(), StatusCode::OK);
    let refused = send(&layer, get("/dear")).await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!refused.headers().contains_key("retry-after"), "no wait helps");
    assert_eq!(limiter.used(), 3);
    assert_eq!(limiter.takes().iter().map(|take| take[0].2).collect::<Vec<_>>(), [3, 0, u64::MAX]);
}

#[tokio::test]
async fn policy_whose_name_is_taken_is_numbered_and_apart() {
    let limiter = Scripted::new();
    let layer = RateLimitLayer::new(limiter.clone(), Quota::per_minute(1), key::global())
        .and(Quota::per_minute(1), key::global())
        .and(Rule::from(Quota::per_hour(1)), key::global());
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::OK);
    let names: Vec<_> = limiter.takes()[0].iter().map(|charge| charge.0.clone()).collect();
    assert_eq!(names, ["1-per-minute", "1-per-minute-2", "1-per-hour"]);
}

#[tokio::test]
async fn preflight_requests_are_exempt_if_that_is_asked_for() {
    let preflight = || {
        let request = Request::builder().method(Method::OPTIONS).header("origin", "https://example.com");
        request.header("access-control-request-method", "PUT").body(Body::default()).unwrap()
    };
    let layer = RateLimitLayer::new(Scripted::new(), rule("api", 0), key::global());
    assert_eq!(send(&layer, preflight()).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let layer = layer.exempt_preflight(true);
    assert_eq!(send(&layer, preflight()).await.status(), StatusCode::OK);
    let mut plain = preflight();
    plain.headers_mut().remove("access-control-request-method");
    assert_eq!(send(&layer, plain).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn failing_limiter_refuses_by_default_and_is_observed() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        limiter.fail(true);
        let log = Log::default();
        let layer = RateLimitLayer::new(limiter, rule("api", 1), key::global()).observer(log.clone());
        let refused = send(&layer, get("/")).await;
        assert_eq!((refused.status(), outcome(&refused)), (StatusCode::SERVICE_UNAVAILABLE, OutcomeKind::FailedClosed));
        assert_eq!(log.take(), ["Failed { error: \"the store is away: the cable is cut\" }", "failed_closed"]);

        let layer = layer.on_error(OnError::Allow).expose_outcome(true);
        let passed = send(&layer, get("/")).await;
        assert_eq!((passed.status(), outcome(&passed)), (StatusCode::OK, OutcomeKind::FailedOpen));
        assert_eq!(log.take(), ["Failed { error: \"the store is away: the cable is cut\" }", "failed_open"]);
    }
}

#[tokio::test]
async fn observer_sees_every_outcome() {
    let log = Log::default();
    let layer = RateLimitLayer::new(Scripted::new(), rule("api", 1), key::header("x-user")).observer(log.clone());
    for request in [with("x-user", "ann"), with("x-user", "ann"), get("/")] {
        send(&layer, request).await;
    }
    assert_eq!(log.take(), ["allowed", "limited", "key_missing"]);
}

/// Collects what an observer saw of a request: the action, its head, and the keys of two policies.
#[derive(Clone, Default)]
struct Heads(Arc<Mutex<Vec<String>>>);

impl Observer for Heads {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let (kind, head) = (observed.outcome().kind().as_str(), observed.head());
        let keyed = ["api", "user", "other"].map(|policy| observed.key(policy).is_some());
        let ann = observed.key("user") == Some(&Key::of("ann").unwrap());
        self.0.lock().unwrap().push(format!("{kind} {} {} {keyed:?} {ann}", head.method, head.uri));
    }
}

#[tokio::test]
async fn observer_sees_the_head_and_the_keys_by_every_way() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        let heads = Heads::default();
        let layer = |user: Rule| {
            RateLimitLayer::new(limiter.clone(), rule("api", 100), key::global())
                .and(user, key::header("x-user"))
                .observer(heads.clone())
        };
        let list = AccessList::new();
        list.set_key("bob", Access::Deny);
        let request = |user: &str| Request::get("/way?x=1").header("x-user", user).body(Body::default()).unwrap();
        let user = |limit, mode| rule("user", limit).mode(mode);
        send(&layer(user(100, Mode::Enforce)), request("ann")).await;
        send(&layer(user(0, Mode::Enforce)), request("ann")).await;
        send(&layer(user(0, Mode::Degrade)), request("ann")).await;
        send(&layer(user(100, Mode::Enforce)), Request::get("/way?x=1").body(Body::default()).unwrap()).await;
        send(&layer(user(1, Mode::Enforce)).access(&list, key::header("x-user")), request("bob")).await;
        let overflowing = layer(user(0, Mode::Enforce)).overflow(tower::service_fn(name_outcome));
        overflowing.layer(tower::service_fn(name_outcome)).oneshot(request("ann")).await.unwrap();
        let (head, _) = request("ann").into_parts();
        assert!(layer(user(0, Mode::Enforce)).admit(&head).await.is_err());
        assert!(layer(user(100, Mode::Enforce)).admit(&head).await.is_ok());
        limiter.fail(true);
        send(&layer(user(100, Mode::Enforce)).on_error(OnError::Allow), request("ann")).await;
        limiter.fail(false);
        let (both, none) = ("GET /way?x=1 [true, true, false] true", "GET /way?x=1 [false, false, false] false");
        let expected = [
            format!("allowed {both}"),
            format!("limited {both}"),
            format!("degraded {both}"),
            format!("key_missing {none}"),
            format!("denied {none}"),
            format!("overflowed {both}"),
            format!("limited {both}"),
            format!("allowed {both}"),
            format!("failed_open {both}"),
        ];
        assert_eq!(*heads.0.lock().unwrap(), expected);
    }
}

#[tokio::test]
async fn observer_in_an_arc_serves_a_layer_and_its_limiter() {
    let log = Arc::new(Log::default());
    let first = Scripted::new();
    first.fail(true);
    let limiter = FallbackLimiter::new(first, MemoryLimiter::new(), NonZeroU32::MIN).observer(Arc::clone(&log));
    let layer = RateLimitLayer::new(limiter, rule("api", 1), key::global()).observer(Arc::clone(&log));
    send(&layer, get("/")).await;
    assert_eq!(log.take(), ["FellBack { error: \"the store is away: the cable is cut\" }", "allowed"]);
}

#[tokio::test]
async fn observed_shows_no_keys_or_headers() {
    struct Shown;
    impl Observer for Shown {
        fn on_outcome(&self, observed: &Observed<'_>) {
            let shown = format!("{observed:?}");
            assert!(shown.contains("/path") && !shown.contains("secret"), "{shown}");
        }
    }
    let layer = RateLimitLayer::new(Scripted::new(), rule("api", 1), key::header("x-user")).observer(Shown);
    let request = Request::get("/path?token=secret").header("x-user", "secret").body(Body::default()).unwrap();
    send(&layer, request).await;
}

#[tokio::test]
async fn outcome_is_exposed_on_refusals_and_elsewhere_on_request() {
    let plain = RateLimitLayer::new(Scripted::new(), rule("api", 1), key::global());
    let response = send(&plain, get("/")).await;
    assert!(response.extensions().get::<Outcome>().is_none() && !response.headers().contains_key("seen"));
    assert_eq!(outcome(&send(&plain, get("/")).await), OutcomeKind::Limited);

    let exposing = RateLimitLayer::new(Scripted::new(), rule("api", 1), key::global()).expose_outcome(true);
    let response = send(&exposing, get("/")).await;
    assert_eq!(outcome(&response), OutcomeKind::Allowed);
    assert_eq!(response.headers()["seen"], "allowed");
}

#[tokio::test]
async fn inner_refusal_is_the_outcome_that_a_response_keeps() {
    let inner = RateLimitLayer::new(Scripted::new(), rule("inner", 0), key::global());
    let outer = RateLimitLayer::new(Scripted::new(), rule("outer", 9), key::global()).expose_outcome(true);
    let service = outer.layer(inner.layer(tower::service_fn(name_outcome)));
    let response = service.oneshot(get("/")).await.unwrap();
    assert_eq!(outcome(&response), OutcomeKind::Limited);
}

#[tokio::test]
async fn later_answer_is_treated_as_an_immediate_one() {
    let limiter = Scripted::new().later();
    let layer = RateLimitLayer::new(limiter, rule("api", 1), key::global()).expose_outcome(true);
    let passed = send(&layer, get("/")).await;
    assert_eq!((passed.status(), outcome(&passed)), (StatusCode::OK, OutcomeKind::Allowed));
    assert!(passed.headers().contains_key("ratelimit"));
    let refused = send(&layer, get("/")).await;
    assert_eq!((refused.status(), outcome(&refused)), (StatusCode::TOO_MANY_REQUESTS, OutcomeKind::Limited));
}

#[tokio::test]
async fn limiter_that_breaks_its_contract_breaks_nothing_else() {
    for charges in [0, 1, 5] {
        for allowed in [true, false] {
            let layer = RateLimitLayer::new(Broken(allowed, charges), rule("api", 1), key::global());
            let expected = if allowed { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
            assert_eq!(send(&layer, get("/")).await.status(), expected);
        }
    }
}

#[tokio::test]
async fn hostile_input_is_charged_or_refused_and_never_panics() {
    let limiter = Scripted::new();
    let layer =
        RateLimitLayer::new(limiter.clone(), rule("a", 1_000_000).missing_key(MissingKey::Shared), key::cookie("s"))
            .and(rule("b", 1_000_000).missing_key(MissingKey::Shared), key::bearer_token())
            .and(rule("c", 1_000_000).missing_key(MissingKey::Shared), key::host())
            .and(rule("d", 1_000_000).missing_key(MissingKey::Shared), key::header("x"))
            .and(
                rule("e", 1_000_000).missing_key(MissingKey::Shared),
                key::client_ip(key::TrustedProxies::count(3).unwrap().forwarded()),
            )
            .and(rule("f", 1_000_000).missing_key(MissingKey::Shared), key::both(key::path(), key::method()));
    let names = ["cookie", "authorization", "host", "x", "forwarded"];
    let megabyte = vec![b'k'; 1 << 20];
    let values: [&[u8]; 9] =
        [b"", b"\xff\xfe", b"\"", b"s=\"\\", b"Bearer \xff", b":::", b",;=,;=", b"for=\"[", &megabyte];
    let mut sent = 0;
    for value in values {
        let mut request = get("/");
        for name in names {
            request.headers_mut().insert(name, HeaderValue::from_bytes(value).unwrap());
        }
        assert_eq!(send(&layer, request).await.status(), StatusCode::OK);
        sent += 1;
        assert_eq!(limiter.used(), 6 * sent, "each rule charged each request");
    }
    let mut request = get("/");
    for line in 0..10_000 {
        request.headers_mut().append(names[line % names.len()], HeaderValue::from_static("for=1.2.3.4; s=1"));
    }
    assert_eq!(send(&layer, request).await.status(), StatusCode::OK);
    assert_eq!(limiter.used(), 6 * (sent + 1));
}

#[test]
fn changing_a_layer_leaves_its_clones_as_they_were() {
    let first = RateLimitLayer::new(Scripted::new(), rule("one", 1), key::global());
    let second = first.clone().and(rule("two", 1), key::global());
    assert!(!format!("{first:?}").contains("two"));
    assert!(format!("{second:?}").contains("two"));
}

fn field(response: &Response<Body>, name: &str) -> String {
    response.headers()[name].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn rule_states_the_unit_of_its_quotas() {
    let rule = |name| rule(name, 60);
    let quotas = [Quota::per_minute(60), Quota::per_hour(600)];
    for (rule, expected) in [
        (rule("a").cost(|_| 2), r#""a";q=60;w=60"#),
        (rule("a").unit("requests").unwrap(), r#""a";q=60;w=60"#),
        (rule("a").unit("content-bytes").unwrap().cost(|_| 2), r#""a";q=60;qu="content-bytes";w=60"#),
        (rule("a").unit(r#"own "unit""#).unwrap(), r#""a";q=60;qu="own \"unit\"";w=60"#),
        // A rule that is settled by the body counts bytes by default.
        (rule("a").settle_by_body(), r#""a";q=60;qu="content-bytes";w=60"#),
        (rule("a").settle_by_body().unit("pages").unwrap(), r#""a";q=60;qu="pages";w=60"#),
        (rule("a").unit("pages").unwrap().settle_by_body(), r#""a";q=60;qu="pages";w=60"#),
        (
            Rule::all_of("a", quotas).unwrap().unit("tokens").unwrap(),
            r#""a-60-per-minute";q=60;qu="tokens";w=60, "a-600-per-hour";q=600;qu="tokens";w=3600"#,
        ),
        (Rule::plans("a", quotas, |_| 1).unwrap().unit("tokens").unwrap(), r#""a";q=600;qu="tokens";w=3600"#),
    ] {
        let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global());
        assert_eq!(field(&send(&layer, get("/")).await, "ratelimit-policy"), expected);
    }
    // A policy that is renamed keeps its unit.
    let tokens = || rule("a").unit("tokens").unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), tokens(), key::global()).and(tokens(), key::global());
    let expected = r#""a";q=60;qu="tokens";w=60, "a-2";q=60;qu="tokens";w=60"#;
    assert_eq!(field(&send(&layer, get("/")).await, "ratelimit-policy"), expected);
    for unit in ["", "größe", "a\nb", &"x".repeat(129)] {
        let error = rule("a").unit(unit).unwrap_err().to_string();
        assert!(error.contains("unit") && error.contains("ASCII"), "{error}");
    }
}

#[tokio::test]
async fn partition_is_named_only_if_it_is_asked_for() {
    let layer = |headers| {
        RateLimitLayer::new(MemoryLimiter::new(), rule("a", 60), key::header("x-api-key"))
            .and(rule("b", 60), key::header("x-tenant"))
            .headers(headers)
    };
    let request = || {
        let request = Request::builder().header("x-api-key", "secret").header("x-tenant", "acme");
        request.body(Body::default()).unwrap()
    };
    let plain = field(&send(&layer(Headers::draft_11()), request()).await, "ratelimit");
    assert_eq!(plain, r#""a";r=59;t=59, "b";r=59;t=59"#);
    let named = Headers::draft_11().partition_keys(|policy, key| {
        let tenant = (policy.name() == "b").then_some(key)?;
        assert!(tenant.as_bytes().ends_with(b"acme"));
        Some(b"acme".to_vec())
    });
    let named = field(&send(&layer(named), request()).await, "ratelimit");
    assert_eq!(named, r#""a";r=59;t=59, "b";r=59;t=59;pk=:YWNtZQ==:"#);
}

#[tokio::test]
async fn request_whose_partition_key_panics_is_served_without_it() {
    let headers = Headers::draft_11().partition_keys(|_, _| panic!("the closure panics"));
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule("a", 2), key::global()).headers(headers);
    for (status, left) in [(200, "\"a\";r=1;t=30"), (200, "\"a\";r=0;t=30"), (429, "\"a\";r=0;t=30")] {
        let response = send(&layer, get("/")).await;
        assert_eq!((response.status().as_u16(), field(&response, "ratelimit")), (status, left.to_owned()));
    }
}

// Rules with one extractor.

static READS: AtomicUsize = AtomicUsize::new(0);

/// Only an extractor that captures nothing is shared.
fn client(request: &Head<'_>) -> Option<HeaderValue> {
    READS.fetch_add(1, Ordering::Relaxed);
    request.headers.get("client").cloned()
}

#[tokio::test]
async fn rules_with_one_extractor_take_the_key_once() {
    let posts = rule("posts", 1).when(|request| request.method == "POST");
    let shared = rule("shared", 9).missing_key(MissingKey::Shared);
    let limiter = memory(&ManualClock::new());
    let layer = RateLimitLayer::new(limiter.clone(), posts, client)
        .and(rule("all", 2), client)
        .and(rule("all", 9), client)
        .and(rule("user", 2), |request| request.headers.get("user").cloned());
    let asked = async |method: Method, client: &'static str, user: &'static str| {
        let request = Request::builder().method(method).header("client", client).header("user", user);
        READS.store(0, Ordering::Relaxed);
        let response = send(&layer, request.body(Body::default()).unwrap()).await;
        (response.status().as_u16(), READS.load(Ordering::Relaxed))
    };
    assert_eq!(asked(Method::POST, "a", "1").await, (200, 1));
    assert_eq!(asked(Method::POST, "a", "2").await, (429, 1));
    assert_eq!(asked(Method::GET, "a", "1").await, (200, 1), "the rule that does not apply takes no key");
    assert_eq!(asked(Method::GET, "a", "2").await, (429, 1));
    assert_eq!(asked(Method::POST, "b", "1").await, (429, 1), "the user's rule has its own extractor");
    assert_eq!(asked(Method::POST, "b", "2").await, (200, 1));

    let layer = RateLimitLayer::new(limiter, shared, client).and(rule("reject", 9), client);
    assert_eq!(send(&layer, get("/")).await.status(), StatusCode::BAD_REQUEST, "the shared key is the first rule's");
}
