//! Eight processes on one key of one server: what they admit is, to the unit, what the oracle
//! admits at the server's times.

mod places;
mod refusals;

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use crate::algorithm::oracle::Oracle;
use crate::limiter::{Charge, Limiter};

use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::limiter::RedisLimiter;
use crate::limiter::redis::redis_server::Server;
use crate::limiter::redis::tests::connected;
use crate::limiter::redis::wire::{RedisAnswer, WireRequest};
use crate::limiter::remote::HELD;
use crate::quota::{Anchor, Quota};
use crate::{key::Key, policy::Policy};

const PROCESSES: usize = 8;
const TASKS: u64 = 16;
const CHECKS: u64 = 60;

/// A slow machine takes many seconds for all checks. The quotas are exceeded even if it takes a hundred.
const SPAN: Duration = Duration::from_secs(1);

/// A deadline that also holds while the processes of another test keep every processor busy.
const LONG: Duration = Duration::from_secs(30);

/// The variables with the server and the quotas, one in a line.
const URL: &str = "RATELIMIT_TEST_URL";
const QUOTA: &str = "RATELIMIT_TEST_QUOTA";
/// Units that it may lease.
const LEASES: &str = "RATELIMIT_TEST_LEASES";

/// The calls of this process.
static LOG: Mutex<Vec<LoggedCall>> = Mutex::new(Vec::new());

/// The server's instant, and the costs and answers in the order of the call.
type LoggedCall = (u64, Vec<(u64, bool)>);

