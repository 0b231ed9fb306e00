//! Token bucket with continuous refill, GCRA, leaky bucket as a meter and as a queue: one instant, four names.
//!
//! # 1 Definition and laws
//!
//! `limit` units per `period` make one unit every `interval = period / limit`. The state is the instant at which
//! everything taken so far has drained, the *theoretical arrival time* of ATM Forum's generic cell rate algorithm
//! (TM 4.1, 4.4.2). The backlog is how far that instant lies ahead. A cost `n` is admitted when
//! `backlog + n·interval ≤ burst·interval`, and moves the instant by `n·interval`.
//!
//! * A **token bucket** of capacity `burst` is the same thing read the other way: `tokens = burst − backlog/interval`.
//! * A **leaky bucket as a meter** has the level `backlog/interval` and rejects what would overflow `burst`.
//! * A **leaky bucket as a queue** gives each admitted request its departure: when the backlog before it has drained, less
//!   the part that may pass at once. That part is `delay_after` units, less all units of the request but one. So each
//!   request leaves its own cost's worth of spacing behind it, and the departures in any interval have at most
//!   `length/interval + delay_after + 1` units, or the cost of one request if that is more.
//!
//! It guarantees: at most `burst + length/interval` units in any interval of that length; exactly `burst` at once from
//! rest; a denied request's wait is the first microsecond at which it is admitted.
//!
//! # 2 Parameters
//!
//! `period/limit` is reduced to `p/l`. Instants and spans are whole microseconds and a numerator below `l`, so that no
//! interval is rounded: waits are rounded up to a microsecond when they are told, `remaining` down. A bucket that is met
//! full loses what would overflow, as it should; with a burst of 1 that is the part of a microsecond by which each request
//! comes later than it might. With a burst of 2 or more a client that waits as told gets the rate to the last unit.
//!
//! # 3 State
//!
//! A [`Pair`]: the instant in microseconds, and the numerator. An instant that is not ahead of now is no state.
//! A clock that steps back is met by a clamp: an instant is never further ahead than a full bucket and its allowed debt.

use std::cmp::Ordering;

use crate::decision::ChargeDecision;
use crate::quota::{Algorithm, Spec};

use super::carry::{Carried, Dated};
use super::divisor::Divisor;
use super::one_unit::OneUnit;
use super::{Answer, Fullness, Layout, Next, Pair, Used, bits};
#[cfg(feature = "redis")]
use super::{Numbers, UNBOUNDED, numbers};

/// A span of time, or an instant: whole microseconds and a numerator over `l`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    us: u64,
    num: u64,
}

impl Ord for Span {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        // One comparison of 128 bits instead of two with a branch between them.
        let whole = |span: &Self| u128::from(span.us) << 64 | u128::from(span.num);
        whole(self).cmp(&whole(other))
    }
}

impl PartialOrd for Span {
    #[inline]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Span {
    #[inline]
    fn ceil_us(self) -> u64 {
        self.us + u64::from(self.num > 0)
    }
}

/// Quotas whose state is one instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gcra {
    /// The interval between two units is `p/l` µs, in lowest terms.
    l: u64,
    p: u64,
    interval: Span,
    capacity: Span,
    /// The furthest an instant may be ahead: the capacity and the allowed debt.
    ceiling: Span,
    burst: u64,
    debt: u64,
    /// For dividing by `p`, if a full bucket is below 2^63 of the interval's parts.
    quick: Option<Divisor>,
    /// How many units of a queue pass at once behind the one that is due; `None` if this is no queue.
    queue: Option<u64>,
    /// For charges of one unit, unless this is a queue.
    pub(crate) one_unit: Option<OneUnit>,
}

/// What deciding has found, before it is told.
#[derive(Clone, Copy, Debug)]
struct Admission {
    /// After the charge, if it is admitted.
    backlog: Span,
    retry_us: Option<u64>,
    units: u64,
    tail: Pair,
    /// The backlog that the charge met.
    met: Span,
    cost: u64,
}

