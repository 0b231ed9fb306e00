//! Checks that are decided key by key, as when their keys are on two servers.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tokio::time::Instant;

use super::{RedisAnswer, WireRequest};
use crate::base::sampling::config;
use crate::base::time::Timestamp;
use crate::base::wait::Wait;
use crate::clock::wall_now;
use crate::limiter::redis::limiter::RedisLimiter;
use crate::limiter::redis::redis_server::Server;
use crate::limiter::redis::tests::connected;
use crate::limiter::redis::wire::WireOperation;
use crate::limiter::remote::Backend;
use crate::limiter::{Charge, Effect, Limiter};
use crate::{
    MemoryLimiter,
    clock::ManualClock,
    decision::Decision,
    key::Key,
    policy::Policy,
    quota::{Anchor, Quota},
};

const MINUTE: Duration = Duration::from_secs(60);

/// The first policies are those that a block and a meter may belong to; then come these two.
const BLOCK: usize = 6;
const METER: usize = 7;

fn policies(case: u32) -> Vec<Policy> {
    let quotas = [
        Quota::token_bucket(4, MINUTE),
        Quota::sliding_log(3, MINUTE),
        Quota::fixed_window(5, MINUTE),
        Quota::sliding_window(4, MINUTE),
        Quota::sliding_window(6, MINUTE).and_then(|quota| quota.buckets(6)),
        Quota::step_bucket(5, MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)),
        Quota::block(2, 10 * MINUTE, 20 * MINUTE),
        Quota::meter(5, MINUTE),
    ];
    let numbered = quotas.into_iter().enumerate();
    numbered.map(|(number, quota)| Policy::new(format!("{case}-{number}"), quota.unwrap()).unwrap()).collect()
}

/// The index of a policy, that of a key, a cost and an effect.
fn charge() -> impl Strategy<Value = (usize, usize, u64, Effect)> {
    let effect = prop_oneof![4 => Just(Effect::Enforce), 1 => Just(Effect::Observe), 1 => Just(Effect::Force)];
    (0..BLOCK, 0..2_usize, 0..4_u64, effect)
}

/// A set of different states, perhaps with a block or a meter of what is before it.
fn set() -> impl Strategy<Value = Vec<(usize, usize, u64, Effect)>> {
    let companion = proptest::option::of((BLOCK..=METER, 1..3_u8, 1..3_u64));
    (prop::collection::vec(charge(), 1..4), companion, prop::collection::vec(charge(), 0..2)).prop_map(
        |(mut set, companion, rest)| {
            if let Some((policy, of, cost)) = companion {
                set.push((policy, 0, cost, Effect::OnRefusal { of }));
            }
            set.extend(rest);
            let mut seen = HashSet::new();
            set.retain(|(policy, key, ..)| seen.insert((*policy, *key)));
            set
        },
    )
}

