//! Token bucket with continuous refill, GCRA, leaky bucket as a meter and as a queue. All four keep one instant.
//!
//! # 1 Definition and laws
//!
//! `limit` units per `period` make one unit every `interval = period / limit`. The state is the instant at which
//! everything taken so far has drained. The state's instant is the *theoretical arrival time* of ATM Forum's
//! generic cell rate algorithm (TM 4.1, 4.4.2). The backlog is how far that instant lies ahead of now. A request
//! of cost `n` is admitted if `backlog + n·interval ≤ burst·interval`. The request then moves the instant by
//! `n·interval`.
//!
//! * A **token bucket** of capacity `burst` counts the free units instead of the backlog: `tokens = burst −
//!   backlog/interval`.
//! * A **leaky bucket as a meter** has the level `backlog/interval` and rejects a request that would raise
//!   the level above `burst`.
//! * A **leaky bucket as a queue** gives each admitted request a departure time. A request of cost `n` departs as
//!   soon as the backlog before it has drained to `delay_after − (n − 1)` units, or to 0 if this is negative. The
//!   next request departs later by `n·interval`. The requests that depart in any interval have at most
//!   `length/interval + delay_after + 1` units in all, or the cost of one request if that cost is larger.
//!
//! Each of the four algorithms guarantees at most `burst + length/interval` units in any interval of the length
//! `length`, and exactly `burst` units at once for a key at rest. A denied request's wait ends at the first
//! microsecond at which the request is admitted.
//!
//! # 2 Parameters
//!
//! `period/limit` is reduced to `p/l`. Instants and spans are stored as whole microseconds and a numerator below `l`,
//! so that no interval is rounded. Only reported waits are rounded up to a microsecond, and `remaining` is rounded
//! down. A full bucket gains no further tokens. With a burst of 1, a client that waits for each reported wait
//! therefore loses the part of a microsecond by which the wait was rounded up. With a burst of 2 or more, a client
//! that waits for each reported wait gets exactly the rate.
//!
//! Spans are counted in parts of `1/l` µs, in a `u64` or a `u128` as the quota requires: see [`Parts`].
//!
//! # 3 State
//!
//! A [`Pair`]: the instant in microseconds, and the numerator. An instant that is not ahead of now counts as no
//! state. If the clock stepped back, the instant may lie too far ahead of now. An instant that lies too far ahead
//! is clamped to the sum of the capacity and the allowed debt.

use std::fmt::Debug;
use std::ops::{Add, Sub};

use crate::decision::ChargeDecision;
use crate::quota::spec::{Algorithm, Spec};

use super::divisor::Divisor;
use super::state::{Fullness, Layout, Next, Pair, PairAlgorithm, Transition, bits, share};
#[cfg(feature = "_redis")]
use super::state::{LuaNumbers, UNBOUNDED, numbers};
use super::used::{Carried, Dated, Used};

/// A span of time, counted in parts of `1/l` µs.
///
/// `u64` is faster (`benches/instructions`); `u128` holds the spans of every quota.
pub(crate) trait Parts:
    Copy + Debug + Ord + From<u64> + Into<u128> + TryFrom<u128> + Add<Output = Self> + Sub<Output = Self>
{
    /// Returns `a · b`, for products up to the longest span.
    fn product(a: u64, b: u64) -> Self;

    /// Returns the quotient, rounded down.
    fn floor(self, by: Divisor) -> u64;
}

impl Parts for u64 {
    #[inline]
    fn product(a: u64, b: u64) -> Self {
        a * b // below 2^62, see `is_narrow`
    }

    #[inline]
    fn floor(self, by: Divisor) -> u64 {
        by.floor(self)
    }
}

impl Parts for u128 {
    fn product(a: u64, b: u64) -> Self {
        Self::from(a) * Self::from(b)
    }

    fn floor(self, by: Divisor) -> u64 {
        (self / Self::from(by.get())) as u64 // microseconds of a full drain, or units of a full bucket with its debt
    }
}

