//! Sliding window: counters of the current and of past sub-windows.
//!
//! # 1 Definition and laws
//!
//! The period is cut into `buckets` sub-windows at whole multiples of their length since the Unix epoch. A request of now
//! counts in the current one. The period that ends now covers the oldest sub-window only in part, and that one counts
//! [`Weighted`](crate::Oldest::Weighted) (in proportion, rounded down), [`Dropped`](crate::Oldest::Dropped) or
//! [`Counted`](crate::Oldest::Counted) (in full). One bucket, weighted, is the classic estimate from two counters that
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
//! Dated counters, as a [`trail`](super::trail). With one bucket there are only two: they fit a [`Pair`] of the instant at
//! which both are past, and the two counts side by side.

use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::quota::{Oldest, Spec};

#[cfg(feature = "redis")]
use super::Numbers;
use super::carry::Carried;
use super::divisor::Divisor;
use super::trail::{Edit, Entries, Trail};
use super::{Answer, Fullness, Layout, Next, Pair, bits};

/// A sliding window of one bucket, whose two counters fit a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TwoCounters {
    trail: Trail,
    /// Bits of one counter.
    width: u32,
    limit: u64,
    /// The sub-window, which is the period.
    grain: Divisor,
    oldest: Oldest,
}

/// Whether a sliding window's counters fit a pair.
pub(crate) fn fits_pair(spec: &Spec) -> bool {
    spec.buckets == 1 && bits(spec.limit + spec.debt) <= 32
}

impl TwoCounters {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self {
            trail: Trail::new(spec),
            width: bits(spec.limit + spec.debt),
            limit: spec.limit,
            grain: Divisor::new(spec.period_us),
            oldest: spec.oldest,
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::of(2 * self.width, Some(self.trail.grain_us()), 3 * self.trail.grain_us())
    }

    // 4 decide ────────────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline]
    pub(crate) fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Answer {
        match self.admit_plainly(state, now, cost) {
            Some(answer) => answer,
            None => self.decide_by_trail(state, now, cost, force),
        }
    }

    #[cold]
    #[inline(never)]
    fn decide_by_trail(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Answer {
        let counters = self.read(state);
        let answer = self.trail.decide(&counters, now, cost, force);
        let next = answer.edit.map_or(Next::Keep, |edit| self.write(&counters, edit));
        Answer { decision: answer.decision, next }
    }

    /// The usual case, and what the trail would answer: something is left after a cost that is admitted, and the clock did
    /// not step back.
    #[inline(always)]
    fn admit_plainly(&self, state: Option<Pair>, now: u64, cost: u64) -> Option<Answer> {
        let period_us = self.grain.get();
        let start = self.grain.round_down(now);
        let passed = now - start;
        let mask = (1 << self.width) - 1;
        let (before, current) = match state {
            Some(state) if state.at == start + 2 * period_us => (state.n >> self.width, state.n & mask),
            Some(state) if state.at == start + period_us => (state.n & mask, 0),
            Some(state) if state.at > start + 2 * period_us => return None,
            _ => (0, 0),
        };
        let (kept, counted) = match self.oldest {
            Oldest::Dropped => (0, 0),
            Oldest::Counted => (before, before),
            Oldest::Weighted => {
                (before, self.grain.floor(before.checked_mul(period_us - passed).filter(|n| n >> 63 == 0)?))
            }
        };
        let used = counted + current + cost.min(self.limit.saturating_add(1));
        if used >= self.limit || cost == 0 {
            return None;
        }
        let current = current + cost;
        let reset_us = match self.oldest {
            Oldest::Dropped => period_us - passed,
            Oldest::Counted => 2 * period_us - passed,
            Oldest::Weighted => 2 * period_us - passed - period_us.div_ceil(current) + 1,
        };
        let decision = ChargeDecision::found(self.limit, self.limit - used, reset_us, period_us - passed, Some(0))
            .receipted(cost, start, 0);
        let next = Next::Set(Pair { at: start + 2 * period_us, n: kept << self.width | current });
        Some(Answer { decision, next })
    }

    pub(crate) fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let mut counters = self.read(Some(state));
        let Some((start, units)) = self.trail.refundable(&counters, now, units, own.at) else {
            return Next::Keep;
        };
        for counter in &mut counters.0 {
            if counter.0 == start {
                counter.1 -= units;
            }
        }
        self.write(&counters, Edit::default())
    }

