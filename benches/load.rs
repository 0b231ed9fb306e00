//! Load: what a limiter decides within its deadline while more and more checks are offered, and while the store is far,
//! busy or slow. Requests arrive by chance (a Poisson process) and do not wait for each other's answers, as those of
//! many users do.
//!
//! `cargo bench --bench load --features fred,redis-rs,postgres`
//!
//! | case | the store |
//! |---|---|
//! | `redis-0.1ms` | Redis on this machine, with nothing between |
//! | `redis-5ms`, `redis-20ms`, `redis-40ms` | Redis behind a proxy, so that a round trip takes this time |
//! | `redis-neighbours` | eight other connections run scripts of 4 ms, one after the other |
//! | `redis-slow` | each key of a script call holds the server for 300 µs: no client gets more than 3,333 |
//! | `redis-thin` | Redis behind a proxy that lets 100 kB a second pass, each way |
//! | `postgres-0.1ms`, `postgres-3ms`, `postgres-8ms` | a logged table, and a flush of the log takes this time |
//!
//! Deadlines are 50 ms, and 100 ms for 40 ms. Beside `RedisLimiter` through both client libraries are two clients that
//! one writes by hand: a script of five lines for GCRA over one multiplexed connection, and over a pool of 16
//! connections. Beside `StoreLimiter` it is an upsert, over as many connections as the limiter has opened, and over 20.
//! They have the same deadline.
//!
//! The hand-written client's capacity is the most that it decides at any offered load. Loads are half of it, all of it,
//! and two and three times as much, and some fixed ones. One process offers the load, decides, and runs the proxy; so a
//! machine of two processors is itself the limit above some 10,000 checks a second. `--cap=N` is the most that counts
//! as a capacity, 8,000 by default.
//!
//! The columns:
//!
//! * `decided` are the checks a second that were answered within the deadline.
//! * `of the possible` is that number divided by what is offered, or by the capacity if that is less. 0.9 is aimed at.
//! * The times count from the instant at which the request arrived, over all checks that were decided.
//! * `trips` is the median divided by the time of a lone call of the hand-written client. Below the capacity at most 1.1
//!   is aimed at.
//! * `calls` are script calls or transactions for each decided check, and `server` is the server's time for it.
//! * `late for all` is the share, in percent, of the `PING`s of another connection that neighbours' scripts delay
//!   beyond the deadline. No client can decide a check in that time: Redis reads what connections have sent, runs all
//!   of it, and only then sends the answers. So a command waits for the rest of this turn, and for all of the next one.
//! * `failed` has the kinds of failures in percent of all checks.
//!
//! Contenders change their order from round to round, and a server knows all their scripts before the first round.
//!
//! Other options: `--seconds=2` for each load, after `--settle=0` seconds of it that do not count: a limiter beside
//! busy neighbours needs some seconds to learn that its own calls are not the cause. `--rounds=1`, of which the median
//! counts, `--json=FILE` keeps the points, `--from=FILE` reads them from there instead of measuring, and `--svg=FILE`
//! draws them. Words without dashes pick cases by name. The chart of the guide:
//!
//! `cargo bench --bench load --features fred,redis-rs,postgres -- --rounds=3 --json=FILE --svg=src/guide/load.svg`
//!
//! A flush of PostgreSQL's log takes longer by `commit_delay`, for which the server waits with the lock of the log's
//! writer. Commits that come meanwhile are flushed with it, where a disk would flush them next.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod support;

#[path = "support/delay_line.rs"]
mod delay_line;
#[path = "support/load_chart.rs"]
mod load_chart;
#[path = "../tests/support/postgres.rs"]
mod postgres;
#[path = "../tests/support/redis.rs"]
mod redis_server;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use delay_line::DelayLine;
use redis::aio::MultiplexedConnection;
use serde_json::{Value, json};
use support::{FIVE_LINES, Numbers, is_smoke, is_wanted, median};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tower_ratelimit::limiter::redis::RedisClient;
use tower_ratelimit::limiter::store::StoreLimiterBuilder;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore, tokio_postgres};
use tower_ratelimit::limiter::{Charge, Limiter, StoreErrorKind};
use tower_ratelimit::{Key, Policy, Quota, RedisLimiter, StoreLimiter};