/// Runs as each of the processes. It does nothing in the parent.
#[test]
fn one_of_the_processes() {
    let (Ok(url), Ok(quota)) = (std::env::var(URL), std::env::var(QUOTA)) else { return };
    let quotas: Vec<Quota> = quota.lines().map(|quota| quota.parse().unwrap()).collect();
    let policies = match quotas.as_slice() {
        [quota] => vec![Policy::new("shared", *quota).unwrap()],
        _ => Policy::each("shared", quotas).unwrap(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let admitted: u64 = runtime.block_on(async {
        let leases = std::env::var(LEASES).map_or(0, |units| units.parse().unwrap());
        let builder = RedisLimiter::builder().deadline(LONG).max_denials(0).lease_units(leases);
        let limiter = connected(builder, &url).await;
        let tasks = (0..TASKS).map(|task| {
            let (limiter, policies) = (limiter.clone(), policies.clone());
            tokio::spawn(async move {
                let key = Key::of("one").unwrap();
                let mut admitted = 0;
                for check in 0..CHECKS {
                    let cost = [1, 1, 2, 1, 3, 1][((task + check) % 6) as usize];
                    let set: Vec<_> = policies.iter().map(|policy| Charge::new(policy, &key).cost(cost)).collect();
                    let decision = limiter.take(&set).await.unwrap();
                    admitted += if decision.is_allowed() { cost } else { 0 };
                    if check % 7 == task % 7 {
                        tokio::time::sleep(Duration::from_micros(300 * (task % 5))).await;
                    }
                }
                admitted
            })
        });
        let mut admitted = 0;
        for task in tasks.collect::<Vec<_>>() {
            admitted += task.await.unwrap();
        }
        // Unused units of leases are refunded. A lease that came late would show within the time that it is held.
        let (mut free, held) = (Instant::now(), || limiter.0.leased());
        while leases > 0 && free.elapsed() < 3 * HELD {
            if held() > 0 || limiter.waiting() > 0 {
                free = Instant::now();
            }
            tokio::time::sleep(HELD / 10).await;
        }
        admitted
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "admitted {admitted}").unwrap();
    for (now, checks) in &*LOG.lock().unwrap() {
        let checks: Vec<String> = checks.iter().map(|(cost, allowed)| format!("{cost}:{allowed}")).collect();
        writeln!(out, "call {now} {}", checks.join(" ")).unwrap();
    }
}

/// Returns the output of the eight processes.
fn run(server: &Server, quotas: &[Quota], leases: u64) -> Vec<String> {
    let name = "limiter::redis::tests::processes::one_of_the_processes";
    let quotas: Vec<String> = quotas.iter().map(ToString::to_string).collect();
    start(name, &[(URL, server.url()), (QUOTA, quotas.join("\n")), (LEASES, leases.to_string())])
}

/// Runs this test in eight processes with these variables, and returns their output.
fn start(name: &str, variables: &[(&str, String)]) -> Vec<String> {
    let processes: Vec<_> = (0..PROCESSES)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args([name, "--exact", "--nocapture", "--test-threads=1"])
                .envs(variables.iter().map(|(name, value)| (*name, value)))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let printed = processes.into_iter().map(|process| {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    });
    printed.collect()
}

/// All of several quotas must hold, and they are charged together or not at all.
fn hammer(server: &Server, quotas: &[Quota]) {
    let mut calls: Vec<LoggedCall> = Vec::new();
    for printed in run(server, quotas, 0) {
        for line in printed.lines() {
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

    let mut oracles: Vec<Oracle> = quotas.iter().map(|quota| Oracle::new(quota.spec())).collect();
    let (mut admitted, mut denied) = (0, 0);
    for (now, checks) in &calls {
        for (cost, allowed) in checks {
            let mut taken = oracles.clone();
            // Each quota decides, also if another one has refused.
            let refusals = taken.iter_mut().map(|oracle| u32::from(!oracle.decide(*now, *cost, false).0.allowed));
            let expected = refusals.sum::<u32>() == 0;
            assert_eq!(*allowed, expected, "cost {cost} at {now} after {admitted} admitted, of {quotas:?}");
            if expected {
                oracles = taken;
            }
            *(if *allowed { &mut admitted } else { &mut denied }) += cost;
        }
    }
    assert!(admitted > 0 && denied > 0, "{admitted} admitted, {denied} denied, of {quotas:?}");
}

#[test]
fn eight_processes_admit_what_the_oracle_admits() {
    let server = Server::start();
    for quota in [
        Quota::token_bucket(50, SPAN).unwrap(),
        Quota::token_bucket(33, Duration::from_micros(700_001)).unwrap().burst(20).unwrap(),
        Quota::gcra(70, SPAN).unwrap(),
        Quota::leaky_bucket(30, SPAN).unwrap(),
        Quota::leaky_queue(30, SPAN).unwrap().queue(20).unwrap(),
        Quota::step_bucket(10, SPAN / 5).unwrap(),
        Quota::fixed_window(40, SPAN).unwrap(),
        Quota::sliding_window(40, SPAN).unwrap(),
        Quota::sliding_window(40, SPAN).unwrap().buckets(10).unwrap(),
        Quota::sliding_log(40, SPAN).unwrap(),
    ] {
        hammer(&server, &[quota]);
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}

#[test]
fn eight_processes_charge_several_quotas_together_or_not_at_all() {
    let server = Server::start();
    let quotas = [
        Quota::gcra(300, SPAN).unwrap().burst(30).unwrap(),
        Quota::fixed_window(50, SPAN).unwrap(),
        Quota::step_bucket(30, SPAN / 2).unwrap(),
        Quota::sliding_window(150, 3 * SPAN).unwrap(),
    ];
    hammer(&server, &quotas);
}

/// Remembers what a call answered, in a process that is one of the eight.
pub(in crate::limiter::redis) fn log(
    reply: &[u8],
    requests: &[&WireRequest],
    answers: &[Result<RedisAnswer, RedisError>],
) {
    let is_look = requests.iter().all(|request| request.cost() == 0);
    if is_look || std::env::var(URL).is_err() {
        return;
    }
    let now = f64::from_le_bytes(reply[8..16].try_into().unwrap()) as u64;
    let checks = requests.iter().zip(answers).filter_map(|(request, answer)| match answer {
        Ok(RedisAnswer::Decided(decision)) => Some((request.cost(), decision.is_allowed())),
        _ => None, // a refund
    });
    LOG.lock().unwrap().push((now, checks.collect()));
}

#[test]
fn eight_processes_with_leases_refund_what_they_do_not_use() {
    let server = Server::start();
    let month = Duration::from_secs(30 * 86_400);
    let most = PROCESSES as u64 * TASKS * CHECKS * 9 / 6;
    for limit in [most / 2, 2 * most] {
        let quota = Quota::fixed_window(limit, month).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap();
        let printed = run(&server, &[quota], 200);
        let admitted = printed.iter().flat_map(|text| text.lines()).filter_map(|line| line.split_once("admitted "));
        let admitted: u64 = admitted.map(|(_, units)| units.parse::<u64>().unwrap()).sum();
        assert!(admitted <= limit.min(most), "{admitted} of {limit}");
        let policy = Policy::new("shared", quota).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let left = runtime.block_on(async {
            let limiter = connected(RedisLimiter::builder().deadline(LONG), &server.url()).await;
            let key = Key::of("one").unwrap();
            let peeked = limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await.unwrap();
            peeked.charges()[0].remaining()
        });
        assert_eq!(limit - left, admitted, "all that was charged was used");
        redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    }
}
