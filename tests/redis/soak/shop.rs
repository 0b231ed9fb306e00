//! The server of a soak: doors to one handler, each with limits of another kind, by HTTP/1.1 on one port and by HTTP/2
//! and gRPC on another. The second port has a limiter on Redis of its own, as another process would have.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::{MethodRouter, any};
use http::Response;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tonic_prost::ProstCodec;
use tower::util::MapRequestLayer;
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, RateLimitLayer, RedisLimiter, Rule,
    clock::TokioTimer,
    key,
    limiter::{Charge, FallbackLimiter, Limiter, redis::RedisLimiterBuilder},
    middleware::QuotaSwitch,
    observe::{Observed, Observer, OutcomeKind},
    quota::Anchor,
    rules::Rules,
};

use super::figures::{Figures, Times};
use crate::support::redis_limiter::connected;

/// The keys that are counted. All others are of floods.
pub(super) const CLIENTS: u64 = 3;
/// The most places of a key, and the time after which those of a process lapse.
pub(super) const PLACES: u64 = 3;
pub(super) const LAPSE: Duration = Duration::from_secs(30);
/// The bucket of each key.
pub(super) const BURST: u64 = 3;
pub(super) const PER_SECOND: u64 = 1;
/// More than any soak uses.
pub(super) const MANY: u64 = 1_000_000_000;
const MONTH: Duration = Duration::from_secs(30 * 86_400);
/// A flood fills the table within minutes, so that it has its whole size when the memory has to be flat.
const TABLE: usize = 10_000;

/// The doors whose allowed requests are compared with what their limiters say is used.
pub(super) const COUNTED: [&str; 6] = ["memory", "redis", "leased", "fallback", "rules", "grpc"];
/// The doors that hold places.
pub(super) const HELD: [&str; 2] = ["held", "held-redis"];
/// The doors that a flood of keys goes to.
pub(super) const FLOODED: [&str; 2] = ["flood", "flood-redis"];

fn client(number: u64) -> Key {
    Key::of(number.to_string()).expect("it is a key")
}

/// Counts what happens at a door.
#[derive(Default)]
struct Counts {
    name: &'static str,
    allowed: [AtomicU64; CLIENTS as usize],
    /// Failed, or left before they were decided: they may be charged.
    unknown: AtomicU64,
    limited: AtomicU64,
    failed: AtomicU64,
    abandoned: AtomicU64,
    /// Outcomes that no request of the soak may have.
    unexpected: AtomicU64,
    /// The time of each allowed check, if none of the door's requests waits.
    times: Times,
    running: [AtomicU64; CLIENTS as usize],
    most: AtomicU64,
}

/// A door's counts. Clones share them.
#[derive(Clone)]
struct Door(Arc<Counts>);

