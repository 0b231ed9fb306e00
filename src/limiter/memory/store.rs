//! One charge against the tables.
//!
//! Order of locks: stripes, then shards, then slots of the table of words. Who holds a slot waits for nobody.

use std::sync::{Arc, OnceLock};

use foldhash::SharedSeed;
use smallvec::SmallVec;
use std::hash::Hasher;

use crate::algorithm::{Answer, Decide, Fullness, Layout, Next, Pair, PairRules, Rules, Used, WordLayout, by_type};
use crate::clock::{Clock, MonotonicClock};
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::limiter::{Charge, Effect, Refund};
use crate::outcome::{LimiterEvent, Observer};
use crate::policy::Policy;
use crate::sync::{Mutex, MutexGuard, lock};

use super::OnFull;
use super::large::{Change, Crowd, Index, Large, Shard};
use super::registry::{Registry, UNNAMED};
use super::words::{Fingerprint, Now, Seen, Words, is_expired, version_of};

/// Stripes: a new key's slot is made under one, so that no key ever gets two.
const STRIPES: usize = 1_024;

/// How often a full set is looked through again when another thread was quicker.
const EVICTION_ATTEMPTS: usize = 16;

/// What a denied newcomer to a full table is told to wait.
const FULL_RETRY_US: u64 = 1_000_000;

/// The clock that a limiter reads.
pub(super) enum AnyClock {
    Monotonic(MonotonicClock),
    #[cfg(feature = "fast-clock")]
    Fast(crate::clock::FastClock),
    Other(Arc<dyn Clock>),
}

/// The secret that fingerprints are made with.
pub(super) struct Secret {
    pub(super) seeds: [u64; 2],
    shared: SharedSeed,
}

impl Secret {
    pub(super) fn new(seeds: [u64; 2]) -> Self {
        Self { seeds, shared: SharedSeed::from_u64(seeds[1]) }
    }
}

/// The tables, and all that deciding needs.
pub(super) struct Store {
    pub(super) words: Words,
    pub(super) large: OnceLock<Large>,
    pub(super) registry: Registry,
    pub(super) secret: Secret,
    pub(super) clock: AnyClock,
    /// The instant that words count from.
    pub(super) base: u64,
    pub(super) capacity: usize,
    pub(super) entries: usize,
    pub(super) on_full: OnFull,
    pub(super) observer: Option<Arc<dyn Observer>>,
    stripes: Box<[Mutex<()>]>,
}

/// Events that are told when this is dropped: made before any lock is taken, it outlives them.
pub(super) struct News<'a> {
    store: &'a Store,
    events: SmallVec<[LimiterEvent; 2]>,
}

impl News<'_> {
    pub(super) fn evicted(&mut self, fullness: Fullness) {
        self.events.push(LimiterEvent::Evicted { throttled: fullness.throttled });
    }

    pub(super) fn crowd(&mut self, crowd: &Crowd<'_>) {
        crowd.evicted.iter().for_each(|fullness| self.evicted(*fullness));
    }

    /// The answer to a new key for which there is no room.
    pub(super) fn full(&mut self, mut decision: ChargeDecision) -> ChargeDecision {
        self.events.push(LimiterEvent::Full);
        decision.untaken();
        ChargeDecision::found(decision.limit(), 0, decision.reset_us(), FULL_RETRY_US, Some(FULL_RETRY_US))
    }
}

impl Drop for News<'_> {
    fn drop(&mut self) {
        if let Some(observer) = &self.store.observer {
            self.events.iter().for_each(|event| observer.on_event(event));
        }
    }
}

/// What a store is made from; see `builder.rs` for what each is.
pub(super) struct Setup {
    pub(super) secret: Secret,
    pub(super) clock: AnyClock,
    pub(super) base: u64,
    pub(super) capacity: usize,
    pub(super) entries: usize,
    pub(super) on_full: OnFull,
    pub(super) observer: Option<Arc<dyn Observer>>,
}

impl AnyClock {
    #[inline]
    pub(super) fn now_us(&self) -> u64 {
        match self {
            Self::Monotonic(clock) => clock.now(),
            #[cfg(feature = "fast-clock")]
            Self::Fast(clock) => clock.now(),
            Self::Other(clock) => clock.now(),
        }
        .as_micros()
    }
}

