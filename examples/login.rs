//! A login that counts only failed attempts: five an hour for each account, twenty for each
//! address. Correct logins are refunded. Of a hundred attempts sent at once, five reach the
//! password check.
//!
//! The account is in the body of the request, so the handler asks the limit for it.
//!
//! ```sh
//! cargo run --example login
//! for i in $(seq 6); do curl -si http://127.0.0.1:3000/login -d 'name=alice&password=wrong' | grep -iE '^(HTTP|ratelimit:|retry)'; done
//! for i in $(seq 9); do curl -si http://127.0.0.1:3000/login -d 'name=bob&password=hunter2' | grep -iE '^(HTTP|ratelimit:)'; done
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::routing::post;
use axum::{Form, Router};
use tower_ratelimit::{Head, Key, MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Refused};

type Limit = RateLimitLayer<MemoryLimiter>;

/// The name of an account, which is the key of a limit.
#[derive(Clone)]
struct Account(String);

async fn login(
    State(attempts): State<Limit>,
    mut head: Parts,
    Form(fields): Form<HashMap<String, String>>,
) -> Result<(StatusCode, &'static str), Refused> {
    let (Some(name), Some(password)) = (fields.get("name"), fields.get("password")) else {
        return Ok((StatusCode::BAD_REQUEST, "send a name and a password\n"));
    };
    // All spellings of a name share one limit.
    head.extensions.insert(Account(name.to_lowercase()));
    let attempt = attempts.admit(&head).await?;
    // Stands in for a database and a slow password hash.
    if password == "hunter2" {
        attempt.refund();
        Ok((StatusCode::OK, "welcome\n"))
    } else {
        Ok((StatusCode::UNAUTHORIZED, "wrong name or password\n"))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let account = |head: &Head<'_>| head.extensions.get().and_then(|Account(name)| Key::of(name.as_str()));
    let limiter = MemoryLimiter::new();
    let by_account = Limit::new(limiter.clone(), Rule::new("failed-account", Quota::per_hour(5))?, account);
    let failed = Rule::new("failed-address", Quota::per_hour(20))?.refund_when(|response| response.status.is_success());
    let by_address = Limit::new(limiter, failed, key::peer_ip());

    let app = Router::new().route("/login", post(login).layer(by_address)).with_state(by_account);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/login -d 'name=alice&password=wrong'");
    println!("curl -si http://127.0.0.1:3000/login -d 'name=bob&password=hunter2'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
