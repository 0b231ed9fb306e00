//! The shortest program with axum: ten requests a minute for each address.
//!
//! ```sh
//! cargo run --package quickstart
//! ```

use std::net::SocketAddr;

use axum::{Router, routing::get};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let quota = Quota::per_minute(10);
    let limit = RateLimitLayer::new(MemoryLimiter::new(), quota, key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("Ten requests a minute for each address. The eleventh is refused:");
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/; done");

    // Without the peer's address, every request gets a 500.
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await
}
