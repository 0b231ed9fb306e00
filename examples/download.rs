//! An export that each user downloads at a megabyte a second, over two processes together. The
//! first 256 kB of each download come at once.
//!
//! ```sh
//! redis-server --save "" &
//! cargo run --example download --features fred -- 3000 &
//! cargo run --example download --features fred -- 3001 &
//! export='curl -so /dev/null -H x-user:alice -w %{speed_download}\n http://127.0.0.1'
//! $export:3000/export                                    # about 1 MB/s
//! $export:3000/export & $export:3001/export & wait %- %+  # half of it each
//! ```
//!
//! A process takes the bytes of 50 ms from Redis in one call, so each user costs 20 calls a second
//! and process, however many downloads there are. `REDIS_URL` names another server.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::get;
use tower_ratelimit::{Quota, RateLimitLayer, RedisLimiter, Rule, key};

const MEGABYTE: u64 = 1_000_000;

async fn export() -> Body {
    Body::from(Bytes::from_static(&[b'x'; 10_000_000]))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).unwrap_or_else(|| "3000".to_owned()).parse()?;
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());

    let limiter = RedisLimiter::builder().prefix("download").connect(&url).await?;
    let requests = Rule::new("requests", Quota::per_minute(60))?;
    let pace = Rule::new("pace", Quota::per_second(MEGABYTE))?.pace_responses().pace_after(256_000);
    let limit = RateLimitLayer::new(limiter, requests, key::header("x-user")).and(pace, key::header("x-user"));
    limit.check()?;

    let app = Router::new().route("/export", get(export)).layer(limit);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("curl -o /dev/null -H 'x-user: alice' http://127.0.0.1:{port}/export");
    axum::serve(listener, app).await?;
    Ok(())
}
