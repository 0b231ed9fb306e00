//! A language model's API, which is paid by the token: each request reserves what it may cost at most, and is settled by
//! what it did cost when its stream has ended, or when the client has gone away in the middle.
//!
//! ```sh
//! cargo run --example llm_tokens
//! curl -siN http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 100' -d 'Tell me a story'
//! # Interrupted after a second: only what was sent until then is charged.
//! curl -siN -m 1 http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 900' -d 'A longer one'
//! curl -si http://127.0.0.1:3000/usage -H 'authorization: Bearer k'
//! ```

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::Extension;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::routing::{get, post};
use axum::{Router, response::IntoResponse};
use tokio_stream::StreamExt;
use tower_ratelimit::{Bill, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule, key};

/// What a request may cost, if it does not say less.
const MOST: u64 = 1_000;

fn max_tokens(headers: &HeaderMap) -> u64 {
    let said = headers.get("x-max-tokens").and_then(|value| value.to_str().ok()?.parse().ok());
    said.unwrap_or(MOST).min(MOST)
}

/// In place of a model: a token each 10 ms, as many as were asked for.
async fn complete(headers: HeaderMap, Extension(bill): Extension<Bill>, prompt: String) -> impl IntoResponse {
    // The prompt is paid whatever becomes of the answer.
    bill.add(prompt.split_whitespace().count() as u64);
    let tokens = (0..max_tokens(&headers)).map(|n| format!("token-{n} "));
    let stream = tokio_stream::iter(tokens).throttle(Duration::from_millis(10)).map(move |token| {
        bill.add(1);
        Ok::<_, Infallible>(Bytes::from(token))
    });
    Body::from_stream(stream)
}

/// A rule that takes tokens. A look costs nothing.
fn tokens(quota: Quota) -> Result<Rule, Box<dyn Error>> {
    let cost = |request: &Parts| if request.uri.path() == "/usage" { 0 } else { max_tokens(&request.headers) };
    Ok(Policy::new("tokens", quota)?.cost(cost).settle_by_bill())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Ten requests a minute, and 10,000 tokens an hour, beyond which no more than 1,000 may be owed.
    let requests = Policy::new("requests", Quota::per_minute(10))?.when(|request| request.uri.path() != "/usage");
    let limit = RateLimitLayer::new(MemoryLimiter::new(), requests, key::bearer_token())
        .and(tokens(Quota::per_hour(10_000).max_debt(MOST)?)?, key::bearer_token());
    limit.check()?;

    let app = Router::new()
        .route("/complete", post(complete))
        .route("/usage", get(|| async { "see the field RateLimit\n" }))
        .layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -siN http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 100' -d 'Hello'");
    println!("curl -si http://127.0.0.1:3000/usage -H 'authorization: Bearer k'");
    axum::serve(listener, app).await?;
    Ok(())
}
