//! Sliding window: counters of the current and of past sub-windows.
//!
//! # 1 Definition and laws
//!
//! The period is cut into `buckets` sub-windows at whole multiples of their length since the Unix epoch. A request of now
//! counts in the current one. The period that ends now covers the oldest sub-window only in part, and that one counts
//! [`Weighted`](crate::quota::Oldest::Weighted) (in proportion, rounded down), [`Dropped`](crate::quota::Oldest::Dropped) or
//! [`Counted`](crate::quota::Oldest::Counted) (in full). One bucket, weighted, is the classic estimate from two counters that
//! Cloudflare described in 2017; sixty are close to a log.
//!
//! It guarantees: `Counted`, never more than `limit` units in any trailing period; `Weighted` and `Dropped`, never more
//! than `limit` in any trailing `period·(1 − 1/buckets)` and `2·limit` in any period.
//!
//! In the long run `Dropped` admits exactly `limit` per period, `Weighted` less by at most what the oldest sub-window
//! weighs in its last microsecond (one unit, unless the limit is above the sub-window's microseconds), and `Counted`, as
//! it must, `limit` for each `period·(1 + 1/buckets)`: give it many buckets.
//!
//! # 2 Parameters
//!
//! The sub-window's length in whole microseconds; everything else is counts.
//!
//! # 3 State
//!
//! Dated counters, as an [`entry_log`](super::entry_log). With one bucket there are only two: they fit a [`Pair`] of the
//! instant at which both are past, and the two counts side by side.

use crate::decision::ChargeDecision;
use crate::quota::spec::{Oldest, Spec};

use super::entry_log::{Listed, Trail};
#[cfg(feature = "redis")]
use super::state::Numbers;
use super::state::{Answer, Layout, Next, Pair, PairAlgorithm, bits};
use super::used::Carried;

/// A sliding window of one bucket, whose two counters fit a pair.
///
/// It answers as an [`entry_log`](super::entry_log) of two entries would, in half as many instructions
/// (`benches/instructions.rs`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoCounters {
    rule: Trail,
    period_us: u64,
    limit: u64,
    count_denied: bool,
    /// Bits of one counter.
    width: u32,
}

/// Returns whether a sliding window's counters fit a pair.
pub(crate) fn fits_pair(spec: &Spec) -> bool {
    spec.buckets == 1 && bits(spec.limit + spec.debt) <= 32
}

/// The counter of the sub-window that a request of now belongs to, and the counter before.
#[derive(Clone, Copy)]
struct Counters {
    start: u64,
    before: u64,
    current: u64,
    /// The clock stepped back by more than a period, and the counters came along.
    moved: bool,
}

impl TwoCounters {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self {
            rule: Trail::new(spec),
            period_us: spec.period_us,
            limit: spec.limit,
            count_denied: spec.count_denied,
            width: bits(spec.limit + spec.debt),
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::of(2 * self.width, Some(self.period_us), 3 * self.period_us)
    }

    /// Returns the state that the Lua twin keeps as an instant and two counts.
    #[cfg(feature = "redis")]
    pub(crate) fn pair(&self, at: u64, before: u32, current: u32) -> Pair {
        Pair { at, n: u64::from(before) << self.width | u64::from(current) }
    }

    #[inline]
    fn counts(&self, state: Pair) -> (u64, u64) {
        (state.n >> self.width, state.n & ((1 << self.width) - 1))
    }

    /// Returns the counters that still count.
    #[inline(always)]
    fn view(&self, state: Option<Pair>, now: u64) -> Counters {
        let (period_us, start) = (self.period_us, self.rule.start_of(now));
        let none = Counters { start, before: 0, current: 0, moved: false };
        let Some(state) = state else { return none };
        let (before, current) = self.counts(state);
        let kept = |before| if self.rule.oldest() == Oldest::Dropped { 0 } else { before };
        match state.at {
            at if at == start + 2 * period_us => Counters { before: kept(before), current, ..none },
            at if at == start + period_us => Counters { before: kept(current), ..none },
            at if at < start + period_us => none,
            _ => self.stepped_back(state, now),
        }
    }

    /// Returns the counters after the clock stepped back. It stands still, or, from further ahead than a period, the
    /// counters come along.
    #[cold]
    fn stepped_back(&self, state: Pair, now: u64) -> Counters {
        let (before, current) = self.counts(state);
        let start = state.at - 2 * self.period_us;
        if start - self.rule.start_of(now) <= self.period_us {
            let before = if self.rule.oldest() == Oldest::Dropped { 0 } else { before };
            return Counters { start, before, current, moved: false };
        }
        let current = (before + current).min(self.most());
        Counters { start: now.next_multiple_of(self.period_us), before: 0, current, moved: true }
    }

    /// Returns the units in use.
    #[inline]
    fn used(&self, counters: Counters, now: u64) -> u64 {
        counters.current + self.rule.partly(counters.before, now.saturating_sub(counters.start))
    }

    /// Returns the time until at most `target` units are in use, if nothing else comes.
    #[inline(never)]
    fn wait(&self, Counters { start, before, current, .. }: Counters, now: u64, target: u64) -> u64 {
        let leaves = match target.checked_sub(current) {
            Some(room) => self.rule.leaves(start.saturating_sub(self.period_us), before, room),
            None => self.rule.leaves(start, current, target),
        };
        leaves.saturating_sub(now)
    }

