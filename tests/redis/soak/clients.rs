//! The clients of a soak: by HTTP/1.1, HTTP/2 and gRPC, of which some leave before they are answered; floods of fresh
//! keys; and an operator who switches a quota.

use std::fmt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;
use tonic_prost::ProstCodec;

use super::figures::Figures;
use super::shop::{CLIENTS, COUNTED, FLOODED, HELD};
use crate::LONG;

/// The clients of each kind, and the mean time between two requests of one. Together they send about 120 requests a
/// second.
const WORKERS: u64 = 5;
const PAUSE: u64 = 120;
/// The fresh keys of a wave, and the time between two waves to one door.
const WAVE: u64 = 8;
const BETWEEN: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
pub(super) struct Addresses {
    pub(super) http1: SocketAddr,
    pub(super) http2: SocketAddr,
}

/// How requests ended for their clients.
#[derive(Default)]
pub(super) struct Sent {
    answered: AtomicU64,
    refused: AtomicU64,
    unavailable: AtomicU64,
    left: AtomicU64,
    /// Anything else.
    other: AtomicU64,
}

impl Sent {
    fn count(&self, status: Option<u16>) {
        let counter = match status {
            Some(200) => &self.answered,
            Some(429) => &self.refused,
            Some(503) => &self.unavailable,
            Some(_) => &self.other,
            None => &self.left,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    fn numbers(&self) -> [u64; 5] {
        [&self.answered, &self.refused, &self.unavailable, &self.left, &self.other]
            .map(|count| count.load(Ordering::Relaxed))
    }

    pub(super) fn all(&self) -> u64 {
        self.numbers().iter().sum()
    }

    pub(super) fn check(&self) {
        let [answered, refused, _, left, other] = self.numbers();
        assert!(answered > 0 && refused > 0 && left > 0 && other == 0, "{self}");
    }
}

impl fmt::Display for Sent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [answered, refused, unavailable, left, other] = self.numbers();
        write!(f, "{answered} answered, {refused} with 429, {unavailable} with 503, {left} left, {other} others")
    }
}

/// Numbers that look random, the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    async fn pause(&mut self) {
        sleep(Duration::from_millis(self.roll(2 * PAUSE))).await;
    }
}

/// The state that all clients share.
struct Shared {
    addresses: Addresses,
    sent: Sent,
    /// The clients that have had an answer.
    answered: AtomicU64,
    ends: AtomicBool,
}

impl Shared {
    fn goes_on(&self) -> bool {
        !self.ends.load(Ordering::Relaxed)
    }

    /// Counts a client at its first answer.
    fn greet(&self, is_new: &mut bool) {
        self.answered.fetch_add(u64::from(std::mem::take(is_new)), Ordering::Relaxed);
    }
}

/// A connection. It is closed when this is dropped.
enum Connection {
    Http1(hyper::client::conn::http1::SendRequest<Empty<Bytes>>, JoinHandle<()>),
    Http2(hyper::client::conn::http2::SendRequest<Empty<Bytes>>, JoinHandle<()>),
}

impl Drop for Connection {
    fn drop(&mut self) {
        let (Self::Http1(_, task) | Self::Http2(_, task)) = self;
        task.abort();
    }
}

type Answer = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

impl Connection {
    async fn open(addresses: Addresses, is_http2: bool) -> hyper::Result<Self> {
        let address = if is_http2 { addresses.http2 } else { addresses.http1 };
        let stream = TcpStream::connect(address).await.expect("the server listens");
        let _ = stream.set_nodelay(true);
        let io = TokioIo::new(stream);
        if is_http2 {
            let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await?;
            Ok(Self::Http2(sender, tokio::spawn(async { drop(connection.await) })))
        } else {
            let (sender, connection) = hyper::client::conn::http1::handshake(io).await?;
            Ok(Self::Http1(sender, tokio::spawn(async { drop(connection.await) })))
        }
    }

