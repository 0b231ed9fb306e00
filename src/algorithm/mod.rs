//! The algorithms: what each one is, what it guarantees, and which one to choose.
//!
//! | you want | take | state per key |
//! |---|---|---|
//! | a rate with room for bursts, the usual API limit | [token bucket](crate::Quota::token_bucket) (the default) | one instant |
//! | strict spacing between requests | [GCRA](crate::Quota::gcra) with burst 1 | one instant |
//! | tokens that come all at once, at each tick | [step bucket](crate::Quota::step_bucket) | one tick and one count |
//! | a level that rises with use and leaks away | [leaky bucket](crate::Quota::leaky_bucket) | one instant |
//! | requests spaced out instead of refused | [leaky queue](crate::Quota::leaky_queue) | one instant |
//! | a budget for each day of UTC, or for each hour | [fixed window](crate::Quota::fixed_window) | end and count |
//! | "100 per minute" without twice that around an edge, at little memory | [sliding window](crate::Quota::sliding_window) | two counters, or one for each bucket |
//! | to close a key for long once its units are used up, or once it was refused so often | [block](crate::Quota::block) | one instant and counts |
//! | to count units until somebody settles them | [meter](crate::Quota::meter) | one instant and a count |
//! | never more than the limit in *any* trailing period | [sliding log](crate::Quota::sliding_log), or a sliding window with the oldest bucket [counted](crate::Oldest::Counted) | each admitted request, or one counter for each bucket |
//!
//! # The laws
//!
//! Each algorithm is a pure function of quota, state, instant and cost: no clock, no I/O, no lock, no allocation. All keep
//! these laws, which are property tests against an oracle that recomputes everything from the full history:
//!
//! 1. *Safety*: no interval admits more than the algorithm's stated bound; units given back count as given back.
//! 2. *Liveness*: from rest exactly the capacity passes at once, and the long-run rate is the quota's, to the last unit;
//!    of sliding windows what [`Oldest`](crate::Oldest) says; of a burst that holds one unit, one per interval rounded up
//!    to the clock's microsecond, since two within an interval is what it forbids.
//! 3. *The client's promise*: denied with `retry_after = d`, the same cost is denied at every earlier instant and admitted
//!    at `now + d`, if nobody else came and the key's quota did not change.
//! 4. What takes nothing writes nothing: a look, a peek, a denied request, a refund of nothing. `remaining` is reported as it
//!    is. The exceptions are quotas that count denied requests, quotas that refusals are
//!    [charged to](crate::Effect::OnRefusal), and a state that lies further ahead than its quota can put it: a denied
//!    request brings it back, after a clock stepped back or a quota changed, since it would else stay there.
//! 5. Cost 0 looks: it is allowed unless a block is in the way, and writes nothing. Cost `n` at one instant is `n` times
//!    cost 1, all or nothing. A cost above the capacity is denied for good. Windows are half-open.
//! 6. Several charges: all are taken or none is.
//! 7. A refund returns, at most once, what its own receipt still holds. A lone refund, and refunds of one key that come the
//!    newest charge first, never leave the limit more permissive than if the charges had not been made. A bucket's receipts
//!    that come in another order can leave it more permissive, by less than they hold.
//!    A refund to a leaky queue has no effect once another request has queued behind it, because that request has already
//!    been promised its departure. A refund does not undo what else the request did: where it anchored windows or steps,
//!    which entries it displaced in a log that counts denied requests, and which debt was not remembered because of it.
//! 8. Forgetting an expired state changes no decision. A clock that steps back never panics, wraps or over-admits (an edge
//!    of steps that is crossed again ticks again, and a window that a refund emptied is forgotten), and costs a key at most
//!    one full drain or one period more.
//!
//! # When a quota changes
//!
//! A key whose policy has another quota now, such as another plan, keeps what it has used. Until a request is admitted under
//! the new quota the units come back as under the old one. The first admitted request takes them over:
//!
//! | from | to | in use, rounded up to a whole unit | when it comes back |
//! |---|---|---|---|
//! | any bucket | token bucket, GCRA, leaky bucket or queue | the same, to the fraction of a unit | at the new rate |
//! | any other | token bucket, GCRA, leaky bucket or queue | the same | at the new rate |
//! | step bucket | step bucket | the same | at ticks of the new length, counted from the old one's last tick |
//! | any other | step bucket | the same | at ticks of the epoch, or counted from the first request |
//! | window or meter | fixed window, meter or block | the same | a period after it began to count, or when it would have, if that is later; windows of the epoch round up to an edge |
//! | any other | fixed window, meter or block | the same | one period after the change, or when it would have |
//! | log or sliding window | log or sliding window | each entry by the instant at which it was taken | as if it had been taken under the new quota |
//! | any other | log or sliding window | the same | when it would have, but at most one period after the change |
//! | block | block | the strikes | a closed key stays closed until then |
//!
//! The amount never shrinks, so no order of changes frees units that both quotas still count; of windows whose oldest part
//! is weighted or dropped, the new quota's own rule says what it counts. No unit counts for longer than if it had been taken
//! at the change, but to the next edge of a window. So a key that changes at each request between a bucket and a sliding
//! window of few sub-windows gets less than under either: give such plans one algorithm. A quota with
//! [`in_proportion`](crate::Quota::in_proportion) keeps the share of the capacity in place of the amount.
//!
//! A denied request writes none of this, unless the old units would come back later than two periods of the new quota, or
//! of a bucket later than it can drain: then it takes them over too, so that a key that leaves a quota per day for one per
//! minute does not wait for a day.