impl Store {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            words: Words::new(setup.capacity),
            large: OnceLock::new(),
            registry: Registry::new(),
            secret: setup.secret,
            clock: setup.clock,
            base: setup.base,
            capacity: setup.capacity,
            entries: setup.entries,
            on_full: setup.on_full,
            observer: setup.observer,
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
        }
    }

    #[inline]
    pub(super) fn now(&self) -> Now {
        Now::new(self.clock.now_us(), self.base)
    }

    /// The fingerprint of a key under a policy's name: its states under all quotas of that policy share it.
    #[inline]
    pub(super) fn fingerprint(&self, policy: &Policy, key: &Key) -> Fingerprint {
        let seed = self.secret.seeds[0] ^ policy.name_fingerprint();
        let mut hasher = foldhash::quality::FoldHasher::with_seed(seed, &self.secret.shared);
        hasher.write(key.as_bytes());
        Fingerprint::new(hasher.finish())
    }

    pub(super) fn large(&self) -> &Large {
        self.large.get_or_init(|| Large::new(self.capacity, self.entries))
    }

    pub(super) fn stripe_of(&self, key: Fingerprint) -> usize {
        (key.bits() >> 32) as usize % STRIPES
    }

    pub(super) fn lock_stripe(&self, stripe: usize) -> MutexGuard<'_, ()> {
        lock(&self.stripes[stripe % STRIPES])
    }

    fn try_lock_stripe(&self, stripe: usize) -> Option<MutexGuard<'_, ()>> {
        match self.stripes[stripe % STRIPES].try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    /// Takes one charge.
    #[inline(always)]
    pub(super) fn charge(&self, policy: &Policy, key: &Key, cost: u64, force: bool) -> ChargeDecision {
        let now = self.now();
        let version = self.registry.version(policy);
        let fingerprint = self.fingerprint(policy, key);
        if let Some(seen) = self.words.find_quietly(fingerprint) {
            // Two ways out instead of one, so that the answer is written once, where the caller wants it.
            match policy.quota().rules() {
                Rules::Pair(PairRules::Gcra(rules), Layout::Word(_)) if version_of(seen.tag) == version => {
                    let layout = WordLayout::MICROSECONDS;
                    if let Some(decision) = self.try_word(rules, layout, seen, now, cost, force) {
                        return decision;
                    }
                }
                Rules::Pair(rules, Layout::Word(layout)) if version_of(seen.tag) == version => {
                    if let Some(decision) = self.try_rare(rules, *layout, seen, now, cost, force) {
                        return decision;
                    }
                }
                _ => {}
            }
        }
        self.charge_slowly(policy, fingerprint, version, now, cost, force)
    }

    /// The usual case of a charge whose state is a word: the key has its slot, nobody interferes. It is straight-line code;
    /// nothing was taken if it returns nothing.
    #[inline(always)]
    fn try_word(
        &self,
        rules: &impl Decide,
        layout: WordLayout,
        seen: Seen,
        now: Now,
        cost: u64,
        force: bool,
    ) -> Option<ChargeDecision> {
        let (next, found) = rules.admit(layout.unpack(seen.word, now), now.at, cost, force);
        let written = match next {
            Next::Keep => true,
            Next::Set(state) => self.words.replace(seen, layout.pack(state, now)),
            Next::Clear => self.words.replace(seen, layout.cleared(now)),
        };
        if written { Some(rules.tell(found)) } else { None }
    }

    /// The same for the other algorithms, out of the way of the first.
    #[inline(never)]
    fn try_rare(
        &self,
        rules: &PairRules,
        layout: WordLayout,
        seen: Seen,
        now: Now,
        cost: u64,
        force: bool,
    ) -> Option<ChargeDecision> {
        by_type!(rules, rules => self.try_word(rules, layout, seen, now, cost, force))
    }

    /// Takes one charge, whatever the case.
    #[cold]
    #[inline(never)]
    fn charge_slowly(
        &self,
        policy: &Policy,
        key: Fingerprint,
        version: u16,
        now: Now,
        cost: u64,
        force: bool,
    ) -> ChargeDecision {
        match policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                WordCharge { store: self, key, version, rules, layout: *layout, now, cost, force }.take()
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, policy) } else { key };
                LargeCharge { store: self, key, version, rules, now, cost, force }.take()
            }
        }
    }

    /// Answers as [`charge`](Self::charge) would at `now`, and takes nothing.
    pub(super) fn peek(&self, charge: &Charge<'_>, now: Now) -> ChargeDecision {
        self.look_at(charge, now).0
    }

    /// The same, and whether the charge would write anything: what it takes, or its refusal, which is counted or mends a
    /// state that is too far ahead.
    pub(super) fn look_at(&self, charge: &Charge<'_>, now: Now) -> (ChargeDecision, bool) {
        let key = self.fingerprint(charge.policy, charge.key);
        let version = self.registry.version(charge.policy);
        let (cost, force) = (charge.cost, charge.effect == Effect::Force);
        let (mut decision, writes) = match charge.policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                let word = WordCharge { store: self, key, version, rules, layout: *layout, now, cost, force };
                let Answer { decision, next } = word.peek();
                (decision, next != Next::Keep)
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, charge.policy) } else { key };
                LargeCharge { store: self, key, version, rules, now, cost, force }.peek()
            }
        };
        decision.untaken();
        (decision, writes)
    }

    /// What is to be told to the observer, once the locks that are taken after this are gone: an observer may do as it
    /// likes, ask this limiter or panic.
    pub(super) fn news(&self) -> News<'_> {
        News { store: self, events: SmallVec::new() }
    }

    pub(super) fn crowd(&self, now: Now) -> Crowd<'_> {
        Crowd {
            registry: &self.registry,
            now: now.at,
            evict: self.on_full == OnFull::Evict,
            keep: SmallVec::new(),
            evicted: SmallVec::new(),
        }
    }

    // States larger than a word ───────────────────────────────────────────────────────────────────────────────────────

    /// Locks a key's shard, and before it the key's stripe if the state may lie among the words.
    pub(super) fn lock_large(&self, key: Fingerprint) -> (Option<MutexGuard<'_, ()>>, MutexGuard<'_, Shard>) {
        let large = self.large();
        let number = large.shard_of(key);
        if !self.registry.is_mixed() {
            let shard = large.lock(number);
            // Asked again: who makes the policy's first word looks into this shard before, and either finds what is made
            // under this lock, or is seen here.
            if !self.registry.is_mixed() {
                return (None, shard);
            }
        }
        let stripe = self.lock_stripe(self.stripe_of(key));
        (Some(stripe), large.lock(number))
    }

    /// States of policies without a version have their quota in the fingerprint: another quota is another state.
    pub(super) fn unnamed(key: Fingerprint, policy: &Policy) -> Fingerprint {
        Fingerprint::new(key.bits() ^ policy.fingerprint().rotate_left(17))
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
        let is_trail = matches!(rules, Rules::Trail(_));
        if let Some((index, written)) = shard.find(key) {
            if written != version {
                crowd.keep.push(index);
                if is_trail && !shard.make_room(1, key, crowd) {
                    return Err(NoRoom);
                }
                let versions = self.registry.versions();
                let old = versions.policy(written).map(|policy| policy.quota().rules());
                let used = old.and_then(|rules| shard.used(index, rules, now.at));
                shard.rewrite(index, version, rules, now.at, used);
            }
            return Ok(Some(index));
        }
        if !self.registry.is_mixed() || self.words.find(key).is_none() {
            return Ok(None);
        }
        let Some(index) = shard.insert(key, version, crowd) else { return Err(NoRoom) };
        crowd.keep.push(index);
        if is_trail && !shard.make_room(1, key, crowd) {
            shard.forget(index);
            return Err(NoRoom);
        }
        let used = self.take_out_of_words(key, now);
        shard.rewrite(index, version, rules, now.at, used);
        Ok(Some(index))
    }

    /// Removes a key's slot among the words, live or not, and says what was in use.
    fn take_out_of_words(&self, key: Fingerprint, now: Now) -> Option<Used> {
        loop {
            let seen = self.words.find(key)?;
            let (rules, layout) = self.word_rules(version_of(seen.tag))?;
            if self.words.lock(seen) {
                self.words.put_back(seen.emptied());
                return layout.unpack(seen.word, now).map(|state| rules.used(state, now.at));
            }
        }
    }

    /// The rules of a version whose states are words.
    pub(super) fn word_rules(&self, version: u16) -> Option<(PairRules, WordLayout)> {
        let versions = self.registry.versions();
        match versions.policy(version)?.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) => Some((*rules, *layout)),
            _ => None,
        }
    }
}

