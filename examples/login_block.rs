//! Logins that close an address which keeps failing, longer each time.
//!
//! Only failed logins count: each is charged before its outcome is known, and refunded if it was
//! right. If right logins at once use up the quota, their refunds open the address again. An operator
//! can unblock an address.
//!
//! ```sh
//! cargo run --example login_block
//! for i in $(seq 6); do curl -si -d wrong http://127.0.0.1:3000/login | grep -iE '^(HTTP|ratelimit:|retry)'; done
//! curl -X DELETE http://127.0.0.1:3000/blocked/127.0.0.1
//! for i in $(seq 9); do curl -si -d 'open sesame' http://127.0.0.1:3000/login | grep -iE '^(HTTP|ratelimit:)'; done
//! ```

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Path, State};
use axum::http::StatusCode;
use axum::routing::{delete, post};
use tower_ratelimit::{Key, MemoryLimiter, Quota, RateLimitLayer, Rule, limiter::Blocks};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);
const DAY: Duration = Duration::from_secs(86_400);

type AddressBlocks = Blocks<Arc<MemoryLimiter>>;

/// Stands in for a database and a slow password hash.
async fn login(password: String) -> Result<&'static str, StatusCode> {
    if password == "open sesame" { Ok("welcome\n") } else { Err(StatusCode::UNAUTHORIZED) }
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
    // Five failed logins within ten minutes close an address for an hour. Each further block within a
    // week lasts twice as long.
    let block = Quota::block(5, 10 * MINUTE, HOUR)?.growing(2, DAY, 7 * DAY)?;
    let failed = Rule::new("failed-logins", block)?.charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
    // This server listens on IPv4, where an address belongs to one host.
    let limit = RateLimitLayer::new(MemoryLimiter::new(), failed, |request| {
        request.extensions.get().map(|ConnectInfo(peer): &ConnectInfo<SocketAddr>| peer.ip())
    });
    let blocks = limit.blocks("failed-logins").ok_or("the rule is a block")?;
    let app = Router::new()
        .route("/login", post(login).layer(limit))
        .route("/blocked/{address}", delete(unblock))
        .with_state(blocks);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 6); do curl -si -d wrong http://127.0.0.1:3000/login; done");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
