//! A whole axum server under load, everything refused, beside the same server without a layer: how much of its throughput
//! is left.
//!
//! `cargo bench --bench server`
//!
//! Server and clients share the process, each side on a thread of its own, over the loopback interface. Every client sends
//! its next request when it has the answer to the last, on a connection that stays open.
//!
//! What was aimed at: 0.95 of the bare server's throughput with everything refused. It is 0.86 with header fields and 0.91
//! without (rounds within 12 % of each other); tower_governor's is 0.11 to 0.18. A refusal takes 0.4 to 0.6 µs beside the
//! 4.6 µs of the bare server: five header fields instead of two, their map, the outcome in the extensions; and it is the
//! longer response, which the client has to read too.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use support::{is_smoke, median};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_ratelimit::{Headers, MemoryLimiter, Quota, RateLimitLayer, key};

/// Connections of the clients.
const CONNECTIONS: usize = 32;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Serves on a thread of its own, until the process ends.
fn serve(app: Router) -> SocketAddr {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
            tell.send(listener.local_addr().expect("it is bound")).expect("somebody waits for it");
            let app = app.into_make_service_with_connect_info::<SocketAddr>();
            axum::serve(listener, app).await.expect("it serves for ever");
        });
    });
    told.recv().expect("the server starts")
}

/// Sends one request after the other until the deadline, and returns how many were answered with this status.
async fn client(server: SocketAddr, status: &[u8], deadline: Instant) -> u64 {
    let mut stream = TcpStream::connect(server).await.expect("the server listens");
    stream.set_nodelay(true).expect("a socket's option");
    let mut buffer = vec![0; 4_096];
    let mut answered = 0;
    while Instant::now() < deadline {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("the server reads");
        let mut filled = 0;
        loop {
            filled += match stream.read(&mut buffer[filled..]).await {
                Ok(read) if read > 0 => read,
                _ => panic!("the server keeps the connection"),
            };
            if is_whole(&buffer[..filled]) {
                break;
            }
        }
        assert!(buffer[9..12] == *status, "{}", String::from_utf8_lossy(&buffer[..filled]));
        answered += 1;
    }
    answered
}

/// Whether this is a whole response: as much after its head as `content-length` says.
fn is_whole(response: &[u8]) -> bool {
    let Some(head) = response.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
    let text = std::str::from_utf8(&response[..head]).expect("a head is ASCII");
    let length = |line: &str| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse::<usize>().ok();
    response.len() >= head + 4 + text.lines().find_map(length).expect("the body's length is told")
}

/// Requests per second.
fn load(server: SocketAddr, status: &'static [u8], time: Duration) -> f64 {
    runtime().block_on(async move {
        let started = Instant::now();
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| tokio::spawn(client(server, status, started + time))).collect();
        let mut answered = 0;
        for client in clients {
            answered += client.await.expect("no client fails");
        }
        answered as f64 / started.elapsed().as_secs_f64()
    })
}

fn ours(quota: Quota, headers: Headers) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(MemoryLimiter::new(), quota, key::peer_ip()).headers(headers)
}

fn main() {
    let app = || Router::new().route("/", get(|| async { "hello" }));
    let governor = || {
        let mut builder = GovernorConfigBuilder::default();
        builder.period(Duration::from_secs(3_600)).burst_size(1);
        GovernorLayer::new(Arc::new(builder.finish().expect("the quota is possible")))
    };
    let (one, plenty) = (Quota::per_hour(1), Quota::per_second(1_000_000_000));
    let cases: [(&str, &[u8], SocketAddr); 5] = [
        ("bare, all served", b"200", serve(app())),
        ("ours, all served, header fields", b"200", serve(app().layer(ours(plenty, Headers::default())))),
        ("ours, all refused, header fields", b"429", serve(app().layer(ours(one, Headers::default())))),
        ("ours, all refused, no header fields", b"429", serve(app().layer(ours(one, Headers::none())))),
        ("tower_governor, all refused", b"429", serve(app().layer(governor()))),
    ];
    let (rounds, time) = if is_smoke() { (1, Duration::from_millis(20)) } else { (9, Duration::from_millis(700)) };
    // The quota of one is used up first: by a request of any status.
    let used_up = |server: SocketAddr| {
        runtime().block_on(async move {
            let mut stream = TcpStream::connect(server).await.expect("the server listens");
            let request = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request).await.expect("the server reads");
            stream.read_to_end(&mut Vec::new()).await.expect("the server answers and closes");
        });
    };
    cases.iter().for_each(|(_, _, server)| used_up(*server));
    let mut rates = vec![Vec::new(); cases.len()];
    for _ in 0..rounds {
        for (at, (_, status, server)) in cases.iter().enumerate() {
            rates[at].push(load(*server, status, time));
        }
    }
    let spread =
        |rates: &[f64]| rates.iter().copied().fold(0.0, f64::max) / rates.iter().copied().fold(f64::MAX, f64::min);
    let medians: Vec<f64> = rates.iter().cloned().map(median).collect();
    println!("\n{CONNECTIONS} connections, requests per second");
    for (at, (name, ..)) in cases.iter().enumerate() {
        let (rate, spread) = (medians[at], spread(&rates[at]));
        println!("  {name:<36} {rate:>9.0}   {:>5.2}x of bare   best / worst round {spread:.2}", rate / medians[0]);
    }
}