/// One charge whose state is larger than a word.
struct LargeCharge<'a> {
    store: &'a Store,
    key: Fingerprint,
    version: u16,
    rules: &'a Rules,
    now: Now,
    cost: u64,
    force: bool,
}

impl LargeCharge<'_> {
    fn take(&self) -> ChargeDecision {
        let Self { store, key, version, rules, now, .. } = *self;
        let mut news = store.news();
        let (_stripe, mut shard) = store.lock_large(key);
        let mut crowd = store.crowd(now);
        let (decision, is_kept) = match store.settle_large(&mut shard, key, version, rules, now, &mut crowd) {
            Ok(index) => {
                let (decision, change) = shard.decide(index, rules, now.at, self.cost, self.force);
                (decision, !change.writes() || self.write(&mut shard, index, &change, &mut crowd))
            }
            Err(NoRoom) => (shard.decide(None, rules, now.at, self.cost, self.force).0, self.cost == 0),
        };
        news.crowd(&crowd);
        if is_kept { decision } else { news.full(decision) }
    }

    /// Writes a change; nothing if there is no room.
    fn write(&self, shard: &mut Shard, index: Option<Index>, change: &Change, crowd: &mut Crowd<'_>) -> bool {
        let Self { key, version, rules, now, .. } = *self;
        crowd.keep.extend(index);
        let room = matches!(rules, Rules::Pair(..)) || shard.make_room(1, key, crowd);
        let index = if room { index.or_else(|| shard.insert(key, version, crowd)) } else { None };
        if let Some(index) = index {
            shard.apply(index, rules, now.at, change);
        }
        index.is_some()
    }

    /// The decision, and whether it would be written.
    fn peek(&self) -> (ChargeDecision, bool) {
        let Self { store, key, version, rules, now, .. } = *self;
        let mut news = store.news();
        let (_stripe, mut shard) = store.lock_large(key);
        let mut crowd = store.crowd(now);
        let settled = store.settle_large(&mut shard, key, version, rules, now, &mut crowd);
        let (decision, change) =
            shard.decide(settled.as_ref().copied().unwrap_or(None), rules, now.at, self.cost, self.force);
        news.crowd(&crowd);
        match settled {
            Ok(_) => (decision, change.writes()),
            Err(NoRoom) if self.cost > 0 => (news.full(decision), false),
            Err(NoRoom) => (decision, false),
        }
    }
}

