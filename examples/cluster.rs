//! Limits in a Redis Cluster: one policy for all clients and one for each API key. Their states are
//! on different servers.
//!
//! ```sh
//! REDIS_URL=redis-cluster://127.0.0.1:7000 cargo run --example cluster --features fred
//! curl -si -H 'x-api-key: alice' http://127.0.0.1:3000/
//! ```
//!
//! Both servers are asked at once. If one policy refuses, the charge of the other is refunded. In
//! between, another client may be refused early. With leases, each process may admit up to a lease
//! more than the shared limit in any interval.

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{OnError, Quota, RateLimitLayer, RedisLimiter, Rule, key};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis-cluster://127.0.0.1:7000".to_owned());

    let limiter = RedisLimiter::builder()
        .prefix("cluster")
        // Redis always stores hashes of API keys. With a secret, a reader of Redis cannot find a
        // key by trying candidates.
        .key_secret(*b"change me please")
        // Callers share 16 slots instead of having one each, so more checks share a call.
        .slot_groups(16)
        // The key of the shared policy is the busiest one. Each process leases up to 500 of its
        // units at a time.
        .lease_units(500)
        .connect(&url)
        .await?;

    let everybody = Rule::new("everybody", Quota::per_second(10_000))?;
    let caller = Rule::new("caller", Quota::per_minute(60).burst(10)?)?;
    let limit = RateLimitLayer::new(limiter, everybody, key::global())
        .and(caller, key::header("x-api-key"))
        // Requests pass while the caller's part of the cluster fails over.
        .on_error(OnError::Allow);
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://127.0.0.1:3000/  sixty requests a minute for each x-api-key, counted at {url}");
    axum::serve(listener, app).await?;
    Ok(())
}