    #[inline]
    fn store(&self, Counters { start, before, current, .. }: Counters) -> Next {
        match (before, current) {
            (0, 0) => Next::Clear,
            (before, 0) => Next::Set(Pair { at: start + self.period_us, n: before }),
            _ => Next::Set(Pair { at: start + 2 * self.period_us, n: before << self.width | current }),
        }
    }

    /// Describes counters, of which `newest` is the newest one that is not zero.
    #[inline(always)]
    fn describe(
        &self,
        counters: Counters,
        newest: (u64, u64),
        used: u64,
        now: u64,
        retry_us: Option<u64>,
    ) -> ChargeDecision {
        let remaining = self.limit.saturating_sub(used);
        let reset_us = if used > 0 { self.rule.leaves(newest.0, newest.1, 0).saturating_sub(now) } else { 0 };
        let window_us = match retry_us {
            Some(wait) if wait > 0 => wait,
            _ if remaining > 0 => (counters.start + self.period_us).saturating_sub(now),
            _ if self.limit == 0 => 0,
            _ => self.wait(counters, now, self.limit - 1),
        };
        ChargeDecision::found(self.limit, remaining, reset_us, window_us, retry_us)
    }

    /// Decides on a charge that leaves nothing or takes nothing. If denied requests count, the reported wait counts this
    /// one as well.
    #[cold]
    #[inline(never)]
    fn decide_rest(&self, mut counters: Counters, now: u64, cost: u64, force: bool) -> Answer {
        let used = self.used(counters, now);
        let is_denied = used.saturating_add(cost) > self.limit && !force && cost > 0;
        let room = match is_denied {
            false => self.most().saturating_sub(used),
            true if self.count_denied => self.limit.saturating_sub(counters.current),
            true => 0,
        };
        let units = cost.min(room);
        counters.current += units;
        let next = if units > 0 || counters.moved && cost > 0 { self.store(counters) } else { Next::Keep };
        let used = self.used(counters, now);
        let retry_us = match self.limit.checked_sub(cost) {
            _ if !is_denied => Some(0),
            Some(target) if used > target => Some(self.wait(counters, now, target)),
            target => target.map(|_| 0),
        };
        let Counters { start, before, current, .. } = counters;
        let newest = if current > 0 { (start, current) } else { (start.saturating_sub(self.period_us), before) };
        let decision = self.describe(counters, newest, used, now, retry_us);
        Answer { decision: decision.receipted(if is_denied { 0 } else { units }, start, 0), next }
    }
}

impl PairAlgorithm for TwoCounters {
    #[inline(always)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Answer {
        let counters = self.view(state, now);
        let used = self.used(counters, now).saturating_add(cost);
        if cost == 0 || used >= self.limit {
            return self.decide_rest(counters, now, cost, force);
        }
        let after = Counters { current: counters.current + cost, ..counters };
        let Counters { start, before, current, .. } = after;
        let decision = self.describe(after, (start, current), used, now, Some(0)).receipted(cost, start, 0);
        Answer { decision, next: Next::Set(Pair { at: start + 2 * self.period_us, n: before << self.width | current }) }
    }

    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let (mut before, mut current) = self.counts(state);
        let start = state.at.saturating_sub(2 * self.period_us);
        let counter = match own.at {
            at if at == start => &mut current,
            at if at.saturating_add(self.period_us) == start => &mut before,
            _ => return Next::Keep,
        };
        if units.min(*counter) == 0 || own.at.saturating_add(self.rule.life_us()) <= now {
            return Next::Keep;
        }
        *counter = counter.saturating_sub(units);
        self.store(Counters { start, before, current, moved: false })
    }

    fn could_be(&self, state: Pair) -> bool {
        let (before, current) = self.counts(state);
        before <= self.most() && current <= self.most() && state.at % self.period_us == 0
    }

    #[inline]
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        state.at.saturating_sub(now) > 3 * self.period_us
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        let (before, current) = self.counts(state);
        let start = state.at.saturating_sub(2 * self.period_us);
        let entries = [(start.saturating_sub(self.period_us), before), (start, current)];
        self.rule.carried(&Listed(if before > 0 { &entries } else { &entries[1..] }), now)
    }

    /// Takes over the newest two entries. Older ones count no longer.
    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let entries = self.rule.take_over(carried, now);
        let (start, current) = *entries.last()?;
        let before = entries.iter().find(|entry| entry.0 + self.period_us == start).map_or(0, |entry| entry.1);
        self.store(Counters { start, before, current, moved: false }).state()
    }

    fn most(&self) -> u64 {
        self.rule.most()
    }

    fn longest_us(&self) -> u64 {
        self.rule.longest_us()
    }

    #[cfg(feature = "redis")]
    fn numbers(&self, cost: u64, force: bool) -> Numbers {
        // The numbers of an entry log that a window of one bucket needs.
        let [cost, bound, limit, most, period, _, oldest, _, count_denied, _] = self.rule.numbers(cost, force);
        Numbers::from_slice(&[cost, bound, limit, most, period, oldest, count_denied])
    }
}
