//! Dated entries of logs and sub-windows, in blocks from one arena that all shards share.
//!
//! A key may use as much of the arena as there is. Its entries are a [`Trail`]: a lone entry is kept in the key's slot, more
//! of them in a chain of blocks. A block is written only by the thread that holds the lock of its key's shard.
//!
//! Entries never run out. A trail that finds no free block *folds* its own: neighbours become one entry of the later date.
//! Folded entries count for longer than they should, never for less time, and no key is forgotten.

use crate::algorithm::trail::{Edit, Entries};
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

use super::words::{Fingerprint, zeroed};

/// Entries in one block: with a link and the owner's fingerprint they make 128 bytes.
const ENTRIES: usize = 7;

const WORDS_PER_BLOCK: usize = 16;
const NEXT: usize = 0;
const FIRST_ENTRY: usize = 1;
const OWNER: usize = 15;
const _: () = assert!(FIRST_ENTRY + 2 * ENTRIES == OWNER && OWNER + 1 == WORDS_PER_BLOCK);

/// No block.
const NONE: u32 = 0;

/// Bits of a block's number: two of them, and two numbers of entries, make a word.
const NUMBER_BITS: u32 = 29;
const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;
const BLOCKS_MAX: usize = NUMBER_MASK as usize;
const COUNT_BITS: u32 = 3;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;
const _: () = assert!(2 * NUMBER_BITS + 2 * COUNT_BITS == u64::BITS && ENTRIES as u64 <= COUNT_MASK);

/// Lists of free blocks, so that threads seldom wait for each other.
const LISTS: usize = 16;

/// A fold looks at one of this many blocks, from the oldest on.
const FOLDED_WITHIN: u32 = 32;

/// Blocks of entries. Each is in one trail, in one list of free ones, or was never used. They are numbered from 1.
pub(super) struct Arena {
    words: Box<[AtomicU64]>,
    blocks: u32,
    free: [Mutex<u32>; LISTS],
    /// Blocks from this one on were never used: they are not yet in memory.
    untouched: AtomicU64,
    /// Where the next sample is drawn from.
    draws: AtomicU64,
}

/// A key's entries, the oldest first. The default is an empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trail {
    pub(super) total: u64,
    /// The date of a lone entry, which holds all units and takes no block.
    lone: u64,
    first: u32,
    last: u32,
    /// Entries of the first block that are gone already. Each block but the last is filled to its end.
    skip: usize,
    /// Entries in the last block, the gone ones included.
    filled: usize,
}

impl Trail {
    /// The trail whose units and [`chain`](Self::chain) these are; `lone` is the date of the entry if there is only one.
    pub(super) fn from_words(total: u64, chain: u64, lone: u64) -> Self {
        let number = |shift: u32| (chain >> shift & NUMBER_MASK) as u32; // masked
        let count = |shift: u32| (chain >> shift & COUNT_MASK) as usize; // masked
        Self {
            total,
            lone,
            first: number(NUMBER_BITS + 2 * COUNT_BITS),
            last: number(2 * COUNT_BITS),
            skip: count(COUNT_BITS),
            filled: count(0),
        }
    }

    /// Where the blocks are, in a word; 0 if there are none.
    pub(super) fn chain(&self) -> u64 {
        let ends = u64::from(self.first) << NUMBER_BITS | u64::from(self.last);
        ends << (2 * COUNT_BITS) | (self.skip as u64) << COUNT_BITS | self.filled as u64
    }

    fn is_chained(&self) -> bool {
        self.first != NONE
    }

    /// Whether one more entry takes a block.
    pub(super) fn wants_block(&self) -> bool {
        if self.is_chained() { self.filled == ENTRIES } else { self.total > 0 }
    }
}

