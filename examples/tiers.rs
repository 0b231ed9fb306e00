//! The limits of a gateway: one for all clients together, one for a costly endpoint, and for each
//! client that of its plan. They are in one layer, so a request is charged to all of them or to
//! none. Another layer protects the customer look-up.
//!
//! ```sh
//! cargo run --example tiers
//! for i in $(seq 6); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done
//! curl -si http://127.0.0.1:3000/search -H 'authorization: Bearer pro-key'
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use tower_ratelimit::{Head, Key, MemoryLimiter, Quota, RateLimitLayer, Rule, key};

/// A known customer. Requests without one are anonymous.
#[derive(Clone, Copy)]
struct Customer {
    id: u64,
    plan: Plan,
}

#[derive(Clone, Copy)]
enum Plan {
    Anonymous,
    Free,
    Pro,
}

/// Stands in for a look-up in a database.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let customer = match token.and_then(|value| value.strip_prefix("Bearer ")) {
        Some("free-key") => Some(Customer { id: 1, plan: Plan::Free }),
        Some("pro-key") => Some(Customer { id: 2, plan: Plan::Pro }),
        _ => None,
    };
    if let Some(customer) = customer {
        request.extensions_mut().insert(customer);
    }
    next.run(request).await
}

fn customer(request: &Head<'_>) -> Option<Customer> {
    request.extensions.get().copied()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limiter = MemoryLimiter::new();
    let address = key::peer_ip();

    // By address, before the customer is looked up. This layer keeps its charge even if a limit
    // further in refuses the request, so it bounds the look-ups.
    let look_ups = Rule::new("look-ups", Quota::per_second(50))?;
    let look_ups = RateLimitLayer::new(limiter.clone(), look_ups, address.clone());

    // For all clients together.
    let everyone = Rule::new("everyone", Quota::per_second(5_000))?;
    // For each client by its plan. The key of a customer is its number, that of other clients their
    // address.
    let quotas = [Quota::per_minute(5), Quota::per_minute(60), Quota::per_minute(600)];
    let plan = Rule::plans("client", quotas, |request| {
        customer(request).map_or(Plan::Anonymous, |customer| customer.plan) as usize
    })?;
    let client = move |request: &Head<'_>| match customer(request) {
        Some(customer) => Key::of(("customer", customer.id)),
        None => Key::of(("address", address(request)?)),
    };
    let search = Rule::all_of("search", [Quota::per_second(10), Quota::per_hour(1_000)])?
        .when(|request| request.uri.path() == "/search");
    // One layer holds all three, so a client over its own limit does not use up the limit that all
    // clients share.
    let tiers = RateLimitLayer::new(limiter, everyone, key::global()).and(plan, client.clone()).and(search, client);

    let app = Router::new()
        .route("/", get(|| async { "hello\n" }))
        .route("/search", get(|| async { "found\n" }))
        .layer(tiers)
        .layer(from_fn(authenticate))
        .layer(look_ups);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -si http://127.0.0.1:3000/");
    println!("curl -si http://127.0.0.1:3000/search -H 'authorization: Bearer pro-key'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
