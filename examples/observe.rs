//! Metrics for Prometheus, and a status page for people. `examples/observe/` has a Grafana dashboard, alerts with their
//! tests, and a configuration of Prometheus for this program.
//!
//! ```sh
//! cargo run --example observe
//! for i in $(seq 20); do curl -s -o /dev/null http://127.0.0.1:3000/; done
//! curl -s http://127.0.0.1:3001/metrics | grep ratelimit_requests_total
//! xdg-open http://127.0.0.1:3001/limits    # or any browser
//! curl -s -H 'accept: application/json' http://127.0.0.1:3001/limits
//! prometheus --config.file examples/observe/prometheus.yaml
//! ```

use std::error::Error;
use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::routing::get;
use tower_ratelimit::middleware::ModeSwitch;
use tower_ratelimit::observe::{Stats, StatusPage};
use tower_ratelimit::{Key, MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key};

/// Shows the network of a client. Its address is personal data.
fn masked(key: &Key) -> Option<String> {
    match key.address()? {
        IpAddr::V4(address) => {
            let [a, b, c, _] = address.octets();
            Some(format!("{a}.{b}.{c}.0/24"))
        }
        IpAddr::V6(address) => {
            let [a, b, c, ..] = address.segments();
            Some(format!("{a:x}:{b:x}:{c:x}::/48"))
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let stats = Stats::builder().reveal(masked).build();
    let client = Rule::new("client", Quota::per_minute(60).burst(10)?)?.warn_at_percent(20);
    let trial = Rule::new("trial", Quota::per_minute(5))?.mode(Mode::Shadow);
    let mode = ModeSwitch::new(Mode::Enforce);
    let limit = RateLimitLayer::new(MemoryLimiter::new(), client.mode(&mode), key::peer_ip())
        .and(trial, key::peer_ip())
        .observer(stats.clone());
    // A separate port for operators, who may switch the limit of clients off there. Everyone on this machine is one:
    // name the user of your login instead. The page acts only under an address, `localhost` or a `StatusPage::hosts`.
    let page = StatusPage::new(stats.clone()).layer("public", &limit).switch("client", &mode);
    let page = page.operators(|_| Some("local".to_owned()), |action| println!("{action}"));
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let metrics = move || async move { ([("content-type", Stats::CONTENT_TYPE)], stats.to_prometheus()) };
    let operators = Router::new().route("/metrics", get(metrics)).route_service("/limits", page);

    let [public, internal] = [3000, 3001].map(|port| tokio::net::TcpListener::bind(("127.0.0.1", port)));
    let (public, internal) = (public.await?, internal.await?);
    println!("for i in $(seq 20); do curl -s -o /dev/null http://127.0.0.1:3000/; done");
    println!("curl -s http://127.0.0.1:3001/metrics | grep ratelimit_requests_total");
    println!("http://127.0.0.1:3001/limits in a browser");
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::try_join!(axum::serve(public, app).into_future(), axum::serve(internal, operators).into_future())?;
    Ok(())
}
