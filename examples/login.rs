//! A login that counts failed attempts only: five an hour for each account, twenty for each address. Who knows the password
//! is never in anybody's way, and a hundred attempts at once are five.
//!
//! ```sh
//! cargo run --example login
//! for i in $(seq 6); do curl -si http://127.0.0.1:3000/login -u alice:wrong | grep -iE '^(HTTP|ratelimit:|retry)'; done
//! for i in $(seq 9); do curl -si http://127.0.0.1:3000/login -u bob:hunter2 | grep -iE '^(HTTP|ratelimit:)'; done
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, response};
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, key};

/// Name and password of `Authorization: Basic`.
fn credentials(headers: &HeaderMap) -> Option<(String, String)> {
    let encoded = headers.get("authorization")?.to_str().ok()?.strip_prefix("Basic ")?;
    let text = String::from_utf8(BASE64_STANDARD.decode(encoded).ok()?).ok()?;
    text.split_once(':').map(|(name, password)| (name.to_owned(), password.to_owned()))
}

async fn login(request: Request) -> (StatusCode, &'static str) {
    match credentials(request.headers()) {
        // In place of a database and a slow hash.
        Some((_, password)) if password == "hunter2" => (StatusCode::OK, "welcome\n"),
        Some(_) => (StatusCode::UNAUTHORIZED, "wrong name or password\n"),
        None => (StatusCode::BAD_REQUEST, "send a name and a password\n"),
    }
}

fn account(request: &Parts) -> Option<Key> {
    let (name, _) = credentials(&request.headers)?;
    // One account, however it is written.
    Key::of(name.to_lowercase())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let failed = |response: &response::Parts| response.status == StatusCode::UNAUTHORIZED;
    let account_fails = Policy::new("failed-account", Quota::per_hour(5))?.charge_when(failed);
    let address_fails = Policy::new("failed-address", Quota::per_hour(20))?.charge_when(failed);
    let limit = RateLimitLayer::new(MemoryLimiter::new(), address_fails, key::peer_ip())
        .and(account_fails.missing_key(tower_ratelimit::MissingKey::Exempt), account);

    let app = Router::new().route("/login", get(login).layer(limit));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/login -u alice:wrong");
    println!("curl -si http://127.0.0.1:3000/login -u bob:hunter2");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