/// Returns what a set reports. In a refused set that was decided key by key, the remaining units
/// before a forced charge are not known, because there may have been debt.
fn told(decision: &Decision, charges: &[Charge<'_>]) -> (bool, Vec<(bool, u64, Wait)>) {
    let allowed = decision.is_allowed();
    let known = |at: usize| allowed || charges.get(at).is_none_or(|charge| charge.effect != Effect::Force);
    let answers = decision.charges().iter().enumerate();
    let told = answers.map(|(at, it)| (it.is_allowed(), if known(at) { it.remaining() } else { 0 }, it.wait()));
    (allowed, told.collect())
}

/// Runs at one instant, so that refunded units are as if they had never been taken.
#[test]
fn deciding_key_by_key_equals_deciding_in_one_step() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (server, clock) = (Server::start(), ManualClock::new());
    let connect = || RedisLimiter::builder().deadline(Duration::from_secs(20)).max_denials(0).clock(clock.clone());
    let redis = runtime.block_on(connected(connect(), &server.url()));
    redis.0.backend().flights.store().splits.store(true, Ordering::Relaxed);
    let memory = MemoryLimiter::builder().clock(clock.clone()).build().unwrap();
    let keys = [Key::of("one").unwrap(), Key::of("two").unwrap()];
    let mut runner = TestRunner::new(config(300));
    let case = Cell::new(0);
    let cases = runner.run(&prop::collection::vec(set(), 1..12), |sets| {
        case.set(case.get() + 1);
        let policies = policies(case.get());
        for set in sets {
            let charges: Vec<_> = set
                .iter()
                .map(|(policy, key, cost, effect)| {
                    Charge::new(&policies[*policy], &keys[*key]).cost(*cost).effect(*effect)
                })
                .collect();
            runtime.block_on(async {
                let expected = memory.peek(&charges).await.unwrap();
                let peeked = redis.peek(&charges).await.unwrap();
                prop_assert_eq!(told(&peeked, &charges), told(&expected, &charges), "a look at {:?}", &set);
                let expected = memory.take(&charges).await.unwrap();
                let mut taken = redis.take(&charges).await.unwrap();
                prop_assert_eq!(told(&taken, &charges), told(&expected, &charges), "{:?}", &set);
                prop_assert!(taken.is_allowed() || taken.take_receipts().iter().all(Option::is_none));
                while redis.waiting() > 0 {
                    tokio::task::yield_now().await; // the refunds
                }
                let looks: Vec<_> = policies
                    .iter()
                    .flat_map(|policy| keys.iter().map(move |key| Charge::new(policy, key).cost(0)))
                    .collect();
                let (expected, found) = (memory.peek(&looks).await.unwrap(), redis.peek(&looks).await.unwrap());
                prop_assert_eq!(told(&found, &looks), told(&expected, &looks), "each state after {:?}", &set);
                Ok(())
            })?;
        }
        Ok(())
    });
    cases.unwrap();
}

/// At first a process takes its own calendar time for the server's. If that is wrong, one call is sent in vain.
#[test]
fn call_that_names_another_window_is_sent_once_more() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Server::start();
    let connect = RedisLimiter::builder().deadline(Duration::from_secs(20)).max_denials(0);
    let redis = runtime.block_on(connected(connect, &server.url()));
    let backend = redis.0.backend();
    let dispatcher = backend.flights.store();
    let (policy, key) = (Policy::new("p", Quota::per_calendar_month(9)).unwrap(), Key::of("one").unwrap());
    let (charge, stored) = (Charge::new(&policy, &key), backend.stored(&policy, &key));
    let request = WireRequest::charge(WireOperation::Take, std::iter::once((&charge, &stored)));
    let take = |believed: Option<u64>| {
        let before = dispatcher.calls.load(Ordering::Relaxed);
        let (believed, until) = (believed.map(Timestamp::from_micros), Instant::now() + Duration::from_secs(20));
        let mut told = None;
        let answer = runtime.block_on(dispatcher.answers(&[&request], until, believed, &mut told)).pop();
        let Some(Ok(RedisAnswer::Decided(decision))) = answer else { panic!("{answer:?}") };
        assert!(told.unwrap().as_micros().abs_diff(wall_now().as_micros()) < 60_000_000, "the next call knows it");
        (decision.charges()[0].remaining(), dispatcher.calls.load(Ordering::Relaxed) - before)
    };
    assert_eq!(take(None), (8, 1));
    assert_eq!(take(Some(0)), (7, 2));
    assert_eq!(take(Some(u64::MAX)), (6, 2));
    assert_eq!(take(Some(wall_now().as_micros())), (5, 1));
}

/// The time of decisions ends with the year 2149, for windows of a calendar as for all others.
#[test]
fn clock_beyond_the_end_of_time_decides_at_the_end() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = Server::start();
    let connect = RedisLimiter::builder().deadline(Duration::from_secs(20)).max_denials(0);
    let clock = ManualClock::at(Timestamp::from_micros(u64::MAX));
    let redis = runtime.block_on(connected(connect.clock(clock), &server.url()));
    let calls = &redis.0.backend().flights.store().calls;
    let key = Key::of("one").unwrap();
    for quota in [Quota::per_calendar_month(2), Quota::fixed_window(2, MINUTE).unwrap()] {
        let policy = Policy::new(quota.period().as_secs().to_string(), quota).unwrap();
        let before = calls.load(Ordering::Relaxed);
        let take = || runtime.block_on(async { redis.take(&[Charge::new(&policy, &key)]).await });
        let passed = (0..3).filter(|_| take().unwrap().is_allowed()).count();
        assert_eq!((passed, calls.load(Ordering::Relaxed) - before), (2, 3), "{quota}");
    }
}
