//! Fixed window: a counter that starts afresh each period.
//!
//! # 1 Definition and laws
//!
//! Windows begin at whole multiples of the period since the Unix epoch, or at the key's first request; they are
//! half-open, so at exactly `start + period` the key is free again.
//!
//! It guarantees: at most `limit` units in each window, hence at most `2·limit` in any period, which is the known
//! weakness: twice the limit can pass around an edge. Choose it for budgets per day or per hour. A period has a fixed
//! length, so there are no windows of calendar months, or of days in another time zone than UTC.
//!
//! # 2 Parameters
//!
//! Limit, period and anchor. Denied requests may be counted, up to the limit. An unlimited quota takes every charge as
//! a forced one, and its count ends at the limit.
//!
//! # 3 State
//!
//! A [`Pair`]: the window's end, and the count. A clock that steps back into an earlier window stays in the later one,
//! if that begins within a period. Otherwise the count moves to the window that ends at the first edge at least a
//! period away. Either costs a key at most one period, and neither lets it use the same time twice.

use crate::decision::ChargeDecision;
use crate::quota::spec::{Anchor, Spec};

use super::divisor::Divisor;
use super::state::{Layout, Next, Pair, PairAlgorithm, Transition, bits};
#[cfg(feature = "_redis")]
use super::state::{LuaNumbers, UNBOUNDED, numbers};
use super::used::{Carried, Dated, Used};

/// Quotas that count per window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FixedWindow {
    limit: u64,
    period_us: u64,
    /// For finding the window of an instant.
    grid: Divisor,
    debt: u64,
    anchor: Anchor,
    count_denied: bool,
    unlimited: bool,
}

/// The window a request falls into.
#[derive(Clone, Copy)]
struct Window {
    end: u64,
    count: u64,
    moved: bool,
}

impl FixedWindow {
    pub(crate) fn new(spec: &Spec) -> Self {
        let Spec { limit, period_us, debt, anchor, count_denied, unlimited, .. } = *spec;
        Self { limit, period_us, grid: Divisor::new(period_us), debt, anchor, count_denied, unlimited }
    }

    pub(crate) fn layout(&self) -> Layout {
        let grid = (self.anchor == Anchor::Epoch).then_some(self.period_us);
        Layout::of(bits(self.limit + self.debt), grid, 2 * self.period_us)
    }

    // Windows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline]
    fn window(&self, state: Option<Pair>, now: u64) -> Window {
        match state {
            Some(state) if state.at > now && state.at - now <= 2 * self.period_us => {
                Window { end: state.at, count: state.n, moved: false }
            }
            state => {
                let past = if self.anchor == Anchor::Epoch { now - self.grid.round_down(now) } else { 0 };
                let end = now - past + self.period_us;
                match state {
                    Some(state) if state.at > now => {
                        let whole = if past > 0 { end + self.period_us } else { end }; // at least a period away
                        Window { end: whole, count: state.n, moved: true }
                    }
                    _ => Window { end, count: 0, moved: false },
                }
            }
        }
    }

    #[inline]
    fn store(&self, window: Window) -> Next {
        if window.count == 0 { Next::Clear } else { Next::Set(Pair { at: window.end, n: window.count }) }
    }

    #[inline]
    fn describe(&self, window: Window, now: u64, retry_us: Option<u64>) -> ChargeDecision {
        let left_us = window.end - now;
        let remaining = self.limit.saturating_sub(window.count);
        let reset_us = if window.count == 0 { 0 } else { left_us };
        ChargeDecision::found(self.limit, remaining, reset_us, left_us, retry_us)
    }
}

impl PairAlgorithm for FixedWindow {
    #[inline(always)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let window = self.window(state, now);
        let kept = if window.moved && cost > 0 { self.store(window) } else { Next::Keep };
        let count = window.count.saturating_add(cost);
        if count > self.limit && !force && cost > 0 && !self.unlimited {
            let retry_us = (cost <= self.limit).then_some(window.end - now);
            let counted = Window { count: window.count.max(count.min(self.limit)), ..window };
            let seen = if self.count_denied { counted } else { window };
            let next = if self.count_denied { self.store(counted) } else { kept };
            return Transition { decision: self.describe(seen, now, retry_us), next };
        }
        let count = count.min((self.limit + self.debt).max(window.count));
        let after = Window { count, ..window };
        let decision = self.describe(after, now, Some(0));
        if count == window.count {
            return Transition { decision, next: kept };
        }
        Transition { decision: decision.receipted(count - window.count, window.end, 0), next: self.store(after) }
    }

    /// Refunds `units` that were counted in the window that ends at `own`, while it lasts.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        if state.at != own.at || state.at <= now || units == 0 {
            return Next::Keep;
        }
        self.store(Window { end: state.at, count: state.n.saturating_sub(units), moved: false })
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        let most = self.limit + self.debt;
        let bound = if force || cost == 0 || self.unlimited { UNBOUNDED } else { self.limit };
        let (epoch, count_denied) = (u64::from(self.anchor == Anchor::Epoch), u64::from(self.count_denied));
        numbers(&[cost.min(most + 1), bound, self.limit, most, self.period_us, epoch, count_denied])
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        let Window { end, count, .. } = self.window(Some(state), now);
        let dated = Dated::new(Some(end.saturating_sub(self.period_us).min(now)), end, count);
        Carried::new(Used::units(count), [dated])
    }

    /// Counts all of it in one window: the first one that lasts as long as any of it would have counted.
    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let count = carried.used.units_ceil().min(self.limit + self.debt);
        let until = carried.until(now, self.period_us);
        let end = match self.anchor {
            Anchor::FirstRequest => until,
            Anchor::Epoch => self.window(None, now).end.max(until.next_multiple_of(self.period_us)),
        };
        (count > 0).then_some(Pair { at: end, n: count })
    }

    fn most(&self) -> u64 {
        self.limit + self.debt
    }

    /// The longest time from now after which units of another quota may be freed.
    fn longest_us(&self) -> u64 {
        2 * self.period_us
    }

    fn could_be(&self, state: Pair) -> bool {
        state.n <= self.limit + self.debt && (self.anchor == Anchor::FirstRequest || state.at % self.period_us == 0)
    }

    /// Whether a decision at `now` would rewind this state.
    #[inline]
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        state.at.saturating_sub(now) > 2 * self.period_us
    }

    #[inline(always)]
    fn counts_anew(&self, state: Option<Pair>, now: u64) -> bool {
        state.is_none_or(|state| state.at <= now)
    }
}
