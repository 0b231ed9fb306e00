//! Block: strikes are counted, and when there are enough the key is closed for a while.
//!
//! # 1 Definition and laws
//!
//! Units taken are strikes. They are counted in a window of one period that begins with the first of them. The strike
//! that makes `limit` closes the key for the block's length; then the count begins anew. If a block begins while the
//! last one is remembered, it is longer by the factor, up to the longest. Half-open: free again at exactly
//! `begin + length`.
//!
//! It guarantees: exactly `limit` units at once from rest, nothing while closed, and in any interval at most `limit`
//! times two and the whole spans in it of the period or the length, whichever is shorter. A request that is denied by a
//! block changes nothing, unless denied requests count: then it begins the block anew, as long as it would be now. A
//! forced charge takes what is left. Its decision says whether the key is closed after it.
//!
//! Since a window begins with a strike and not with each, up to `2·limit − 2` strikes can be within one period
//! unpunished.
//!
//! # 2 Parameters
//!
//! Strikes (at most [`STRIKES_MAX`]), their period, the length, the factor, the longest, and for how long after its end
//! a block is remembered (0 where blocks do not grow).
//!
//! # 3 State
//!
//! A [`Pair`]: the instant at which all of it is forgotten, and a number of four parts (see [`pack`]): how many blocks
//! are remembered, the strikes counted, and a span.
//!
//! * No strikes: there was a block. It ends the memory's length before that instant, and the span is how long it was,
//!   so that a clock that steps back costs a key no more than that.
//! * Strikes: the window and the memory of blocks end at different instants; the span is between them.
//!
//! A refund of strikes takes them off while their window counts. It never opens what is closed.

use crate::decision::ChargeDecision;
use crate::quota::spec::{Lasting, Spec};
use crate::time::PERIOD_US_MAX;

use super::state::{Answer, How, Layout, Next, Pair, PairAlgorithm};
#[cfg(feature = "redis")]
use super::state::{Numbers, numbers};
use super::used::{Carried, Dated, Used};

/// The most strikes.
pub(crate) const STRIKES_MAX: u64 = (1 << STRIKE_BITS) - 1;

pub(crate) const SPAN_BITS: u32 = 45;
const STRIKE_BITS: u32 = 12;
/// Further blocks are as long as this one.
const LEVEL_MAX: u64 = 63;
const _: () = assert!(PERIOD_US_MAX < 1 << SPAN_BITS && SPAN_BITS + STRIKE_BITS + 1 + 6 == u64::BITS);

/// The parts of a state's number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub(crate) span_us: u64,
    /// Strikes, whether the memory of blocks ends after the window, and how many blocks are remembered: below 2^19.
    pub(crate) counts: u64,
}

/// Packs the parts of a state's number.
pub(crate) fn pack(parts: Parts) -> u64 {
    parts.counts << SPAN_BITS | parts.span_us
}

/// Unpacks the parts of a state's number.
pub(crate) fn unpack(n: u64) -> Parts {
    Parts { span_us: n & ((1 << SPAN_BITS) - 1), counts: n >> SPAN_BITS }
}

/// Quotas that close.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    limit: u64,
    period_us: u64,
    lasting: Lasting,
    count_denied: bool,
}

/// A state as it is now.
#[derive(Clone, Copy, Debug)]
struct View {
    phase: Phase,
    /// Blocks that are remembered.
    level: u64,
    /// When they are forgotten; of no meaning while closed, when that is still to begin.
    forget: u64,
    /// The clock stepped back, and instants were moved with it.
    moved: bool,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Closed { until: u64, length_us: u64 },
    Counting { end: u64, strikes: u64 },
    Quiet,
}

impl Block {
    pub(crate) fn new(spec: &Spec) -> Self {
        let Spec { limit, period_us, lasting, count_denied, .. } = *spec;
        Self { limit, period_us, lasting, count_denied }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::Pair
    }

    /// Returns the state of another block as one of this block, and whether that moved an instant or closed the key. A
    /// key that is closed stays closed until the same instant.
    pub(super) fn adopt(&self, other: &Self, state: Pair, now: u64) -> (Option<Pair>, bool) {
        let mut view = other.view(Some(state), now);
        let mut moved = view.moved;
        let is_closed = matches!(view.phase, Phase::Closed { .. }); // then the memory is still to begin
        if view.level > 0 && !is_closed && view.forget > now + self.lasting.memory_us {
            (view.forget, moved) = (now + self.lasting.memory_us, true);
        }
        if self.lasting.memory_us == 0 {
            view.level = 0;
        }
        if let Phase::Counting { end, strikes } = view.phase {
            moved |= end > now + self.period_us || strikes >= self.limit;
            view = self.struck(view, now, end.min(now + self.period_us), strikes.min(self.limit));
        }
        (self.stored(view, now), moved)
    }

