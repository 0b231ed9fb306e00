//! Clients that reset HTTP/2 streams at every stage leave exact accounts behind.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tower::{Layer, service_fn};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::middleware::OnAborted;
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule, key};

use crate::support::memory;

/// The requests of a stage. They are fewer than the streams that a server allows at a time.
const STREAMS: usize = 100;

/// How many requests the handler has begun and how many of them are over.
#[derive(Clone, Default)]
struct Seen {
    begun: Arc<AtomicUsize>,
    over: Arc<AtomicUsize>,
}

/// Counts a request as begun, and as over when it is dropped.
struct Served(Seen);

impl Served {
    fn new(seen: &Seen) -> Self {
        seen.begun.fetch_add(1, Ordering::SeqCst);
        Self(seen.clone())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0.over.fetch_add(1, Ordering::SeqCst);
    }
}

/// A server whose `/handler` answers never, whose `/body` ends never, and whose `/` answers at once.
struct Server {
    limiter: MemoryLimiter,
    policies: [Policy; 2],
    layer: RateLimitLayer<MemoryLimiter>,
    seen: Seen,
    address: SocketAddr,
}

impl Server {
    /// The first rule's charges stay whatever happens. The second one is settled by the body's end.
    async fn start(first: Quota, on_aborted: OnAborted) -> Self {
        let limiter = memory(&ManualClock::new()); // it stands still, so nothing drains
        let policies = [("first", first), ("bytes", Quota::per_hour(1_000_000))];
        let policies = policies.map(|(name, quota)| Policy::new(name, quota).unwrap());
        let [first, bytes] = policies.clone().map(Rule::from);
        let bytes = bytes.cost(|_| 100).settle_by_body().on_aborted(on_aborted);
        let layer = RateLimitLayer::new(limiter.clone(), first, key::global())
            .and(bytes, key::global())
            .timer(TokioTimer::new());
        let (seen, listener) = (Seen::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let address = listener.local_addr().unwrap();
        let handler = {
            let seen = seen.clone();
            service_fn(move |request: Request<hyper::body::Incoming>| {
                let served = Served::new(&seen);
                async move { Ok::<_, Infallible>(answer(request.uri().path(), served).await) }
            })
        };
        let service = layer.layer(handler);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(service.clone());
                let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { limiter, policies, layer, seen, address }
    }

    async fn connect(&self) -> SendRequest<Empty<Bytes>> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let connected = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
        let (client, connection) = connected.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Sends requests over several connections, and returns the tasks that wait for the responses. A stream is reset
    /// when its task is aborted.
    async fn send(&self, path: &'static str) -> JoinSet<Response<hyper::body::Incoming>> {
        let mut sent = JoinSet::new();
        for _ in 0..4 {
            let client = self.connect().await;
            for _ in 0..STREAMS / 4 {
                let mut client = client.clone();
                sent.spawn(async move {
                    client.ready().await.unwrap();
                    client.send_request(request(path)).await.unwrap()
                });
            }
        }
        sent
    }

    /// Returns the units that are used of each policy.
    async fn used(&self) -> [u64; 2] {
        let mut used = [0; 2];
        for (used, policy) in used.iter_mut().zip(&self.policies) {
            let key = Key::global();
            let charge = [tower_ratelimit::limiter::Charge::new(policy, &key).cost(0)];
            let status = self.limiter.peek(&charge).await.unwrap();
            *used = status.charges()[0].limit() - status.charges()[0].remaining();
        }
        used
    }

    async fn until_used(&self, expected: [u64; 2]) {
        let began = tokio::time::Instant::now();
        while self.used().await != expected {
            assert!(began.elapsed() < LONG, "{:?} used, not {expected:?}", self.used().await);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// The server serves the next client.
    async fn serves(&self) {
        let mut client = self.connect().await;
        let response = client.send_request(request("/")).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "done");
    }
}

fn request(path: &str) -> Request<Empty<Bytes>> {
    Request::get(format!("http://shop{path}")).body(Empty::new()).unwrap()
}

async fn answer(path: &str, served: Served) -> Response<Body> {
    match path {
        "/handler" => {
            let _served = served;
            std::future::pending().await
        }
        "/body" => {
            let first = tokio_stream::once(Bytes::from_static(b"0123456789"));
            let chunks = first.chain(tokio_stream::pending()).map(move |chunk| {
                let _ = &served;
                Ok::<_, Infallible>(chunk)
            });
            Response::new(Body::from_stream(chunks))
        }
        _ => Response::new(Body::from("done")),
    }
}

const LONG: Duration = Duration::from_secs(60);

async fn until(what: &str, is: impl Fn() -> bool) {
    let is = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LONG, is).await.unwrap_or_else(|_| panic!("{what}"));
}

const UNITS: u64 = STREAMS as u64;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stream_reset_in_a_queue_takes_nothing() {
    for round in 0..5 {
        let queue = Quota::leaky_queue(1, Duration::from_secs(3_600)).unwrap().queue(UNITS).unwrap();
        let server = Server::start(queue, OnAborted::Keep).await;
        server.serves().await; // it departs at once
        server.until_used([1, 4]).await;
        let mut sent = server.send("/").await;
        until("all requests wait", || server.layer.waiting() == STREAMS).await;
        assert_eq!(server.used().await, [1 + UNITS, 4 + 100 * UNITS], "in round {round}");
        sent.abort_all();
        while sent.join_next().await.is_some() {}
        until("no request waits", || server.layer.waiting() == 0).await;
        server.until_used([1, 4]).await;
        assert_eq!(server.seen.begun.load(Ordering::SeqCst), 1, "no handler has run");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stream_reset_in_the_handler_keeps_what_its_rule_says() {
    for (on_aborted, kept) in [(OnAborted::Keep, 100), (OnAborted::Refund, 0)] {
        let server = Server::start(Quota::per_hour(1_000), on_aborted).await;
        let mut sent = server.send("/handler").await;
        until("all handlers run", || server.seen.begun.load(Ordering::SeqCst) == STREAMS).await;
        assert_eq!(server.used().await, [UNITS, 100 * UNITS]);
        sent.abort_all();
        while sent.join_next().await.is_some() {}
        until("all handlers are dropped", || server.seen.over.load(Ordering::SeqCst) == STREAMS).await;
        server.until_used([UNITS, kept * UNITS]).await;
        server.serves().await;
        server.until_used([UNITS + 1, kept * UNITS + 4]).await;
        assert_eq!(server.layer.waiting(), 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn stream_reset_in_the_body_costs_what_was_sent() {
    let server = Server::start(Quota::per_hour(1_000), OnAborted::Refund).await;
    let mut sent = server.send("/body").await;
    let mut bodies = Vec::new();
    while let Some(response) = sent.join_next().await {
        let mut body = response.unwrap().into_body();
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "0123456789");
        bodies.push(body);
    }
    assert_eq!(server.used().await, [UNITS, 100 * UNITS]);
    drop(bodies);
    until("all bodies are dropped", || server.seen.over.load(Ordering::SeqCst) == STREAMS).await;
    server.until_used([UNITS, 10 * UNITS]).await;
    assert_eq!(server.layer.waiting(), 0);
    server.serves().await;
}
