//! Handlers of axum take what a layer puts into requests as arguments.

use axum::Router;
use axum::body::Body;
use axum::extract::{FromRef, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::request::Parts;
use http::{Request, StatusCode};
use tower::ServiceExt;
use tower_ratelimit::middleware::{Admit, InFlight, Usage};
use tower_ratelimit::observe::{Outcome, OutcomeKind};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

async fn status(app: Router) -> StatusCode {
    app.oneshot(Request::new(Body::empty())).await.unwrap().status()
}

fn all() -> Router {
    async fn handler(outcome: Outcome, usage: Usage, in_flight: InFlight) {
        assert_eq!(outcome.kind(), OutcomeKind::Allowed);
        assert!(usage.set(3));
        assert!(in_flight.hold().is_some());
    }
    Router::new().route("/", get(handler))
}

#[tokio::test]
async fn handler_takes_what_its_layer_exposes() {
    let tokens = Rule::new("tokens", Quota::per_minute(9)).unwrap().settle_by_usage();
    let places = Rule::new("places", Quota::concurrent(1)).unwrap();
    let limit = RateLimitLayer::new(MemoryLimiter::new(), tokens, key::global()).and(places, key::global());
    assert_eq!(status(all().layer(limit.clone().expose_outcome(true))).await, StatusCode::OK);
    // Without the outcome the handler is not called, and the client reads nothing about the server.
    let response = all().layer(limit).oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(axum::body::to_bytes(response.into_body(), 100).await.unwrap(), "");
}

#[tokio::test]
async fn handler_takes_nothing_as_none() {
    async fn handler(outcome: Option<Outcome>, usage: Option<Usage>, in_flight: Option<InFlight>) -> StatusCode {
        match (outcome, usage, in_flight) {
            (None, None, None) => StatusCode::NO_CONTENT,
            _ => StatusCode::OK,
        }
    }
    assert_eq!(status(Router::new().route("/", get(handler))).await, StatusCode::NO_CONTENT);
}

#[tokio::test]
async fn handler_takes_the_admission_of_a_layer_in_its_state() {
    #[derive(Clone)]
    struct App {
        limit: RateLimitLayer,
    }
    impl FromRef<App> for RateLimitLayer {
        fn from_ref(app: &App) -> Self {
            app.limit.clone()
        }
    }
    async fn handler(Admit { admission, .. }: Admit) -> Response {
        admission.finish(StatusCode::NO_CONTENT.into_response())
    }
    let rule = Rule::new("api", Quota::per_minute(1)).unwrap();
    let limit = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global());
    let app = Router::new().route("/", get(handler)).with_state(App { limit });
    let admitted = app.clone().oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!(
        (admitted.status(), &admitted.headers()["ratelimit"]),
        (StatusCode::NO_CONTENT, &"\"api\";r=0;t=60".parse().unwrap())
    );
    let refused = app.oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
}

#[tokio::test]
async fn refused_is_axums_response_in_a_match() {
    async fn handler(State(limit): State<RateLimitLayer<MemoryLimiter>>, head: Parts) -> Response {
        match limit.admit(&head).await {
            Ok(admission) => admission.finish("done".into_response()),
            Err(refused) => refused.into_response(),
        }
    }
    let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(1), key::global());
    let app: Router = Router::new().route("/", get(handler)).with_state(limit);
    assert_eq!(status(app.clone()).await, StatusCode::OK);
    assert_eq!(status(app).await, StatusCode::TOO_MANY_REQUESTS);
}
