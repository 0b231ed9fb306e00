//! Requests over a quota may go to another service.

use std::convert::Infallible;
use std::future::ready;
use std::task::{Context, Poll, Waker};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::middleware::OverflowTo;
use tower_ratelimit::{
    MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key,
    limiter::Limiter,
    middleware::ModeSwitch,
    observe::{Outcome, OutcomeKind},
};

use crate::support::Scripted;

fn limit<L: Limiter + Clone>(limiter: L, quota: u64) -> RateLimitLayer<L> {
    RateLimitLayer::new(limiter, Rule::new("api", Quota::per_minute(quota)).unwrap(), key::global())
}

fn request(body: &'static str) -> Request<Body> {
    Request::builder().uri("/path").header("x-own", "1").body(Body::from(body)).unwrap()
}

async fn served(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::from("served")))
}

/// Answers 202 with the body of the request.
async fn queue(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    assert_eq!(parts.uri.path(), "/path", "the request is whole");
    assert_eq!(parts.headers["x-own"], "1");
    let outcome = parts.extensions.get::<Outcome>().expect("the request tells why it is here");
    assert_eq!(outcome.kind(), OutcomeKind::Overflowed);
    assert_eq!(outcome.violated().count(), 1);
    let body = body.collect().await.unwrap().to_bytes();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::ACCEPTED;
    Ok(response)
}

async fn text<B: http_body::Body<Error: std::fmt::Debug>>(response: Response<B>) -> Bytes {
    response.into_body().collect().await.unwrap().to_bytes()
}

#[tokio::test]
async fn overflow_gets_the_whole_request_and_adds_refusal_headers() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        let service = limit(limiter, 1).overflow(service_fn(queue)).layer(service_fn(served));
        let first = service.clone().oneshot(request("one")).await.unwrap();
        assert_eq!(first.status(), StatusCode::OK);
        let second = service.oneshot(request("two")).await.unwrap();
        assert_eq!(second.status(), StatusCode::ACCEPTED);
        assert_eq!(second.headers()["ratelimit"], "\"api\";r=0;t=3");
        assert_eq!(second.headers()["retry-after"], "3");
        assert_eq!(second.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Overflowed);
        assert_eq!(text(second).await, "two");
    }
}

#[tokio::test]
async fn overflow_that_is_not_ready_leaves_the_refusal() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        let full = GlobalConcurrencyLimitLayer::new(1).layer(service_fn(queue));
        let mut taken = full.clone();
        let mut service = limit(limiter, 0).overflow(full).layer(service_fn(served));
        let room = service.ready().await.unwrap().call(request("room"));
        assert_eq!(room.await.unwrap().status(), StatusCode::ACCEPTED);

        let _permit = taken.ready().await.unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Service::<Request<Body>>::poll_ready(&mut service, &mut cx).is_ready(), "the layer's service is ready");
        let refused = service.call(request("no room")).await.unwrap();
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Limited);
    }
}

#[derive(Debug, PartialEq)]
struct Own(&'static str);

/// Fails on command.
#[derive(Clone)]
struct Broken {
    at_ready: bool,
}

impl Service<Request<Body>> for Broken {
    type Response = Response<Body>;
    type Error = &'static str;
    type Future = std::future::Ready<Result<Response<Body>, &'static str>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
        Poll::Ready(if self.at_ready { Err("not ready") } else { Ok(()) })
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Err("failed"))
    }
}

impl From<&'static str> for Own {
    fn from(error: &'static str) -> Self {
        Self(error)
    }
}

#[tokio::test]
async fn overflow_errors_are_handed_on() {
    for (at_ready, expected) in [(true, "not ready"), (false, "failed")] {
        for limiter in [Scripted::new(), Scripted::new().later()] {
            let inner = service_fn(|_: Request<Body>| ready(Ok::<_, Own>(Response::new(Body::default()))));
            let service = limit(limiter, 0).overflow(Broken { at_ready }).layer(inner);
            assert_eq!(service.oneshot(request("")).await.unwrap_err(), Own(expected));
        }
    }
}

#[tokio::test]
async fn overflow_gets_only_requests_over_a_quota() {
    let limiter = Scripted::new();
    let unkeyed = RateLimitLayer::new(limiter.clone(), Quota::per_minute(1), key::header("x-user"));
    let unkeyed = unkeyed.overflow(service_fn(queue)).layer(service_fn(served));
    assert_eq!(unkeyed.oneshot(request("")).await.unwrap().status(), StatusCode::BAD_REQUEST);
    limiter.fail(true);
    let failing = limit(limiter, 0).overflow(service_fn(queue)).layer(service_fn(served));
    assert_eq!(failing.oneshot(request("")).await.unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn outer_layers_keep_what_an_overflowing_request_took() {
    for inner_limiter in [Scripted::new(), Scripted::new().later()] {
        let outer_limiter = Scripted::new();
        let outer = RateLimitLayer::new(
            outer_limiter.clone(),
            Rule::new("outer", Quota::per_minute(9)).unwrap(),
            key::global(),
        )
        .refund_nested(true);
        let inner = limit(inner_limiter, 0).overflow(service_fn(queue));
        let service = outer.layer(inner.layer(service_fn(served)));
        for sent in 1..4 {
            let response = service.clone().oneshot(request("")).await.unwrap();
            assert_eq!(response.status(), StatusCode::ACCEPTED);
            assert_eq!(outer_limiter.used(), sent);
        }
    }
}

#[tokio::test]
async fn overflow_survives_later_settings_and_yields_to_modes() {
    let mode = ModeSwitch::new(Mode::Shadow);
    let layer: RateLimitLayer<MemoryLimiter, OverflowTo<_>> =
        limit(MemoryLimiter::new(), 0).overflow(service_fn(queue)).mode(&mode);
    let service = layer.layer(service_fn(served));
    assert_eq!(service.clone().oneshot(request("")).await.unwrap().status(), StatusCode::OK);
    mode.set(Mode::Enforce);
    assert_eq!(service.oneshot(request("")).await.unwrap().status(), StatusCode::ACCEPTED);
}

/// The overflow of an axum application may be another axum router.
#[tokio::test]
async fn axum_router_can_be_an_overflow() {
    use axum::Router;
    use axum::routing::get;
    let lean = Router::new().fallback(|| async { "lean" });
    let app: Router =
        Router::new().route("/", get(|| async { "rich" })).layer(limit(MemoryLimiter::new(), 1).overflow(lean));
    for expected in ["rich", "lean"] {
        let response = app.clone().oneshot(Request::new(axum::body::Body::empty())).await.unwrap();
        assert_eq!(text(response).await, expected);
    }
}

#[test]
fn dropped_overflow_future_charges_and_refunds_nothing() {
    let limiter = Scripted::new();
    let mut service = limit(limiter.clone(), 0).overflow(service_fn(queue)).layer(service_fn(served));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(Service::<Request<Body>>::poll_ready(&mut service, &mut cx).is_ready());
    drop(service.call(request("")));
    assert_eq!((limiter.used(), limiter.refunds().len()), (0, 0));
}
