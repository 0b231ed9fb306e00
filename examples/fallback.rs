//! A limit in Redis that goes on without it: while Redis is away, each of two processes lets half of the limit pass.
//!
//! ```sh
//! redis-server --save "" & cargo run --example fallback --features redis
//! for i in $(seq 12); do curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:3000/; done   # ten pass
//! kill %1                                                                                       # no more Redis
//! for i in $(seq 12); do curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:3000/; done   # five pass
//! ```

use std::net::SocketAddr;
use std::num::NonZeroU32;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{
    FallbackLimiter, LimiterEvent, MemoryLimiter, Observer, Policy, Quota, RateLimitLayer, RedisLimiter, key,
};

/// How many processes like this one there are.
const PROCESSES: NonZeroU32 = NonZeroU32::new(2).unwrap();

/// Tells the changes of Redis' health, and not each of the requests that fell back.
struct Health;

impl Observer for Health {
    fn on_event(&self, event: &LimiterEvent) {
        if !matches!(event, LimiterEvent::FellBack { .. }) {
            eprintln!("limiter: {event:?}");
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());

    let redis = RedisLimiter::builder().prefix("fallback").observer(Health).connect(&url).await?;
    let limiter = FallbackLimiter::new(redis, MemoryLimiter::new(), PROCESSES);
    let policy = Policy::new("address", Quota::per_minute(10))?;
    let limit = RateLimitLayer::new(limiter, policy, key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://127.0.0.1:3000/  ten requests a minute at {url}, five without it");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
