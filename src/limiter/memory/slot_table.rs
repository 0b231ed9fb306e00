//! The table of all states: flat, set-associative, with a lock in each slot.
//!
//! A slot is two words: a tag (the key's fingerprint, with the number of the policy's [version](super::versions) in
//! the lower bits) and a [word](super::word) (the state, or where it is in the arena). Four slots make a cache line
//! of 64 bytes. A key has its slot in one of two lines. A slot whose state has expired is free, so nothing has to be
//! removed and no sweep is needed.
//!
//! The table reserves the memory for its whole capacity. At first the table uses only its first lines, so that
//! a few keys lie close together. The table doubles the number of its lines when a key finds no room, see
//! [`growth`](super::growth).
//!
//! # The life of a slot
//!
//! ```text
//!          claim, under the stripe of           write the tag and
//!          a key that has no slot               the word, unlock
//!   free ────────────────────────────► claimed ──────────────────► in use ◄─┐ charge or refund:
//!    ▲ ▲                                │   ▲                      │ │  │   │ lock, write, unlock
//!    │ └────────────────────────────────┘   └──────────────────────┘ │  └───┘
//!    │    not needed: unlock without a key   forgotten or moved      │
//!    │                                                               │ the state expires:
//!    │    the time to keep it is over                                ▼ no thread writes
//!    └─────────────────────────────────────────────────────────── kept
//! ```
//!
//! | the slot is | tag | word | this ends by |
//! |---|---|---|---|
//! | free | 0, or its last key's | 0, or an expired state | a thread that needs a slot for a new key |
//! | claimed | 0 | [`LOCKED`] | the same thread, which writes the new key or leaves the slot empty |
//! | in use | its key's | a state that counts | time, a key that takes the slot, or a move |
//! | kept | its key's | a state that expired lately | the key, which comes back, or time |
//!
//! * **Kept.** While the table can grow, a key keeps its slot for ten seconds after its state expired, so that its
//!   next charge takes the [short way](super::short_way). In a table that cannot grow, the slot is free as soon as
//!   its state expires.
//! * **Forgotten.** If the table is full and cannot grow, a new key takes the slot of the key that is least worth
//!   keeping ([`room`](super::room)). The thread of the new key locks the slot and clears its tag.
//! * **Moved.** A key moves to its other line to make room, or to a new line when the table grows
//!   ([`growth`](super::growth)). The thread that moves the key holds the key's stripe and both slots, writes the
//!   new slot first, and then clears the old one. If a reader looks into the new slot before the move, and into
//!   the old slot after the move, the reader finds the key in neither, and looks again under the stripe.
//!
//! # Locking
//!
//! * A thread locks a slot by exchanging the slot's word for [`LOCKED`]. The thread then reads the tag, because
//!   another key may have moved in since the slot was found. Only the thread that holds a slot writes the slot's tag,
//!   word and blocks in the arena.
//! * A key gets a slot only under its stripe (a mutex of `States`), so that no key ever has two slots. A thread that
//!   finds no slot for a key looks again under the stripe.
//!
//! A thread that holds a lock of this list waits only for locks further down. So threads never wait for each other in
//! a circle:
//!
//! 1. The lock of the walk over all slots, or the lock of the growth. No thread holds both.
//! 2. The stripes, in the order of their numbers.
//! 3. The slots, in the order of their addresses.
//! 4. The locks of the versions and of the arena's free lists. A thread that holds one of these locks waits for no
//!    other lock.
//!
//! A thread that already holds slots may still need a stripe or an earlier slot. The thread does not
//! wait for either: if another thread holds the lock, this thread gives up (`room`).

use smallvec::SmallVec;

use super::word::LOCKED;
use crate::base::sync::{AtomicU64, Backoff, Ordering, prefetch};

/// The least number of lines that a table uses at first, unless it has fewer lines in all. A table with fewer than
/// twice this number of lines in all does not grow.
const LINES_MIN: usize = if cfg!(any(ratelimit_loom, ratelimit_shuttle)) { 2 } else { 512 };

/// The number of bits of a tag that hold the version; the other bits hold the fingerprint.
pub(super) const VERSION_BITS: u32 = 14;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;

