//! Places never leak: requests over TCP, by HTTP/1 and HTTP/2, that end in every way, while the handler itself counts
//! how many run at a time. Each test file with a limiter runs this over its own.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tower::util::BoxCloneService;
use tower::{Layer, service_fn};
use tower_ratelimit::{
    Key, Policy, Quota, RateLimitLayer, Rule,
    clock::TokioTimer,
    key,
    limiter::{Charge, Limiter},
    middleware::{InFlight, QuotaSwitch},
    observe::{Observed, Observer, OutcomeKind},
};

/// The most requests of a key, and of all keys, and the admissions of handlers.
const EXPORTS: u64 = 3;
const OUTER: u64 = 40;
const ADMITTED: u64 = 2;

/// The clients' keys. Only the last one is reset by an operator, so that more than its limit may run.
const KEYS: usize = 8;
const RESET: usize = KEYS - 1;

const WORKERS: u64 = 64;

/// How long a client waits for what hangs, and for what is to come.
const SHORT: Duration = Duration::from_millis(3);
const LONG: Duration = Duration::from_secs(60);

/// Counts what runs, as the handler sees it.
#[derive(Default)]
struct Running {
    now: AtomicU64,
    most: AtomicU64,
}

/// A request that runs, until this is dropped.
struct Runs(Arc<[Running]>, usize);

impl Runs {
    fn begin(running: &Arc<[Running]>, place: usize) -> Self {
        let now = running[place].now.fetch_add(1, Ordering::SeqCst) + 1;
        running[place].most.fetch_max(now, Ordering::SeqCst);
        Self(Arc::clone(running), place)
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.0[self.1].now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A campaign over a limiter, or over two that share what they count, as two processes do.
pub(crate) struct Campaign<L> {
    /// The limiter of the server that speaks HTTP/1, and of the one that speaks HTTP/2.
    pub(crate) limiters: [L; 2],
    pub(crate) requests: u64,
    /// How long a request waits in line.
    pub(crate) wait: Duration,
    /// How long a usual request runs.
    pub(crate) takes: Duration,
    /// A client that goes away soon does so within this time.
    pub(crate) soon: Duration,
}

/// A server's part.
struct Shop<L: Limiter> {
    limiter: L,
    /// One for each key, then that of admissions.
    running: Arc<[Running]>,
    admits: RateLimitLayer<L>,
    switch: QuotaSwitch,
    wait: Duration,
    takes: Duration,
    abandoned: Abandoned,
}

/// Counts the requests whose clients went away before it was decided what becomes of them.
#[derive(Clone, Default)]
struct Abandoned(Arc<AtomicU64>);

impl Observer for Abandoned {
    fn on_outcome(&self, observed: &Observed<'_>) {
        if observed.outcome().kind() == OutcomeKind::Abandoned {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Frames of a body. What runs ends before the last frame is handed out, as the layer counts.
struct Frames {
    left: u32,
    fate: Fate,
    runs: Vec<Runs>,
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.left == 1 {
            match self.fate {
                Fate::BodyFails => {
                    self.runs.clear();
                    return Poll::Ready(Some(Err(io::Error::other("the body fails"))));
                }
                Fate::BodyHangs => return Poll::Pending,
                _ => {}
            }
        }
        if self.left <= 1 {
            self.runs.clear();
        }
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 512])))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(u64::from(self.left) * 512)
    }
}

/// The action of the handler on a request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Answers,
    Empty,
    Fails,
    Panics,
    PanicsInCall,
    Hangs,
    BodyFails,
    BodyHangs,
    Admits,
    /// It holds the place until the socket is closed.
    Upgrades,
    /// It leaves the place to the response, which ends with its head.
    UpgradesWithoutPlace,
}

const FATES: [Fate; 11] = [
    Fate::Answers,
    Fate::Empty,
    Fate::Fails,
    Fate::Panics,
    Fate::PanicsInCall,
    Fate::Hangs,
    Fate::BodyFails,
    Fate::BodyHangs,
    Fate::Admits,
    Fate::Upgrades,
    Fate::UpgradesWithoutPlace,
];

/// When the client goes away.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// As soon as the request is sent.
    Sent,
    /// A moment later.
    Soon,
    Head,
    HalfBody,
    Never,
}

