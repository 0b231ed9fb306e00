//! A limit in a Redis Cluster: a global policy and one for each API key, whose states are on different servers.
//!
//! ```sh
//! REDIS_URL=redis-cluster://127.0.0.1:7000 cargo run --example cluster --features redis
//! curl -si -H 'x-api-key: alice' http://127.0.0.1:3000/
//! ```
//!
//! Both policies are asked at once. If one refuses, what the other took is given back; meanwhile somebody else may be
//! refused early, and nobody is admitted over a limit.

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{OnError, Policy, Quota, RateLimitLayer, RedisLimiter, key};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis-cluster://127.0.0.1:7000".to_owned());

    let limiter = RedisLimiter::builder()
        .prefix("cluster")
        // Redis sees hashes of API keys in any case. With a secret, nobody who reads it can try which keys are used.
        .key_secret(*b"change me please")
        // So many sets of callers, each on one slot, instead of a slot for each caller: fuller calls.
        .groups(16)
        // The policy of everybody is the busiest key there is: each process takes up to 500 units at a time.
        .leases(500)
        .connect(&url)
        .await?;

    let everybody = Policy::new("everybody", Quota::per_second(10_000))?;
    let caller = Policy::new("caller", Quota::per_minute(60).burst(10)?)?;
    let limit = RateLimitLayer::new(limiter, everybody, key::global())
        .and(caller, key::header("x-api-key"))
        // While the caller's part of the cluster fails over, requests pass.
        .on_error(OnError::Allow);
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://127.0.0.1:3000/  sixty requests a minute for each x-api-key, counted at {url}");
    axum::serve(listener, app).await?;
    Ok(())
}