/// The version of states that count the units which requests hold. Such states do not depend on a quota.
pub(super) const HELD_VERSION: u16 = (1 << VERSION_BITS) - 1;

pub(super) const SLOTS_PER_LINE: usize = 4;
const LINE_BYTES: usize = 64;
// The assertion does not hold for Shuttle, whose atomics are larger than those of the standard library.
const _: () = assert!(cfg!(ratelimit_shuttle) || SLOTS_PER_LINE * size_of::<SlotWords>() == LINE_BYTES);

/// A key's fingerprint. The upper 50 bits are from a keyed hash, and at least one of these bits is set. The lower
/// bits are zeros, or [`HELD_VERSION`] if the state counts units that requests hold. So the state of held units is
/// never mistaken for another state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fingerprint(u64);

impl Fingerprint {
    #[inline]
    pub(super) fn new(hash: u64) -> Self {
        Self((hash & !VERSION_MASK).max(VERSION_MASK + 1))
    }

    /// Makes the fingerprint of a key whose state counts units that requests hold.
    #[inline]
    pub(super) fn of_held(hash: u64) -> Self {
        Self(Self::new(hash).0 | u64::from(HELD_VERSION))
    }

    #[inline]
    pub(super) fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn of_tag(tag: u64) -> Self {
        if version_of(tag) == HELD_VERSION { Self::of_held(tag) } else { Self::new(tag) }
    }

    #[inline]
    pub(super) fn tag(self, version: u16) -> u64 {
        self.0 | u64::from(version) & VERSION_MASK
    }

    /// Returns whether the tag belongs to this key. A slot that was never used has tag 0, which belongs to no key.
    #[inline]
    fn matches(self, tag: u64) -> bool {
        let is_held = |bits| version_of(bits) == HELD_VERSION;
        (self.0 ^ tag) >> VERSION_BITS == 0 && is_held(self.0) == is_held(tag)
    }
}

/// Returns the version in a tag.
#[inline]
pub(super) fn version_of(tag: u64) -> u16 {
    (tag & VERSION_MASK) as u16 // masked
}

/// A tag and a word.
type SlotWords = [AtomicU64; 2];

/// A reference to a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotRef<'a>(&'a SlotWords);

/// A slot as it was read. The tag and the word belong together, unless the key left the slot and came back between
/// two of the three loads. In that case a denial may belong to another key that had the slot in between.
/// Nothing is written in that case, because the slot's word has changed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub(super) slot: SlotRef<'a>,
    pub(super) tag: u64,
    pub(super) word: u64,
}

/// The result of looking for a slot for a new key.
pub(super) enum SlotClaim<'a> {
    /// This slot, which is locked and empty.
    Slot(SlotRef<'a>),
    /// A slot will be free when the table has grown.
    AfterGrowth,
    /// No slot can be made free.
    Nothing,
}

/// A line of the table.
pub(super) struct SlotLine<'a>(&'a [SlotWords; SLOTS_PER_LINE]);

impl<'a> SlotLine<'a> {
    #[cfg(ratelimit_loom)]
    pub(super) fn address(&self) -> usize {
        std::ptr::from_ref(self.0).addr()
    }

    /// Returns the slot whose tag matches.
    #[inline(always)]
    fn find(&self, is_it: &impl Fn(u64) -> bool) -> Option<SlotRef<'a>> {
        // Compares all four tags at once, because the processor would mispredict a branch for each tag. The loads are
        // `Acquire` for the reason given in `read_tagged`.
        let hit = |slot: usize| usize::from(is_it(self.0[slot][0].load(Ordering::Acquire))) << slot;
        let hits = hit(0) | hit(1) | hit(2) | hit(3);
        if hits == 0 { None } else { Some(SlotRef(&self.0[hits.trailing_zeros() as usize % SLOTS_PER_LINE])) }
    }
}

impl<'a> SlotRef<'a> {
    /// Returns the slot's address. Slots are locked in the order of their addresses.
    pub(super) fn address(self) -> usize {
        std::ptr::from_ref(self.0).addr()
    }

    /// Reads the tag alone.
    pub(super) fn tag(self) -> u64 {
        self.0[0].load(Ordering::Acquire)
    }

