//! The common parts of the algorithms: their states, how states are stored, and the trait of an
//! algorithm.

use crate::decision::ChargeDecision;

use super::divisor::Divisor;
use super::used::Carried;

/// A state of two numbers: an instant in microseconds, and a number whose meaning depends on the algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) at: u64,
    pub(crate) n: u64,
}

/// The change of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Keep,
    Clear,
    Set(Pair),
}

impl Next {
    /// Returns the state to write, if there is one.
    pub(super) fn state(self) -> Option<Pair> {
        match self {
            Self::Set(pair) => Some(pair),
            Self::Keep | Self::Clear => None,
        }
    }
}

/// A decision, and the state to write if the charge is taken. A denied charge may also write a state.
#[derive(Debug)]
pub(crate) struct Transition {
    pub(crate) decision: ChargeDecision,
    pub(crate) next: Next,
}

/// The way in which a charge is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeMode {
    IfAllowed,
    Force,
    /// The charge is taken only if one of the charges to which it belongs was refused. Otherwise it takes nothing.
    OnRefusal {
        refused: bool,
    },
}

impl TakeMode {
    /// Returns the cost of the charge and whether the charge is forced, for an algorithm that has no rule
    /// of its own for charges on refusal.
    #[inline]
    pub(crate) fn plainly(self, cost: u64) -> (u64, bool) {
        match self {
            Self::IfAllowed => (cost, false),
            Self::Force | Self::OnRefusal { refused: true } => (cost, true),
            Self::OnRefusal { refused: false } => (0, false),
        }
    }
}

/// An algorithm of one quota whose states are pairs.
///
/// All of it is pure. `now` is at most [`CLOCK_US_MAX`](crate::base::time::CLOCK_US_MAX).
pub(crate) trait PairAlgorithm {
    /// Returns the decision for `cost` and the state to write. A forced charge is always admitted, if necessary
    /// into debt.
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition;

    /// Returns the decision for a charge that is taken as `how` says, and the state to write.
    #[inline(always)]
    fn decide_how(&self, state: Option<Pair>, now: u64, cost: u64, how: TakeMode) -> Transition {
        let (cost, force) = how.plainly(cost);
        self.decide(state, now, cost, force)
    }

    /// Refunds `units` of the charge whose receipt holds `own`.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next;

    /// Returns whether a refund changes nothing yet, because a later slot of the queue is taken. The same refund
    /// succeeds after all later slots have been refunded.
    fn is_behind(&self, _state: Pair, _now: u64, _own: Pair) -> bool {
        false
    }

    /// Returns whether the quota could have made this state. A state that was read from a store may have any
    /// numbers.
    fn could_be(&self, state: Pair) -> bool;

    /// Returns whether the state is further ahead of `now` than any state that the quota makes, so that a decision
    /// would move the state back. The state is ahead if the clock stepped back, or if `now` was read before the
    /// state.
    fn is_clamped(&self, state: Pair, now: u64) -> bool;

    /// Returns whether a decision at `now` would begin a new count, although the old count would be valid at an
    /// earlier instant. The old count is in this state. If there is no state, the old count may have been in a
    /// state that has expired. For such a decision, the clock has to be read after the state: if the clock were
    /// read first and then stepped back, the decision would forget units that still count. A bucket forgets
    /// nothing, because the instant at which the bucket is empty only moves ahead.
    #[inline(always)]
    fn counts_anew(&self, _state: Option<Pair>, _now: u64) -> bool {
        false
    }

    /// Returns how full the state is.
    fn fullness(&self, state: Pair, now: u64) -> Fullness {
        Fullness::of(&self.decide(Some(state), now, 0, false).decision)
    }

    /// Returns the units in use, and when they are freed, for the conversion to another quota. If `sliced`, the units
    /// of a bucket are split into a few slices, each with its own time. A log or a sliding window needs the times of
    /// the slices.
    fn carried(&self, state: Pair, now: u64, sliced: bool) -> Carried;

    /// Converts the units of another quota, `carried`, into a state of this quota. The returned state
    /// has at most [`most`](Self::most) units in use.
    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair>;

    /// Returns the maximum number of units that can be in use: the capacity and the allowed debt
    /// together.
    fn most(&self) -> u64;

    /// Returns the time from now that decides whether a denied charge writes a converted state. If a denied
    /// charge finds a state of another quota whose units are all freed within this time, the charge leaves
    /// the state as it is. If some units are freed later, the charge writes the converted state. If the
    /// charge did not write the state, each request would convert the old state again, and a window that
    /// ends a period after its conversion would never end.
    ///
    /// Windows return two periods, or the time until the end of the calendar's next window. Buckets return the time
    /// in which a full bucket with its allowed debt drains.
    fn longest_us(&self, now: u64) -> u64;

    /// Returns the numbers with which the Lua twin decides on a charge.
    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers;

    /// Returns the pair that a charge's receipt would hold if the charge were smaller by its last
    /// units.
    #[cfg(any(feature = "_redis", feature = "store"))]
    fn own_without(&self, own: Pair, _last: u64) -> Pair {
        own // the window
    }
}

/// The fullness of a state. A limiter that has no room for a new state forgets the emptiest of its
/// states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Fullness {
    /// Whether no unit is left, so that a charge of 1 would be denied.
    pub(crate) throttled: bool,
    /// The used part of the capacity, in 65,536ths.
    pub(crate) used: u64,
}

impl Fullness {
    /// Returns the fullness of a state from the decision of a peek.
    pub(super) fn of(look: &ChargeDecision) -> Self {
        Self { throttled: look.remaining() == 0, used: share(look.limit() - look.remaining(), look.limit()) }
    }
}

