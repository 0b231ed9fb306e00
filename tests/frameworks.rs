//! The layer works wherever a Tower layer does.

mod support;

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::handler::Handler;
use axum::routing::get;
use http::{Request, StatusCode};
use support::Scripted;
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_ratelimit::{Limiter, MissingKey, Policy, Quota, RateLimit, RateLimitLayer, key};

struct Application {
    limit: RateLimitLayer<Scripted>,
    limited: RateLimit<Router, Scripted>,
}

fn limit(quota: u32) -> RateLimitLayer<Scripted> {
    RateLimitLayer::new(Scripted::new(), Quota::per_minute(quota), key::global())
}

fn generic<L>(limiter: L) -> Router
where
    L: Limiter + Clone + 'static,
{
    Router::new().route("/", get(home)).layer(RateLimitLayer::new(limiter, Quota::per_minute(1), key::global()))
}

async fn home() -> &'static str {
    "home"
}

async fn statuses<const N: usize>(router: Router, paths: [&str; N]) -> [u16; N] {
    let mut statuses = [0; N];
    for (status, path) in statuses.iter_mut().zip(paths) {
        let request = Request::builder().uri(path).body(axum::body::Body::empty()).unwrap();
        *status = router.clone().oneshot(request).await.unwrap().status().as_u16();
    }
    statuses
}

#[tokio::test]
async fn in_every_place_of_an_axum_router() {
    assert_eq!(statuses(generic(Scripted::new()), ["/", "/"]).await, [200, 429]);
    let router = Router::new().route("/", get(home)).layer(limit(1));
    assert_eq!(statuses(router, ["/", "/nowhere"]).await, [200, 429]);
    let router = Router::new().route("/", get(home)).route_layer(limit(1));
    assert_eq!(statuses(router, ["/nowhere", "/", "/"]).await, [404, 200, 429]);
    let router = Router::new().route("/", get(home.layer(limit(1)))).route("/free", get(home));
    assert_eq!(statuses(router, ["/", "/", "/free"]).await, [200, 429, 200]);
    let router = Router::new().route("/", get(home).layer(limit(1))).route("/free", get(home));
    assert_eq!(statuses(router, ["/", "/", "/free"]).await, [200, 429, 200]);
    let nested = Router::new().route("/", get(home)).layer(limit(1));
    let router = Router::new().nest("/api", nested).route("/", get(home));
    assert_eq!(statuses(router, ["/api", "/api", "/"]).await, [200, 429, 200]);
    let router = Router::new().route("/", get(home)).layer(limit(3)).layer(limit(2)).layer(limit(1));
    assert_eq!(statuses(router, ["/", "/"]).await, [200, 429]);
}

#[tokio::test]
async fn with_other_middleware_on_both_sides() {
    let stack = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(1)))
        .layer(CorsLayer::permissive())
        .layer(CompressionLayer::new())
        .layer(limit(1))
        .layer(RequestBodyLimitLayer::new(1 << 20))
        .layer(CompressionLayer::new())
        .layer(TraceLayer::new_for_http())
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(1)))
        .layer(CorsLayer::permissive());
    let router = Router::new().route("/", get(home)).layer(stack);
    let request = |origin: bool| {
        let request = Request::builder().uri("/").header("accept-encoding", "gzip");
        let request = if origin { request.header("origin", "https://example.com") } else { request };
        request.body(axum::body::Body::empty()).unwrap()
    };
    assert_eq!(router.clone().oneshot(request(true)).await.unwrap().status(), StatusCode::OK);
    let refused = router.clone().oneshot(request(true)).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("access-control-allow-origin"), "CORS outside reaches refusals");
    let body = axum::body::to_bytes(refused.into_body(), 1 << 20).await.unwrap();
    assert!(!body.is_empty());
}

#[tokio::test]
async fn inside_a_timeout_whatever_the_bodies_below() {
    // Compiles only if the layer's body is `Default` although the one of `RequestBodyLimit` is not.
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(1)))
        .layer(limit(1))
        .layer(RequestBodyLimitLayer::new(1 << 20))
        .service(Router::new().route("/", get(home)));
    let response = service.oneshot(Request::new(axum::body::Body::empty())).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test]
async fn named_in_a_field_and_boxed() {
    let limit = limit(1);
    let application = Application { limited: limit.layer(Router::new()), limit };
    let boxed = tower::util::BoxCloneService::new(application.limit.layer(Router::new().route("/", get(home))));
    let request = || Request::new(axum::body::Body::empty());
    assert_eq!(boxed.oneshot(request()).await.unwrap().status(), StatusCode::OK);
    let refused = application.limited.oneshot(request()).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn axums_connect_info_is_the_peer() {
    let layer = RateLimitLayer::new(Scripted::new(), Quota::per_minute(1), key::peer_ip());
    let router = Router::new().route("/", get(home)).layer(layer);
    let mut service = router.into_make_service_with_connect_info::<SocketAddr>();
    let mut seen = Vec::new();
    for peer in [[192, 0, 2, 1], [192, 0, 2, 1], [192, 0, 2, 2]] {
        let request = Request::new(axum::body::Body::empty());
        let router = tower::Service::<SocketAddr>::call(&mut service, SocketAddr::from((peer, 4711))).await.unwrap();
        seen.push(router.oneshot(request).await.unwrap().status().as_u16());
    }
    assert_eq!(seen, [200, 429, 200]);
}

#[tokio::test]
async fn the_peer_is_found_without_features_by_a_closure() {
    let by_peer = key::extension(|info: &ConnectInfo<SocketAddr>| info.0.ip());
    let policy = Policy::new("peer", Quota::per_minute(1)).unwrap().missing_key(MissingKey::Reject);
    let router = Router::new().route("/", get(home)).layer(RateLimitLayer::new(Scripted::new(), policy, by_peer));
    let mut request = Request::new(axum::body::Body::empty());
    assert_eq!(statuses(router.clone(), ["/"]).await, [400]);
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([192, 0, 2, 1], 4711))));
    assert_eq!(router.oneshot(request).await.unwrap().status(), StatusCode::OK);
}

#[test]
fn closures_need_no_annotation() {
    use tower_ratelimit::Key;
    let quota = Quota::per_minute(1);
    let policy = Policy::from(quota);
    let _ = [
        RateLimitLayer::new(Scripted::new(), quota, |request| request.headers.get("x").cloned()),
        RateLimitLayer::new(Scripted::new(), quota, |request| Key::of(request.uri.path())),
        RateLimitLayer::new(Scripted::new(), quota, |request| Key::of((request.uri.path(), request.headers.get("x")))),
        RateLimitLayer::new(Scripted::new(), quota, |request| {
            let user = request.headers.get("x-user")?.to_str().ok()?;
            Some((user.to_owned(), request.method.clone()))
        }),
        RateLimitLayer::new(Scripted::new(), &policy, |_| "all"),
        RateLimitLayer::new(Scripted::new(), policy, |_| 7_u64),
    ];
}
