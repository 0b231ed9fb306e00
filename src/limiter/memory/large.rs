//! The table of states larger than one word: exact pairs of unusual rates, sub-windows and logs.
//!
//! Sharded; each shard is a set-associative table under one small lock, and all share one [arena](super::arena) of dated
//! entries. It is made when the first such quota is used, so that who has none pays nothing, and its memory is zeroed by the
//! system when first touched.

use std::sync::{Arc, TryLockError};

use smallvec::SmallVec;

use crate::algorithm::carry::{Held, Kept};
use crate::algorithm::trail::{Edit, Entries, Trail as TrailRules};
use crate::algorithm::{How, Next, Pair, Rules};
use crate::decision::ChargeDecision;
use crate::sync::{Mutex, MutexGuard, lock};

use super::arena::{Arena, Trail};
use super::foreign::Foreign;
use super::registry::{Numbers, Registry, Versions};
use super::words::{Fingerprint, Now, version_of};
use super::worth::Worth;

/// A key may live in either of two sets. A newcomer goes to the emptier one, so that a set is full only when the table is.
const SLOTS_PER_SET: usize = 8;

/// Four slots for each key of the capacity: sets are half full when twice as many keys are live.
const SLOTS_PER_KEY: usize = 4;

/// The number of slots that may be pinned in a key's two sets, so that other keys find room.
const PINNED_MAX: usize = SLOTS_PER_SET;

/// A slot: what its four words hold.
type Slot = [u64; 4];
/// The key's fingerprint and the version, as in the table of words; 0 if the slot is free.
const TAG: usize = 0;
/// The instant from which the state counts for nothing: of a pair one after its instant, since its number may go beyond.
const EXPIRES: usize = 1;
/// A pair's number, or a trail's units.
const NUMBER: usize = 2;
/// Where a trail's blocks are; 0 if it has none, and for a pair.
const CHAIN: usize = 3;

const SHARDS_MAX: usize = 64;
/// Below this many keys a shard is not split further.
const KEYS_PER_SHARD_MIN: usize = 1_024;

/// The number of blocks that one call draws at most when the arena is full.
const DRAWS_MAX: usize = 16;

/// What decides who goes when there is no room.
pub(super) struct Crowd<'a> {
    pub(super) registry: &'a Registry,
    pub(super) now: u64,
    /// Whether anybody may go.
    pub(super) evict: bool,
    /// Who stays all the same: the states of the same request.
    pub(super) keep: SmallVec<[Index; 4]>,
    /// Who went, for the observer.
    pub(super) evicted: SmallVec<[Worth; 2]>,
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

    /// Returns the state of least [worth](Worth) among these, if any may go.
    fn choose(&mut self, shard: &Shard, states: impl Iterator<Item = Index>) -> Option<Index> {
        if !self.evict {
            return None;
        }
        let versions = self.registry.versions();
        let (worth, index) = states
            .filter(|index| !self.keep.contains(index) && !shard.is_pinned(index, &versions))
            .filter_map(|index| Some((shard.worth(index, &versions, self.now)?, index)))
            .min_by_key(|(worth, _)| *worth)?;
        self.evicted.push(worth);
        Some(index)
    }
}

/// The shards.
pub(super) struct Large {
    shards: Box<[Mutex<Shard>]>,
    arena: Arc<Arena>,
    bytes: usize,
}

/// A part of the table.
pub(super) struct Shard {
    slots: Box<[Slot]>,
    arena: Arc<Arena>,
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

    /// The units that it adds to a trail, with their date.
    fn added(&self) -> Option<(u64, u64)> {
        match self {
            Self::Trail(Some(edit)) => edit.add,
            _ => None,
        }
    }
}

