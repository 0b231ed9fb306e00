//! Nested layers are independent. An outer layer that refunds nested refusals charges nothing for a
//! request that an inner limit refuses.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response, StatusCode};
use proptest::prelude::*;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, layer::layer_fn, service_fn};
use tower_ratelimit::{
    Head, Headers, Key, MissingKey, Mode, OnError, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::BoxLimiter,
    middleware::{Access, AccessList, ResetEncoding},
    observe::{Outcome, OutcomeKind},
    quota::Algorithm,
};

use crate::support::{Scripted, config, every_algorithm, memory, refuses_dear};

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;
type Boxed = tower::util::BoxCloneService<Request<Body>, Response<Body>, Infallible>;

/// A place in a stack at which a request can meet with something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Outside of all layers.
    Outside,
    BehindOuter,
    BehindMiddle,
    Handler,
}

/// An event of a request or of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Pass,
    /// The response never comes.
    Linger,
    Panic,
    /// The service is called, and then its caller panics.
    PanicInCall,
    /// A second attempt is made, with the extensions of the first one, for the layer that `then` names.
    Retry,
    /// The request is copied, and the copy is not sent.
    Copy,
}

/// The events of a request at each place, in its extensions.
#[derive(Clone, Debug, Default)]
struct Acts(Vec<(At, Act)>);

fn act(request: &Request<Body>, at: At) -> Act {
    let acts = request.extensions().get::<Acts>();
    let found = acts.and_then(|acts| acts.0.iter().find(|(place, _)| *place == at));
    found.map_or(Act::Pass, |(_, act)| *act)
}

fn request(fields: &[(&'static str, &'static str)]) -> Request<Body> {
    let mut request = Request::new(Body::default());
    for (name, value) in fields {
        request.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    request
}

/// Returns a request that the layer of this name refuses, and to which this happens.
fn asked(refused_by: &'static str, acts: &[(At, Act)]) -> Request<Body> {
    let mut request = request(&[("dear", refused_by)]);
    request.extensions_mut().insert(Acts(acts.to_vec()));
    request
}

/// Middleware that does what the request says, and then builds a new response of the same status.
fn between<S, B>(at: At, inner: S) -> Boxed
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    ServiceExt::<Request<Body>>::boxed_clone(service_fn(move |request: Request<Body>| -> Answer {
        let mut inner = inner.clone();
        let act = act(&request, at);
        let (head, body) = request.into_parts();
        let is_copied = matches!(act, Act::Retry | Act::Copy);
        let again = is_copied.then(|| Request::from_parts(head.clone(), Body::empty()));
        let request = Request::from_parts(head, body);
        let response = inner.call(request);
        if act == Act::PanicInCall {
            resume_unwind(Box::new("middleware panics"));
        }
        Box::pin(async move {
            let mut status = response.await?.status();
            match act {
                Act::Linger => pending().await,
                Act::Panic => resume_unwind(Box::new("middleware panics")),
                Act::Retry => {
                    let mut again = again.unwrap();
                    let then = again.headers_mut().remove("then").unwrap_or(HeaderValue::from_static(""));
                    again.headers_mut().insert("dear", then);
                    status = inner.call(again).await?.status();
                }
                Act::Pass | Act::Copy | Act::PanicInCall => {}
            }
            let mut response = Response::new(Body::default());
            *response.status_mut() = status;
            Ok(response)
        })
    }))
}

/// The innermost service counts the requests that reach it.
#[derive(Clone, Default)]
struct Handler(Arc<AtomicU64>);