    /// What the Lua twin is told of a charge.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self, cost: u64, force: bool) -> Numbers {
        // Of a trail's numbers those that a window of one bucket needs.
        let [cost, bound, limit, most, period, _, oldest, _, count_denied, _] = self.trail.numbers(cost, force);
        Numbers::from_slice(&[cost, bound, limit, most, period, oldest, count_denied])
    }

    /// Whether the twin's products need more than 53 bits.
    #[cfg(feature = "redis")]
    pub(crate) fn is_wide(&self) -> bool {
        self.trail.is_wide()
    }

    /// The state that the twin keeps as an instant and two counts.
    #[cfg(feature = "redis")]
    pub(crate) fn pair(&self, at: u64, before: u32, current: u32) -> Pair {
        Pair { at, n: u64::from(before) << self.width | u64::from(current) }
    }

    pub(super) fn carried(&self, state: Pair, now: u64) -> Carried {
        self.trail.carried(&self.read(Some(state)), now)
    }

    pub(super) fn trail(&self) -> &Trail {
        &self.trail
    }

    /// The counters that still count.
    pub(super) fn live(&self, state: Pair, now: u64) -> Vec<(u64, u64)> {
        self.trail.live(&self.read(Some(state)), now)
    }

    /// The state of these counters.
    pub(super) fn of(&self, entries: &[(u64, u64)]) -> Option<Pair> {
        match self.write(&Counters(entries.iter().copied().collect()), Edit::default()) {
            Next::Set(pair) => Some(pair),
            _ => None,
        }
    }

    pub(crate) fn could_be(&self, state: Pair) -> bool {
        let most = self.trail.most();
        let (before, in_it) = (state.n >> self.width, state.n & ((1 << self.width) - 1));
        before <= most && in_it <= most && state.at % self.trail.grain_us() == 0
    }

    /// Whether a decision at `now` would rewind this state.
    #[inline]
    pub(crate) fn is_clamped(&self, state: Pair, now: u64) -> bool {
        state.at.saturating_sub(now) > 3 * self.trail.grain_us()
    }

    pub(crate) fn fullness(&self, state: Pair, now: u64) -> Fullness {
        self.trail.fullness(&self.read(Some(state)), now)
    }

    fn read(&self, state: Option<Pair>) -> Counters {
        let mut counters = SmallVec::new();
        if let Some(state) = state {
            let grain_us = self.trail.grain_us();
            let current = state.at.saturating_sub(2 * grain_us);
            let (before, in_it) = (state.n >> self.width, state.n & ((1 << self.width) - 1));
            if before > 0 {
                counters.push((current.saturating_sub(grain_us), before));
            }
            if in_it > 0 {
                counters.push((current, in_it));
            }
        }
        Counters(counters)
    }

    fn write(&self, counters: &Counters, edit: Edit) -> Next {
        let grain_us = self.trail.grain_us();
        let mut left: SmallVec<[(u64, u64); 3]> = counters.0.iter().skip(edit.drop).copied().collect();
        if let Some(move_to) = edit.move_to {
            left.iter_mut().for_each(|(start, _)| *start = (*start).min(move_to));
        }
        left.extend(edit.add);
        let Some(current) = left.iter().filter(|(_, units)| *units > 0).map(|(start, _)| *start).max() else {
            return Next::Clear;
        };
        let sum = |from: u64| -> u64 {
            let units: u64 = left.iter().filter(|(start, _)| *start == from).map(|(_, units)| *units).sum();
            units.min(self.trail.most())
        };
        let before = if current >= grain_us { sum(current - grain_us) } else { 0 };
        Next::Set(Pair { at: current + 2 * grain_us, n: before << self.width | sum(current) })
    }
}

/// The two counters, without those that are zero.
struct Counters(SmallVec<[(u64, u64); 3]>);

impl Entries for Counters {
    fn total(&self) -> u64 {
        self.0.iter().map(|(_, units)| units).sum()
    }

    fn newest(&self) -> Option<(u64, u64)> {
        self.0.last().copied()
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }
}