const STAGES: [Stage; 5] = [Stage::Sent, Stage::Soon, Stage::Head, Stage::HalfBody, Stage::Never];

fn header(request: &Request<Incoming>, name: &str) -> usize {
    request.headers().get(name).and_then(|value| value.to_str().ok()?.parse().ok()).expect("the client sends it")
}

fn answer(left: u32, fate: Fate, runs: Vec<Runs>) -> Response<Body> {
    Response::new(Body::new(Frames { left, fate, runs }))
}

async fn handle<L: Limiter>(
    shop: Arc<Shop<L>>,
    mut request: Request<Incoming>,
    runs: Runs,
) -> Result<Response<Body>, io::Error> {
    tokio::task::yield_now().await;
    let fate = FATES[header(&request, "fate")];
    match fate {
        Fate::Empty => Ok(answer(0, fate, Vec::new())),
        Fate::Fails => Err(io::Error::other("the handler fails")),
        Fate::Panics => resume_unwind(Box::new("the handler panics")),
        Fate::Hangs => std::future::pending().await,
        Fate::Admits => {
            let (head, _) = request.into_parts();
            match shop.admits.admit(&head).await {
                Ok(admission) => {
                    let admitted = Runs::begin(&shop.running, KEYS);
                    tokio::task::yield_now().await;
                    Ok(admission.finish(answer(3, fate, vec![admitted, runs])))
                }
                Err(refused) => Ok(refused.into_http().map(Body::new)),
            }
        }
        Fate::Upgrades | Fate::UpgradesWithoutPlace if request.headers().contains_key("upgrade") => {
            let place = request.extensions().get::<InFlight>().filter(|_| fate == Fate::Upgrades);
            let held = place.and_then(InFlight::hold).map(|place| (runs, place)); // what runs ends before its place
            let upgraded = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                if let Ok(socket) = upgraded.await {
                    let _ = tokio::io::copy(&mut TokioIo::new(socket), &mut tokio::io::sink()).await;
                }
                drop(held);
            });
            let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS).header("upgrade", "chat");
            let response = response.header("connection", "upgrade").body(Body::empty());
            Ok(response.expect("its headers are valid"))
        }
        fate => {
            if fate == Fate::Answers && !shop.takes.is_zero() {
                tokio::time::sleep(shop.takes).await;
            }
            Ok(answer(4, fate, vec![runs]))
        }
    }
}

type Handler = BoxCloneService<Request<Incoming>, Response<Body>, io::Error>;

/// Two ways to the handler through the same limits: one has an overflow, the other refuses.
fn services<L: Limiter + Clone>(shop: &Arc<Shop<L>>) -> [Handler; 2] {
    let handler = {
        let shop = Arc::clone(shop);
        service_fn(move |request: Request<Incoming>| {
            let runs = Runs::begin(&shop.running, header(&request, "client"));
            if FATES[header(&request, "fate")] == Fate::PanicsInCall {
                resume_unwind(Box::new("the handler panics"));
            }
            handle(Arc::clone(&shop), request, runs)
        })
    };
    let exports = |shop: &Shop<L>| {
        let rule = Rule::switched("exports", &shop.switch).expect("it is a name");
        let layer = RateLimitLayer::new(shop.limiter.clone(), rule, key::header("client"));
        layer.timer(TokioTimer::new()).max_waiting(50).observer(shop.abandoned.clone())
    };
    let outer = |shop: &Shop<L>| {
        let rule = Rule::new("outer", waits(OUTER, shop.wait)).expect("it is a name");
        let layer = RateLimitLayer::new(shop.limiter.clone(), rule, key::global());
        layer.timer(TokioTimer::new()).refund_nested(true).observer(shop.abandoned.clone())
    };
    let overflow = service_fn(|_: Request<Incoming>| async {
        let response = Response::builder().status(StatusCode::ACCEPTED).body(Body::from("queued"));
        Ok::<_, io::Error>(response.expect("its status is valid"))
    });
    let with_overflow = outer(shop).layer(exports(shop).overflow(overflow).layer(handler.clone()));
    [BoxCloneService::new(with_overflow), BoxCloneService::new(outer(shop).layer(exports(shop).layer(handler)))]
}

fn waits(limit: u64, wait: Duration) -> Quota {
    Quota::concurrent(limit).max_wait(wait).expect("it is short")
}

