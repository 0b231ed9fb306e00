//! The API of a language model, charged by the token. Each request reserves the most that it may
//! cost. When its stream ends, or the client disconnects, the request is settled by what it used.
//!
//! ```sh
//! cargo run --example llm_tokens
//! curl -siN http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 100' -d 'Tell me a story'
//! # The client disconnects after a second. Only the tokens sent until then are charged.
//! curl -siN -m 1 http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 900' -d 'A longer one'
//! curl -si http://127.0.0.1:3000/usage -H 'authorization: Bearer k'
//! ```

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::DefaultBodyLimit;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use axum::{Router, response::IntoResponse};
use tokio_stream::StreamExt;
use tower_ratelimit::{
    Head, MemoryLimiter, Quota, RateLimitLayer, Rule, key,
    middleware::{OnAborted, Usage},
};

/// The limit of tokens in one answer. A request may ask for fewer.
const MOST: u64 = 1_000;

/// The limit of bytes in one prompt.
const PROMPT: u64 = 4_000;

fn max_tokens(headers: &HeaderMap) -> u64 {
    let said = headers.get("x-max-tokens").and_then(|value| value.to_str().ok()?.parse().ok());
    said.unwrap_or(MOST).min(MOST)
}

/// Returns the most that a request may cost: the tokens of its answer and of its prompt. A word of
/// the prompt has at least one letter and a space, so there are at most half as many words as
/// bytes.
fn reservation(request: &Head<'_>) -> u64 {
    let length = request.content_length().unwrap_or(PROMPT).min(PROMPT);
    max_tokens(request.headers) + length.div_ceil(2)
}

/// Stands in for a model: sends a token each 10 ms, as many as the request asked for.
async fn complete(headers: HeaderMap, usage: Usage, prompt: String) -> impl IntoResponse {
    // The prompt is charged even if the client disconnects before the answer ends.
    usage.add(prompt.split_whitespace().count() as u64);
    let tokens = (0..max_tokens(&headers)).map(|n| format!("token-{n} "));
    let stream = tokio_stream::iter(tokens).throttle(Duration::from_millis(10)).map(move |token| {
        usage.add(1);
        Ok::<_, Infallible>(Bytes::from(token))
    });
    Body::from_stream(stream)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Ten requests a minute, and 10,000 tokens an hour.
    let limiter = MemoryLimiter::new();
    let requests = Rule::new("requests", Quota::per_minute(10))?;
    let tokens = Rule::new("tokens", Quota::per_hour(10_000))?;
    // The handler reports each token before it sends it, so an aborted request costs what it used.
    // If your model goes on after the client disconnects, keep the default, which charges the whole
    // reservation.
    let used = tokens.clone().unit("tokens")?.cost(reservation).settle_by_usage().on_aborted(OnAborted::Refund);
    let limit = RateLimitLayer::new(limiter.clone(), requests, key::bearer_token()).and(used, key::bearer_token());
    // A cost of 0 looks at the state, unless the rule is settled later.
    let look = RateLimitLayer::new(limiter, tokens.unit("tokens")?.cost(|_| 0), key::bearer_token());
    limit.check()?;
    look.check()?;

    let app = Router::new()
        .route("/complete", post(complete).layer(limit))
        .route("/usage", get(|| async { "see the header RateLimit\n" }).layer(look))
        .layer(DefaultBodyLimit::max(PROMPT as usize));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -siN http://127.0.0.1:3000/complete -H 'authorization: Bearer k' -H 'x-max-tokens: 100' -d 'Hello'");
    println!("curl -si http://127.0.0.1:3000/usage -H 'authorization: Bearer k'");
    axum::serve(listener, app).await?;
    Ok(())
}