impl Gcra {
    pub(crate) fn new(spec: &Spec) -> Self {
        let (l, p) = if spec.limit == 0 {
            (1, 1)
        } else {
            let common = gcd(spec.limit, spec.period_us);
            (spec.limit / common, spec.period_us / common)
        };
        let span = |units: u64| span_of(units, l, p);
        let capacity = span(spec.burst);
        let queue = (spec.algorithm == Algorithm::LeakyQueue).then_some(spec.delay_after);
        let narrow = (u128::from(capacity.us) + 1) * u128::from(l) < 1 << 63;
        Self {
            l,
            p,
            interval: span(1),
            capacity,
            ceiling: span(spec.burst + spec.debt),
            burst: spec.burst,
            debt: spec.debt,
            quick: narrow.then(|| Divisor::new(p)),
            queue,
            one_unit: if queue.is_none() { OneUnit::new(l, p, spec.burst) } else { None },
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::of(bits(self.l - 1), None, self.ceiling.us)
    }

    // 4 decide ────────────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline]
    pub(crate) fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Answer {
        if let Some(unit) = self.one_unit.as_ref().filter(|_| cost == 1 && !force) {
            if let Some(answer) = unit.decide(state, now) {
                return answer;
            }
        }
        let (next, found) = self.admit(state, now, cost, force);
        Answer { decision: self.tell(found), next }
    }

    /// The first half of deciding: what is to be written.
    fn admit(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> (Next, Admission) {
        let (before, clamped) = self.backlog(state, now);
        let refused = |wait| {
            let found =
                Admission { backlog: before, retry_us: wait, units: 0, tail: Pair { at: 0, n: 0 }, met: before, cost };
            (self.repaired(before, now, clamped && cost > 0), found)
        };
        if cost > self.burst && !force {
            return refused(None);
        }
        let mut units = cost.min(self.burst.saturating_add(self.debt));
        let mut after = self.add(before, self.span_of(units));
        if after > self.capacity {
            if !force && cost > 0 {
                return refused(Some(self.sub(after, self.capacity).ceil_us()));
            }
            if after > self.ceiling {
                // Not remembered, so not to be given back either.
                (after, units) = (self.ceiling, self.whole_units(self.sub(self.ceiling, before)));
            }
        }
        if after == before {
            units = 0;
        }
        let tail = Pair { at: now + after.us, n: after.num };
        let next = if units == 0 && after == before {
            self.repaired(before, now, clamped && cost > 0)
        } else {
            Next::Set(tail)
        };
        (next, Admission { backlog: after, retry_us: Some(0), units, tail, met: before, cost })
    }

    /// The second half: the decision, from what the first found.
    fn tell(&self, found: Admission) -> ChargeDecision {
        let mut decision =
            self.describe(found.backlog, found.retry_us).receipted(found.units, found.tail.at, found.tail.n);
        if let Some(delay_after) = self.queue {
            // The last of its units is the one that has to be within what passes at once.
            let at_once = self.span_of(delay_after.saturating_sub(found.cost.saturating_sub(1)));
            let is_delayed = found.retry_us == Some(0) && found.met > at_once;
            let wait = if is_delayed { self.sub(found.met, at_once) } else { Span::default() };
            decision.set_delay(wait.ceil_us(), self.units_ceil(wait));
        }
        decision
    }

    /// Gives back `units` of a charge whose own units have drained at `own`: the part that has not. In a queue only if
    /// nothing was taken since: those behind were told when they depart, and whoever came next would depart with the last.
    pub(crate) fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let (backlog, clamped) = self.backlog(Some(state), now);
        if self.queue.is_some() && (clamped || state != own) {
            return Next::Keep;
        }
        let (left, _) = self.backlog(Some(own), now);
        let given = self.span_of(units.min(self.burst.saturating_add(self.debt))).min(left).min(backlog);
        if given == Span::default() {
            return Next::Keep;
        }
        let rest = self.sub(backlog, given);
        if rest == Span::default() { Next::Clear } else { Next::Set(Pair { at: now + rest.us, n: rest.num }) }
    }

    /// The instant at which a charge's units have drained without its last `units`.
    #[cfg(feature = "redis")]
    pub(crate) fn own_without(&self, own: Pair, units: u64) -> Pair {
        let (own, last) = (Span { us: own.at, num: own.n.min(self.l - 1) }, self.span_of(units));
        if last > own {
            return Pair { at: 0, n: 0 };
        }
        let own = self.sub(own, last);
        Pair { at: own.us, n: own.num }
    }

    /// Whether intervals are whole microseconds, so that no state has a numerator.
    #[cfg(feature = "redis")]
    pub(crate) fn is_whole(&self) -> bool {
        self.l == 1
    }

    /// What the Lua twin is told of a charge.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self, cost: u64, force: bool) -> Numbers {
        // One more than could ever pass is as good as any above.
        let most = if force { self.burst.saturating_add(self.debt) } else { self.burst.saturating_add(1) };
        let span = self.span_of(cost.min(most));
        let bound = if force || cost == 0 { Span { us: UNBOUNDED, num: 0 } } else { self.capacity };
        let mut numbers = numbers(&[span.us, bound.us, self.ceiling.us, self.l]);
        if !self.is_whole() {
            numbers.extend([span.num as f64, bound.num as f64, self.ceiling.num as f64]);
        }
        numbers
    }

    /// What it is told of units to give back: their span. In a queue, where only the tail can be given back, the second
    /// number is negative: −1 less the numerator.
    #[cfg(feature = "redis")]
    pub(crate) fn refund_numbers(&self, units: u64) -> (f64, f64) {
        let span = self.span_of(units.min(self.burst.saturating_add(self.debt)));
        let num = span.num as f64; // below 2^50
        (span.us as f64, if self.queue.is_some() { -1.0 - num } else { num })
    }

    fn used(&self, state: Pair, now: u64) -> Used {
        let (backlog, _) = self.backlog(Some(state), now);
        Used { parts: self.parts(backlog), of: u128::from(self.p) }
    }

    pub(super) fn carried(&self, state: Pair, now: u64) -> Carried {
        let ((backlog, _), used) = (self.backlog(Some(state), now), self.used(state, now));
        Carried::new(used, [Dated::new(None, now + backlog.ceil_us(), used.units_ceil())])
    }

