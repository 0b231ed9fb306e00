//! One limit for several processes: charges, refunds, leases, denials and changed quotas.

use std::task::{Context, Waker};
use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::{
    Policy, Quota, RedisLimiter, Rule,
    clock::ManualClock,
    limiter::{Charge, Effect, Limiter, Refund, StoreErrorKind},
    quota::Anchor,
    rules::Rules,
};

use super::{MINUTE, calls, connect, connected, eventually, key, keys, passes, patient, policy, take};
use crate::support::redis_server::Server;

/// Long enough that nothing drains while a test runs. No window ends meanwhile either, because it begins with the test.
fn lasting(limit: u64) -> Quota {
    Quota::fixed_window(limit, 30 * 24 * 60 * MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

/// Runs `tasks` tasks on each limiter, each taking one unit at a time. Returns how many passed.
async fn storm(limiters: &[RedisLimiter], tasks: usize, each: usize, quota: Quota) -> u64 {
    let policy = policy("storm", quota);
    let mut running = Vec::new();
    for limiter in limiters {
        for _ in 0..tasks {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            running.push(tokio::spawn(async move {
                let mut passed = 0;
                for _ in 0..each {
                    passed += u64::from(passes(&limiter, &policy, "all").await);
                }
                passed
            }));
        }
    }
    let mut passed = 0;
    for task in running {
        passed += task.await.unwrap();
    }
    passed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_the_limit_passes_whoever_asks_and_checks_go_together() {
    let server = Server::start();
    let limiters = [connect(&server).await, connect(&server).await, connect(&server).await, connect(&server).await];
    let began = Instant::now();
    assert_eq!(storm(&limiters, 50, 50, lasting(7_000)).await, 7_000);
    // Each task makes 50 checks one after the other.
    let (calls, check) = (calls(&server), began.elapsed() / 50);
    // Each by itself they would be 7,000. Calls that take more than 2 ms, as on a busy machine, may be more at a time,
    // and have fewer checks each. With calls of 6 ms they would be 28 at a time for 50 tasks.
    let is_few = calls < 6_000 || check > Duration::from_millis(5);
    assert!(is_few, "{calls} calls for 10,000 checks of {check:?}, of which 3,000 may be denied without one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_never_exceed_the_total_and_save_calls() {
    let server = Server::start();
    let mut limiters = Vec::new();
    for _ in 0..3 {
        limiters.push(connected(patient().lease_units(500), &server.url()).await);
    }
    // Two of a million units cannot be leased. Units still held at the end are returned.
    let began = Instant::now();
    let passed = storm(&limiters, 10, 2_000, lasting(1_000_000)).await;
    assert_eq!(passed, 60_000, "there was room for all");
    let (few, took_ms) = (calls(&server), u64::try_from(began.elapsed().as_millis()).unwrap());
    // A machine that is too slow for a check in a millisecond has no key that is worth a lease.
    assert!(few < 60_000 / 10 + took_ms, "{few} calls for 60,000 checks in {took_ms} ms");
    let (policy, all) = (policy("storm", lasting(1_000_000)), key("all"));
    eventually("what was not used is back", async || {
        let peeked = limiters[0].peek(&[Charge::new(&policy, &all)]).await.unwrap();
        peeked.charges()[0].remaining() == 1_000_000 - 60_000 - 1
    })
    .await;

    let passed = storm(&limiters, 10, 2_000, lasting(5_000)).await;
    assert!(passed <= 5_000, "{passed} of 5,000");
}

#[tokio::test]
async fn denied_key_costs_no_calls_until_its_wait_is_over() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let (policy, other) = (policy("attacked", lasting(1)), policy("other", lasting(100)));
    assert!(passes(&limiter, &policy, "a").await && !passes(&limiter, &policy, "a").await);
    let (before, began) = (calls(&server), Instant::now());
    let (a, b) = (key("a"), key("b"));
    for _ in 0..1_000 {
        let set = [Charge::new(&other, &b), Charge::new(&policy, &a)];
        assert!(!limiter.take(&set).await.unwrap().is_allowed());
    }
    let (after, took) = (calls(&server), began.elapsed());
    assert!(after - before <= 2 + took.as_secs(), "{} calls within {took:?}: one a second", after - before);
    assert!(passes(&limiter, &policy, "b").await, "nobody else is denied");
}

#[tokio::test]
async fn refunded_or_reset_units_pass_again_at_once() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let (policy, a) = (policy("back", lasting(2)), key("a"));
    let mut taken = take(&limiter, &policy, "a", 2).await.unwrap();
    assert!(!passes(&limiter, &policy, "a").await);
    let receipt = taken.take_receipts().pop().flatten().unwrap();
    limiter.refund(vec![Refund::new(policy.clone(), a.clone(), receipt)]).await.unwrap();
    assert!(passes(&limiter, &policy, "a").await && passes(&limiter, &policy, "a").await);
    assert!(!passes(&limiter, &policy, "a").await);
    limiter.reset(&policy, &a).await.unwrap();
    assert!(passes(&limiter, &policy, "a").await);
}

#[tokio::test]
async fn reset_ends_a_remembered_denial_although_its_caller_goes() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let policy = policy("back", lasting(1));
    assert!(passes(&limiter, &policy, "a").await);
    assert!(!passes(&limiter, &policy, "a").await);
    let mut reset = Box::pin(limiter.reset(&policy, &key("a")).into_future());
    assert!(reset.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(reset);
    assert!(passes(&limiter, &policy, "a").await);
}

#[tokio::test]
async fn changed_quota_of_several_keeps_its_count() {
    let (server, a) = (Server::start(), key("a"));
    let limiter = connected(patient().max_denials(0), &server.url()).await;
    let rule = |limit| Rule::all_of("client", [lasting(limit), Quota::per_day(900)]).unwrap();
    let (old, new) = (rule(10), rule(6));
    let mut passed = 0;
    for _ in 0..6 {
        for rule in [&old, &new] {
            let all: Vec<_> = rule.policies().iter().map(|policy| Charge::new(policy, &a)).collect();
            passed += u64::from(limiter.take(&all).await.unwrap().is_allowed());
        }
    }
    assert!((6..=10).contains(&passed), "{passed} of 12 passed, 6 in the new quota and 10 in the old");
    assert_eq!(keys(&server).len(), 2, "both versions of the rule have the same keys");
}

#[tokio::test]
async fn quotas_of_one_rule_each_keep_their_own_count() {
    let (server, clock) = (Server::start(), ManualClock::new());
    let quotas = [lasting(5), Quota::sliding_window(7, 40 * 24 * 60 * MINUTE).unwrap(), Quota::per_day(9)];
    let rule = Rule::all_of("client", quotas).unwrap();
    let [first, second, third] = rule.policies() else { panic!("three quotas") };
    let a = key("a");
    let all = [first, second, third].map(|policy| Charge::new(policy, &a));
    for leases in [0, 100] {
        let builder = patient().lease_units(leases).max_denials(0).clock(clock.clone());
        let limiter = connected(builder, &server.url()).await;
        let mut taken = limiter.take(&all).await.unwrap();
        assert!(taken.is_allowed());
        assert_eq!(keys(&server).len(), 3);
        // One quota at a time, and in another order.
        assert!(limiter.take(&[all[2].cost(2), all[0]]).await.unwrap().is_allowed());
        let left = async || {
            let peeked = limiter.peek(&[all[1].cost(0), all[2].cost(0), all[0].cost(0)]).await.unwrap();
            peeked.charges().iter().map(|charge| charge.remaining()).collect::<Vec<_>>()
        };
        assert_eq!(left().await, [6, 6, 3]);
        // A cost that is too high for one quota is charged to none.
        assert!(!limiter.take(&all.map(|charge| charge.cost(4))).await.unwrap().is_allowed());
        assert_eq!(left().await, [6, 6, 3]);
        let receipts = taken.take_receipts();
        let refunds = [first, second, third].into_iter().zip(receipts);
        let refunds = refunds.map(|(policy, receipt)| Refund::new(policy.clone(), a.clone(), receipt.unwrap()));
        limiter.refund(refunds.collect()).await.unwrap();
        assert_eq!(left().await, [7, 7, 4]);
        limiter.reset(third, &a).await.unwrap();
        assert_eq!(left().await, [7, 9, 4]);
        limiter.reset(first, &a).await.unwrap();
        assert_eq!(keys(&server).len(), 0, "nothing is left");
    }
}

#[tokio::test]
async fn set_of_too_many_charges_is_a_misconfiguration() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let policies: Vec<Policy> = (0..1_001).map(|at| policy(&format!("p{at}"), lasting(5))).collect();
    let a = key("a");
    let charges: Vec<Charge<'_>> = policies.iter().map(|policy| Charge::new(policy, &a)).collect();
    assert!(limiter.take(&charges[..1_000]).await.unwrap().is_allowed());
    for answer in [limiter.take(&charges).await, limiter.peek(&charges).await, limiter.settle(&charges).await] {
        assert_eq!(answer.unwrap_err().kind(), StoreErrorKind::Misconfigured);
    }
    assert_eq!(keys(&server).len(), 1_000);
}

#[tokio::test]
async fn refund_that_is_not_awaited_is_sent() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let (policy, a) = (policy("back", lasting(2)), key("a"));
    let mut taken = take(&limiter, &policy, "a", 2).await.unwrap();
    let receipt = taken.take_receipts().pop().flatten().unwrap();
    drop(limiter.refund(vec![Refund::new(policy.clone(), a.clone(), receipt)]));
    eventually("it did not arrive", async || {
        let peeked = limiter.peek(&[Charge::new(&policy, &a).cost(0)]).await.unwrap();
        peeked.charges()[0].remaining() == 2
    })
    .await;
}

