//! Logins: a few tries a minute for each address, and an address that keeps failing is out for longer each time.
//!
//! A wrong password is a strike, and so is a try that the limit refuses. An operator opens an address again.
//!
//! ```sh
//! cargo run --example login_block
//! for i in $(seq 5); do curl -si -d wrong http://127.0.0.1:3000/login | grep -iE '^(HTTP|ratelimit:|retry)'; done
//! curl -X DELETE http://127.0.0.1:3000/blocked/127.0.0.1
//! ```

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Path, State};
use axum::http::StatusCode;
use axum::routing::{delete, post};
use tower_ratelimit::{Blocks, Key, MemoryLimiter, Policy, Quota, RateLimitLayer};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

type AddressBlocks = Blocks<MemoryLimiter>;

/// Whose tries are counted, by the layer and by the handler: this server listens on IPv4, where an address is one host's.
fn address_of(peer: SocketAddr) -> IpAddr {
    peer.ip()
}

async fn login(
    State(blocks): State<AddressBlocks>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    password: String,
) -> Result<&'static str, StatusCode> {
    if password == "open sesame" {
        return Ok("welcome\n");
    }
    if let Some(address) = Key::of(address_of(peer)) {
        blocks.strike(&address, 1).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    }
    Err(StatusCode::UNAUTHORIZED)
}

/// In earnest this asks who you are.
async fn unblock(State(blocks): State<AddressBlocks>, Path(address): Path<IpAddr>) -> StatusCode {
    let Some(address) = Key::of(address) else { return StatusCode::NOT_FOUND };
    match blocks.unblock(&address).await {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limiter = MemoryLimiter::new();
    // Three strikes within ten minutes: out for an hour, then two, four and so on, if it happens again within a week.
    let block = Policy::new("login-block", Quota::block(3, 10 * MINUTE, HOUR)?.growing(2, DAY, 7 * DAY)?)?;
    let rule = Policy::new("login", Quota::per_minute(5))?.block(block.clone())?;
    let blocks = Blocks::new(limiter.clone(), block)?;

    let limit = RateLimitLayer::new(limiter, rule, |request| {
        request.extensions.get().map(|ConnectInfo(peer)| address_of(*peer))
    });
    let app = Router::new()
        .route("/login", post(login).layer(limit))
        .route("/blocked/{address}", delete(unblock))
        .with_state(blocks);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 5); do curl -si -d wrong http://127.0.0.1:3000/login; done");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
