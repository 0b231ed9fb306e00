//! The table of all states: flat, set-associative, with a lock in each slot.
//!
//! A slot is two words: a tag (the key's fingerprint, and below it the number of the policy's [version](super::versions)) and
//! a [word](super::word) (the state, or where it is in the arena). Four slots make a cache line of 64 bytes. A key lives in
//! either of two lines. A slot whose state has expired is free, so nothing has to be removed and no sweep is needed.
//!
//! # Locking
//!
//! * A thread locks a slot by exchanging its word for [`LOCKED`], and then reads the tag: another key may have moved in since
//!   the slot was found. Only the holder of a slot writes its tag, its word and its blocks in the arena.
//! * A thread that waits for a slot holds no slot of a later place. So waiting threads never form a circle.
//! * A key gets a slot only under its stripe (a mutex of the store), so that no key ever has two. A thread that finds no slot
//!   for a key looks again under the stripe.

use smallvec::SmallVec;

use super::word::LOCKED;
use crate::sync::{AtomicU64, Backoff, Ordering};

/// Bits of a tag that hold the version; the others hold the fingerprint.
pub(super) const VERSION_BITS: u32 = 14;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;

pub(super) const SLOTS_PER_LINE: usize = 4;
const WORDS_PER_LINE: usize = 2 * SLOTS_PER_LINE;
const LINE_BYTES: usize = 64;
const _: () = assert!(WORDS_PER_LINE * size_of::<u64>() == LINE_BYTES);

/// A key's fingerprint: the upper 50 bits of a keyed hash, and zeros. Not all bits are zero.
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

    #[inline]
    pub(super) fn tag(self, version: u16) -> u64 {
        self.0 | u64::from(version) & VERSION_MASK
    }

    /// Whether the tag is this key's. A slot that was never used has tag 0, which is no key's.
    #[inline]
    fn matches(self, tag: u64) -> bool {
        (self.0 ^ tag) >> VERSION_BITS == 0
    }
}

/// Returns the version in a tag.
#[inline]
pub(super) fn version_of(tag: u64) -> u16 {
    (tag & VERSION_MASK) as u16 // masked
}

/// Where a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(usize);

/// A slot as it was read: the tag and the word belong together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) place: Place,
    pub(super) tag: u64,
    pub(super) word: u64,
}

impl Seen {
    /// In the place of one.
    pub(super) const NOTHING: Self = Self { place: Place(0), tag: 0, word: 0 };
}

/// The result of [`SlotTable::look`].
pub(super) enum Found {
    Slot(Seen),
    Nothing,
    /// The slot is locked, or changed while it was read.
    Changing,
}

/// The table.
pub(super) struct SlotTable {
    words: Box<[AtomicU64]>,
    /// Where the first whole line of the allocation begins.
    start: usize,
    lines: usize,
}

impl SlotTable {
    /// Makes a table for `keys` keys: five slots for two keys, so that of a million live keys fewer than ten are forgotten,
    /// and twice as many keys still find room.
    pub(super) fn new(keys: usize) -> Self {
        let lines = (keys * 5).div_ceil(2 * SLOTS_PER_LINE).max(2);
        let words = zeroed((lines + 1) * WORDS_PER_LINE);
        let misaligned = words.as_ptr() as usize % LINE_BYTES;
        let start = (LINE_BYTES - misaligned) % LINE_BYTES / size_of::<u64>();
        Self { words, start, lines }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns the number of slots.
    pub(super) fn len(&self) -> usize {
        self.lines * SLOTS_PER_LINE
    }

    // Reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the key's slot of this version, and waits for nothing.
    #[inline(always)]
    pub(super) fn look(&self, key: Fingerprint, version: u16) -> Found {
        let tag = key.tag(version);
        let Some(place) = self.find(key, |other| other == tag) else { return Found::Nothing };
        match self.read(place) {
            Some(seen) if seen.tag == tag => Found::Slot(seen),
            _ => Found::Changing,
        }
    }

    /// Returns the place of the key's slot, whatever its version and state. The key may leave it at once.
    #[inline]
    pub(super) fn place_of(&self, key: Fingerprint) -> Option<Place> {
        self.find(key, |tag| key.matches(tag))
    }

    #[inline(always)]
    fn find(&self, key: Fingerprint, is_it: impl Fn(u64) -> bool) -> Option<Place> {
        let first = self.first_line(key);
        self.find_in(first, &is_it).or_else(|| self.find_in(self.second_line(key, first), &is_it))
    }

    #[inline(always)]
    fn find_in(&self, line: usize, is_it: &impl Fn(u64) -> bool) -> Option<Place> {
        let words: &[AtomicU64; WORDS_PER_LINE] =
            self.words.get(self.start + line * WORDS_PER_LINE..)?.first_chunk()?;
        // All four tags at once: a branch for each would be mispredicted. Relaxed: only a hint.
        let hit = |slot: usize| usize::from(is_it(words[2 * slot].load(Ordering::Relaxed))) << slot;
        let hits = hit(0) | hit(1) | hit(2) | hit(3);
        (hits != 0).then(|| self.place(line, hits.trailing_zeros() as usize))
    }

    /// Reads a slot; `None` if it is locked or changes meanwhile.
    #[inline(always)]
    pub(super) fn read(&self, place: Place) -> Option<Seen> {
        let [tags, words] = self.slot(place)?;
        // Acquire, with the Release of the tag in `unlock`: a reader that sees a new tag sees its slot locked or later.
        let tag = tags.load(Ordering::Acquire);
        // Acquire, with the Release of the word in `unlock`: a reader that sees a new word sees its tag.
        let word = words.load(Ordering::Acquire);
        let unchanged = tags.load(Ordering::Relaxed) == tag;
        (unchanged && word != LOCKED).then_some(Seen { place, tag, word })
    }

    /// Returns the slots of a key's two lines as they are now, except those that are locked.
    pub(super) fn candidates(&self, key: Fingerprint) -> SmallVec<[Seen; 2 * SLOTS_PER_LINE]> {
        let first = self.first_line(key);
        [first, self.second_line(key, first)].into_iter().flat_map(|line| self.slots(line)).collect()
    }

    /// Returns the slots of the other line in which the key of this slot may live, except those that are locked.
    pub(super) fn elsewhere(&self, seen: Seen) -> impl Iterator<Item = Seen> {
        let key = Fingerprint::of_tag(seen.tag);
        let first = self.first_line(key);
        self.slots(if first == self.line_of(seen.place) { self.second_line(key, first) } else { first })
    }

    fn slots(&self, line: usize) -> impl Iterator<Item = Seen> {
        (0..SLOTS_PER_LINE).filter_map(move |slot| self.read(self.place(line, slot)))
    }

    /// Returns the places of all slots.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        (0..self.len()).map(|slot| self.place(0, slot))
    }