#[tokio::test]
async fn take_dropped_unpolled_charges_nothing() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let (policy, a) = (policy("dropped", lasting(2)), key("a"));
    for _ in 0..10 {
        drop(limiter.take(&[Charge::new(&policy, &a)]));
    }
    assert_eq!(take(&limiter, &policy, "a", 0).await.unwrap().charges()[0].remaining(), 2);
}

/// Returns the limiters of two processes whose clock stands still, so that no window ends.
async fn still(server: &Server) -> (RedisLimiter, RedisLimiter) {
    let clock = ManualClock::new();
    let connect = async || connected(patient().clock(clock.clone()), &server.url()).await;
    (connect().await, connect().await)
}

#[tokio::test]
async fn changed_quota_keeps_what_was_used_in_every_process() {
    let server = Server::start();
    let (old, new) = still(&server).await;
    let hour = 60 * MINUTE;
    let before = policy("changed", Quota::fixed_window(100, hour).unwrap());
    let quotas = [
        Quota::fixed_window(200, hour).unwrap(),
        Quota::sliding_window(100, hour).unwrap(),
        Quota::sliding_log(100, hour).unwrap(),
        Quota::sliding_window(100, hour).unwrap().buckets(60).unwrap(),
        Quota::token_bucket(100, 30 * 24 * hour).unwrap(),
        Quota::step_bucket(100, 30 * 24 * hour).unwrap(),
    ];
    for (at, quota) in quotas.into_iter().enumerate() {
        let name = format!("caller {at}");
        assert!(take(&old, &before, &name, 40).await.unwrap().is_allowed());
        let after = policy("changed", quota);
        for (used, (limiter, policy)) in [(41, (&new, &after)), (42, (&old, &before)), (43, (&new, &after))] {
            let decision = take(limiter, policy, &name, 1).await.unwrap();
            let left = policy.quota().capacity() - decision.charges()[0].remaining();
            // Each change rounds the usage up by at most one unit.
            assert!((used..=used + 3).contains(&left), "{left} used instead of {used}, to and from {quota}");
        }
    }
}

