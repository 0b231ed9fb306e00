//! One charge whose state is a word, when the usual case did not do: a new key, another version, others at the same key.

use std::sync::atomic::Ordering;

use crate::algorithm::carry::Held;
use crate::algorithm::{Answer, How, Layout, Next, Pair, PairRules, Rules, WordLayout};
use crate::decision::ChargeDecision;

use super::OnFull;
use super::foreign::Foreign;
use super::large::Shard;
use super::news::News;
use super::store::Store;
use super::words::{Fingerprint, NO_STATE, Now, Seen, is_expired, version_of};
use super::worth::Worth;

/// How often a full set is looked through again when another thread was quicker.
const EVICTION_ATTEMPTS: usize = 16;

/// So many newcomers in a row that found no room in any other line mean that the table is full. At nineteen of twenty slots
/// live one finds none in five times, and so many in a row never.
const CROWDED: u32 = 64;

/// What came of looking for a word's state among the large ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adopted {
    Nothing,
    Came,
    NoRoom,
}

/// One charge whose state is a word.
#[derive(Clone, Copy)]
pub(super) struct WordCharge<'a> {
    pub(super) store: &'a Store,
    pub(super) key: Fingerprint,
    pub(super) version: u16,
    pub(super) rules: &'a PairRules,
    pub(super) layout: WordLayout,
    pub(super) cost: u64,
    pub(super) how: How,
}