/// The distance of an instant from now: whole microseconds, and the remaining parts of `1/l` µs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) us: u64,
    pub(crate) num: u64,
}

/// A span, once in parts of `1/l` µs, and once as whole microseconds with the remaining parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span<N> {
    parts: N,
    us: u64,
    num: u64,
}

impl<N> Span<N> {
    #[inline]
    pub(crate) fn ahead(&self) -> Ahead {
        Ahead { us: self.us, num: self.num }
    }

    /// Returns the instant that lies this span after `now`.
    #[inline]
    fn of(&self, now: u64) -> Pair {
        Pair { at: now + self.us, n: self.num }
    }

    /// Returns by how many microseconds this span is longer than `shorter`, rounded up.
    #[inline]
    fn us_beyond(&self, shorter: &Self) -> u64 {
        self.us - shorter.us + u64::from(self.num > shorter.num)
    }

    #[inline]
    fn ceil_us(&self) -> u64 {
        self.us + u64::from(self.num > 0)
    }
}

/// Decides by a quota whose state is one instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gcra<N: Parts> {
    /// The interval between two units is `p/l` µs, as a reduced fraction.
    l: Divisor,
    p: Divisor,
    interval: Span<N>,
    capacity: Span<N>,
    /// The longest span by which the state's instant may be ahead: the capacity and the allowed debt
    /// together.
    ceiling: Span<N>,
    burst: u64,
    debt: u64,
    /// How many units a queue lets pass at once, besides the one that is due. `None` for the other
    /// algorithms.
    queue: Option<u64>,
}

/// The result of a charge, from which [`Gcra::describe`] makes the decision.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GcraVerdict<N> {
    Admitted { met: Span<N>, after: Span<N>, units: u64 },
    Denied { met: Span<N>, retry_us: Option<u64> },
}

/// Returns the interval between two units as a reduced fraction `p/l` µs: first `l`, the parts of a microsecond, and
/// then `p`, the number of parts in the interval.
fn interval(spec: &Spec) -> (u64, u64) {
    if spec.limit == 0 {
        return (1, 1);
    }
    let common = gcd(spec.limit, spec.period_us);
    (spec.limit / common, spec.period_us / common)
}

/// Returns whether all sums of a quota's spans are below 2^63, as [`Divisor`] requires.
pub(super) fn is_narrow(spec: &Spec) -> bool {
    let (l, p) = interval(spec);
    u128::from(spec.burst + spec.debt + 1) * u128::from(p) + u128::from(l) < 1 << 62
}

