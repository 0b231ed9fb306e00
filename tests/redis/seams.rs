//! Users and their rights, passwords, deadlines, and values of another type.

use std::cell::RefCell;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_ratelimit::{
    Quota, RedisLimiter,
    clock::ManualClock,
    limiter::{Limiter, StoreErrorKind},
    observe::LimiterEvent,
};

use super::{LONG, connected, eventually, key, keys, patient, policy, refusal, take};
use crate::support::Events;
use crate::support::redis_server::Server;

fn acl(server: &Server, rights: &str) {
    let mut command = redis::cmd("ACL");
    command.arg("SETUSER").arg("app").arg("reset").arg("on").arg(">pass");
    rights.split_whitespace().for_each(|right| {
        command.arg(right);
    });
    command.exec(&mut server.connection()).unwrap();
}

fn url(server: &Server) -> String {
    format!("redis://app:pass@127.0.0.1:{}", server.port())
}

/// Returns the rights that the guide names.
fn documented() -> &'static str {
    include_str!("../../src/guide/redis_and_failures.md")
        .split_once("ACL SETUSER ratelimit on >password ")
        .unwrap()
        .1
        .lines()
        .next()
        .unwrap()
}

/// Returns the rights that the error for a user without rights lists.
async fn advised(server: &Server) -> String {
    acl(server, "");
    let refused = refusal(RedisLimiter::builder, &url(server)).await.to_string();
    let rights = refused.split_once("ACL SETUSER <user> ").unwrap().1.split_once("<prefix>:*").unwrap().0;
    format!("{rights}ratelimit:*")
}

#[tokio::test]
async fn changed_password_causes_no_outage() {
    let server = Server::start();
    let limiter = connected(RedisLimiter::builder().deadline(Duration::from_secs(2)), &server.url()).await;
    let policy = policy("p", Quota::per_hour(100));
    eventually("no check succeeds", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    let mut admin = server.connection();
    redis::cmd("CONFIG").arg(&["SET", "requirepass", "new"]).exec(&mut admin).unwrap();
    redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).exec(&mut admin).unwrap();
    eventually("the wrong password is not reported", async || {
        take(&limiter, &policy, "a", 1).await.is_err_and(|error| error.kind() == StoreErrorKind::Misconfigured)
    })
    .await;
}

/// Returns the commands and the key patterns among the documented rights.
fn each_right() -> impl Iterator<Item = &'static str> {
    documented().split_whitespace()
}

fn without(right: &str) -> String {
    each_right().filter(|other| *other != right).collect::<Vec<_>>().join(" ")
}

/// The texts of `LimiterEvent::StoreFailed` about misconfigurations.
fn complaints(seen: &Events) -> Vec<String> {
    let seen = seen.lock();
    let error = |event: &LimiterEvent| match event {
        LimiterEvent::StoreFailed { kind: StoreErrorKind::Misconfigured, error, .. } => Some(error.clone()),
        _ => None,
    };
    seen.iter().filter_map(error).collect()
}

#[tokio::test]
async fn connect_names_each_right_that_is_missing() {
    let server = Server::start();
    for right in each_right() {
        acl(&server, &without(right));
        println!("without {right}");
        // Each try has events of its own.
        let seen = RefCell::new(Events::default());
        let builder = || {
            drop(seen.take());
            RedisLimiter::builder().observer(seen.borrow().clone())
        };
        let refused = refusal(builder, &url(&server)).await;
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{right}: {refused}");
        let text = refused.to_string();
        let named = match right {
            "~ratelimit:*" => text.contains("key") && text.contains("~<prefix>:*"),
            "+eval" | "+evalsha" => text.contains(&format!("the '{}' command", &right[1..])),
            _ => text.contains(&format!("{right} is missing")),
        };
        assert!(named, "{right}: {text}");
        assert_eq!(complaints(&seen.borrow()), [text], "{right}");
    }
    assert_eq!(keys(&server), Vec::<Vec<u8>>::new(), "nothing is left of it");
}