const KEYS: u64 = 10_000;
const DEADLINE: Duration = Duration::from_millis(50);
/// An answer may be noticed so much later than the deadline, by the granularity of Tokio's timers.
const LATE: Duration = Duration::from_millis(3);
/// The connections of the plain pool.
const POOL: usize = 16;
/// The connections of a pool that is large for PostgreSQL.
const LARGE: usize = 20;

/// [`FIVE_LINES`] as one statement.
const UPSERT: &str = "\
INSERT INTO by_hand AS old (key, drained) VALUES ($1, clock_timestamp() + interval '1 microsecond')
ON CONFLICT (key) DO UPDATE SET drained = greatest(old.drained, clock_timestamp()) + interval '1 microsecond'
WHERE greatest(old.drained, clock_timestamp()) <= clock_timestamp() + interval '1 second'
RETURNING drained";

fn main() {
    let options = Options::new();
    let points = match &options.from {
        Some(file) => read_points(file),
        None => measure(&options),
    };
    if let Some(file) = &options.json {
        let lines: Vec<Value> = points.iter().map(Point::to_json).collect();
        std::fs::write(file, serde_json::to_string_pretty(&lines).unwrap()).unwrap();
    }
    if let Some(file) = &options.svg {
        std::fs::write(file, load_chart::draw(&points)).unwrap();
    }
}

struct Options {
    time: Duration,
    settle: Duration,
    rounds: usize,
    cap: f64,
    json: Option<String>,
    from: Option<String>,
    svg: Option<String>,
}

impl Options {
    fn new() -> Self {
        let option = |name: &str| std::env::args().find_map(|it| Some(it.strip_prefix(name)?.to_owned()));
        let number = |name: &str| option(name).map(|value| value.parse::<f64>().expect("it is a number"));
        let seconds = number("--seconds=").unwrap_or(if is_smoke() { 0.1 } else { 2.0 });
        Self {
            time: Duration::from_secs_f64(seconds),
            settle: Duration::from_secs_f64(number("--settle=").unwrap_or(0.0)),
            rounds: number("--rounds=").unwrap_or(1.0) as usize,
            cap: number("--cap=").unwrap_or(8_000.0),
            json: option("--json="),
            from: option("--from="),
            svg: option("--svg="),
        }
    }
}

fn measure(options: &Options) -> Vec<Point> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut bench = Bench { runtime: &runtime, options, points: Vec::new() };
    let place = |name, place, deadline, fixed| RedisCase { name, place, deadline, fixed };
    let far = |milliseconds| Place::Far(Duration::from_millis(milliseconds));
    for case in [
        place("redis-0.1ms", Place::Here, DEADLINE, &[]),
        place("redis-5ms", far(5), DEADLINE, &[]),
        place("redis-20ms", far(20), DEADLINE, &[]),
        place("redis-40ms", far(40), 2 * DEADLINE, &[2_000.0, 3_000.0, 4_000.0, 6_000.0]),
        place("redis-neighbours", Place::Neighbours(8), DEADLINE, &[500.0, 4_000.0]),
        place("redis-slow", Place::Slow(Duration::from_micros(300)), DEADLINE, &[4_000.0]),
        place("redis-thin", Place::Thin(100_000), DEADLINE, &[500.0, 1_000.0]),
    ] {
        if is_wanted(case.name) {
            bench.redis(&case);
        }
    }
    for (name, flush, fixed) in [
        ("postgres-0.1ms", "commit_delay=100", &[][..]),
        ("postgres-3ms", "commit_delay=3000", &[1_500.0]),
        ("postgres-8ms", "commit_delay=8000", &[450.0, 600.0, 900.0]),
    ] {
        if is_wanted(name) {
            bench.postgres(name, flush, fixed);
        }
    }
    bench.points
}

/// The measurements of one client at one load.
#[derive(Clone)]
struct Point {
    case: String,
    client: String,
    /// Checks a second.
    offered: f64,
    decided: f64,
    /// The hand-written client's capacity.
    capacity: f64,
    /// Milliseconds.
    p50: f64,
    p99: f64,
    /// The time of a lone call, in milliseconds.
    trip: f64,
    calls: f64,
    server: f64,
    late_for_all: f64,
    failed: BTreeMap<String, f64>,
}

