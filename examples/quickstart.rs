//! The shortest program with axum: ten requests a minute for each address.
//!
//! ```sh
//! cargo run --example quickstart
//! ```

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(10), key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://127.0.0.1:3000/  ten requests a minute; to see it refuse the eleventh:");
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");

    // Without this connect info no request has the peer's address.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}