impl<N: Parts> Gcra<N> {
    pub(crate) fn new(spec: &Spec) -> Self {
        let (l, p) = interval(spec);
        let (l, p) = (Divisor::new(l), Divisor::new(p));
        let span = |units| cut(N::product(units, p.get()), l);
        Self {
            l,
            p,
            interval: span(1),
            capacity: span(spec.burst),
            ceiling: span(spec.burst + spec.debt),
            burst: spec.burst,
            debt: spec.debt,
            queue: (spec.algorithm == Algorithm::LeakyQueue).then_some(spec.delay_after),
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::of(bits(self.l.get() - 1), None, self.ceiling.us)
    }

    // 4 decide ────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the result of a charge on a state that is `ahead` of now. [`describe`](Self::describe) turns the
    /// result into a decision. Returns `None` if the state is further ahead than any state that the quota makes.
    ///
    /// `look` and `describe` are separate functions so that a limiter that retries a write describes
    /// the decision only once.
    #[inline(always)]
    pub(crate) fn look(&self, ahead: Ahead, cost: u64, force: bool) -> Option<GcraVerdict<N>> {
        Some(self.judge(self.met(ahead)?, cost, force))
    }

    #[inline(always)]
    fn judge(&self, met: Span<N>, cost: u64, force: bool) -> GcraVerdict<N> {
        let fits = cost <= self.burst;
        if cost > 1 && !fits && !force {
            return GcraVerdict::Denied { met, retry_us: None };
        }
        let mut units = if force { cost.min(self.most()) } else { cost };
        let mut after = self.plus(&met, units);
        if after.parts > self.capacity.parts {
            if cost > 0 && !force {
                return GcraVerdict::Denied { met, retry_us: fits.then(|| after.us_beyond(&self.capacity)) };
            }
            if after.parts > self.ceiling.parts {
                // The state does not keep units beyond the allowed debt, so the receipt does not hold them
                // either.
                after = self.ceiling;
                units = (after.parts - met.parts).floor(self.p);
            }
        }
        GcraVerdict::Admitted { met, after, units }
    }

    /// Turns the result of a charge of `cost` into a decision.
    #[inline(always)]
    pub(crate) fn describe(&self, verdict: &GcraVerdict<N>, now: u64, cost: u64) -> ChargeDecision {
        match verdict {
            // No whole unit is free.
            GcraVerdict::Denied { met, retry_us: Some(wait) } if cost == 1 => {
                ChargeDecision::found(self.burst, 0, met.ceil_us(), *wait, Some(*wait))
            }
            GcraVerdict::Denied { met, retry_us } => self.standing(met, *retry_us),
            GcraVerdict::Admitted { met, after, units } => {
                let Pair { at, n } = after.of(now);
                let decision = self.standing(after, Some(0)).receipted(*units, at, n);
                match self.queue {
                    // `delay` returns numbers instead of a decision, because the compiler copies a decision that
                    // another function changes (`benches/instructions`).
                    Some(delay_after) => {
                        let (delay_us, position) = self.delay(*met, cost, delay_after);
                        decision.delayed(delay_us, position)
                    }
                    None => decision,
                }
            }
        }
    }

    /// Describes a backlog.
    #[inline(always)]
    fn standing(&self, backlog: &Span<N>, retry_us: Option<u64>) -> ChargeDecision {
        let capacity = self.capacity;
        let (remaining, room_us) = if backlog.parts > capacity.parts {
            (0, 0)
        } else {
            ((capacity.parts - backlog.parts).floor(self.p), capacity.us_beyond(backlog))
        };
        let window_us = match retry_us {
            Some(wait) if wait > 0 => wait,
            _ if remaining > 0 => room_us,
            _ if self.burst == 0 => 0,
            _ => self.plus(backlog, 1).us_beyond(&capacity),
        };
        ChargeDecision::found(self.burst, remaining, backlog.ceil_us(), window_us, retry_us)
    }

    /// Returns the time in microseconds after which a request departs from a queue. The request departs when
    /// the backlog that it met has drained to the number of units that may pass at once. Also returns the
    /// number of units that depart before the request.
    #[inline(never)]
    fn delay(&self, met: Span<N>, cost: u64, delay_after: u64) -> (u64, u64) {
        // The charge passes at once if at most `delay_after` units are ahead of its last unit.
        let at_once = self.span(delay_after.saturating_sub(cost.saturating_sub(1)));
        if met.parts > at_once.parts {
            (met.us_beyond(&at_once), self.ceil_units(met.parts - at_once.parts))
        } else {
            (0, 0)
        }
    }

    /// Returns whether intervals are whole microseconds, so that no state has a numerator.
    #[cfg(feature = "_redis")]
    pub(crate) fn is_whole(&self) -> bool {
        self.l.get() == 1
    }

    /// Returns the numbers with which the Lua twin makes a refund: the span of the units as microseconds and a
    /// numerator. For a queue, which refunds only the newest charge, the second number is −1 minus the numerator, so
    /// that it is negative.
    #[cfg(feature = "_redis")]
    pub(crate) fn refund_numbers(&self, units: u64) -> (f64, f64) {
        let span = self.span(units.min(self.most()));
        let num = span.num as f64; // below 2^50
        (span.us as f64, if self.queue.is_some() { -1.0 - num } else { num })
    }

    /// Returns whether a charge of `units` begins at `end`, where another charge ends. The charge
    /// itself ends at `own`.
    pub(crate) fn begins_at(&self, own: Pair, units: u64, end: Pair) -> bool {
        let (span, l) = (self.span(units.min(self.most())), self.l.get());
        // If the quota has no numerators, `l` is 1, and `Pair::n` has no meaning.
        let num = |pair: Pair| pair.n.min(l - 1);
        let sum = num(end) + span.num;
        let (carry, sum) = if sum < l { (0, sum) } else { (1, sum - l) };
        end.at.saturating_add(span.us + carry) == own.at && sum == num(own)
    }

    // Arithmetic ──────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns how far the state is ahead of now. Also returns whether this distance was clamped,
    /// because the quota allows only a smaller one.
    #[inline]
    fn backlog(&self, state: Option<Pair>, now: u64) -> (Span<N>, bool) {
        let Some(tail) = state.filter(|tail| tail.at >= now) else {
            return (Span { parts: N::from(0), us: 0, num: 0 }, false);
        };
        let num = tail.n.min(self.l.get() - 1); // a receipt may be of another quota
        match self.met(Ahead { us: tail.at - now, num }) {
            Some(met) => (met, false),
            None => (self.ceiling, true),
        }
    }

    /// Returns the span to an instant, or `None` if the instant is further ahead than in any state that the quota
    /// makes.
    #[inline(always)]
    fn met(&self, Ahead { us, num }: Ahead) -> Option<Span<N>> {
        let l = self.l.get();
        if us > self.ceiling.us || num >= l {
            return None;
        }
        let parts = N::product(us, l) + N::from(num);
        (parts <= self.ceiling.parts).then_some(Span { parts, us, num })
    }

    #[inline]
    fn span(&self, units: u64) -> Span<N> {
        cut(N::product(units, self.p.get()), self.l)
    }

    /// Returns the sum of `span` and the span of `units`. One unit needs no division.
    #[inline(always)]
    fn plus(&self, span: &Span<N>, units: u64) -> Span<N> {
        let more = if units == 1 { self.interval } else { self.span(units) };
        let (num, l) = (span.num + more.num, self.l.get());
        let (carry, num) = if num < l { (0, num) } else { (1, num - l) };
        Span { parts: span.parts + more.parts, us: span.us + more.us + carry, num }
    }

    fn ceil_units(&self, span: N) -> u64 {
        (span + N::from(self.p.get() - 1)).floor(self.p)
    }
}

impl<N: Parts> PairAlgorithm for Gcra<N> {
    #[inline]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let (met, is_clamped) = self.backlog(state, now);
        let verdict = self.judge(met, cost, force);
        let next = match verdict {
            GcraVerdict::Admitted { after, .. } if after.parts > met.parts => Next::Set(after.of(now)),
            // A clamped state is written even if the charge is denied, because the state would otherwise stay ahead
            // of the clock.
            _ if is_clamped && cost > 0 => Next::Set(met.of(now)),
            _ => Next::Keep,
        };
        Transition { decision: self.describe(&verdict, now, cost), next }
    }

