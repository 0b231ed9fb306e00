//! A language model's API, which is paid by the token: each request reserves the most that it may cost, and is settled by
//! what it did cost when its stream has ended, or when the client has disconnected.
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
use axum::extract::{DefaultBodyLimit, Extension};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::routing::{get, post};
use axum::{Router, response::IntoResponse};
use tokio_stream::StreamExt;
use tower_ratelimit::{Bill, MemoryLimiter, OnAborted, Policy, Quota, RateLimitLayer, key};

/// The most tokens of an answer, if the request does not ask for fewer.
const MOST: u64 = 1_000;

/// The most bytes of a prompt.
const PROMPT: usize = 4_000;

fn max_tokens(headers: &HeaderMap) -> u64 {
    let said = headers.get("x-max-tokens").and_then(|value| value.to_str().ok()?.parse().ok());
    said.unwrap_or(MOST).min(MOST)
}

/// The most that a request may cost: its answer, and its prompt, whose words have at least one letter and a space.
fn reservation(request: &Parts) -> u64 {
    let length = request.headers.get("content-length").and_then(|value| value.to_str().ok()?.parse().ok());
    max_tokens(&request.headers) + length.unwrap_or(PROMPT).min(PROMPT).div_ceil(2) as u64
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

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Ten requests a minute, and 10,000 tokens an hour.
    let limiter = MemoryLimiter::new();
    let requests = Policy::new("requests", Quota::per_minute(10))?;
    let tokens = Policy::new("tokens", Quota::per_hour(10_000))?;
    // The handler bills each token before it is sent, so an aborted request costs exactly what it used. With a model that
    // goes on without its client, keep the default: the whole reservation.
    let used = tokens.clone().unit("tokens")?.cost(reservation).settle_by_bill().on_aborted(OnAborted::Refund);
    let limit = RateLimitLayer::new(limiter.clone(), requests, key::bearer_token()).and(used, key::bearer_token());
    // A cost of 0 in a rule that is not settled only looks.
    let look = RateLimitLayer::new(limiter, tokens.unit("tokens")?.cost(|_| 0), key::bearer_token());
    limit.check()?;
    look.check()?;

    let app = Router::new()
        .route("/complete", post(complete).layer(limit))
        .route("/usage", get(|| async { "see the header RateLimit\n" }).layer(look))
        .layer(DefaultBodyLimit::max(PROMPT));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -siN http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 100' -d 'Hello'");
    println!("curl -si http://127.0.0.1:3000/usage -H 'authorization: Bearer k'");
    axum::serve(listener, app).await?;
    Ok(())
}