impl Observer for Door {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let counter = match observed.outcome().kind() {
            OutcomeKind::Allowed | OutcomeKind::Delayed => {
                let of = observed.head().headers.get("client").and_then(|value| value.to_str().ok()?.parse().ok());
                match of.and_then(|client: usize| self.0.allowed.get(client)) {
                    Some(counter) => counter,
                    None => return,
                }
            }
            OutcomeKind::Limited => &self.0.limited,
            OutcomeKind::FailedClosed => &self.0.failed,
            OutcomeKind::Abandoned => &self.0.abandoned,
            _ => &self.0.unexpected,
        };
        counter.fetch_add(1, Ordering::SeqCst);
        if matches!(observed.outcome().kind(), OutcomeKind::FailedClosed | OutcomeKind::Abandoned) {
            self.0.unknown.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// A request that runs, until this is dropped.
struct Runs(Door, usize);

impl Drop for Runs {
    fn drop(&mut self) {
        self.0.0.running[self.1].fetch_sub(1, Ordering::SeqCst);
    }
}

impl Door {
    fn new(name: &'static str) -> Self {
        Self(Arc::new(Counts { name, ..Counts::default() }))
    }

    fn begin(&self, request: &Request) -> Option<Runs> {
        if let Some(Arrived(at)) = request.extensions().get() {
            self.0.times.add(at.elapsed());
        }
        let client: usize = request.headers().get("client")?.to_str().ok()?.parse().ok()?;
        let running = self.0.running.get(client)?.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most.fetch_max(running, Ordering::SeqCst);
        Some(Runs(self.clone(), client))
    }

    /// Answers after as many milliseconds as the request says.
    async fn answer(self, request: Request) -> Response<Body> {
        let runs = self.begin(&request);
        let takes = request.headers().get("takes").and_then(|value| value.to_str().ok()?.parse().ok());
        if let Some(takes) = takes {
            tokio::time::sleep(Duration::from_millis(takes)).await;
        }
        drop(runs);
        Response::new(Body::from(vec![b'x'; 2_048]))
    }

    /// Answers a text with the same text, by gRPC.
    async fn echo(self, request: Request) -> Response<tonic::body::Body> {
        let runs = self.begin(&request);
        let echo = |request: tonic::Request<String>| async move {
            tokio::task::yield_now().await;
            Ok::<_, tonic::Status>(tonic::Response::new(request.into_inner()))
        };
        let response = tonic::server::Grpc::new(ProstCodec::default()).unary(tower::service_fn(echo), request).await;
        drop(runs);
        response
    }

    fn total(&self) -> Policy {
        let quota = Quota::fixed_window(MANY, MONTH).and_then(|quota| quota.anchor(Anchor::FirstRequest));
        let quota = quota.expect("it is possible");
        Policy::new(format!("{}-total", self.0.name), quota).expect("it is a name")
    }

    fn bucket(&self) -> Rule {
        let quota = Quota::token_bucket(PER_SECOND, Duration::from_secs(1)).and_then(|quota| quota.burst(BURST));
        Rule::new(format!("{}-bucket", self.0.name), quota.expect("it is possible")).expect("it is a name")
    }

    /// Returns a layer with a bucket for each client, and a window that counts what the bucket admits.
    fn counted<L: Limiter>(&self, limiter: L) -> RateLimitLayer<L> {
        RateLimitLayer::new(limiter, Rule::from(self.total()), key::header("client"))
            .and(self.bucket(), key::header("client"))
            .observer(self.clone())
    }

    fn held<L: Limiter>(&self, limiter: L, switch: &QuotaSwitch) -> RateLimitLayer<L> {
        let rule = Rule::switched(self.0.name, switch).expect("it is a name");
        RateLimitLayer::new(limiter, rule, key::header("client")).timer(TokioTimer::new()).observer(self.clone())
    }

    fn flooded<L: Limiter>(&self, limiter: L) -> RateLimitLayer<L> {
        let rule = Rule::new(self.0.name, Quota::per_second(5)).expect("it is a name");
        RateLimitLayer::new(limiter, rule, key::header("client")).observer(self.clone())
    }

    fn handler(&self) -> MethodRouter {
        let door = self.clone();
        any(move |request: Request| door.clone().answer(request))
    }
}

/// When a request came, before any layer.
#[derive(Clone, Copy)]
struct Arrived(Instant);

fn waits(places: u64) -> Quota {
    Quota::concurrent(places).max_wait(Duration::from_millis(200)).expect("it is possible")
}

/// All that a soak's server has.
struct Shop {
    memory: MemoryLimiter,
    /// The limiter of each port.
    redis: [RedisLimiter; 2],
    leased: RedisLimiter,
    second: MemoryLimiter,
    switch: QuotaSwitch,
    rules: Rules,
    doors: Vec<Door>,
}

impl Shop {
    async fn new(folder: &Path, url: &str) -> Self {
        let memory = |keys| MemoryLimiter::builder().max_keys(keys).build().expect("the setup is possible");
        let redis = || builder("soak");
        let rules = Rules::builder().reload_every(Duration::ZERO).key("client", key::header("client"));
        Self {
            memory: memory(TABLE),
            redis: [connected(redis(), url).await, connected(redis(), url).await],
            leased: connected(builder("leased").lease_units(2), url).await,
            second: memory(1_000),
            switch: QuotaSwitch::new(waits(PLACES)),
            rules: rules.read_file(folder.join("rules.yaml")).expect("the first rules are right"),
            doors: COUNTED.into_iter().chain(HELD).chain(FLOODED).map(Door::new).collect(),
        }
    }

    fn door(&self, name: &str) -> &Door {
        self.doors.iter().find(|door| door.0.name == name).expect("there is such a door")
    }

    fn router(self: &Arc<Self>, port: usize) -> Router {
        let redis = || self.redis[port].clone();
        let [memory, on_redis, leased, fallback, rules, grpc] = COUNTED.map(|name| self.door(name));
        let [held, held_on_redis] = HELD.map(|name| self.door(name));
        let [flood, flood_on_redis] = FLOODED.map(|name| self.door(name));
        let falls_back = FallbackLimiter::new(redis(), self.second.clone(), NonZeroU32::MIN);
        let echo = {
            let grpc = grpc.clone();
            any(move |request: Request| grpc.clone().echo(request))
        };
        let of_rules = self.rules.layer(self.memory.clone()).expect("the rules fit").observer(rules.clone());
        let (shop, switch) = (Arc::clone(self), self.switch.clone());
        let change = move |request: Request| {
            // A lower number, and the usual one again.
            let lower = request.uri().query() == Some("lower");
            let is_set = switch.set(waits(PLACES - u64::from(lower))).is_ok();
            async move { is_set.to_string() }
        };
        Router::new()
            .route("/memory", memory.handler().layer(memory.counted(self.memory.clone())))
            .route("/redis", on_redis.handler().layer(on_redis.counted(redis())))
            .route("/leased", leased.handler().layer(leased.counted(self.leased.clone())))
            .route("/fallback", fallback.handler().layer(fallback.counted(falls_back)))
            .route("/rules", rules.handler().layer(of_rules))
            .route("/soak.Echo/Echo", echo.layer(grpc.counted(redis())))
            .route("/held", held.handler().layer(held.held(self.memory.clone(), &self.switch)))
            .route("/held-redis", held_on_redis.handler().layer(held_on_redis.held(redis(), &self.switch)))
            .route("/flood", flood.handler().layer(flood.flooded(self.memory.clone())))
            .route("/flood-redis", flood_on_redis.handler().layer(flood_on_redis.flooded(redis())))
            .layer(MapRequestLayer::new(|mut request: Request| {
                request.extensions_mut().insert(Arrived(Instant::now()));
                request
            }))
            .route("/switch", any(change))
            .route("/figures", any(move || async move { shop.figures().await.text() }))
    }

    /// Returns what a limiter says is used. `None` if it does not answer.
    async fn used<L: Limiter>(limiter: &L, policy: &Policy, key: &Key) -> Option<u64> {
        let answer = limiter.peek(&[Charge::new(policy, key).cost(0)]).await.ok()?;
        let charge = answer.charges().first()?;
        Some(charge.limit() - charge.remaining())
    }

    async fn used_at(&self, door: &Door, key: &Key) -> Option<u64> {
        let total = door.total();
        match door.0.name {
            "memory" | "rules" => Self::used(&self.memory, &total, key).await,
            "leased" => Self::used(&self.leased, &total, key).await,
            "fallback" => {
                let second = Self::used(&self.second, &total, key).await?;
                Some(Self::used(&self.redis[0], &total, key).await? + second)
            }
            _ => Self::used(&self.redis[0], &total, key).await,
        }
    }

    async fn figures(&self) -> Figures {
        let (mut figures, mut unanswered, mut taken) = (Figures::default(), 0, 0);
        let of = |counter: &AtomicU64| counter.load(Ordering::SeqCst);
        let sum = |counter: fn(&Counts) -> &AtomicU64| self.doors.iter().map(|door| of(counter(&door.0))).sum::<u64>();
        for door in &self.doors {
            let name = door.0.name;
            figures.set(format!("{name}.unknown"), of(&door.0.unknown));
            figures.set(format!("{name}.most"), of(&door.0.most));
            if COUNTED.contains(&name) {
                for (percentile, part) in [("p50", 0.5), ("p99", 0.99)] {
                    figures.set(format!("{name}.{percentile}"), door.0.times.within(part) as u64);
                }
            }
            for number in 0..CLIENTS {
                let key = client(number);
                if COUNTED.contains(&name) {
                    figures.set(format!("{name}.allowed.{number}"), of(&door.0.allowed[number as usize]));
                    match self.used_at(door, &key).await {
                        Some(used) => figures.set(format!("{name}.used.{number}"), used),
                        None => unanswered += 1,
                    }
                }
                if HELD.contains(&name) {
                    let policy = Policy::new(name, Quota::concurrent(100)).expect("it is a name");
                    let (in_memory, on_redis) = (
                        Self::used(&self.memory, &policy, &key).await,
                        Self::used(&self.redis[0], &policy, &key).await,
                    );
                    taken += in_memory.unwrap_or(0) + on_redis.unwrap_or(0);
                    unanswered += u64::from(on_redis.is_none());
                }
            }
        }
        figures.set("limited", sum(|counts| &counts.limited));
        figures.set("failed_closed", sum(|counts| &counts.failed));
        figures.set("abandoned", sum(|counts| &counts.abandoned));
        figures.set("unexpected", sum(|counts| &counts.unexpected));
        figures.set("reloads", self.rules.version());
        figures.set("unanswered", unanswered);
        figures.set("taken", taken);
        figures
    }
}

fn builder(prefix: &str) -> RedisLimiterBuilder {
    // A busy machine stops for longer than the usual 50 ms, and then there would be no sums but failures.
    RedisLimiter::builder().prefix(prefix).deadline(Duration::from_millis(500)).places_lapse_after(LAPSE)
}

/// Serves until the process ends. Prints the two addresses.
pub(super) async fn serve(folder: &Path, url: &str) {
    let shop = Arc::new(Shop::new(folder, url).await);
    let (mut addresses, mut servers) = (Vec::new(), Vec::new());
    for port in 0..2 {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        addresses.push(listener.local_addr().expect("it is bound").to_string());
        servers.push(accept(listener, shop.router(port), port == 1));
    }
    println!("serves at {}", addresses.join(" "));
    let mut servers = servers.into_iter();
    let [Some(one), Some(other)] = [servers.next(), servers.next()] else { unreachable!("there are two") };
    tokio::join!(one, other);
}

async fn accept(listener: TcpListener, router: Router, is_http2: bool) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let (io, service) = (TokioIo::new(stream), TowerToHyperService::new(router.clone()));
        tokio::spawn(async move {
            if is_http2 {
                drop(
                    hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await,
                );
            } else {
                drop(hyper::server::conn::http1::Builder::new().serve_connection(io, service).await);
            }
        });
    }
}
