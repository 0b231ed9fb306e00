//! The second word of a slot: a whole state, or the index of its first block in the [arena](super::entry_arena).
//!
//! A word begins with the instant at which its state expires, so one comparison shows whether a state of any kind has
//! expired. The lower bits hold the state's number, or the number of the state's first block.

use crate::algorithm::gcra::Ahead;
use crate::algorithm::places::HELD_MAX;
use crate::algorithm::{NUMBER_BITS, Pair, WORD_AHEAD_US, WordLayout};

/// The word of a slot that a thread has locked. No state has this word, see [`RELATIVE_US_MAX`].
pub(super) const LOCKED: u64 = u64::MAX;

/// The word of a slot without a state. This word counts as expired at any instant.
pub(super) const NO_STATE: u64 = 0;

/// The number of bits below a word's instant, if the instant is in microseconds.
const LOWER_BITS: u32 = NUMBER_BITS;

/// The shift of words that hold a block's number: the instant takes the upper half, in units of an eighth of a second.
pub(super) const BLOCK_SHIFT: u32 = u32::BITS - LOWER_BITS;

/// The latest instant, in microseconds after the limiter's base, at which words are exact: about 13
/// years. For a later instant the limiter moves its base.
pub(super) const RELATIVE_US_MAX: u64 = (1 << (64 - LOWER_BITS)) - WORD_AHEAD_US - (1 << 42);

/// The highest bits of a word of held units. All other words of states are lower, and so is every instant with which
/// expiries are compared. So a word of held units never expires.
const HELD: u64 = 0b11 << 62;
const _: () = assert!(RELATIVE_US_MAX < HELD >> LOWER_BITS, "words of held units never expire");

/// The number of bits of a word that hold the number of held units. The bits above hold the number of the
/// run.
const UNIT_BITS: u32 = 40;
pub(super) const RUN_BITS: u32 = u64::BITS - 2 - UNIT_BITS;
const _: () = assert!(HELD_MAX < (1 << UNIT_BITS) - 1, "no word of held units is LOCKED");

/// Takes the place of the run's number in a word that names a block of the arena. The block has the units and the
/// run's number. No run in a word has this number.
const RUN_IN_ARENA: u64 = (1 << RUN_BITS) - 1;
const _: () = assert!((u32::MAX as u64) < (1 << UNIT_BITS) - 1, "no word of a block is LOCKED");

/// The instant of a decision: in microseconds since the epoch, and since the limiter's base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Now {
    pub(super) at: u64,
    pub(super) relative: u64,
}

impl Now {
    /// Returns the instant nearest to `at` that words with this base can hold.
    pub(super) fn new(at: u64, base: u64) -> Self {
        let relative = at.wrapping_sub(base);
        if relative <= RELATIVE_US_MAX {
            return Self { at, relative };
        }
        let relative = if at < base { 0 } else { RELATIVE_US_MAX };
        Self { at: base + relative, relative }
    }

    /// Returns the instant that is `us` microseconds before this instant, but not before the base.
    pub(super) fn earlier(self, us: u64) -> Self {
        let relative = self.relative.saturating_sub(us);
        Self { at: self.base() + relative, relative }
    }

    #[inline]
    fn base(self) -> u64 {
        self.at - self.relative
    }
}

impl WordLayout {
    /// Packs a state that is neither older than the base nor further ahead than a word can hold.
    #[inline]
    pub(super) fn pack(self, state: Pair, now: Now) -> u64 {
        let relative = state.at.saturating_sub(now.base());
        let unit = (1 << self.shift) - 1;
        ((relative + unit) >> self.shift) << (LOWER_BITS + self.shift) | state.n
    }

    /// Packs a state that lies `ahead` of now, in a layout whose instants are microseconds.
    #[inline]
    pub(super) fn pack_ahead(ahead: Ahead, now: Now) -> u64 {
        (now.relative + ahead.us) << LOWER_BITS | ahead.num
    }

    /// Returns how far the state in a word lies ahead of now, or zero if it has expired. The instants of the
    /// layout are microseconds.
    #[inline]
    pub(super) fn unpack_ahead(word: u64, now: Now) -> Ahead {
        match is_expired(word, 0, now) {
            true => Ahead { us: 0, num: 0 },
            false => Ahead { us: (word >> LOWER_BITS) - now.relative, num: word & ((1 << LOWER_BITS) - 1) },
        }
    }