    // Locking ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Locks a slot, and waits for it. If it holds another key by then, it is left alone, and `None` returned.
    pub(super) fn lock_key(&self, place: Place, key: Fingerprint) -> Option<Seen> {
        let seen = self.lock(place)?;
        if !key.matches(seen.tag) {
            self.put_back(seen);
            return None;
        }
        Some(seen)
    }

    /// Locks a slot, whatever it holds, and waits for it.
    #[inline]
    pub(super) fn lock(&self, place: Place) -> Option<Seen> {
        let [tags, words] = self.slot(place)?;
        let mut backoff = Backoff::default();
        let word = loop {
            // Read before it is written: threads that wait share the cache line. Relaxed: only a hint.
            let word = words.load(Ordering::Relaxed);
            // Acquire, with the Release of the word in `unlock`: the tag and the blocks belong to the word.
            let locks = |word| words.compare_exchange(word, LOCKED, Ordering::Acquire, Ordering::Relaxed);
            if word != LOCKED && locks(word).is_ok() {
                break word;
            }
            backoff.wait();
        };
        Some(Seen { place, tag: tags.load(Ordering::Relaxed), word })
    }

    /// Locks a slot, if it is as it was seen.
    pub(super) fn try_lock(&self, seen: Seen) -> bool {
        self.lock_then(seen, LOCKED)
    }

    /// Replaces the word that was seen, if it is still there and still the same key's.
    #[inline(always)]
    pub(super) fn replace(&self, seen: Seen, word: u64) -> bool {
        self.lock_then(seen, word)
    }

    /// Locks a slot as it was seen, and leaves this word in it.
    #[inline(always)]
    fn lock_then(&self, seen: Seen, word: u64) -> bool {
        let Some([tags, words]) = self.slot(seen.place) else { return false };
        // Acquire, with the Release of the word in `unlock`: the tag that is read next is not older than the word.
        // Relaxed on failure: the caller reads again.
        if words.compare_exchange(seen.word, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // A thread that lost the processor may find the very word that it read in a slot that is another key's now.
        let is_same = tags.load(Ordering::Relaxed) == seen.tag;
        let word = if is_same { word } else { seen.word };
        if word != LOCKED {
            words.store(word, Ordering::Release); // with the Acquire of the word in `read`
        }
        is_same
    }

    /// Names the key of a locked slot, which stays locked.
    pub(super) fn set_tag(&self, place: Place, tag: u64) {
        if let Some([tags, _]) = self.slot(place) {
            tags.store(tag, Ordering::Release); // with the Acquire of the tag in `read`
        }
    }

    /// Writes the word of a locked slot, which unlocks it.
    #[inline]
    pub(super) fn set_word(&self, place: Place, word: u64) {
        if let Some([_, words]) = self.slot(place) {
            words.store(word, Ordering::Release); // with the Acquire of the word in `read`
        }
    }

    /// Writes the tag and the word of a locked slot, which unlocks it.
    pub(super) fn unlock(&self, place: Place, tag: u64, word: u64) {
        self.set_tag(place, tag);
        self.set_word(place, word);
    }

    /// Unlocks a slot as it was.
    pub(super) fn put_back(&self, seen: Seen) {
        self.unlock(seen.place, seen.tag, seen.word);
    }

    // Places ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline(always)]
    fn slot(&self, place: Place) -> Option<&[AtomicU64; 2]> {
        self.words.get(place.0..)?.first_chunk()
    }

    #[inline]
    fn place(&self, line: usize, slot: usize) -> Place {
        Place(self.start + line * WORDS_PER_LINE + 2 * slot)
    }

    /// Returns the line of a slot.
    pub(super) fn line_of(&self, place: Place) -> usize {
        place.0.saturating_sub(self.start) / WORDS_PER_LINE
    }

    #[inline]
    fn first_line(&self, key: Fingerprint) -> usize {
        self.scale(key.0)
    }

    /// Returns a key's second line, which is never its first.
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
