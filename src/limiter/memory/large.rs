//! The table of states larger than one word: exact pairs of unusual rates, sub-windows and logs.
//!
//! Sharded; each shard is a set-associative table and a pool of dated entries under one small lock. It is made when the
//! first such quota is used, so that who has none pays nothing, and its memory is zeroed by the system when first touched.

use smallvec::SmallVec;

use crate::algorithm::trail::{Edit, Entries, Trail as TrailRules};
use crate::algorithm::{Fullness, How, Next, Pair, Rules, Used};
use crate::decision::ChargeDecision;
use crate::sync::{Mutex, MutexGuard, lock};

use super::pool::{Pool, Trail};
use super::registry::{Registry, Versions};
use super::words::Fingerprint;

const SLOTS_PER_SET: usize = 16;

/// Of these so many may be pinned, so that the others' keys find room.
const PINNED_PER_SET_MAX: usize = SLOTS_PER_SET / 2;

/// A slot: what its eight words hold. The state takes three from `STATE` on.
type Slot = [u64; 8];
/// The key's fingerprint; 0 if the slot is free.
const KEY: usize = 0;
/// The instant from which the state counts for nothing.
const EXPIRES: usize = 1;
const VERSION: usize = 2;
const STATE: usize = 3;
/// 1 if the state is a trail.
const HOLDS_TRAIL: usize = 6;

const SHARDS_MAX: usize = 64;
/// Below this many keys a shard is not split further.
const KEYS_PER_SHARD_MIN: usize = 1_024;

/// When a full pool needs room, so many other sets are looked through in one call at most.
const SETS_SEARCHED_MAX: usize = 4;

/// What decides who goes when there is no room.
pub(super) struct Crowd<'a> {
    pub(super) registry: &'a Registry,
    pub(super) now: u64,
    /// Whether anybody may go.
    pub(super) evict: bool,
    /// Who stays all the same: the states of the same request.
    pub(super) keep: SmallVec<[Index; 4]>,
    /// Who went, for the observer.
    pub(super) evicted: SmallVec<[Fullness; 2]>,
}

/// Whether states of a version are kept while they count.
fn pins(versions: &Versions, version: u16) -> bool {
    let rules = versions.policy(version).map(|policy| policy.quota().rules());
    matches!(rules, Some(Rules::Pair(rules, _)) if rules.is_pinned())
}

impl Crowd<'_> {
    fn is_pinned(&self, version: u16) -> bool {
        pins(&self.registry.versions(), version)
    }

    /// Of these states the one that goes: the least full, a throttled one only if all are, and if that is allowed.
    fn choose(&mut self, shard: &Shard, states: impl Iterator<Item = Index>, throttled: bool) -> Option<Index> {
        if !self.evict {
            return None;
        }
        let versions = self.registry.versions();
        let (fullness, index) = states
            .filter(|index| !self.keep.contains(index) && !shard.is_pinned(index, &versions))
            .filter_map(|index| Some((shard.fullness(index, &versions, self.now)?, index)))
            .min_by_key(|(fullness, _)| *fullness)
            .filter(|(fullness, _)| throttled || !fullness.throttled)?;
        self.evicted.push(fullness);
        Some(index)
    }
}

/// The shards.
pub(super) struct Large {
    shards: Box<[Mutex<Shard>]>,
    bytes: usize,
}

/// A table and a pool.
pub(super) struct Shard {
    slots: Box<[Slot]>,
    pool: Pool,
    /// The set that is looked through next when the pool is full.
    hand: usize,
}

/// Where a state is in its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Index(usize);

/// A state as it is stored.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stored {
    Pair(Pair),
    Trail(Trail),
}

/// What becomes of a state.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Pair(Next),
    Trail(Option<Edit>),
}

impl Change {
    pub(super) fn writes(&self) -> bool {
        !matches!(self, Self::Pair(Next::Keep) | Self::Trail(None))
    }
}

impl Large {
    /// A table for `keys` keys, with a pool of `entries` dated entries.
    pub(super) fn new(keys: usize, entries: usize) -> Self {
        let count = (keys / KEYS_PER_SHARD_MIN).clamp(1, SHARDS_MAX).next_power_of_two();
        let shards: Vec<Shard> =
            (0..count).map(|_| Shard::new(keys.div_ceil(count), entries.div_ceil(count))).collect();
        let bytes = shards.iter().map(|shard| size_of_val(&*shard.slots) + shard.pool.bytes()).sum();
        Self { shards: shards.into_iter().map(Mutex::new).collect(), bytes }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The number of the key's shard.
    pub(super) fn shard_of(&self, key: Fingerprint) -> usize {
        ((u128::from(key.bits()) * self.shards.len() as u128) >> 64) as usize // below the number of shards
    }

    pub(super) fn lock(&self, shard: usize) -> MutexGuard<'_, Shard> {
        lock(&self.shards[shard.min(self.shards.len() - 1)]) // at least one, see `new`
    }