    /// Returns the state in a word, unless it has expired.
    #[inline]
    pub(super) fn unpack(self, word: u64, now: Now) -> Option<Pair> {
        if is_expired(word, self.shift, now) {
            return None;
        }
        let bits = LOWER_BITS + self.shift;
        let upper = now.base() + ((word >> bits) << self.shift);
        // The word has the instant in units of 2^`shift` µs, rounded up. If instants lie on a grid, the original
        // instant is the last grid point up to the rounded one.
        let at = if self.shift == 0 { upper } else { self.grid.round_down(upper) };
        Some(Pair { at, n: word & ((1 << bits) - 1) })
    }
}

/// The held units of a key, which is a state that does not expire.
///
/// A key's units are held in runs. A run begins with the first held unit, and ends with the return of the last held
/// unit, or with a reset of the key. A receipt names its run, so that a refund of units that were taken before a
/// reset returns no units that were taken after the reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeldUnits {
    pub(super) units: u64,
    /// The number of resets before the run began.
    pub(super) run: u64,
}

/// The content of a word about a key's held units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeldWord {
    Nothing,
    Units(HeldUnits),
    /// The units are in this block of the arena.
    InArena(u32),
}

impl HeldUnits {
    /// Packs the number of held units, which is at least 1. Returns `None` if the run's number is too large for
    /// a word.
    #[inline]
    pub(super) fn pack(self) -> Option<u64> {
        debug_assert!(self.units > 0, "a value in use holds at least one unit");
        (self.run < RUN_IN_ARENA).then_some(HELD | self.run << UNIT_BITS | self.units)
    }

    /// Returns the word of units that are in a block of the arena.
    pub(super) fn in_arena(block: u32) -> u64 {
        HELD | RUN_IN_ARENA << UNIT_BITS | u64::from(block)
    }

    /// Returns the word of a key whose last unit was returned at an instant, in microseconds after the base.
    /// The word equals the word of a state that expired at that instant. The key therefore keeps its slot for a
    /// while, as a key of any other quota does.
    #[inline]
    pub(super) fn returned(relative_us: u64) -> u64 {
        relative_us << LOWER_BITS
    }
}

impl HeldWord {
    #[inline]
    pub(super) fn of(word: u64) -> Self {
        if word < HELD {
            return Self::Nothing;
        }
        match word >> UNIT_BITS & RUN_IN_ARENA {
            RUN_IN_ARENA => Self::InArena(block_of(word)),
            run => Self::Units(HeldUnits { units: word & ((1 << UNIT_BITS) - 1), run }),
        }
    }
}

/// Returns whether the word holds no units and shows that the clock has stepped back: the word's instant lies
/// more than `us` microseconds ahead of now.
pub(super) fn is_returned_after(word: u64, now: Now, us: u64) -> bool {
    word < HELD && expiry_of(word, 0) > now.relative + us
}

/// Returns whether the state in a word of this shift has expired. If the shift is above 0, the state expires up to
/// 2^`shift` microseconds late.
#[inline]
pub(super) fn is_expired(word: u64, shift: u32, now: Now) -> bool {
    word <= (now.relative >> shift) << (LOWER_BITS + shift)
}

/// Returns the word of a state in the arena that expires at an instant. An instant that is too late for a word
/// is never reached, because the limiter's time stands still before that instant.
pub(super) fn block_word(first: u32, expires_us: u64, now: Now) -> u64 {
    let relative = expires_us.saturating_sub(now.base()).div_ceil(1 << BLOCK_SHIFT);
    relative.min(u64::from(u32::MAX - 1)) << u32::BITS | u64::from(first)
}

/// Returns the first block of a word that [`block_word`] made; 0 if the word is [`NO_STATE`].
pub(super) fn block_of(word: u64) -> u32 {
    word as u32 // the lower half
}

/// Returns the instant at which a word of this shift expires, in microseconds after the base.
pub(super) fn expiry_of(word: u64, shift: u32) -> u64 {
    (word >> (LOWER_BITS + shift)) << shift
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use super::*;

    #[test]
    fn no_word_of_a_block_is_that_of_a_locked_slot() {
        let now = Now::new(5_000_000, 0);
        for expires_us in [0, 5_000_001, u64::MAX] {
            let word = block_word(u32::MAX, expires_us, now);
            assert_eq!((word == LOCKED, block_of(word)), (false, u32::MAX), "{expires_us}");
        }
    }
}
