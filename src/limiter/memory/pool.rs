//! Dated entries of logs and sub-windows, in chunks from a pool of fixed size.

use crate::algorithm::trail::{Edit, Entries};

/// Entries in one chunk: with the link to the next they make 128 bytes.
pub(super) const ENTRIES_PER_CHUNK: usize = 7;

const WORDS_PER_CHUNK: usize = 16;

/// No chunk.
const NONE: u32 = 0;

/// Chunks of entries. A chunk is either in one trail or in the list of free ones. Chunks are numbered from 1.
pub(super) struct Pool {
    /// Of each chunk the number of the next one, then its entries, then one word unused.
    words: Box<[u64]>,
    free: u32,
    /// Chunks in the list of free ones.
    freed: u32,
    /// Chunks that were never used begin here: they are zero, and not yet in memory.
    untouched: u32,
}

/// A list of entries in a pool, the oldest first. All zeros is an empty one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Trail {
    pub(super) total: u64,
    first: u32,
    last: u32,
    /// Entries of the first chunk that are gone already.
    skip: u8,
    /// Entries in the last chunk.
    filled: u8,
    chunks: u32,
}

impl Trail {
    /// In three words, as a table entry keeps it.
    pub(super) fn to_words(self) -> [u64; 3] {
        let ends = u64::from(self.first) << 32 | u64::from(self.last);
        [self.total, ends, u64::from(self.chunks) << 32 | u64::from(self.skip) << 8 | u64::from(self.filled)]
    }

    pub(super) fn from_words([total, ends, counts]: [u64; 3]) -> Self {
        let [.., skip, filled] = counts.to_be_bytes();
        let upper = |word: u64| (word >> 32) as u32; // shifted into range
        Self { total, first: upper(ends), last: upper(ends << 32), skip, filled, chunks: upper(counts) }
    }
}