    /// Reads the slot. Returns `None` if the slot is locked or changes during the read.
    #[inline]
    pub(super) fn read(self) -> Option<Seen<'a>> {
        self.read_tagged(self.0[0].load(Ordering::Acquire))
    }

    /// Reads the slot whose tag was just loaded. The load of the tag was an Acquire, which pairs with the Release of
    /// the tag in `unlock`. So a reader that sees a new tag sees [`LOCKED`] or a later word.
    #[inline(always)]
    fn read_tagged(self, tag: u64) -> Option<Seen<'a>> {
        let [tags, words] = self.0;
        // `Acquire` pairs with the `Release` of the word in `unlock`, so a reader that sees a new word also sees its
        // tag.
        let word = words.load(Ordering::Acquire);
        let unchanged = tags.load(Ordering::Relaxed) == tag;
        if unchanged && word != LOCKED { Some(Seen { slot: self, tag, word }) } else { None }
    }

    /// Waits for the lock of the slot. If the slot then belongs to another key, the slot is unlocked again, and the
    /// result is `None`.
    pub(super) fn lock_key(self, key: Fingerprint) -> Option<Seen<'a>> {
        let seen = self.lock();
        if key.matches(seen.tag) {
            return Some(seen);
        }
        seen.put_back();
        None
    }

    /// Waits for the lock of the slot. The slot may hold any key.
    #[inline]
    pub(super) fn lock(self) -> Seen<'a> {
        let [tags, words] = self.0;
        let mut backoff = Backoff::default();
        let word = loop {
            // Waiting threads read before they try to write, so that they can share the cache line. `Relaxed`
            // suffices, because the value is only a hint.
            let word = words.load(Ordering::Relaxed);
            // `Acquire` pairs with the `Release` of the word in `unlock`, so the tag and the blocks that this thread
            // reads belong to the word.
            let locks = |word| words.compare_exchange(word, LOCKED, Ordering::Acquire, Ordering::Relaxed);
            if word != LOCKED && locks(word).is_ok() {
                break word;
            }
            backoff.wait();
        };
        Seen { slot: self, tag: tags.load(Ordering::Relaxed), word }
    }

    /// Writes the tag of the locked slot, which stays locked.
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
    /// Returns whether the slot has not changed since it was read.
    #[inline]
    pub(super) fn is_unchanged(self) -> bool {
        self.slot.read_tagged(self.tag).is_some_and(|now| now.word == self.word)
    }

    /// Locks the slot, if it has not changed since it was read.
    #[inline(always)]
    pub(super) fn try_lock(self) -> bool {
        let [tags, words] = self.slot.0;
        // `Acquire` pairs with the `Release` of the word in `unlock`, so the tag that is read next is not older than
        // the word. A failure may be `Relaxed`, because the caller reads again.
        if words.compare_exchange(self.word, LOCKED, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return false;
        }
        // If this thread was suspended, the slot may now belong to another key that has the same word.
        let is_same = tags.load(Ordering::Relaxed) == self.tag;
        if !is_same {
            self.slot.set_word(self.word);
        }
        is_same
    }

    /// Replaces the word, if neither the word nor the key has changed since they were read.
    #[inline(always)]
    pub(super) fn replace(self, word: u64) -> bool {
        let is_locked = self.try_lock();
        if is_locked {
            self.slot.set_word(word);
        }
        is_locked
    }

    /// Writes this tag and this word into the locked slot, which unlocks it.
    #[inline]
    pub(super) fn put_back(self) {
        self.slot.unlock(self.tag, self.word);
    }
}

/// The lines that a table uses, and whether keys still have to move to new lines.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    /// Each key is in one of its lines.
    Settled,
    /// The table has just doubled. Threads may still place keys with the old mask.
    Announced,
    /// Each key is in one of its lines, or still in the line from which that line is split.
    Splitting,
}

/// The table.
pub(super) struct SlotTable {
    slots: Box<[SlotWords]>,
    /// The index at which the first whole line of the allocation begins.
    start: usize,
    /// The number of lines of a part. The table uses one part, or two, or four, and so on.
    part: u64,
    parts_max: u64,
    /// The number of parts in use minus one, which is a mask.
    mask: AtomicU64,
    growth: AtomicU64,
}