impl Point {
    fn to_json(&self) -> Value {
        let Self { case, client, offered, decided, capacity, p50, p99, trip, calls, server, late_for_all, failed } =
            self;
        json!({
            "case": case, "client": client, "offered": offered, "decided": decided, "capacity": capacity,
            "p50": p50, "p99": p99, "trip": trip, "calls": calls, "server": server, "late_for_all": late_for_all,
            "failed": failed,
        })
    }

    fn from_json(value: &Value) -> Self {
        let text = |name: &str| value[name].as_str().expect("it is a text").to_owned();
        // Without decided checks there is no latency, which is null in JSON.
        let number = |name: &str| value[name].as_f64().unwrap_or(f64::NAN);
        let failed = value["failed"].as_object().expect("it is an object").iter();
        Self {
            case: text("case"),
            client: text("client"),
            offered: number("offered"),
            decided: number("decided"),
            capacity: number("capacity"),
            p50: number("p50"),
            p99: number("p99"),
            trip: number("trip"),
            calls: number("calls"),
            server: number("server"),
            late_for_all: number("late_for_all"),
            failed: failed.map(|(kind, share)| (kind.clone(), share.as_f64().unwrap_or(0.0))).collect(),
        }
    }

    fn print_head() {
        println!(
            "\n| offered /s | client | decided /s | of the possible | p50 ms | p99 ms | trips | calls | server µs | late for all | failed |"
        );
        println!("|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|---|");
    }

    fn print(&self) {
        let Self { client, offered, decided, capacity, p50, p99, trip, calls, server, late_for_all, failed, .. } = self;
        let possible = decided / offered.min(*capacity);
        let failed: Vec<String> = failed.iter().map(|(kind, share)| format!("{kind} {share:.1} %")).collect();
        println!(
            "| {offered:.0} | {client} | {decided:.0} | {possible:.2} | {p50:.2} | {p99:.2} | {:.2} | {calls:.2} | {server:.0} | {late_for_all:.0} | {} |",
            p50 / trip,
            failed.join(", ")
        );
    }
}

fn read_points(file: &str) -> Vec<Point> {
    let values: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let points: Vec<Point> = values.iter().map(Point::from_json).collect();
    let mut case = "";
    for point in &points {
        if point.case != case {
            println!("\n{}: capacity of the hand-written client {:.0} /s", point.case, point.capacity);
            Point::print_head();
            case = &point.case;
        }
        point.print();
    }
    points
}

// Offering

/// The end of a check.
struct Answer {
    /// When the request arrived, since the load began.
    at: Duration,
    /// The time since the request arrived, and since the client was asked.
    waited: Duration,
    took: Duration,
    outcome: Result<(), String>,
}

/// Offers checks for a time, and returns all answers.
fn offer(runtime: &Runtime, client: &Client, rate: f64, time: Duration) -> Vec<Answer> {
    let (send, answers) = mpsc::channel();
    let mut numbers = Numbers(rate.to_bits() | 1);
    let (began, mut at) = (Instant::now(), Duration::ZERO);
    loop {
        // The pauses of a Poisson process are exponential.
        let uniform = (numbers.below(1 << 53) + 1) as f64 / (1_u64 << 53) as f64;
        at += Duration::from_secs_f64(-uniform.ln() / rate);
        if at >= time {
            break;
        }
        let due = began + at;
        if let Some(pause) = due.checked_duration_since(Instant::now()) {
            std::thread::sleep(pause);
        }
        let (client, send, key) = (client.clone(), send.clone(), numbers.below(KEYS));
        runtime.spawn(async move {
            let asked = Instant::now();
            let outcome = client.check(key).await;
            let _ = send.send(Answer { at, waited: due.elapsed(), took: asked.elapsed(), outcome });
        });
    }
    drop(send);
    answers.iter().collect()
}

/// Returns the numbers of the contenders in the order in which they run. Each round begins with another contender,
/// because what one of them leaves behind can harm the next one.
fn in_rotated_order(rounds: usize, contenders: usize) -> impl Iterator<Item = usize> {
    (0..rounds).flat_map(move |round| (0..contenders).map(move |at| (round + at) % contenders))
}