    pub(super) fn shards(&self) -> usize {
        self.shards.len()
    }
}

impl Shard {
    fn new(keys: usize, entries: usize) -> Self {
        let sets = (keys * 2).div_ceil(SLOTS_PER_SET).max(1);
        Self { slots: bytemuck::zeroed_slice_box(sets * SLOTS_PER_SET), pool: Pool::new(entries), hand: 0 }
    }

    /// Finds the key's state, expired or not, and the version it was written under.
    pub(super) fn find(&self, key: Fingerprint) -> Option<(Index, u16)> {
        let wanted = key.bits();
        let index = self.set_of(key).map(Index).find(|index| self.slot(*index)[KEY] == wanted)?;
        Some((index, self.slot(index)[VERSION] as u16)) // written from a u16
    }

    pub(super) fn expired(&self, index: Index, now: u64) -> bool {
        self.slot(index)[EXPIRES] <= now
    }

    pub(super) fn stored(&self, index: Index, rules: &Rules) -> Stored {
        match rules {
            Rules::Pair(..) => {
                let slot = self.slot(index);
                Stored::Pair(Pair { at: slot[STATE], n: slot[STATE + 1] })
            }
            Rules::Trail(_) => Stored::Trail(self.trail(index)),
        }
    }

    /// The entries of a trail, for a snapshot.
    pub(super) fn entries(&self, trail: &Trail) -> Vec<(u64, u64)> {
        self.pool.view(trail).iter().collect()
    }

    /// The decision, and the change to write: if the charge is taken, or if this refusal is to be written.
    pub(super) fn decide(
        &self,
        state: Option<Index>,
        rules: &Rules,
        now: u64,
        cost: u64,
        how: How,
    ) -> (ChargeDecision, Change) {
        let stored = state.filter(|index| !self.expired(*index, now)).map(|index| self.stored(index, rules));
        match rules {
            Rules::Pair(rules, _) => {
                let pair = match stored {
                    Some(Stored::Pair(pair)) => Some(pair),
                    _ => None,
                };
                let answer = rules.decide_how(pair, now, cost, how);
                (answer.decision, Change::Pair(answer.next))
            }
            Rules::Trail(rules) => {
                let trail = match stored {
                    Some(Stored::Trail(trail)) => trail,
                    _ => Trail::default(),
                };
                let answer = rules.decide_how(&self.pool.view(&trail), now, cost, how);
                (answer.decision, Change::Trail(answer.edit))
            }
        }
    }

    /// Writes a change to a state that is there.
    pub(super) fn apply(&mut self, index: Index, rules: &Rules, now: u64, change: &Change) {
        match (change, rules) {
            (Change::Pair(Next::Set(pair)), _) => self.write_pair(index, *pair),
            (Change::Pair(Next::Clear), _) => self.forget(index),
            (Change::Trail(Some(edit)), Rules::Trail(trail_rules)) => {
                let mut trail = self.trail(index);
                if self.expired(index, now) {
                    self.pool.clear(&mut trail);
                }
                self.pool.apply(&mut trail, edit);
                self.write_trail(index, trail_rules, trail);
            }
            _ => {}
        }
    }

    /// Gives a key that has no state an empty slot of this version. Nothing if there is no room: of a set of slots at most
    /// half are for states that are pinned.
    pub(super) fn insert(&mut self, key: Fingerprint, version: u16, crowd: &mut Crowd<'_>) -> Option<Index> {
        let now = crowd.now;
        if crowd.is_pinned(version) {
            let versions = crowd.registry.versions();
            let pinned = self.set_of(key).map(Index).filter(|index| {
                !self.is_free(*index) && !self.expired(*index, now) && self.is_pinned(index, &versions)
            });
            if pinned.count() >= PINNED_PER_SET_MAX {
                return None;
            }
        }
        let mut free = self.set_of(key).map(Index).filter(|index| self.is_free(*index));
        let expired = |index: &Index| self.expired(*index, now) && !crowd.keep.contains(index);
        let index = match free.next().or_else(|| self.set_of(key).map(Index).find(expired)) {
            Some(index) => index,
            None => crowd.choose(self, self.set_of(key).map(Index), true)?,
        };
        self.forget(index);
        let slot = self.slot_mut(index);
        slot[KEY] = key.bits();
        slot[VERSION] = u64::from(version);
        Some(index)
    }

