//! A client over its first limit gets fewer results instead of a refusal. Only a client over its
//! second, larger limit is refused.
//!
//! ```sh
//! cargo run --example degrade
//! for i in $(seq 9); do curl -s -w '%{http_code}\n' http://127.0.0.1:3000/search; done
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::observe::{Outcome, OutcomeKind};
use tower_ratelimit::{MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key};

async fn search(outcome: Option<Outcome>) -> String {
    let is_degraded = outcome.is_some_and(|outcome| outcome.kind() == OutcomeKind::Degraded);
    let results = if is_degraded { 3 } else { 50 };
    format!("{results} results\n")
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let rich = Rule::new("rich", Quota::per_minute(3))?.mode(Mode::Degrade);
    let any = Rule::new("any", Quota::per_minute(6))?;
    let limit = RateLimitLayer::new(MemoryLimiter::new(), rich, key::peer_ip()).and(any, key::peer_ip());

    let app = Router::new().route("/search", get(search)).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 9); do curl -s -w '%{{http_code}}\\n' http://127.0.0.1:3000/search; done");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
