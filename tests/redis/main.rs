//! Tests of `RedisLimiter` on real servers, through its public API.
#![cfg(feature = "_redis")]

mod blocks;
mod callers;
mod clients;
mod cluster;
mod companions;
mod connections;
mod credentials;
mod crowd_in_trouble;
mod descriptors;
#[cfg(feature = "fleet")]
mod fleet;
mod hostile;
mod in_flight_campaign;
mod in_line;
mod limits;
mod linearizable;
mod nested;
mod obey;
mod own_quotas;
#[cfg(unix)]
mod paces;
mod places;
#[cfg(feature = "conformance")]
mod promises;
mod queues;
mod reload;
mod resharding;
mod seams;
mod secrets;
mod settling;
mod soak;
mod stats;
#[cfg(target_os = "linux")]
mod stepped_clock;
mod tls;
mod troubles;
mod waits;

#[path = "../support/histories.rs"]
mod histories;
#[path = "../support/in_flight.rs"]
mod in_flight_over_tcp;
#[path = "../support/lines.rs"]
mod lines;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use support::redis_limiter::{LONG, connected, patient};
use support::redis_server::Server;
use tokio::time::{Instant, sleep};
use tower_ratelimit::{
    Key, Policy, Quota, RedisLimiter, Rule,
    limiter::{
        Charge, Decision, Limiter,
        redis::{RedisClient, RedisError, RedisLimiterBuilder},
    },
};

const MINUTE: Duration = Duration::from_secs(60);

async fn connect(server: &Server) -> RedisLimiter {
    connected(patient(), &server.url()).await
}

/// Returns a builder for each client library.
fn builders(builder: impl Fn() -> RedisLimiterBuilder) -> Vec<RedisLimiterBuilder> {
    vec![
        #[cfg(feature = "fred")]
        builder().client(RedisClient::Fred),
        #[cfg(feature = "redis-rs")]
        builder().client(RedisClient::RedisRs),
    ]
}

/// Returns why `connect` is refused. `connect` does not wait for long until the server says so, so it is tried again.
async fn refusal(builder: impl Fn() -> RedisLimiterBuilder, url: &str) -> RedisError {
    let began = Instant::now();
    loop {
        match builder().connect(url).await {
            Err(error) => return error,
            Ok(_) => assert!(began.elapsed() < LONG, "it is not refused"),
        }
    }
}

/// Waits until something is so, and fails if that takes too long.
async fn eventually(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !is().await {
        assert!(began.elapsed() < LONG, "{what}");
        sleep(Duration::from_millis(5)).await;
    }
}

fn key(name: &str) -> Key {
    Key::of(name).expect("a text is a key")
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).expect("the name is possible")
}

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).expect("the name is possible")
}

async fn take(limiter: &RedisLimiter, policy: &Policy, name: &str, cost: u64) -> Result<Decision, RedisError> {
    limiter.take(&[Charge::new(policy, &key(name)).cost(cost)]).await
}

async fn passes(limiter: &RedisLimiter, policy: &Policy, name: &str) -> bool {
    take(limiter, policy, name, 1).await.expect("Redis answers").is_allowed()
}

/// Returns how many calls of limiters were run whose time is the server's. Each asks for it once. Probes of connections,
/// which come by themselves, do not.
fn calls(server: &Server) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let calls = info.lines().find_map(|line| line.strip_prefix("cmdstat_time:calls=")?.split(',').next());
    calls.map_or(0, |calls| calls.parse().unwrap())
}

/// Returns the server's name and version: `redis 7.0.15`, `valkey 9.1.2`.
fn version(server: &Server) -> String {
    let info: String = redis::cmd("INFO").arg("server").query(&mut server.connection()).unwrap();
    let of =
        |field: &str| info.lines().find_map(|line| line.strip_prefix(field)).map(|version| version.trim().to_owned());
    match of("valkey_version:") {
        Some(version) => format!("valkey {version}"),
        None => format!("redis {}", of("redis_version:").expect("every server says its version")),
    }
}

/// A wrong program must not pass for another: `REDIS_SERVER_VERSION` says what the version begins
/// with.
#[test]
fn server_has_the_expected_version() {
    let version = version(&Server::start());
    println!("the server is {version}");
    if let Ok(meant) = std::env::var("REDIS_SERVER_VERSION") {
        assert!(version.starts_with(&meant), "{version} is not {meant}");
    }
}

fn keys(server: &Server) -> Vec<Vec<u8>> {
    redis::cmd("KEYS").arg("*").query(&mut server.connection()).unwrap()
}
