//! The program on the first page of the guide does what the page says.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::ServiceExt;
use tower_ratelimit::observe::Stats;

#[allow(dead_code, unreachable_pub, reason = "its `main` serves")]
#[path = "../../examples/first_day.rs"]
mod program;

async fn send(app: &Router, path: &str, token: Option<&str>) -> Response<Body> {
    let mut request = Request::get(path).header("origin", "https://app.example").body(Body::empty()).unwrap();
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([192, 0, 2, 1], 4_000))));
    if let Some(token) = token {
        request.headers_mut().insert("authorization", token.parse().unwrap());
    }
    app.clone().oneshot(request).await.unwrap()
}

#[tokio::test]
async fn first_day_has_all_that_its_page_says() {
    let stats = Stats::new();
    let app = program::app(stats.clone()).unwrap();
    let mut passed = 0;
    // A second returns a unit, so a machine that stops for a while lets more than ten pass.
    let refused = loop {
        let response = send(&app, "/", Some("Bearer unknown")).await;
        if response.status() != StatusCode::OK {
            break response;
        }
        passed += 1;
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert!(passed > 1 || body == "hello, 9 more at once\n", "{body:?}");
    };
    assert!((10..100).contains(&passed), "{passed}");
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["content-type"], "application/json");
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(refused.headers()["access-control-allow-origin"], "*");
    let exposed = refused.headers()["access-control-expose-headers"].to_str().unwrap();
    assert!(["retry-after", "ratelimit"].iter().all(|name| exposed.contains(name)), "{exposed}");
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body, serde_json::json!({ "error": { "status": 429, "limit": 60, "retry_after": 1 } }));

    // A user has an allowance of its own, and checks of health have no limit.
    assert_eq!(send(&app, "/", Some("Bearer alice")).await.status(), StatusCode::OK);
    for _ in 0..20 {
        assert_eq!(send(&app, "/health", None).await.status(), StatusCode::OK);
    }
    let allowed = format!(" {}", passed + 1);
    let counted = stats.to_prometheus();
    assert!(
        counted.lines().any(|line| line.starts_with("ratelimit_requests_total{") && line.ends_with(&allowed)),
        "{counted}"
    );
}

#[tokio::test]
async fn preflight_is_answered_without_a_charge() {
    let app = program::app(Stats::new()).unwrap();
    let preflight = Request::options("/").header("origin", "https://app.example");
    let preflight = preflight.header("access-control-request-method", "GET").body(Body::empty()).unwrap();
    let response = app.oneshot(preflight).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key("ratelimit"));
}
