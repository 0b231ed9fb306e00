//! Sliding window: counters for the current sub-window and for past sub-windows.
//!
//! # 1 Definition and laws
//!
//! The period is cut into `buckets` sub-windows at whole multiples of their length since the Unix epoch. A request
//! counts in the current sub-window. The period that ends now covers only a part of the oldest sub-window. The
//! oldest sub-window counts in proportion to this part, rounded down ([`Weighted`](crate::quota::Oldest::Weighted)),
//! not at all ([`Dropped`](crate::quota::Oldest::Dropped)) or in full ([`Counted`](crate::quota::Oldest::Counted)).
//! One weighted bucket is the classic estimate from two counters that Cloudflare described in 2017. Sixty buckets
//! are close to a sliding log.
//!
//! `Counted` guarantees at most `limit` units in any trailing period. `Weighted` and `Dropped` guarantee at most
//! `limit` units in any trailing `period·(1 − 1/buckets)`, and at most `2·limit` units in any period.
//!
//! In the long run, `Dropped` admits exactly `limit` units per period. `Weighted` admits fewer units per period
//! than `limit`. The difference is at most the number of units that the oldest sub-window still counts when the
//! period covers only the last microsecond of this sub-window. This number is one, unless the limit is higher than
//! the number of microseconds in a sub-window. `Counted` admits only `limit` units per `period·(1 + 1/buckets)`,
//! which its guarantee requires. Use many buckets with `Counted`.
//!
//! # 2 Parameters
//!
//! The length of a sub-window in whole microseconds. All other parameters are counts.
//!
//! # 3 State
//!
//! Dated counters, as an [`entry_log`](super::entry_log). With one bucket there are only two counters. The two
//! counters fit a [`Pair`]: the instant at which neither counts any more, and a number with both counts.

use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::quota::spec::{Oldest, Spec};

use super::entry_log::{Edit, EntryLog, Listed};
#[cfg(feature = "_redis")]
use super::state::LuaNumbers;
use super::state::{Layout, Next, Pair, PairAlgorithm, Transition, bits};
use super::used::Carried;

/// A sliding window of one bucket, whose two counters fit a pair.
///
/// The two counters are an [`entry_log`](super::entry_log) with two entries. A charge that leaves some units free is
/// decided from the counters directly, which takes half as many instructions (`benches/instructions`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoCounterWindow {
    log: EntryLog,
    period_us: u64,
    limit: u64,
    /// Bits of one counter.
    width: u32,
}

/// Returns whether the sliding window has only two counters, which fit a pair.
pub(crate) fn fits_pair(spec: &Spec) -> bool {
    spec.buckets == 1 && bits(spec.limit + spec.debt) <= 32
}

/// The two current counters, the older one first, each with the start of its sub-window.
type Counters = SmallVec<[(u64, u64); 2]>;

impl TwoCounterWindow {
    pub(crate) fn new(spec: &Spec) -> Self {
        let width = bits(spec.limit + spec.debt);
        Self { log: EntryLog::new(spec), period_us: spec.period_us, limit: spec.limit, width }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::of(2 * self.width, Some(self.period_us), 3 * self.period_us)
    }

    /// Returns the pair for a state that the Lua twin stores as an instant and two counts.
    #[cfg(feature = "_redis")]
    pub(crate) fn pair(&self, at: u64, before: u32, current: u32) -> Pair {
        Pair { at, n: u64::from(before) << self.width | u64::from(current) }
    }

    #[inline]
    fn counts(&self, state: Pair) -> (u64, u64) {
        (state.n >> self.width, state.n & ((1 << self.width) - 1))
    }

    /// Returns the state for the counts of the sub-window that begins at `start` and of the sub-window
    /// before it.
    #[inline]
    fn state(&self, start: u64, before: u64, current: u64) -> Pair {
        Pair { at: start + 2 * self.period_us, n: before << self.width | current }
    }

    fn unpack(&self, state: Option<Pair>) -> Counters {
        let Some(state) = state else { return Counters::new() };
        let (before, current) = self.counts(state);
        let start = state.at.saturating_sub(2 * self.period_us);
        let counters = [(start.saturating_sub(self.period_us), before), (start, current)];
        counters.into_iter().filter(|counter| counter.1 > 0).collect()
    }

