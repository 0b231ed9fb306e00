//! The metrics as a real Prometheus reads them, and every query of the dashboard and of the alerts.

mod alerts;
mod dashboard;
mod failures;
mod prometheus;
#[path = "../support/redis_limiter.rs"]
mod redis_limiter;
#[path = "../support/redis.rs"]
mod redis_server;

use std::convert::Infallible;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::{Request, Response};
use tower::{Layer, Service};
use tower_ratelimit::limiter::{StoreLoad, StoreLoadReader};
use tower_ratelimit::observe::Stats;

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Serves on a port that the system chooses.
fn serve(runtime: &tokio::runtime::Runtime, app: Router) -> u16 {
    let listener = runtime.block_on(tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let port = listener.local_addr().unwrap().port();
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    runtime.spawn(async move { axum::serve(listener, app).await });
    port
}

/// Returns a router that answers `path` behind a layer.
fn behind<L>(path: &str, layer: L) -> Router
where
    L: Layer<axum::routing::Route> + Clone + Send + Sync + 'static,
    L::Service: Service<Request<axum::body::Body>, Response = Response<axum::body::Body>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    <L::Service as Service<Request<axum::body::Body>>>::Future: Send + 'static,
{
    Router::new().route(path, get(|| async { "hello\n" })).layer(layer)
}

/// Returns a router that answers `path` with the metrics.
fn metrics(path: &str, stats: &Stats) -> Router {
    let stats = stats.clone();
    Router::new().route(path, get(async move || ([("content-type", Stats::CONTENT_TYPE)], stats.to_prometheus())))
}

/// Returns the load of a store whose calls take more than half of the deadline.
fn slow_store() -> StoreLoadReader {
    StoreLoadReader::new(|| {
        let mut load = StoreLoad::default();
        (load.waiting, load.calls_in_flight) = (70, 2);
        load.oldest_wait = Duration::from_millis(3);
        load.quickest_call = Some(Duration::from_millis(2));
        (load.call_time, load.deadline) = (Some(Duration::from_millis(26)), Some(Duration::from_millis(50)));
        Some(load)
    })
}

/// Sends a request over TCP. Returns the status and the body of the response.
fn fetch(port: u16, path: &str, key: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(LONG))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: localhost\r\nkey: {key}\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let (head, body) = response.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
    Ok((status, body.to_owned()))
}

/// Sends requests, each with a key, and returns their statuses.
fn send(port: u16, path: &str, keys: impl IntoIterator<Item = impl ToString>) -> Vec<u16> {
    keys.into_iter().map(|key| fetch(port, path, &key.to_string()).unwrap().0).collect()
}
