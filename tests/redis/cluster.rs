//! Limits in a real cluster of three masters and their replicas.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::{
    Policy, Quota, RedisLimiter,
    clock::ManualClock,
    limiter::{Atomicity, Charge, Limiter, Refund, StoreErrorKind},
    quota::Anchor,
};

use super::{LONG, MINUTE, connected, eventually, key, patient, policy, refusal};
use crate::support::redis_cluster::Cluster;

/// Long enough that nothing drains while a test runs. No window ends meanwhile either, because it begins with the test.
fn lasting(limit: u64) -> Quota {
    Quota::fixed_window(limit, 30 * 24 * 60 * MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

async fn limiter(cluster: &Cluster, prefix: &str, groups: Option<u16>) -> RedisLimiter {
    let builder = groups.into_iter().fold(patient().prefix(prefix), |builder, groups| builder.slot_groups(groups));
    connected(builder, &cluster.url()).await
}

async fn remaining(limiter: &RedisLimiter, policy: &Policy, name: &str) -> u64 {
    let decision = limiter.peek(&[Charge::new(policy, &key(name)).cost(0)]).await.unwrap();
    decision.charges()[0].remaining()
}

/// All parts share one cluster, since it takes seconds to start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_keeps_a_limit() {
    let mut cluster = tokio::task::block_in_place(Cluster::start);
    callers_are_spread(&cluster).await;
    the_url_of_a_lone_server_is_refused(&cluster).await;
    rights_of_the_guide_are_enough(&cluster).await;
    refused_set_refunds_what_it_took_elsewhere(&cluster).await;
    sets_of_many_tasks_add_up(&cluster).await;
    blocks_and_meters_are_with_their_caller(&cluster).await;
    checks_of_queues_that_are_dropped_free_all_slots(&cluster).await;
    a_master_that_dies_admits_no_more_than_its_limits_again(&mut cluster).await;
}

/// Each master has some keys, and all policies of one key are in one slot.
async fn callers_are_spread(cluster: &Cluster) {
    for groups in [None, Some(24)] {
        let prefix = format!("spread-{}", groups.unwrap_or(0));
        let limiter = limiter(cluster, &prefix, groups).await;
        let (one, two) = (policy("one", lasting(10)), policy("two", lasting(10)));
        for caller in 0..60 {
            let key = key(&format!("caller {caller}"));
            let decision = limiter.take(&[Charge::new(&one, &key), Charge::new(&two, &key)]).await.unwrap();
            assert!(decision.is_allowed());
        }
        let mut slots = BTreeSet::new();
        for master in 0..Cluster::MASTERS {
            let mut connection = cluster.servers[master].connection();
            let pattern = format!("{prefix}:*");
            let stored: Vec<String> = redis::cmd("KEYS").arg(pattern).query(&mut connection).unwrap();
            assert!(stored.len() >= 20, "master {master} has {} of 120 keys", stored.len());
            for key in &stored {
                slots.insert(redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).query::<u16>(&mut connection).unwrap());
                let left_ms: i64 = redis::cmd("PTTL").arg(key).query(&mut connection).unwrap();
                assert!(left_ms > 0, "{key} has no end");
            }
        }
        assert!(if groups.is_some() { slots.len() <= 24 } else { slots.len() > 50 }, "{} slots", slots.len());
    }
}

/// Unless it is the master of the slot in question.
async fn the_url_of_a_lone_server_is_refused(cluster: &Cluster) {
    // A server that is slow to answer is not refused, so it is asked again.
    eventually("only one of the masters has the slot", async || {
        let mut refused = 0;
        for server in &cluster.servers[..Cluster::MASTERS] {
            match RedisLimiter::connect(&server.url()).await {
                Err(error) if error.to_string().contains("redis-cluster://") => {
                    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
                    refused += 1;
                }
                answer => drop(answer.unwrap()),
            }
        }
        assert!(refused < Cluster::MASTERS);
        refused == Cluster::MASTERS - 1
    })
    .await;
}