impl SlotTable {
    /// Makes a table for `keys` keys, with five slots for each two keys. So a table for a million keys forgets fewer
    /// than ten of a million live keys, and two million keys still find room.
    pub(super) fn new(keys: usize) -> Self {
        let lines = (keys * 5).div_ceil(2 * SLOTS_PER_LINE).max(2);
        let doublings = (lines / LINES_MIN).checked_ilog2().unwrap_or(0);
        let (part, parts_max) = (lines >> doublings, 1 << doublings);
        let slots = zeroed(((part << doublings) + 1) * SLOTS_PER_LINE);
        let misaligned = slots.as_ptr() as usize % LINE_BYTES;
        let start = (LINE_BYTES - misaligned) % LINE_BYTES / size_of::<SlotWords>();
        let (mask, growth) = (AtomicU64::new(0), AtomicU64::new(Growth::Settled as u64));
        Self { slots, start, part: part as u64, parts_max, mask, growth }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.slots)
    }

    /// Returns the maximum number of slots that the table uses.
    pub(super) fn len(&self) -> usize {
        self.part as usize * self.parts_max as usize * SLOTS_PER_LINE // as many as were made
    }

    // Reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the line in which a key most likely is. The processor begins to load that line while the caller does
    /// something else. With a million keys, this prefetch saves a third of the time of a check (`benches/tables.rs`).
    #[inline(always)]
    pub(super) fn prefetch(&self, key: Fingerprint) -> Option<SlotLine<'_>> {
        let line = self.line(self.first_line(key, self.mask()))?;
        prefetch(line.0);
        Some(line)
    }

    /// Reads the key's slot of this version, without waiting. Returns `None` if there is no such slot, if the
    /// slot is locked or changes during the read, or if the key is not yet in one of its lines. `first` is the
    /// key's first line.
    #[inline(always)]
    pub(super) fn look<'a>(&'a self, first: &SlotLine<'a>, key: Fingerprint, version: u16) -> Option<Seen<'a>> {
        let tag = key.tag(version);
        let is_it = |other| other == tag;
        let slot = match first.find(&is_it) {
            None => self.line(self.second_line(key, self.mask()))?.find(&is_it)?,
            Some(slot) => slot,
        };
        slot.read_tagged(tag)
    }

    /// Returns the key's slot, with any version and state. The key may leave the slot at any moment. If the caller
    /// holds the key's stripe, `None` means that the key has no slot.
    #[inline]
    pub(super) fn slot_of(&self, key: Fingerprint) -> Option<SlotRef<'_>> {
        let mask = self.mask_before_growth();
        let find = |line| self.line(line)?.find(&|tag| key.matches(tag));
        let [first, second] = self.lines(key, mask);
        find(first).or_else(|| find(second)).or_else(|| {
            let [first, second] = self.lines(key, mask >> 1);
            (self.growth() != Growth::Settled).then(|| find(first).or_else(|| find(second)))?
        })
    }

    #[inline(always)]
    fn line(&self, number: usize) -> Option<SlotLine<'_>> {
        let first = self.start + number * SLOTS_PER_LINE;
        debug_assert!(first + SLOTS_PER_LINE <= self.slots.len(), "the table has no line {number}");
        Some(SlotLine(self.slots.get(first..)?.first_chunk()?))
    }

    /// Returns the slots that a key may take, with their present content, except locked slots.
    pub(super) fn candidates(&self, key: Fingerprint) -> SmallVec<[Seen<'_>; 2 * SLOTS_PER_LINE]> {
        self.lines(key, self.mask_before_growth()).into_iter().flat_map(|line| self.open_slots(line)).collect()
    }

    /// Returns the slots of other lines that the key of this slot may take, except locked slots.
    pub(super) fn elsewhere(&self, seen: Seen<'_>) -> impl Iterator<Item = Seen<'_>> {
        let (key, here) = (Fingerprint::of_tag(seen.tag), self.line_of(seen.slot));
        let mask = self.mask_before_growth();
        // Computes the second line lazily, only if the first line does not suffice.
        let lines = [Self::first_line, Self::second_line].into_iter().map(move |line| line(self, key, mask));
        lines.filter(move |line| *line != here).flat_map(|line| self.open_slots(line))
    }

    #[inline]
    fn open_slots(&self, line: usize) -> impl Iterator<Item = Seen<'_>> {
        let line = if self.is_open(line) { self.line(line) } else { None };
        line.into_iter().flat_map(|line| line.0).filter_map(|slot| SlotRef(slot).read())
    }

    /// Returns references to all slots in use, in order. The walk includes the slots that come into use during
    /// the walk.
    pub(super) fn all_slots(&self) -> impl Iterator<Item = SlotRef<'_>> {
        let slots = self.slots.iter().skip(self.start).enumerate();
        // A thread that has seen a moved key leave its old slot also sees the new mask.
        slots.take_while(|(at, _)| *at < self.in_use() * SLOTS_PER_LINE).map(|(_, slot)| SlotRef(slot))
    }

    // Lines ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the number of a slot's line.
    pub(super) fn line_of(&self, slot: SlotRef<'_>) -> usize {
        let index = (slot.address() - self.slots.as_ptr().addr()) / size_of::<SlotWords>();
        (index - self.start) / SLOTS_PER_LINE
    }

    /// Returns the numbers of a key's two lines while `mask + 1` parts are in use. The two numbers differ.
    fn lines(&self, key: Fingerprint, mask: u64) -> [usize; 2] {
        [self.first_line(key, mask), self.second_line(key, mask)]
    }

    #[inline(always)]
    fn first_line(&self, key: Fingerprint, mask: u64) -> usize {
        self.number(self.line_in_part(key), key.0, mask)
    }

    #[inline(always)]
    fn second_line(&self, key: Fingerprint, mask: u64) -> usize {
        let hash = (key.0 ^ key.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15); // odd: it mixes, one to one
        // Adds at least 1 to the position within the part, so the second line differs from the first line for any
        // number of parts.
        let line = self.line_in_part(key) + 1 + scale(hash, self.part - 1);
        self.number(if line < self.part { line } else { line - self.part }, hash, mask)
    }

    #[inline(always)]
    fn line_in_part(&self, key: Fingerprint) -> u64 {
        scale(key.0, self.part)
    }

    /// Returns the number of a line from its index in a part and from the hash that picks the part.
    #[inline(always)]
    fn number(&self, line: u64, hash: u64, mask: u64) -> usize {
        (line + (hash >> VERSION_BITS & mask) * self.part) as usize // below the number of lines
    }

    // Growth ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    #[inline(always)]
    fn mask(&self) -> u64 {
        // `Relaxed` suffices, because a thread that sees an older value does not find the key, and then searches
        // under the lock of the key's stripe.
        self.mask.load(Ordering::Relaxed)
    }

    /// Returns the mask. The caller reads the growth after the mask, so a thread that sees the new lines also sees that
    /// no key may be placed there yet.
    #[inline(always)]
    fn mask_before_growth(&self) -> u64 {
        self.mask.load(Ordering::Acquire) // with the Release in `announce`
    }

    #[inline]
    pub(super) fn growth(&self) -> Growth {
        match self.growth.load(Ordering::Acquire) {
            0 => Growth::Settled,
            1 => Growth::Announced,
            _ => Growth::Splitting,
        }
    }

    /// Returns the number of lines in use.
    pub(super) fn in_use(&self) -> usize {
        (self.mask() + 1) as usize * self.part as usize
    }

    /// Returns whether some lines are not in use yet, or a growth is not finished.
    pub(super) fn may_grow(&self) -> bool {
        self.mask() + 1 < self.parts_max || self.growth() != Growth::Settled
    }

    /// Doubles the number of lines in use, if the table has more lines.
    pub(super) fn announce(&self) -> bool {
        let parts = self.mask() + 1;
        if parts < self.parts_max {
            self.growth.store(Growth::Announced as u64, Ordering::Relaxed); // ordered by the next
            self.mask.store(2 * parts - 1, Ordering::Release); // with the Acquire in `mask_before_growth`
        }
        parts < self.parts_max
    }

    /// Notes that no thread places keys with the old mask any more.
    pub(super) fn begin_splitting(&self) {
        self.growth.store(Growth::Splitting as u64, Ordering::Release);
    }

    /// Notes that each key is in one of its lines.
    pub(super) fn settle(&self) {
        self.growth.store(Growth::Settled as u64, Ordering::Release);
    }

    /// Returns the lines from which the lines of a key were split or will be split.
    pub(super) fn parents(&self, key: Fingerprint) -> [usize; 2] {
        self.lines(key, self.mask() >> 1)
    }

    /// Returns the slots of a line, each with the slot that its key gets when the line is split.
    pub(super) fn splits(&self, parent: usize) -> impl Iterator<Item = (SlotRef<'_>, SlotRef<'_>)> {
        let lines = self.line(parent).zip(self.line(parent + self.in_use() / 2));
        lines.into_iter().flat_map(|(from, to)| from.0.iter().map(SlotRef).zip(to.0.iter().map(SlotRef)))
    }

    /// Returns whether the tag belongs to a key that has to leave this line when the line is split.
    pub(super) fn leaves(&self, parent: usize, tag: u64) -> bool {
        tag != 0 && !self.lines(Fingerprint::of_tag(tag), self.mask()).contains(&parent)
    }

    /// Returns whether the tag belongs to a key that got a slot of this line before the table doubled, because the
    /// key's first line was full.
    pub(super) fn is_second(&self, parent: usize, tag: u64) -> bool {
        tag != 0 && self.first_line(Fingerprint::of_tag(tag), self.mask() >> 1) != parent
    }

    /// Returns whether keys may be placed in a line. A new line stays free until its split is done.
    #[inline]
    fn is_open(&self, line: usize) -> bool {
        self.growth() == Growth::Settled || self.is_split(line)
    }

    #[cold]
    fn is_split(&self, line: usize) -> bool {
        let is_splitting = self.growth() == Growth::Splitting; // else keys may still come to lines that seem to be split
        let Some(parent) = line.checked_sub(self.in_use() / 2) else { return true };
        is_splitting && self.splits(parent).all(|(from, _)| !self.leaves(parent, from.tag()))
    }
}

