//! Clients that go while their request waits in line, over HTTP/1: which requests hyper drops, and what bounds the others.

use std::time::Duration;

use axum::Router;
use axum::routing::post;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, clock::TokioTimer, key};

const MINUTE: Duration = Duration::from_secs(60);

/// A server whose handler never ends, so that of each key one request runs and all others wait in line.
struct Server {
    address: std::net::SocketAddr,
    limit: RateLimitLayer,
}

impl Server {
    async fn start() -> Self {
        let quota = Quota::concurrent(1).max_wait(10 * MINUTE).unwrap();
        let limit = RateLimitLayer::new(MemoryLimiter::new(), Rule::from(quota), key::header("x-key"));
        let limit = limit.timer(TokioTimer::new()).max_waiting(200);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = Router::new().route("/", post(async || std::future::pending::<()>().await)).layer(limit.clone());
        tokio::spawn(axum::serve(listener, app).into_future());
        Self { address, limit }
    }

    async fn send(&self, key: &str, rest: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(format!("POST / HTTP/1.1\r\nhost: a\r\nx-key: {key}\r\n{rest}").as_bytes()).await.unwrap();
        stream
    }

    /// Waits until this many requests wait in line.
    #[track_caller]
    fn waiting(&self, expected: usize) -> impl Future<Output = ()> {
        let (limit, caller, began) = (self.limit.clone(), std::panic::Location::caller(), Instant::now());
        async move {
            while limit.waiting() != expected {
                assert!(began.elapsed() < MINUTE, "{} wait, and not {expected}: {caller}", limit.waiting());
                sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Sends a request that waits in line, and leaves.
    async fn leave(&self, key: &str, rest: &str) {
        let before = self.limit.waiting();
        let stream = self.send(key, rest).await;
        self.waiting(before + 1).await;
        drop(stream);
    }
}

#[tokio::test]
async fn request_that_was_read_leaves_the_line_with_its_client() {
    let server = Server::start().await;
    let _runs = server.send("a", "\r\n").await;
    for rest in ["\r\n", "content-length: 0\r\n\r\n", "content-length: 5\r\n\r\nhello"] {
        server.leave("a", rest).await;
        server.waiting(0).await;
    }
}

#[tokio::test]
async fn request_that_was_not_read_stays_in_line() {
    let server = Server::start().await;
    let _runs = server.send("a", "\r\n").await;
    let large = format!("content-length: 100000\r\n\r\n{}", "x".repeat(100_000));
    let unread = [
        "content-length: 10\r\n\r\n",
        "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        "content-length: 10\r\nexpect: 100-continue\r\n\r\n",
        "\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n",
        "\r\nx",
        &large,
    ];
    for (stay, rest) in unread.iter().enumerate() {
        server.leave("a", rest).await;
        // One that is noticed, and came and went later.
        server.leave("a", "\r\n").await;
        server.waiting(stay + 1).await;
    }
}

#[tokio::test]
async fn client_that_has_gone_leaves_room_for_others() {
    let server = Server::start().await;
    let _runs = (server.send("a", "\r\n").await, server.send("b", "\r\n").await);
    for _ in 0..100 {
        server.leave("a", "content-length: 10\r\n\r\n").await;
    }
    for _ in 0..100 {
        let mut refused = server.send("a", "connection: close\r\n\r\n").await;
        let mut answer = String::new();
        timeout(MINUTE, refused.read_to_string(&mut answer)).await.expect("the line is full").unwrap();
        assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    }
    let _waits = server.send("b", "\r\n").await;
    server.waiting(101).await;
}