struct Bench<'a> {
    runtime: &'a Runtime,
    options: &'a Options,
    points: Vec<Point>,
}

/// The settings that all clients and loads of a case share.
struct Setting<'a> {
    case: &'a str,
    deadline: Duration,
    capacity: f64,
    trip: f64,
}

impl Bench<'_> {
    /// Offers a load to a client. Returns the checks that were decided in time, also while it settled, and the point as
    /// far as answers tell.
    fn offer(&self, setting: &Setting<'_>, name: &str, client: &Client, rate: f64) -> (f64, Point) {
        let Options { time, settle, .. } = *self.options;
        let answers = offer(self.runtime, client, rate, settle + time);
        let in_time = |answer: &&Answer| answer.outcome.is_ok() && answer.took <= setting.deadline + LATE;
        let in_all = answers.iter().filter(in_time).count() as f64;
        let all = answers.iter().filter(|answer| answer.at >= settle).count() as f64;
        let (mut times, mut failed) = (Vec::new(), BTreeMap::<String, f64>::new());
        for answer in answers.into_iter().filter(|answer| answer.at >= settle) {
            let is_in_time = in_time(&&answer);
            let Answer { waited, outcome, .. } = answer;
            let kind = match outcome {
                Ok(()) if is_in_time => {
                    times.push(waited.as_secs_f64() * 1e3);
                    continue;
                }
                Ok(()) => "late".to_owned(),
                Err(kind) => kind,
            };
            *failed.entry(kind).or_default() += 100.0 / all;
        }
        times.sort_by(f64::total_cmp);
        let quantile = |part: f64| times.get((times.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
        let decided = times.len() as f64;
        let point = Point {
            case: setting.case.to_owned(),
            client: name.to_owned(),
            offered: all / time.as_secs_f64(),
            decided: decided / time.as_secs_f64(),
            capacity: setting.capacity,
            p50: quantile(0.5),
            p99: quantile(0.99),
            trip: setting.trip,
            calls: f64::NAN,
            server: f64::NAN,
            late_for_all: 0.0,
            failed,
        };
        (in_all, point)
    }

    /// Keeps and prints the round with the median of the decided checks.
    fn keep(&mut self, mut rounds: Vec<Point>) {
        rounds.sort_by(|a, b| a.decided.total_cmp(&b.decided));
        let point = rounds.swap_remove(rounds.len() / 2);
        point.print();
        self.points.push(point);
    }

    /// Returns the most that a client decides in a second at any load, up to the cap.
    fn capacity(&self, client: &Client, deadline: Duration, first: f64) -> f64 {
        if is_smoke() {
            return first;
        }
        let setting = Setting { case: "", deadline, capacity: f64::NAN, trip: f64::NAN };
        let mut most: f64 = 0.0;
        // Some checks fail at any load if other connections keep the server busy. More decided checks are a success.
        let mut holds = |rate: f64| {
            let (_, point) = self.offer(&setting, "", client, rate);
            let holds = point.decided >= 0.95 * point.offered || point.decided >= 1.2 * most;
            most = most.max(point.decided);
            std::thread::sleep(2 * deadline); // late answers come
            holds
        };
        let (mut good, mut bad) = (first / 2.0, first);
        while bad <= self.options.cap && holds(bad) {
            (good, bad) = (bad, 2.0 * bad);
        }
        for _ in 0..3 {
            let middle = (good * bad).sqrt();
            if good < self.options.cap {
                if holds(middle) { good = middle } else { bad = middle }
            }
        }
        most.min(self.options.cap)
    }

    fn start_case(&self, case: &str, deadline: Duration, capacity: f64, trip: f64, fixed: &[f64]) -> Vec<f64> {
        let is_capped = if capacity >= self.options.cap { ", or more: capped" } else { "" };
        println!(
            "\n{case}: deadline {deadline:?}, a lone call {trip:.2} ms, capacity of the hand-written client {capacity:.0} /s{is_capped}"
        );
        Point::print_head();
        if is_smoke() {
            return vec![capacity];
        }
        [0.5, 1.0, 2.0, 3.0].map(|times| times * capacity).into_iter().chain(fixed.iter().copied()).collect()
    }

    /// Returns the median time of a lone call, in milliseconds.
    fn trip(&self, client: &Client) -> f64 {
        let times = (0..if is_smoke() { 3 } else { 40 }).map(|key| {
            let began = Instant::now();
            let _ = self.runtime.block_on(client.check(key));
            began.elapsed().as_secs_f64() * 1e3
        });
        median(times.collect())
    }
}

// The clients

#[derive(Clone)]
enum Client {
    Redis(RedisLimiter, Policy),
    Postgres(StoreLimiter<PostgresStore>, Policy),
    Script(ByHand<MultiplexedConnection>, Arc<str>),
    Upsert(ByHand<Upsert>),
}

impl Client {
    async fn check(&self, key: u64) -> Result<(), String> {
        match self {
            Self::Redis(limiter, policy) => take(limiter, policy, key, |error| error.kind()).await,
            Self::Postgres(limiter, policy) => take(limiter, policy, key, |error| error.kind()).await,
            Self::Script(client, sha) => {
                let ask = async |mut connection: MultiplexedConnection| {
                    let mut call = redis::cmd("EVALSHA");
                    call.arg(&**sha).arg(1).arg(format!("five:{key}")).arg(1).arg(1_000_000);
                    call.query_async::<i64>(&mut connection).await.is_ok_and(|room| room >= 0)
                };
                client.ask(ask).await
            }
            Self::Upsert(client) => {
                let key = key.to_string();
                let ask = async |it: Arc<(tokio_postgres::Client, tokio_postgres::Statement)>| {
                    it.0.query_opt(&it.1, &[&key]).await.is_ok_and(|row| row.is_some())
                };
                client.ask(ask).await
            }
        }
    }
}

/// A connection with its statement.
type Upsert = Arc<(tokio_postgres::Client, tokio_postgres::Statement)>;

async fn take<L: Limiter>(
    limiter: &L,
    policy: &Policy,
    key: u64,
    kind: impl Fn(&L::Error) -> StoreErrorKind,
) -> Result<(), String> {
    let key = Key::of(key).expect("a number is a key");
    match limiter.take(&[Charge::new(policy, &key)]).await {
        Ok(decision) if decision.is_allowed() => Ok(()),
        Ok(_) => Err("denied".to_owned()),
        Err(error) => Err(kind(&error).as_str().to_owned()),
    }
}

/// A client as one writes it by hand: some connections, and a deadline.
#[derive(Clone)]
struct ByHand<C> {
    /// A connection that many may use at once, or a pool in which each waits for a connection of its own.
    connections: Connections<C>,
    deadline: Duration,
}

#[derive(Clone)]
enum Connections<C> {
    Shared(C),
    Pool(Arc<(Semaphore, Mutex<Vec<C>>)>),
}

impl<C: Clone> ByHand<C> {
    fn pool(connections: Vec<C>, deadline: Duration) -> Self {
        let pool = Arc::new((Semaphore::new(connections.len()), Mutex::new(connections)));
        Self { connections: Connections::Pool(pool), deadline }
    }

    async fn ask(&self, ask: impl AsyncFnOnce(C) -> bool) -> Result<(), String> {
        let answer = async {
            match &self.connections {
                Connections::Shared(connection) => ask(connection.clone()).await,
                Connections::Pool(pool) => {
                    let _permit = pool.0.acquire().await.expect("it is never closed");
                    // It returns to the pool even if the deadline ends the wait.
                    let lent = Lent(&pool.1, pool.1.lock().unwrap().pop());
                    ask(lent.1.clone().expect("there is one for each permit")).await
                }
            }
        };
        match timeout(self.deadline, answer).await {
            Ok(true) => Ok(()),
            Ok(false) => Err("failed".to_owned()),
            Err(_) => Err("timeout".to_owned()),
        }
    }
}

/// A connection that returns to its pool.
struct Lent<'a, C>(&'a Mutex<Vec<C>>, Option<C>);

