//! The layer works in axum, Tower and hyper stacks, and between other middleware.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::handler::Handler;
use axum::routing::get;
use http::{Request, StatusCode};
use tower::{Layer, ServiceBuilder, ServiceExt};
use tower_http::compression::CompressionLayer;
use tower_http::cors::CorsLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_ratelimit::{
    MissingKey, Quota, RateLimitLayer, Rule, key, limiter::Limiter, middleware::RateLimit, observe::Outcome,
};

use crate::support::Scripted;

struct Application {
    limit: RateLimitLayer<Scripted>,
    limited: RateLimit<Router, Scripted>,
}

fn limit(quota: u64) -> RateLimitLayer<Scripted> {
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
async fn layer_works_in_every_place_of_an_axum_router() {
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
async fn layer_works_between_other_middleware() {
    let stack = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(1)))
        .layer(CorsLayer::permissive())
        .layer(CompressionLayer::new())
        .layer(limit(1).wrap_body())
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
async fn wrapped_bodies_are_default_for_timeouts_outside() {
    // The body of `RequestBodyLimit` is not `Default`.
    let service = ServiceBuilder::new()
        .layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(1)))
        .layer(limit(1).wrap_body())
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

#[cfg(feature = "axum")]
#[tokio::test]
async fn axums_mock_connect_info_is_the_peer() {
    use axum::extract::connect_info::MockConnectInfo;
    let layer = RateLimitLayer::new(Scripted::new(), Quota::per_minute(1), key::peer_ip());
    let router = Router::new().route("/", get(home)).layer(layer);
    let mocked = router.layer(MockConnectInfo(SocketAddr::from(([192, 0, 2, 1], 4711))));
    assert_eq!(statuses(mocked.clone(), ["/", "/"]).await, [200, 429]);
    // A real peer address has precedence, as in axum.
    let mut request = Request::new(axum::body::Body::empty());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([192, 0, 2, 2], 4711))));
    assert_eq!(mocked.oneshot(request).await.unwrap().status(), StatusCode::OK);
}

/// The path as the client sent it, wherever the layer is placed.
#[cfg(feature = "axum")]
#[tokio::test]
async fn original_path_is_whole_inside_of_nested_routers() {
    let export = || {
        let rule = Rule::new("export", Quota::per_minute(1)).unwrap();
        let rule = rule.when(|request| key::original_uri(request).path().starts_with("/api/export"));
        RateLimitLayer::new(Scripted::new(), rule, key::original_path())
    };
    let routes = || Router::new().route("/export", get(home)).route("/import", get(home));
    let paths = ["/api/export", "/api/export", "/api/import", "/api/export?x=y"];
    for router in [
        Router::new().nest("/api", routes()).layer(export()),
        Router::new().nest("/api", routes()).route_layer(export()),
        Router::new().nest("/api", routes().layer(export())),
        Router::new().nest("/api", routes().route_layer(export())),
        Router::new().nest_service("/api", export().layer(routes())),
        Router::new().nest("/api", Router::new().route("/{name}", get(home.layer(export())))),
        Router::new().nest("/api", Router::new().fallback(home).layer(export())),
    ] {
        assert_eq!(statuses(router, paths).await, [200, 429, 200, 429]);
    }
    let deep =
        Router::new().nest("/api", Router::new().nest("/export", Router::new().route("/x", get(home)).layer(export())));
    assert_eq!(statuses(deep, ["/api/export/x", "/api/export/x"]).await, [200, 429]);
}

/// A handler that asks for the outcome has to allow for its absence, unless the layer exposes it.
#[tokio::test]
async fn outcome_is_an_optional_extension_in_axum() {
    use axum::Extension;
    let home = async |outcome: Option<Extension<Outcome>>| outcome.map_or("none", |outcome| outcome.kind().as_str());
    for (exposed, expected) in [(false, "none"), (true, "allowed")] {
        let router = Router::new().route("/", get(home)).layer(limit(1).expose_outcome(exposed));
        let response = router.oneshot(Request::new(axum::body::Body::empty())).await.unwrap();
        let body = axum::body::to_bytes(response.into_body(), 64).await.unwrap();
        assert_eq!(body, expected);
    }
}

#[tokio::test]
async fn closure_finds_the_peer_without_features() {
    let by_peer = key::extension(|info: &ConnectInfo<SocketAddr>| info.0.ip());
    let policy = Rule::new("peer", Quota::per_minute(1)).unwrap().missing_key(MissingKey::Reject);
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
    let policy = Rule::from(quota);
    let _ = [
        RateLimitLayer::new(Scripted::new(), quota, |request| request.headers.get("x").cloned()),
        RateLimitLayer::new(Scripted::new(), quota, |request| Key::of(request.uri.path())),
        RateLimitLayer::new(Scripted::new(), quota, |request| Key::of((request.uri.path(), request.headers.get("x")))),
        RateLimitLayer::new(Scripted::new(), quota, |request| {
            let user = request.headers.get("x-user")?.to_str().ok()?;
            Some((user.to_owned(), request.method.clone()))
        }),
        RateLimitLayer::new(Scripted::new(), policy.clone(), |_| "all"),
        RateLimitLayer::new(Scripted::new(), policy, |_| 7_u64),
    ];
}
