//! Bugs that were found, each with its story, and the edges that deserve an example.

use std::cell::Cell;
use std::time::Duration;

use crate::algorithm::Decider;
use crate::algorithm::entry_log::{EntryLog, Listed, LogEntries};
use crate::base::wait::Wait;
use crate::decision::Receipt;
use crate::quota::{Oldest, Quota};

use super::key::State;

const SECOND: Duration = Duration::from_secs(1);
const TODAY: u64 = 1_790_000_000_000_000;

/// A forced charge beyond the allowed debt had a receipt for all it asked for: giving it back freed what it never took.
#[test]
fn refund_of_a_forced_charge_returns_what_it_took() {
    for quota in [Quota::token_bucket(10, SECOND), Quota::step_bucket(10, SECOND), Quota::fixed_window(10, SECOND)] {
        let quota = quota.and_then(|quota| quota.max_debt(2)).unwrap();
        let mut key = State::new(&quota);
        key.decide(TODAY, 10, true);
        let receipt = key.decide(TODAY, 50, true).0.take_receipt().unwrap();
        assert_eq!(receipt.units(), 2, "{quota}");
        key.refund(TODAY, &receipt, receipt.units());
        assert_eq!(key.look(TODAY, 0).remaining(), 0, "{quota}");
        let nothing = {
            key.decide(TODAY, 50, true);
            key.decide(TODAY, 50, true).0.take_receipt()
        };
        assert_eq!(nothing, None, "{quota}");
    }
}

/// A request that came after another left the middle of a queue got the departure of the last one.
#[test]
fn queue_refund_returns_only_its_tail() {
    let mut key = State::new(&Quota::leaky_queue(10, SECOND).unwrap());
    let take = |key: &mut State| key.decide(TODAY, 1, false).0;
    let [mut first, mut second, mut third] = [take(&mut key), take(&mut key), take(&mut key)];
    assert_eq!(third.delay(), SECOND / 5);
    let [first, second, third] = [&mut first, &mut second, &mut third].map(|taken| taken.take_receipt().unwrap());
    key.refund(TODAY, &second, 1);
    assert_eq!(key.look(TODAY, 1).delay(), SECOND * 3 / 10, "it is in the middle");
    key.refund(TODAY, &third, 1);
    key.refund(TODAY, &second, 1);
    assert_eq!(key.look(TODAY, 1).delay(), SECOND / 10, "each was the last");
    key.refund(TODAY, &first, 1);
    assert_eq!(key.look(TODAY, 1).delay(), Duration::ZERO);
}

/// A receipt from before the quota was changed holds a numerator over another denominator: subtracting it underflowed.
#[test]
fn a_receipt_of_another_quota_is_met_without_harm() {
    let receipts = [(1, TODAY + 1, 999), (u64::MAX, u64::MAX, u64::MAX), (5, 0, 0), (3, TODAY + 40, 6), (0, TODAY, 1)];
    for quota in ["7 per s", "1 per s", "5/s step bucket", "5/s fixed window", "5/s sliding window", "5/s sliding log"]
    {
        let mut key = State::new(&quota.parse().unwrap());
        for (units, at, part) in receipts {
            key.decide(TODAY, 1, false);
            key.refund(TODAY, &Receipt::new(units, at, part), units);
            assert!(key.look(TODAY, 0).remaining() <= 7, "{quota}");
        }
    }
}

/// A clock that stepped back by more than a period moved the count into the window of now, which may end at once.
#[test]
fn a_window_moved_by_a_clock_lasts_a_whole_period() {
    let window = Quota::fixed_window(3, SECOND).unwrap();
    let dropped = Quota::sliding_window(3, SECOND).and_then(|quota| quota.oldest(Oldest::Dropped)).unwrap();
    for quota in [window, dropped] {
        let mut key = State::new(&quota);
        key.decide(TODAY + 10_000_000, 3, false);
        let back = TODAY + 999_999; // an edge is one microsecond away
        assert!(!key.decide(back, 1, false).0.is_allowed());
        assert!(!key.admits(back + 999_999, 1), "{quota}");
        assert!(key.admits(back + 1_000_001, 3), "{quota}: at the first edge a period later");
    }
}

/// A window that was full could not count another refusal, and then forgot to write what the clock's step did to it.
#[test]
fn counted_refusal_corrects_a_clock_that_stepped_back() {
    let quota = Quota::sliding_window(3, SECOND).and_then(|quota| quota.count_denied()).unwrap();
    let mut key = State::new(&quota);
    key.decide(TODAY + 10_000_000, 3, false);
    assert!(!key.decide(TODAY, 1, false).0.is_allowed());
    assert!(key.latest().unwrap() <= TODAY + 2_000_000, "{:?}", key.latest());
}

/// A log that counts how many of its entries were looked at.
struct Counted<'a> {
    log: Listed<'a>,
    seen: &'a Cell<usize>,
}

impl LogEntries for Counted<'_> {
    fn total(&self) -> u64 {
        self.log.total() // a limiter keeps the sum
    }

    fn newest(&self) -> Option<(u64, u64)> {
        self.log.newest()
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.log.iter().inspect(|_| self.seen.set(self.seen.get() + 1))
    }
}

