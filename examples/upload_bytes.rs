//! A file store with quotas in bytes. An upload costs its `Content-Length`, and is refunded if the
//! server fails to store it. A download costs the bytes that were sent, and at least 64 KiB if the
//! client disconnects.
//!
//! ```sh
//! cargo run --example upload_bytes
//! head -c 400000 /dev/zero > /tmp/file
//! for i in $(seq 3); do curl -si http://127.0.0.1:3000/files -T /tmp/file | grep -iE '^(HTTP|ratelimit:|retry)'; done
//! # The headers of each response report what is left after the previous download.
//! for i in $(seq 5); do curl -s http://127.0.0.1:3000/files -o /dev/null -D - | grep -iE '^(HTTP|ratelimit:)'; done
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode};
use axum::routing::get;
use axum::{Router, middleware};
use tower_ratelimit::{Head, MemoryLimiter, Quota, RateLimitLayer, Rule, key};

const MEGABYTE: u64 = 1_000_000;

/// Refuses an upload without a length, because its cost would be unknown.
async fn want_length(
    request: axum::extract::Request,
    next: middleware::Next,
) -> Result<axum::response::Response, StatusCode> {
    if request.method() == Method::PUT && Head::from(&request).content_length().is_none() {
        return Err(StatusCode::LENGTH_REQUIRED);
    }
    Ok(next.run(request).await)
}

async fn store(file: Bytes) -> Result<String, StatusCode> {
    if file.is_empty() { Err(StatusCode::INSUFFICIENT_STORAGE) } else { Ok(format!("stored {} bytes\n", file.len())) }
}

async fn load() -> Body {
    Body::from(vec![b'x'; 300_000])
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // A megabyte an hour in each direction. A file of a whole megabyte passes at once.
    let hour = Duration::from_secs(3_600);
    let uploads = Rule::new("uploads", Quota::token_bucket(MEGABYTE, hour)?)?
        .when(|request| request.method == Method::PUT)
        .cost(|request| request.content_length().unwrap_or(u64::MAX))
        .unit("content-bytes")?
        .refund_when(|response| response.status.is_server_error());
    // 64 KiB are reserved until it is known how many bytes are sent.
    let downloads = Rule::new("downloads", Quota::token_bucket(MEGABYTE, hour)?)?
        .when(|request| request.method == Method::GET)
        .cost(|_| 64 << 10)
        .settle_by_body();
    let limit = RateLimitLayer::new(MemoryLimiter::new(), uploads, key::peer_ip()).and(downloads, key::peer_ip());
    limit.check()?;

    let app = Router::new()
        .route("/files", get(load).put(store))
        .layer(DefaultBodyLimit::max(2_000_000))
        .layer(limit)
        .layer(middleware::from_fn(want_length));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/files -T a-file");
    println!("curl -s http://127.0.0.1:3000/files -o /dev/null -D -");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