    /// Refunds the part of the charge's units that has not drained. A queue refunds only its newest charge,
    /// because the requests behind an earlier charge have been promised their departures. After the refund of an
    /// earlier charge, the next request would depart together with the last queued request.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let (backlog, is_clamped) = self.backlog(Some(state), now);
        if self.queue.is_some() && (is_clamped || state != own) {
            return Next::Keep;
        }
        let (left, _) = self.backlog(Some(own), now);
        let given = self.span(units.min(self.most())).parts.min(left.parts).min(backlog.parts);
        match backlog.parts - given {
            _ if given == N::from(0) => Next::Keep,
            rest if rest == N::from(0) => Next::Clear,
            rest => Next::Set(cut(rest, self.l).of(now)),
        }
    }

    fn is_behind(&self, state: Pair, now: u64, own: Pair) -> bool {
        let num = |pair: Pair| pair.n.min(self.l.get() - 1);
        let is_later = (own.at, num(own)) < (state.at, num(state));
        // A slot whose end is `now` plus a numerator is still ahead.
        let is_ahead = (own.at, num(own)) > (now, 0);
        self.queue.is_some() && is_ahead && is_later && !self.backlog(Some(state), now).1
    }

    fn could_be(&self, state: Pair) -> bool {
        state.n < self.l.get()
    }

    #[inline]
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        self.backlog(Some(state), now).1
    }

    fn fullness(&self, state: Pair, now: u64) -> Fullness {
        let (backlog, _) = self.backlog(Some(state), now);
        Fullness {
            throttled: backlog.parts + self.interval.parts > self.capacity.parts,
            used: share(backlog.ceil_us(), self.capacity.ceil_us()),
        }
    }

    fn carried(&self, state: Pair, now: u64, sliced: bool) -> Carried {
        let (backlog, _) = self.backlog(Some(state), now);
        let used = Used { parts: backlog.parts.into(), of: u128::from(self.p.get()) };
        let carried = Carried::new(used, [Dated::new(None, now + backlog.ceil_us(), used.units_ceil())]);
        let in_use = |later| self.ceil_units(self.backlog(Some(backlog.of(now)), later).0.parts);
        if sliced { carried.sliced(now, in_use) } else { carried }
    }

    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let parts = carried.used.scaled_ceil(u128::from(self.p.get()));
        let parts = N::try_from(parts).map_or(self.ceiling.parts, |parts| parts.min(self.ceiling.parts));
        (parts > N::from(0)).then(|| cut(parts, self.l).of(now))
    }

    fn most(&self) -> u64 {
        self.burst + self.debt
    }

    fn longest_us(&self, _now: u64) -> u64 {
        self.ceiling.us
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        // A cost above the capacity is sent as the capacity plus 1, which is denied in the same way. A forced cost
        // above 0 to a quota without units is sent as 1, because the script takes a cost of 0 for a peek.
        let most = if force { self.most().max(1) } else { self.burst + 1 };
        let span = self.span(cost.min(most));
        let (bound, bound_num) =
            if force || cost == 0 { (UNBOUNDED, 0) } else { (self.capacity.us, self.capacity.num) };
        let mut numbers = numbers(&[span.us, bound, self.ceiling.us, self.l.get()]);
        if !self.is_whole() {
            numbers.extend([span.num, bound_num, self.ceiling.num].map(|num| num as f64));
        }
        numbers
    }

    #[cfg(any(feature = "_redis", feature = "store"))]
    fn own_without(&self, own: Pair, last: u64) -> Pair {
        let (last, l) = (self.span(last.min(self.most())), self.l.get());
        let num = own.n.min(l - 1);
        let borrowed = u64::from(num < last.num);
        match own.at.checked_sub(last.us + borrowed) {
            Some(at) => Pair { at, n: num + borrowed * l - last.num },
            None => Pair { at: 0, n: 0 },
        }
    }
}

