//! Keys whose plan changes, back and forth.

use std::time::Duration;

use crate::base::sampling::stride;
use crate::quota::{Algorithm, Anchor, Calendar, Oldest, Quota};

use super::key::{Planned, State};
use super::quotas::plain;
use crate::algorithm::carry::Fit;

const SECOND_US: u64 = 1_000_000;
const MINUTE: Duration = Duration::from_secs(60);
const TODAY: u64 = 1_790_000_000_000_000;

/// Returns plans of each algorithm: of each anchor, and of each way to count sub-windows.
pub(crate) fn plans(limit: u64) -> Vec<Quota> {
    let plans = Algorithm::timed().flat_map(|algorithm| plans_of(algorithm, limit));
    // As `Rule::plans` does.
    plans.map(|quota| quota.holding(101)).collect()
}

fn plans_of(algorithm: Algorithm, limit: u64) -> Vec<Quota> {
    let plain = plain(algorithm, limit, MINUTE, MINUTE).unwrap();
    // An option that this algorithm does not have is left out.
    let others = [
        plain.anchor(Anchor::FirstRequest),
        plain.oldest(Oldest::Dropped),
        plain.oldest(Oldest::Counted),
        plain.buckets(6),
        plain.buckets(60).and_then(|quota| quota.oldest(Oldest::Counted)),
    ];
    let is_window = algorithm == Algorithm::FixedWindow;
    let calendars = [Calendar::day(), Calendar::month().from_day(31).unwrap()];
    let calendars = calendars.into_iter().filter(|_| is_window).map(|calendar| Quota::calendar(limit, calendar));
    std::iter::once(plain).chain(others.into_iter().chain(calendars).flatten()).collect()
}

/// Returns the plans that keep a share of their capacity.
pub(crate) fn proportional_plans(limit: u64) -> Vec<Quota> {
    plans(limit).into_iter().filter_map(|plan| plan.in_proportion().ok()).collect()
}

/// Returns what passes in an hour if each second asks for this many units one by one until one is refused, under the
/// plans in turn; `None` asks for nothing.
fn passed(plans: [Option<&Quota>; 2], asked: u64) -> u64 {
    let mut key = Planned::new(plans[0].or(plans[1]).unwrap());
    let mut passed = 0;
    for second in 0..3_600 {
        let now = TODAY + second * SECOND_US;
        if let Some(plan) = plans[(second % 2) as usize] {
            passed += (0..asked).take_while(|_| key.decide(plan, now, 1, false).0.is_allowed()).count() as u64;
        }
    }
    passed
}

/// Returns the same block or meter that lasts a second longer; any other quota as it is.
fn a_second_longer(quota: &Quota) -> Quota {
    let second = Duration::from_micros(SECOND_US);
    match quota.algorithm() {
        Algorithm::Block => quota.lasting(MINUTE + second).unwrap(),
        Algorithm::Meter => Quota::meter(quota.limit(), MINUTE + second).unwrap(),
        _ => *quota, // a limit
    }
}

#[test]
fn alternating_plans_pass_what_lies_between_the_two() {
    for (small, large) in [(10, 20), (1, 2), (1, 20), (20, 21), (7, 100), (59, 61)] {
        let bursts = [None, Some(1), Some(2)].map(|burst| {
            let plan = |limit| Quota::token_bucket(limit, MINUTE).unwrap().burst(burst.unwrap_or(limit)).unwrap();
            (plan(small).holding(101), plan(large).holding(101))
        });
        let kinds = plans(small).into_iter().zip(plans(large)).chain(bursts);
        for (small, large) in kinds.step_by(stride()) {
            for asked in [1, 2, 30] {
                let [least, most] = [&a_second_longer(&small), &large].map(|plan| passed([Some(plan); 2], asked));
                for order in [[&small, &large], [&large, &small]] {
                    let passed = passed(order.map(Some), asked);
                    assert!(
                        (least.saturating_sub(1)..=most + 1).contains(&passed),
                        "{passed}, not {least} to {most}: {small}, {large}, {asked}"
                    );
                }
            }
        }
    }
}

/// A capacity above 1 lets a key wait for its larger plan, so it gets no less than under that plan alone.
#[test]
fn alternating_plans_pass_as_much_as_the_larger_plan() {
    for (ten, twenty) in plans(10).iter().zip(&plans(20)).step_by(stride()) {
        if ten.capacity() == 1 || ten.algorithm() == Algorithm::Block {
            continue;
        }
        for asked in [1, 30] {
            let least = passed([None, Some(twenty)], asked).min(passed([Some(twenty), None], asked));
            for order in [[ten, twenty], [twenty, ten]] {
                let passed = passed(order.map(Some), asked);
                assert!(passed + 1 >= least, "{passed}, not {least}: {ten}");
            }
        }
    }
}

