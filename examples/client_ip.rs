//! The client's address behind a reverse proxy, by two networks' sizes, with a limit for each API key beside them.
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
use tower_ratelimit::{MemoryLimiter, MissingKey, Policy, Quota, RateLimitLayer};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The proxy runs on this host. It appends the address it was called from to X-Forwarded-For; what stands left of
    // that is the client's own claim, and is not read.
    let proxies = TrustedProxies::networks(["127.0.0.0/8", "::1"])?;

    let address = Policy::new("address", Quota::per_minute(10))?;
    // Some are given whole /48 networks; ten times as much for these.
    let network = Policy::new("network", Quota::per_minute(100))?;
    // Requests with an API key have a limit of their own besides; others do not need one.
    let api_key = Policy::new("api-key", Quota::per_hour(1_000))?.missing_key(MissingKey::Exempt);

    let limit = RateLimitLayer::new(MemoryLimiter::new(), address, key::client_ip(proxies.clone()))
        .and(network, key::client_network(proxies, Prefixes::default().ipv4(24)?.ipv6(48)?))
        .and(api_key, key::header("x-api-key"));

    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/ -H 'x-forwarded-for: 6.6.6.6, 203.0.113.9'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
