//! Settlement behind a real server, which drops bodies in its own ways: a body that was sent is no
//! abort, and a client that disconnects is one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Extension;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::StreamExt;
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    middleware::{OnAborted, Usage},
};

use crate::support::memory;

/// Counts the responses that have ended: sent or dropped.
#[derive(Clone, Default)]
struct Ended(Arc<AtomicU64>);

struct Guard(Ended);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Server {
    address: SocketAddr,
    limiter: MemoryLimiter,
    policies: [Policy; 2],
    ended: Ended,
}

type Frames = Vec<Result<Frame<Bytes>, Infallible>>;

fn stream(frames: Frames, guard: Guard) -> Body {
    let frames = tokio_stream::iter(frames).map(move |frame| {
        let _ = &guard;
        frame
    });
    Body::new(StreamBody::new(frames))
}

fn data(bytes: usize) -> Result<Frame<Bytes>, Infallible> {
    Ok(Frame::data(Bytes::from(vec![b'x'; bytes])))
}

impl Server {
    /// Each request reserves 100 tokens and uses 40 of them, and reserves 100 bytes.
    async fn start(on_aborted: OnAborted) -> Self {
        let limiter = memory(&ManualClock::new());
        let policies = ["tokens", "bytes"].map(|name| Policy::new(name, Quota::per_hour(100_000)).unwrap());
        let [tokens, bytes] = policies.clone().map(Rule::from);
        let tokens = tokens.cost(|_| 100).settle_by_usage().on_aborted(on_aborted);
        let bytes = bytes.cost(|_| 100).settle_by_body().on_aborted(on_aborted);
        let limit = RateLimitLayer::new(limiter.clone(), tokens, key::global()).and(bytes, key::global());
        let ended = Ended::default();
        let use_bill =
            axum::middleware::from_fn(|Extension(bill): Extension<Usage>, request, next: axum::middleware::Next| {
                bill.set(40);
                next.run(request)
            });
        let guard = |ended: &Ended| {
            let ended = ended.clone();
            move || Guard(ended.clone())
        };
        let (streamed, file, trailed, endless, silent) =
            (guard(&ended), guard(&ended), guard(&ended), guard(&ended), guard(&ended));
        let app: Router =
            Router::new()
                .route("/text", get(|| async { "x".repeat(60) }))
                .route("/stream", get(move || async move { stream(vec![data(30), data(30)], streamed()) }))
                .route(
                    "/file",
                    get(move || async move {
                        ([("content-length", "60")], stream(vec![data(30), data(30), data(0)], file()))
                    }),
                )
                .route("/trailers", get(move || async move { with_trailers(trailed()) }))
                .route("/none", get(|| async { StatusCode::NO_CONTENT }))
                .route("/upgrade", get(|| async { upgrade() }))
                .route(
                    "/endless",
                    get(move || async move {
                        let guard = endless();
                        let chunks =
                            tokio_stream::iter(std::iter::repeat_n((), 1_000_000)).throttle(Duration::from_millis(5));
                        Body::from_stream(chunks.map(move |()| {
                            let _ = &guard;
                            Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 10]))
                        }))
                    }),
                )
                .route(
                    "/silent",
                    get(move || async move {
                        let _guard = silent();
                        std::future::pending::<()>().await;
                    }),
                )
                .layer(use_bill)
                .layer(limit);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, limiter, policies, ended }
    }

    fn used(&self) -> [u64; 2] {
        self.policies.each_ref().map(|policy| 100_000 - self.limiter.peek_one(policy, &Key::global(), 0).remaining())
    }

    /// Sends a request and reads until this many bytes have come or the server closes the
    /// connection.
    async fn send(&self, method: &str, path: &str, until: usize) -> (TcpStream, Vec<u8>) {
        let mut connection = TcpStream::connect(self.address).await.unwrap();
        let close = if until == usize::MAX { "connection: close\r\n" } else { "" };
        let request = format!("{method} {path} HTTP/1.1\r\nhost: a\r\nte: trailers\r\n{close}\r\n");
        connection.write_all(request.as_bytes()).await.unwrap();
        let mut read = Vec::new();
        while read.len() < until && connection.read_buf(&mut read).await.unwrap() > 0 {}
        (connection, read)
    }

    /// Waits until this amount is used, and fails after a deadline.
    async fn settled(&self, expected: [u64; 2], what: &str) {
        self.wait(|| self.used() == expected).await;
        assert_eq!(self.used(), expected, "{what}");
    }

    async fn wait(&self, done: impl Fn() -> bool) {
        for _ in 0..10_000 {
            if done() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn with_trailers(guard: Guard) -> Response {
    let trailers = HeaderMap::from_iter([(http::HeaderName::from_static("x-sum"), HeaderValue::from_static("1"))]);
    // Nothing follows trailers, but this body does not say so.
    let frames = vec![data(60), Ok(Frame::trailers(trailers)), data(0)];
    ([("trailer", "x-sum")], stream(frames, guard)).into_response()
}

fn upgrade() -> Response {
    let headers = [("connection", "upgrade"), ("upgrade", "echo")];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

#[tokio::test]
async fn responses_that_were_sent_are_settled_behind_a_server() {
    let cases = [
        ("GET", "/text", [40, 60]),
        ("GET", "/stream", [40, 60]),
        ("GET", "/file", [40, 60]),
        ("GET", "/trailers", [40, 60]),
        ("HEAD", "/text", [40, 0]),
        ("HEAD", "/stream", [40, 0]),
        ("GET", "/none", [40, 0]),
        ("GET", "/missing", [40, 0]),
    ];
    for (method, path, cost) in cases {
        let server = Server::start(OnAborted::Keep).await;
        let (_, read) = server.send(method, path, usize::MAX).await;
        assert!(read.starts_with(b"HTTP/1.1 2") || path == "/missing", "{path}");
        server.settled(cost, &format!("{method} {path}")).await;
    }
    // The layer does not see the bytes of an upgraded connection.
    let server = Server::start(OnAborted::Keep).await;
    let (connection, read) = server.send("GET", "/upgrade", 16).await;
    assert!(read.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&read));
    server.settled([40, 100], "an upgrade").await;
    drop(connection);
    assert_eq!(server.used(), [40, 100]);
}

#[tokio::test]
async fn disconnected_clients_cost_their_reservation_behind_a_server() {
    for (on_aborted, silent, endless) in [(OnAborted::Keep, 100, 100), (OnAborted::Refund, 40, 40)] {
        let server = Server::start(on_aborted).await;
        for sent in 1..=20 {
            let (path, before) = (if sent % 2 == 0 { "/endless" } else { "/silent" }, server.used()[0]);
            // The head of a response and a part of its body arrive. The rest never does.
            let (connection, _) = server.send("GET", path, if sent % 2 == 0 { 200 } else { 0 }).await;
            server.wait(|| server.used()[0] > before).await;
            drop(connection);
            server.wait(|| server.ended.0.load(Ordering::SeqCst) == sent).await;
        }
        server.wait(|| server.used()[0] == 10 * (silent + endless)).await;
        assert_eq!(server.used()[0], 10 * (silent + endless), "{on_aborted:?}");
    }
}
