//! Keys whose plan changes, back and forth.

use std::time::Duration;

use crate::quota::{Anchor, Oldest, Quota};

use super::key::Planned;

const SECOND_US: u64 = 1_000_000;
const MINUTE: Duration = Duration::from_secs(60);
const TODAY: u64 = 1_790_000_000_000_000;

/// A plan of each kind.
pub(crate) fn plans(limit: u64) -> Vec<Quota> {
    let window = Quota::sliding_window(limit, MINUTE).unwrap();
    let plans = vec![
        Quota::token_bucket(limit, MINUTE).unwrap(),
        Quota::gcra(limit, MINUTE).unwrap(),
        Quota::leaky_queue(limit, MINUTE).unwrap(),
        Quota::step_bucket(limit, MINUTE).unwrap(),
        Quota::step_bucket(limit, MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap(),
        Quota::fixed_window(limit, MINUTE).unwrap(),
        Quota::fixed_window(limit, MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap(),
        window,
        window.oldest(Oldest::Dropped).unwrap(),
        window.oldest(Oldest::Counted).unwrap(),
        window.buckets(6).unwrap(),
        window.buckets(60).and_then(|quota| quota.oldest(Oldest::Counted)).unwrap(),
        Quota::sliding_log(limit, MINUTE).unwrap(),
        Quota::block(limit, MINUTE, MINUTE).unwrap(),
        Quota::meter(limit, MINUTE).unwrap(),
    ];
    // As `Policy::plans` does.
    plans.into_iter().map(|quota| quota.holding(21)).collect()
}

/// Returns what passes in an hour if each second asks for this many units one by one, under the plans in
/// turn; `None` asks for nothing.
fn passed(plans: [Option<&Quota>; 2], asked: u64) -> u64 {
    let mut key = Planned::new(plans[0].or(plans[1]).unwrap());
    let mut passed = 0;
    for second in 0..3_600 {
        let now = TODAY + second * SECOND_US;
        if let Some(plan) = plans[(second % 2) as usize] {
            passed += (0..asked).filter(|_| key.decide(plan, now, 1, false).0.is_allowed()).count() as u64;
        }
    }
    passed
}

/// Two plans of one kind that alternate each second: what passes is what the larger of them lets pass, to within one unit.
#[test]
fn plans_that_alternate_pass_what_the_larger_one_passes() {
    for (ten, twenty) in plans(10).iter().zip(&plans(20)) {
        if ten.capacity() == 1 || ten.algorithm() == crate::quota::Algorithm::Block {
            continue; // of strict spacing, and of what closes, each request is the last; see below
        }
        for asked in [1, 30] {
            // In its own seconds alone, and in all of them.
            let least = passed([None, Some(twenty)], asked).min(passed([Some(twenty), None], asked));
            let most = passed([Some(twenty), Some(twenty)], asked);
            for order in [[ten, twenty], [twenty, ten]] {
                let passed = passed(order.map(Some), asked);
                assert!(
                    (least.saturating_sub(1)..=most + 1).contains(&passed),
                    "{passed}, not {least} to {most}: {ten}"
                );
            }
        }
    }
}

/// Plans of any two kinds: no order of changes locks a key out, and none gives more than the larger plan, up to its edges.
#[test]
fn plans_of_any_kinds_lock_nobody_out_and_lend_nothing() {
    let alone = |plan: Quota| (passed([Some(&plan), None], 30), passed([Some(&plan), Some(&plan)], 30), plan);
    let [tens, twenties] = [10, 20].map(|limit| plans(limit).into_iter().map(alone).collect::<Vec<_>>());
    for others in [&tens, &twenties] {
        for (one_least, one_most, one) in others {
            for (other_least, other_most, other) in &twenties {
                let passed = passed([Some(one), Some(other)], 30);
                // Each admitted change between a bucket and a sliding window of one bucket dates their units anew.
                let least = one_least.min(other_least) / 10;
                // A window whose oldest part counts in full gets less alone than its limit in each period.
                let each_minute = 61 * one.capacity().max(other.capacity());
                let most = *one_most.max(other_most).max(&each_minute);
                assert!(
                    (least..=most + most / 10).contains(&passed),
                    "{passed}, not {least} to {most}: {one}, {other}"
                );
            }
        }
    }
}

/// What is told by another plan changes nothing, however often it is asked.
#[test]
fn looking_from_another_plan_changes_nothing() {
    for from in plans(10) {
        for to in plans(3) {
            let mut key = Planned::new(&from);
            for _ in 0..5 {
                let _ = key.decide(&from, TODAY, 1, false);
            }
            let before = key.state.words();
            for later in 0..50 {
                let now = TODAY + later * SECOND_US;
                let (_, writes) = key.decide(&to, now, 0, false);
                assert!(!writes && key.written == from && key.state.words() == before, "{from} {to}");
            }
        }
    }
}
