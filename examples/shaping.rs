//! A fragile backend gets five requests a second, never two at once. Other requests wait for their
//! turn, up to two seconds.
//!
//! ```sh
//! cargo run --example shaping --features tokio
//! seq 20 | xargs -P 20 -I_ curl -s -o /dev/null -w '%{http_code} after %{time_total} s\n' http://127.0.0.1:3000/ | sort
//! curl -s http://127.0.0.1:3000/waiting
//! ```

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tower_ratelimit::{
    MemoryLimiter, Quota, RateLimitLayer, Rule,
    clock::TokioTimer,
    key,
    observe::{Observed, Observer, OutcomeKind},
};

/// Prints each outcome, in place of metrics.
struct Log;

impl Observer for Log {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        let position = outcome.binding().map_or(0, |status| status.decision().position());
        match outcome.kind() {
            OutcomeKind::Delayed => println!("waited {:?}, behind {position}", outcome.delay()),
            OutcomeKind::Abandoned => println!("its client has disconnected while it waited"),
            kind => println!("{}", kind.as_str()),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let quota = Quota::leaky_queue(5, Duration::from_secs(1))?.max_wait(Duration::from_secs(2))?;
    let limit = RateLimitLayer::new(MemoryLimiter::new(), Rule::new("backend", quota)?, key::global())
        .timer(TokioTimer::new())
        .max_waiting(100)
        .observer(Log);

    let waiting = limit.clone();
    let app = Router::new()
        .route("/", get(|| async { "the fragile backend\n" }).layer(limit))
        .route("/waiting", get(move || async move { format!("{} wait\n", waiting.waiting()) }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!(
        "seq 20 | xargs -P 20 -I_ curl -s -o /dev/null -w '%{{http_code}} after %{{time_total}} s\\n' http://127.0.0.1:3000/ | sort"
    );
    println!("curl -s http://127.0.0.1:3000/waiting");
    axum::serve(listener, app).await?;
    Ok(())
}
