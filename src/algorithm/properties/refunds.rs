//! Several charges that are refunded, against a life in which they were not taken.

use proptest::prelude::*;

use crate::base::sampling::config;
use crate::decision::Receipt;
use crate::quota::{Algorithm, Anchor, Quota};

use super::key::State;
use super::quotas::{quota, shapes};
use super::run::at_least;

const TODAY: u64 = 1_790_000_000_000_000;

/// Takes at these steps. The first three takes are refunded at later steps, the newest first. Of each step two numbers
/// say how much later it is, and what it costs and whether it refunds.
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

/// A charge of one strike or more: how much later than the one before it comes, its cost, whether it is kept, and how
/// many of those that are not kept are refunded after it.
type Strike = (u64, u64, bool, usize);

/// Strikes, some of which are refunded in any order, compared with a history without those. The key is closed and
/// opened by and by. When all are refunded, the states are equal.
fn refund_some_strikes(quota: &Quota, blocks_before: u64, strikes: &[Strike], seed: u64) {
    let limit = quota.limit();
    let (mut key, mut now) = (State::new(quota), TODAY);
    for _ in 0..blocks_before {
        let (closing, _) = key.decide(now, limit, false);
        now += closing.reset_us;
    }
    // Both windows begin with this strike.
    key.decide(now, 1, false);
    let mut without = key.clone();
    let mut held: Vec<Receipt> = Vec::new();
    let refund = |key: &mut State, held: &mut Vec<Receipt>, now: u64, at: usize| {
        let receipt = held.swap_remove((seed as usize).wrapping_add(at) % held.len());
        let (at_us, part, units) = (receipt.at_us(), receipt.part(), receipt.units());
        key.refund(now, &receipt, units / 2);
        key.refund(now, &Receipt::new(units - units / 2, at_us, part), units - units / 2);
    };
    for (at, (later, cost, is_kept, refunds)) in strikes.iter().enumerate() {
        now += later;
        let (mut decision, _) = key.decide(now, *cost, false);
        assert!(!key.admits(now, 1) || without.admits(now, 1), "laxer than without the strikes to refund: {quota}");
        match decision.take_receipt() {
            Some(_) if *is_kept => assert!(without.decide(now, *cost, false).0.is_allowed(), "{quota}"),
            Some(receipt) => held.push(receipt),
            None => {}
        }
        for _ in 0..(*refunds).min(held.len()) {
            refund(&mut key, &mut held, now, at);
        }
    }
    while !held.is_empty() {
        refund(&mut key, &mut held, now, 0);
    }
    assert_eq!(key.words(), without.words(), "the refunded strikes left a trace: {quota}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn strikes_that_are_refunded_leave_no_trace(
        limit in 2..8_u64,
        (factor, memory) in (1..4_u32, 0..3_u64),
        blocks_before in 0..4_u64,
        strikes in prop::collection::vec((0..1_000_u64, 1..4_u64, any::<bool>(), 0..3_usize), 1..30),
        seed in any::<u64>(),
    ) {
        let seconds = std::time::Duration::from_secs;
        let mut quota = Quota::block(limit, seconds(60), seconds(60)).unwrap();
        if memory > 0 {
            quota = quota.growing(factor, seconds(500), seconds(memory * 40)).unwrap();
        }
        refund_some_strikes(&quota, blocks_before, &strikes, seed);
    }
}

proptest! {
    #![proptest_config(config(20_000))]

    #[test]
    fn refunds_newest_first_are_never_laxer_than_no_takes(
        algorithm in prop::sample::select(Algorithm::timed().collect::<Vec<_>>()),
        shape in shapes(),
        steps in prop::collection::vec((any::<u64>(), any::<u64>()), 5..12),
    ) {
        let quota = quota(algorithm, Anchor::Epoch, &shape);
        // A refund does not undo denials that were counted. Strikes have a law of their own.
        if !quota.counts_denied() && algorithm != Algorithm::Block {
            refund_newest_first(&quota, &steps);
        }
    }
}