pub(crate) mod block;
pub(crate) mod carry;
pub(crate) mod divisor;
pub(crate) mod fixed_window;
pub(crate) mod gcra;
#[cfg(test)]
pub(crate) mod laws;
pub(crate) mod meter;
#[cfg(test)]
pub(crate) mod naive;
pub(crate) mod one_unit;
pub(crate) mod sliding_window;
pub(crate) mod step_bucket;
pub(crate) mod trail;

use crate::decision::ChargeDecision;
#[cfg(feature = "redis")]
use crate::decision::Receipt;
use crate::quota::{Algorithm, Spec};

use block::Block;
use divisor::Divisor;
use fixed_window::FixedWindow;
use gcra::Gcra;
use meter::Meter;
use sliding_window::TwoCounters;
use step_bucket::StepBucket;
use trail::Trail;

/// A state of two numbers: an instant in microseconds, and a number whose meaning is the algorithm's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) at: u64,
    pub(crate) n: u64,
}

/// What becomes of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Keep,
    Clear,
    Set(Pair),
}

/// A decision, and the state to write: if the charge is taken, or if this refusal is to be written.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) decision: ChargeDecision,
    pub(crate) next: Next,
}

/// What an algorithm's Lua twin is told of a charge: whole numbers below 2^53, or [`UNBOUNDED`].
#[cfg(feature = "redis")]
pub(crate) type Numbers = smallvec::SmallVec<[f64; 10]>;

/// In place of a bound when there is none.
#[cfg(feature = "redis")]
pub(crate) const UNBOUNDED: u64 = 1 << 62;

#[cfg(feature = "redis")]
fn numbers(whole: &[u64]) -> Numbers {
    whole.iter().map(|number| *number as f64).collect()
}

/// How full a state is, for choosing which to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fullness {
    /// Not even one unit would pass.
    pub(crate) throttled: bool,
    /// The used part of the capacity, in 65,536ths.
    pub(crate) used: u64,
}

/// The part that `used` is of `whole`, in 65,536ths.
fn share(used: u64, whole: u64) -> u64 {
    ((u128::from(used) << 16) / u128::from(whole.max(1))).min(u128::from(u64::MAX)) as u64
}

/// Units in use, exactly: `parts / of`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub(crate) parts: u128,
    pub(crate) of: u128,
}

impl Used {
    fn units(units: u64) -> Self {
        Self { parts: u128::from(units), of: 1 }
    }