impl Arena {
    pub(super) fn new(entries: usize) -> Self {
        // One more, since the oldest block of a trail may be partly gone.
        let blocks = (entries.div_ceil(ENTRIES) + 1).min(BLOCKS_MAX);
        Self {
            words: zeroed((blocks + 1) * WORDS_PER_BLOCK),
            blocks: blocks as u32, // below 2^29
            free: std::array::from_fn(|_| Mutex::new(NONE)),
            untouched: AtomicU64::new(1),
            draws: AtomicU64::new(0),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    pub(super) fn view<'a>(&'a self, trail: &'a Trail) -> TrailView<'a> {
        TrailView { arena: self, trail }
    }

    /// Makes the change to a trail of this owner, whose entries hold at most `most` units each.
    pub(super) fn apply(&self, owner: Fingerprint, trail: &mut Trail, edit: &Edit, most: u64) {
        if let Some(move_to) = edit.move_to {
            self.move_to(owner, trail, move_to, most);
        }
        for _ in 0..edit.drop {
            self.pop(owner, trail);
        }
        if let Some((start, units)) = edit.add {
            self.push(owner, trail, start, units);
        }
        if let Some(keep) = edit.keep {
            while trail.total > keep {
                let over = trail.total - keep;
                let oldest = self.view(trail).iter().next();
                match oldest {
                    Some((_, units)) if units <= over => self.pop(owner, trail),
                    Some((start, units)) => {
                        if trail.is_chained() {
                            self.set(trail.first, trail.skip, (start, units - over));
                        }
                        trail.total = keep;
                    }
                    None => trail.total = 0,
                }
            }
        }
    }

    /// Takes units out of the entry that starts at `start`, which holds as many.
    pub(super) fn remove_units(&self, owner: Fingerprint, trail: &mut Trail, start: u64, units: u64) {
        if trail.is_chained() {
            let Some((block, place)) = self.places(trail).find(|(block, place)| self.entry(*block, *place).0 == start)
            else {
                return;
            };
            let (_, held) = self.entry(block, place);
            let taken = units.min(held);
            self.set(block, place, (start, held - taken));
            trail.total -= taken;
        } else if trail.lone == start {
            trail.total -= units.min(trail.total);
        }
        if trail.total == 0 {
            self.clear(owner, trail);
        } else {
            self.drop_empty_newest(owner, trail);
        }
    }

    /// Drops the newest entries that hold no units: the newest one left says when all of the quota is back. It walks the
    /// trail once.
    fn drop_empty_newest(&self, owner: Fingerprint, trail: &mut Trail) {
        if !trail.is_chained() || self.entry(trail.last, trail.filled - 1).1 > 0 {
            return;
        }
        let newest = self.places(trail).filter(|(block, place)| self.entry(*block, *place).1 > 0).last();
        let Some((block, place)) = newest else { return };
        if block != trail.last {
            self.release(owner, self.next(block), trail.last);
        }
        (trail.last, trail.filled) = (block, place + 1);
    }

    /// Frees all blocks of a trail, in one step.
    pub(super) fn clear(&self, owner: Fingerprint, trail: &mut Trail) {
        if trail.is_chained() {
            self.release(owner, trail.first, trail.last);
        }
        *trail = Trail::default();
    }

    /// Frees a block of a trail at the price of its precision: two neighbouring blocks become one. `false` if it has not
    /// got two.
    pub(super) fn fold(&self, owner: Fingerprint, trail: &mut Trail) -> bool {
        if trail.first == trail.last {
            return false;
        }
        let (mut before, mut block) = (NONE, trail.first);
        for _ in 0..self.draw() % FOLDED_WITHIN {
            let next = self.next(block);
            if next == trail.last {
                break;
            }
            (before, block) = (block, next);
        }
        let gone = self.next(block);
        let from = if block == trail.first { trail.skip } else { 0 };
        let until = if gone == trail.last { trail.filled } else { ENTRIES };
        let entries = (from..ENTRIES).map(|place| (block, place)).chain((0..until).map(|place| (gone, place)));
        let (folded, count) = self.folded(entries);
        // Each block but the last is filled to its end, and only the first may begin later: a fold of two full blocks is
        // full itself.
        let begin = if gone == trail.last { 0 } else { ENTRIES - count };
        for (place, entry) in folded.into_iter().take(count).enumerate() {
            self.set(block, begin + place, entry);
        }
        if block == trail.first {
            trail.skip = begin;
        }
        if gone == trail.last {
            (trail.last, trail.filled) = (block, count);
        } else {
            self.set_next(block, self.next(gone));
        }
        debug_assert!(begin == 0 || before == NONE, "only the first block begins later");
        self.release(owner, gone, gone);
        true
    }

    /// The owner of a block that is drawn by lot, if it was ever used: the key of its trail, unless the block is free.
    pub(super) fn draw_owner(&self) -> Option<Fingerprint> {
        let block = self.draw() % self.blocks + 1;
        let owner = self.word(block, OWNER);
        (owner != 0).then(|| Fingerprint::new(owner))
    }

    /// Whether there is a free block.
    pub(super) fn has_free(&self) -> bool {
        self.untouched.load(Ordering::Relaxed) <= u64::from(self.blocks)
            || self.free.iter().any(|list| *lock(list) != NONE)
    }

    /// Pairs of neighbours as one entry of the later date each.
    fn folded(&self, entries: impl Iterator<Item = (u32, usize)>) -> ([(u64, u64); ENTRIES], usize) {
        let mut folded = [(0, 0); ENTRIES];
        let mut count = 0;
        for (place, (block, slot)) in entries.enumerate() {
            let (start, units) = self.entry(block, slot);
            if let Some(pair) = folded.get_mut(place / 2) {
                *pair = (start, pair.1 + units);
                count = place / 2 + 1;
            }
        }
        (folded, count)
    }

    fn push(&self, owner: Fingerprint, trail: &mut Trail, start: u64, units: u64) {
        let newest = self.view(trail).newest();
        let held = trail.total;
        trail.total += units;
        if let Some((_, held)) = newest.filter(|(newest, _)| *newest == start) {
            if trail.is_chained() {
                self.set(trail.last, trail.filled - 1, (start, held + units));
            }
            return;
        }
        if !trail.is_chained() {
            let Some(block) = (if held > 0 { self.allocate(owner) } else { None }) else {
                trail.lone = start; // the first entry, or there is no room and it is folded into this one
                return;
            };
            self.set(block, 0, (trail.lone, held));
            (trail.first, trail.last, trail.skip, trail.filled) = (block, block, 0, 1);
        } else if trail.filled == ENTRIES {
            let block = match self.allocate(owner) {
                Some(block) => Some(block),
                None if self.fold(owner, trail) => {
                    if trail.filled == ENTRIES {
                        self.allocate(owner)
                    } else {
                        None
                    }
                }
                None => None,
            };
            match block {
                Some(block) => {
                    self.set_next(trail.last, block);
                    (trail.last, trail.filled) = (block, 0);
                }
                None => self.make_place(trail),
            }
        }
        self.set(trail.last, trail.filled, (start, units));
        trail.filled += 1;
    }

    /// Makes a place in a trail's last block, if it has none: by moving its entries, or else by folding them.
    fn make_place(&self, trail: &mut Trail) {
        if trail.filled < ENTRIES {
            return;
        }
        let from = if trail.first == trail.last { trail.skip } else { 0 };
        if from > 0 {
            for place in from..ENTRIES {
                self.set(trail.last, place - from, self.entry(trail.last, place));
            }
            trail.filled -= from;
        } else {
            let (folded, count) = self.folded((0..ENTRIES).map(|place| (trail.last, place)));
            for (place, entry) in folded.into_iter().take(count).enumerate() {
                self.set(trail.last, place, entry);
            }
            trail.filled = count;
        }
        if trail.first == trail.last {
            trail.skip = 0;
        }
    }

    fn pop(&self, owner: Fingerprint, trail: &mut Trail) {
        if !trail.is_chained() {
            *trail = Trail::default();
            return;
        }
        trail.total -= self.entry(trail.first, trail.skip).1;
        trail.skip += 1;
        if trail.first == trail.last {
            if trail.skip == trail.filled {
                self.clear(owner, trail);
            }
        } else if trail.skip == ENTRIES {
            let gone = trail.first;
            (trail.first, trail.skip) = (self.next(gone), 0);
            self.release(owner, gone, gone);
        }
    }

    /// The clock stepped back: entries that start later start at `move_to` now, and become one of at most `most` units.
    fn move_to(&self, owner: Fingerprint, trail: &mut Trail, move_to: u64, most: u64) {
        if !trail.is_chained() {
            trail.lone = trail.lone.min(move_to);
            return;
        }
        let later = |(block, place): &(u32, usize)| self.entry(*block, *place).0 >= move_to;
        let Some((block, place)) = self.places(trail).find(later) else { return };
        let sum: u64 = self.places(trail).filter(later).map(|(block, place)| self.entry(block, place).1).sum();
        let moved = sum.min(most);
        self.set(block, place, (move_to, moved));
        trail.total = trail.total - sum + moved;
        if block != trail.last {
            self.release(owner, self.next(block), trail.last);
        }
        (trail.last, trail.filled) = (block, place + 1);
    }

    fn allocate(&self, owner: Fingerprint) -> Option<u32> {
        let own = list_of(owner);
        let block = self
            .take_free(own)
            .or_else(|| {
                // Relaxed: who gets a block is the first to touch it. Asked before, so that it does not grow for ever.
                let left = self.untouched.load(Ordering::Relaxed) <= u64::from(self.blocks);
                let block = if left { self.untouched.fetch_add(1, Ordering::Relaxed) } else { u64::MAX };
                u32::try_from(block).ok().filter(|block| *block <= self.blocks)
            })
            .or_else(|| (1..LISTS).find_map(|other| self.take_free((own + other) % LISTS)))?;
        self.set_word(block, OWNER, owner.bits());
        self.set_next(block, NONE);
        Some(block)
    }

    fn take_free(&self, list: usize) -> Option<u32> {
        let mut head = lock(self.free.get(list)?);
        let block = Some(*head).filter(|block| *block != NONE)?;
        *head = self.next(block);
        Some(block)
    }

    /// Frees the blocks of a chain.
    fn release(&self, owner: Fingerprint, first: u32, last: u32) {
        if let Some(list) = self.free.get(list_of(owner)) {
            let mut head = lock(list);
            self.set_next(last, *head);
            *head = first;
        }
    }

    fn draw(&self) -> u32 {
        let draw = self.draws.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        ((draw ^ draw >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32 // shifted into range
    }

    fn places<'a>(&'a self, trail: &Trail) -> Places<'a> {
        Places { arena: self, block: trail.first, place: trail.skip, last: trail.last, filled: trail.filled }
    }

    fn next(&self, block: u32) -> u32 {
        self.word(block, NEXT) as u32 // written from a u32
    }

    fn set_next(&self, block: u32, next: u32) {
        self.set_word(block, NEXT, u64::from(next));
    }

    fn entry(&self, block: u32, place: usize) -> (u64, u64) {
        let at = FIRST_ENTRY + 2 * place;
        (self.word(block, at), self.word(block, at + 1))
    }

    fn set(&self, block: u32, place: usize, (start, units): (u64, u64)) {
        let at = FIRST_ENTRY + 2 * place;
        self.set_word(block, at, start);
        self.set_word(block, at + 1, units);
    }

    // Relaxed: a block's words are ordered by the lock of its owner's shard, those of a free one by that of its list. Only the
    // owner is read without them, as a hint.

    fn word(&self, block: u32, word: usize) -> u64 {
        self.words.get(block as usize * WORDS_PER_BLOCK + word).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    fn set_word(&self, block: u32, word: usize, to: u64) {
        if let Some(word) = self.words.get(block as usize * WORDS_PER_BLOCK + word) {
            word.store(to, Ordering::Relaxed);
        }
    }
}

fn list_of(owner: Fingerprint) -> usize {
    (owner.bits() >> 20) as usize % LISTS
}

/// The places of a chain's entries.
struct Places<'a> {
    arena: &'a Arena,
    block: u32,
    place: usize,
    last: u32,
    filled: usize,
}

impl Iterator for Places<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<(u32, usize)> {
        if self.block == NONE {
            return None;
        }
        let here = (self.block, self.place);
        self.place += 1;
        let is_last = self.block == self.last;
        if self.place >= if is_last { self.filled } else { ENTRIES } {
            self.place = 0;
            self.block = if is_last { NONE } else { self.arena.next(self.block) };
        }
        Some(here)
    }
}

/// A trail's entries, to be read.
pub(super) struct TrailView<'a> {
    arena: &'a Arena,
    trail: &'a Trail,
}