    /// Whether so many entries can be added to trails, after making room in the pool if it is full: in the key's own set,
    /// then in a few others, of each the expired trails and one that is live; a throttled one only in the last of them.
    pub(super) fn make_room(&mut self, entries: usize, key: Fingerprint, crowd: &mut Crowd<'_>) -> bool {
        let own = self.set_of(key).start / SLOTS_PER_SET;
        for search in 0..=SETS_SEARCHED_MAX {
            if self.pool.has_room(entries) {
                return true;
            }
            let set = if search == 0 { own } else { self.hand };
            if search > 0 {
                self.hand = (self.hand + 1) % self.sets();
            }
            let slots = (set * SLOTS_PER_SET..(set + 1) * SLOTS_PER_SET).map(Index);
            let (expired, live): (SmallVec<[Index; SLOTS_PER_SET]>, SmallVec<[Index; SLOTS_PER_SET]>) = slots
                .filter(|index| self.slot(*index)[HOLDS_TRAIL] == 1 && !crowd.keep.contains(index))
                .partition(|index| self.expired(*index, crowd.now));
            for index in expired {
                self.forget(index);
            }
            if !self.pool.has_room(entries) {
                // A set may hold nothing but what is throttled, and the next one something else.
                if let Some(index) = crowd.choose(self, live.into_iter(), search == SETS_SEARCHED_MAX) {
                    self.forget(index);
                }
            }
        }
        self.pool.has_room(entries)
    }

    /// Gives back what of `units` the receipt's own part still holds.
    pub(super) fn refund(&mut self, index: Index, rules: &Rules, now: u64, units: u64, own: Pair) {
        if self.expired(index, now) {
            return;
        }
        match (rules, self.stored(index, rules)) {
            (Rules::Pair(rules_of_pair, _), Stored::Pair(pair)) => {
                let next = rules_of_pair.refund(pair, now, units, own);
                self.apply(index, rules, now, &Change::Pair(next));
            }
            (Rules::Trail(rules), Stored::Trail(mut trail)) => {
                let held = rules.refundable(&self.pool.view(&trail), now, units, own.at);
                let Some((start, units)) = held else { return };
                self.pool.remove_units(&mut trail, start, units);
                self.write_trail(index, rules, trail);
            }
            _ => {}
        }
    }

    pub(super) fn used(&self, index: Index, rules: &Rules, now: u64) -> Option<Used> {
        if self.expired(index, now) {
            return None;
        }
        Some(match (rules, self.stored(index, rules)) {
            (Rules::Pair(rules, _), Stored::Pair(pair)) => rules.used(pair, now),
            (Rules::Trail(rules), Stored::Trail(trail)) => rules.used(&self.pool.view(&trail), now),
            _ => return None,
        })
    }

    /// Whether a state is kept while it counts.
    fn is_pinned(&self, index: &Index, versions: &Versions) -> bool {
        pins(versions, self.slot(*index)[VERSION] as u16) // written from a u16
    }

    pub(super) fn fullness(&self, index: Index, versions: &Versions, now: u64) -> Option<Fullness> {
        let policy = versions.policy(self.slot(index)[VERSION] as u16)?; // written from a u16
        let rules = policy.quota().rules();
        Some(match (rules, self.stored(index, rules)) {
            (Rules::Pair(rules, _), Stored::Pair(pair)) => rules.fullness(pair, now),
            (Rules::Trail(rules), Stored::Trail(trail)) => rules.fullness(&self.pool.view(&trail), now),
            _ => return None,
        })
    }

    /// Replaces a state of a version with these rules by one of another, which meets what was in use as said here.
    pub(super) fn convert(
        &mut self,
        index: Index,
        version: u16,
        rules: &Rules,
        now: u64,
        old: &Rules,
        met: impl FnOnce(Used) -> Used,
    ) {
        let adopted = match (rules, old, self.stored(index, old)) {
            (Rules::Pair(rules, _), Rules::Pair(old, _), Stored::Pair(pair)) if !self.expired(index, now) => {
                rules.adopt(old, pair, now)
            }
            _ => None,
        };
        let used = self.used(index, old, now);
        self.rewrite(index, version, rules, now, used.filter(|_| adopted.is_none()).map(met));
        if let Some(Some(pair)) = adopted {
            self.write_pair(index, pair);
        }
    }

