//! Rules in a file, which is read again when it changes. What clients have used stays used.
//!
//! ```sh
//! cargo run --example rules
//! ```

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::observe::{Observer, RulesEvent};
use tower_ratelimit::{MemoryLimiter, rules::Rules};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/rules.yaml");

/// Prints when new rules are in force, and why a file is refused.
struct Print;

impl Observer for Print {
    fn on_rules_event(&self, event: &RulesEvent) {
        match event {
            RulesEvent::Loaded { version, rules, file: Some(file), .. } => {
                println!("version {version} is in force: {rules} rules of {}", file.display());
            }
            RulesEvent::Refused { error, .. } => println!("the rules stay as they were:\n{error}"),
            _ => {}
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = std::env::args().nth(1).unwrap_or(FILE.to_owned());
    let rules = Rules::builder()
        .key("user", |request| request.headers.get("x-user").cloned()) // behind the login in a real program
        .reload_every(std::time::Duration::from_secs(1))
        .read_file(&file)?;
    let limit = rules.layer(MemoryLimiter::new())?.observer(Print);
    let app = Router::new()
        .route("/posts", get(|| async { "the posts\n" }).post(|| async { "created\n" }))
        .route("/search/{*words}", get(|| async { "found\n" }))
        .layer(limit);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("http://127.0.0.1:3000/posts  limited by {file}; edit it, and ask again:");
    println!("curl -si -X POST -H 'x-user: alice' http://127.0.0.1:3000/posts | grep -iE '^(HTTP|ratelimit|retry)'");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
