//! The table of one-word states: flat, set-associative, with a lock in each slot.
//!
//! A slot is two words: a tag (the key's fingerprint, and below it the number of the policy's
//! [version](super::registry)), and a state (see [`WordLayout`]). Four slots make a line of 64 bytes, and a key may live in
//! either of two lines. A slot whose state has expired is free: nothing ever has to be removed, and no sweep is needed.
//!
//! # Who may write what
//!
//! * A slot is locked by a compare-exchange of the state that was read to [`LOCKED`]. The thread that did it reads the tag
//!   again, and lets go if it is another key's: a thread that lost the processor in between may find the very state that it
//!   has read in a slot that another key has moved into.
//! * Tags and states are written only by the thread that has locked their slot. To write a state it needs the lock for
//!   three instructions; nothing is waited for meanwhile.
//! * A key's slot is made under the key's stripe (a lock of the limiter), so that no key ever has two.

use smallvec::SmallVec;

use crate::algorithm::divisor::Divisor;
use crate::algorithm::one_unit::Ahead;
use crate::algorithm::{NUMBER_BITS, Pair, WORD_AHEAD_US, WordLayout};

use crate::sync::{AtomicU64, Backoff, Ordering};

/// A state that a thread holds while it writes more than one word. Packed states never look like it, see `RELATIVE_US_MAX`.
pub(super) const LOCKED: u64 = u64::MAX;

/// Bits of a tag that hold the version; the others hold the fingerprint.
pub(super) const VERSION_BITS: u32 = 14;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;

const SLOTS_PER_LINE: usize = 4;
const WORDS_PER_LINE: usize = 2 * SLOTS_PER_LINE;
const LINE_BYTES: usize = 64;
const _: () = assert!(WORDS_PER_LINE * size_of::<u64>() == LINE_BYTES);

/// Of a slot that holds nothing, as it is before it was ever used. It has expired, whatever the clock says.
pub(super) const NO_STATE: u64 = 0;

/// Bits below a word's instant when that is in microseconds.
const LOWER_BITS: u32 = NUMBER_BITS;

/// The latest instant, in microseconds after the limiter's base, at which words are exact: about 13 years. Time stands
/// still there.
pub(super) const RELATIVE_US_MAX: u64 = (1 << (64 - LOWER_BITS)) - WORD_AHEAD_US - (1 << 42);

/// A key's fingerprint: the upper 50 bits of a keyed hash, and zeros. Not all are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fingerprint(u64);

impl Fingerprint {
    #[inline]
    pub(super) fn new(hash: u64) -> Self {
        Self((hash & !VERSION_MASK).max(VERSION_MASK + 1))
    }

    #[inline]
    pub(super) fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn of_tag(tag: u64) -> Self {
        Self::new(tag)
    }

    pub(super) fn tag(self, version: u16) -> u64 {
        self.0 | u64::from(version) & VERSION_MASK
    }

    /// Whether the tag is this key's. A slot that was never used has tag 0, which is no key's.
    #[inline]
    pub(super) fn matches(self, tag: u64) -> bool {
        (self.0 ^ tag) >> VERSION_BITS == 0
    }
}

/// The version in a tag.
#[inline]
pub(super) fn version_of(tag: u64) -> u16 {
    (tag & VERSION_MASK) as u16 // masked
}

/// The instant of a decision: in microseconds since the epoch, and since the limiter's base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Now {
    pub(super) at: u64,
    pub(super) relative: u64,
}

impl Now {
    #[inline]
    pub(super) fn new(at: u64, base: u64) -> Self {
        let relative = at.saturating_sub(base).min(RELATIVE_US_MAX);
        Self { at: base + relative, relative }
    }

    #[inline]
    fn base(self) -> u64 {
        self.at - self.relative
    }
}

impl WordLayout {
    /// The layout of instants that may be any microsecond.
    pub(super) const MICROSECONDS: Self = Self { shift: 0, grid: Divisor::new(1) };

    /// Packs a state that is not older than the base nor further ahead than a word holds.
    #[inline]
    pub(super) fn pack(self, state: Pair, now: Now) -> u64 {
        let relative = state.at.saturating_sub(now.base());
        let unit = (1 << self.shift) - 1;
        ((relative + unit) >> self.shift) << (LOWER_BITS + self.shift) | state.n
    }

    /// Packs a state that is so far ahead, where instants are microseconds.
    #[inline]
    pub(super) fn pack_ahead(ahead: Ahead, now: Now) -> u64 {
        (now.relative + ahead.us) << LOWER_BITS | ahead.num
    }

    /// How far the state in a word is ahead, where instants are microseconds. One that has expired is not.
    #[inline]
    pub(super) fn unpack_ahead(word: u64, now: Now) -> Ahead {
        match Self::MICROSECONDS.unpack(word, now) {
            Some(state) => Ahead { us: state.at - now.at, num: state.n },
            None => Ahead { us: 0, num: 0 },
        }
    }

