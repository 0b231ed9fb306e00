//! A server that refuses every upload, on two ports: as the layer does by default, on 3000, and
//! without reading what the client still sends, on 3001.
//!
//! ```sh
//! cargo run --example refused_uploads
//! head -c 2000000 /dev/zero > /tmp/file
//! # The refusal, with its Retry-After.
//! for i in $(seq 10); do curl -si --http2-prior-knowledge http://127.0.0.1:3000 --data-binary @/tmp/file | grep -i retry; done
//! # Often an error of curl instead.
//! for i in $(seq 10); do curl -si --http2-prior-knowledge http://127.0.0.1:3001 --data-binary @/tmp/file | grep -i retry; done
//! ```
//!
//! `tests/uploads/run` counts, for clients and proxies that are installed, how many uploads get the
//! refusal.

use std::error::Error;
use std::net::Ipv4Addr;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

/// A layer that lets one request pass, and refuses all others.
fn limit() -> Result<RateLimitLayer, Box<dyn Error>> {
    let uploads = Rule::new("uploads", Quota::per_day(1))?;
    Ok(RateLimitLayer::new(MemoryLimiter::new(), uploads, key::global()))
}

async fn serve(port: u16, limit: RateLimitLayer) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
    let app = Router::new().fallback(async || "the first one passes\n").layer(limit);
    Ok(axum::serve(listener, app).await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    println!("http://127.0.0.1:3000 reads on, http://127.0.0.1:3001 does not");
    tokio::try_join!(serve(3000, limit()?), serve(3001, limit()?.discard_body(0, Duration::ZERO)))?;
    Ok(())
}
