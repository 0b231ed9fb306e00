//! The pace of downloads beside nginx's `limit_rate`, over TCP on this machine.
//!
//! `cargo bench --bench pace`
//!
//! Each server is a process of its own. It sends 1, 100 and 1,000 downloads at 100 kB/s each, for ten seconds. Each has
//! a key of its own here, and a connection of its own in nginx.
//!
//! * `of the pace` is the sum of what clients had read after ten seconds, divided by what the pace allows; then the
//!   download with the least and the one with the most.
//! * `s a GB` is the processor time of the server for what it sent, and `unpaced` is what it takes without a pace for as
//!   many downloads of as many bytes.
//! * `RSS` is the anonymous memory of the server then. The last line is that of 1,000 readers that stop after 64 KiB: a
//!   second after that, and ten seconds later.
//!
//! `--seconds=N` changes the ten seconds. Words without dashes pick servers by name.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod support;

#[path = "../tests/support/nginx.rs"]
mod nginx;
#[path = "../tests/support/redis.rs"]
mod redis_server;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::routing::get;
use nginx::Nginx;
use redis_server::{free_port, processor_time};
use support::{is_smoke, is_wanted};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

/// Bytes a second of each download.
const RATE: u64 = 100_000;

/// The number of connections that may wait to be accepted. Tokio's 1,024 are too few here, and a client that finds no room
/// tries again after a second.
const BACKLOG: u32 = 4_096;

/// The bytes of the file that is downloaded. No download reaches its end.
const FILE: usize = 10_000_000;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime starts");
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.iter().find_map(|argument| argument.strip_prefix("--serve=")) {
        Some(port) => runtime.block_on(serve(port.parse().expect("it is a port"))),
        None => runtime.block_on(compare()),
    }
}

/// Serves `/paced` and `/free`, in a process of its own.
async fn serve(port: u16) {
    static BYTES: [u8; FILE] = [b'x'; FILE];
    let file = || async { Body::from(Bytes::from_static(&BYTES)) };
    let rule = Rule::new("pace", Quota::per_second(RATE)).expect("it is a name").pace_responses();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::header("x-user"));
    let app = axum::Router::new().route("/paced", get(file)).layer(layer).route("/free", get(file));
    let socket = tokio::net::TcpSocket::new_v4().expect("there is a socket");
    socket.set_reuseaddr(true).expect("the socket is not bound yet");
    socket.bind((Ipv4Addr::LOCALHOST, port).into()).expect("the port is free");
    let listener = socket.listen(BACKLOG).expect("it listens");
    axum::serve(listener, app).await.expect("it serves");
}

/// A server that runs.
enum Server {
    Own(Child),
    Nginx(Nginx),
}

impl Server {
    fn process(&self) -> u32 {
        match self {
            Self::Own(child) => child.id(),
            Self::Nginx(nginx) => nginx.process(),
        }
    }

    /// Returns its anonymous memory in MB.
    fn megabytes(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0) / 1_000.0
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Self::Own(child) = self {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

async fn start(name: &str, port: u16) -> Server {
    let server = match name {
        "nginx" => {
            let server = |directory: &Path| {
                std::fs::write(directory.join("file"), vec![b'x'; FILE]).expect("the directory can be written to");
                let root = directory.display();
                format!(
                    "server {{ listen 127.0.0.1:{port} backlog={BACKLOG}; root {root};
                     location = /paced {{ try_files /file =404; limit_rate {RATE}; }}
                     location = /free {{ try_files /file =404; }} }}"
                )
            };
            Server::Nginx(Nginx::start("pace", &[], server).await)
        }
        _ => {
            let program = std::env::current_exe().expect("a program has a path");
            let child = Command::new(program).arg(format!("--serve={port}")).stdout(Stdio::null()).spawn();
            Server::Own(child.expect("it runs"))
        }
    };
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server
}

/// Reads a file, until this instant or this many bytes. Returns the bytes, and the connection.
async fn download(at: SocketAddr, path: &str, user: usize, until: Instant, most: u64) -> (u64, TcpStream) {
    let mut stream = TcpStream::connect(at).await.expect("the server accepts connections");
    let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nx-user: {user}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("the server reads");
    let (mut buffer, mut bytes) = (vec![0; 65_536], 0);
    while bytes < most {
        let read = tokio::time::timeout_at(until.into(), stream.read(&mut buffer)).await;
        match read {
            Ok(Ok(read)) if read > 0 => bytes += read as u64,
            _ => break,
        }
    }
    (bytes, stream)
}

/// Reads the file over this many connections. Returns the bytes of each, and the seconds of the server for a GB.
async fn download_all(
    server: &Server,
    at: SocketAddr,
    path: &'static str,
    count: usize,
    time: Duration,
) -> (Vec<u64>, f64) {
    let before = processor_time(server.process());
    let most = if path == "/paced" { u64::MAX } else { RATE * time.as_secs() };
    let mut downloads = JoinSet::new();
    for user in 0..count {
        downloads.spawn(async move { download(at, path, user, Instant::now() + time, most).await.0 });
    }
    let bytes = downloads.join_all().await;
    let spent = processor_time(server.process()).saturating_sub(before);
    let gigabytes = bytes.iter().sum::<u64>() as f64 / 1e9;
    (bytes, spent.as_secs_f64() / gigabytes)
}

async fn compare() {
    let option = std::env::args().find_map(|argument| Some(argument.strip_prefix("--seconds=")?.to_owned()));
    let usual = if is_smoke() { 1 } else { 10 };
    let time = Duration::from_secs(option.map_or(usual, |seconds| seconds.parse().expect("it is a number")));
    let counts: &[usize] = if is_smoke() { &[1, 20] } else { &[1, 100, 1_000] };
    println!("| server | downloads | of the pace | least | most | s a GB | unpaced | RSS, MB |");
    println!("|---|---|---|---|---|---|---|---|");
    for name in ["tower-ratelimit", "nginx"].into_iter().filter(|name| is_wanted(name)) {
        let port = free_port();
        let (server, at) = (start(name, port).await, SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        for count in counts {
            let (_, free) = download_all(&server, at, "/free", *count, time).await;
            let (mut bytes, paced) = download_all(&server, at, "/paced", *count, time).await;
            bytes.sort_unstable();
            let pace = (RATE * time.as_secs()) as f64;
            let of = |bytes: u64| bytes as f64 / pace;
            let all = bytes.iter().sum::<u64>() as f64 / pace / *count as f64;
            let (least, most) = (of(bytes[0]), of(bytes[bytes.len() - 1]));
            let memory = server.megabytes();
            println!("| {name} | {count} | {all:.4} | {least:.4} | {most:.4} | {paced:.2} | {free:.2} | {memory:.1} |");
        }
        drop(server);
        let (server, count) = (start(name, port).await, counts[counts.len() - 1]);
        let mut readers = JoinSet::new();
        for user in 0..count {
            readers.spawn(download(at, "/paced", user, Instant::now() + time, 65_536));
        }
        let stopped = readers.join_all().await;
        tokio::time::sleep(time / 10).await;
        let first = server.megabytes();
        tokio::time::sleep(time).await;
        let last = server.megabytes();
        println!("| {name} | {} stop | | | | | | {first:.1}, then {last:.1} |", stopped.len());
    }
}