    async fn send(&mut self, path: &str, client: &str, takes: u64) -> hyper::Result<Answer> {
        let request = Request::get(format!("http://shop{path}")).header("client", client).header("takes", takes);
        let request = request.body(Empty::new()).expect("it is a request");
        Ok(match self {
            Self::Http1(sender, _) => {
                sender.ready().await?;
                Box::pin(sender.send_request(request))
            }
            Self::Http2(sender, _) => {
                sender.ready().await?;
                Box::pin(sender.send_request(request))
            }
        })
    }

    /// Sends a request and reads the answer. Returns its status and its body.
    async fn ask(&mut self, path: &str, client: &str) -> hyper::Result<(u16, Bytes)> {
        let response = self.send(path, client, 0).await?.await?;
        Ok((response.status().as_u16(), response.into_body().collect().await?.to_bytes()))
    }
}

/// A client that sends one request after another. One of eight times it leaves before the answer.
async fn visit(shared: Arc<Shared>, worker: u64, is_http2: bool) {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (worker + 1));
    let paths: Vec<String> =
        COUNTED.into_iter().filter(|door| *door != "grpc").chain(HELD).map(|door| format!("/{door}")).collect();
    let (mut connection, mut is_new) = (None, true);
    while shared.goes_on() {
        dice.pause().await;
        if dice.roll(50) == 0 {
            connection = None;
        }
        let open = match connection.take() {
            Some(open) => Ok(open),
            None => Connection::open(shared.addresses, is_http2).await,
        };
        let Ok(mut open) = open else {
            shared.sent.count(Some(0));
            continue;
        };
        let path = &paths[dice.roll(paths.len() as u64) as usize];
        let takes = if path.starts_with("/held") { dice.roll(200) } else { 0 };
        let Ok(answer) = open.send(path, &dice.roll(CLIENTS).to_string(), takes).await else {
            shared.sent.count(Some(0));
            continue;
        };
        // At once, within some milliseconds, or after the head.
        let leaves = dice.roll(24);
        let within = if leaves < 2 { Duration::from_millis(dice.roll(4) * leaves) } else { Duration::from_secs(60) };
        let kept = match timeout(within, answer).await {
            Err(_) if leaves < 2 => {
                shared.sent.count(None);
                is_http2
            }
            Ok(Ok(response)) if leaves == 2 => {
                drop(response);
                shared.sent.count(None);
                is_http2
            }
            Ok(Ok(response)) => {
                let status = response.status().as_u16();
                let body = timeout(Duration::from_secs(60), response.into_body().collect()).await;
                let is_whole = matches!(body, Ok(Ok(_)));
                shared.sent.count(Some(if is_whole { status } else { 0 }));
                is_whole
            }
            _ => {
                shared.sent.count(Some(0));
                false
            }
        };
        if kept {
            shared.greet(&mut is_new);
            connection = Some(open);
        }
    }
}

/// A client by gRPC. One of eight times it leaves before the answer.
async fn call(shared: Arc<Shared>, worker: u64) {
    let mut dice = Dice(0x2545_f491_4f6c_dd1d ^ (worker + 1));
    let endpoint = Channel::from_shared(format!("http://{}", shared.addresses.http2)).expect("it is a URI");
    let mut client = tonic::client::Grpc::new(endpoint.connect_lazy());
    let mut is_new = true;
    while shared.goes_on() {
        dice.pause().await;
        let mut request = tonic::Request::new("hello".to_owned());
        let of = dice.roll(CLIENTS).to_string().parse().expect("a number is a value");
        request.metadata_mut().insert("client", of);
        let within = if dice.roll(8) == 0 { Duration::from_millis(dice.roll(4)) } else { Duration::from_secs(60) };
        let answer = timeout(within, async {
            client.ready().await.map_err(|error| tonic::Status::internal(error.to_string()))?;
            let path = PathAndQuery::from_static("/soak.Echo/Echo");
            client.unary(request, path, ProstCodec::<String, String>::default()).await
        });
        let status = match answer.await {
            Err(_) => None,
            Ok(Ok(_)) => Some(200),
            Ok(Err(status)) => Some(match status.code() {
                tonic::Code::ResourceExhausted => 429,
                tonic::Code::Unavailable => 503,
                _ => 0,
            }),
        };
        if status.is_some() {
            shared.greet(&mut is_new);
        }
        shared.sent.count(status);
    }
}