#[test]
fn alternating_plans_do_not_change_the_end_of_a_block() {
    let block = |strikes, minutes| Quota::block(strikes, 10 * MINUTE, minutes * MINUTE).unwrap();
    for (one, other) in [(block(3, 1), block(5, 2)), (block(5, 1), block(3, 2)), (block(1, 5), block(4, 1))] {
        let grown = |block: Quota| block.growing(2, 60 * MINUTE, 100 * MINUTE).unwrap();
        for [one, other] in [[one, other], [grown(one), grown(other)]] {
            let (mut key, mut strikes, mut blocks) = (Planned::new(&one), 0, 0);
            let mut closed: Option<(u64, u64)> = None;
            for second in 0..36_000 {
                let (plan, now) = ([&one, &other][second as usize % 2], TODAY + second * SECOND_US);
                let decision = key.decide(plan, now, 1, false).0;
                let until = now + decision.wait().duration().map_or(0, |wait| wait.as_micros() as u64);
                match (decision.is_allowed(), closed) {
                    (true, _) => {
                        assert!(closed.is_none_or(|(until, _)| until <= now), "open before its time");
                        (strikes, closed) = (strikes + 1, None);
                    }
                    (false, Some((told, _))) => assert_eq!(until, told, "neither plan changes the end of a block"),
                    (false, None) => {
                        let least = one.limit().min(other.limit());
                        let most = one.limit().max(other.limit());
                        assert!((least..=most).contains(&strikes), "{strikes} strikes: {one}, {other}");
                        let lengths = [&one, &other].map(|plan| plan.spec().lasting.length_us << blocks.min(20));
                        let longest_us = lengths.map(|us| us.min(3_600 * SECOND_US)).into_iter().max().unwrap_or(0);
                        assert!(until - now <= longest_us, "block {blocks} of {} µs", until - now);
                        blocks += u64::from(one.spec().lasting.memory_us > 0);
                        (strikes, closed) = (0, Some((until, now)));
                    }
                }
            }
        }
    }
}

/// Plans of any two kinds: no order of changes locks a key out, and none gives more than the larger plan, up to its
/// edges.
#[test]
fn alternating_plans_neither_lend_nor_lock_a_key_out() {
    let alone = |plan: Quota| (passed([Some(&plan), None], 30), passed([Some(&plan), Some(&plan)], 30), plan);
    let [tens, twenties] = [10, 20].map(|limit| plans(limit).into_iter().map(alone).collect::<Vec<_>>());
    let pairs = tens.iter().chain(&twenties).flat_map(|one| twenties.iter().map(move |other| (one, other)));
    for ((one_least, one_most, one), (other_least, other_most, other)) in pairs.step_by(stride()) {
        let passed = passed([Some(one), Some(other)], 30);
        let least = one_least.min(other_least) / 3;
        // A window whose oldest part counts in full gets less alone than its limit in each period.
        let each_minute = 61 * one.capacity().max(other.capacity());
        let most = *one_most.max(other_most).max(&each_minute);
        assert!((least..=most + most / 10).contains(&passed), "{passed}, not {least} to {most}: {one}, {other}");
    }
}

/// A window dated all units of a bucket anew with each change: the larger the limit, the less of it passed.
#[test]
fn alternating_bucket_and_window_pass_a_third_at_any_limit() {
    for limit in [50, 100, 400].into_iter().step_by(stride()) {
        let bucket = Quota::token_bucket(limit, MINUTE).unwrap();
        let window = Quota::sliding_window(limit, MINUTE).unwrap();
        for window in [window, window.buckets(6).unwrap(), window.oldest(Oldest::Counted).unwrap()] {
            let asked = limit + limit / 2;
            let least = passed([Some(&bucket), None], asked).min(passed([Some(&window), None], asked)) / 3;
            for order in [[&bucket, &window], [&window, &bucket]] {
                let passed = passed(order.map(Some), asked);
                assert!((least..=66 * limit).contains(&passed), "{passed}, not {least} to {}: {window}", 66 * limit);
            }
        }
    }
}

/// A look under another plan changes nothing, however often it is repeated.
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

/// Returns the units of a bucket that was full at [`TODAY`] and are in use after this time, rounded up.
fn in_use_of_bucket(limit: u64, after_us: u64) -> u64 {
    limit - (limit * after_us / MINUTE.as_micros() as u64).min(limit)
}

/// A bucket's units that become a window's and then a log's count at least until the bucket would have freed them, and
/// none counts for longer than a period after the last change. A window that leaves its oldest part out forgets that
/// part, as it does by itself. A window that weighs its oldest part enlarges it, so that it counts for what the bucket
/// had in use. A log then counts all of it: more than was used, but no more than the quota and its debt.
#[test]
fn bucket_that_becomes_a_window_and_then_a_log_forgets_nothing() {
    const STEPS: u64 = 240;
    let (minute_us, began) = (MINUTE.as_micros() as u64, TODAY + 7_654_321);
    let at = |step: u64| began + step * minute_us / STEPS;
    for limit in [1, 10, 930] {
        let [bucket, log] = [Quota::token_bucket(limit, MINUTE).unwrap(), Quota::sliding_log(limit, MINUTE).unwrap()];
        for window in plans_of(Algorithm::SlidingWindow, limit) {
            let is_weighted = window.spec().oldest == Oldest::Weighted;
            let early_us = match window.spec().oldest {
                Oldest::Dropped => minute_us / u64::from(window.spec().buckets),
                _ => 0,
            };
            let changes =
                (0..STEPS).step_by(17).flat_map(|first| (first..STEPS).step_by(23).map(move |next| (first, next)));
            for (first, second) in changes {
                let mut state = State::new(&bucket);
                assert!(state.decide(began, limit, false).0.is_allowed());
                let (state, as_window) = state.taken_over(&bucket, &window, at(first));
                let (state, as_log) = state.taken_over(&window, &log, at(second));
                assert_eq!((as_window, as_log), (Fit::Fits, Fit::Fits));
                for step in second..=second + STEPS {
                    let used = state.used(at(step)).units_ceil();
                    let least = in_use_of_bucket(limit, step * minute_us / STEPS + early_us);
                    let most = match (step < second + STEPS, is_weighted) {
                        (false, _) => 0,
                        (true, false) => limit,
                        (true, true) => 2 * limit, // with its debt
                    };
                    let case = format!("{window}, {first}, {second}, {step}");
                    assert!((least..=most).contains(&used), "{used}, not {least} to {most}: {case}");
                }
            }
        }
    }
}
