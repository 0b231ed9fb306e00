//! A new limit runs in shadow mode at first, and metrics count the requests that it would refuse.
//! Then it is enforced, without a restart.
//!
//! ```sh
//! cargo run --example shadow_then_enforce
//! for i in $(seq 5); do curl -s -o /dev/null -w '%{http_code}\n' http://127.0.0.1:3000/; done   # all pass
//! curl -s http://127.0.0.1:3001/mode -d enforce
//! curl -s -o /dev/null -w '%{http_code}\n' http://127.0.0.1:3000/                               # refused
//! curl -s http://127.0.0.1:3001/outcomes
//! ```

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};
use tower_ratelimit::{
    MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key,
    middleware::ModeSwitch,
    observe::{Observed, Observer},
};

/// Counts each outcome, in place of metrics.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Observer for Counts {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(outcome.kind().as_str()).or_default() += 1;
        // Warns before a client is refused, for example to send the customer a mail.
        if outcome.is_near() {
            *counts.entry("near the limit").or_default() += 1;
        }
    }
}

impl Counts {
    fn text(&self) -> String {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.iter().map(|(outcome, count)| format!("{outcome}: {count}\n")).collect()
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mode, counts) = (ModeSwitch::new(Mode::Shadow), Counts::default());
    let client = Rule::new("client", Quota::per_minute(3))?.mode(&mode).warn_at_percent(34);
    let limit = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip()).observer(counts.clone());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);

    // A separate port for operators.
    let switch = move |wanted: String| async move {
        let wanted = match wanted.trim() {
            "shadow" => Mode::Shadow,
            "enforce" => Mode::Enforce,
            _ => return (StatusCode::BAD_REQUEST, "shadow or enforce\n".to_owned()),
        };
        (StatusCode::OK, format!("was {:?}\n", mode.set(wanted)))
    };
    let operators =
        Router::new().route("/mode", post(switch)).route("/outcomes", get(move || async move { counts.text() }));

    let [public, internal] = [3000, 3001].map(|port| tokio::net::TcpListener::bind(("127.0.0.1", port)));
    let (public, internal) = (public.await?, internal.await?);
    println!("for i in $(seq 5); do curl -s -o /dev/null -w '%{{http_code}}\\n' http://127.0.0.1:3000/; done");
    println!("curl -s http://127.0.0.1:3001/mode -d enforce; curl -s http://127.0.0.1:3001/outcomes");
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::try_join!(axum::serve(public, app).into_future(), axum::serve(internal, operators).into_future())?;
    Ok(())
}
