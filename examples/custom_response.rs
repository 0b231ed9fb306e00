//! A refusal in the application's own words, and what a handler can learn about the limit.
//!
//! ```sh
//! cargo run --example custom_response
//! ```

use std::error::Error;

use axum::routing::get;
use axum::{Extension, Router};
use http::{Response, StatusCode, header};
use tower_ratelimit::{MemoryLimiter, Outcome, OutcomeKind, Policy, Quota, RateLimitLayer, Refusal, Refusals, key};

/// Every error of this application is a JSON object with a code and a message.
fn refuse(refusal: &Refusal<'_>) -> Response<String> {
    let (status, code, message) = match refusal.outcome().kind() {
        OutcomeKind::KeyMissing => (StatusCode::UNAUTHORIZED, "no_api_key", "send your key as X-Api-Key".to_owned()),
        OutcomeKind::FailedClosed => (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "please try again".to_owned()),
        _ => {
            let wait = refusal.outcome().retry_after().map_or(0, |wait| wait.as_millis().div_ceil(1_000));
            eprintln!("refused a request for {}", refusal.parts().uri.path());
            (StatusCode::TOO_MANY_REQUESTS, "slow_down", format!("please wait {wait} seconds"))
        }
    };
    let mut response = Response::new(format!("{{\"error\":{{\"code\":\"{code}\",\"message\":\"{message}\"}}}}\n"));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    // `Retry-After` and the rate-limit fields are added by the layer.
    response
}

/// With `expose_outcome`, a request carries what was decided about it.
async fn home(Extension(outcome): Extension<Outcome>) -> String {
    match outcome.binding() {
        Some(standing) => format!("{} more requests\n", standing.decision().remaining()),
        None => "no limit\n".to_owned(),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limit = RateLimitLayer::new(
        MemoryLimiter::new(),
        Policy::new("api-key", Quota::per_minute(5))?,
        key::header("x-api-key"),
    )
    .refusals(Refusals::with(refuse))
    .expose_outcome(true);

    let app = Router::new().route("/", get(home)).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/");
    println!("for i in $(seq 6); do curl -si http://127.0.0.1:3000/ -H 'x-api-key: mine'; done");
    axum::serve(listener, app).await?;
    Ok(())
}
