//! The arena of the states that are larger than a word: pairs of two words, and dated entries of logs and sub-windows.
//!
//! A state is a [`Chain`] of blocks of 128 bytes. A single key may use all blocks. The first block also holds the
//! words that describe the whole chain. The word of the key's slot names that block. Only the thread that has locked
//! the key's slot touches its chain.
//!
//! A state that names no [version](super::versions) has a *head* in front of its blocks: one more block, with the
//! numbers of its quota. The head also holds the state's pair, or the number of the first block of entries. The
//! word of the key's slot then names the head. So a pair with a head needs no other block.
//!
//! There are at least as many blocks as slots, so each state has room for at least one entry, unless most states are
//! logs with heads. If no block is free, a chain *folds* its own entries: two neighbouring entries become one entry
//! with the later date. A folded entry counts for longer than it should, never for less time, and no key is
//! forgotten.

use crate::algorithm::Pair;
use crate::algorithm::entry_log::{Edit, LogEntries};
use crate::base::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::quota::Quota;
use crate::quota::spec::{SPEC_WORDS, Spec};

use super::slot_table::{Fingerprint, zeroed};

/// Entries in one block.
pub(super) const ENTRIES: usize = 6;

const WORDS_PER_BLOCK: usize = 16;
/// The word with the owner's fingerprint; 0 if the block was never used.
const OWNER: usize = 0;
const NEXT: usize = 1;
/// The words of a first block that describe the whole chain: the chain's units, and where the chain begins and ends.
const TOTAL: usize = 2;
const ENDS: usize = 3;
const FIRST_ENTRY: usize = 4;
const _: () = assert!(FIRST_ENTRY + 2 * ENTRIES == WORDS_PER_BLOCK);

/// The words of a head after those that describe the whole chain: the number of the first block of entries, the
/// state's pair, and the numbers of the quota.
const ENTRIES_BEGIN: usize = 4;
const PAIR: usize = 5;
const QUOTA: usize = 7;
const _: () = assert!(QUOTA + SPEC_WORDS <= WORDS_PER_BLOCK);

/// No block.
const NONE: u32 = 0;
const BLOCKS_MAX: usize = u32::MAX as usize;

/// The number of bits of each count of entries in [`ENDS`].
const COUNT_BITS: u32 = 3;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const _: () = assert!(ENTRIES as u64 <= COUNT_MASK);

/// The number of lists of free blocks. With several lists, threads seldom wait for each other.
const LISTS: usize = 16;

/// A fold begins at a random block among this number of the chain's oldest blocks.
const FOLDED_WITHIN: u32 = 32;

/// Blocks of entries. Each block is in one chain, in one list of free blocks, or was never used. The blocks are
/// numbered from 1.
pub(super) struct EntryArena {
    /// The blocks by number. The block with number 0 is not used.
    blocks: Box<[[AtomicU64; WORDS_PER_BLOCK]]>,
    free: [Mutex<u32>; LISTS],
    /// The number of the first block that was never used. This block and all later blocks are not yet in
    /// memory.
    untouched: AtomicU64,
    /// The counter from which the next random number is computed.
    draws: AtomicU64,
}

/// The blocks of a key, and the entries in them, the oldest first. The default has no block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Chain {
    /// The units of all entries.
    pub(super) total: u64,
    /// The block with the quota of a state that names no version.
    head: u32,
    first: u32,
    last: u32,
    /// The number of entries at the beginning of the first block that are gone. Each block except the last is
    /// filled to its end.
    skip: usize,
    /// The number of entries in the last block, including those that are gone.
    filled: usize,
}

impl Chain {
    pub(super) fn has_block(&self) -> bool {
        self.block() != NONE
    }

    /// Returns the block that the word of the key's slot names.
    pub(super) fn block(&self) -> u32 {
        if self.head != NONE { self.head } else { self.first }
    }

    fn has_entry(&self) -> bool {
        self.filled > if self.first == self.last { self.skip } else { 0 }
    }

    /// Returns whether one more entry needs another block.
    pub(super) fn wants_block(&self) -> bool {
        self.first == NONE && self.head == NONE || self.filled == ENTRIES
    }

    /// Returns whether the first entry needs a block in addition to the head.
    pub(super) fn wants_entries(&self) -> bool {
        self.first == NONE || self.head == NONE
    }
}

