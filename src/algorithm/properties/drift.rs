//! No drift: what a greedy client gets over a long time is the quota's rate to the last unit.

use std::time::Duration;

use crate::base::sampling::cases;
use crate::quota::{Anchor, Oldest, Quota};

use super::key::State;

const DAY: Duration = Duration::from_secs(86_400);

/// Takes all that is left at each instant that `next` returns, until `end`. Returns the sum.
fn greedy(quota: &Quota, begin: u64, end: u64, mut next: impl FnMut(u64) -> u64) -> u128 {
    let mut key = State::new(quota);
    let (mut now, mut taken) = (begin, 0);
    loop {
        let left = key.look(now, 0).remaining();
        assert!(key.decide(now, left, false).0.is_allowed());
        assert!(!key.admits(now, 1), "all is taken");
        taken += u128::from(left);
        if now == end {
            return taken;
        }
        now = next(now).min(end);
    }
}

/// Steps of 0 to `most` µs, without a pattern.
fn uneven(most: u64) -> impl FnMut(u64) -> u64 {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    move |now| {
        x = x.wrapping_mul(0xd129_0f59_6c1d_4b4d).wrapping_add(0x1b87_3593);
        now + (x >> 20) % (most + 1)
    }
}

#[test]
fn bucket_admits_burst_and_rate_times_time_exactly() {
    let second = Duration::from_secs(1);
    for (limit, period, burst) in [
        (7, second, 7),
        (7, second, 2),
        (99_999, second, 99_999),
        (99_999, second, 3),
        (10_000_000, second, 10_000_000),
        (4_294_967_295, second, 4_294_967_295),
        (3, Duration::from_micros(7), 3),
        (3, 7 * DAY, 3),
        (1, 30 * DAY, 2),
        (1, 366 * DAY, 2),
        (10_000_000_000_000, 30 * DAY, 10_000_000_000_000),
        (999_999_999_999_999, 366 * DAY, 999_999_999_999_998),
        (999_999_999_999_989, second, 999_999_999_999_999),
    ] {
        let quota = Quota::gcra(limit, period).and_then(|quota| quota.burst(burst)).unwrap();
        // Looking again before the bucket is full, else what would overflow is lost, and rightly. Part of one may be
        // left.
        let full_us = (u128::from(burst - 1) * period.as_micros() / u128::from(limit)) as u64;
        for begin in [0, 1_790_000_000_000_001] {
            let length_us = (full_us * 20_000).clamp(20_000, 3_000_000_000_000_000 - 7);
            let admitted = greedy(&quota, begin, begin + length_us, uneven(full_us));
            let flowed = u128::from(limit) * u128::from(length_us) / period.as_micros();
            assert_eq!(admitted, u128::from(burst) + flowed, "{quota} for {length_us} µs");
        }
    }
}

#[test]
fn honest_waits_admit_one_unit_per_interval() {
    for (limit, period_us) in [(7, 1_000_000), (99_999, 1_000_000), (3, 7), (13, 604_800_000_000), (999_983, 1_000_003)]
    {
        let quota = Quota::gcra(limit, Duration::from_micros(period_us)).and_then(|quota| quota.burst(2)).unwrap();
        let mut key = State::new(&quota);
        let begin = 1_790_000_000_000_000;
        let mut now = begin;
        assert!(key.decide(now, 1, false).0.is_allowed());
        for nth in 1..=20_000_u64 {
            assert!(key.decide(now, 1, false).0.is_allowed());
            now += key.look(now, 1).wait().duration().map_or(0, |wait| wait.as_micros() as u64);
            // At ⌈n · period/limit⌉: rounded once, not once for each.
            assert_eq!(now - begin, (nth * period_us).div_ceil(limit), "the {nth}-th of {quota}");
        }
    }
}

