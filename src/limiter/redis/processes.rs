//! Eight processes on one key of one server: what they admit is, to the unit, what the oracle admits at the times that the
//! server told them.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use crate::algorithm::naive::Oracle;
use crate::limiter::{Charge, Limiter};

use super::RedisLimiter;
use super::redis_server::Server;
use super::value::Value;
use super::wire::{Answer, Ask};
use crate::{Key, Policy, Quota};

const PROCESSES: usize = 8;
const TASKS: u64 = 16;
const CHECKS: u64 = 60;

/// Where a process is told the server and the quota.
const URL: &str = "RATELIMIT_TEST_URL";
const QUOTA: &str = "RATELIMIT_TEST_QUOTA";

/// The calls of this process.
static LOG: Mutex<Vec<LoggedCall>> = Mutex::new(Vec::new());

/// The server's instant, and the costs and answers in the order of the call.
type LoggedCall = (u64, Vec<(u64, bool)>);

/// What each process does; nothing, if this is the parent.
#[test]
fn one_of_the_processes() {
    let (Ok(url), Ok(quota)) = (std::env::var(URL), std::env::var(QUOTA)) else { return };
    let policy = Policy::new("shared", quota.parse::<Quota>().unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let builder = RedisLimiter::builder().deadline(Duration::from_secs(30)).denials(0);
        let limiter = builder.connect(&url).await.unwrap();
        let tasks = (0..TASKS).map(|task| {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            tokio::spawn(async move {
                let key = Key::of("one").unwrap();
                for check in 0..CHECKS {
                    let cost = [1, 1, 2, 1, 3, 1][((task + check) % 6) as usize];
                    limiter.take(&[Charge::new(&policy, &key).cost(cost)]).wait().await.unwrap();
                    if check % 7 == task % 7 {
                        tokio::time::sleep(Duration::from_micros(300 * (task % 5))).await;
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
    let mut out = std::io::stdout().lock();
    for (now, checks) in &*LOG.lock().unwrap() {
        let checks: Vec<String> = checks.iter().map(|(cost, allowed)| format!("{cost}:{allowed}")).collect();
        writeln!(out, "call {now} {}", checks.join(" ")).unwrap();
    }
}

fn hammer(server: &Server, quota: Quota) {
    let name = "limiter::redis::processes::one_of_the_processes";
    let processes: Vec<_> = (0..PROCESSES)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args([name, "--exact", "--nocapture", "--test-threads=1"])
                .env(URL, server.url())
                .env(QUOTA, quota.to_string())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut calls: Vec<LoggedCall> = Vec::new();
    for process in processes {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success());
        for line in String::from_utf8(output.stdout).unwrap().lines() {
            let Some(call) = line.split_once("call ").map(|(_, call)| call) else { continue };
            let mut words = call.split(' ');
            let now = words.next().unwrap().parse().unwrap();
            let check = |word: &str| {
                let (cost, allowed) = word.split_once(':').unwrap();
                (cost.parse().unwrap(), allowed == "true")
            };
            calls.push((now, words.map(check).collect()));
        }
    }
    calls.sort_by_key(|call| call.0);
    assert!(calls.windows(2).all(|pair| pair[0].0 < pair[1].0), "no two calls are of one instant");
    let checks: usize = calls.iter().map(|call| call.1.len()).sum();
    assert_eq!(checks as u64, PROCESSES as u64 * TASKS * CHECKS);
    assert!(calls.len() < checks, "some went together");

    let mut oracle = Oracle::new(quota.spec());
    let (mut admitted, mut denied) = (0, 0);
    for (now, checks) in &calls {
        for (cost, allowed) in checks {
            let (expected, _) = oracle.decide(*now, *cost, false);
            assert_eq!(*allowed, expected.allowed, "cost {cost} at {now} after {admitted} admitted, of {quota}");
            *(if *allowed { &mut admitted } else { &mut denied }) += cost;
        }
    }
    assert!(admitted > 0 && denied > 0, "{admitted} admitted, {denied} denied, of {quota}");
}

#[test]
fn eight_processes_admit_what_the_oracle_admits_at_the_servers_times() {
    let server = Server::start();
    let span = Duration::from_millis(100);
    for quota in [
        Quota::token_bucket(500, span).unwrap(),
        Quota::token_bucket(333, Duration::from_micros(70_001)).unwrap().burst(50).unwrap(),
        Quota::gcra(2_000, span).unwrap(),
        Quota::leaky_bucket(300, span).unwrap(),
        Quota::leaky_queue(300, span).unwrap().queue(20).unwrap(),
        Quota::step_bucket(100, span / 10).unwrap(),
        Quota::fixed_window(400, span).unwrap(),
        Quota::sliding_window(400, span).unwrap(),
        Quota::sliding_window(400, span).unwrap().buckets(10).unwrap(),
        Quota::sliding_log(400, span).unwrap(),
    ] {
        hammer(&server, quota);
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}

/// Remembers what a call answered, in a process that is one of the eight.
pub(super) fn log(reply: &Value, asks: &[&Ask], answers: &[Answer]) {
    let is_look = asks.iter().all(|ask| ask.cost() == 0);
    if is_look || std::env::var(URL).is_err() {
        return;
    }
    let Value::Bytes(bytes) = reply else { panic!("a reply is one string") };
    let now = f64::from_le_bytes(bytes[..8].try_into().unwrap()) as u64;
    let checks = asks.iter().zip(answers).map(|(ask, answer)| match answer {
        Answer::Decided(decision) => (ask.cost(), decision.is_allowed()),
        other => panic!("{other:?}"),
    });
    LOG.lock().unwrap().push((now, checks.collect()));
}
