//! Redis stores only hashes of keys, because keys may be secrets.

use std::convert::Infallible;
use std::future::ready;

use axum::body::Body;
use http::{HeaderName, Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, Quota, RateLimitLayer, RedisLimiter, Rule, key,
    limiter::{Blocks, Charge, Limiter, Meters, Refund},
    quota::Anchor,
};

use super::{MINUTE, keys, policy, rule};
use crate::support::redis_server::Server;

const SECRET: &str = "sk-live-51H8x";
const ADDRESS: &str = "203.0.113.77";

type Extractor = Box<dyn Fn(&tower_ratelimit::Head<'_>) -> Option<Key> + Send + Sync>;

/// The client of a request.
#[derive(Clone)]
struct User(String);

/// A key whose parts are all secrets.
fn request() -> Request<Body> {
    Request::builder()
        .uri(format!("http://{SECRET}.example/{SECRET}"))
        .header(http::header::HOST, format!("{SECRET}.example"))
        .header("x-api-key", SECRET)
        .header(http::header::AUTHORIZATION, format!("Bearer {SECRET}"))
        .header(http::header::COOKIE, format!("session={SECRET}"))
        .header("x-forwarded-for", ADDRESS)
        .extension(User(SECRET.to_owned()))
        .body(Body::empty())
        .unwrap()
}

/// Returns every extractor that reads what a client sends.
fn extractors() -> Vec<Extractor> {
    vec![
        Box::new(key::header("x-api-key")),
        Box::new(key::bearer_token()),
        Box::new(key::cookie("session")),
        Box::new(key::path()),
        Box::new(key::host()),
        Box::new(key::extension(|user: &User| user.0.clone())),
        Box::new(key::both(key::client_ip(key::TrustedProxies::count(1).unwrap()), key::header("x-api-key"))),
        Box::new(key::client_ip(key::TrustedProxies::count(1).unwrap())),
        Box::new(|parts: &tower_ratelimit::Head<'_>| {
            Key::of(parts.headers.get(HeaderName::from_static("x-api-key"))?.as_bytes())
        }),
    ]
}

/// Does everything that a limiter can do with a key.
async fn use_key(limiter: &RedisLimiter, extractor: Extractor, turn: usize) {
    let key = extractor(&(&request()).into()).expect("the request has it");
    let name = |what: &str| format!("{what}-{turn}");
    let block = policy(&name("block"), Quota::block(2, 10 * MINUTE, 60 * MINUTE).unwrap());
    let meter = policy(&name("meter"), Quota::meter(3, 24 * 60 * MINUTE).unwrap());
    let window = Quota::fixed_window(2, MINUTE).unwrap();
    let several = Rule::all_of(name("several"), [window, Quota::sliding_log(2, MINUTE).unwrap()]).unwrap();
    let rules = [
        rule(&name("blocked"), window).block(block.name(), *block.quota()).unwrap(),
        rule(&name("metered"), window).overage(meter.name(), *meter.quota()).unwrap(),
    ];
    let extractor = std::sync::Arc::new(extractor);
    for rule in rules {
        let extractor = std::sync::Arc::clone(&extractor);
        let layer =
            RateLimitLayer::new(limiter.clone(), rule, move |parts: &tower_ratelimit::Head<'_>| extractor(parts));
        for _ in 0..7 {
            let inner = service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty()))));
            layer.clone().layer(inner).oneshot(request()).await.unwrap();
        }
    }
    for policy in several.policies().iter().chain([&policy(&name("hot"), Quota::per_second(100_000))]) {
        let charge = Charge::new(policy, &key);
        for _ in 0..40 {
            let mut taken = limiter.take(&[charge]).await.unwrap();
            if let Some(receipt) = taken.take_receipts().pop().flatten() {
                let refund = Refund::new(policy.clone(), key.clone(), receipt);
                limiter.refund(vec![refund]).await.unwrap();
            }
        }
        limiter.settle(&[charge]).await.unwrap();
        limiter.peek(&[charge]).await.unwrap();
        limiter.reset(policy, &key).await.unwrap();
        limiter.take(&[charge]).await.unwrap();
    }
    let (blocks, meters) = (Blocks::new(limiter.clone(), block), Meters::new(limiter.clone(), meter));
    let (blocks, meters) = (blocks.unwrap(), meters.unwrap());
    blocks.strike(&key, 1).await.unwrap();
    blocks.block_for(&key, MINUTE).await.unwrap();
    blocks.blocked_for(&key).await.unwrap();
    meters.usage(&key).await.unwrap();
    meters.settle(&key, 1).await.unwrap();
}

/// Collects all bytes of an answer, separated by spaces.
fn flatten(value: &redis::Value, into: &mut Vec<u8>) {
    match value {
        redis::Value::BulkString(bytes) => into.extend(bytes),
        redis::Value::SimpleString(text) => into.extend(text.as_bytes()),
        redis::Value::Array(values) => values.iter().for_each(|value| flatten(value, into)),
        _ => {}
    }
    into.push(b' ');
}