    // Phases ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    fn view(&self, state: Option<Pair>, now: u64) -> View {
        let quiet = View { phase: Phase::Quiet, level: 0, forget: 0, moved: false };
        let Some(state) = state.filter(|state| state.at > now) else { return quiet };
        let Parts { span_us, counts } = unpack(state.n);
        let (strikes, level) = (counts & STRIKES_MAX, counts >> (STRIKE_BITS + 1));
        if strikes == 0 {
            let end = state.at.saturating_sub(self.lasting.memory_us);
            let moved = end > now + span_us;
            let until = if moved { now + span_us } else { end };
            let phase = if until > now { Phase::Closed { until, length_us: span_us } } else { Phase::Quiet };
            return View { phase, level, forget: until + self.lasting.memory_us, moved };
        }
        let other = state.at.saturating_sub(span_us);
        let memory_is_later = counts >> STRIKE_BITS & 1 == 1;
        let (end, forget) = match (level, memory_is_later) {
            (0, _) => (state.at, 0),
            (_, true) => (other, state.at),
            (_, false) => (state.at, other),
        };
        let (latest_end, latest_forget) = (now + self.period_us, now + self.lasting.memory_us);
        let moved = end > latest_end || forget > latest_forget;
        let (end, forget) = (end.min(latest_end), forget.min(latest_forget));
        let level = if forget > now { level } else { 0 };
        // A state that was stored outside may be anything.
        let strikes = strikes.min(self.limit - 1);
        let phase = if end > now && strikes > 0 { Phase::Counting { end, strikes } } else { Phase::Quiet };
        View { phase, level, forget, moved }
    }

    /// Returns the view with this many strikes in the window that ends then.
    fn struck(&self, view: View, now: u64, end: u64, strikes: u64) -> View {
        if strikes < self.limit {
            return View { phase: Phase::Counting { end, strikes }, ..view };
        }
        let level = if view.forget > now { view.level } else { 0 };
        let length_us = self.grown_us(level);
        let level = if self.lasting.memory_us > 0 { (level + 1).min(LEVEL_MAX) } else { 0 };
        View { phase: Phase::Closed { until: now + length_us, length_us }, level, ..view }
    }

    /// Returns the length of a block when `level` blocks are remembered.
    fn grown_us(&self, level: u64) -> u64 {
        let mut length_us = self.lasting.length_us;
        for _ in 0..level {
            length_us = (length_us * self.lasting.factor).min(self.lasting.longest_us); // below 2^45 · 1,000
            if self.lasting.factor == 1 || length_us == self.lasting.longest_us {
                break;
            }
        }
        length_us
    }

    fn store(&self, view: View, now: u64) -> Next {
        self.stored(view, now).map_or(Next::Clear, Next::Set)
    }

    fn stored(&self, view: View, now: u64) -> Option<Pair> {
        let remembered = view.level > 0 && view.forget > now;
        let (level, forget) = if remembered { (view.level, view.forget) } else { (0, 0) };
        let pair = |at, level: u64, later: bool, strikes, span_us| Pair {
            at,
            n: pack(Parts { span_us, counts: level << (STRIKE_BITS + 1) | u64::from(later) << STRIKE_BITS | strikes }),
        };
        match view.phase {
            Phase::Closed { until, length_us } => {
                Some(pair(until + self.lasting.memory_us, view.level, false, 0, length_us))
            }
            Phase::Counting { end, strikes } if level == 0 => Some(pair(end, 0, false, strikes, 0)),
            Phase::Counting { end, strikes } if forget > end => Some(pair(forget, level, true, strikes, forget - end)),
            Phase::Counting { end, strikes } => Some(pair(end, level, false, strikes, end - forget)),
            Phase::Quiet if remembered => Some(pair(forget, level, false, 0, 0)),
            Phase::Quiet => None,
        }
    }

    fn taken(&self, view: View) -> u64 {
        match view.phase {
            Phase::Closed { .. } => self.limit,
            Phase::Counting { strikes, .. } => strikes,
            Phase::Quiet => 0,
        }
    }

    fn describe(&self, view: View, now: u64, retry_us: Option<u64>) -> ChargeDecision {
        let left_us = match view.phase {
            Phase::Closed { until: end, .. } | Phase::Counting { end, .. } => end - now,
            Phase::Quiet => 0,
        };
        let window_us = match (retry_us, view.phase) {
            (Some(wait), _) if wait > 0 => wait,
            (_, Phase::Quiet) => self.period_us,
            _ => left_us,
        };
        ChargeDecision::found(self.limit, self.limit - self.taken(view), left_us, window_us, retry_us)
    }
}