#[tokio::test]
async fn process_with_a_smaller_quota_forgets_nothing() {
    let server = Server::start();
    let (old, new) = still(&server).await;
    let hour = 60 * MINUTE;
    let quotas = |limit| {
        let window = Quota::sliding_window(limit, hour).unwrap();
        [
            Quota::token_bucket(limit, 30 * 24 * hour).unwrap(),
            Quota::step_bucket(limit, 30 * 24 * hour).unwrap(),
            lasting(limit),
            window,
            window.buckets(60).unwrap(),
            Quota::sliding_log(limit, hour).unwrap(),
        ]
    };
    for (small, large) in quotas(5).into_iter().flat_map(|small| quotas(1_000).map(|large| (small, large))) {
        let [before, after] = [small, large].map(|quota| policy("changed", quota));
        let name = format!("{small} {large}");
        let receipt = take(&old, &before, &name, 2).await.unwrap().take_receipts().remove(0).unwrap();
        let left = take(&new, &after, &name, 500).await.unwrap().charges()[0].remaining();

        old.refund(vec![Refund::new(before.clone(), key(&name), receipt)]).await.unwrap();
        let refunded = take(&new, &after, &name, 0).await.unwrap().charges()[0].remaining();
        assert!((left..=left + 3).contains(&refunded), "{refunded}, not {left}: {name}");

        old.settle(&[Charge::new(&before, &key(&name)).cost(3).effect(Effect::Force)]).await.unwrap();
        let forced = take(&new, &after, &name, 0).await.unwrap().charges()[0].remaining();
        assert!((refunded - 3..=refunded + 1).contains(&forced), "{forced}, not {refunded}: {name}");
    }
}