impl Large {
    /// A table for `keys` keys, with an arena of `entries` dated entries.
    pub(super) fn new(keys: usize, entries: usize) -> Self {
        let arena = Arc::new(Arena::new(entries));
        let count = (keys / KEYS_PER_SHARD_MIN).clamp(1, SHARDS_MAX).next_power_of_two();
        let shards: Vec<Shard> = (0..count).map(|_| Shard::new(keys.div_ceil(count), arena.clone())).collect();
        let bytes = arena.bytes() + shards.iter().map(|shard| size_of_val(&*shard.slots)).sum::<usize>();
        Self { shards: shards.into_iter().map(Mutex::new).collect(), arena, bytes }
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

    /// Before a change to a trail, when the arena is full: frees a block or more that other keys hold. What has expired is
    /// forgotten; of what counts two blocks are [folded](Arena::fold) into one. It looks at a few keys drawn by lot, and
    /// passes over those whose shards are locked and over those of `crowd.keep`, which this request has decided on.
    pub(super) fn make_room(&self, own: &mut Shard, number: usize, change: &Change, trail: &Trail, crowd: &Crowd<'_>) {
        if change.added().is_none() || !trail.wants_block() || self.arena.has_free() {
            return;
        }
        for _ in 0..DRAWS_MAX {
            let Some(owner) = self.arena.draw_owner() else { continue };
            let its = self.shard_of(owner);
            let freed = if its == number {
                own.free_blocks(owner, &crowd.keep, crowd.now)
            } else {
                self.try_lock(its).is_some_and(|mut shard| shard.free_blocks(owner, &[], crowd.now))
            };
            if freed {
                return;
            }
        }
    }

    fn try_lock(&self, shard: usize) -> Option<MutexGuard<'_, Shard>> {
        match self.shards.get(shard)?.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Shard {
    fn new(keys: usize, arena: Arc<Arena>) -> Self {
        let sets = (keys * SLOTS_PER_KEY).div_ceil(SLOTS_PER_SET).max(2);
        Self { slots: bytemuck::zeroed_slice_box(sets * SLOTS_PER_SET), arena }
    }

    /// Finds the key's state, expired or not, and the version it was written under.
    pub(super) fn find(&self, key: Fingerprint) -> Option<(Index, u16)> {
        let index = self.candidates(key).find(|index| key.matches(self.slot(*index)[TAG]))?;
        Some((index, version_of(self.slot(index)[TAG])))
    }

    /// Frees blocks of a key's trail, if it has any to spare.
    fn free_blocks(&mut self, key: Fingerprint, keep: &[Index], now: u64) -> bool {
        let Some((index, _)) = self.find(key).filter(|(index, _)| !keep.contains(index)) else { return false };
        if self.slot(index)[CHAIN] == 0 {
            return false;
        }
        if self.expired(index, now) {
            self.forget(index);
            return true;
        }
        let mut trail = self.trail(index, 0); // of a chain the rules do not matter
        let folded = self.arena.fold(key, &mut trail);
        self.slot_mut(index)[CHAIN] = trail.chain();
        folded
    }

    pub(super) fn expired(&self, index: Index, now: u64) -> bool {
        self.slot(index)[EXPIRES] <= now
    }

    pub(super) fn stored(&self, index: Index, rules: &Rules) -> Stored {
        match rules {
            Rules::Pair(..) => {
                let slot = self.slot(index);
                Stored::Pair(Pair { at: slot[EXPIRES].saturating_sub(1), n: slot[NUMBER] })
            }
            Rules::Trail(rules) => Stored::Trail(self.trail(index, rules.life_us())),
        }
    }

    /// The entries of a trail, for a snapshot.
    pub(super) fn entries(&self, trail: &Trail) -> Vec<(u64, u64)> {
        self.arena.view(trail).iter().collect()
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
                let answer = rules.decide_how(&self.arena.view(&trail), now, cost, how);
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
                let mut trail = self.trail(index, trail_rules.life_us());
                let key = self.key(index);
                if self.expired(index, now) {
                    self.arena.clear(key, &mut trail);
                }
                self.arena.apply(key, &mut trail, edit, trail_rules.most());
                self.write_trail(index, trail_rules, trail);
            }
            _ => {}
        }
    }

    /// The trail that a change is to be made to: an empty one if the key has none.
    pub(super) fn trail_of(&self, index: Option<Index>, rules: &Rules, now: u64) -> Trail {
        match index.filter(|index| !self.expired(*index, now)).map(|index| self.stored(index, rules)) {
            Some(Stored::Trail(trail)) => trail,
            _ => Trail::default(),
        }
    }

