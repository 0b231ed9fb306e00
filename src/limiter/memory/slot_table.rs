//! The table of all states: flat, set-associative, with a lock in each slot.
//!
//! A slot is two words: a tag (the key's fingerprint, and below it the number of the policy's
//! [version](super::versions)) and a [word](super::word) (the state, or where it is in the arena). Four slots make a
//! cache line of 64 bytes. A key lives in either of two lines. A slot whose state has expired is free, so nothing has
//! to be removed and no sweep is needed.
//!
//! # Locking
//!
//! * A thread locks a slot by exchanging its word for [`LOCKED`], and then reads the tag: another key may have moved in
//!   since the slot was found. Only the holder of a slot writes its tag, its word and its blocks in the arena.
//! * A thread that waits for a slot holds no slot of a later place. So waiting threads never form a circle.
//! * A key gets a slot only under its stripe (a mutex of the store), so that no key ever has two. A thread that finds
//!   no slot for a key looks again under the stripe.

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

/// A tag and a word.
type Slot = [AtomicU64; 2];

/// The place of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a>(&'a Slot);

/// A slot as it was read: the tag and the word belong together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub(super) place: Place<'a>,
    pub(super) tag: u64,
    pub(super) word: u64,
}

/// A line of the table.
pub(super) struct Line<'a> {
    number: usize,
    slots: &'a [Slot; SLOTS_PER_LINE],
}

impl<'a> Line<'a> {
    /// Returns the slot of which the tag is it.
    #[inline(always)]
    fn find(&self, is_it: &impl Fn(u64) -> bool) -> Option<Place<'a>> {
        // All four tags at once: a branch for each would be mispredicted. Acquire: see `read_tagged`.
        let hit = |slot: usize| usize::from(is_it(self.slots[slot][0].load(Ordering::Acquire))) << slot;
        let hits = hit(0) | hit(1) | hit(2) | hit(3);
        if hits == 0 { None } else { Some(Place(&self.slots[hits.trailing_zeros() as usize % SLOTS_PER_LINE])) }
    }
}

impl<'a> Place<'a> {
    /// Returns the address, which is the order in which slots are locked.
    pub(super) fn address(self) -> usize {
        std::ptr::from_ref(self.0).addr()
    }

    /// Reads the slot; `None` if it is locked or changes meanwhile.
    #[inline]
    pub(super) fn read(self) -> Option<Seen<'a>> {
        self.read_tagged(self.0[0].load(Ordering::Acquire))
    }

    /// Reads the slot, of which the tag was just loaded. That was an Acquire, with the Release of the tag in `unlock`:
    /// a reader that sees a new tag sees its slot locked or later.
    #[inline(always)]
    fn read_tagged(self, tag: u64) -> Option<Seen<'a>> {
        let [tags, words] = self.0;
        // Acquire, with the Release of the word in `unlock`: a reader that sees a new word sees its tag.
        let word = words.load(Ordering::Acquire);
        let unchanged = tags.load(Ordering::Relaxed) == tag;
        if unchanged && word != LOCKED { Some(Seen { place: self, tag, word }) } else { None }
    }

    /// Locks the slot, and waits for it. If it holds another key by then, it is left alone, and `None` returned.
    pub(super) fn lock_key(self, key: Fingerprint) -> Option<Seen<'a>> {
        let seen = self.lock();
        if key.matches(seen.tag) {
            return Some(seen);
        }
        seen.put_back();
        None
    }

    /// Locks the slot, whatever it holds, and waits for it.
    #[inline]
    pub(super) fn lock(self) -> Seen<'a> {
        let [tags, words] = self.0;
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
        Seen { place: self, tag: tags.load(Ordering::Relaxed), word }
    }

    /// Names the key of the locked slot, which stays locked.
    pub(super) fn set_tag(self, tag: u64) {
        self.0[0].store(tag, Ordering::Release); // with the Acquire of the tag in `read`
    }

    /// Writes the word of the locked slot, which unlocks it.
    #[inline]
    pub(super) fn set_word(self, word: u64) {
        self.0[1].store(word, Ordering::Release); // with the Acquire of the word in `read`
    }

    /// Writes the tag and the word of the locked slot, which unlocks it.
    #[inline]
    pub(super) fn unlock(self, tag: u64, word: u64) {
        self.set_tag(tag);
        self.set_word(word);
    }
}