impl Handler {
    fn served(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn service(&self) -> Boxed {
        let count = Arc::clone(&self.0);
        ServiceExt::<Request<Body>>::boxed_clone(service_fn(move |request: Request<Body>| -> Answer {
            let (count, act) = (Arc::clone(&count), act(&request, At::Handler));
            Box::pin(async move {
                count.fetch_add(1, Ordering::Relaxed);
                match act {
                    Act::Linger => pending().await,
                    Act::Panic => resume_unwind(Box::new("the handler panics")),
                    _ => Ok(Response::new(Body::default())),
                }
            })
        }))
    }
}

fn hourly(limit: u64) -> Quota {
    Quota::per_hour(limit)
}

fn layer(limiter: &Scripted, name: &'static str) -> RateLimitLayer<Scripted> {
    RateLimitLayer::new(limiter.clone(), refuses_dear(name, hourly(100)), key::global())
}

/// An outer layer that refunds and an inner layer, with middleware in between.
fn two(outer: &Scripted, inner: &Scripted, handler: &Handler) -> Boxed {
    ServiceBuilder::new()
        .layer(layer_fn(|inner| between(At::Outside, inner)))
        .layer(layer(outer, "outer").refund_nested(true))
        .layer(layer_fn(|inner| between(At::BehindOuter, inner)))
        .layer(layer(inner, "inner"))
        .service(handler.service())
}

async fn status(service: &Boxed, fields: &[(&'static str, &'static str)]) -> StatusCode {
    service.clone().oneshot(request(fields)).await.unwrap().status()
}

/// Returns every combination of two limiters that answer at once or later.
fn now_and_later() -> [[Scripted; 2]; 4] {
    let (now, later) = (Scripted::new, || Scripted::new().later());
    [[now(), now()], [later(), now()], [now(), later()], [later(), later()]]
}

/// Runs 10,000 requests through a check between an outer layer by address and an inner one by user.
/// Returns how often the check ran, and the number of each status.
async fn costly_check(outer: Rule, fields: &[(&'static str, &'static str)]) -> (u64, Vec<(u16, u64)>) {
    let (limiter, checks) = (memory(&ManualClock::new()), Handler::default());
    let check = |inner| {
        let (checks, inner) = (checks.clone(), between(At::BehindOuter, inner));
        ServiceExt::<Request<Body>>::boxed_clone(service_fn(move |request| {
            checks.0.fetch_add(1, Ordering::Relaxed);
            inner.clone().oneshot(request)
        }))
    };
    let user = Rule::new("user", hourly(1)).unwrap();
    let stack = ServiceBuilder::new()
        .layer(layer_fn(|inner| between(At::Outside, inner)))
        .layer(RateLimitLayer::new(limiter.clone(), outer, key::global()))
        .layer(layer_fn(check))
        .layer(RateLimitLayer::new(limiter, user, key::header("x-api-key")))
        .service(Handler::default().service());
    let mut statuses = BTreeMap::new();
    for _ in 0..10_000 {
        *statuses.entry(status(&stack, fields).await.as_u16()).or_default() += 1;
    }
    (checks.served(), statuses.into_iter().collect())
}

#[tokio::test]
async fn outer_layer_protects_what_lies_before_an_inner_one() {
    let address = || Rule::new("address", hourly(10)).unwrap();
    let (checks, statuses) = costly_check(address(), &[("x-api-key", "k")]).await;
    assert_eq!((checks, statuses), (10, vec![(200, 1), (429, 9_999)]));
    let (checks, statuses) = costly_check(address(), &[]).await;
    assert_eq!((checks, statuses), (10, vec![(400, 10), (429, 9_990)]));
}

#[tokio::test]
async fn outer_block_closes_for_clients_refused_further_in() {
    let hour = Duration::from_secs(3_600);
    let block = Policy::new("block", Quota::block(3, hour, hour).unwrap()).unwrap();
    let blocking = Rule::new("address", Quota::per_minute(5)).unwrap().block(block.name(), *block.quota()).unwrap();
    let limiter = memory(&ManualClock::new());
    let stack = ServiceBuilder::new()
        .layer(layer_fn(|inner| between(At::Outside, inner)))
        .layer(RateLimitLayer::new(limiter.clone(), blocking, key::global()))
        .layer(RateLimitLayer::new(limiter.clone(), Rule::new("user", hourly(1)).unwrap(), key::global()))
        .service(Handler::default().service());
    for _ in 0..8 {
        status(&stack, &[]).await;
    }
    assert!(!limiter.peek_one(&block, &Key::global(), 0).is_allowed());
}

/// Every outcome of an inner layer, and whether a refunding outer layer refunds.
#[tokio::test]
async fn outer_layer_refunds_only_what_an_inner_limit_refuses() {
    type Fields = &'static [(&'static str, &'static str)];
    type Case = (&'static str, RateLimitLayer<BoxLimiter>, Fields, OutcomeKind, bool);
    let hour = Duration::from_secs(3_600);
    let rule = || refuses_dear("inner", hourly(100));
    let inner = |rule: Rule| RateLimitLayer::new(BoxLimiter::new(memory(&ManualClock::new())), rule, key::global());
    let failing = || {
        let limiter = Scripted::new();
        limiter.fail(true);
        RateLimitLayer::new(BoxLimiter::new(limiter), rule(), key::global())
    };
    let denied = || {
        let list = AccessList::new();
        list.set("10.0.0.0/8", Access::Deny).unwrap();
        let address = IpAddr::from([10, 0, 0, 1]);
        inner(rule()).access(&list, move |_: &Head<'_>| Some(address))
    };
    let block = || Policy::new("block", Quota::block(1, hour, hour).unwrap()).unwrap();
    let unkeyed = |missing| {
        RateLimitLayer::new(
            BoxLimiter::new(memory(&ManualClock::new())),
            rule().missing_key(missing),
            key::header("none"),
        )
    };
    let (plain, dear): (Fields, Fields) = (&[], &[("dear", "inner")]);
    let grpc: Fields = &[("dear", "inner"), ("content-type", "application/grpc"), ("te", "trailers")];
    let cases: Vec<Case> = vec![
        ("allowed", inner(rule()), plain, OutcomeKind::Allowed, false),
        ("limited", inner(rule()), dear, OutcomeKind::Limited, true),
        ("limited, over gRPC", inner(rule()), grpc, OutcomeKind::Limited, true),
        ("blocked", inner(rule().block(block().name(), *block().quota()).unwrap()), dear, OutcomeKind::Blocked, true),
        ("no key", unkeyed(MissingKey::Reject), plain, OutcomeKind::KeyMissing, false),
        ("no key, exempt", unkeyed(MissingKey::Exempt), plain, OutcomeKind::Exempt, false),
        ("denied", denied(), plain, OutcomeKind::Denied, false),
        ("failed closed", failing(), plain, OutcomeKind::FailedClosed, false),
        ("failed open", failing().on_error(OnError::Allow), plain, OutcomeKind::FailedOpen, false),
        ("shadow", inner(rule().mode(Mode::Shadow)), dear, OutcomeKind::ShadowLimited, false),
        ("degraded", inner(rule().mode(Mode::Degrade)), dear, OutcomeKind::Degraded, false),
    ];
    for (case, inner, fields, expected, refunded) in cases {
        for refunds in [true, false] {
            let (outer, handler) = (Scripted::new(), Handler::default());
            let stack = layer(&outer, "outer")
                .refund_nested(refunds)
                .layer(inner.clone().expose_outcome(true).layer(handler.service()));
            let mut request = request(fields);
            *request.method_mut() = http::Method::POST;
            *request.version_mut() = http::Version::HTTP_2;
            let response = stack.oneshot(request).await.unwrap();
            let kind = response.extensions().get::<Outcome>().map(Outcome::kind);
            assert_eq!(kind, Some(expected), "{case}");
            let left = u64::from(!(refunds && refunded));
            assert_eq!(outer.used(), left, "{case}, refunds: {refunds}");
            assert_eq!(handler.served() == 0, !expected.passed(), "{case}");
        }
    }
}

#[tokio::test]
async fn refunds_do_not_depend_on_when_limiters_answer() {
    for [outer, inner] in now_and_later() {
        let handler = Handler::default();
        let stack = two(&outer, &inner, &handler);
        // Also the very first request.
        for _ in 0..200 {
            assert_eq!(status(&stack, &[("dear", "inner")]).await, StatusCode::TOO_MANY_REQUESTS);
        }
        assert_eq!((outer.used(), outer.refunds().len()), (0, 200));
        inner.fail(true);
        assert_eq!(status(&stack, &[]).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(outer.used(), 1);
        inner.fail(false);
        assert_eq!(status(&stack, &[]).await, StatusCode::OK);
        assert_eq!((outer.used(), inner.used(), handler.served()), (2, 1, 1));
        // A request that the outer layer refuses never reaches the inner one.
        assert_eq!(status(&stack, &[("dear", "outer")]).await, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!((outer.used(), inner.used(), inner.refunds().len()), (2, 1, 0));
    }
}

#[tokio::test]
async fn outer_layer_refunds_all_of_its_policies() {
    let limiter = memory(&ManualClock::new());
    let hour = Duration::from_secs(3_600);
    let policy = |name, quota| Policy::new(name, quota).unwrap();
    let [one, over, tokens] =
        [policy("one", hourly(0)), policy("over", Quota::meter(100, hour).unwrap()), policy("tokens", hourly(50))];
    let metered = Rule::from(one).overage(over.name(), *over.quota()).unwrap();
    let settled = Rule::from(tokens.clone()).cost(|_| 5).settle_by_usage();
    let outer = RateLimitLayer::new(limiter.clone(), metered, key::global()).and(settled, key::global());
    let stack = outer.refund_nested(true).layer(layer(&Scripted::new(), "inner").layer(Handler::default().service()));
    let used = |policy: &Policy| {
        let told = limiter.peek_one(policy, &Key::global(), 0);
        told.limit() - told.remaining()
    };
    let refused = stack.clone().oneshot(request(&[("dear", "inner")])).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!([used(&over), used(&tokens)], [0, 0]);
    assert_eq!(stack.oneshot(request(&[])).await.unwrap().status(), StatusCode::OK);
    assert_eq!([used(&over), used(&tokens)], [1, 5]);
}

#[tokio::test]
async fn refund_survives_panics_and_disconnected_clients() {
    let [outer, inner] = [Scripted::new(), Scripted::new()];
    let stack = two(&outer, &inner, &Handler::default());
    for (number, act) in [Act::Panic, Act::Linger, Act::PanicInCall].into_iter().enumerate() {
        poll_once(stack.clone(), asked("inner", &[(At::BehindOuter, act)]));
        assert_eq!((outer.used(), outer.refunds().len()), (0, number + 1), "{act:?}");
    }
    // The request was not refused, so the service may have done all the work.
    for (number, act) in [Act::Panic, Act::Linger].into_iter().enumerate() {
        poll_once(stack.clone(), asked("", &[(At::BehindOuter, act)]));
        poll_once(stack.clone(), asked("", &[(At::Handler, act)]));
        assert_eq!((outer.used(), outer.refunds().len()), (2 * (number as u64 + 1), 3), "{act:?}");
    }
}

#[tokio::test]
async fn client_that_leaves_before_the_inner_answer_pays_the_outer() {
    let [outer, inner] = [Scripted::new(), Scripted::new().later()];
    let handler = Handler::default();
    poll_once(two(&outer, &inner, &handler), request(&[]));
    assert_eq!((outer.used(), inner.used(), handler.served()), (1, 0, 0));
}

#[tokio::test]
async fn retried_request_is_refunded_if_each_attempt_was_refused() {
    for [outer, inner] in now_and_later() {
        let handler = Handler::default();
        let stack = two(&outer, &inner, &handler);
        let retry = async |first, then| {
            let before = (outer.used(), handler.served());
            let mut asked = asked(first, &[(At::BehindOuter, Act::Retry)]);
            asked.headers_mut().insert("then", HeaderValue::from_static(then));
            let status = stack.clone().oneshot(asked).await.unwrap().status();
            (status.as_u16(), outer.used() - before.0, handler.served() - before.1)
        };
        assert_eq!(retry("inner", "").await, (200, 1, 1));
        assert_eq!(retry("", "inner").await, (429, 1, 1));
        assert_eq!(retry("", "").await, (200, 1, 2));
        assert_eq!(retry("inner", "inner").await, (429, 0, 0));
        // A copy of the request that was never sent was not refused.
        let (unused, before) = (asked("inner", &[(At::BehindOuter, Act::Copy)]), outer.used());
        assert_eq!(stack.oneshot(unused).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(outer.used(), before + 1);
    }
}

/// A handler that calls another service through its own limited client, and answers 502 if that
/// refuses.
#[tokio::test]
async fn refusal_of_a_client_inside_the_handler_refunds_nothing() {
    for copies_extensions in [false, true] {
        let outer = Scripted::new();
        let client = layer(&Scripted::new(), "client").layer(Handler::default().service());
        let handler = service_fn(move |incoming: Request<Body>| {
            let client = client.clone();
            async move {
                let refused = incoming.headers().contains_key("refused");
                let mut outgoing = request(if refused { &[("dear", "client")] } else { &[] });
                if copies_extensions {
                    *outgoing.extensions_mut() = incoming.extensions().clone();
                }
                // The response carries the extensions of the refusal.
                let mut response = client.oneshot(outgoing).await?.map(|_| Body::default());
                if refused {
                    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
                    *response.status_mut() = StatusCode::BAD_GATEWAY;
                }
                Ok::<_, Infallible>(response)
            }
        });
        let stack = layer(&outer, "outer").refund_nested(true).layer(handler);
        for (number, refused) in [(1, false), (2, true), (3, true)] {
            let fields: &[_] = if refused { &[("refused", "")] } else { &[] };
            let expected = if refused { StatusCode::BAD_GATEWAY } else { StatusCode::OK };
            assert_eq!(stack.clone().oneshot(request(fields)).await.unwrap().status(), expected);
            assert_eq!((outer.used(), outer.refunds().len()), (number, 0));
        }
    }
}

#[tokio::test]
async fn inner_layer_in_another_task_refunds_too() {
    let outer = Scripted::new();
    let inner = ServiceBuilder::new()
        .buffer::<Request<Body>>(8)
        .layer(layer(&Scripted::new(), "inner"))
        .service(Handler::default().service());
    let stack = layer(&outer, "outer").refund_nested(true).layer(inner);
    for refused in 1..5 {
        let refusal = stack.clone().oneshot(request(&[("dear", "inner")])).await.unwrap();
        assert_eq!(refusal.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!((outer.used(), outer.refunds().len()), (0, refused));
    }
    assert_eq!(stack.oneshot(request(&[])).await.unwrap().status(), StatusCode::OK);
    assert_eq!(outer.used(), 1);
}

#[tokio::test]
async fn limit_inside_an_overflow_refunds_the_outer_layer() {
    let outer = Scripted::new();
    let overflow = layer(&Scripted::new(), "overflow").layer(Handler::default().service());
    let overflow = overflow.map_response(|response| response.map(|_| Body::default()));
    let inner = layer(&Scripted::new(), "inner").overflow(overflow).layer(Handler::default().service());
    let stack = layer(&outer, "outer").refund_nested(true).layer(inner);
    let overflowed = stack.clone().oneshot(request(&[("dear", "inner")])).await.unwrap();
    assert_eq!((overflowed.status(), outer.used()), (StatusCode::OK, 1));
    // Over both quotas.
    let rule = Rule::new("inner", hourly(0)).unwrap();
    let full = || RateLimitLayer::new(Scripted::new(), rule.clone(), key::global());
    let overflow = full().layer(Handler::default().service()).map_response(|r| r.map(|_| Body::default()));
    let stack =
        layer(&outer, "outer").refund_nested(true).layer(full().overflow(overflow).layer(Handler::default().service()));
    let refused = stack.oneshot(request(&[])).await.unwrap();
    assert_eq!((refused.status(), outer.used()), (StatusCode::TOO_MANY_REQUESTS, 1));
    assert_eq!(refused.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Limited);
}

#[tokio::test]
async fn refused_client_does_not_use_up_a_shared_quota() {
    let limiter = memory(&ManualClock::new());
    let everyone = Rule::new("everyone", hourly(100)).unwrap();
    let stack = ServiceBuilder::new()
        .layer(RateLimitLayer::new(limiter.clone(), everyone, key::global()).refund_nested(true))
        .layer(layer_fn(|inner| between(At::BehindOuter, inner)))
        .layer(RateLimitLayer::new(limiter, hourly(10), key::header("client")))
        .service(Handler::default().service());
    for greedy in 0..10_000 {
        let response = stack.clone().oneshot(request(&[("client", "greedy")])).await.unwrap();
        assert_eq!(response.status() == StatusCode::OK, greedy < 10);
    }
    for client in ["a", "b", "c", "d", "e", "f", "g", "h", "i"] {
        for _ in 0..10 {
            let response = stack.clone().oneshot(request(&[("client", client)])).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
        }
    }
    let one_too_many = stack.clone().oneshot(request(&[("client", "j")])).await.unwrap();
    assert_eq!(one_too_many.status(), StatusCode::TOO_MANY_REQUESTS);
}

/// 100 clients send 10 requests per second each beside one that sends 10,000. Each may send 10, and
/// all 2,000.
#[tokio::test]
async fn clients_within_their_limit_pass_beside_one_that_hammers() {
    let client = |request: &tower_ratelimit::Head<'_>| Key::of(request.headers.get("client"));
    for apart in [true, false] {
        let clock = ManualClock::new();
        let limiter = memory(&clock);
        let everyone = Rule::new("everyone", Quota::per_second(2_000)).unwrap();
        let each = Rule::new("each", Quota::per_second(10)).unwrap();
        let handler = Handler::default().service();
        let outer = RateLimitLayer::new(limiter.clone(), everyone, key::global()).refund_nested(true);
        let boxed = |response: Response<_>| response.map(|_| Body::default());
        let stack: Boxed = if apart {
            let inner = RateLimitLayer::new(limiter, each, client);
            let layers = ServiceBuilder::new()
                .layer(outer)
                .layer(layer_fn(|inner| between(At::BehindOuter, inner)))
                .layer(inner);
            ServiceExt::<Request<Body>>::boxed_clone(layers.service(handler).map_response(boxed))
        } else {
            ServiceExt::<Request<Body>>::boxed_clone(outer.and(each, client).layer(handler).map_response(boxed))
        };
        let names: Vec<HeaderValue> = (0..100).map(HeaderValue::from).collect();
        let asked = |client: &HeaderValue| {
            let mut request = request(&[]);
            request.headers_mut().insert("client", client.clone());
            request
        };
        let (greedy, mut passed) = (HeaderValue::from_static("greedy"), 0);
        for millisecond in 0..3_000 {
            for _ in 0..10 {
                let response = stack.clone().oneshot(asked(&greedy)).await.unwrap();
                passed += u32::from(response.status() == StatusCode::OK);
            }
            let response = stack.clone().oneshot(asked(&names[millisecond % 100])).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "{millisecond} ms, apart: {apart}");
            clock.advance(Duration::from_millis(1));
        }
        // Its burst, and ten per second.
        assert_eq!(passed, 10 + 29, "apart: {apart}");
    }
}

/// Two layers over two limiters use one name. The header has one item for it, the stricter one.
#[tokio::test]
async fn name_in_two_layers_is_listed_once_as_the_stricter() {
    for [outer, inner] in [[5, 50], [50, 5]] {
        let limit = |limit| {
            let policy = Rule::new("api", hourly(limit)).unwrap();
            RateLimitLayer::new(memory(&ManualClock::new()), policy, key::global())
                .headers(Headers::draft_11().and(Headers::github()))
        };
        let stack = ServiceBuilder::new().layer(limit(outer)).layer(limit(inner)).service(Handler::default().service());
        let response = stack.oneshot(request(&[])).await.unwrap();
        let field = |name: &str| response.headers()[name].to_str().unwrap();
        assert_eq!(field("ratelimit"), "\"api\";r=4;t=2880");
        assert_eq!((field("x-ratelimit-limit"), field("x-ratelimit-remaining")), ("5", "4"));
    }
}

#[tokio::test]
async fn headers_of_nested_layers_are_merged() {
    let headers = || Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds));
    let limit = |name, limit| {
        let policy = Rule::new(name, hourly(limit)).unwrap();
        RateLimitLayer::new(memory(&ManualClock::new()), policy, key::global()).headers(headers())
    };
    let stack = |refunds| -> Boxed {
        ServiceBuilder::new()
            .layer(layer_fn(ServiceExt::<Request<Body>>::boxed_clone))
            .map_response(|response: Response<_>| response.map(|_| Body::default()))
            .layer(limit("outer", 3_600).refund_nested(refunds))
            .layer(limit("middle", 60).refund_nested(refunds))
            .layer(limit("inner", 1))
            .service(Handler::default().service())
    };
    let [refunding, independent] = [true, false].map(stack);
    let fields = async |stack: &Boxed, expected: StatusCode| {
        let response = stack.clone().oneshot(request(&[])).await.unwrap();
        assert_eq!(response.status(), expected);
        ["ratelimit", "ratelimit-policy", "x-ratelimit-limit", "x-ratelimit-remaining", "retry-after"].map(|name| {
            let values: Vec<_> =
                response.headers().get_all(name).iter().map(|v| v.to_str().unwrap().to_owned()).collect();
            values.join(" + ")
        })
    };
    let policies = "\"inner\";q=1;w=3600, \"middle\";q=60;w=3600, \"outer\";q=3600;w=3600";
    let passed = "\"inner\";r=0;t=3600, \"middle\";r=59;t=3540, \"outer\";r=3599;t=3599";
    assert_eq!(fields(&refunding, StatusCode::OK).await, [passed, policies, "1", "0", ""]);
    for _ in 0..5 {
        // After the refund the same amount remains as before.
        assert_eq!(fields(&refunding, StatusCode::TOO_MANY_REQUESTS).await, [passed, policies, "1", "0", "3600"]);
    }
    assert_eq!(fields(&independent, StatusCode::OK).await, [passed, policies, "1", "0", ""]);
    let kept = "\"inner\";r=0;t=3600, \"middle\";r=58;t=3480, \"outer\";r=3598;t=3598";
    assert_eq!(fields(&independent, StatusCode::TOO_MANY_REQUESTS).await, [kept, policies, "1", "0", "3600"]);
}

/// Calls and polls once. Then the client disconnects.
fn poll_once<S>(mut service: S, request: Request<Body>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let _ = catch_unwind(AssertUnwindSafe(move || {
        let mut context = Context::from_waker(Waker::noop());
        assert!(service.poll_ready(&mut context).is_ready());
        let mut response = Box::pin(service.call(request));
        let _ = response.as_mut().poll(&mut context);
    }));
}

/// A request, and what happens to it.
#[derive(Clone, Debug)]
struct Fate {
    /// The index of the layer that refuses it.
    refused_by: usize,
    acts: [(At, Act); 3],
    /// Whether the request is polled.
    polled: bool,
    /// For how many further requests an unanswered client waits before it disconnects.
    kept: usize,
}

impl Fate {
    /// Returns what the outer, the middle and the inner layer keep, some of which refund.
    fn charges(&self, refunds: [bool; 3]) -> [u64; 3] {
        // The request passes the layers outside of the one that refuses it.
        let passes = |layer: usize| self.refused_by == 0 || layer + 1 < self.refused_by;
        [0, 1, 2].map(|layer| u64::from(passes(layer) && !(refunds[layer] && self.refused_by > 0)))
    }
}

const LAYERS: [&str; 4] = ["", "outer", "middle", "inner"];

fn fate() -> impl Strategy<Value = Fate> {
    let of_handler = prop_oneof![Just(Act::Pass), Just(Act::Linger), Just(Act::Panic)];
    let between = || prop_oneof![Just(Act::Pass), Just(Act::Linger), Just(Act::Panic), Just(Act::PanicInCall)];
    let acts = (of_handler, between(), between());
    (0..LAYERS.len(), acts, any::<bool>(), any::<bool>(), 0..5_usize).prop_map(
        |(refused_by, (handler, outer, middle), polled, also, kept)| Fate {
            refused_by,
            acts: [(At::Handler, handler), (At::BehindOuter, outer), (At::BehindMiddle, middle)],
            polled: polled || also,
            kept,
        },
    )
}

/// A refund to a queue has no effect once another request has queued behind it.
fn all_but_queues() -> Vec<Quota> {
    let quotas = every_algorithm(5_000, Duration::from_secs(86_400));
    quotas.into_iter().filter(|quota| quota.algorithm() != Algorithm::LeakyQueue).collect()
}

proptest! {
    #![proptest_config(config(96))]

    /// Three layers over one limiter, some of which refund, with middleware in between that builds
    /// new responses.
    #[test]
    fn sum_of_charges_is_what_each_layer_keeps(
        quota in prop::sample::select(all_but_queues()),
        refunds in any::<[bool; 3]>(),
        fates in proptest::collection::vec(fate(), 1..80),
    ) {
        let (limiter, handler) = (memory(&ManualClock::new()), Handler::default());
        let limit = |layer: usize| {
            let rule = refuses_dear(LAYERS[layer + 1], quota);
            RateLimitLayer::new(limiter.clone(), rule, key::global()).refund_nested(refunds[layer])
        };
        let mut stack = ServiceBuilder::new()
            .layer(layer_fn(|inner| between(At::Outside, inner)))
            .layer(limit(0))
            .layer(layer_fn(|inner| between(At::BehindOuter, inner)))
            .layer(limit(1))
            .layer(layer_fn(|inner| between(At::BehindMiddle, inner)))
            .layer(limit(2))
            .service(handler.service());
        let mut context = Context::from_waker(Waker::noop());
        let mut kept: Vec<(usize, Answer)> = Vec::new();
        let mut expected = [0; 3];
        for fate in fates {
            let asked = asked(LAYERS[fate.refused_by], &fate.acts);
            let pending = catch_unwind(AssertUnwindSafe(|| {
                let mut response: Answer = Box::pin(stack.call(asked));
                (fate.polled && response.as_mut().poll(&mut context).is_pending()).then_some(response)
            }));
            kept.retain_mut(|(left, _)| {
                *left = left.saturating_sub(1);
                *left > 0
            });
            if let Ok(Some(response)) = pending {
                kept.push((fate.kept, response));
            }
            for (sum, charge) in expected.iter_mut().zip(fate.charges(refunds)) {
                *sum += charge;
            }
        }
        drop(kept);
        let charged = ["outer", "middle", "inner"].map(|name| {
            let policy = Rule::new(name, quota).unwrap();
            policy.policies()[0].quota().capacity() - limiter.peek_one(&policy.policies()[0], &Key::global(), 0).remaining()
        });
        prop_assert_eq!(charged, expected, "{}, refunds: {:?}", quota, refunds);
    }
}