impl Pool {
    pub(super) fn new(entries: usize) -> Self {
        let chunks = entries.div_ceil(ENTRIES_PER_CHUNK).clamp(1, u32::MAX as usize - 1);
        Self { words: bytemuck::zeroed_slice_box((chunks + 1) * WORDS_PER_CHUNK), free: NONE, freed: 0, untouched: 1 }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Whether so many entries can be added, each to any trail.
    pub(super) fn has_room(&self, entries: usize) -> bool {
        let untouched = self.words.len() / WORDS_PER_CHUNK - self.untouched as usize;
        self.freed as usize + untouched >= entries
    }

    pub(super) fn view<'a>(&'a self, trail: &'a Trail) -> TrailView<'a> {
        TrailView { pool: self, trail }
    }

    /// Makes the change. Nothing is done, and `false` returned, if an entry is to be added and there is no room.
    pub(super) fn apply(&mut self, trail: &mut Trail, edit: &Edit) -> bool {
        if edit.add.is_some() && !self.has_room(1) {
            return false;
        }
        if let Some(move_to) = edit.move_to {
            self.move_to(trail, move_to);
        }
        for _ in 0..edit.drop {
            self.pop(trail);
        }
        if let Some((start, units)) = edit.add {
            self.push(trail, start, units);
        }
        if let Some(keep) = edit.keep {
            while trail.total > keep {
                let over = trail.total - keep;
                match self.oldest(trail) {
                    Some((_, units)) if units <= over => self.pop(trail),
                    Some((start, units)) => {
                        self.set(trail.first, usize::from(trail.skip), (start, units - over));
                        trail.total = keep;
                    }
                    None => trail.total = 0,
                }
            }
        }
        true
    }

    /// Takes units out of the entry that starts at `start`, which holds as many.
    pub(super) fn remove_units(&mut self, trail: &mut Trail, start: u64, units: u64) {
        let Some((chunk, slot)) = Places::new(self, trail).find(|(chunk, slot)| self.entry(*chunk, *slot).0 == start)
        else {
            return;
        };
        let (_, held) = self.entry(chunk, slot);
        let taken = units.min(held);
        self.set(chunk, slot, (start, held - taken));
        trail.total -= taken;
        if trail.total == 0 {
            self.clear(trail);
        }
    }

    /// Gives all chunks of a trail back, in one step.
    pub(super) fn clear(&mut self, trail: &mut Trail) {
        if trail.first != NONE {
            self.set_next(trail.last, self.free);
            self.free = trail.first;
            self.freed += trail.chunks;
        }
        *trail = Trail::default();
    }

    fn push(&mut self, trail: &mut Trail, start: u64, units: u64) {
        trail.total += units;
        if trail.last != NONE && trail.filled > 0 {
            let slot = usize::from(trail.filled) - 1;
            let (newest, held) = self.entry(trail.last, slot);
            if newest == start {
                self.set(trail.last, slot, (start, held + units));
                return;
            }
        }
        if trail.last == NONE || usize::from(trail.filled) == ENTRIES_PER_CHUNK {
            let chunk = self.allocate();
            if trail.last == NONE {
                trail.first = chunk;
                trail.skip = 0;
            } else {
                self.set_next(trail.last, chunk);
            }
            trail.last = chunk;
            trail.filled = 0;
            trail.chunks += 1;
        }
        self.set(trail.last, usize::from(trail.filled), (start, units));
        trail.filled += 1;
    }

    fn pop(&mut self, trail: &mut Trail) {
        let Some((_, units)) = self.oldest(trail) else { return };
        trail.total -= units;
        trail.skip += 1;
        if trail.first == trail.last && trail.skip == trail.filled {
            self.clear(trail);
        } else if usize::from(trail.skip) == ENTRIES_PER_CHUNK {
            let gone = trail.first;
            trail.first = self.next(gone);
            trail.skip = 0;
            trail.chunks -= 1;
            self.set_next(gone, self.free);
            self.free = gone;
            self.freed += 1;
        }
    }

    /// The clock stepped back: entries that start later start at `move_to` now, and become one.
    fn move_to(&mut self, trail: &mut Trail, move_to: u64) {
        let mut moved = 0;
        let kept: Vec<(u64, u64)> = self
            .view(trail)
            .iter()
            .filter(|(start, units)| {
                let keep = *start < move_to;
                moved += if keep { 0 } else { *units };
                keep
            })
            .collect();
        self.clear(trail);
        for (start, units) in kept {
            self.push(trail, start, units);
        }
        if moved > 0 {
            self.push(trail, move_to, moved);
        }
    }

    fn oldest(&self, trail: &Trail) -> Option<(u64, u64)> {
        (trail.first != NONE).then(|| self.entry(trail.first, usize::from(trail.skip)))
    }

    fn allocate(&mut self) -> u32 {
        if self.free != NONE {
            let chunk = self.free;
            self.free = self.next(chunk);
            self.freed -= 1;
            self.set_next(chunk, NONE);
            return chunk;
        }
        let chunk = self.untouched;
        self.untouched += 1;
        chunk
    }

    fn next(&self, chunk: u32) -> u32 {
        self.words.get(chunk as usize * WORDS_PER_CHUNK).map_or(NONE, |word| *word as u32)
    }

    fn set_next(&mut self, chunk: u32, next: u32) {
        if let Some(word) = self.words.get_mut(chunk as usize * WORDS_PER_CHUNK) {
            *word = u64::from(next);
        }
    }

    fn entry(&self, chunk: u32, slot: usize) -> (u64, u64) {
        let at = chunk as usize * WORDS_PER_CHUNK + 1 + 2 * slot;
        match self.words.get(at..at + 2) {
            Some([start, units]) => (*start, *units),
            _ => (0, 0),
        }
    }

    fn set(&mut self, chunk: u32, slot: usize, (start, units): (u64, u64)) {
        let at = chunk as usize * WORDS_PER_CHUNK + 1 + 2 * slot;
        if let Some(entry) = self.words.get_mut(at..at + 2) {
            entry.copy_from_slice(&[start, units]);
        }
    }
}

/// The places of a trail's entries.
struct Places<'a> {
    words: &'a [u64],
    chunk: u32,
    slot: usize,
    last: u32,
    filled: usize,
}

impl<'a> Places<'a> {
    fn new(pool: &'a Pool, trail: &Trail) -> Self {
        Self {
            words: &pool.words,
            chunk: trail.first,
            slot: usize::from(trail.skip),
            last: trail.last,
            filled: usize::from(trail.filled),
        }
    }
}

impl Iterator for Places<'_> {
    type Item = (u32, usize);

    fn next(&mut self) -> Option<(u32, usize)> {
        if self.chunk == NONE {
            return None;
        }
        let here = (self.chunk, self.slot);
        let in_chunk = if self.chunk == self.last { self.filled } else { ENTRIES_PER_CHUNK };
        self.slot += 1;
        if self.slot >= in_chunk {
            self.slot = 0;
            self.chunk = if self.chunk == self.last {
                NONE
            } else {
                self.words.get(self.chunk as usize * WORDS_PER_CHUNK).map_or(NONE, |word| *word as u32)
            };
        }
        Some(here)
    }
}

/// A trail's entries, to be read.
pub(super) struct TrailView<'a> {
    pool: &'a Pool,
    trail: &'a Trail,
}

impl Entries for TrailView<'_> {
    fn total(&self) -> u64 {
        self.trail.total
    }

    fn newest(&self) -> Option<(u64, u64)> {
        let slot = usize::from(self.trail.filled).checked_sub(1)?;
        Some(self.pool.entry(self.trail.last, slot))
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        Places::new(self.pool, self.trail).map(|(chunk, slot)| self.pool.entry(chunk, slot))
    }
}