impl<C> Drop for Lent<'_, C> {
    fn drop(&mut self) {
        self.0.lock().unwrap().extend(self.1.take());
    }
}

/// Nothing is denied while it runs.
fn plenty() -> Policy {
    Policy::new("load", Quota::token_bucket(1_000_000, Duration::from_secs(1)).unwrap()).unwrap()
}

/// The checks that precede a load.
const WARM: u32 = 20;

/// Waits until checks succeed on a busy machine.
fn warm(runtime: &Runtime, client: &Client) {
    let (began, mut decided) = (Instant::now(), 0);
    for key in (0..KEYS).cycle() {
        decided += u32::from(runtime.block_on(client.check(key)).is_ok());
        // If almost all fail, the load shows it.
        if decided == if is_smoke() { 2 } else { WARM } || began.elapsed() > Duration::from_secs(10) {
            return;
        }
    }
}

// Redis

struct RedisCase<'a> {
    name: &'a str,
    place: Place,
    deadline: Duration,
    fixed: &'a [f64],
}

enum Place {
    Here,
    /// So far away that a round trip takes this time.
    Far(Duration),
    /// So many other connections run scripts.
    Neighbours(usize),
    /// Each key holds the server for this time.
    Slow(Duration),
    /// Behind a proxy that lets this number of bytes a second pass.
    Thin(u32),
}