async fn serve(service: Handler, is_http2: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let (io, service) = (TokioIo::new(stream), TowerToHyperService::new(service.clone()));
            tokio::spawn(async move {
                if is_http2 {
                    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    drop(server.serve_connection(io, service).await);
                } else {
                    let server = hyper::server::conn::http1::Builder::new();
                    drop(server.serve_connection(io, service).with_upgrades().await);
                }
            });
        }
    });
    address
}

/// A client's connection. If it is dropped, the connection is closed.
enum Client {
    Http1(hyper::client::conn::http1::SendRequest<Empty<Bytes>>, tokio::task::JoinHandle<()>),
    Http2(hyper::client::conn::http2::SendRequest<Empty<Bytes>>, tokio::task::JoinHandle<()>),
}

impl Drop for Client {
    fn drop(&mut self) {
        match self {
            Self::Http1(_, connection) | Self::Http2(_, connection) => connection.abort(),
        }
    }
}

impl Client {
    async fn connect([http1, http2]: [SocketAddr; 2], is_http2: bool) -> Option<Self> {
        let stream = TcpStream::connect(if is_http2 { http2 } else { http1 }).await.ok()?;
        let _ = stream.set_nodelay(true);
        let stream = TokioIo::new(stream);
        Some(if is_http2 {
            let (client, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.ok()?;
            Self::Http2(client, tokio::spawn(async { drop(connection.await) }))
        } else {
            let (client, connection) = hyper::client::conn::http1::handshake(stream).await.ok()?;
            Self::Http1(client, tokio::spawn(async { drop(connection.with_upgrades().await) }))
        })
    }

    /// Sends a request. Returns how it ended for the client, and whether the connection can be used again.
    async fn send(&mut self, fate: usize, client: usize, stage: Stage, soon: Duration) -> (&'static str, bool) {
        let mut request = Request::get("http://shop/").header("fate", fate).header("client", client);
        let response: Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>> = match self {
            Self::Http1(sender, _) => {
                if sender.ready().await.is_err() {
                    return ("closed before", false);
                }
                if matches!(FATES[fate], Fate::Upgrades | Fate::UpgradesWithoutPlace) {
                    request = request.header("upgrade", "chat").header("connection", "upgrade");
                }
                Box::pin(sender.send_request(request.body(Empty::new()).expect("it is a request")))
            }
            Self::Http2(sender, _) => {
                if sender.ready().await.is_err() {
                    return ("closed before", false);
                }
                Box::pin(sender.send_request(request.body(Empty::new()).expect("it is a request")))
            }
        };
        let is_kept = matches!(self, Self::Http2(..));
        let limit = match (FATES[fate], stage) {
            (_, Stage::Soon) => soon,
            (Fate::Hangs, _) => SHORT,
            _ => LONG,
        };
        let response = match stage {
            Stage::Sent => {
                let mut response = response;
                let _ = std::future::poll_fn(|cx| Poll::Ready(response.as_mut().poll(cx).is_ready())).await;
                tokio::task::yield_now().await;
                return ("left when sent", is_kept);
            }
            _ => tokio::time::timeout(limit, response).await,
        };
        let mut response = match response {
            Ok(Ok(response)) => response,
            Ok(Err(_)) => return ("failed", false),
            Err(_) if limit == LONG => return ("no response", false),
            Err(_) => return ("left without a response", is_kept),
        };
        let label = match response.status().as_u16() {
            101 => {
                // A while of WebSocket, then the client goes away.
                let upgraded = tokio::time::timeout(SHORT, hyper::upgrade::on(&mut response)).await;
                tokio::time::sleep(Duration::from_millis(1)).await;
                drop(upgraded);
                return ("upgraded", false);
            }
            200 => "answered",
            202 => "overflowed",
            429 => "refused",
            503 if client == RESET => "failed beside resets",
            503 => "status 503",
            _ => "other status",
        };
        match stage {
            Stage::Head => return ("left after the head", is_kept),
            Stage::HalfBody => {
                drop(tokio::time::timeout(SHORT, response.body_mut().frame()).await);
                return ("left in the body", is_kept);
            }
            _ => {}
        }
        let limit = if FATES[fate] == Fate::BodyHangs { SHORT } else { LONG };
        match tokio::time::timeout(limit, response.into_body().collect()).await {
            Ok(Ok(_)) => (label, true),
            Ok(Err(_)) => ("body failed", is_kept),
            Err(_) => ("left a body that hangs", is_kept),
        }
    }
}

/// Numbers that look random, the same in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }
}