#[inline]
fn cut<N: Parts>(parts: N, l: Divisor) -> Span<N> {
    let us = parts.floor(l);
    let num: u128 = (parts - N::product(us, l.get())).into();
    Span { parts, us, num: num as u64 } // below l
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    #[test]
    fn both_widths_decide_alike() {
        let mut x = 0x9e37_79b9_7f4a_7c15_u64;
        let mut below = move |bound: u64| {
            x = x.wrapping_mul(0xd129_0f59_6c1d_4b4d).wrapping_add(0x1b87_3593);
            ((u128::from(x) * u128::from(bound)) >> 64) as u64
        };
        let now = 1_735_689_600_000_000;
        let mut decided = 0;
        for _ in 0..20_000 {
            let (digits, places) = (1 + below(9) as u32, 1 + below(10) as u32); // small
            let limit = 1 + below(10_u64.pow(digits));
            let period = Duration::from_micros(1 + below(10_u64.pow(places)));
            let quota = Quota::token_bucket(limit, period).and_then(|quota| quota.burst(1 + below(2 * limit)));
            let Some(spec) = quota.ok().map(|quota| *quota.spec()).filter(is_narrow) else { continue };
            let (narrow, wide) = (Gcra::<u64>::new(&spec), Gcra::<u128>::new(&spec));
            for us in [0, 1, below(narrow.ceiling.us + 2), narrow.capacity.us, narrow.capacity.us.saturating_sub(1)] {
                let state = Some(Pair { at: now + us, n: below(narrow.l.get() + 1) });
                for (state, cost) in [(None, 1), (state, 1), (state, below(spec.burst + 2))] {
                    let force = below(4) == 0;
                    let [one, other] = [&narrow as &dyn PairAlgorithm, &wide].map(|rules| {
                        let answer = rules.decide(state, now, cost, force);
                        (answer.decision, answer.next)
                    });
                    assert_eq!(one, other, "{spec:?}, {state:?}, cost {cost}, force {force}");
                    decided += 1;
                }
            }
        }
        assert!(decided > 100_000, "{decided} were compared");
    }

    /// A receipt or a state may be of another quota, whose parts of a microsecond are smaller.
    #[test]
    fn number_of_another_quota_counts_as_the_largest_of_this_one() {
        let queue = |limit, period| Quota::leaky_queue(limit, Duration::from_micros(period)).expect("a valid quota");
        let (thirds, whole) = (queue(3, 100), queue(1, 100));
        let (thirds, whole) = (Gcra::<u64>::new(thirds.spec()), Gcra::<u64>::new(whole.spec()));
        let (now, pair) = (1_000, |at, n| Pair { at, n });
        let answer = |n| {
            let answer = thirds.decide(Some(pair(now + 10, n)), now, 1, false);
            (answer.decision, answer.next)
        };
        for n in [3, 4, u64::MAX] {
            assert_eq!(answer(n), answer(2));
            assert!(!thirds.is_behind(pair(now + 10, n), now, pair(now + 10, 2)), "they are the same instant");
            assert!(thirds.is_behind(pair(now + 10, n), now, pair(now + 10, 1)));
            // Three units take 100 µs.
            assert!(thirds.begins_at(pair(now + 110, n), 3, pair(now + 10, 2)));
            assert!(!thirds.begins_at(pair(now + 110, n), 3, pair(now + 10, 1)));
            assert!(whole.begins_at(pair(now + 110, n), 1, pair(now + 10, 0)), "it has no parts");
        }
    }

    #[test]
    fn only_a_later_slot_of_a_queue_keeps_a_refund_back() {
        let ten = Duration::from_micros(10);
        let quotas = [Quota::leaky_queue(1, ten), Quota::token_bucket(1, ten).and_then(|quota| quota.burst(5))];
        let [queue, bucket] = quotas.map(|quota| Gcra::<u64>::new(quota.expect("a valid quota").spec()));
        let (now, later, own) = (1_000, Pair { at: 1_010, n: 0 }, Pair { at: 1_005, n: 0 });
        assert!(queue.is_behind(later, now, own));
        assert!(!queue.is_behind(own, now, own), "it is the last one");
        assert!(!queue.is_behind(later, 1_005, own), "it has departed");
        let thirds = Quota::leaky_queue(3, Duration::from_micros(10)).expect("a valid quota");
        let thirds = Gcra::<u64>::new(thirds.spec());
        assert!(thirds.is_behind(later, 1_005, Pair { n: 1, ..own }), "it departs in this microsecond");
        assert!(!thirds.is_behind(later, 1_005, own), "it has departed");
        assert!(!queue.is_behind(Pair { at: 2_000, n: 0 }, now, own), "the clock stepped back");
        assert!(!bucket.is_behind(later, now, own));
    }
}
