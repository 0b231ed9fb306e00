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
use crate::sync::{AtomicU64, Backoff, Ordering, prefetch};

/// Bits of a tag that hold the version; the others hold the fingerprint.
pub(super) const VERSION_BITS: u32 = 14;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;

pub(super) const SLOTS_PER_LINE: usize = 4;
const LINE_BYTES: usize = 64;
const _: () = assert!(SLOTS_PER_LINE * size_of::<Slot>() == LINE_BYTES);

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

/// A tag and a word.
type Slot = [AtomicU64; 2];

/// A line of the table.
pub(super) struct Line<'a> {
    number: usize,
    first: Place,
    slots: &'a [Slot; SLOTS_PER_LINE],
}

impl<'a> Line<'a> {
    /// Returns the slot of which the tag is it.
    #[inline(always)]
    fn find(&self, is_it: &impl Fn(u64) -> bool) -> Option<(Place, &'a Slot)> {
        // All four tags at once: a branch for each would be mispredicted. Acquire: see `read_tagged`.
        let hit = |slot: usize| usize::from(is_it(self.slots[slot][0].load(Ordering::Acquire))) << slot;
        let hits = hit(0) | hit(1) | hit(2) | hit(3);
        if hits == 0 {
            return None;
        }
        let slot = hits.trailing_zeros() as usize % SLOTS_PER_LINE;
        Some((Place(self.first.0 + slot), &self.slots[slot]))
    }
}

/// The table.
pub(super) struct SlotTable {
    slots: Box<[Slot]>,
    /// Where the first whole line of the allocation begins.
    start: usize,
    lines: usize,
}

impl SlotTable {
    /// Makes a table for `keys` keys: five slots for two keys, so that of a million live keys fewer than ten are forgotten,
    /// and twice as many keys still find room.
    pub(super) fn new(keys: usize) -> Self {
        let lines = (keys * 5).div_ceil(2 * SLOTS_PER_LINE).max(2);
        let slots = zeroed((lines + 1) * SLOTS_PER_LINE);
        let misaligned = slots.as_ptr() as usize % LINE_BYTES;
        let start = (LINE_BYTES - misaligned) % LINE_BYTES / size_of::<Slot>();
        Self { slots, start, lines }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// Returns the number of slots.
    pub(super) fn len(&self) -> usize {
        self.lines * SLOTS_PER_LINE
    }

    // Reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Has the processor load the line in which a key most likely is, while the caller does something else, and returns the
    /// line. A check of a million keys takes two thirds of the time that it takes without (`benches/tables.rs`).
    #[inline(always)]
    pub(super) fn prefetch(&self, key: Fingerprint) -> Option<Line<'_>> {
        let line = self.line(self.first_line(key))?;
        prefetch(line.slots);
        Some(line)
    }

    /// Reads the key's slot of this version, and waits for nothing. `None` if there is none, or if it is locked or changes
    /// meanwhile. `first` is the key's first line.
    #[inline(always)]
    pub(super) fn look(&self, first: &Line<'_>, key: Fingerprint, version: u16) -> Option<Seen> {
        let tag = key.tag(version);
        let (place, slot) = self.find(first, key, |other| other == tag)?;
        read_tagged(place, slot, tag)
    }

    /// Returns the place of the key's slot, whatever its version and state. The key may leave it at once.
    #[inline]
    pub(super) fn place_of(&self, key: Fingerprint) -> Option<Place> {
        let first = self.line(self.first_line(key))?;
        Some(self.find(&first, key, |tag| key.matches(tag))?.0)
    }

    #[inline(always)]
    fn find<'a>(
        &'a self,
        first: &Line<'a>,
        key: Fingerprint,
        is_it: impl Fn(u64) -> bool,
    ) -> Option<(Place, &'a Slot)> {
        match first.find(&is_it) {
            None => self.line(self.second_line(key, first.number))?.find(&is_it),
            found => found,
        }
    }

    #[inline(always)]
    fn line(&self, number: usize) -> Option<Line<'_>> {
        let first = self.place(number, 0);
        Some(Line { number, first, slots: self.slots.get(first.0..)?.first_chunk()? })
    }

    /// Reads a slot; `None` if it is locked or changes meanwhile.
    #[inline]
    pub(super) fn read(&self, place: Place) -> Option<Seen> {
        let slot = self.slot(place)?;
        read_tagged(place, slot, slot[0].load(Ordering::Acquire))
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
        self.replace(seen, LOCKED)
    }

    /// Replaces the word that was seen, if it is still there and still the same key's.
    #[inline(always)]
    pub(super) fn replace(&self, seen: Seen, word: u64) -> bool {
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
    fn slot(&self, place: Place) -> Option<&Slot> {
        self.slots.get(place.0)
    }

    #[inline]
    fn place(&self, line: usize, slot: usize) -> Place {
        Place(self.start + line * SLOTS_PER_LINE + slot)
    }

    /// Returns the line of a slot.
    pub(super) fn line_of(&self, place: Place) -> usize {
        place.0.saturating_sub(self.start) / SLOTS_PER_LINE
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

/// Reads a slot whose tag was just loaded. That was an Acquire, with the Release of the tag in `unlock`: a reader that sees a
/// new tag sees its slot locked or later.
#[inline(always)]
fn read_tagged(place: Place, [tags, words]: &Slot, tag: u64) -> Option<Seen> {
    // Acquire, with the Release of the word in `unlock`: a reader that sees a new word sees its tag.
    let word = words.load(Ordering::Acquire);
    let unchanged = tags.load(Ordering::Relaxed) == tag;
    if unchanged && word != LOCKED { Some(Seen { place, tag, word }) } else { None }
}

/// Returns so many arrays of words, which are all 0.
#[cfg(not(ratelimit_loom))]
pub(super) fn zeroed<const N: usize>(count: usize) -> Box<[[AtomicU64; N]]>
where
    [AtomicU64; N]: bytemuck::Zeroable,
{
    // Zeroed by the system, page by page when first touched: a large table costs nothing until it is used.
    bytemuck::zeroed_slice_box(count)
}

#[cfg(ratelimit_loom)]
pub(super) fn zeroed<const N: usize>(count: usize) -> Box<[[AtomicU64; N]]> {
    (0..count).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect()
}
