//! A limit for each user, or each address before the login, with JSON of its own, CORS, a
//! health check without a limit, and metrics.
//!
//! ```sh
//! cargo run --example first_day
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::{Router, routing::get};
use tower::ServiceBuilder;
use tower_http::cors::{Any, CorsLayer};
use tower_ratelimit::middleware::Refusal;
use tower_ratelimit::observe::{Outcome, Stats};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Refusals, Rule, key};

#[derive(Clone)]
struct User {
    id: u64,
}

/// Stands for your authentication, which puts the user into the request.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get("authorization");
    if token.is_some_and(|token| token == "Bearer alice") {
        request.extensions_mut().insert(User { id: 1 });
    }
    next.run(request).await
}

/// The body of a refusal. The layer adds the status, the content type and `Retry-After`.
fn refused(refusal: &Refusal<'_>) -> String {
    let error = serde_json::json!({
        "status": refusal.status().as_u16(),
        "limit": refusal.limit(),
        "retry_after": refusal.retry_after_seconds(),
    });
    serde_json::json!({ "error": error }).to_string()
}

/// A handler can see what was decided, because of `expose_outcome`.
async fn hello(outcome: Outcome) -> String {
    let left = outcome.binding().map(|status| status.decision().remaining());
    format!("hello, {} more at once\n", left.unwrap_or_default())
}

pub(crate) fn app(stats: Stats) -> Result<Router, Box<dyn Error>> {
    // 60 a minute. After a pause at most 10 of them at once.
    let rule = Rule::new("client", Quota::per_minute(60).burst(10)?)?;
    let client = key::either(key::extension(|user: &User| user.id), key::peer_ip());
    let limit = RateLimitLayer::new(MemoryLimiter::new(), rule, client)
        .refusals(Refusals::json().body(refused))
        .expose_outcome(true)
        .observer(stats);
    limit.check()?;

    // Outside of the limit, so that refusals have its headers too. Scripts of other sites
    // may read the headers that are exposed.
    let cors = CorsLayer::new().allow_origin(Any).allow_headers(Any);
    let cors = cors.expose_headers(limit.header_names());

    // A request passes the layers from the first to the last.
    let layers = ServiceBuilder::new().layer(cors).layer(from_fn(authenticate));
    let app = Router::new().route("/", get(hello)).layer(layers.layer(limit));
    // A route that is added after `layer` has none of these layers.
    Ok(app.route("/health", get(|| async { "ok\n" })))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let stats = Stats::new();
    let app = app(stats.clone())?;
    let format = [("content-type", Stats::CONTENT_TYPE)];
    let metrics = get(move || async move { (format, stats.to_prometheus()) });
    // On a port that the internet does not reach.
    let internal = Router::new().route("/metrics", metrics);

    let public = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    let operators = tokio::net::TcpListener::bind("127.0.0.1:3001").await?;
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/; done");
    println!("curl -s http://127.0.0.1:3000/ -H 'authorization: Bearer alice'");
    println!("curl -s http://127.0.0.1:3001/metrics | grep ratelimit_requests_total");

    // This call gives each request the peer's address.
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async { axum::serve(operators, internal).await });
    axum::serve(public, app).await?;
    Ok(())
}
