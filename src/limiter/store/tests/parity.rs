//! Schedules of one key each, played to a limiter over a store and to the limiter in memory: all answers must be equal.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::{Lab, patient};
use crate::algorithm::properties::beginnings;
use crate::algorithm::properties::for_each_algorithm;
use crate::algorithm::properties::quotas::{any_algorithm, quota, shapes};
use crate::algorithm::properties::run::steps;
use crate::base::time::Timestamp;
use crate::clock::ManualClock;
use crate::decision::{Decision, Receipt};
use crate::key::Key;
use crate::limiter::memory::limiter::MemoryLimiter;
use crate::limiter::store::Store;
use crate::limiter::{Charge, Effect, Limiter, Refund};
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor};

/// Steps of each algorithm; of a campaign 100,000.
const STEPS: u32 = 4_000;

/// A limiter in memory follows its clock for 13 years. The two may differ if the clock is set back to a time before the
/// limiter was made.
const LIFE_US: u64 = 300_000_000_000_000;

/// Plays schedules with at least `wanted` steps to limiters over the stores that `store` returns. It may return the
/// same store each time.
pub(in crate::limiter::store) async fn play<S: Store>(
    algorithm: Algorithm,
    anchor: Anchor,
    wanted: u32,
    store: impl Fn() -> S,
) {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let (mut played, mut number) = (0, 0_u64);
    while played < wanted {
        let schedule = (shapes(), beginnings(), steps());
        let (shape, begin, steps) = schedule.new_tree(&mut runner).unwrap().current();
        number += 1;
        let clock = ManualClock::at(Timestamp::from_micros(begin));
        let memory = MemoryLimiter::builder().max_keys(10).clock(clock.clone()).build().unwrap();
        let stored = patient().prefix(number.to_string()).clock(clock.clone()).max_denials(0).build(store()).unwrap();
        let key = Key::of(number).unwrap();
        let mut quota = quota(algorithm, anchor, &shape);
        let (mut now, mut retry_us, mut reset_us, mut remaining) = (begin, 0, 0, quota.capacity());
        let mut receipts: Vec<[Receipt; 2]> = Vec::new();
        let mut told = Vec::new();
        for step in steps {
            now = step.instant(&quota, now, retry_us, reset_us);
            if !(begin..=begin + LIFE_US).contains(&now) {
                break;
            }
            clock.set(Timestamp::from_micros(now));
            let policy = Policy::new("p", quota).unwrap();
            if stored.supports(&quota).is_err() {
                break;
            }
            let cost = step.cost(quota.capacity(), remaining);
            let charge = Charge::new(&policy, &key).cost(cost);
            told.push(format!("{now} \"{quota}\" {step:?}"));
            let (charge, peeks) = match step.what {
                0..=2 => (charge.cost(0), false),
                3..=5 => (charge.effect(Effect::Force), false),
                6..=9 if !receipts.is_empty() => {
                    let [own, other] = receipts.swap_remove(step.a as usize % receipts.len());
                    memory.refund_now(&[Refund::new(policy.clone(), key.clone(), own)]);
                    stored.refund(vec![Refund::new(policy.clone(), key.clone(), other)]).await.unwrap();
                    (charge.cost(0), true)
                }
                10 => (charge, true),
                11 if step.a % 2 == 0 => {
                    let anchor = if step.b % 2 == 0 { Anchor::Epoch } else { Anchor::FirstRequest };
                    let shape = [0, 5, 9, 13, 17, 21].map(|bits| step.b >> bits);
                    quota = crate::algorithm::properties::quotas::quota(any_algorithm(step.a / 4), anchor, &shape);
                    if step.b >> 25 & 1 == 1 {
                        quota = quota.in_proportion().unwrap_or(quota);
                    }
                    (retry_us, reset_us, remaining) = (0, 0, quota.capacity());
                    continue;
                }
                12 => (charge.effect(Effect::Observe), false),
                13 if step.a % 4 == 0 => {
                    memory.reset_now(&policy, &key);
                    stored.reset(&policy, &key).await.unwrap();
                    receipts.clear();
                    (charge.cost(0), true)
                }
                _ => (charge, false),
            };
            let (mut expected, mut found) = if peeks {
                (memory.peek(&[charge]).await.unwrap(), stored.peek(&[charge]).await.unwrap())
            } else {
                (memory.take_now(&[charge]), stored.take(&[charge]).await.unwrap())
            };
            let of = |decision: &mut Decision| decision.take_receipts().pop().flatten();
            match (of(&mut expected), of(&mut found)) {
                (Some(own), Some(other)) => {
                    assert_eq!(own, other, "after\n{}", told.join("\n"));
                    receipts.push([own, other]);
                }
                (None, None) => {}
                (own, other) => panic!("{own:?} and {other:?} after\n{}", told.join("\n")),
            }
            assert_eq!(expected.charges(), found.charges(), "after\n{}", told.join("\n"));
            let charge = &found.charges()[0];
            retry_us = charge.wait().duration().map_or(0, |wait| wait.as_micros() as u64);
            (reset_us, remaining) = (charge.known_reset_us().unwrap_or(0), charge.remaining());
            played += 1;
        }
    }
}

macro_rules! parity {
    ($($name:ident: $algorithm:ident, $anchor:ident;)*) => {$(
        #[tokio::test]
        async fn $name() {
            play(Algorithm::$algorithm, Anchor::$anchor, crate::base::sampling::cases(STEPS), Lab::default).await;
        }
    )*};
}

for_each_algorithm!(parity);