    /// Replaces a state by one of another version in which so much is in use.
    pub(super) fn rewrite(&mut self, index: Index, version: u16, rules: &Rules, now: u64, used: Option<Used>) {
        let key = self.slot(index)[KEY];
        self.forget(index);
        let slot = self.slot_mut(index);
        slot[KEY] = key;
        slot[VERSION] = u64::from(version);
        let Some(used) = used else { return };
        match rules {
            Rules::Pair(rules, _) => {
                if let Some(pair) = rules.with_used(used, now) {
                    self.write_pair(index, pair);
                }
            }
            Rules::Trail(rules) => {
                if let Some(entry) = rules.with_used(used, now) {
                    let mut trail = Trail::default();
                    self.pool.apply(&mut trail, &Edit { add: Some(entry), ..Edit::default() });
                    self.write_trail(index, rules, trail);
                }
            }
        }
    }

    /// Puts a state back as a snapshot has it: of its entries those that are in order and still count.
    pub(super) fn restore(&mut self, index: Index, rules: &Rules, pair: Pair, entries: &[(u64, u64)], now: u64) {
        match rules {
            Rules::Pair(..) => self.write_pair(index, pair),
            Rules::Trail(rules) => {
                let mut trail = Trail::default();
                let mut last = None;
                for (start, held) in entries.iter().copied() {
                    let counts =
                        start.saturating_add(rules.life_us()) > now && start <= now.saturating_add(rules.life_us());
                    let units = held.min(rules.most().saturating_sub(trail.total));
                    // One whose units were all given back is kept too: it says when the state expires.
                    if counts && (units > 0 || held == 0) && start % rules.grain_us() == 0 && last < Some(start) {
                        last = Some(start);
                        self.pool.apply(&mut trail, &Edit { add: Some((start, units)), ..Edit::default() });
                    }
                }
                self.write_trail(index, rules, trail);
            }
        }
    }

    /// Every slot in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Index, Fingerprint, u16)> {
        (0..self.slots.len()).map(Index).filter(|index| !self.is_free(*index)).map(|index| {
            let slot = self.slot(index);
            (index, Fingerprint::new(slot[KEY]), slot[VERSION] as u16) // written from a u16
        })
    }

    /// Frees a slot and what its trail holds.
    pub(super) fn forget(&mut self, index: Index) {
        if self.slot(index)[HOLDS_TRAIL] == 1 {
            let mut trail = self.trail(index);
            self.pool.clear(&mut trail);
        }
        *self.slot_mut(index) = Slot::default();
    }

    fn is_free(&self, index: Index) -> bool {
        self.slot(index)[KEY] == 0
    }

    /// The trail in a slot; an empty one if it holds none yet.
    fn trail(&self, index: Index) -> Trail {
        let slot = self.slot(index);
        if slot[HOLDS_TRAIL] == 1 {
            Trail::from_words([slot[STATE], slot[STATE + 1], slot[STATE + 2]])
        } else {
            Trail::default()
        }
    }

    fn write_pair(&mut self, index: Index, pair: Pair) {
        let slot = self.slot_mut(index);
        slot[EXPIRES] = pair.at.saturating_add(1); // a numerator may go beyond the instant
        slot[STATE] = pair.at;
        slot[STATE + 1] = pair.n;
    }

    fn write_trail(&mut self, index: Index, rules: &TrailRules, trail: Trail) {
        let newest = self.pool.view(&trail).newest();
        let words = trail.to_words();
        let slot = self.slot_mut(index);
        slot[EXPIRES] = newest.map_or(0, |(start, _)| start.saturating_add(rules.life_us()));
        slot[STATE..STATE + 3].copy_from_slice(&words);
        slot[HOLDS_TRAIL] = 1;
    }

    fn sets(&self) -> usize {
        self.slots.len() / SLOTS_PER_SET
    }

    fn set_of(&self, key: Fingerprint) -> std::ops::Range<usize> {
        let hash = key.bits().rotate_left(32);
        let set = ((u128::from(hash) * self.sets() as u128) >> 64) as usize; // below the number of sets
        set * SLOTS_PER_SET..(set + 1) * SLOTS_PER_SET
    }

    /// An `Index` comes from this table, whose size never changes.
    fn slot(&self, index: Index) -> &Slot {
        &self.slots[index.0]
    }

    fn slot_mut(&mut self, index: Index) -> &mut Slot {
        &mut self.slots[index.0]
    }
}
