//! axum 0.7, with the layer as it is: without the feature `axum`, which means axum 0.8.
//!
//! ```sh
//! cargo run --manifest-path examples/frameworks/Cargo.toml --bin axum_07
//! ```

use std::net::SocketAddr;

use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::middleware::map_request;
use axum::routing::get;
use tower_ratelimit::key::{self, PeerAddr};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule};

/// Puts the peer's address where the layer looks for it.
async fn peer(ConnectInfo(peer): ConnectInfo<SocketAddr>, mut request: Request) -> Request {
    request.extensions_mut().insert(PeerAddr::from(peer));
    request
}

fn app(limiter: MemoryLimiter) -> Result<Router, Box<dyn std::error::Error>> {
    let api = Rule::new("api", Quota::per_minute(10))?;
    let limit = RateLimitLayer::new(limiter, api, key::peer_ip());
    // The layer that is added last sees a request first.
    Ok(Router::new().route("/", get(|| async { "hello\n" })).layer(limit.wrap_body()).layer(map_request(peer)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    axum::serve(listener, app(MemoryLimiter::new())?.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;
    use tower_ratelimit::clock::ManualClock;

    use super::*;

    /// Time stands still, so no unit comes back.
    fn limiter() -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap()
    }

    #[tokio::test]
    async fn layer_admits_ten_for_each_address() {
        let app = app(limiter()).unwrap();
        let get = async |peer: &str| {
            let mut request = Request::new(Body::empty());
            request.extensions_mut().insert(ConnectInfo(peer.parse::<SocketAddr>().unwrap()));
            app.clone().oneshot(request).await.unwrap()
        };
        for left in (0..10).rev() {
            let response = get("192.0.2.1:1").await;
            assert_eq!(response.status(), 200);
            let told = response.headers()["ratelimit"].to_str().unwrap();
            assert!(told.starts_with(&format!("\"api\";r={left};")), "{told}");
        }
        assert_eq!(get("192.0.2.1:2").await.status(), 429);
        assert_eq!(get("192.0.2.2:1").await.status(), 200);
    }
}