impl Seen<'_> {
    /// Locks the slot, if it is as it was seen.
    #[inline(always)]
    pub(super) fn try_lock(self) -> bool {
        let [tags, words] = self.place.0;
        // Acquire, with the Release of the word in `unlock`: the tag that is read next is not older than the word.
        // Relaxed on failure: the caller reads again.
        if words.compare_exchange(self.word, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // A thread that lost the processor may find the very word that it read in a slot that is another key's now.
        let is_same = tags.load(Ordering::Relaxed) == self.tag;
        if !is_same {
            self.place.set_word(self.word);
        }
        is_same
    }

    /// Replaces the word that was seen, if it is still there and still the same key's.
    #[inline(always)]
    pub(super) fn replace(self, word: u64) -> bool {
        let is_locked = self.try_lock();
        if is_locked {
            self.place.set_word(word);
        }
        is_locked
    }

    /// Unlocks the slot as it was.
    #[inline]
    pub(super) fn put_back(self) {
        self.place.unlock(self.tag, self.word);
    }
}

/// The table.
pub(super) struct SlotTable {
    slots: Box<[Slot]>,
    /// The index at which the first whole line of the allocation begins.
    start: usize,
    lines: usize,
}

impl SlotTable {
    /// Makes a table for `keys` keys: five slots for two keys, so that of a million live keys fewer than ten are
    /// forgotten, and twice as many keys still find room.
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

    /// Has the processor load the line in which a key most likely is, while the caller does something else, and returns
    /// the line. A check of a million keys takes two thirds of the time that it takes without (`benches/tables.rs`).
    #[inline(always)]
    pub(super) fn prefetch(&self, key: Fingerprint) -> Option<Line<'_>> {
        let line = self.line(self.first_line(key))?;
        prefetch(line.slots);
        Some(line)
    }

    /// Reads the key's slot of this version, and waits for nothing. `None` if there is none, or if it is locked or
    /// changes meanwhile. `first` is the key's first line.
    #[inline(always)]
    pub(super) fn look<'a>(&'a self, first: &Line<'a>, key: Fingerprint, version: u16) -> Option<Seen<'a>> {
        let tag = key.tag(version);
        self.find(first, key, |other| other == tag)?.read_tagged(tag)
    }

    /// Returns the place of the key's slot, whatever its version and state. The key may leave it at once.
    #[inline]
    pub(super) fn place_of(&self, key: Fingerprint) -> Option<Place<'_>> {
        self.find(&self.line(self.first_line(key))?, key, |tag| key.matches(tag))
    }

    #[inline(always)]
    fn find<'a>(&'a self, first: &Line<'a>, key: Fingerprint, is_it: impl Fn(u64) -> bool) -> Option<Place<'a>> {
        match first.find(&is_it) {
            None => self.line(self.second_line(key, first.number))?.find(&is_it),
            found => found,
        }
    }

    #[inline(always)]
    fn line(&self, number: usize) -> Option<Line<'_>> {
        let first = self.start + number * SLOTS_PER_LINE;
        Some(Line { number, slots: self.slots.get(first..)?.first_chunk()? })
    }

    /// Returns the slots of a key's two lines as they are now, except those that are locked.
    pub(super) fn candidates(&self, key: Fingerprint) -> SmallVec<[Seen<'_>; 2 * SLOTS_PER_LINE]> {
        let first = self.first_line(key);
        [first, self.second_line(key, first)].into_iter().flat_map(|line| self.slots(line)).collect()
    }

    /// Returns the slots of the other line in which the key of this slot may live, except those that are locked.
    pub(super) fn elsewhere(&self, seen: Seen<'_>) -> impl Iterator<Item = Seen<'_>> {
        let key = Fingerprint::of_tag(seen.tag);
        let first = self.first_line(key);
        self.slots(if first == self.line_of(seen.place) { self.second_line(key, first) } else { first })
    }

    fn slots(&self, line: usize) -> impl Iterator<Item = Seen<'_>> {
        self.line(line).into_iter().flat_map(|line| line.slots).filter_map(|slot| Place(slot).read())
    }

    /// Returns the places of all slots.
    pub(super) fn places(&self) -> impl Iterator<Item = Place<'_>> {
        self.slots.iter().skip(self.start).take(self.len()).map(Place)
    }

    // Lines ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the number of a slot's line.
    pub(super) fn line_of(&self, place: Place<'_>) -> usize {
        let slot = (place.address() - self.slots.as_ptr().addr()) / size_of::<Slot>();
        (slot - self.start) / SLOTS_PER_LINE
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

/// Returns `count` arrays of words, which are all 0.
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