/// Sends waves of requests of which each has a key that has never been seen.
async fn flood(shared: Arc<Shared>, door: &'static str) {
    let (mut connection, mut is_new) = (None, true);
    for wave in 0_u64.. {
        sleep(BETWEEN).await;
        if !shared.goes_on() {
            return;
        }
        let mut open = match connection.take() {
            Some(open) => open,
            None => Connection::open(shared.addresses, true).await.expect("the server speaks HTTP/2"),
        };
        for number in 0..WAVE {
            let status = open.ask(&format!("/{door}"), &format!("fresh-{wave}-{number}")).await;
            shared.sent.count(Some(status.map_or(0, |(status, _)| status)));
        }
        shared.greet(&mut is_new);
        connection = Some(open);
    }
}

/// An operator who changes how many requests may run.
async fn operate(shared: Arc<Shared>) {
    for turn in 0_u64.. {
        sleep(Duration::from_millis(700)).await;
        if !shared.goes_on() {
            return;
        }
        let mut open = Connection::open(shared.addresses, false).await.expect("the server listens");
        let path = if turn % 2 == 0 { "/switch?lower" } else { "/switch?usual" };
        let (_, said) = open.ask(path, "operator").await.expect("the server answers");
        assert_eq!(said, "true", "the switch is set");
    }
}

async fn figures(addresses: Addresses) -> Option<Figures> {
    let (_, text) = Connection::open(addresses, false).await.ok()?.ask("/figures", "judge").await.ok()?;
    Some(Figures::read(std::str::from_utf8(&text).ok()?))
}

/// The clients, while they send.
pub(super) struct Clients {
    runtime: Runtime,
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
    /// The server's figures before the first request.
    pub(super) before: Figures,
}

impl Clients {
    pub(super) fn start(addresses: Addresses) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let shared = Arc::new(Shared {
            addresses,
            sent: Sent::default(),
            answered: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        });
        let began = Instant::now();
        let before = loop {
            // A busy machine may be too slow for some of them.
            if let Some(before) = runtime.block_on(figures(addresses)).filter(Figures::is_whole) {
                break before;
            }
            assert!(began.elapsed() < LONG, "the server says its figures");
            std::thread::sleep(Duration::from_millis(100));
        };
        let mut tasks = Vec::new();
        for worker in 0..WORKERS {
            tasks.push(runtime.spawn(visit(Arc::clone(&shared), 2 * worker, false)));
            tasks.push(runtime.spawn(visit(Arc::clone(&shared), 2 * worker + 1, true)));
        }
        for worker in 0..2 {
            tasks.push(runtime.spawn(call(Arc::clone(&shared), worker)));
        }
        for door in FLOODED {
            tasks.push(runtime.spawn(flood(Arc::clone(&shared), door)));
        }
        tasks.push(runtime.spawn(operate(Arc::clone(&shared))));
        Self { runtime, shared, tasks, before }
    }

    pub(super) fn sent(&self) -> &Sent {
        &self.shared.sent
    }

    /// Waits until each client that keeps its connection has had an answer.
    pub(super) fn wait_until_answered(&self) {
        let began = Instant::now();
        // The operator does not keep its connections.
        while self.shared.answered.load(Ordering::Relaxed) < self.tasks.len() as u64 - 1 {
            assert!(began.elapsed() < LONG, "each client has an answer");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Asks the server for its figures. `None` if it does not answer.
    pub(super) fn figures(&self) -> Option<Figures> {
        self.runtime.block_on(figures(self.shared.addresses))
    }

    /// Ends the traffic, and closes all connections.
    pub(super) fn stop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        for task in self.tasks.drain(..) {
            self.runtime.block_on(task).expect("no client panics");
        }
    }
}