impl EntryArena {
    /// Makes an arena for `entries` entries, of at least `blocks` blocks.
    pub(super) fn new(entries: usize, blocks: usize) -> Self {
        Self {
            blocks: zeroed(Self::blocks_for(entries, blocks) + 1),
            free: std::array::from_fn(|_| Mutex::new(NONE)),
            untouched: AtomicU64::new(1),
            draws: AtomicU64::new(0),
        }
    }

    fn blocks_for(entries: usize, blocks: usize) -> usize {
        // Adds one block, because the oldest block of a chain may be partly unused.
        (entries.div_ceil(ENTRIES) + 1).max(blocks).min(BLOCKS_MAX)
    }

    /// Returns how many entries one key can have in an arena of this size.
    pub(super) fn entries_for(entries: usize, blocks: usize) -> usize {
        (Self::blocks_for(entries, blocks) - 1) * ENTRIES
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.blocks)
    }

    // Chains ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the chain that begins with this block. If `first` is [`NONE`], the chain has no blocks.
    pub(super) fn load(&self, first: u32) -> Chain {
        if first == NONE {
            return Chain::default();
        }
        Chain { first, ..self.described(first) }
    }

    /// Reads the chain that begins with this head. If `head` is [`NONE`], the chain has no blocks.
    pub(super) fn load_headed(&self, head: u32) -> Chain {
        if head == NONE {
            return Chain::default();
        }
        Chain { head, first: self.word(head, ENTRIES_BEGIN) as u32, ..self.described(head) } // written from a u32
    }

    /// Returns the quota that a head names. Returns `None` if there is no head.
    pub(super) fn quota(&self, head: u32) -> Option<Quota> {
        if head == NONE {
            return None;
        }
        Spec::from_words(std::array::from_fn(|at| self.word(head, QUOTA + at))).map(Quota::from_spec)
    }

    /// Returns whether a head names this quota.
    pub(super) fn names(&self, head: u32, spec: &Spec) -> bool {
        head != NONE && spec.to_words().iter().enumerate().all(|(at, word)| self.word(head, QUOTA + at) == *word)
    }

    fn described(&self, block: u32) -> Chain {
        let ends = self.word(block, ENDS);
        Chain {
            total: self.word(block, TOTAL),
            head: NONE,
            first: NONE,
            last: (ends >> (2 * COUNT_BITS)) as u32, // written from a u32
            skip: (ends >> COUNT_BITS & COUNT_MASK) as usize,
            filled: (ends & COUNT_MASK) as usize,
        }
    }

    /// Writes what [`load`](Self::load) reads. The blocks of a chain without entries are freed.
    pub(super) fn store(&self, owner: Fingerprint, chain: &mut Chain) {
        if !chain.has_entry() {
            self.clear(owner, chain);
        } else {
            let counts = (chain.skip as u64) << COUNT_BITS | chain.filled as u64;
            if chain.head != NONE {
                self.set_word(chain.head, ENTRIES_BEGIN, u64::from(chain.first));
            }
            self.set_word(chain.block(), TOTAL, chain.total);
            self.set_word(chain.block(), ENDS, u64::from(chain.last) << (2 * COUNT_BITS) | counts);
        }
    }

    /// Returns a new chain of one block, without entries. Returns `None` if no block is free.
    pub(super) fn begin(&self, owner: Fingerprint) -> Option<Chain> {
        let block = self.allocate(owner)?;
        Some(Chain { first: block, last: block, ..Chain::default() })
    }

    /// Allocates a block for the first entry of a chain that will get a head, if there is a free block.
    pub(super) fn spare(&self, owner: Fingerprint) -> Option<u32> {
        self.allocate(owner)
    }

    /// Frees a block that is in no chain.
    pub(super) fn free_spare(&self, owner: Fingerprint, spare: u32) {
        self.release(owner, spare, spare);
    }

    /// Removes all entries from a chain that has a block. The chain then has a head that names this quota. If the
    /// chain has no other block for entries, the chain uses `spare`.
    pub(super) fn empty_headed(&self, owner: Fingerprint, chain: &mut Chain, spec: &Spec, spare: &mut Option<u32>) {
        self.empty(owner, chain);
        if chain.head == NONE {
            *chain = Chain { head: chain.first, ..Chain::default() };
        }
        if chain.first == NONE {
            if let Some(spare) = spare.take() {
                (chain.first, chain.last) = (spare, spare);
            }
        }
        spec.to_words().iter().enumerate().for_each(|(at, word)| self.set_word(chain.head, QUOTA + at, *word));
    }

    /// Removes all entries from a chain that has a block. The chain keeps one block, which is not a head.
    pub(super) fn empty_plain(&self, owner: Fingerprint, chain: &mut Chain) {
        self.empty(owner, chain);
        if chain.head != NONE {
            if chain.first != NONE {
                self.release(owner, chain.first, chain.first);
            }
            *chain = Chain { first: chain.head, last: chain.head, ..Chain::default() };
        }
    }

    /// Removes all entries from a chain, which keeps its head and its first block.
    fn empty(&self, owner: Fingerprint, chain: &mut Chain) {
        if chain.first != chain.last {
            self.release(owner, self.next(chain.first), chain.last);
        }
        *chain = Chain { head: chain.head, first: chain.first, last: chain.first, ..Chain::default() };
    }

    /// Frees all blocks of a chain, in one step.
    pub(super) fn clear(&self, owner: Fingerprint, chain: &mut Chain) {
        if chain.first != NONE {
            self.release(owner, chain.first, chain.last);
        }
        if chain.head != NONE {
            self.release(owner, chain.head, chain.head);
        }
        *chain = Chain::default();
    }

    /// Returns the pair that a chain holds.
    pub(super) fn pair(&self, chain: &Chain) -> Option<Pair> {
        if chain.head != NONE {
            let pair = Pair { at: self.word(chain.head, PAIR), n: self.word(chain.head, PAIR + 1) };
            return (chain.first == NONE && chain.has_entry()).then_some(pair);
        }
        let (at, n) = self.view(chain).newest()?;
        Some(Pair { at, n })
    }

    /// Removes everything from a chain, including its head, and puts a pair into it.
    pub(super) fn set_pair(&self, owner: Fingerprint, chain: &mut Chain, pair: Pair) {
        self.empty_plain(owner, chain);
        self.set(chain.first, 0, (pair.at, pair.n));
        chain.filled = 1;
    }

    /// Makes a pair the only content of a chain, in a head that names this quota.
    pub(super) fn set_headed_pair(&self, owner: Fingerprint, chain: &mut Chain, pair: Pair, spec: &Spec) {
        self.empty_headed(owner, chain, spec, &mut None);
        if chain.first != NONE {
            self.release(owner, chain.first, chain.first);
        }
        self.set_word(chain.head, PAIR, pair.at);
        self.set_word(chain.head, PAIR + 1, pair.n);
        // A pair counts as one entry, although it is in no block.
        *chain = Chain { head: chain.head, filled: 1, ..Chain::default() };
    }

    // Entries ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    pub(super) fn view<'a>(&'a self, chain: &'a Chain) -> ChainView<'a> {
        ChainView { arena: self, chain }
    }

    /// Applies an edit to a chain of this owner that has a block. If the edit moves entries to one instant,
    /// the merged entry keeps at most `most` units.
    pub(super) fn apply(&self, owner: Fingerprint, chain: &mut Chain, edit: &Edit, most: u64) {
        if let Some(move_to) = edit.move_to {
            self.move_to(owner, chain, move_to, most);
        }
        for _ in 0..edit.drop {
            self.pop(owner, chain);
        }
        if let Some((start, units)) = edit.add {
            self.push(owner, chain, start, units);
        }
        if let Some(keep) = edit.keep {
            while chain.total > keep {
                let over = chain.total - keep;
                let oldest = self.view(chain).iter().next();
                match oldest {
                    Some((_, units)) if units <= over => self.pop(owner, chain),
                    Some((start, units)) => {
                        self.set(chain.first, chain.skip, (start, units - over));
                        chain.total = keep;
                    }
                    None => chain.total = 0,
                }
            }
        }
    }

    /// Adds units to the newest entry if it starts at `start`, and otherwise adds a new entry.
    pub(super) fn push(&self, owner: Fingerprint, chain: &mut Chain, start: u64, units: u64) {
        let newest = self.view(chain).newest();
        chain.total += units;
        if let Some((_, held)) = newest.filter(|(newest, _)| *newest == start) {
            self.set(chain.last, chain.filled - 1, (start, held + units));
            return;
        }
        if chain.filled == ENTRIES {
            self.extend(owner, chain);
        }
        self.set(chain.last, chain.filled, (start, units));
        chain.filled += 1;
    }

    /// Makes room at the end of a chain whose last block is full: with another block, or by a fold.
    fn extend(&self, owner: Fingerprint, chain: &mut Chain) {
        let mut block = self.allocate(owner);
        if block.is_none() && self.fold(owner, chain) {
            if chain.filled < ENTRIES {
                return;
            }
            block = self.allocate(owner);
        }
        match block {
            Some(block) => {
                self.set_next(chain.last, block);
                (chain.last, chain.filled) = (block, 0);
            }
            None => self.fold_last(chain),
        }
    }

    /// Makes room in a full last block: moves the entries to the block's free beginning, or else folds the entries.
    fn fold_last(&self, chain: &mut Chain) {
        let from = if chain.first == chain.last { chain.skip } else { 0 };
        let entries = (from..ENTRIES).map(|index| (chain.last, index));
        let (entries, count) = self.folded(entries, if from > 0 { 1 } else { 2 });
        self.set_all(chain.last, 0, &entries, count);
        chain.filled = count;
        if chain.first == chain.last {
            chain.skip = 0;
        }
    }

    /// Removes units from the entry that starts at `start`.
    pub(super) fn remove_units(&self, owner: Fingerprint, chain: &mut Chain, start: u64, units: u64) {
        let Some((block, index)) = self.positions(chain).find(|(block, index)| self.entry(*block, *index).0 == start)
        else {
            return;
        };
        let (_, held) = self.entry(block, index);
        let taken = units.min(held);
        self.set(block, index, (start, held - taken));
        chain.total -= taken;
        if chain.total == 0 {
            self.empty(owner, chain);
        } else {
            self.drop_empty_newest(owner, chain);
        }
    }

    /// Drops the newest entries that hold no units. The newest entry says when the whole quota is back, so without
    /// units it would name an instant that is too late. The search walks the chain once.
    fn drop_empty_newest(&self, owner: Fingerprint, chain: &mut Chain) {
        if self.view(chain).newest().is_none_or(|(_, units)| units > 0) {
            return;
        }
        let newest = self.positions(chain).filter(|(block, index)| self.entry(*block, *index).1 > 0).last();
        if let Some((block, index)) = newest {
            self.cut(owner, chain, block, index + 1);
        }
    }

    /// Makes `block`, with `filled` entries, the last block of a chain.
    fn cut(&self, owner: Fingerprint, chain: &mut Chain, block: u32, filled: usize) {
        if block != chain.last {
            self.release(owner, self.next(block), chain.last);
        }
        (chain.last, chain.filled) = (block, filled);
    }

    /// Frees a block of a chain at the price of precision: two neighbouring blocks become one. Returns `false` if the
    /// chain has a single block.
    pub(super) fn fold(&self, owner: Fingerprint, chain: &mut Chain) -> bool {
        if chain.first == chain.last {
            return false;
        }
        let mut block = chain.first;
        for _ in 0..self.draw() % FOLDED_WITHIN {
            let next = self.next(block);
            if next == chain.last {
                break;
            }
            block = next;
        }
        let gone = self.next(block);
        let from = if block == chain.first { chain.skip } else { 0 };
        let until = if gone == chain.last { chain.filled } else { ENTRIES };
        let entries = (from..ENTRIES).map(|index| (block, index)).chain((0..until).map(|index| (gone, index)));
        let (folded, count) = self.folded(entries, 2);
        // Each block except the last is filled to its end, and only the first block may be empty at its beginning.
        // Two full blocks therefore fold into one full block.
        let begin = if gone == chain.last { 0 } else { ENTRIES - count };
        debug_assert!(begin == 0 || block == chain.first, "only the first block may be empty at its beginning");
        self.set_all(block, begin, &folded, count);
        if block == chain.first {
            chain.skip = begin;
        }
        if gone == chain.last {
            (chain.last, chain.filled) = (block, count);
        } else {
            self.set_next(block, self.next(gone));
        }
        self.release(owner, gone, gone);
        true
    }

    /// Joins each group of `each` neighbouring entries into one entry with the latest date of the group.
    /// Returns the entries and their number.
    fn folded(&self, positions: impl Iterator<Item = (u32, usize)>, each: usize) -> ([(u64, u64); ENTRIES], usize) {
        let mut folded = [(0, 0); ENTRIES];
        let mut count = 0;
        for (at, (block, index)) in positions.enumerate() {
            let (start, units) = self.entry(block, index);
            if let Some(entry) = folded.get_mut(at / each) {
                *entry = (start, entry.1 + units);
                count = at / each + 1;
            }
        }
        (folded, count)
    }

    fn pop(&self, owner: Fingerprint, chain: &mut Chain) {
        if !chain.has_entry() {
            return;
        }
        chain.total -= self.entry(chain.first, chain.skip).1;
        chain.skip += 1;
        if !chain.has_entry() {
            self.empty(owner, chain);
        } else if chain.skip == ENTRIES {
            let gone = chain.first;
            (chain.first, chain.skip) = (self.next(gone), 0);
            self.release(owner, gone, gone);
        }
    }

    /// Handles a clock that stepped back: the entries that start at `move_to` or later become one entry of at most
    /// `most` units, which starts at `move_to`.
    fn move_to(&self, owner: Fingerprint, chain: &mut Chain, move_to: u64, most: u64) {
        let later = |(block, index): &(u32, usize)| self.entry(*block, *index).0 >= move_to;
        let Some((block, index)) = self.positions(chain).find(later) else { return };
        let sum: u64 = self.positions(chain).filter(later).map(|(block, index)| self.entry(block, index).1).sum();
        let moved = sum.min(most);
        self.set(block, index, (move_to, moved));
        chain.total = chain.total - sum + moved;
        self.cut(owner, chain, block, index + 1);
    }

    // Blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the owner of a random block, if the block was ever used. A free block still names its last owner.
    pub(super) fn draw_owner(&self) -> Option<Fingerprint> {
        let owner = self.word(self.draw() % self.last() + 1, OWNER);
        (owner != 0).then(|| Fingerprint::new(owner))
    }

    /// Returns whether there is a free block.
    pub(super) fn has_free(&self) -> bool {
        self.untouched.load(Ordering::Relaxed) <= u64::from(self.last())
            || self.free.iter().any(|list| *lock(list) != NONE)
    }

    fn allocate(&self, owner: Fingerprint) -> Option<u32> {
        let own = list_of(owner);
        let block = self
            .take_free(own)
            .or_else(|| {
                // `Relaxed` suffices, because the thread that gets a block is the first to touch it. The counter is
                // read before it is raised, so that it stops growing after all blocks are used.
                let left = self.untouched.load(Ordering::Relaxed) <= u64::from(self.last());
                let block = if left { self.untouched.fetch_add(1, Ordering::Relaxed) } else { u64::MAX };
                u32::try_from(block).ok().filter(|block| *block <= self.last())
            })
            .or_else(|| (1..LISTS).find_map(|other| self.take_free((own + other) % LISTS)))?;
        self.set_word(block, OWNER, owner.bits());
        Some(block)
    }

    fn take_free(&self, list: usize) -> Option<u32> {
        let mut head = lock(self.free.get(list)?);
        let block = Some(*head).filter(|block| *block != NONE)?;
        *head = self.next(block);
        Some(block)
    }

    /// Frees the blocks from `first` to `last`, which are linked.
    fn release(&self, owner: Fingerprint, first: u32, last: u32) {
        if let Some(list) = self.free.get(list_of(owner)) {
            let mut head = lock(list);
            self.set_next(last, *head);
            *head = first;
        }
    }

    /// Returns the number of the last block.
    fn last(&self) -> u32 {
        (self.blocks.len() - 1) as u32 // at most BLOCKS_MAX
    }

    fn draw(&self) -> u32 {
        let draw = self.draws.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        ((draw ^ draw >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32 // shifted into range
    }

    fn positions<'a>(&'a self, chain: &Chain) -> EntryPositions<'a> {
        let block = if chain.has_entry() { chain.first } else { NONE };
        EntryPositions { arena: self, block, index: chain.skip, last: chain.last, filled: chain.filled }
    }

    fn next(&self, block: u32) -> u32 {
        self.word(block, NEXT) as u32 // written from a u32
    }

    fn set_next(&self, block: u32, next: u32) {
        self.set_word(block, NEXT, u64::from(next));
    }

    fn entry(&self, block: u32, index: usize) -> (u64, u64) {
        let at = FIRST_ENTRY + 2 * index;
        (self.word(block, at), self.word(block, at + 1))
    }

    fn set(&self, block: u32, index: usize, (start, units): (u64, u64)) {
        let at = FIRST_ENTRY + 2 * index;
        self.set_word(block, at, start);
        self.set_word(block, at + 1, units);
    }

    fn set_all(&self, block: u32, from: usize, entries: &[(u64, u64)], count: usize) {
        for (at, entry) in entries.iter().take(count).enumerate() {
            self.set(block, from + at, *entry);
        }
    }

    // The accesses are `Relaxed`, because the lock of the owner's slot orders the words of a block, and the lock of
    // the free list orders the words of a free block. Only a block's owner is read without these locks, as a hint.

    fn word(&self, block: u32, word: usize) -> u64 {
        debug_assert!(block <= self.last(), "a chain has a block that the arena does not have");
        self.blocks.get(block as usize).map_or(0, |words| words[word].load(Ordering::Relaxed))
    }

    fn set_word(&self, block: u32, word: usize, to: u64) {
        debug_assert!(block != NONE && block <= self.last(), "a chain has a block that the arena does not have");
        if let Some(words) = self.blocks.get(block as usize) {
            words[word].store(to, Ordering::Relaxed);
        }
    }
}