impl PairAlgorithm for Block {
    #[inline(never)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Answer {
        let view = self.view(state, now);
        let kept = if view.moved && cost > 0 { self.store(view, now) } else { Next::Keep };
        let fits_never = cost > self.limit && !force;
        let (end, strikes) = match view.phase {
            Phase::Closed { until, length_us } => {
                let counts = self.count_denied && cost > 0;
                let anew_us = if counts { self.grown_us(view.level.saturating_sub(1)) } else { 0 };
                let longer = now + anew_us > until;
                let (until, length_us) = if longer { (now + anew_us, anew_us) } else { (until, length_us) };
                let seen = View { phase: Phase::Closed { until, length_us }, ..view };
                let retry_us = (!fits_never).then_some(until - now);
                let next = if counts { self.store(seen, now) } else { kept };
                return Answer { decision: self.describe(seen, now, retry_us), next };
            }
            Phase::Counting { end, strikes } => (end, strikes),
            Phase::Quiet => (now + self.period_us, 0),
        };
        if cost == 0 {
            return Answer { decision: self.describe(view, now, Some(0)), next: kept };
        }
        let room = self.limit - strikes;
        let denied = cost > room && !force;
        if denied && !self.count_denied {
            let retry_us = (!fits_never).then_some(end - now);
            return Answer { decision: self.describe(view, now, retry_us), next: kept };
        }
        let units = cost.min(room);
        let after = self.struck(view, now, end, strikes + units);
        let closed_us = match after.phase {
            Phase::Closed { until, .. } if denied || force => until - now,
            _ => 0,
        };
        let decision = self.describe(after, now, (!fits_never).then_some(closed_us));
        let decision = if denied { decision } else { decision.receipted(units, end, 0) };
        Answer { decision, next: self.store(after, now) }
    }

    /// A charge on refusal is a strike if a charge that it belongs to was refused. Otherwise it looks.
    fn decide_how(&self, state: Option<Pair>, now: u64, cost: u64, how: How) -> Answer {
        let How::OnRefusal { refused } = how else {
            let (cost, force) = how.plainly(cost);
            return self.decide(state, now, cost, force);
        };
        let closed = matches!(self.view(state, now).phase, Phase::Closed { .. });
        let counts = refused || (closed && self.count_denied);
        self.decide(state, now, if counts { cost } else { 0 }, counts)
    }

    /// Refunds strikes that were counted in the window that ends at `own`, while it counts.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let view = self.view(Some(state), now);
        match view.phase {
            Phase::Counting { end, strikes } if end == own.at && units > 0 => {
                let strikes = strikes.saturating_sub(units);
                let phase = if strikes > 0 { Phase::Counting { end, strikes } } else { Phase::Quiet };
                self.store(View { phase, ..view }, now)
            }
            _ => Next::Keep,
        }
    }

    #[cfg(feature = "redis")]
    fn numbers(&self, cost: u64, force: bool) -> Numbers {
        let count_denied = u64::from(self.count_denied);
        numbers(&[
            cost.min(self.limit + 1),
            u64::from(force),
            self.limit,
            self.period_us,
            self.lasting.length_us,
            self.lasting.factor,
            self.lasting.longest_us,
            self.lasting.memory_us,
            count_denied,
        ])
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        let view = self.view(Some(state), now);
        let units = self.taken(view);
        let dated = match view.phase {
            Phase::Closed { until, .. } => Some(Dated::new(None, until, units)),
            Phase::Counting { end, .. } => Some(Dated::new(Some(end.saturating_sub(self.period_us)), end, units)),
            Phase::Quiet => None,
        };
        Carried::new(Used::units(units), dated)
    }

    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let strikes = carried.used.units_ceil().min(self.limit);
        let rest = View { phase: Phase::Quiet, level: 0, forget: 0, moved: false };
        let end = carried.until(now, self.period_us);
        self.stored(if strikes == 0 { rest } else { self.struck(rest, now, end, strikes) }, now)
    }

    fn could_be(&self, state: Pair) -> bool {
        let Parts { span_us, counts } = unpack(state.n);
        counts & STRIKES_MAX < self.limit && span_us <= PERIOD_US_MAX
    }

    /// Whether the state lies further ahead than any block. A block that was made by hand may be longer than the
    /// quota's own, and is clamped by its own length.
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        state.at.saturating_sub(now) > PERIOD_US_MAX + self.lasting.memory_us
    }

    /// Any quota's units are strikes.
    fn most(&self) -> u64 {
        u64::MAX
    }

    fn longest_us(&self) -> u64 {
        u64::MAX
    }
}