/// Scales a hash to a number below `below`, which is less than 2^32.
#[inline(always)]
fn scale(hash: u64, below: u64) -> u64 {
    ((hash >> 32) * below) >> 32
}

/// Returns `count` arrays of words, which are all 0.
#[cfg(not(any(ratelimit_loom, ratelimit_shuttle)))]
pub(super) fn zeroed<const N: usize>(count: usize) -> Box<[[AtomicU64; N]]>
where
    [AtomicU64; N]: bytemuck::Zeroable,
{
    // The operating system zeroes each page when it is first touched, so a large table costs nothing until it is
    // used.
    bytemuck::zeroed_slice_box(count)
}

#[cfg(any(ratelimit_loom, ratelimit_shuttle))]
pub(super) fn zeroed<const N: usize>(count: usize) -> Box<[[AtomicU64; N]]> {
    (0..count).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect()
}

#[cfg(all(test, not(any(ratelimit_loom, ratelimit_shuttle))))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::base::random::mixed;

    fn keys(count: u64) -> impl Iterator<Item = Fingerprint> {
        (0..count).map(|number| Fingerprint::new(mixed(number)))
    }

    #[test]
    fn two_lines_of_a_key_differ() {
        for capacity in [1, 2, 3, 5, 1_000, 10_000] {
            let table = SlotTable::new(capacity);
            for mask in [0, 1, table.parts_max - 1].into_iter().filter(|mask| *mask < table.parts_max) {
                let differ = |key| {
                    let [first, second] = table.lines(key, mask);
                    first != second
                };
                assert!(keys(20_000).all(differ), "{capacity} {mask}");
            }
        }
    }

    /// Or keys of one line would be in each other's way again in their second lines.
    #[test]
    fn keys_of_one_line_have_their_second_lines_everywhere() {
        let table = SlotTable::new(10_000);
        let mask = table.parts_max - 1;
        let first = keys(1).next().map(|key| table.first_line(key, mask));
        let of_line = keys(1_000_000).filter(|key| Some(table.first_line(*key, mask)) == first);
        let parts: BTreeSet<u64> = of_line.map(|key| table.second_line(key, mask) as u64 / table.part).collect();
        assert_eq!(parts.len() as u64, table.parts_max);
    }
}
