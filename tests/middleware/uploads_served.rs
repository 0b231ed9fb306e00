//! Clients that still send when their request is refused get the refusal, from a server over TCP and through a proxy.
//!
//! The tests need `curl` and nginx, and are never skipped.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use axum::Router;
use http::uri::PathAndQuery;
use tokio::net::TcpListener;
use tokio::process::Command;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};

use crate::support::nginx::Nginx;

/// About the largest body that nginx takes as it comes.
const MEGABYTE: usize = 1_000_000;

/// Serves an application that refuses every request but the first.
async fn serve() -> SocketAddr {
    let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_day(1), key::global());
    // As much as by default, for as long as a busy machine takes to send it.
    let limit = limit.discard_body(2 << 20, Duration::from_secs(60));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = Router::new().fallback(async || "served").layer(limit);
    tokio::spawn(axum::serve(listener, app).into_future());
    reqwest::get(format!("http://{address}/")).await.unwrap();
    address
}

/// Writes a whole request before it reads, as many clients do. Returns what it reads.
fn upload(server: SocketAddr, framing: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(server).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{framing}\r\n\r\n").unwrap();
    stream.write_all(body).expect("the server reads the body");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the server answers");
    answer
}

#[track_caller]
fn is_refusal(answer: &str) {
    let head = answer.split("\r\n\r\n").next().unwrap_or_default().to_ascii_lowercase();
    assert!(head.contains(" 429") && head.contains("retry-after: "), "{answer}");
}

/// Uploads a file of a megabyte by curl. Returns what curl prints.
async fn curl(url: &str, options: &[&str]) -> String {
    let file = tempfile(MEGABYTE);
    let mut curl = Command::new("curl");
    curl.args(["--silent", "--show-error", "--include", "--max-time", "60", "--noproxy", "*", "--header", "Expect:"]);
    curl.args(options).arg("--data-binary").arg(format!("@{}", file.display())).arg(url);
    let output = curl.output().await.expect("curl is missing. Install it, on Debian with: apt-get install curl");
    let _ = std::fs::remove_file(file);
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "curl: {err}{out}");
    out
}

fn tempfile(bytes: usize) -> std::path::PathBuf {
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("tower-ratelimit-upload-{}-{count}", std::process::id()));
    std::fs::write(&file, vec![b'x'; bytes]).expect("the temporary directory can be written to");
    file
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_writes_first_reads_the_refusal() {
    let server = serve().await;
    let bodies = [20_000, 100_000, MEGABYTE, 2 << 20];
    tokio::task::spawn_blocking(move || {
        for bytes in bodies.into_iter().cycle().take(40) {
            is_refusal(&upload(server, &format!("content-length: {bytes}"), &vec![b'x'; bytes]));
        }
        let chunk = [b"1000\r\n".as_slice(), &[b'x'; 0x1000], b"\r\n"].concat();
        let chunked = [chunk.repeat(100), b"0\r\n\r\n".to_vec()].concat();
        for _ in 0..10 {
            is_refusal(&upload(server, "transfer-encoding: chunked", &chunked));
        }
    })
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_expects_100_gets_the_refusal_alone() {
    let server = serve().await;
    let answer =
        tokio::task::spawn_blocking(move || upload(server, "content-length: 1000\r\nexpect: 100-continue", b""));
    let answer = answer.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_stays_uses_its_connection_again() {
    let server = serve().await;
    let both = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(server).unwrap();
        let body = vec![b'x'; MEGABYTE];
        for end in ["keep-alive", "close"] {
            write!(stream, "POST / HTTP/1.1\r\nhost: a\r\nconnection: {end}\r\ncontent-length: {MEGABYTE}\r\n\r\n")
                .unwrap();
            stream.write_all(&body).expect("the server reads the body");
        }
        let mut answers = String::new();
        stream.read_to_string(&mut answers).expect("the server answers");
        answers
    });
    assert_eq!(both.await.unwrap().matches("HTTP/1.1 429 ").count(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_gets_the_refusal_of_an_upload() {
    let url = format!("http://{}/", serve().await);
    for options in [&[][..], &["--http2-prior-knowledge"]] {
        for _ in 0..10 {
            is_refusal(&curl(&url, options).await);
        }
    }
}

/// The layer reads nothing of a call: its client reads the status while it sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_client_gets_the_status_of_an_upload() {
    let url = format!("http://{}", serve().await);
    for _ in 0..10 {
        let channel = Endpoint::from_shared(url.clone()).unwrap().connect().await.unwrap();
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.unwrap();
        let (request, path) = (tonic::Request::new("x".repeat(3 * MEGABYTE)), PathAndQuery::from_static("/a.A/Upload"));
        let answer = client.unary(request, path, ProstCodec::<String, String>::default()).await;
        let status = answer.expect_err("it is refused");
        assert_eq!((status.code(), status.metadata().contains_key("retry-after")), (Code::ResourceExhausted, true));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_passes_the_refusal_of_an_upload_on() {
    let app = serve().await;
    let nginx = Nginx::start("uploads", &["front"], |directory| {
        format!("server {{ listen unix:{}/front; location / {{ proxy_pass http://{app}; }} }}", directory.display())
    })
    .await;
    let socket = nginx.socket("front");
    let through = ["--unix-socket", socket.to_str().expect("the directory's name is text")];
    for _ in 0..10 {
        is_refusal(&curl("http://nginx/", &through).await);
    }
}
