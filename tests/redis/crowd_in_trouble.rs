//! A server of axum with 200 clients, whose Redis is behind a proxy that delays, limits and cuts at once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::{Router, routing::get};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::observe::LimiterEvent;
use tower_ratelimit::quota::Anchor;
use tower_ratelimit::{Key, Policy, Quota, RateLimitLayer, RedisLimiter, key as extract};

use super::{LONG, connect, connected, eventually, policy, rule, take};
use crate::support::Events;
use crate::support::proxy::Proxy;
use crate::support::redis_server::Server;

const CLIENTS: usize = 200;

const MS: Duration = Duration::from_millis(1);

/// The requests that all may send.
const LIMIT: u64 = 100_000_000;

fn quota() -> Quota {
    Quota::fixed_window(LIMIT, Duration::from_secs(3_600)).unwrap().anchor(Anchor::FirstRequest).unwrap()
}

fn policy_of_all() -> Policy {
    policy("crowd", quota())
}

/// The times of the clients' responses, by status.
type Seen = Arc<Mutex<BTreeMap<u16, Vec<Duration>>>>;

/// Sends requests over one connection until it is told to stop.
async fn client(port: u16, seen: Seen, stop: Arc<AtomicBool>) {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    connection.set_nodelay(true).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        connection.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let status = response(&mut connection).await;
        seen.lock().unwrap().entry(status).or_default().push(began.elapsed());
        sleep(5 * MS).await;
    }
}

/// Reads a response, and returns its status.
async fn response(connection: &mut TcpStream) -> u16 {
    let (mut read, mut bytes) = (Vec::new(), [0; 4_096]);
    loop {
        let count = connection.read(&mut bytes).await.unwrap();
        assert!(count > 0, "the server closed a connection");
        read.extend_from_slice(&bytes[..count]);
        let text = String::from_utf8_lossy(&read).to_ascii_lowercase();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length =
            head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |it| it.parse().unwrap());
        if body.len() >= length {
            return head.split(' ').nth(1).unwrap().parse().unwrap();
        }
    }
}

/// Prints a row about a part of the time, and returns the number of responses with each status.
fn report(what: &str, seen: &Seen, lasted: Duration) -> BTreeMap<u16, usize> {
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let mut counts = BTreeMap::new();
    for (status, mut times) in seen {
        times.sort_unstable();
        let ms = |of: usize| times[(times.len() - 1) * of / 100].as_secs_f64() * 1_000.0;
        let rate = times.len() as f64 / lasted.as_secs_f64();
        println!(
            "{what:32} {status} {:6} responses, {rate:7.0} a second, p50 {:6.1} ms, p99 {:6.1} ms, worst {:6.1} ms",
            times.len(),
            ms(50),
            ms(99),
            ms(100)
        );
        counts.insert(status, times.len());
    }
    counts
}

fn of(counts: &BTreeMap<u16, usize>, status: u16) -> usize {
    counts.get(&status).copied().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crowd_gets_answers_while_redis_is_slow_full_and_cut() {
    // `RATELIMIT_CAMPAIGN=25` goes on for 25 times as long.
    let times = std::env::var("RATELIMIT_CAMPAIGN").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
    let lasts = Duration::from_secs(2) * times;
    let (server, seen_by_operator) = (Server::start(), Events::default());
    let proxy = Proxy::start(server.port());
    proxy.delay(5 * MS);
    // A campaign has the machine to itself. A busy one may not give this process a turn for a quarter of a second, and
    // then no check is in time.
    let deadline = if times > 1 { 250 * MS } else { 2_000 * MS };
    let builder = RedisLimiter::builder().deadline(deadline).observer(seen_by_operator.clone());
    let limiter = connected(builder, &proxy.url()).await;
    let rule = rule("crowd", quota());
    let app = Router::new().route("/", get(|| async { "done" })).layer(RateLimitLayer::new(
        limiter.clone(),
        rule,
        extract::global(),
    ));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let served = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let (seen, stop) = (Seen::default(), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> =
        (0..CLIENTS).map(|_| tokio::spawn(client(port, Arc::clone(&seen), Arc::clone(&stop)))).collect();
    let mut passed = 0;
    let mut add = |counts: &BTreeMap<u16, usize>| passed += of(counts, 200);
    sleep(lasts).await;
    add(&report("5 ms away", &seen, lasts));
    // Slower, narrower, and cut twice a second.
    proxy.delay(40 * MS);
    proxy.limit(1_000_000);
    let began = Instant::now();
    while began.elapsed() < lasts {
        proxy.reset();
        sleep(500 * MS).await;
    }
    let troubled = report("40 ms away, 1 MB/s, cut each 0.5 s", &seen, began.elapsed());
    add(&troubled);
    proxy.delay(5 * MS);
    proxy.limit(0);
    proxy.reset();
    let policy = policy("other", Quota::per_hour(1_000_000));
    eventually("checks pass again", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    let recovered = Instant::now();
    loop {
        sleep(500 * MS).await;
        let after = report("5 ms away again", &seen, 500 * MS);
        add(&after);
        if of(&after, 200) > 20 * of(&after, 503) {
            break;
        }
        assert!(recovered.elapsed() < LONG, "it is over, and requests are refused: {after:?}");
    }
    println!("nearly all pass {:?} after the end of the trouble", recovered.elapsed());
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    add(&report("the last ones", &seen, MS));
    let downs = seen_by_operator.lock().iter().filter(|event| matches!(event, LimiterEvent::StoreDown { .. })).count();
    println!("the operator saw {downs} times that Redis was down");
    assert!(troubled.keys().all(|status| [200, 503].contains(status)), "{troubled:?}");
    // No request passed that was not charged.
    // Those without an answer may have been charged.
    let (policy, key) = (policy_of_all(), Key::global());
    let judge = connect(&server).await;
    let left = judge.peek(&[Charge::new(&policy, &key).cost(0)]).await.unwrap().charges()[0].remaining();
    let charged = LIMIT - left;
    println!("{passed} requests passed, {charged} were charged");
    assert!(charged >= passed as u64, "{passed} passed, and {charged} were charged");
    served.abort();
}