/// Returns `used / whole` in 65,536ths, rounded down.
pub(super) fn share(used: u64, whole: u64) -> u64 {
    ((u128::from(used) << 16) / u128::from(whole.max(1))).min(u128::from(u64::MAX)) as u64
}

/// The form in which a state is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// A pair that fits one word of 64 bits.
    Word(WordLayout),
    /// A pair of two words.
    Pair,
    /// Dated entries.
    Entries,
    /// A number of units that are held.
    Count,
}

/// A pair in one word. The upper bits are the instant in units of `2^shift` µs, rounded up, and the lower bits
/// are the number.
///
/// The instant takes `49 − shift` bits, and the number `15 + shift` bits. The shift is above 0 only if instants lie
/// on a grid. With such a shift, each unit of `2^shift` µs holds at most one point of the grid, so rounding loses
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WordLayout {
    pub(crate) shift: u32,
    /// The width of the grid in microseconds; 1 if the instant may be any microsecond.
    pub(crate) grid: Divisor,
}

/// How many bits of a word hold the number if the instant is in microseconds.
pub(crate) const NUMBER_BITS: u32 = 15;

/// The longest time in microseconds by which a word's instant may be ahead. The instant's bits can hold an
/// instant four times as far ahead; see [`Layout::of`].
pub(crate) const WORD_AHEAD_US: u64 = 1 << 47;

impl Layout {
    /// Returns the layout for numbers of `number_bits` bits, and for instants at most `ahead_us` from now. `grid_us` is
    /// the width of the grid on which the instants lie, if they lie on a grid.
    pub(super) fn of(number_bits: u32, grid_us: Option<u64>, ahead_us: u64) -> Self {
        let grid_us = grid_us.unwrap_or(1);
        let shift = grid_us.ilog2().min(40);
        if number_bits <= NUMBER_BITS + shift && ahead_us <= WORD_AHEAD_US {
            Self::Word(WordLayout { shift, grid: Divisor::new(grid_us) })
        } else {
            Self::Pair
        }
    }
}

/// Returns how many bits hold numbers up to `most`.
pub(crate) fn bits(most: u64) -> u32 {
    u64::BITS - most.leading_zeros()
}

/// The numbers with which an algorithm's Lua twin decides on a charge: whole numbers below 2^53, or
/// [`UNBOUNDED`].
#[cfg(feature = "_redis")]
pub(crate) type LuaNumbers = smallvec::SmallVec<[f64; 10]>;

/// Stands for a missing bound.
#[cfg(feature = "_redis")]
pub(crate) const UNBOUNDED: u64 = 1 << 62;

#[cfg(feature = "_redis")]
pub(super) fn numbers(whole: &[u64]) -> LuaNumbers {
    whole.iter().map(|number| *number as f64).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::algorithm::{Decider, block};
    use crate::quota::{Anchor, Quota};

    #[test]
    fn number_that_no_word_holds_is_kept_in_a_pair() {
        let is_word = |bits, grid_us, ahead_us| matches!(Layout::of(bits, grid_us, ahead_us), Layout::Word(_));
        assert!(is_word(NUMBER_BITS, None, WORD_AHEAD_US));
        assert!(!is_word(NUMBER_BITS + 1, None, 0));
        assert!(!is_word(0, None, WORD_AHEAD_US + 1));
        assert!(is_word(NUMBER_BITS + 2, Some(7), 0), "two bits of the instant are free");
        assert!(!is_word(NUMBER_BITS + 3, Some(7), 0));
    }

    #[test]
    fn fullness_is_the_used_part_of_the_capacity() {
        for (limit, remaining, throttled, used) in
            [(4, 4, false, 0), (4, 1, false, 49_152), (4, 0, true, 65_536), (0, 0, true, 0)]
        {
            let found = Fullness::of(&ChargeDecision::allowed(limit, remaining));
            assert_eq!(found, Fullness { throttled, used }, "{remaining} of {limit}");
        }
    }

    #[test]
    fn state_that_no_charge_can_have_made_is_known() {
        let ten = Duration::from_micros(10);
        let first = |quota: Quota| quota.anchor(Anchor::FirstRequest).expect("it has an anchor");
        let bucket = Quota::token_bucket(3, ten).expect("valid"); // numerators are below 3
        let step = Quota::step_bucket(3, ten).expect("valid");
        let fixed = Quota::fixed_window(3, ten).and_then(|quota| quota.max_debt(2)).expect("valid");
        let sliding = Quota::sliding_window(3, ten).and_then(|quota| quota.max_debt(0)).expect("valid");
        let closing = Quota::block(3, ten, ten).expect("valid");
        let counts = |before: u64, current: u64| before << 2 | current; // up to 3
        let spanning = |span_us| block::pack(block::BlockParts { span_us, counts: 1 });
        for (quota, at, n, could) in [
            (bucket, 7, 2, true),
            (bucket, 7, 3, false),
            (step, 20, 2, true),
            (step, 20, 3, false),
            (step, 21, 2, false),
            (first(step), 21, 2, true),
            (first(step), 21, 3, false),
            (fixed, 20, 5, true),
            (fixed, 20, 6, false),
            (fixed, 21, 5, false),
            (first(fixed), 21, 5, true),
            (first(fixed), 21, 6, false),
            (sliding, 20, counts(3, 3), true),
            (sliding, 21, counts(3, 3), false),
            (sliding, 20, counts(4, 3), false),
            (closing, 21, spanning(crate::base::time::PERIOD_US_MAX), true),
            (closing, 21, spanning(crate::base::time::PERIOD_US_MAX + 1), false),
        ] {
            let Decider::Pair(rules, _) = quota.decider() else { panic!("{quota} is kept as a pair") };
            assert_eq!(rules.get().could_be(Pair { at, n }), could, "{quota}: {n} at {at}");
        }
    }
}
