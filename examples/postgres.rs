//! One limit for two processes, in PostgreSQL: ten requests a minute for each address, over both together.
//!
//! ```sh
//! docker run --rm -p 5432:5432 -e POSTGRES_HOST_AUTH_METHOD=trust postgres &
//! cargo run --example postgres --features postgres -- 3000 &
//! cargo run --example postgres --features postgres -- 3001 &
//! for i in $(seq 6); do for port in 3000 3001; do curl -s -o /dev/null -w '%{http_code} ' http://127.0.0.1:$port/; done; done
//! ```
//!
//! The first ten of these twelve requests pass. `DATABASE_URL` names another server.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::limiter::store::StoreLimiterBuilder;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
use tower_ratelimit::observe::{LimiterEvent, Observer};
use tower_ratelimit::{Quota, RateLimitLayer, key};

/// Logs when the server goes away and returns, and why checks fail.
struct Log;

impl Observer for Log {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        match event {
            LimiterEvent::StoreDown { server, error, .. } => eprintln!("{server} is down: {error}"),
            LimiterEvent::StoreUp { server, .. } => eprintln!("{server} is up"),
            LimiterEvent::StoreFailed { error, .. } => eprintln!("checks fail: {error}"),
            LimiterEvent::StoreRecovered => eprintln!("checks succeed again"),
            _ => {}
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port: u16 = std::env::args().nth(1).unwrap_or_else(|| "3000".to_owned()).parse()?;
    let url =
        std::env::var("DATABASE_URL").unwrap_or_else(|_| "postgres://postgres@127.0.0.1:5432/postgres".to_owned());

    // After a crash of the server each client has its whole quota again. That is little for a limit of a minute, and
    // checks need not wait for the disk.
    let store = PostgresStore::builder().create_table(Durability::Unlogged).connect(&url).await?;
    let limiter = StoreLimiterBuilder::new().prefix("example").observer(Log).build(store)?;
    let limit = RateLimitLayer::new(limiter, Quota::per_minute(10), key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("http://127.0.0.1:{port}/  ten requests a minute, counted in PostgreSQL");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