    /// Gives a key that has no state an empty slot of this version. Nothing if there is no room: of a key's slots at most
    /// half are for states that are pinned.
    pub(super) fn insert(&mut self, key: Fingerprint, version: u16, crowd: &mut Crowd<'_>) -> Option<Index> {
        let now = crowd.now;
        if crowd.is_pinned(version) {
            let versions = crowd.registry.versions();
            let pinned = self.candidates(key).filter(|index| {
                !self.is_free(*index) && !self.expired(*index, now) && self.is_pinned(index, &versions)
            });
            if pinned.count() >= PINNED_MAX {
                return None;
            }
        }
        let is_usable =
            |index: &Index| self.is_free(*index) || (self.expired(*index, now) && !crowd.keep.contains(index));
        let [first, second] = self.sets_of(key);
        let usable = |set: usize| self.slots_of(set).filter(is_usable);
        let set = if usable(second).count() > usable(first).count() { second } else { first };
        let index = match usable(set).min_by_key(|index| self.slot(*index)[EXPIRES]) {
            Some(index) => index,
            None => crowd.choose(self, self.candidates(key))?,
        };
        self.forget(index);
        self.slot_mut(index)[TAG] = key.tag(version);
        Some(index)
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
                let held = rules.refundable(&self.arena.view(&trail), now, units, own.at);
                let Some((start, units)) = held else { return };
                self.arena.remove_units(self.key(index), &mut trail, start, units);
                self.write_trail(index, rules, trail);
            }
            _ => {}
        }
    }

    /// The state, which another version wrote, as this one takes it over; `None` if it has expired.
    pub(super) fn foreign(&self, index: Index, versions: &Versions, version: u16, now: Now) -> Option<Foreign> {
        let written = version_of(self.slot(index)[TAG]);
        let old = versions.policy(written).filter(|_| !self.expired(index, now.at))?.quota().rules();
        match self.stored(index, old) {
            Stored::Pair(pair) => versions.take_over(written, version, &Held::Pair(pair), now),
            Stored::Trail(trail) => versions.take_over(written, version, &Held::Trail(&self.arena.view(&trail)), now),
        }
    }

    /// Whether a state is kept while it counts.
    fn is_pinned(&self, index: &Index, versions: &Versions) -> bool {
        pins(versions, version_of(self.slot(*index)[TAG]))
    }

    fn worth(&self, index: Index, versions: &Versions, now: u64) -> Option<Worth> {
        let expires = self.slot(index)[EXPIRES];
        let Some(policy) = versions.policy(version_of(self.slot(index)[TAG])) else {
            return Some(Worth::unknown(expires));
        };
        let rules = policy.quota().rules();
        let fullness = match (rules, self.stored(index, rules)) {
            (Rules::Pair(rules, _), Stored::Pair(pair)) => rules.fullness(pair, now),
            (Rules::Trail(rules), Stored::Trail(trail)) => rules.fullness(&self.arena.view(&trail), now),
            _ => return None,
        };
        Some(Worth::new(rules, fullness, expires))
    }

    /// Replaces a state by one of another version.
    pub(super) fn rewrite(&mut self, index: Index, version: u16, rules: &Rules, kept: Option<Kept>) {
        let key = self.key(index);
        self.forget(index);
        self.slot_mut(index)[TAG] = key.tag(version);
        match (rules, kept) {
            (Rules::Pair(..), Some(Kept::Pair(Some(pair)))) => self.write_pair(index, pair),
            (Rules::Trail(rules), Some(Kept::Trail(entries))) => {
                let mut trail = Trail::default();
                for entry in entries {
                    self.arena.apply(key, &mut trail, &Edit { add: Some(entry), ..Edit::default() }, rules.most());
                }
                self.write_trail(index, rules, trail);
            }
            _ => {}
        }
    }

    /// Puts a state back as a snapshot has it: of its entries those that are in order and still count.
    pub(super) fn restore(&mut self, index: Index, rules: &Rules, pair: Pair, entries: &[(u64, u64)], now: u64) {
        match rules {
            Rules::Pair(..) => self.write_pair(index, pair),
            Rules::Trail(rules) => {
                let key = self.key(index);
                let mut trail = Trail::default();
                let mut last = None;
                for (start, held) in entries.iter().copied() {
                    let counts =
                        start.saturating_add(rules.life_us()) > now && start <= now.saturating_add(rules.life_us());
                    let units = held.min(rules.most().saturating_sub(trail.total));
                    // One whose units were all given back is kept too: it says when the state expires.
                    if counts && (units > 0 || held == 0) && start % rules.grain_us() == 0 && last < Some(start) {
                        last = Some(start);
                        let edit = Edit { add: Some((start, units)), ..Edit::default() };
                        self.arena.apply(key, &mut trail, &edit, rules.most());
                    }
                }
                self.write_trail(index, rules, trail);
            }
        }
    }

    /// Forgets the expired states of these versions, and takes out of them those that have live ones.
    pub(super) fn forget_versions(&mut self, unused: &mut Numbers, now: u64) {
        for index in (0..self.slots.len()).map(Index) {
            let version = version_of(self.slot(index)[TAG]);
            if self.is_free(index) || !unused.contains(version) {
                continue;
            }
            if self.expired(index, now) {
                self.forget(index);
            } else {
                unused.remove(version);
            }
        }
    }

    /// Every slot in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Index, Fingerprint, u16)> {
        (0..self.slots.len())
            .map(Index)
            .filter(|index| !self.is_free(*index))
            .map(|index| (index, self.key(index), version_of(self.slot(index)[TAG])))
    }

    /// Frees a slot and what its trail holds.
    pub(super) fn forget(&mut self, index: Index) {
        if self.slot(index)[CHAIN] != 0 {
            let mut trail = self.trail(index, 0); // of a chain the rules do not matter
            self.arena.clear(self.key(index), &mut trail);
        }
        *self.slot_mut(index) = Slot::default();
    }

    fn is_free(&self, index: Index) -> bool {
        self.slot(index)[TAG] == 0
    }

    fn key(&self, index: Index) -> Fingerprint {
        Fingerprint::of_tag(self.slot(index)[TAG])
    }

    /// The trail in a slot, whose entries count for so long; an empty one if it holds none yet.
    fn trail(&self, index: Index, life_us: u64) -> Trail {
        let slot = self.slot(index);
        Trail::from_words(slot[NUMBER], slot[CHAIN], slot[EXPIRES].saturating_sub(life_us))
    }

    fn write_pair(&mut self, index: Index, pair: Pair) {
        let slot = self.slot_mut(index);
        slot[EXPIRES] = pair.at.saturating_add(1);
        slot[NUMBER] = pair.n;
    }

    fn write_trail(&mut self, index: Index, rules: &TrailRules, trail: Trail) {
        let newest = self.arena.view(&trail).newest();
        let slot = self.slot_mut(index);
        slot[EXPIRES] = newest.map_or(0, |(start, _)| start.saturating_add(rules.life_us()));
        (slot[NUMBER], slot[CHAIN]) = (trail.total, trail.chain());
    }

    fn candidates(&self, key: Fingerprint) -> impl Iterator<Item = Index> {
        let [first, second] = self.sets_of(key);
        self.slots_of(first).chain(self.slots_of(second))
    }

    fn slots_of(&self, set: usize) -> impl Iterator<Item = Index> {
        (set * SLOTS_PER_SET..(set + 1) * SLOTS_PER_SET).map(Index)
    }

    /// The two sets of a key, different from each other.
    fn sets_of(&self, key: Fingerprint) -> [usize; 2] {
        let sets = self.slots.len() / SLOTS_PER_SET;
        let scale = |hash: u64| ((u128::from(hash) * sets as u128) >> 64) as usize; // below the number of sets
        let hash = key.bits().rotate_left(32);
        let first = scale(hash);
        let second = scale((hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15)); // odd: it mixes, one to one
        [first, if second == first { (first + 1) % sets } else { second }]
    }

    /// An `Index` comes from this table, whose size never changes.
    fn slot(&self, index: Index) -> &Slot {
        &self.slots[index.0]
    }

    fn slot_mut(&mut self, index: Index) -> &mut Slot {
        &mut self.slots[index.0]
    }
}