/// There is no place where a state could be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

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
    pub(super) now: Now,
    pub(super) cost: u64,
    pub(super) force: bool,
}

impl WordCharge<'_> {
    /// Decides and takes.
    fn take(&self) -> ChargeDecision {
        loop {
            let Some(seen) = self.store.words.find(self.key) else {
                match self.take_new() {
                    Some(decision) => return decision,
                    None => continue,
                }
            };
            if version_of(seen.tag) != self.version {
                self.convert(seen);
                continue;
            }
            // Others are at this key, or this would not be the slow way: it is locked at once, since a decision made before
            // a compare-exchange would often be made in vain.
            if !self.store.words.lock(seen) {
                continue;
            }
            let Answer { decision, next } = self.decide(self.layout.unpack(seen.word, self.now));
            match next {
                Next::Keep => self.store.words.put_back(seen),
                Next::Set(state) => self.store.words.publish(seen, seen.tag, self.layout.pack(state, self.now)),
                Next::Clear => self.store.words.publish(seen, seen.tag, self.layout.cleared(self.now)),
            }
            return decision;
        }
    }

    /// Decides, and writes nothing.
    pub(super) fn peek(&self) -> Answer {
        self.decide(self.state())
    }

    #[inline]
    pub(super) fn decide(&self, state: Option<Pair>) -> Answer {
        self.rules.decide(state, self.now.at, self.cost, self.force)
    }

    /// The state as this charge's quota would have it, wherever it is and whatever version it has; nothing is moved.
    fn state(&self) -> Option<Pair> {
        let used = match self.find() {
            Some(seen) if version_of(seen.tag) == self.version => return self.layout.unpack(seen.word, self.now),
            Some(seen) => {
                let (rules, layout) = self.store.word_rules(version_of(seen.tag))?;
                rules.used(layout.unpack(seen.word, self.now)?, self.now.at)
            }
            None if self.store.registry.is_mixed() => {
                let large = self.store.large.get()?;
                let shard = large.lock(large.shard_of(self.key));
                let (index, written) = shard.find(self.key)?;
                let versions = self.store.registry.versions();
                shard.used(index, versions.policy(written)?.quota().rules(), self.now.at)?
            }
            None => return None,
        };
        self.rules.with_used(used, self.now.at)
    }

    /// Finds the key's slot, also one that is just moving.
    fn find(&self) -> Option<Seen> {
        self.store.words.find(self.key).or_else(|| {
            let _stripe = self.store.lock_stripe(self.store.stripe_of(self.key));
            self.store.words.find(self.key)
        })
    }

    /// A key without a slot. Nothing if it has got one meanwhile.
    #[cold]
    fn take_new(&self) -> Option<ChargeDecision> {
        let mut news = self.store.news();
        let Answer { decision, next } = self.decide(None);
        let _stripe = self.store.lock_stripe(self.store.stripe_of(self.key));
        if self.store.registry.is_mixed() {
            let large = self.store.large(); // made if need be: its lock orders this with who makes the first large state
            match self.adopt(&mut large.lock(large.shard_of(self.key)), &mut news) {
                Adopted::Nothing => {}
                Adopted::Came => return None,
                Adopted::NoRoom => return Some(news.full(decision)),
            }
        }
        if self.store.words.find(self.key).is_some() {
            return None;
        }
        let Next::Set(state) = next else { return Some(decision) };
        let word = self.layout.pack(state, self.now);
        match self.claim(&mut news) {
            Some(claimed) => {
                self.store.words.publish(claimed, self.key.tag(self.version), word);
                Some(decision)
            }
            None => Some(news.full(decision)),
        }
    }

    /// Under the key's stripe: a state that lies among the large ones comes over, if there is one and there is room.
    pub(super) fn adopt(&self, shard: &mut Shard, news: &mut News<'_>) -> Adopted {
        let Some((index, written)) = shard.find(self.key) else { return Adopted::Nothing };
        let versions = self.store.registry.versions();
        let used = versions.policy(written).and_then(|old| shard.used(index, old.quota().rules(), self.now.at));
        drop(versions);
        if let Some(state) = used.and_then(|used| self.rules.with_used(used, self.now.at)) {
            let word = self.layout.pack(state, self.now);
            let Some(claimed) = self.claim(news) else { return Adopted::NoRoom };
            self.store.words.publish(claimed, self.key.tag(self.version), word);
            shard.forget(index);
            return Adopted::Came;
        }
        shard.forget(index);
        Adopted::Nothing
    }

    /// Rewrites a slot of another version as one of this, with as much in use. It may fail if the slot changes meanwhile.
    #[cold]
    pub(super) fn convert(&self, seen: Seen) {
        let Some((rules, layout)) = self.store.word_rules(version_of(seen.tag)) else { return };
        let used = layout.unpack(seen.word, self.now).map(|state| rules.used(state, self.now.at));
        let state = used.and_then(|used| self.rules.with_used(used, self.now.at));
        if self.store.words.lock(seen) {
            let word = state.map_or(self.layout.cleared(self.now), |state| self.layout.pack(state, self.now));
            self.store.words.publish(seen, self.key.tag(self.version), word);
        }
    }

    /// Under the key's stripe: locks a slot for a key that has none. A free one; or that of a key which can move to its
    /// other line; or by choice that of the key that has used least. Nothing if there is none of these. It is returned as it
    /// may be put back.
    pub(super) fn claim(&self, news: &mut News<'_>) -> Option<Seen> {
        let store = self.store;
        for _ in 0..EVICTION_ATTEMPTS {
            let lines = store.words.candidates(self.key);
            let mut free = self.free_of(lines.iter().flatten());
            // One that was never used, in the first line if there is one; else the one that has been free longest, so that
            // an idle key keeps its slot for a while.
            free.sort_by_key(|seen| if seen.tag == 0 { 0 } else { seen.word.max(1) });
            if let Some(seen) = free.iter().find(|seen| store.words.lock(**seen)) {
                return Some(*seen);
            }
            if !free.is_empty() {
                continue; // others were quicker
            }
            if let Some(seen) = lines.iter().flatten().find_map(|seen| self.move_away(*seen)) {
                return Some(seen);
            }
            if store.on_full == OnFull::Deny {
                return None;
            }
            let fullness = |seen: &Seen| Some((self.fullness(*seen)?, *seen));
            let least = lines.iter().flatten().filter_map(fullness).min_by_key(|(fullness, _)| *fullness);
            if let Some((fullness, seen)) = least.filter(|(_, seen)| store.words.lock(*seen)) {
                news.evicted(fullness);
                return Some(seen);
            }
        }
        None
    }

    fn free_of<'s>(&self, slots: impl Iterator<Item = &'s Seen>) -> SmallVec<[Seen; 8]> {
        let registry = &self.store.registry;
        slots.filter(|seen| is_expired(seen.word, registry.shift(version_of(seen.tag)), self.now)).copied().collect()
    }

    /// Moves the key of a slot to a free one of its other line, and returns the slot, locked.
    ///
    /// It takes that key's stripe, if it can be had at once: whoever misses a key looks again under the stripe, and so does
    /// not miss it because it was moving.
    fn move_away(&self, seen: Seen) -> Option<Seen> {
        let store = self.store;
        let stripe = store.stripe_of(Fingerprint::of_tag(seen.tag));
        let _held = if stripe == store.stripe_of(self.key) { None } else { Some(store.try_lock_stripe(stripe)?) };
        let free = self.free_of(store.words.elsewhere(seen).iter());
        let to = free.into_iter().find(|to| to.place != seen.place && store.words.lock(*to))?;
        if !store.words.lock(seen) {
            store.words.put_back(to);
            return None;
        }
        store.words.publish(to, seen.tag, seen.word);
        Some(seen.emptied())
    }

    fn fullness(&self, seen: Seen) -> Option<Fullness> {
        let (rules, layout) = self.store.word_rules(version_of(seen.tag))?;
        Some(rules.fullness(layout.unpack(seen.word, self.now)?, self.now.at))
    }
}