/// Has as many requests of the first key hang at a time as may run. A busy machine may never bring so many together by
/// chance.
async fn fill(addresses: [SocketAddr; 2], running: &Running) {
    let hangs = FATES.iter().position(|fate| *fate == Fate::Hangs).expect("it is one of the fates");
    let send = |number: u64| {
        tokio::spawn(async move {
            let client = Client::connect(addresses, number % 2 == 0).await;
            client.expect("the server is there").send(hangs, 0, Stage::Soon, LONG).await
        })
    };
    let clients: Vec<_> = (0..EXPORTS).map(send).collect();
    while running.now.load(Ordering::SeqCst) < EXPORTS {
        assert!(!clients.iter().any(tokio::task::JoinHandle::is_finished), "a request that fits passes, and hangs");
        tokio::task::yield_now().await;
    }
    clients.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn work(addresses: [SocketAddr; 2], worker: u64, requests: u64, soon: Duration) -> Vec<(&'static str, u64)> {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (worker + 1));
    let mut counts: Vec<(&'static str, u64)> = Vec::new();
    let mut client: Option<Client> = None;
    for _ in 0..requests {
        if client.is_none() || dice.roll(100) == 0 {
            client = Client::connect(addresses, dice.roll(2) == 0).await;
        }
        let Some(connected) = &mut client else { continue };
        // Half of the requests are answered and read, so that places are contended.
        let usual = dice.roll(2) == 0;
        let (fate, stage) =
            if usual { (0, Stage::Never) } else { (dice.roll(FATES.len()), STAGES[dice.roll(STAGES.len())]) };
        let (label, is_kept) = connected.send(fate, dice.roll(KEYS), stage, soon * dice.roll(101) as u32 / 100).await;
        match counts.iter_mut().find(|(other, _)| *other == label) {
            Some((_, count)) => *count += 1,
            None => counts.push((label, 1)),
        }
        if !is_kept {
            client = None;
        }
    }
    counts
}

/// Returns how many requests are sent: `IN_FLIGHT_REQUESTS`, or this number.
pub(crate) fn requests(usual: u64) -> u64 {
    std::env::var("IN_FLIGHT_REQUESTS").ok().and_then(|requests| requests.parse().ok()).unwrap_or(usual)
}

/// Returns how many units of each key are taken, as a limiter says.
async fn taken<L: Limiter>(limiter: &L) -> Vec<u64> {
    let clients = (0..KEYS).map(|client| ("exports", Key::of(client.to_string()).expect("it is a key")));
    let mut all = Vec::new();
    for (name, key) in clients.chain([("outer", Key::global()), ("admitted", Key::global())]) {
        all.push(taken_of(limiter, name, &key, 100).await);
    }
    all
}

async fn taken_of<L: Limiter>(limiter: &L, name: &str, key: &Key, limit: u64) -> u64 {
    let policy = Policy::new(name, Quota::concurrent(limit)).expect("it is a name");
    let answer = limiter.peek(&[Charge::new(&policy, key).cost(0)]).await;
    limit - answer.expect("the limiter answers").charges()[0].remaining()
}

impl<L: Limiter + Clone> Campaign<L> {
    /// Sends all requests. Fails if more ran at a time than may, or if a place is still taken two seconds after the
    /// last one. `stored` returns how many units are taken, as the store itself says. Returns what happened.
    pub(crate) async fn run(self, stored: impl AsyncFn() -> u64) -> String {
        let Self { limiters, requests, wait, takes, soon } = self;
        let running: Arc<[Running]> = (0..=KEYS).map(|_| Running::default()).collect();
        let (switch, abandoned) = (QuotaSwitch::new(waits(EXPORTS, wait)), Abandoned::default());
        let [one, other] = limiters.map(|limiter| {
            let rule = Rule::new("admitted", waits(ADMITTED, wait)).expect("it is a name");
            let admits = RateLimitLayer::new(limiter.clone(), rule, key::global()).timer(TokioTimer::new());
            let (running, switch, abandoned) = (Arc::clone(&running), switch.clone(), abandoned.clone());
            Arc::new(Shop { limiter, running, admits, switch, wait, takes, abandoned })
        });
        let ([with_overflow, _], [_, refusing]) = (services(&one), services(&other));
        let addresses = [serve(with_overflow, false).await, serve(refusing, true).await];

        fill(addresses, &running[0]).await;
        let began = tokio::time::Instant::now();
        let each = requests / WORKERS;
        let workers: Vec<_> = (0..WORKERS).map(|worker| tokio::spawn(work(addresses, worker, each, soon))).collect();
        // Meanwhile an operator changes the limit and resets a key.
        let sampled = Arc::new(AtomicU64::new(0));
        let operator = tokio::spawn({
            let (shop, sampled) = (Arc::clone(&one), Arc::clone(&sampled));
            async move {
                let exports = Policy::new("exports", Quota::concurrent(EXPORTS)).expect("it is a name");
                let [first, reset] = [0, RESET].map(|client| Key::of(client.to_string()).expect("it is a key"));
                loop {
                    for limit in [EXPORTS - 1, EXPORTS] {
                        shop.switch.set(waits(limit, shop.wait)).expect("it is a quota like the one before");
                        assert!(shop.limiter.reset(&exports, &reset).await.is_ok());
                        tokio::time::sleep(Duration::from_millis(7)).await;
                        sampled.fetch_max(taken_of(&shop.limiter, "exports", &first, EXPORTS).await, Ordering::SeqCst);
                    }
                }
            }
        });
        let mut counts: Vec<(&'static str, u64)> = Vec::new();
        for worker in workers {
            for (label, count) in worker.await.expect("a client does not panic") {
                match counts.iter_mut().find(|(other, _)| *other == label) {
                    Some((_, all)) => *all += count,
                    None => counts.push((label, count)),
                }
            }
        }
        let took = began.elapsed();
        operator.abort();

        let ended = tokio::time::Instant::now();
        // Tests wait for as long as a busy machine may take. Campaigns are optimised, and measure it.
        let until = if cfg!(debug_assertions) { LONG } else { Duration::from_secs(2) };
        let mut left = (taken(&one.limiter).await, stored().await);
        let lines_are_empty = || {
            [&one, &other].iter().all(|shop| shop.limiter.hooks().place_lines().is_some_and(|lines| lines.is_empty()))
        };
        while (left.0.iter().sum::<u64>() + left.1 > 0 || !lines_are_empty()) && ended.elapsed() < until {
            tokio::time::sleep(Duration::from_millis(1)).await;
            left = (taken(&other.limiter).await, stored().await);
        }
        let settled = ended.elapsed();
        let most: Vec<u64> = running.iter().map(|running| running.most.load(Ordering::SeqCst)).collect();
        let sampled = sampled.load(Ordering::SeqCst);

        let mut report = format!(
            "{requests} requests in {took:.1?}, all places back after {settled:.1?}; most at a time {most:?}; {} were \
             abandoned before they were decided; {sampled} of a key were seen taken\n",
            abandoned.0.load(Ordering::Relaxed)
        );
        counts.sort_unstable();
        for (label, count) in &counts {
            let _ = writeln!(report, "  {label}: {count}");
        }
        println!("{report}");
        // A busy machine may bring few of them together in a short run.
        let is_long = requests >= 10_000;
        let least = if is_long { EXPORTS } else { 1 };
        assert!((least..=EXPORTS).contains(&sampled), "what is counted is what requests take\n{report}");
        assert_eq!(left, (vec![0; KEYS + 2], 0), "{report}");
        assert!(lines_are_empty(), "{report}");
        for (client, most) in most.iter().enumerate().filter(|(client, _)| *client != RESET) {
            let limit = if client == KEYS { ADMITTED } else { EXPORTS };
            assert!(*most <= limit, "{most} ran at a time, of {limit}\n{report}");
        }
        let reached = most.iter().filter(|most| **most == EXPORTS).count();
        assert!(reached > if is_long { KEYS / 2 } else { 0 }, "the limits are reached\n{report}");
        let unexpected = counts.iter().find(|(label, _)| ["other status", "status 503", "no response"].contains(label));
        assert_eq!(unexpected, None, "{report}");
        assert!(abandoned.0.load(Ordering::Relaxed) > 0 || requests < 1_000, "some go away while they are decided");
        report
    }
}