impl WordCharge<'_> {
    /// Decides and takes.
    pub(super) fn take(&self) -> ChargeDecision {
        loop {
            let Some(seen) = self.store.words.find(self.key) else {
                match self.take_new() {
                    Some(decision) => return decision,
                    None => continue,
                }
            };
            // After the state, and before the lock: no slot is held while a clock is read.
            let now = self.store.now_after();
            if version_of(seen.tag) != self.version {
                let (decision, writes) = self.look(Some(seen), now);
                if !writes {
                    return decision;
                }
                self.convert(seen, now);
                continue;
            }
            // Others are at this key, or this would not be the slow way: it is locked at once, since a decision made before
            // a compare-exchange would often be made in vain.
            if !self.store.words.lock(seen) {
                continue;
            }
            let Answer { decision, next } = self.decide(self.layout.unpack(seen.word, now), now);
            match next {
                Next::Keep => self.store.words.put_back(seen),
                Next::Set(state) => self.store.words.publish(seen, seen.tag, self.layout.pack(state, now)),
                Next::Clear => self.store.words.publish(seen, seen.tag, NO_STATE),
            }
            return decision;
        }
    }

    /// Decides, and writes nothing; whether anything would be written is returned too.
    pub(super) fn peek(&self) -> (ChargeDecision, bool) {
        let seen = self.find();
        self.look(seen, self.store.now_after())
    }

    fn look(&self, seen: Option<Seen>, now: Now) -> (ChargeDecision, bool) {
        let foreign = match seen {
            Some(seen) if version_of(seen.tag) == self.version => {
                let Answer { decision, next } = self.decide(self.layout.unpack(seen.word, now), now);
                return (decision, next != Next::Keep);
            }
            Some(seen) => self.foreign(seen, now).map(|foreign| (foreign, now)),
            None if self.store.registry.is_mixed() => self.store.large.get().and_then(|large| {
                let shard = large.lock(large.shard_of(self.key));
                let now = self.store.now_after();
                Some((self.store.foreign(&shard, self.key, self.version, now)?, now))
            }),
            None => None,
        };
        match foreign {
            Some((foreign, now)) => foreign.decide(&self.own_rules(), now, self.cost, self.how),
            None => {
                let Answer { decision, next } = self.decide(None, now);
                (decision, next != Next::Keep)
            }
        }
    }

    /// The state in a slot of another version, as this one takes it over.
    pub(super) fn foreign(&self, seen: Seen, now: Now) -> Option<Foreign> {
        let versions = self.store.registry.versions();
        let written = version_of(seen.tag);
        let (_, layout) = versions.word_rules(written)?;
        versions.take_over(written, self.version, &Held::Pair(layout.unpack(seen.word, now)?), now)
    }

    pub(super) fn own_rules(&self) -> Rules {
        Rules::Pair(*self.rules, Layout::Word(self.layout))
    }

    #[inline]
    pub(super) fn decide(&self, state: Option<Pair>, now: Now) -> Answer {
        self.rules.decide_how(state, now.at, self.cost, self.how)
    }

    /// Finds the key's slot, also one that is just moving.
    pub(super) fn find(&self) -> Option<Seen> {
        self.store.words.find(self.key).or_else(|| {
            let _stripe = self.store.lock_stripe(self.store.stripe_of(self.key));
            self.store.words.find(self.key)
        })
    }

    /// A key without a slot. Nothing if it has got one meanwhile.
    #[cold]
    fn take_new(&self) -> Option<ChargeDecision> {
        let mut news = self.store.news();
        let _stripe = self.store.lock_stripe(self.store.stripe_of(self.key));
        if self.store.registry.is_mixed() {
            let large = self.store.large(); // made if need be: its lock orders this with who makes the first large state
            let mut shard = large.lock(large.shard_of(self.key));
            let now = self.store.now_after();
            if let Some(foreign) = self.store.foreign(&shard, self.key, self.version, now) {
                let (decision, writes) = foreign.decide(&self.own_rules(), now, self.cost, self.how);
                if !writes {
                    return Some(decision);
                }
            }
            match self.adopt(&mut shard, &mut news) {
                Adopted::Nothing => {}
                Adopted::Came => return None,
                Adopted::NoRoom => return Some(news.full(self.decide(None, self.store.now_after()).decision)),
            }
        }
        if self.store.words.find(self.key).is_some() {
            return None;
        }
        // After it was seen that there is no state: an older reading might be of a time when there was one, which has
        // expired since.
        let now = self.store.now_after();
        let Answer { decision, next } = self.decide(None, now);
        let Next::Set(state) = next else { return Some(decision) };
        let word = self.layout.pack(state, now);
        match self.claim(now, &mut news) {
            Some(claimed) => {
                self.store.words.publish(claimed, self.key.tag(self.version), word);
                Some(decision)
            }
            None => Some(news.full(decision)),
        }
    }

    /// Under the key's stripe: a state that lies among the large ones comes over, if there is one and there is room.
    pub(super) fn adopt(&self, shard: &mut Shard, news: &mut News<'_>) -> Adopted {
        let Some((index, _)) = shard.find(self.key) else { return Adopted::Nothing };
        let now = self.store.now_after();
        let foreign = shard.foreign(index, &self.store.registry.versions(), self.version, now);
        if let Some(state) = foreign.and_then(|foreign| foreign.pair()) {
            let word = self.layout.pack(state, now);
            let Some(claimed) = self.claim(now, news) else { return Adopted::NoRoom };
            self.store.words.publish(claimed, self.key.tag(self.version), word);
            shard.forget(index);
            self.store.has_moved(self.key);
            return Adopted::Came;
        }
        shard.forget(index);
        Adopted::Nothing
    }

    /// Rewrites a slot of another version as one of this. It may fail if the slot changes meanwhile.
    #[cold]
    pub(super) fn convert(&self, seen: Seen, now: Now) {
        let state = self.foreign(seen, now).and_then(|foreign| foreign.pair());
        if self.store.words.lock(seen) {
            let word = state.map_or(NO_STATE, |state| self.layout.pack(state, now));
            self.store.words.publish(seen, self.key.tag(self.version), word);
        }
    }

    /// Under the key's stripe: locks a slot for a key that has none. A free one; or that of a key which can move to its
    /// other line; or by choice that of the key that has used least. Nothing if there is none of these. It is returned as it
    /// may be put back.
    pub(super) fn claim(&self, now: Now, news: &mut News<'_>) -> Option<Seen> {
        let store = self.store;
        for _ in 0..EVICTION_ATTEMPTS {
            let slots = store.words.candidates(self.key);
            // One that was never used, in the first line if there is one; else the one that has been free longest, so that
            // an idle key keeps its slot for a while.
            let free = slots.iter().filter(|seen| self.is_free(seen, now));
            if let Some(seen) = free.min_by_key(|seen| if seen.tag == 0 { 0 } else { seen.word.max(1) }) {
                if store.words.lock(*seen) {
                    self.found_room(true);
                    return Some(*seen);
                }
                continue; // another was quicker
            }
            if let Some(seen) = self.make_room(&slots, now) {
                return Some(seen);
            }
            if store.setup.on_full == OnFull::Deny {
                return None;
            }
            let least = self.least_used(&slots, now).filter(|(_, seen)| store.words.lock(*seen));
            if let Some((worth, seen)) = least {
                news.evicted(worth);
                return Some(seen);
            }
        }
        None
    }

    fn is_free(&self, seen: &Seen, now: Now) -> bool {
        is_expired(seen.word, self.store.registry.shift(version_of(seen.tag)), now)
    }

    /// Moves one of these slots' keys to its other line, if there is room in one, and returns its slot, locked.
    fn make_room(&self, slots: &[Seen], now: Now) -> Option<Seen> {
        let store = self.store;
        // Each other line is a wait for memory. When many newcomers in a row found room nowhere, of the next ones each eighth
        // looks into one line, until somebody finds room.
        let is_crowded = store.crowding.load(Ordering::Relaxed) >= CROWDED && store.setup.on_full == OnFull::Evict;
        let lot = (self.key.bits() >> 24) as usize % (8 * slots.len().max(1));
        let looked_at = if is_crowded { slots.get(lot..=lot)? } else { slots };
        let vacate = |deeper| looked_at.iter().find_map(|seen| self.vacate(*seen, now, deeper));
        let moved = vacate(false).or_else(|| if is_crowded { None } else { vacate(true) });
        self.found_room(moved.is_some());
        moved
    }

    /// Counts newcomers in a row that found no room.
    fn found_room(&self, found: bool) {
        let crowding = &self.store.crowding;
        let misses = crowding.load(Ordering::Relaxed);
        let now = if found { 0 } else { (misses + 1).min(CROWDED) };
        if now != misses {
            crowding.store(now, Ordering::Relaxed); // not if it is so: that would take the line from other threads
        }
    }

    /// Moves the key of a slot to a free one of its other line, if there is one, and returns the slot, locked; `deeper` moves
    /// a key of that line further if need be.
    fn vacate(&self, seen: Seen, now: Now, deeper: bool) -> Option<Seen> {
        let words = &self.store.words;
        if let Some(free) = words.elsewhere(seen).find(|to| self.is_free(to, now)) {
            return if words.lock(free) { self.move_away(seen, free) } else { None };
        }
        if !deeper {
            return None;
        }
        let freed = words.elsewhere(seen).find_map(|other| self.vacate(other, now, false))?;
        self.move_away(seen, freed)
    }

    /// Moves the key of a slot to another, which is locked, and returns the slot, locked. If that fails the other one is
    /// unlocked.
    ///
    /// It takes that key's stripe, if it can be had at once: whoever misses a key looks again under the stripe, and so does
    /// not miss it because it was moving.
    fn move_away(&self, seen: Seen, to: Seen) -> Option<Seen> {
        let store = self.store;
        let stripe = store.stripe_of(Fingerprint::of_tag(seen.tag));
        let own = stripe == store.stripe_of(self.key);
        let held = if own { None } else { store.try_lock_stripe(stripe) };
        if !(own || held.is_some()) || !store.words.lock(seen) {
            store.words.put_back(to);
            return None;
        }
        store.words.publish(to, seen.tag, seen.word);
        store.has_moved(Fingerprint::of_tag(seen.tag));
        Some(seen.emptied())
    }

    /// The slot of least [worth](Worth), and how much that is.
    fn least_used(&self, slots: &[Seen], now: Now) -> Option<(Worth, Seen)> {
        let versions = self.store.registry.versions();
        let worth = |seen: &Seen| {
            let rules = versions.policy(version_of(seen.tag))?.quota().rules();
            let Rules::Pair(pair_rules, Layout::Word(layout)) = rules else { return None };
            let state = layout.unpack(seen.word, now)?;
            Some((Worth::new(rules, pair_rules.fullness(state, now.at), state.at), *seen))
        };
        slots.iter().filter_map(worth).min_by_key(|(worth, _)| *worth)
    }
}