async fn rights_of_the_guide_are_enough(cluster: &Cluster) {
    let rights = include_str!("../../src/guide/redis_and_failures.md")
        .split_once("ACL SETUSER ratelimit on >password ")
        .unwrap()
        .1;
    let rights = rights.lines().next().unwrap();
    let give = |more: &str| {
        for server in &cluster.servers {
            let mut command = redis::cmd("ACL");
            command.arg(&["SETUSER", "app", "reset", "on", ">pass"]);
            rights.split_whitespace().chain(more.split_whitespace()).for_each(|right| {
                command.arg(right);
            });
            command.exec(&mut server.connection()).unwrap();
        }
    };
    let url = cluster.url().replace("://", "://app:pass@");
    for (given, missing) in [("+asking", "the 'cluster"), ("+cluster|slots", "the 'asking'")] {
        give(given);
        let refused = refusal(RedisLimiter::builder, &url).await;
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused}");
        assert!(refused.to_string().contains(missing), "{refused}");
    }
    give("+cluster|slots +asking");
    let limiter = connected(patient(), &url).await;
    let policy = policy("rights", lasting(10));
    for caller in 0..30 {
        let key = key(&format!("caller {caller}"));
        assert!(limiter.take(&[Charge::new(&policy, &key)]).await.unwrap().is_allowed());
    }
}

async fn refused_set_refunds_what_it_took_elsewhere(cluster: &Cluster) {
    let limiter = limiter(cluster, "sets", None).await;
    assert_eq!(limiter.hooks().atomicity(), Atomicity::Compensated);
    let (everybody, caller) = (policy("everybody", lasting(1_000)), policy("caller", lasting(1)));
    for (number, name) in (1..).zip(["a", "b", "c", "d", "e", "f"]) {
        let (all, one) = (key("all"), key(name));
        let set = [Charge::new(&everybody, &all).cost(7), Charge::new(&caller, &one)];
        assert!(limiter.take(&set).await.unwrap().is_allowed());
        let refused = limiter.take(&set).await.unwrap();
        assert!(!refused.is_allowed() && refused.charges()[0].is_allowed() && !refused.charges()[1].is_allowed());
        assert_eq!(refused.charges()[0].remaining(), 1_000 - number * 7, "as it is when that is back");
        let left = async || remaining(&limiter, &everybody, "all").await;
        eventually("it is never back", async || left().await == 1_000 - number * 7).await;
    }
}

