//! A whole axum server under load, beside the same server without a layer: how much of its throughput is left.
//!
//! Servers and clients share the process, each side on a thread of its own, over the loopback interface. Every client
//! sends its next request when it has the answer to the last, on a connection that stays open.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::contender::LayerSetup;
use crate::contenders;
use crate::race::{Noise, Plan, median, spread};
use crate::report::{Better, Case};

const CONNECTIONS: usize = 32;
const AGAINST: &str = "no layer";

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    for denied in [false, true] {
        for headers in [true, false] {
            let what = if denied { "everything refused" } else { "everything allowed" };
            let fields = if headers { "with" } else { "without" };
            let name = format!("{what}, {fields} header fields, one server thread");
            if plan.is_wanted(&name) {
                cases.push(case(plan, name, &LayerSetup { keys: 1, denied, headers }));
            }
        }
    }
    cases
}

fn case(plan: &Plan, name: String, setup: &LayerSetup) -> Case {
    let app = || Router::new().route("/", get(|| async { "hello" }));
    let mut servers = vec![(AGAINST, serve(app()), "200")];
    for contender in contenders::all() {
        if let Some(app) = contender.app(app(), setup) {
            servers.push((contender.name(), serve(app), if setup.denied { "429" } else { "200" }));
        }
    }
    // The first request of all is let through.
    servers.iter().for_each(|(_, server, _)| runtime().block_on(first(*server)));
    let mut rates = vec![Vec::new(); servers.len()];
    let mut noise = Noise::default();
    for _ in 0..plan.rounds() {
        noise.sample();
        for (at, (_, server, status)) in servers.iter().enumerate() {
            rates[at].push(load(*server, status, 3 * plan.round().max(Duration::from_millis(5))));
        }
    }
    let names = servers.iter().map(|(name, ..)| *name).collect();
    let spreads: Vec<f64> = rates.iter().map(|rates| spread(rates)).collect();
    let medians: Vec<f64> = rates.into_iter().map(median).collect();
    let mut case = Case::new(name, "requests/s", Better::Higher, AGAINST, names, &medians);
    case.steadiness(&spreads, &noise);
    case.told()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Serves on a thread of its own, until the process ends.
fn serve(app: Router) -> SocketAddr {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        runtime().block_on(async move {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
            tell.send(listener.local_addr().expect("it is bound")).expect("somebody waits for it");
            let app = app.into_make_service_with_connect_info::<SocketAddr>();
            axum::serve(listener, app).await.expect("it serves for ever");
        });
    });
    told.recv().expect("the server starts")
}

/// A request whose answer may be any.
async fn first(server: SocketAddr) {
    let mut stream = TcpStream::connect(server).await.expect("the server listens");
    let request = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request).await.expect("the server reads");
    stream.read_to_end(&mut Vec::new()).await.expect("the server answers and closes");
}

/// Requests per second.
fn load(server: SocketAddr, status: &'static str, time: Duration) -> f64 {
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

/// Sends one request after the other until the deadline, and returns how many were answered with this status.
async fn client(server: SocketAddr, status: &str, deadline: Instant) -> u64 {
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
        assert!(buffer[9..12] == *status.as_bytes(), "{}", String::from_utf8_lossy(&buffer[..filled]));
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