impl Bench<'_> {
    fn redis(&mut self, case: &RedisCase<'_>) {
        let server = redis_server::Server::start();
        let line = match case.place {
            Place::Far(trip) => Some(DelayLine::start(server.port(), trip / 2)),
            Place::Slow(each_key) => Some(DelayLine::start_slow(server.port(), each_key)),
            Place::Thin(bytes_a_second) => Some(DelayLine::start_thin(server.port(), bytes_a_second)),
            Place::Here | Place::Neighbours(_) => None,
        };
        let url = format!("redis://127.0.0.1:{}", line.as_ref().map_or(server.port(), DelayLine::port));
        let (runtime, deadline) = (self.runtime, case.deadline);
        let hand = || runtime.block_on(script(&server, &url, 1, deadline));
        let ours = |client| {
            let builder = RedisLimiter::builder().client(client).deadline(deadline);
            Client::Redis(runtime.block_on(builder.connect(&url)).unwrap(), plenty())
        };
        let contenders: [(&str, &dyn Fn() -> Client); 4] = [
            ("by hand", &hand),
            ("tower-ratelimit, fred", &|| ours(RedisClient::Fred)),
            ("tower-ratelimit, redis-rs", &|| ours(RedisClient::RedisRs)),
            ("by hand, 16 connections", &|| runtime.block_on(script(&server, &url, POOL, deadline))),
        ];
        contenders.iter().for_each(|(_, connect)| warm(runtime, &connect()));
        let neighbours = match case.place {
            Place::Neighbours(count) => Some(Neighbours::start(&server, count)),
            _ => None,
        };
        let client = hand();
        warm(runtime, &client);
        let trip = self.trip(&client);
        let capacity = self.capacity(&client, deadline, 500.0);
        let setting = Setting { case: case.name, deadline, capacity, trip };
        for rate in self.start_case(case.name, deadline, capacity, trip, case.fixed) {
            let mut rounds = contenders.map(|_| Vec::new());
            for at in in_rotated_order(self.options.rounds, contenders.len()) {
                let (name, connect) = contenders[at];
                let client = connect();
                warm(runtime, &client);
                let before = script_calls(&server);
                let from = Instant::now() + self.options.settle;
                let (decided, mut point) = self.offer(&setting, name, &client, rate);
                let after = script_calls(&server);
                point.calls = (after.0 - before.0) / decided;
                point.server = (after.1 - before.1) / decided;
                if let Some(neighbours) = &neighbours {
                    point.late_for_all = 100.0 * neighbours.late_for_all(from, self.options.time, deadline);
                }
                rounds[at].push(point);
            }
            rounds.into_iter().for_each(|rounds| self.keep(rounds));
        }
    }
}

/// Connects by hand: one connection for all, or a pool of several.
async fn script(server: &redis_server::Server, url: &str, connections: usize, deadline: Duration) -> Client {
    let sha: String = redis::cmd("SCRIPT").arg("LOAD").arg(FIVE_LINES).query(&mut server.connection()).unwrap();
    let info = redis::IntoConnectionInfo::into_connection_info(url).unwrap();
    let client = redis::Client::open(info.set_tcp_settings(redis::io::tcp::TcpSettings::default().set_nodelay(true)));
    let client = client.unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    let mut all = Vec::new();
    for _ in 0..connections {
        all.push(client.get_multiplexed_async_connection_with_config(&config).await.unwrap());
    }
    let by_hand = if let [one] = &all[..] {
        ByHand { connections: Connections::Shared(one.clone()), deadline }
    } else {
        ByHand::pool(all, deadline)
    };
    Client::Script(by_hand, sha.into())
}

