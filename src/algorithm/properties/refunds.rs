//! Several charges that are refunded, against a life in which they were not taken.

use proptest::prelude::*;

use crate::decision::Receipt;
use crate::quota::{Algorithm, Anchor, Quota};
use crate::sampling::config;

use super::key::State;
use super::quotas::{quota, shapes};
use super::run::at_least;

const TODAY: u64 = 1_790_000_000_000_000;

/// Takes at these steps, of which the first three are refunded at later ones, the newest first. Of each step two
/// numbers say how much later it is, and what it costs and whether it refunds.
fn refund_newest_first(quota: &Quota, steps: &[(u64, u64)]) {
    let (mut key, mut without) = (State::new(quota), State::new(quota));
    let (mut now, period_us) = (TODAY, quota.spec().period_us);
    let mut receipts: Vec<Receipt> = Vec::new();
    for (index, (time, what)) in steps.iter().enumerate() {
        now += match time % 4 {
            0 => 0,
            1 => time / 4 % (period_us / quota.limit().max(1) + 2),
            2 => time / 4 % (period_us + 1),
            _ => 1,
        };
        let cost = 1 + what % quota.capacity().clamp(1, 5);
        let (mut decision, _) = key.decide(now, cost, false);
        if index < 3 {
            receipts.extend(decision.take_receipt());
        } else if decision.is_allowed() {
            assert!(without.decide(now, cost, false).0.is_allowed(), "there is more room without them");
        }
        if index >= 4 && what / 7 % 2 == 0 {
            if let Some(newest) = receipts.pop() {
                key.refund(now, &newest, newest.units());
            }
        }
    }
    let (used, without) = (key.used(now), without.used(now));
    assert!(at_least(used, without), "in use {used:?} after the refunds, {without:?} without the takes, of {quota:?}");
}

proptest! {
    #![proptest_config(config(20_000))]

    #[test]
    fn refunds_newest_first_are_never_laxer_than_no_takes(
        algorithm in prop::sample::select(&[
            Algorithm::TokenBucket,
            Algorithm::Gcra,
            Algorithm::LeakyQueue,
            Algorithm::StepBucket,
            Algorithm::FixedWindow,
            Algorithm::SlidingWindow,
            Algorithm::SlidingLog,
        ][..]),
        shape in shapes(),
        steps in prop::collection::vec((any::<u64>(), any::<u64>()), 5..12),
    ) {
        let quota = quota(algorithm, Anchor::Epoch, &shape);
        // A refused request that counts is what else the refunded ones did.
        if !quota.counts_denied() {
            refund_newest_first(&quota, &steps);
        }
    }
}