#[test]
fn no_answer_walks_over_a_long_log() {
    for counts_denied in [false, true] {
        let quota = Quota::sliding_log(10_000, Duration::from_millis(20)).unwrap();
        let quota = if counts_denied { quota.count_denied().unwrap() } else { quota };
        let Decider::EntryLog(decider) = quota.decider() else { panic!("a log has dated entries") };
        let seen_by = |full: u64, now: u64, cost: u64| {
            let log: Vec<_> = (0..full).map(|nth| (TODAY + nth, 1)).collect();
            let seen = Cell::new(0);
            EntryLog::decide(decider, &Counted { log: Listed(&log), seen: &seen }, now, cost, false);
            seen.get()
        };
        let now = TODAY + 10_000;
        assert!(seen_by(9_990, now, 1) <= 8, "an ordinary admit: {}", seen_by(9_990, now, 1));
        assert!(seen_by(9_999, now, 1) <= 8, "the last one: {}", seen_by(9_999, now, 1));
        assert!(seen_by(10_000, now, 1) <= 16, "a refusal: {}", seen_by(10_000, now, 1));
        assert!(seen_by(10_000, now, 20_000) <= 16 || counts_denied, "one for good: {}", seen_by(10_000, now, 20_000));
        let leave = seen_by(10_000, TODAY + 20_010, 1);
        assert!(leave <= 64, "as many as leave, eleven, a few times over: {leave}");
    }
}

#[test]
fn windows_and_logs_are_free_again_at_exactly_a_period() {
    for quota in
        ["3/s fixed window, from the first request", "3/s sliding log", "3/s step bucket, from the first request"]
    {
        let mut key = State::new(&quota.parse().unwrap());
        assert!(key.decide(TODAY + 7, 3, false).0.is_allowed());
        assert!(!key.admits(TODAY + 7 + 999_999, 1), "{quota}");
        assert!(key.admits(TODAY + 7 + 1_000_000, 3), "{quota}");
    }
}

#[test]
fn a_queue_spaces_departures_and_bounds_its_length() {
    // As nginx with rate=10r/s burst=4 delay=2: one is due, two pass at once, two are spaced, the sixth is refused.
    let quota: Quota = "10/s leaky queue, queue 4, delay after 2".parse().unwrap();
    let mut key = State::new(&quota);
    let told: Vec<_> =
        (0..5).map(|_| key.decide(TODAY, 1, false).0).map(|told| (told.delay(), told.position())).collect();
    let tenth = Duration::from_millis(100);
    assert_eq!(told, [(Duration::ZERO, 0), (Duration::ZERO, 0), (Duration::ZERO, 0), (tenth, 1), (2 * tenth, 2)]);
    let refused = key.look(TODAY, 1);
    assert_eq!((refused.is_allowed(), refused.wait()), (false, Wait::After(tenth)));
}

/// A request of several units departed when its first unit was due, so that the others were above the rate.
#[test]
fn leaky_queue_spaces_departures_in_proportion_to_cost() {
    for (quota, costs, departures) in [
        ("10/s leaky queue, queue 20", [2, 2, 1, 1], [0, 200, 400, 500]),
        ("10/s leaky queue, queue 20, delay after 1", [2, 2, 1, 1], [0, 200, 300, 400]),
        ("10/s leaky queue, queue 20, delay after 2", [2, 2, 1, 1], [0, 100, 200, 300]),
        ("10/s leaky queue, queue 20, delay after 2", [5, 1, 3, 1], [0, 300, 600, 700]),
    ] {
        let mut key = State::new(&quota.parse().unwrap());
        let told = costs.map(|cost| key.decide(TODAY, cost, false).0.delay().as_millis());
        assert_eq!(told, departures, "{quota}");
    }
}

/// No interval of departures has more than its length gives, `delay_after` and the one that is due, or one request.
#[test]
fn leaky_queue_departures_keep_rate_times_length_and_burst() {
    let mut x = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = move |bound: u64| {
        x = x.wrapping_mul(0xd129_0f59_6c1d_4b4d).wrapping_add(0x1b87_3593);
        (x >> 33) % bound
    };
    for case in 0..2_000 {
        let delay_after = below(5);
        let quota = format!("10/s leaky queue, queue 30, delay after {delay_after}").parse().unwrap();
        let (mut key, mut now, mut departures) = (State::new(&quota), TODAY, Vec::new());
        for _ in 0..20 {
            now += below(4) * 50_000;
            let cost = 1 + below(6);
            let decision = key.decide(now, cost, false).0;
            if decision.is_allowed() {
                departures.push((now + decision.delay().as_micros() as u64, cost));
            }
        }
        assert!(departures.is_sorted_by_key(|(at, _)| *at), "first come, first served");
        for (from, (first, _)) in departures.iter().enumerate() {
            let (mut units, mut largest) = (0, 0);
            for (at, cost) in &departures[from..] {
                (units, largest) = (units + cost, largest.max(*cost));
                let most = (delay_after + 1).max(largest) * 100_000 + (at - first);
                assert!(units * 100_000 <= most, "case {case}: {departures:?} delay after {delay_after}");
            }
        }
    }
}

#[test]
fn closed_quota_takes_nothing_even_by_force() {
    for algorithm in ["token bucket", "step bucket", "leaky queue", "fixed window", "sliding window", "sliding log"] {
        let mut key = State::new(&format!("0/s {algorithm}").parse().unwrap());
        assert_eq!(key.look(TODAY, 1).wait(), Wait::Never, "{algorithm}");
        assert_eq!(key.decide(TODAY, 5, true).0.take_receipt(), None, "{algorithm}");
        assert!(key.look(TODAY, 0).is_allowed(), "{algorithm}: a look is no request");
    }
}