#[tokio::test]
async fn missing_rights_are_all_named_at_once() {
    let server = Server::start();
    acl(&server, "+eval +evalsha ~ratelimit:*");
    let refused = refusal(RedisLimiter::builder, &url(&server)).await.to_string();
    for right in each_right().filter(|right| !["+eval", "+evalsha", "+rpush", "~ratelimit:*"].contains(right)) {
        assert!(refused.contains(right), "{right}: {refused}");
    }
}

/// Returns quotas whose scripts use different commands.
fn quotas() -> [Quota; 9] {
    let hour = Duration::from_secs(3600);
    [
        Quota::per_hour(100),
        Quota::per_hour(7),
        Quota::step_bucket(100, hour).unwrap(),
        Quota::fixed_window(100, hour).unwrap(),
        Quota::sliding_window(100, hour).unwrap(),
        Quota::sliding_window(100, hour).unwrap().buckets(60).unwrap(),
        Quota::sliding_log(100, hour).unwrap(),
        Quota::sliding_log(100, hour).unwrap().count_denied().unwrap(),
        Quota::sliding_log(100, Duration::from_millis(40)).unwrap(),
    ]
}

#[tokio::test]
async fn right_removed_later_is_an_error_and_an_event() {
    let server = Server::start();
    for right in each_right() {
        acl(&server, documented());
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
        let seen = Events::default();
        let mut builder = patient().observer(seen.clone());
        let clock = ManualClock::new();
        if right != "+time" {
            builder = builder.clock(clock.clone());
        }
        let limiter = connected(builder, &url(&server)).await;
        acl(&server, &without(right));
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).unwrap();
        let (mut refused, began) = (0, Instant::now());
        for (at, quota) in quotas().into_iter().enumerate() {
            let policy = policy(&format!("p{at}"), quota);
            for round in 0..5 {
                clock.advance(Duration::from_millis(15)); // so that an entry of the last one ends
                let mut outcomes = vec![];
                match take(&limiter, &policy, "a", 1).await {
                    Err(error) => outcomes.push(Err(error)),
                    Ok(mut decision) => {
                        if let Some(receipt) = decision.take_receipts().pop().flatten().filter(|_| round % 2 == 1) {
                            let refund = tower_ratelimit::limiter::Refund::new(policy.clone(), key("a"), receipt);
                            outcomes.push(limiter.refund(vec![refund]).await);
                        }
                    }
                }
                if round == 4 {
                    outcomes.push(limiter.reset(&policy, &key("a")).await);
                }
                for error in outcomes.into_iter().filter_map(Result::err) {
                    refused += 1;
                    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{right}, {quota}: {error}");
                    assert!(error.to_string().contains("ACL SETUSER"), "{right}, {quota}: {error}");
                }
                for key in keys(&server) {
                    let ttl: i64 = redis::cmd("PTTL").arg(&key).query(&mut server.connection()).unwrap();
                    assert!(ttl != -1, "without {right}, {quota}: {} stays for ever", key.escape_ascii());
                }
            }
        }
        assert!(refused > 0, "{right} is not needed");
        let most = 1 + usize::try_from(began.elapsed().as_secs() / 60).unwrap();
        assert!((1..=most).contains(&complaints(&seen).len()), "{right}: once a minute");
    }
}

#[tokio::test]
async fn documented_rights_are_enough() {
    let server = Server::start();
    for rights in [documented().to_owned(), advised(&server).await] {
        acl(&server, &rights);
        let limiter = connected(patient(), &url(&server)).await;
        for (at, quota) in quotas().into_iter().enumerate() {
            for name in ["same", &format!("p{at}")] {
                let policy = policy(name, quota);
                let mut taken =
                    take(&limiter, &policy, "a", 1).await.unwrap_or_else(|error| panic!("{rights}: {error}"));
                let receipt = taken.take_receipts().pop().flatten().unwrap();
                let refund = tower_ratelimit::limiter::Refund::new(policy.clone(), key("a"), receipt);
                limiter.refund(vec![refund]).await.unwrap();
                take(&limiter, &policy, "a", 1).await.unwrap();
            }
        }
        limiter.reset(&policy("same", Quota::per_hour(1)), &key("a")).await.unwrap();
    }
}

