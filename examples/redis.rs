//! One limit for two processes: ten requests a minute for each address, over both together.
//!
//! ```sh
//! redis-server --save "" &
//! cargo run --example redis --features fred -- 3000 &
//! cargo run --example redis --features fred -- 3001 &
//! for i in $(seq 6); do for port in 3000 3001; do curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:$port/; done; done
//! ```
//!
//! The first ten of these twelve requests pass. `REDIS_URL` names another server.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{
    Quota, RateLimitLayer, RedisLimiter, key,
    observe::{LimiterEvent, Observer},
};

/// Logs when Redis goes away and returns, and why checks fail, which they also do while it is full or read-only.
/// Metrics come from `Stats`, on the layer; see the example `observe`.
struct Log;

impl Observer for Log {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        match event {
            LimiterEvent::StoreDown { server, error, .. } => eprintln!("{server} is down: {error}"),
            LimiterEvent::StoreUp { server, .. } => eprintln!("{server} is up"),
            LimiterEvent::StoreFailed { error, .. } => eprintln!("checks fail: {error}"),
            LimiterEvent::StoreRecovered => eprintln!("checks succeed again"),
            _ => {}
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).unwrap_or_else(|| "3000".to_owned()).parse()?;
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());

    // Connecting succeeds even if Redis is not up yet. Requests are then answered with 503 until it
    // is.
    let limiter = RedisLimiter::builder().prefix("example").observer(Log).connect(&url).await?;
    let limit = RateLimitLayer::new(limiter, Quota::per_minute(10), key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("http://127.0.0.1:{port}/  ten requests a minute, counted at {url}");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
