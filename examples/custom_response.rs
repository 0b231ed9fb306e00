//! Answers refusals with the application's own error type, and shows a handler how the client
//! stands.
//!
//! ```sh
//! cargo run --example custom_response
//! ```

use std::error::Error;

use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{StatusCode, header};
use tower_ratelimit::{
    MemoryLimiter, Quota, RateLimitLayer, Refusals, Rule, key,
    middleware::Refusal,
    observe::{Outcome, OutcomeKind},
};

/// The errors of this application: a JSON object with a code and a message.
#[derive(Debug)]
enum AppError {
    NoApiKey,
    SlowDown { seconds: Option<u64> },
    Unavailable,
}

impl From<&Refusal<'_>> for AppError {
    fn from(refusal: &Refusal<'_>) -> Self {
        match refusal.outcome().kind() {
            OutcomeKind::KeyMissing => Self::NoApiKey,
            OutcomeKind::FailedClosed => Self::Unavailable,
            _ => Self::SlowDown { seconds: refusal.retry_after_seconds() },
        }
    }
}

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        let (status, code, message) = match self {
            Self::NoApiKey => (StatusCode::UNAUTHORIZED, "no_api_key", "send your key as X-Api-Key".to_owned()),
            Self::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "please try again".to_owned()),
            Self::SlowDown { seconds: Some(seconds) } => {
                (StatusCode::TOO_MANY_REQUESTS, "slow_down", format!("please wait {seconds} seconds"))
            }
            Self::SlowDown { seconds: None } => (StatusCode::TOO_MANY_REQUESTS, "too_much", "ask for less".to_owned()),
        };
        let body = format!("{{\"error\":{{\"code\":\"{code}\",\"message\":\"{message}\"}}}}\n");
        (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
    }
}

/// With `expose_outcome`, the request carries the layer's outcome.
async fn home(outcome: Outcome) -> String {
    match outcome.binding() {
        Some(status) => format!("{} more requests\n", status.decision().remaining()),
        None => "no limit\n".to_owned(),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The layer adds `Retry-After`, the rate limit headers and `Cache-Control: no-store`.
    let limit = RateLimitLayer::new(
        MemoryLimiter::new(),
        Rule::new("api-key", Quota::per_minute(5))?,
        key::header("x-api-key"),
    )
    .refusals(Refusals::with(|refusal: &Refusal<'_>| AppError::from(refusal).into_response()))
    .expose_outcome(true);

    let app = Router::new().route("/", get(home)).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/");
    println!("for i in $(seq 6); do curl -si http://127.0.0.1:3000/ -H 'x-api-key: mine'; done");
    axum::serve(listener, app).await?;
    Ok(())
}
