//! A limit in Redis that survives an outage: while Redis is away, each of two processes admits half
//! of the limit.
//!
//! ```sh
//! redis-server --save "" &
//! cargo run --example fallback --features fred &
//! for i in $(seq 12); do curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:3000/; done   # ten pass
//! kill %1; sleep 2                          # stops Redis; a denial is remembered for up to a second
//! for i in $(seq 12); do curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:3000/; done   # five pass
//! ```

use std::net::SocketAddr;
use std::num::NonZeroU32;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{
    MemoryLimiter, Quota, RateLimitLayer, RedisLimiter, Rule, key,
    limiter::FallbackLimiter,
    observe::{LimiterEvent, Observer},
};

/// The number of processes that share the limit.
const PROCESSES: NonZeroU32 = NonZeroU32::new(2).unwrap();

/// Logs when Redis goes away and returns, and why checks fail, but not each check.
struct Health;

impl Observer for Health {
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
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());

    let redis = RedisLimiter::builder().prefix("fallback").observer(Health).connect(&url).await?;
    let limiter = FallbackLimiter::new(redis, MemoryLimiter::new(), PROCESSES);
    let rule = Rule::new("address", Quota::per_minute(10))?;
    let limit = RateLimitLayer::new(limiter, rule, key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://127.0.0.1:3000/  ten requests a minute at {url}, five without it");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