/// Returns everything that is stored, and all commands that were sent.
fn seen_by(server: &Server) -> Vec<u8> {
    let mut connection = server.connection();
    let (mut seen, keys) = (Vec::new(), keys(server));
    assert!(keys.len() > 20, "{} keys", keys.len());
    for key in keys {
        let value: redis::Value = redis::cmd("DUMP").arg(&key).query(&mut connection).unwrap();
        seen.extend(key);
        flatten(&value, &mut seen);
    }
    let log: redis::Value = redis::cmd("SLOWLOG").arg("GET").arg(1_000_000).query(&mut connection).unwrap();
    flatten(&log, &mut seen);
    seen
}

fn contains(seen: &[u8], what: &[u8]) -> bool {
    seen.windows(what.len()).any(|part| part == what)
}

/// Starts a server that logs every command.
const LOGGED: [&str; 4] = ["--slowlog-log-slower-than", "0", "--slowlog-max-len", "1000000"];

async fn a_cluster() -> Server {
    let server = Server::with(&[&LOGGED[..], &["--cluster-enabled", "yes"]].concat());
    let slots: Vec<String> = (0..16_384).map(|slot: u16| slot.to_string()).collect();
    redis::cmd("CLUSTER").arg("ADDSLOTS").arg(slots).exec(&mut server.connection()).unwrap();
    let ready = || -> bool {
        let info: String = redis::cmd("CLUSTER").arg("INFO").query(&mut server.connection()).unwrap();
        info.contains("cluster_state:ok")
    };
    super::eventually("the cluster is ready", async || ready()).await;
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_are_nowhere_in_redis() {
    let (alone, cluster) = (Server::with(&LOGGED), a_cluster().await);
    let of_cluster = format!("redis-cluster://127.0.0.1:{}", cluster.port());
    for (server, url, groups) in
        [(&alone, alone.url(), None), (&cluster, of_cluster.clone(), None), (&cluster, of_cluster, Some(16))]
    {
        let mut builder = super::patient().lease_units(100);
        if let Some(groups) = groups {
            builder = builder.slot_groups(groups);
        }
        let limiter = super::connected(builder, &url).await;
        for (turn, extractor) in extractors().into_iter().enumerate() {
            use_key(&limiter, extractor, turn).await;
        }
        let seen = seen_by(server);
        assert!(contains(&seen, b"EVALSHA"), "the log is not empty");
        for secret in [SECRET.as_bytes(), ADDRESS.as_bytes(), &[203, 0, 113, 77]] {
            assert!(!contains(&seen, secret), "{} is there in clear", secret.escape_ascii());
        }
    }
}

#[tokio::test]
async fn keys_are_readable_by_choice() {
    let server = Server::start();
    let limiter = super::connected(super::patient().readable_keys(true), &server.url()).await;
    let key = Key::of("alice").unwrap();
    limiter.take(&[Charge::new(&policy("p", Quota::per_hour(1)), &key)]).await.unwrap();
    assert!(contains(&keys(&server)[0], b"alice"));
}

#[tokio::test]
async fn processes_agree_on_hashes_without_configuration() {
    let server = Server::start();
    let (first, second) = (super::connect(&server).await, super::connect(&server).await);
    // It begins with the first request, so that it does not end while the test runs.
    let window = Quota::fixed_window(1, 60 * MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest));
    let policy = policy("p", window.unwrap());
    assert!(super::passes(&first, &policy, SECRET).await);
    assert!(!super::passes(&second, &policy, SECRET).await);
}

#[tokio::test]
async fn error_names_the_stored_key_and_no_secret() {
    let server = Server::start();
    for readable in [false, true] {
        let builder = super::patient().prefix(format!("readable-{readable}"));
        let builder = builder.readable_keys(readable);
        let limiter = super::connected(builder, &server.url()).await;
        let (policy, key) = (policy("p", Quota::per_hour(100)), Key::of(SECRET).unwrap());
        limiter.take(&[Charge::new(&policy, &key)]).await.unwrap();
        let prefix = format!("readable-{readable}:");
        let stored = keys(&server).into_iter().find(|key| key.starts_with(prefix.as_bytes()) && key.ends_with(b":p"));
        let stored = String::from_utf8(stored.unwrap()).unwrap();
        for command in ["SET", "LPUSH"] {
            redis::cmd("DEL").arg(&stored).exec(&mut server.connection()).unwrap();
            redis::cmd(command).arg(&[&stored, "something else"]).exec(&mut server.connection()).unwrap();
            let error = limiter.take(&[Charge::new(&policy, &key)]).await.unwrap_err().to_string();
            let shown = if readable { "readable-true:2:{k*}:1:p" } else { &stored };
            assert!(error.contains(&format!("`{shown}`")) && !error.contains(SECRET), "{error}");
        }
    }
}