    /// The state in a word, unless it has expired.
    #[inline]
    pub(super) fn unpack(self, word: u64, now: Now) -> Option<Pair> {
        if is_expired(word, self.shift, now) {
            return None;
        }
        let bits = LOWER_BITS + self.shift;
        let upper = now.base() + ((word >> bits) << self.shift);
        // On a grid, the instant is the last point that is not after the rounded-up unit.
        let at = if self.shift == 0 { upper } else { self.grid.round_down(upper) };
        Some(Pair { at, n: word & ((1 << bits) - 1) })
    }
}

/// Whether the state in a word of this shift has expired: at a grid's instants up to one unit late.
#[inline]
pub(super) fn is_expired(word: u64, shift: u32, now: Now) -> bool {
    word <= (now.relative >> shift) << (LOWER_BITS + shift)
}

/// Where a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(usize);

/// A slot as it was read: the tag and the state belong together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) place: Place,
    pub(super) tag: u64,
    pub(super) word: u64,
}

/// What was found in a line.
pub(super) enum Found {
    Slot(Seen),
    Nothing,
    /// The slot is locked, or changed while it was read.
    Changing,
}

impl Seen {
    /// In the place of one.
    pub(super) const NOTHING: Self = Self { place: Place(0), tag: 0, word: 0 };

    /// The same slot as a locked one is left when its content is elsewhere.
    pub(super) fn emptied(self) -> Self {
        Self { tag: 0, word: NO_STATE, ..self }
    }
}

/// The table.
pub(super) struct Words {
    words: Box<[AtomicU64]>,
    /// Where the first whole line of the allocation begins.
    start: usize,
    lines: usize,
}

impl Words {
    /// A table for `keys` keys: five slots for two, so that there is room for twice as many if they come, and of a million
    /// live keys fewer than ten are forgotten.
    pub(super) fn new(keys: usize) -> Self {
        let lines = (keys * 5).div_ceil(2 * SLOTS_PER_LINE).max(2);
        let words = zeroed((lines + 1) * WORDS_PER_LINE);
        let misaligned = words.as_ptr() as usize % LINE_BYTES;
        let start = (LINE_BYTES - misaligned) % LINE_BYTES / size_of::<u64>();
        Self { words, start, lines }
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }

    /// Finds the key's slot, live or not, and reads it; waits while it changes.
    pub(super) fn find(&self, key: Fingerprint) -> Option<Seen> {
        let mut backoff = Backoff::default();
        loop {
            match self.look_for(key, |tag| key.matches(tag)) {
                Found::Slot(seen) => return Some(seen),
                Found::Nothing => return None,
                Found::Changing => backoff.wait(),
            }
        }
    }

    /// Finds the key's slot of this version, and waits for nothing.
    #[inline(always)]
    pub(super) fn find_quietly(&self, key: Fingerprint, version: u16) -> Found {
        let tag = key.tag(version);
        self.look_for(key, |other| other == tag)
    }

    #[inline(always)]
    fn look_for(&self, key: Fingerprint, is_it: impl Fn(u64) -> bool) -> Found {
        let first = self.first_line(key);
        match self.look_in(first, &is_it) {
            Found::Nothing => self.look_in(self.second_line(key, first), &is_it),
            found => found,
        }
    }

    #[inline(always)]
    fn look_in(&self, line: usize, is_it: &impl Fn(u64) -> bool) -> Found {
        let Some(words) = self.line(line) else { return Found::Nothing };
        // All four tags at once: which slot it is cannot be predicted, whether it is one can. Relaxed: only a hint.
        let hit = |slot: usize| usize::from(is_it(words[2 * slot].load(Ordering::Relaxed))) << slot;
        let hits = hit(0) | hit(1) | hit(2) | hit(3);
        if hits == 0 {
            return Found::Nothing;
        }
        let slot = hits.trailing_zeros() as usize % SLOTS_PER_LINE;
        // Acquire, with the Release of the tag in `publish`: whoever sees a new tag sees its slot locked or later.
        let tag = words[2 * slot].load(Ordering::Acquire);
        // Acquire, with the Release of the state in `publish`: whoever sees a new state sees its tag.
        let word = words[2 * slot + 1].load(Ordering::Acquire);
        let unchanged = words[2 * slot].load(Ordering::Relaxed) == tag;
        if !is_it(tag) || word == LOCKED || !unchanged {
            return Found::Changing;
        }
        Found::Slot(Seen { place: self.place(line, slot), tag, word })
    }

    /// Replaces the state that was seen, if it is still there, and still the same key's.
    #[inline(always)]
    pub(super) fn replace(&self, seen: Seen, word: u64) -> bool {
        self.lock_then(seen, word)
    }

    /// Locks a slot as it was seen: until it is unlocked, everybody who looks for its key waits.
    #[inline]
    pub(super) fn lock(&self, seen: Seen) -> bool {
        self.lock_then(seen, LOCKED)
    }