#[test]
fn strict_spacing_is_the_interval_rounded_up() {
    for (limit, period_us) in [(7_u64, 1_000_000_u64), (99_999, 1_000_000), (3, 7), (1, 1), (10_000_000, 1_000_000)] {
        let quota = Quota::gcra(limit, Duration::from_micros(period_us)).unwrap();
        let mut key = State::new(&quota);
        for nth in 0..100 {
            let now = nth * period_us.div_ceil(limit);
            assert!(key.decide(now, 1, false).0.is_allowed(), "{quota}");
            let wait = key.look(now, 1).wait().duration().map_or(0, |wait| wait.as_micros() as u64);
            assert_eq!(wait, period_us.div_ceil(limit), "{quota}");
        }
    }
}

#[test]
fn steps_and_windows_admit_exactly_their_limit_for_each_edge() {
    let period = Duration::from_micros(1_000_003);
    let (begin, edges) = (1_790_000_000_000_000, 5_000_u64);
    let end = begin + edges * 1_000_003;
    let crossed = u128::from(end / 1_000_003 - begin / 1_000_003);
    for quota in [Quota::step_bucket(7, period).unwrap(), Quota::fixed_window(7, period).unwrap()] {
        assert_eq!(greedy(&quota, begin, end, uneven(900_000)), 7 * (1 + crossed), "{quota}");
        let own = quota.anchor(Anchor::FirstRequest).unwrap();
        // Its edges are wherever it finds them, when it asks at each.
        assert_eq!(greedy(&own, begin, end, |now| now + 1_000_003), 7 * (1 + u128::from(edges)), "{own}");
    }
}

#[test]
fn a_log_admits_exactly_its_limit_for_each_period() {
    let quota = Quota::sliding_log(9, Duration::from_micros(1_000)).unwrap();
    let periods = u64::from(cases(1_000));
    assert_eq!(greedy(&quota, 5, 5 + 1_000 * periods, |now| now + 1), 9 * (u128::from(periods) + 1));
}

/// Returns the units that a client gets in each sub-window if it asks at each microsecond.
fn by_sub_window(quota: &Quota, buckets: u64, grain_us: u64, count: u64) -> Vec<u64> {
    let mut key = State::new(quota);
    let mut taken = vec![0; count as usize];
    for now in 0..count * grain_us {
        let left = key.look(now, 0).remaining();
        key.decide(now, left, false);
        taken[(now / grain_us) as usize] += left;
    }
    taken.split_off(buckets as usize)
}

#[test]
fn sliding_window_admits_what_its_oldest_setting_allows() {
    for buckets in [1, 2, 3, 6] {
        for limit in [1, 5, 12, 100] {
            let grain_us = 20;
            let period = Duration::from_micros(grain_us * u64::from(buckets));
            let quota = Quota::sliding_window(limit, period).and_then(|quota| quota.buckets(buckets)).unwrap();
            let weighted = by_sub_window(&quota, buckets.into(), grain_us, 200);
            for trailing in weighted.windows(buckets as usize) {
                let admitted: u64 = trailing.iter().sum();
                let below = limit.div_ceil(grain_us); // what the oldest weighs in its last microsecond
                assert!((limit.saturating_sub(below)..=2 * limit).contains(&admitted), "{admitted} of {quota}");
            }
            let dropped = by_sub_window(&quota.oldest(Oldest::Dropped).unwrap(), buckets.into(), grain_us, 200);
            assert!(
                dropped.windows(buckets as usize).all(|trailing| trailing.iter().sum::<u64>() == limit),
                "{dropped:?}"
            );
            // The oldest counts in full while any of it is in the period: limit units for each buckets + 1 sub-windows.
            let counted = by_sub_window(&quota.oldest(Oldest::Counted).unwrap(), buckets.into(), grain_us, 200);
            let sums = counted.windows(buckets as usize + 1).map(|trailing| trailing.iter().sum::<u64>());
            assert!(sums.into_iter().all(|sum| sum == limit), "{counted:?}");
        }
    }
}
