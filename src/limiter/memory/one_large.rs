//! One charge whose state is larger than a word.

use crate::algorithm::carry::{Held, Kept};
use crate::algorithm::{How, Rules};
use crate::decision::ChargeDecision;

use super::foreign::Foreign;
use super::large::{Change, Crowd, Index, Shard};
use super::store::Store;
use super::words::{Fingerprint, Now, version_of};

/// One charge whose state is larger than a word.
pub(super) struct LargeCharge<'a> {
    pub(super) store: &'a Store,
    pub(super) key: Fingerprint,
    pub(super) version: u16,
    pub(super) rules: &'a Rules,
    pub(super) cost: u64,
    pub(super) how: How,
}

impl LargeCharge<'_> {
    pub(super) fn take(&self) -> ChargeDecision {
        let Self { store, key, version, rules, .. } = *self;
        let mut news = store.news();
        let (_stripe, mut shard) = store.lock_large(key);
        let now = store.now_after(); // nobody else writes the state from here on
        if let Some(foreign) = store.foreign(&shard, key, version, now) {
            let (decision, writes) = foreign.decide(rules, now, self.cost, self.how);
            if !writes {
                return decision;
            }
        }
        let mut crowd = store.crowd(now);
        let (decision, is_kept) = match store.settle_large(&mut shard, key, version, rules, now, &mut crowd) {
            Ok(index) => {
                // A word that came over was read after the first reading.
                let now = if store.registry.is_mixed() { store.now_after() } else { now };
                let (decision, change) = shard.decide(index, rules, now.at, self.cost, self.how);
                (decision, !change.writes() || self.write(&mut shard, index, &change, now, &mut crowd))
            }
            Err(NoRoom) => (shard.decide(None, rules, now.at, self.cost, self.how).0, self.cost == 0),
        };
        news.crowd(&crowd);
        if is_kept { decision } else { news.full(decision) }
    }

    /// Writes a change; nothing if there is no room.
    fn write(&self, shard: &mut Shard, index: Option<Index>, change: &Change, now: Now, crowd: &mut Crowd<'_>) -> bool {
        let Self { store, key, version, rules, .. } = *self;
        crowd.keep.extend(index);
        store.make_large_room(shard, key, index, rules, change, crowd);
        let Some(index) = index.or_else(|| shard.insert(key, version, crowd)) else { return false };
        shard.apply(index, rules, now.at, change);
        true
    }

    /// The decision, and whether it would be written.
    pub(super) fn peek(&self) -> (ChargeDecision, bool) {
        let Self { store, key, version, rules, .. } = *self;
        let (_stripe, shard) = store.lock_large(key);
        let now = store.now_after(); // nobody else writes the state from here on
        if let Some(foreign) = store.foreign(&shard, key, version, now) {
            return foreign.decide(rules, now, self.cost, self.how);
        }
        let own = shard.find(key).filter(|(_, written)| *written == version).map(|(index, _)| index);
        let (decision, change) = shard.decide(own, rules, now.at, self.cost, self.how);
        (decision, change.writes())
    }
}

impl Store {
    /// Before a change to a trail: sees to it that there is a block for it, if any other key can spare one.
    pub(super) fn make_large_room(
        &self,
        shard: &mut Shard,
        key: Fingerprint,
        index: Option<Index>,
        rules: &Rules,
        change: &Change,
        crowd: &Crowd<'_>,
    ) {
        let trail = shard.trail_of(index, rules, crowd.now);
        let large = self.large();
        large.make_room(shard, large.shard_of(key), change, &trail, crowd);
    }

    /// Finds a key's state in its shard; one of another version is converted first, one among the words comes over. If
    /// there is no room for that it stays as it was.
    pub(super) fn settle_large(
        &self,
        shard: &mut Shard,
        key: Fingerprint,
        version: u16,
        rules: &Rules,
        now: Now,
        crowd: &mut Crowd<'_>,
    ) -> Result<Option<Index>, NoRoom> {
        let foreign = self.foreign(shard, key, version, now).map(Foreign::into_kept);
        if let Some((index, written)) = shard.find(key) {
            if written != version {
                shard.rewrite(index, version, rules, foreign);
            }
            return Ok(Some(index));
        }
        if !self.registry.is_mixed() || self.words.find(key).is_none() {
            return Ok(None);
        }
        let Some(index) = shard.insert(key, version, crowd) else { return Err(NoRoom) };
        let kept = self.take_out_of_words(key, version);
        shard.rewrite(index, version, rules, kept);
        self.has_moved(key);
        Ok(Some(index))
    }

    /// Removes a key's slot among the words, live or not, and returns its state as this version takes it over.
    fn take_out_of_words(&self, key: Fingerprint, to: u16) -> Option<Kept> {
        loop {
            let seen = self.words.find(key)?;
            let version = version_of(seen.tag);
            let now = self.now_after();
            if self.words.lock(seen) {
                self.words.put_back(seen.emptied());
                let (_, layout) = self.word_rules(version)?;
                let state = Held::Pair(layout.unpack(seen.word, now)?);
                return self.registry.versions().take_over(version, to, &state, now).map(Foreign::into_kept);
            }
        }
    }
}

/// There is no place where a state could be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;