    /// Locks a slot as it was seen, and leaves this word in it.
    #[inline(always)]
    fn lock_then(&self, seen: Seen, word: u64) -> bool {
        let Some([tag, state]) = self.words.get(seen.place.0..).and_then(|slot| slot.first_chunk()) else {
            return false;
        };
        // Acquire, with the Release of the state in `publish`: the tag that is read next is not older than the state.
        // Relaxed on failure: the caller reads again.
        if state.compare_exchange(seen.word, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        let is_same = tag.load(Ordering::Relaxed) == seen.tag;
        let word = if is_same { word } else { seen.word };
        if word != LOCKED {
            state.store(word, Ordering::Release); // with the Acquire of the state in `find`
        }
        is_same
    }

    /// Writes the tag and the state of a locked slot, which unlocks it.
    pub(super) fn publish(&self, seen: Seen, tag: u64, word: u64) {
        if let (Some(tags), Some(states)) = (self.words.get(seen.place.0), self.words.get(seen.place.0 + 1)) {
            tags.store(tag, Ordering::Release); // with the Acquire of the tag in `find`
            states.store(word, Ordering::Release); // with the Acquire of the state in `find`
        }
    }

    /// Unlocks a slot, with another state of the same key.
    #[inline]
    pub(super) fn unlock(&self, seen: Seen, word: u64) {
        if let Some(state) = self.words.get(seen.place.0 + 1) {
            state.store(word, Ordering::Release); // with the Acquire of the state in `find`
        }
    }

    /// Unlocks a slot as it was.
    pub(super) fn put_back(&self, seen: Seen) {
        self.publish(seen, seen.tag, seen.word);
    }

    /// The slots of a key's two lines, as they are now; those that are locked are left out.
    pub(super) fn candidates(&self, key: Fingerprint) -> SmallVec<[Seen; 2 * SLOTS_PER_LINE]> {
        self.lines_of(key).into_iter().flat_map(|line| self.slots(line)).collect()
    }

    /// The slots of the other line in which the key of this slot may live.
    pub(super) fn elsewhere(&self, seen: Seen) -> impl Iterator<Item = Seen> {
        let here = seen.place.0.saturating_sub(self.start) / WORDS_PER_LINE;
        let [first, second] = self.lines_of(Fingerprint::of_tag(seen.tag));
        self.slots(if first == here { second } else { first })
    }

    fn slots(&self, line: usize) -> impl Iterator<Item = Seen> {
        (0..SLOTS_PER_LINE).filter_map(move |slot| self.read(self.place(line, slot)))
    }

    /// Every slot, as it is when the walk comes by; one that is changing is waited for.
    pub(super) fn iter(&self) -> impl Iterator<Item = Seen> {
        (0..self.lines).flat_map(move |line| (0..SLOTS_PER_LINE).map(move |slot| self.place(line, slot))).map(|place| {
            let mut backoff = Backoff::default();
            loop {
                match self.read(place) {
                    Some(seen) => return seen,
                    None => backoff.wait(),
                }
            }
        })
    }

    fn read(&self, place: Place) -> Option<Seen> {
        let tag = self.words.get(place.0)?.load(Ordering::Acquire);
        let word = self.words.get(place.0 + 1)?.load(Ordering::Acquire);
        let unchanged = self.words.get(place.0)?.load(Ordering::Relaxed) == tag;
        (unchanged && word != LOCKED).then_some(Seen { place, tag, word })
    }

    #[inline]
    fn place(&self, line: usize, slot: usize) -> Place {
        Place(self.start + line * WORDS_PER_LINE + 2 * slot)
    }

    #[inline]
    fn line(&self, line: usize) -> Option<&[AtomicU64; WORDS_PER_LINE]> {
        self.words.get(self.start + line * WORDS_PER_LINE..)?.first_chunk()
    }

    /// The two lines of a key, different from each other.
    fn lines_of(&self, key: Fingerprint) -> [usize; 2] {
        let first = self.first_line(key);
        [first, self.second_line(key, first)]
    }

    #[inline]
    fn first_line(&self, key: Fingerprint) -> usize {
        self.scale(key.0)
    }

    #[inline]
    fn second_line(&self, key: Fingerprint, first: usize) -> usize {
        let second = self.scale((key.0 ^ key.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)); // odd: it mixes, one to one
        if second == first { (first + 1) % self.lines } else { second }
    }

    #[inline]
    fn scale(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.lines as u128) >> 64) as usize // below lines
    }
}

#[cfg(not(ratelimit_loom))]
pub(super) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    // Zeroed by the system, page by page when first touched: a large table costs nothing until it is used.
    bytemuck::zeroed_slice_box(words)
}

#[cfg(ratelimit_loom)]
pub(super) fn zeroed(words: usize) -> Box<[AtomicU64]> {
    (0..words).map(|_| AtomicU64::new(0)).collect()
}