fn list_of(owner: Fingerprint) -> usize {
    (owner.bits() >> 20) as usize % LISTS
}

/// The positions of a chain's entries.
struct EntryPositions<'a> {
    arena: &'a EntryArena,
    block: u32,
    index: usize,
    last: u32,
    filled: usize,
}

impl Iterator for EntryPositions<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<(u32, usize)> {
        if self.block == NONE {
            return None;
        }
        let here = (self.block, self.index);
        self.index += 1;
        let is_last = self.block == self.last;
        if self.index >= if is_last { self.filled } else { ENTRIES } {
            self.index = 0;
            self.block = if is_last { NONE } else { self.arena.next(self.block) };
        }
        Some(here)
    }
}

/// A read-only view of a chain's entries.
pub(super) struct ChainView<'a> {
    arena: &'a EntryArena,
    chain: &'a Chain,
}

impl LogEntries for ChainView<'_> {
    fn total(&self) -> u64 {
        self.chain.total
    }

    fn newest(&self) -> Option<(u64, u64)> {
        self.chain.has_entry().then(|| self.arena.entry(self.chain.last, self.chain.filled - 1))
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.arena.positions(self.chain).map(|(block, index)| self.arena.entry(block, index))
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
impl EntryArena {
    /// Counts the free blocks, by taking them all.
    pub(super) fn free_blocks(&self) -> usize {
        let owner = Fingerprint::new(7 << 40);
        let blocks: Vec<u32> = std::iter::from_fn(|| self.allocate(owner)).collect();
        blocks.iter().for_each(|block| self.release(owner, *block, *block));
        blocks.len()
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use std::time::Duration;

    use super::*;

    fn owner() -> Fingerprint {
        Fingerprint::new(7 << 40)
    }

    fn add(arena: &EntryArena, chain: &mut Chain, start: u64, units: u64) {
        arena.apply(owner(), chain, &Edit { add: Some((start, units)), ..Edit::default() }, u64::MAX);
    }

    fn entries(arena: &EntryArena, chain: &Chain) -> Vec<(u64, u64)> {
        arena.view(chain).iter().collect()
    }

    fn begun(arena: &EntryArena) -> Chain {
        arena.begin(owner()).expect("there is a block")
    }

    #[test]
    fn chain_holds_as_many_entries_as_were_asked_for() {
        for held in [1, 2, 6, 7, 100, 1_000] {
            let arena = EntryArena::new(held, 0);
            let mut chain = begun(&arena);
            // As a log does once it is full: the oldest goes when the newest comes.
            for start in 0..3 * held as u64 {
                let drop = usize::from(start >= held as u64);
                arena.apply(owner(), &mut chain, &Edit { drop, add: Some((start, 1)), ..Edit::default() }, u64::MAX);
                let oldest = (start + 1).saturating_sub(held as u64);
                assert!(entries(&arena, &chain).into_iter().eq((oldest..=start).map(|start| (start, 1))), "of {held}");
            }
            arena.store(owner(), &mut chain);
            assert_eq!(arena.load(chain.first), chain);
        }
    }

    #[test]
    fn full_arena_folds_entries_to_later_dates_and_loses_no_unit() {
        let arena = EntryArena::new(18, 0);
        let mut chain = begun(&arena);
        for start in 0..1_000 {
            add(&arena, &mut chain, start, 2);
            let now = entries(&arena, &chain);
            assert_eq!(now.iter().map(|(_, units)| units).sum::<u64>(), 2 * (start + 1));
            assert!(now.windows(2).all(|pair| pair[0].0 < pair[1].0), "{now:?}");
            // Never laxer: at each date at most as many units are older as were taken by then.
            let mut older = 0;
            for (date, units) in &now {
                older += units;
                assert!(older <= 2 * (date + 1), "{now:?}");
            }
        }
        arena.clear(owner(), &mut chain);
        assert_eq!(arena.free_blocks(), 4);
    }

    #[test]
    fn chain_of_a_single_block_keeps_the_newest_dates() {
        let arena = EntryArena::new(1, 0);
        let mut chain = begun(&arena);
        while arena.allocate(owner()).is_some() {}
        for start in 0..20 {
            add(&arena, &mut chain, start, 3);
            assert_eq!(chain.total, 3 * (start + 1));
        }
        let left = entries(&arena, &chain);
        assert!(left.len() >= ENTRIES / 2 && left.last() == Some(&(19, 3)), "{left:?}");
    }

    #[test]
    fn full_block_that_lost_its_oldest_entries_keeps_all_dates() {
        let arena = EntryArena::new(1, 0);
        let mut chain = begun(&arena);
        while arena.allocate(owner()).is_some() {}
        for start in 0..6 {
            add(&arena, &mut chain, start, 1);
        }
        for start in 6..30 {
            let edit = Edit { drop: 1, add: Some((start, 1)), ..Edit::default() };
            arena.apply(owner(), &mut chain, &edit, u64::MAX);
            let expected: Vec<(u64, u64)> = (start - 5..=start).map(|start| (start, 1)).collect();
            assert_eq!((entries(&arena, &chain), chain.total), (expected, 6));
        }
    }

    /// Another thread may take the block that a fold has freed.
    #[test]
    fn last_block_of_several_is_folded_by_itself() {
        let arena = EntryArena::new(100, 0);
        let mut chain = begun(&arena);
        for start in 0..12 {
            add(&arena, &mut chain, start, 1);
        }
        arena.apply(owner(), &mut chain, &Edit { drop: 2, ..Edit::default() }, u64::MAX);
        arena.fold_last(&mut chain);
        assert_eq!(entries(&arena, &chain), [(2, 1), (3, 1), (4, 1), (5, 1), (7, 2), (9, 2), (11, 2)]);
        assert!(!chain.wants_block(), "there is a place for the next entry");
    }

    #[test]
    fn chain_of_a_pair_holds_it_and_nothing_else() {
        let arena = EntryArena::new(100, 0);
        let mut chain = begun(&arena);
        for start in 0..50 {
            add(&arena, &mut chain, start, 1);
        }
        arena.set_pair(owner(), &mut chain, Pair { at: 7, n: 9 });
        arena.store(owner(), &mut chain);
        assert_eq!(arena.pair(&arena.load(chain.first)), Some(Pair { at: 7, n: 9 }));
        assert_eq!(arena.free_blocks(), arena.last() as usize - 1);
    }

    #[test]
    fn fold_frees_a_block_of_a_chain_that_has_several() {
        let arena = EntryArena::new(100, 0);
        let mut chain = begun(&arena);
        for start in 0..12 {
            add(&arena, &mut chain, start, 1);
        }
        let free = arena.free_blocks();
        assert!(arena.fold(owner(), &mut chain));
        assert_eq!((arena.free_blocks(), chain.total, entries(&arena, &chain).len()), (free + 1, 12, 6));
        assert!(!arena.fold(owner(), &mut chain), "one block is left");
        assert_eq!((arena.free_blocks(), chain.total), (free + 1, 12));
    }

    #[test]
    fn block_is_free_before_its_first_use_and_after_its_last() {
        let arena = EntryArena::new(1, 0);
        assert!(arena.has_free());
        let (one, other) = (Fingerprint::new(1 << 40), Fingerprint::new(2 << 40));
        let mut chain = arena.begin(one).expect("there are two blocks");
        assert!(arena.has_free());
        assert!(arena.begin(other).is_some());
        assert!(!arena.has_free());
        let drawn: Vec<_> = (0..100).filter_map(|_| arena.draw_owner()).collect();
        assert!(drawn.contains(&one) && drawn.contains(&other), "each block is drawn");
        arena.clear(one, &mut chain);
        assert!(arena.has_free());
    }

    #[test]
    fn head_names_its_quota_until_the_chain_loses_it() {
        let arena = EntryArena::new(100, 0);
        let (log, bucket) = (Quota::sliding_log(20, Duration::from_secs(60)).expect("valid"), Quota::per_minute(5));
        let names = |head, quota: &Quota| arena.names(head, quota.spec());
        let (mut chain, mut spare) = (begun(&arena), arena.spare(owner()));
        arena.empty_headed(owner(), &mut chain, log.spec(), &mut spare);
        assert_eq!(spare, None, "the entries have it");
        for start in 0..20 {
            add(&arena, &mut chain, start, 1);
        }
        arena.store(owner(), &mut chain);
        let head = chain.block();
        assert_eq!(arena.load_headed(head), chain);
        assert!(entries(&arena, &chain).into_iter().eq((0..20).map(|start| (start, 1))));
        assert!(names(head, &log) && !names(head, &bucket));
        assert_eq!(arena.quota(head), Some(log));

        arena.empty_headed(owner(), &mut chain, log.spec(), &mut None);
        assert_eq!((chain.block(), entries(&arena, &chain)), (head, vec![]));
        arena.set_headed_pair(owner(), &mut chain, Pair { at: 7, n: 9 }, bucket.spec());
        arena.store(owner(), &mut chain);
        assert_eq!(arena.pair(&arena.load_headed(head)), Some(Pair { at: 7, n: 9 }));
        assert!(names(head, &bucket) && !names(head, &log));
        assert_eq!(arena.free_blocks(), arena.last() as usize - 1, "a pair needs its head only");

        arena.empty_plain(owner(), &mut chain);
        assert_eq!((chain.head, chain.first), (NONE, head));
        arena.clear(owner(), &mut chain);
        assert_eq!(arena.free_blocks(), arena.last() as usize);
        assert_eq!((arena.load_headed(NONE), arena.quota(NONE), names(NONE, &log)), (Chain::default(), None, false));
    }

    #[test]
    fn random_edits_agree_with_a_plain_list_while_there_is_room() {
        let arena = EntryArena::new(200, 0);
        let (mut chain, mut list) = (begun(&arena), Vec::<(u64, u64)>::new());
        let (mut x, mut start) = (1_u64, 1_000_u64);
        let mut below = move |bound: u64| {
            x = x.wrapping_mul(0xd129_0f59_6c1d_4b4d).wrapping_add(0x1b87_3593);
            ((u128::from(x) * u128::from(bound)) >> 64) as u64
        };
        for _ in 0..20_000 {
            match below(12) {
                0 if !list.is_empty() => {
                    let (date, units) = list[below(list.len() as u64) as usize];
                    let taken = 1 + below(units.max(1));
                    arena.remove_units(owner(), &mut chain, date, taken);
                    list.iter_mut().filter(|entry| entry.0 == date).for_each(|entry| entry.1 -= taken.min(entry.1));
                    while list.last().is_some_and(|entry| entry.1 == 0) {
                        list.pop();
                    }
                }
                1 => {
                    let most = 5 + below(40);
                    let move_to = start.saturating_sub(below(30));
                    arena.apply(owner(), &mut chain, &Edit { move_to: Some(move_to), ..Edit::default() }, most);
                    if let Some(at) = list.iter().position(|entry| entry.0 >= move_to) {
                        let moved: Vec<_> = list.drain(at..).collect();
                        let units: u64 = moved.iter().map(|entry| entry.1).sum();
                        list.push((move_to, units.min(most)));
                    }
                    start = start.max(move_to);
                }
                _ => {
                    start += below(3);
                    let (drop, units) = ((below(3) as usize).min(list.len()), 1 + below(4));
                    let keep = (below(5) == 0).then(|| 1 + below(150));
                    let edit = Edit { drop, add: Some((start, units)), keep, ..Edit::default() };
                    arena.apply(owner(), &mut chain, &edit, u64::MAX);
                    list.drain(..drop);
                    match list.last_mut().filter(|entry| entry.0 == start) {
                        Some(entry) => entry.1 += units,
                        None => list.push((start, units)),
                    }
                    let mut over = keep.map_or(0, |keep| list.iter().map(|e| e.1).sum::<u64>().saturating_sub(keep));
                    while over > 0 {
                        let trimmed = over.min(list[0].1);
                        list[0].1 -= trimmed;
                        over -= trimmed;
                        if list[0].1 == 0 {
                            list.remove(0);
                        }
                    }
                    let excess = list.len().saturating_sub(150);
                    arena.apply(owner(), &mut chain, &Edit { drop: excess, ..Edit::default() }, u64::MAX);
                    list.drain(..excess);
                }
            }
            assert_eq!(entries(&arena, &chain), list);
            assert_eq!(chain.total, list.iter().map(|entry| entry.1).sum::<u64>());
        }
        arena.clear(owner(), &mut chain);
        assert_eq!(arena.free_blocks(), arena.last() as usize, "no block is lost");
    }
}
