//! The layer keeps Tower's contract of `poll_ready` and `call`.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt};
use tower_ratelimit::{Headers, Quota, RateLimitLayer, key, middleware::RateLimit};

use crate::support::Scripted;

fn limit(limiter: Scripted, quota: u64) -> RateLimitLayer<Scripted> {
    RateLimitLayer::new(limiter, Quota::per_minute(quota), key::global())
}

fn request() -> Request<Body> {
    Request::new(Body::default())
}

/// Panics in `call` unless this very value was polled ready. A clone is not ready.
struct Strict {
    ready: bool,
    calls: Arc<AtomicUsize>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { ready: false, calls: Arc::clone(&self.calls) }
    }
}

impl Service<Request<Body>> for Strict {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without having been made ready");
        self.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::new(Body::default())))
    }
}

async fn the_ready_service_is_called(limiter: Scripted) {
    let calls = Arc::new(AtomicUsize::new(0));
    let mut service = limit(limiter, 2).layer(Strict { ready: false, calls: Arc::clone(&calls) });
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(service.ready().await.unwrap().call(request()).await.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 429, 429]);
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn layer_calls_the_service_that_was_ready() {
    the_ready_service_is_called(Scripted::new()).await;
}

#[tokio::test]
async fn layer_calls_the_ready_service_after_a_later_answer() {
    the_ready_service_is_called(Scripted::new().later()).await;
}

async fn a_refusal_gives_a_permit_back(limiter: Scripted) {
    let inner = tower::service_fn(|_| ready(Ok::<_, Infallible>(Response::new(Body::default()))));
    let permits = GlobalConcurrencyLimitLayer::new(1);
    let mut service = limit(limiter, 0).layer(permits.layer(inner));
    let mut other = service.clone();
    let response = service.ready().await.unwrap().call(request()).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    // The only permit is free again, although `service` still exists.
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert!(other.poll_ready(&mut cx).is_ready());
}

#[tokio::test]
async fn refusal_releases_its_concurrency_permit() {
    a_refusal_gives_a_permit_back(Scripted::new()).await;
}

#[tokio::test]
async fn later_refusal_releases_its_concurrency_permit() {
    a_refusal_gives_a_permit_back(Scripted::new().later()).await;
}

#[tokio::test]
async fn readiness_is_the_inner_services_own() {
    let (inner, mut handle) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let mut service = limit(Scripted::new(), 1).layer(inner);
    handle.allow(0);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    assert!(service.poll_ready(&mut cx).is_pending());
    handle.allow(1);
    assert!(service.poll_ready(&mut cx).is_ready());
    handle.send_error("broken");
    let error = service.ready().await.map(drop).expect_err("readiness fails as the inner one does");
    assert_eq!(error.to_string(), "broken");
}

#[derive(Debug, PartialEq)]
struct OwnError(u8);

#[tokio::test]
async fn service_error_is_handed_on_and_stays_charged() {
    let limiter = Scripted::new();
    let inner = tower::service_fn(|_: Request<Body>| ready(Err::<Response<Body>, _>(OwnError(7))));
    let service: RateLimit<_, Scripted> = limit(limiter.clone(), 1).layer(inner);
    let error: OwnError = service.oneshot(request()).await.unwrap_err();
    assert_eq!(error, OwnError(7));
    assert_eq!(limiter.used(), 1);
}

/// A service may begin its work in `call`, as a buffer does.
#[tokio::test]
async fn unpolled_future_keeps_its_charge() {
    for headers in [Headers::none(), Headers::default()] {
        for later in [false, true] {
            let limiter = if later { Scripted::new().later() } else { Scripted::new() };
            let layer = limit(limiter.clone(), 5).and(Quota::per_hour(5), key::global()).headers(headers.clone());
            let mut service = layer.layer(Strict { ready: false, calls: Arc::default() });
            drop(service.ready().await.unwrap().call(request()));
            // A limiter that answers later was not called yet, and neither was the service.
            assert_eq!((limiter.used(), limiter.refunds().len()), (if later { 0 } else { 2 }, 0));
        }
    }
}

#[tokio::test]
async fn future_dropped_while_it_waits_keeps_its_charge() {
    let limiter = Scripted::new();
    let inner = tower::service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>());
    let mut service = limit(limiter.clone(), 1).layer(inner);
    {
        let mut future = pin!(service.ready().await.unwrap().call(request()));
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(future.as_mut().poll(&mut cx).is_pending());
    }
    assert_eq!((limiter.used(), limiter.refunds().len()), (1, 0));
}

#[tokio::test]
async fn clones_share_one_allowance() {
    let inner = tower::service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::default()))));
    let layer = limit(Scripted::new(), 3);
    let first = layer.layer(inner);
    let services = [first.clone(), first, layer.clone().layer(inner), layer.layer(inner)];
    let mut statuses = Vec::new();
    for service in services {
        statuses.push(service.oneshot(request()).await.unwrap().status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 429]);
}
