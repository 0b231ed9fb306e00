//! Meter: a counter that is never reset by time.
//!
//! # 1 Definition and laws
//!
//! Units are counted until the limit is reached. The count is forgotten after one period in which nothing was
//! added to it. This period is the retention. During the retention an operator can read, settle and reset the
//! count.
//!
//! A meter guarantees that every unit is counted once, and that no unit above the limit is counted. Units that were
//! counted under a larger limit stay counted.
//!
//! # 2 Parameters
//!
//! Limit and retention.
//!
//! # 3 State
//!
//! A [`Pair`]: the instant at which the count is forgotten, and the count. If the clock steps back, the instant is at
//! most the new time plus one retention.

use crate::decision::ChargeDecision;
use crate::quota::spec::Spec;

use super::state::{Layout, Next, Pair, PairAlgorithm, TakeMode, Transition};
#[cfg(feature = "_redis")]
use super::state::{LuaNumbers, UNBOUNDED, numbers};
use super::used::{Carried, Dated, Used};

/// Decides by a meter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    limit: u64,
    retention_us: u64,
}

impl Meter {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self { limit: spec.limit, retention_us: spec.period_us }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::Pair
    }

    /// Returns the count, and whether the clock stepped back.
    fn view(&self, state: Option<Pair>, now: u64) -> (Pair, bool) {
        let latest = now + self.retention_us;
        match state {
            Some(state) if state.at > latest => (Pair { at: latest, ..state }, true),
            Some(state) if state.at > now => (state, false),
            _ => (Pair { at: latest, n: 0 }, false),
        }
    }

    fn describe(&self, found: Pair, now: u64, retry_us: Option<u64>) -> ChargeDecision {
        let left_us = found.at - now;
        let reset_us = if found.n == 0 { 0 } else { left_us };
        ChargeDecision::found(self.limit, self.limit.saturating_sub(found.n), reset_us, left_us, retry_us)
    }
}

impl PairAlgorithm for Meter {
    #[inline(never)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let (found, moved) = self.view(state, now);
        let kept = if moved && cost > 0 { Next::Set(found) } else { Next::Keep };
        let wanted = found.n.saturating_add(cost);
        if wanted > self.limit && !force && cost > 0 {
            let retry_us = (cost <= self.limit).then_some(found.at - now);
            return Transition { decision: self.describe(found, now, retry_us), next: kept };
        }
        let count = wanted.min(self.limit.max(found.n));
        if count == found.n {
            return Transition { decision: self.describe(found, now, Some(0)), next: kept };
        }
        let after = Pair { at: now + self.retention_us, n: count };
        let decision = self.describe(after, now, Some(0)).receipted(count - found.n, after.at, 0);
        Transition { decision, next: Next::Set(after) }
    }

    /// A charge on refusal is denied, like any other charge, if the count plus the cost would exceed the limit.
    fn decide_how(&self, state: Option<Pair>, now: u64, cost: u64, how: TakeMode) -> Transition {
        let (cost, _) = how.plainly(cost);
        self.decide(state, now, cost, how == TakeMode::Force)
    }

    /// Refunds `units` if `own.at` has not passed. `own.at` is one retention after the instant at which the
    /// units were counted.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let (found, _) = self.view(Some(state), now);
        if own.at <= now || found.n == 0 || units == 0 {
            return Next::Keep;
        }
        match found.n.saturating_sub(units) {
            0 => Next::Clear,
            n => Next::Set(Pair { n, ..found }),
        }
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        let bound = if force || cost == 0 { UNBOUNDED } else { self.limit };
        numbers(&[cost.min(self.limit + 1), bound, self.limit, self.retention_us])
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        let (Pair { at, n }, _) = self.view(Some(state), now);
        Carried::new(Used::units(n), [Dated::new(Some(at.saturating_sub(self.retention_us)), at, n)])
    }

    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let n = carried.used.units_ceil();
        (n > 0).then_some(Pair { at: carried.until(now, self.retention_us), n })
    }

    fn most(&self) -> u64 {
        u64::MAX
    }

    /// If units of another quota are freed later than this time from now, even a denied charge writes the
    /// converted state.
    fn longest_us(&self, _now: u64) -> u64 {
        2 * self.retention_us
    }

    fn could_be(&self, _state: Pair) -> bool {
        true
    }

    /// Whether a decision at `now` would move this state's instant back.
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        self.view(Some(state), now).1
    }
}