    pub(super) fn most(&self) -> u64 {
        self.burst + self.debt
    }

    /// How far ahead the units of another quota may be.
    pub(super) fn longest_us(&self) -> u64 {
        self.ceiling.us
    }

    pub(super) fn with_used(&self, used: Used, now: u64) -> Option<Pair> {
        if self.burst == 0 {
            return None;
        }
        let parts = used.scaled_ceil(u128::from(self.p));
        let l = u128::from(self.l);
        let us = u64::try_from(parts / l).unwrap_or(u64::MAX);
        let num = (parts % l) as u64; // below l
        let span = Span { us, num }.min(self.ceiling);
        (span != Span::default()).then_some(Pair { at: now + span.us, n: span.num })
    }

    pub(crate) fn could_be(&self, state: Pair) -> bool {
        state.n < self.l
    }

    /// Whether a decision at `now` would rewind this state.
    #[inline]
    pub(crate) fn is_clamped(&self, state: Pair, now: u64) -> bool {
        self.backlog(Some(state), now).1
    }

    pub(crate) fn fullness(&self, state: Pair, now: u64) -> Fullness {
        let (backlog, _) = self.backlog(Some(state), now);
        Fullness {
            throttled: self.add(backlog, self.interval) > self.capacity,
            used: super::share(backlog.ceil_us(), self.capacity.ceil_us()),
        }
    }

    // Arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────────

    /// How far the state is ahead of now, and whether it had to be clamped.
    #[inline]
    fn backlog(&self, state: Option<Pair>, now: u64) -> (Span, bool) {
        let Some(tail) = state.filter(|tail| tail.at >= now) else {
            return (Span::default(), false);
        };
        let backlog = Span { us: tail.at - now, num: tail.n.min(self.l - 1) }; // a receipt may be of another quota
        if backlog > self.ceiling { (self.ceiling, true) } else { (backlog, false) }
    }

    /// A clamped state is written even when a charge is denied: else it would be met ahead of the clock for ever.
    #[inline]
    fn repaired(&self, backlog: Span, now: u64, clamped: bool) -> Next {
        if clamped { Next::Set(Pair { at: now + backlog.us, n: backlog.num }) } else { Next::Keep }
    }

    fn describe(&self, backlog: Span, retry_us: Option<u64>) -> ChargeDecision {
        let (remaining, room_us) = if backlog > self.capacity {
            (0, 0)
        } else {
            let room = self.sub(self.capacity, backlog);
            (self.units_floor(room), room.ceil_us())
        };
        let window_us = match retry_us {
            Some(wait) if wait > 0 => wait,
            _ if remaining > 0 => room_us,
            _ if self.burst == 0 => 0,
            _ => self.sub(self.add(backlog, self.interval), self.capacity).ceil_us(),
        };
        ChargeDecision::found(self.burst, remaining, backlog.ceil_us(), window_us, retry_us)
    }

    #[inline]
    fn span_of(&self, units: u64) -> Span {
        if units == 1 { self.interval } else { span_of(units, self.l, self.p) }
    }

    #[inline]
    fn add(&self, a: Span, b: Span) -> Span {
        let num = a.num + b.num; // both below l, which is at most 10^15
        let carry = u64::from(num >= self.l);
        Span { us: a.us + b.us + carry, num: num - carry * self.l } // at most twice the ceiling and an interval
    }

    /// `a − b`, where `a ≥ b`.
    #[inline]
    fn sub(&self, a: Span, b: Span) -> Span {
        let borrow = u64::from(a.num < b.num);
        Span { us: a.us - b.us - borrow, num: a.num + borrow * self.l - b.num }
    }

    /// The span in parts of `1/l` µs.
    fn parts(&self, span: Span) -> u128 {
        u128::from(span.us) * u128::from(self.l) + u128::from(span.num)
    }

    /// How many whole units fit into a span of at most the capacity.
    #[inline]
    fn units_floor(&self, span: Span) -> u64 {
        match self.quick {
            Some(quick) => quick.floor(span.us * self.l + span.num), // below 2^63, see `new`
            None => (self.parts(span) / u128::from(self.p)) as u64,  // at most burst
        }
    }

    /// As [`Self::units_floor`], for a span of at most the ceiling.
    fn whole_units(&self, span: Span) -> u64 {
        (self.parts(span) / u128::from(self.p)) as u64 // at most burst + debt
    }

    fn units_ceil(&self, span: Span) -> u64 {
        self.parts(span).div_ceil(u128::from(self.p)) as u64 // at most burst
    }
}

fn span_of(units: u64, l: u64, p: u64) -> Span {
    match units.checked_mul(p) {
        Some(parts) if l == 1 => Span { us: parts, num: 0 },
        Some(parts) => Span { us: parts / l, num: parts % l },
        None => {
            let (parts, l) = (u128::from(units) * u128::from(p), u128::from(l));
            // Units are at most burst + debt, whose drain is below 2^49 µs; the remainder is below l.
            Span { us: (parts / l) as u64, num: (parts % l) as u64 }
        }
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