    /// As large a part of a capacity of `to` as it is of one of `from`, rounded up to whole units first where the exact
    /// product would not fit.
    pub(crate) fn in_proportion(self, from: u64, to: u64) -> Self {
        let (from, to) = (u128::from(from.max(1)), u128::from(to)); // nothing is in use of nothing
        match self.parts.checked_mul(to) {
            Some(parts) => Self { parts, of: self.of * from }, // below 2^45 · 2^50
            None => Self { parts: u128::from(self.units_ceil()) * to, of: from },
        }
    }

    pub(crate) fn units_ceil(self) -> u64 {
        u64::try_from(self.parts.div_ceil(self.of)).unwrap_or(u64::MAX)
    }

    /// `⌈used · scale⌉`, rounded up to whole units first where the exact product would not fit.
    fn scaled_ceil(self, scale: u128) -> u128 {
        match self.parts.checked_mul(scale) {
            Some(product) => product.div_ceil(self.of),
            None => u128::from(self.units_ceil()).saturating_mul(scale),
        }
    }
}

/// How a state is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A pair that fits one word of 64 bits.
    Word(WordLayout),
    /// A pair of two words.
    Pair,
    /// Dated entries.
    Trail,
}

/// A pair in one word: the instant's upper bits in units of `2^shift` µs, rounded up, and below them the number.
///
/// The instant takes `49 − shift` bits, the number `15 + shift`. A shift above 0 is for instants that lie on a grid,
/// at most one of whose points is in each unit, so that rounding loses nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WordLayout {
    pub(crate) shift: u32,
    /// The grid's width; 1 if the instant is any microsecond.
    pub(crate) grid: Divisor,
}

/// Bits of a word's number when its instant is in microseconds.
pub(crate) const NUMBER_BITS: u32 = 15;

/// How far ahead a word's instant may lie. Four times that is what its bits hold, see [`Layout::of`].
pub(crate) const WORD_AHEAD_US: u64 = 1 << 47;

impl Layout {
    /// The layout for numbers of so many bits, and instants on a grid or anywhere, at most `ahead_us` from now.
    fn of(number_bits: u32, grid_us: Option<u64>, ahead_us: u64) -> Self {
        let grid_us = grid_us.unwrap_or(1);
        let shift = grid_us.ilog2().min(40);
        if number_bits <= NUMBER_BITS + shift && ahead_us <= WORD_AHEAD_US {
            Self::Word(WordLayout { shift, grid: Divisor::new(grid_us) })
        } else {
            Self::Pair
        }
    }
}

/// How many bits hold numbers up to `most`.
pub(crate) fn bits(most: u64) -> u32 {
    u64::BITS - most.leading_zeros()
}

/// A quota's algorithm with everything precomputed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rules {
    Pair(PairRules, Layout),
    Trail(Trail),
}

/// The algorithms whose state is a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PairRules {
    Gcra(Gcra),
    StepBucket(StepBucket),
    FixedWindow(FixedWindow),
    TwoCounters(TwoCounters),
    Block(Block),
    Meter(Meter),
}

/// How a charge is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    IfAllowed,
    Force,
    /// If what it belongs to was refused, as said here, whatever is left of a quota but a meter's; else it looks.
    OnRefusal {
        refused: bool,
    },
}

impl How {
    /// The cost and whether it is forced, where nothing more is to be told apart.
    fn plainly(self, cost: u64) -> (u64, bool) {
        match self {
            Self::IfAllowed => (cost, false),
            Self::Force | Self::OnRefusal { refused: true } => (cost, true),
            Self::OnRefusal { refused: false } => (0, false),
        }
    }
}