/// Four processes serve while each replaces its rules at times of its own: the rule is renamed to and fro, other rules
/// come and go, and at the end its limit is raised.
#[tokio::test]
async fn processes_that_reload_at_different_times_count_as_one() {
    let server = Server::start();
    let text = |version: usize, limit: u64| {
        let name = if version % 2 == 0 { "name: a" } else { "name: b, was: a" };
        let other = if version % 3 == 0 { "\n  - {name: other, quota: 100000 per day, key: global}" } else { "" };
        format!(
            "rules:{other}\n  - {{{name}, quota: '{limit} per 30 days, fixed window, from the first request', key: global}}"
        )
    };
    let mut processes = Vec::new();
    for at in 0..4 {
        let rules = Rules::from_text(text(at, 400)).unwrap();
        let layer = rules.layer(connect(&server).await).unwrap();
        processes.push((at, rules, layer));
    }
    let running: Vec<_> = processes
        .into_iter()
        .map(|(at, rules, layer)| {
            tokio::spawn(async move {
                let head = http::Request::new(()).into_parts().0;
                let mut passed = 0;
                for nth in 0..300 {
                    if nth % (3 + at) == 0 {
                        rules.replace(text(at + nth, if nth > 200 { 600 } else { 400 })).unwrap();
                    }
                    passed += u64::from(layer.admit(&head).await.is_ok());
                }
                passed
            })
        })
        .collect();
    let mut passed = 0;
    for task in running {
        passed += task.await.unwrap();
    }
    assert_eq!(passed, 600);
}

#[tokio::test]
async fn limiters_with_another_prefix_are_apart() {
    let server = Server::start();
    let one = connected(patient().prefix("one"), &server.url()).await;
    let two = connected(patient().prefix("two"), &server.url()).await;
    let policy = policy("test", lasting(1));
    assert!(passes(&one, &policy, "a").await && !passes(&one, &policy, "a").await && passes(&two, &policy, "a").await);
    for prefix in ["", "with{brace", "with}brace", "with blank", &"p".repeat(129)] {
        let refused = RedisLimiter::builder().prefix(prefix).connect(&server.url()).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{prefix:?}");
    }
}

#[tokio::test]
async fn hashed_keys_are_nowhere_in_clear_and_are_the_same_for_all() {
    let server = Server::start();
    let mut limiters = Vec::new();
    for _ in 0..2 {
        limiters.push(connected(patient().key_secret(*b"a secret of ours"), &server.url()).await);
    }
    let policy = policy("keys", lasting(1));
    let secret = "sk-live-51H8x";
    assert!(passes(&limiters[0], &policy, secret).await && !passes(&limiters[1], &policy, secret).await);
    let stored = keys(&server);
    assert_eq!(stored.len(), 1);
    assert!(!String::from_utf8_lossy(&stored[0]).contains("sk-live"), "{stored:?}");
}

#[tokio::test]
async fn keys_of_any_bytes_and_any_length_are_apart() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let policy = policy("keys", lasting(1));
    let long = "x".repeat(1 << 20);
    let longer = format!("{long}y");
    for name in ["", "}", "{", "{}", "a}b", "a}c", "käse", "\0", "\r\n", &long, &longer] {
        assert!(passes(&limiter, &policy, name).await, "{} bytes", name.len());
        assert!(!passes(&limiter, &policy, name).await, "{} bytes", name.len());
    }
    assert!(keys(&server).iter().all(|key| key.len() < 512), "long keys are not stored as they are");
}

#[tokio::test]
async fn foreign_value_fails_only_its_own_check() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let policy = policy("foreign", lasting(10));
    assert!(passes(&limiter, &policy, "a").await);
    let stored = keys(&server).remove(0);
    let mut connection = server.connection();
    redis::cmd("DEL").arg(&stored).exec(&mut connection).unwrap();
    redis::cmd("HSET").arg(&stored).arg("somebody").arg("else's").exec(&mut connection).unwrap();
    let checks = (0..20).map(|at| {
        let (limiter, policy) = (limiter.clone(), policy.clone());
        tokio::spawn(async move { take(&limiter, &policy, if at % 2 == 0 { "a" } else { "b" }, 1).await })
    });
    for (at, check) in checks.collect::<Vec<_>>().into_iter().enumerate() {
        match check.await.unwrap() {
            Ok(decision) => assert!(at % 2 == 1 && decision.is_allowed()),
            Err(error) => assert!(at % 2 == 0 && error.kind() == StoreErrorKind::Foreign, "{error}"),
        }
    }
}
