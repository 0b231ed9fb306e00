//! A file store with quotas in bytes. An upload costs its `Content-Length`, and is refunded if the
//! server fails to store it. A download costs the bytes that were sent, and at least 64 KiB if the
//! client disconnects. An upload of unknown length is answered with 411.
//!
//! ```sh
//! cargo run --example upload_bytes
//! head -c 400000 /dev/zero > /tmp/file
//! for i in $(seq 3); do curl -si http://127.0.0.1:3000/files -T /tmp/file | grep -iE '^(HTTP|ratelimit:|retry)'; done
//! head -c 400000 /dev/zero | curl -si http://127.0.0.1:3000/files -T - | head -n 1
//! # The headers of each response report what is left after the previous download.
//! for i in $(seq 5); do curl -s http://127.0.0.1:3000/files -o /dev/null -D - | grep -iE '^(HTTP|ratelimit:)'; done
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tower_ratelimit::middleware::Refusal;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Refusals, Rule, key};

const MEGABYTE: u64 = 1_000_000;

/// An upload of unknown length costs more than the quota has, so the layer refuses it. The layer reads the rest of the
/// upload first, so that the client gets this response.
fn refuse(refusal: &Refusal<'_>) -> Response {
    if refusal.head().content_length().is_none() {
        return (StatusCode::LENGTH_REQUIRED, "send a Content-Length\n").into_response();
    }
    refusal.default_response().map(Body::new)
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
    let limit = RateLimitLayer::new(MemoryLimiter::new(), uploads, key::peer_ip())
        .and(downloads, key::peer_ip())
        .refusals(Refusals::with(refuse));
    limit.check()?;

    let app = Router::new().route("/files", get(load).put(store)).layer(DefaultBodyLimit::max(2_000_000)).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/files -T a-file");
    println!("curl -s http://127.0.0.1:3000/files -o /dev/null -D -");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