impl Rules {
    pub(crate) fn new(spec: &Spec) -> Self {
        let (rules, layout) = match spec.algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket | Algorithm::LeakyQueue => {
                let gcra = Gcra::new(spec);
                (PairRules::Gcra(gcra), gcra.layout())
            }
            Algorithm::StepBucket => {
                let bucket = StepBucket::new(spec);
                (PairRules::StepBucket(bucket), bucket.layout())
            }
            Algorithm::FixedWindow => {
                let window = FixedWindow::new(spec);
                (PairRules::FixedWindow(window), window.layout())
            }
            Algorithm::SlidingWindow if sliding_window::fits_pair(spec) => {
                let counters = TwoCounters::new(spec);
                (PairRules::TwoCounters(counters), counters.layout())
            }
            Algorithm::Block => {
                let block = Block::new(spec);
                (PairRules::Block(block), block.layout())
            }
            Algorithm::Meter => {
                let meter = Meter::new(spec);
                (PairRules::Meter(meter), meter.layout())
            }
            Algorithm::SlidingWindow | Algorithm::SlidingLog => return Self::Trail(Trail::new(spec)),
        };
        Self::Pair(rules, layout)
    }

    /// The receipt of a charge's first `units`, from that of the whole charge, of which `last` more come after them.
    #[cfg(feature = "redis")]
    pub(crate) fn first_of(&self, whole: &Receipt, units: u64, last: u64) -> Receipt {
        let own = Pair { at: whole.at_us(), n: whole.part() };
        let own = match self {
            Self::Pair(PairRules::Gcra(gcra), _) => gcra.own_without(own, last),
            Self::Pair(PairRules::StepBucket(bucket), _) => bucket.own_without(own, last),
            // Of windows and logs it is the window or the instant.
            Self::Pair(..) | Self::Trail(_) => own,
        };
        Receipt::new(units, own.at, own.n)
    }

    pub(crate) fn layout(&self) -> Layout {
        match self {
            Self::Pair(_, layout) => *layout,
            Self::Trail(_) => Layout::Trail,
        }
    }
}

/// Calls something with the rules by their own type.
macro_rules! by_type {
    ($rules:expr, $one:ident => $call:expr) => {
        match $rules {
            $crate::algorithm::PairRules::Gcra($one) => $call,
            $crate::algorithm::PairRules::StepBucket($one) => $call,
            $crate::algorithm::PairRules::FixedWindow($one) => $call,
            $crate::algorithm::PairRules::TwoCounters($one) => $call,
            $crate::algorithm::PairRules::Block($one) => $call,
            $crate::algorithm::PairRules::Meter($one) => $call,
        }
    };
}
pub(crate) use by_type;

impl PairRules {
    /// The decision for `cost` at `now`, which is at most [`CLOCK_US_MAX`](crate::time::CLOCK_US_MAX), and the state to
    /// write. Forced charges are always admitted, into debt.
    #[inline]
    pub(crate) fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Answer {
        by_type!(self, rules => rules.decide(state, now, cost, force))
    }

    /// The same for a charge that is taken in this way.
    #[inline]
    pub(crate) fn decide_how(&self, state: Option<Pair>, now: u64, cost: u64, how: How) -> Answer {
        if let How::OnRefusal { refused } = how {
            match self {
                Self::Block(block) => return block.on_refusal(state, now, cost, refused),
                Self::Meter(meter) => return meter.decide(state, now, if refused { cost } else { 0 }, false),
                _ => {}
            }
        }
        let (cost, force) = how.plainly(cost);
        self.decide(state, now, cost, force)
    }

    /// Whether its states are kept while they count, however full the table is.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self, Self::Meter(_))
    }

    /// Gives back `units` of the charge whose receipt holds `own`.
    pub(crate) fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        by_type!(self, rules => rules.refund(state, now, units, own))
    }

    /// Whether the quota could have made this state: what comes from outside may be anything.
    pub(crate) fn could_be(&self, state: Pair) -> bool {
        by_type!(self, rules => rules.could_be(state))
    }

    /// Whether the state is further ahead of now than the quota can put it, so that a decision at `now` would rewind it:
    /// either the clock stepped back, or `now` is older than the state.
    #[inline]
    pub(crate) fn is_clamped(&self, state: Pair, now: u64) -> bool {
        by_type!(self, rules => rules.is_clamped(state, now))
    }

    pub(crate) fn fullness(&self, state: Pair, now: u64) -> Fullness {
        by_type!(self, rules => rules.fullness(state, now))
    }
}