impl Entries for TrailView<'_> {
    fn total(&self) -> u64 {
        self.trail.total
    }

    fn newest(&self) -> Option<(u64, u64)> {
        match (self.trail.is_chained(), self.trail.filled.checked_sub(1)) {
            (true, Some(place)) => Some(self.arena.entry(self.trail.last, place)),
            _ => self.lone(),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let chained = self.arena.places(self.trail).map(|(block, place)| self.arena.entry(block, place));
        self.lone().into_iter().chain(chained)
    }
}

impl TrailView<'_> {
    fn lone(&self) -> Option<(u64, u64)> {
        (!self.trail.is_chained() && self.trail.total > 0).then_some((self.trail.lone, self.trail.total))
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use super::*;

    fn owner() -> Fingerprint {
        Fingerprint::new(7 << 40)
    }

    fn add(arena: &Arena, trail: &mut Trail, start: u64, units: u64) {
        arena.apply(owner(), trail, &Edit { add: Some((start, units)), ..Edit::default() }, u64::MAX);
    }

    fn entries(arena: &Arena, trail: &Trail) -> Vec<(u64, u64)> {
        arena.view(trail).iter().collect()
    }

    fn free(arena: &Arena) -> usize {
        let mut blocks = Vec::new();
        while let Some(block) = arena.allocate(owner()) {
            blocks.push(block);
        }
        blocks.iter().for_each(|block| arena.release(owner(), *block, *block));
        blocks.len()
    }

    #[test]
    fn trail_holds_as_many_entries_as_were_asked_for() {
        for held in [1, 2, 7, 8, 100, 1_000] {
            let arena = Arena::new(held);
            let mut trail = Trail::default();
            // As a log does once it is full: the oldest goes when the newest comes.
            for start in 0..3 * held as u64 {
                let drop = usize::from(start >= held as u64);
                arena.apply(owner(), &mut trail, &Edit { drop, add: Some((start, 1)), ..Edit::default() }, u64::MAX);
                let oldest = (start + 1).saturating_sub(held as u64);
                assert!(entries(&arena, &trail).into_iter().eq((oldest..=start).map(|start| (start, 1))), "of {held}");
            }
            let (total, chain) = (trail.total, trail.chain());
            assert_eq!(Trail::from_words(total, chain, trail.lone), trail);
        }
    }

    #[test]
    fn full_arena_folds_entries_to_later_dates_and_loses_no_unit() {
        let arena = Arena::new(21);
        let mut trail = Trail::default();
        for start in 0..1_000 {
            add(&arena, &mut trail, start, 2);
            let now = entries(&arena, &trail);
            assert_eq!(now.iter().map(|(_, units)| units).sum::<u64>(), 2 * (start + 1));
            assert!(now.windows(2).all(|pair| pair[0].0 < pair[1].0), "{now:?}");
            // Never laxer: at each date at most as many units are older as were taken by then.
            let mut older = 0;
            for (date, units) in &now {
                older += units;
                assert!(older <= 2 * (date + 1), "{now:?}");
            }
        }
        arena.clear(owner(), &mut trail);
        assert_eq!(free(&arena), 4);
    }

    #[test]
    fn trail_without_any_block_keeps_one_entry() {
        let arena = Arena::new(1);
        while arena.allocate(owner()).is_some() {}
        let mut trail = Trail::default();
        for start in 0..20 {
            add(&arena, &mut trail, start, 3);
        }
        assert_eq!(entries(&arena, &trail), [(19, 60)]);
    }

    #[test]
    fn random_edits_agree_with_a_plain_list_while_there_is_room() {
        let arena = Arena::new(200);
        let (mut trail, mut list) = (Trail::default(), Vec::<(u64, u64)>::new());
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
                    arena.remove_units(owner(), &mut trail, date, taken);
                    list.iter_mut().filter(|entry| entry.0 == date).for_each(|entry| entry.1 -= taken.min(entry.1));
                    while list.last().is_some_and(|entry| entry.1 == 0) {
                        list.pop();
                    }
                }
                1 => {
                    let most = 5 + below(40);
                    let move_to = start.saturating_sub(below(30));
                    arena.apply(owner(), &mut trail, &Edit { move_to: Some(move_to), ..Edit::default() }, most);
                    if let Some(at) = list.iter().position(|entry| entry.0 >= move_to) {
                        let moved: Vec<_> = list.drain(at..).collect();
                        let units: u64 = moved.iter().map(|entry| entry.1).sum();
                        // A lone entry is as it was.
                        list.push((move_to, if trail.is_chained() { units.min(most) } else { units }));
                    }
                    start = start.max(move_to);
                }
                _ => {
                    start += below(3);
                    let (drop, units) = ((below(3) as usize).min(list.len()), 1 + below(4));
                    let keep = (below(5) == 0).then(|| 1 + below(150));
                    let edit = Edit { drop, add: Some((start, units)), keep, ..Edit::default() };
                    arena.apply(owner(), &mut trail, &edit, u64::MAX);
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
                    arena.apply(owner(), &mut trail, &Edit { drop: excess, ..Edit::default() }, u64::MAX);
                    list.drain(..excess);
                }
            }
            assert_eq!(entries(&arena, &trail), list);
            assert_eq!(trail.total, list.iter().map(|entry| entry.1).sum::<u64>());
        }
        arena.clear(owner(), &mut trail);
        assert_eq!(free(&arena), arena.blocks as usize, "no block is lost");
    }
}