/// Returns how many script calls the server has done but for the neighbours', and its time for them in microseconds.
fn script_calls(server: &redis_server::Server) -> (f64, f64) {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let lines = info.lines().filter(|line| line.starts_with("cmdstat_evalsha:"));
    let field = |line: &str, name: &str| {
        let fields = line.split_once(':').map_or("", |(_, fields)| fields).split(',');
        fields.filter_map(|field| field.strip_prefix(name)?.parse::<f64>().ok()).sum::<f64>()
    };
    lines.fold((0.0, 0.0), |(calls, time), line| (calls + field(line, "calls="), time + field(line, "usec=")))
}

/// When each `PING` was sent, and how long its answer took.
type Pings = Arc<Mutex<Vec<(Instant, Duration)>>>;

/// Connections that run scripts of some 4 ms each, one after the other, and one that sends pings.
struct Neighbours {
    have_ended: Arc<AtomicBool>,
    pings: Pings,
    threads: Vec<JoinHandle<()>>,
}

impl Neighbours {
    /// They send `EVAL`, so that the server counts their calls elsewhere.
    fn start(server: &redis_server::Server, count: usize) -> Self {
        let script = "local n = 0 for step = 1, ARGV[1] do n = n + step % 7 end return n";
        let run = move |connection: &mut redis::Connection, steps: u64| {
            let began = Instant::now();
            redis::cmd("EVAL").arg(script).arg(0).arg(steps).exec(connection).unwrap();
            began.elapsed()
        };
        let mut connection = server.connection();
        // The quickest of some calls, since others may use the machine.
        let steps = 200_000;
        let quickest = (0..10).map(|_| run(&mut connection, steps)).min().expect("there are ten");
        let steps = (steps as f64 * 0.004 / quickest.as_secs_f64()) as u64;
        let have_ended = Arc::new(AtomicBool::new(false));
        let neighbour = |_| {
            let (ended, mut connection) = (Arc::clone(&have_ended), server.connection());
            std::thread::spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    run(&mut connection, steps);
                }
            })
        };
        let mut threads: Vec<_> = (0..count).map(neighbour).collect();
        let pings = Pings::default();
        threads.extend(send_pings(server.port(), &have_ended, &pings));
        Self { have_ended, threads, pings }
    }

    /// Returns the share of the pings of this time that were answered after the deadline.
    fn late_for_all(&self, from: Instant, time: Duration, deadline: Duration) -> f64 {
        std::thread::sleep(2 * deadline); // late answers come
        let pings = self.pings.lock().unwrap();
        let of_this_time = pings.iter().filter(|(sent, _)| (from..from + time).contains(sent));
        let (mut late, mut all) = (0.0, 0.0);
        for (_, took) in of_this_time {
            late += f64::from(*took > deadline);
            all += 1.0;
        }
        late / all
    }
}

/// Sends a `PING` each 5 ms, whether or not the last one is answered. Returns the two threads.
fn send_pings(port: u16, ended: &Arc<AtomicBool>, pings: &Pings) -> [JoinHandle<()>; 2] {
    let (ended, pings) = (Arc::clone(ended), Arc::clone(pings));
    let mut writes = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    writes.set_nodelay(true).unwrap();
    let mut reads = writes.try_clone().unwrap();
    let (send, sent) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        while !ended.load(Ordering::Relaxed) {
            send.send(Instant::now()).unwrap();
            writes.write_all(b"PING\r\n").unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let reader = std::thread::spawn(move || {
        let mut pong = [0; b"+PONG\r\n".len()];
        for at in sent {
            reads.read_exact(&mut pong).unwrap();
            pings.lock().unwrap().push((at, at.elapsed()));
        }
    });
    [writer, reader]
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        self.have_ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "a neighbour's call fails");
        }
    }
}

// PostgreSQL