    /// Packs the newest two counters. Older ones count no longer.
    fn pack(&self, counters: &[(u64, u64)]) -> Option<Pair> {
        let (start, current) = *counters.last()?;
        let before = counters.iter().find(|counter| counter.0 + self.period_us == start).map_or(0, |before| before.1);
        Some(self.state(start, before, current))
    }

    fn edited(&self, mut counters: Counters, edit: Edit) -> Next {
        if let Some(start) = edit.move_to {
            let total: u64 = counters.iter().map(|counter| counter.1).sum();
            counters = Counters::from_slice(&[(start, total.min(self.most()))]);
        }
        counters.drain(..edit.drop);
        match (edit.add, counters.last_mut()) {
            (Some((start, units)), Some(newest)) if newest.0 == start => newest.1 += units,
            (add, _) => counters.extend(add),
        }
        self.pack(&counters).map_or(Next::Clear, Next::Set)
    }

    #[cold]
    #[inline(never)]
    fn decide_as_log(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let counters = self.unpack(state);
        let answer = self.log.decide(&Listed(&counters), now, cost, force);
        Transition {
            decision: answer.decision,
            next: answer.edit.map_or(Next::Keep, |edit| self.edited(counters, edit)),
        }
    }
}

impl PairAlgorithm for TwoCounterWindow {
    #[inline(always)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let (period_us, start) = (self.period_us, self.log.start_of(now));
        let (at, counts) = state.map_or((0, (0, 0)), |state| (state.at, self.counts(state)));
        let (before, current) = match at {
            at if at == start + 2 * period_us => counts,
            at if at == start + period_us => (counts.1, 0),
            at if at < start + period_us => (0, 0),
            _ => return self.decide_as_log(state, now, cost, force), // the clock stepped back
        };
        let before = if self.log.oldest() == Oldest::Dropped { 0 } else { before };
        let used = current + self.log.partly(before, now - start);
        let used = used.saturating_add(cost);
        if cost == 0 || used >= self.limit {
            return self.decide_as_log(state, now, cost, force);
        }
        let current = current + cost;
        let reset_us = self.log.leaves(start, current, 0) - now;
        let decision = ChargeDecision::found(self.limit, self.limit - used, reset_us, start + period_us - now, Some(0));
        Transition { decision: decision.receipted(cost, start, 0), next: Next::Set(self.state(start, before, current)) }
    }

    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let mut counters = self.unpack(Some(state));
        let Some((start, units)) = self.log.refundable(&Listed(&counters), now, units, own.at) else {
            return Next::Keep;
        };
        counters.iter_mut().filter(|counter| counter.0 == start).for_each(|counter| counter.1 -= units);
        counters.retain(|counter| counter.1 > 0);
        self.pack(&counters).map_or(Next::Clear, Next::Set)
    }

    fn could_be(&self, state: Pair) -> bool {
        let (before, current) = self.counts(state);
        before <= self.most() && current <= self.most() && state.at % self.period_us == 0
    }

    #[inline]
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        state.at.saturating_sub(now) > 3 * self.period_us
    }

    /// A new count begins with each sub-window, because the oldest counter is then dropped.
    #[inline(always)]
    fn counts_anew(&self, state: Option<Pair>, now: u64) -> bool {
        state.is_none_or(|state| state.at <= now + self.period_us)
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        self.log.carried(&Listed(&self.unpack(Some(state))), now)
    }

    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        self.pack(&self.log.take_over(carried, now))
    }

    fn most(&self) -> u64 {
        self.log.most()
    }

    fn longest_us(&self, _now: u64) -> u64 {
        self.log.longest_us()
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        // A sliding window of one bucket uses only these numbers of its entry log.
        let [cost, bound, limit, most, period, _, oldest, _, count_denied, _] = self.log.numbers(cost, force);
        LuaNumbers::from_slice(&[cost, bound, limit, most, period, oldest, count_denied])
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    #[test]
    fn counters_that_move_with_the_clock_hold_at_most_the_limit() {
        let minute = 60_000_000;
        let quota = Quota::sliding_window(10, Duration::from_secs(60)).and_then(|quota| quota.max_debt(0)).unwrap();
        let window = TwoCounterWindow::new(quota.spec());
        let ahead = window.state(10 * minute, 10, 10);
        let answer = window.decide(Some(ahead), 7 * minute, 1, false);
        assert!(!answer.decision.is_allowed());
        assert_eq!(answer.next, Next::Set(window.state(7 * minute, 0, 10)));
    }
}