/// Once all is quiet again, the charges of each slot are what passed.
async fn sets_of_many_tasks_add_up(cluster: &Cluster) {
    let limiters = [limiter(cluster, "many", None).await, limiter(cluster, "many", None).await];
    let (everybody, caller) = (policy("everybody", lasting(700)), policy("caller", lasting(20)));
    let passed = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let (limiter, passed) = (limiters[task % 2].clone(), Arc::clone(&passed));
            let (everybody, caller) = (everybody.clone(), caller.clone());
            tokio::spawn(async move {
                let (all, one) = (key("all"), key(&format!("caller {}", task / 2)));
                for _ in 0..40 {
                    let set = [Charge::new(&everybody, &all), Charge::new(&caller, &one)];
                    let is_allowed = limiter.take(&set).await.expect("every server is up").is_allowed();
                    passed.fetch_add(u64::from(is_allowed), Ordering::Relaxed);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    eventually("what was refused is back", async || limiters.iter().all(|limiter| limiter.waiting() == 0)).await;
    let passed = passed.load(Ordering::Relaxed);
    assert!(passed <= 32 * 20, "{passed} passed");
    let mut of_callers = 0;
    for caller_at in 0..32 {
        of_callers += 20 - remaining(&limiters[0], &caller, &format!("caller {caller_at}")).await;
    }
    let of_all = 700 - remaining(&limiters[0], &everybody, "all").await;
    assert_eq!((of_callers, of_all), (passed, passed));
}

/// They are written in the step that refuses, as on a single server.
async fn blocks_and_meters_are_with_their_caller(cluster: &Cluster) {
    let clock = ManualClock::new();
    let connect = |prefix: &'static str| {
        let builder = patient().prefix(prefix).clock(clock.clone());
        async { connected(builder, &cluster.url()).await }
    };
    let limiters = [connect("companions").await, connect("companions").await];
    super::companions::refusals_close_a_key(limiters.clone(), &clock).await;
    super::companions::excess_is_metered(limiters, &clock).await;
}

/// Slots that are held, and checks that are dropped at any moment, of queues on every master. Each check also charges a
/// key in another slot.
async fn checks_of_queues_that_are_dropped_free_all_slots(cluster: &Cluster) {
    const CALLERS: usize = 12;
    let limiter = limiter(cluster, "queues", None).await;
    let queue = Quota::leaky_queue(7, 24 * 60 * MINUTE).and_then(|quota| quota.queue(99)).unwrap();
    let (queue, everybody) = (policy("queue", queue), policy("everybody", lasting(100_000)));
    let name = |caller: usize| format!("caller {}", caller % CALLERS);
    for round in 0..10 {
        let mut held = Vec::new();
        for caller in 0..3 * CALLERS {
            let key = key(&name(caller));
            let mut taken = limiter.take(&[Charge::new(&queue, &key)]).await.unwrap();
            let receipt = taken.charge_mut(0).and_then(|charge| charge.take_receipt()).expect("there is room");
            held.push(Refund::new(queue.clone(), key, receipt));
        }
        let checks: Vec<_> = (0..10 * CALLERS)
            .map(|caller| {
                let (limiter, queue, everybody) = (limiter.clone(), queue.clone(), everybody.clone());
                let (one, all) = (key(&name(caller)), key("all"));
                tokio::spawn(
                    async move { limiter.take(&[Charge::new(&everybody, &all), Charge::new(&queue, &one)]).await },
                )
            })
            .collect();
        for _ in 0..5 * round {
            tokio::task::yield_now().await;
        }
        let refunds = limiter.refund(held);
        checks.iter().for_each(tokio::task::JoinHandle::abort);
        let mut late = Vec::new();
        for (caller, check) in checks.into_iter().enumerate() {
            // A check that was answered before it was aborted is its caller's, who refunds it.
            let Ok(Ok(mut decision)) = check.await else { continue };
            let owners = [(&everybody, key("all")), (&queue, key(&name(caller)))];
            let receipts = decision.take_receipts().into_iter().zip(owners);
            late.extend(
                receipts.filter_map(|(receipt, (policy, key))| Some(Refund::new(policy.clone(), key, receipt?))),
            );
        }
        refunds.await.unwrap();
        limiter.refund(late).await.unwrap();
        eventually("all is refunded", async || limiter.waiting() == 0).await;
        for caller in 0..CALLERS {
            assert_eq!(remaining(&limiter, &queue, &name(caller)).await, 100, "caller {caller} in round {round}");
        }
        assert_eq!(remaining(&limiter, &everybody, "all").await, 100_000, "in round {round}");
    }
}

async fn a_master_that_dies_admits_no_more_than_its_limits_again(cluster: &mut Cluster) {
    let builder = RedisLimiter::builder().prefix("dies").max_denials(0).deadline(Duration::from_millis(100));
    let limiter = connected(builder, &cluster.url()).await;
    let caller = policy("caller", lasting(50));
    let is_dead = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..30)
        .map(|task| {
            let (limiter, caller, is_dead) = (limiter.clone(), caller.clone(), Arc::clone(&is_dead));
            tokio::spawn(async move {
                let (key, start) = (key(&format!("caller {task}")), Instant::now());
                let (mut passed, mut times) = (0, Vec::new());
                loop {
                    let began = Instant::now();
                    let answer = limiter.take(&[Charge::new(&caller, &key)]).await;
                    times.push(began.elapsed());
                    match answer.map(|it| it.is_allowed()) {
                        Ok(false) if is_dead.load(Ordering::Relaxed) => return (passed, times),
                        Ok(is_allowed) => passed += u64::from(is_allowed),
                        // A check that failed may have been charged.
                        Err(error) => assert!(start.elapsed() < 2 * LONG, "caller {task} is not served: {error}"),
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    tokio::task::block_in_place(|| {
        cluster.replace_soon();
        cluster.servers[0].kill();
    });
    is_dead.store(true, Ordering::Relaxed);
    let mut all = Vec::new();
    for (caller, task) in tasks.into_iter().enumerate() {
        let (passed, times) = task.await.unwrap();
        // Charges that had not reached the replica may pass again: at most as many as passed
        // before.
        assert!(passed <= 2 * 50, "{passed} of caller {caller}");
        all.extend(times);
    }
    // A machine that stops for a while makes a few checks of each caller slow.
    all.sort_unstable();
    let (most, slowest) = (all[all.len() * 9 / 10], all[all.len() - 1]);
    assert!(most < Duration::from_secs(1) && slowest < LONG, "nine of ten within {most:?}, all within {slowest:?}");
}