impl Bench<'_> {
    fn postgres(&mut self, case: &str, flush: &str, fixed: &[f64]) {
        // Without siblings every flush takes longer, and not only those for which others wait.
        let server = postgres::Server::with(&["fsync=on", flush, "commit_siblings=0", "max_connections=150"]);
        let table = "CREATE TABLE by_hand (key text COLLATE \"C\" PRIMARY KEY, drained timestamptz NOT NULL) WITH (fillfactor = 50)";
        let runtime = self.runtime;
        runtime.block_on(server.query(table));
        let observer = Observer::new(runtime, &server);
        let ours = || {
            runtime.block_on(async {
                let builder = PostgresStore::builder().table("ours").create_table(Durability::Logged);
                let store = builder.connect(&server.url()).await.unwrap();
                Client::Postgres(StoreLimiterBuilder::new().deadline(DEADLINE).build(store).unwrap(), plenty())
            })
        };
        // How many connections the limiter opens under load.
        let client = ours();
        warm(runtime, &client);
        offer(runtime, &client, if is_smoke() { 50.0 } else { 1_000.0 }, self.options.time / 2);
        let connections = observer.connections();
        drop(client);
        let equal = || runtime.block_on(upsert(&server, connections));
        let (equal_name, large_name) = (format!("by hand, {connections} connections"), format!("by hand, {LARGE}"));
        let contenders: [(&str, &dyn Fn() -> Client); 3] = [
            (&equal_name, &equal),
            ("tower-ratelimit", &ours),
            (&large_name, &|| runtime.block_on(upsert(&server, LARGE))),
        ];
        let client = equal();
        warm(runtime, &client);
        let trip = self.trip(&client);
        let capacity = self.capacity(&client, DEADLINE, 100.0);
        drop(client);
        let setting = Setting { case, deadline: DEADLINE, capacity, trip };
        // The transactions of a contender that connects, and checks what precedes a load.
        let firsts = contenders.map(|(_, connect)| {
            let before = observer.transactions();
            warm(runtime, &connect());
            observer.transactions() - before
        });
        for rate in self.start_case(case, DEADLINE, capacity, trip, fixed) {
            let mut rounds = contenders.map(|_| Vec::new());
            for at in in_rotated_order(self.options.rounds, contenders.len()) {
                let (name, connect) = contenders[at];
                let before = observer.transactions();
                let client = connect();
                warm(runtime, &client);
                let processor = server.processor_time();
                let (decided, mut point) = self.offer(&setting, name, &client, rate);
                let used = server.processor_time() - processor;
                drop(client);
                point.calls = (observer.transactions() - before - firsts[at]) / decided;
                point.server = used.as_secs_f64() * 1e6 / decided;
                rounds[at].push(point);
            }
            rounds.into_iter().for_each(|rounds| self.keep(rounds));
        }
    }
}

/// Connects by hand, each connection with the statement.
async fn upsert(server: &postgres::Server, connections: usize) -> Client {
    let mut all = Vec::new();
    for _ in 0..connections {
        let client = server.client().await;
        let statement = client.prepare(UPSERT).await.unwrap();
        all.push(Arc::new((client, statement)));
    }
    Client::Upsert(ByHand::pool(all, DEADLINE))
}

/// Watches the database from another one, so that its own transactions do not count.
struct Observer<'a> {
    runtime: &'a Runtime,
    client: tokio_postgres::Client,
}

impl<'a> Observer<'a> {
    fn new(runtime: &'a Runtime, server: &postgres::Server) -> Self {
        let url = format!("postgres://postgres@127.0.0.1:{}/template1", server.port());
        let client = runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            client
        });
        Self { runtime, client }
    }

    fn number(&self, sql: &str) -> i64 {
        self.runtime.block_on(self.client.query_one(sql, &[])).unwrap().get(0)
    }

    /// Returns how many connections are open.
    fn connections(&self) -> usize {
        let sql =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = 'postgres' AND backend_type = 'client backend'";
        self.number(sql) as usize
    }

    /// Returns how many transactions there were, committed or not. A connection reports its own when it closes, so this
    /// waits until all are closed.
    fn transactions(&self) -> f64 {
        while self.connections() > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.number("SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'postgres'") as f64
    }
}