impl Store {
    /// Gives back what a receipt still holds, as an act of the policy that was charged.
    pub(super) fn refund(&self, refund: &Refund) {
        let (policy, receipt) = (&refund.policy, &refund.receipt);
        let now = self.now();
        let version = self.registry.version(policy);
        let key = self.fingerprint(policy, &refund.key);
        let own = Pair { at: receipt.at_us(), n: receipt.part() };
        match policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                let word = WordCharge { store: self, key, version, rules, layout: *layout, now, cost: 0, force: false };
                word.refund(receipt.units(), own);
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, policy) } else { key };
                let mut news = self.news();
                let (_stripe, mut shard) = self.lock_large(key);
                let mut crowd = self.crowd(now);
                if let Ok(Some(index)) = self.settle_large(&mut shard, key, version, rules, now, &mut crowd) {
                    shard.refund(index, rules, now.at, receipt.units(), own);
                }
                news.crowd(&crowd);
            }
        }
    }

    /// Forgets a key's state under a policy's name, whatever its quota was.
    pub(super) fn reset(&self, policy: &Policy, key: &Key) {
        let now = self.now();
        let version = self.registry.version(policy);
        let named = self.fingerprint(policy, key);
        self.forget(if version == UNNAMED { Self::unnamed(named, policy) } else { named }, now);
    }

    /// Forgets a key's state, wherever it is.
    pub(super) fn forget(&self, key: Fingerprint, now: Now) {
        let _stripe = self.lock_stripe(self.stripe_of(key));
        while let Some(seen) = self.words.find(key) {
            let Some((_, layout)) = self.word_rules(version_of(seen.tag)) else { break };
            if self.words.replace(seen, layout.cleared(now)) {
                break;
            }
        }
        if let Some(large) = self.large.get() {
            let mut shard = large.lock(large.shard_of(key));
            if let Some((index, _)) = shard.find(key) {
                shard.forget(index);
            }
        }
    }
}

impl WordCharge<'_> {
    fn refund(&self, units: u64, own: Pair) {
        while let Some(seen) = self.find().or_else(|| self.fetch()) {
            if version_of(seen.tag) != self.version {
                self.convert(seen);
                continue;
            }
            let Some(state) = self.layout.unpack(seen.word, self.now) else { return };
            let word = match self.rules.refund(state, self.now.at, units, own) {
                Next::Keep => return,
                Next::Set(state) => self.layout.pack(state, self.now),
                Next::Clear => self.layout.cleared(self.now),
            };
            if self.store.words.replace(seen, word) {
                return;
            }
        }
    }

    /// Fetches a state that lies among the large ones.
    fn fetch(&self) -> Option<Seen> {
        let mut news = self.store.news();
        if !self.store.registry.is_mixed() {
            return None;
        }
        let (_stripe, mut shard) = self.store.lock_large(self.key);
        self.adopt(&mut shard, &mut news);
        self.store.words.find(self.key)
    }
}