#[tokio::test]
async fn slots_that_get_a_server_later_are_found_soon() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    let tell = |words: &[&str]| redis::cmd("CLUSTER").arg(words).exec(&mut server.connection()).unwrap();
    redis::cmd("CONFIG").arg(&["SET", "cluster-require-full-coverage", "no"]).exec(&mut server.connection()).unwrap();
    // Redis 6.2 has no ranges.
    let add = |slots: std::ops::Range<u16>| {
        let slots: Vec<String> = slots.map(|slot| slot.to_string()).collect();
        tell(&std::iter::once("ADDSLOTS").chain(slots.iter().map(String::as_str)).collect::<Vec<_>>());
    };
    add(0..100);
    let limiter = RedisLimiter::connect(&format!("redis-cluster://127.0.0.1:{}", server.port())).await.unwrap();
    let policy = policy("p", Quota::per_hour(100));
    assert!(take(&limiter, &policy, "a", 1).await.is_err());
    sleep(Duration::from_millis(1_500)).await;
    add(100..16_384);
    eventually("the slots are not found", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
}

#[tokio::test]
async fn stopped_server_is_detected_though_callers_leave_early() {
    let server = Server::start();
    let seen = Events::default();
    let builder = RedisLimiter::builder().observer(seen.clone()).deadline(Duration::from_millis(100));
    let limiter = connected(builder, &server.url()).await;
    let policy = policy("p", Quota::per_hour(100));
    eventually("no check succeeds", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    server.pause();
    let began = Instant::now();
    let waits_in_vain = async || timeout(Duration::from_millis(20), take(&limiter, &policy, "a", 1)).await.is_err();
    while waits_in_vain().await {
        assert!(began.elapsed() < LONG, "it is not detected: {:?}", seen.lock());
    }
    let mut abandoned = 0;
    for _ in 0..50 {
        abandoned += u32::from(waits_in_vain().await);
    }
    server.resume();
    assert!(abandoned < 25, "{abandoned} of 50 waited in vain: {:?}", seen.lock());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_sent_twice_has_one_deadline() {
    let server = Server::start();
    let deadline = Duration::from_secs(2);
    let limiter = connected(RedisLimiter::builder().deadline(deadline), &server.url()).await;
    let policy = policy("p", Quota::per_hour(100));
    let began = Instant::now();
    loop {
        eventually("no check succeeds", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
        let [mut first, mut second] = [server.connection(), server.connection()];
        // So that the check is sent with the script's hash, and again with its text.
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut first).unwrap();
        // The second pause begins right after the first one, when the check has been sent once. A second deadline would
        // end after it, and the check would be answered.
        let paused = Instant::now();
        redis::cmd("CLIENT").arg(&["PAUSE", "1500"]).exec(&mut first).unwrap();
        let sent = Instant::now();
        let check = tokio::spawn({
            let (limiter, policy) = (limiter.clone(), policy.clone());
            async move { take(&limiter, &policy, "a", 1).await.map(drop) }
        });
        sleep(Duration::from_millis(30)).await;
        let pause = std::thread::spawn(move || {
            let before = paused.elapsed();
            redis::cmd("CLIENT").arg(&["PAUSE", "1500"]).exec(&mut second).unwrap();
            before
        });
        let answer = check.await.unwrap();
        let took = sent.elapsed();
        // A busy machine may send the second pause after the first one has ended, or stop for long.
        if pause.join().unwrap() > Duration::from_secs(1) || took >= 2 * deadline {
            assert!(began.elapsed() < LONG, "{answer:?} after {took:?}");
            continue;
        }
        // A busy process may say that it had no time to read an answer.
        let kinds = [StoreErrorKind::Timeout, StoreErrorKind::Overloaded];
        let answer = answer.map_err(|error| error.kind());
        assert!(answer.is_err_and(|kind| kinds.contains(&kind)), "{answer:?} after {took:?}");
        return;
    }
}
