//! Limits by the client's address behind a reverse proxy, for single hosts and for whole networks,
//! and a limit by API key.
//!
//! ```sh
//! cargo run --example client_ip
//! curl -si http://127.0.0.1:3000/ -H 'x-forwarded-for: 6.6.6.6, 203.0.113.9'
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::key::{self, Prefixes, TrustedProxies};
use tower_ratelimit::{MemoryLimiter, MissingKey, Quota, RateLimitLayer, Rule};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The proxy runs on this host. It appends the address it was called from to `X-Forwarded-For`.
    // Entries to the left of that are the client's own claim and are not read.
    let proxies = TrustedProxies::networks(["127.0.0.0/8", "::1"])?;

    let address = Rule::new("address", Quota::per_minute(10))?;
    // Some customers have a whole /48 network. Each network gets ten times as much as one address.
    let network = Rule::new("network", Quota::per_minute(100))?;
    // Requests with an API key have another limit, too. Requests without one skip that rule.
    let api_key = Rule::new("api-key", Quota::per_hour(1_000))?.missing_key(MissingKey::Exempt);

    let limit = RateLimitLayer::new(MemoryLimiter::new(), address, key::client_ip(proxies.clone()))
        .and(network, key::client_network(proxies, Prefixes::default().ipv4(24)?.ipv6(48)?))
        .and(api_key, key::header("x-api-key"));

    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/ -H 'x-forwarded-for: 6.6.6.6, 203.0.113.9'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
