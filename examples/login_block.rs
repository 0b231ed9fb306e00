//! Logins with a few attempts a minute for each address. An address that keeps failing is blocked,
//! longer each time.
//!
//! A wrong password is a strike, and so is an attempt that the limit refuses. An operator can
//! unblock an address.
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
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, limiter::Blocks};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

type AddressBlocks = Blocks<MemoryLimiter>;

/// Returns the key of the address. The layer and the handler both use it. This server listens on
/// IPv4, where an address belongs to one host.
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

/// A real service authenticates the operator here.
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
    // Three strikes within ten minutes block an address for an hour. Each further block within a
    // week lasts twice as long.
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
