//! The tables, their locks, and what is asked of them everywhere.
//!
//! Order of locks: stripes, then shards, then slots of the table of words. Who holds a slot waits for nobody, except that a
//! set which holds slots of its own keys waits for another of its keys: that is held only by who claims or rewrites it,
//! and waits for nobody, since the keys of other sets that wait are under other stripes. The lock of the versions is taken
//! last, and nothing is locked under it. No lock is held while an observer is told.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, TryLockError};

use foldhash::SharedSeed;
use smallvec::SmallVec;
use std::hash::Hasher;

use crate::algorithm::{PairRules, WordLayout};
use crate::clock::{Clock, MonotonicClock};
use crate::key::Key;
use crate::limiter::Roster;
use crate::outcome::{LimiterEvent, Observer};
use crate::policy::Policy;
use crate::sync::{Mutex, MutexGuard, lock};

use super::OnFull;
use super::large::{Crowd, Large, Shard};
use super::news::News;
use super::registry::{PHASE_US, Registry, UNNAMED};
use super::words::{Fingerprint, Now, Words, is_expired, version_of};

/// Stripes: a new key's slot is made under one, so that no key ever gets two.
const STRIPES: usize = 1_024;

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
    pub(super) setup: Setup,
    pub(super) roster: Roster,
    stripes: Box<[Mutex<()>]>,
    /// How many newcomers in a row found the table of words full, up to a bound; only a hint.
    pub(super) crowding: AtomicU32,
    /// It was reported in this phase that no version is left.
    is_reported: AtomicBool,
    /// Held by the thread that walks over all states.
    walk: Mutex<Walks>,
    is_walked: AtomicBool,
    /// Keys whose states moved while they were walked over.
    moved: Mutex<Vec<Fingerprint>>,
}

/// What is known of walks over all states.
#[derive(Default)]
struct Walks {
    /// When versions may be looked for again that nobody needs.
    next_phase_us: u64,
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

    fn now_us_in_order(&self) -> u64 {
        match self {
            #[cfg(feature = "fast-clock")]
            Self::Fast(clock) => clock.now_in_order().as_micros(),
            clock => clock.now_us(),
        }
    }
}

impl Store {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            words: Words::new(setup.capacity),
            large: OnceLock::new(),
            registry: Registry::new(),
            setup,
            roster: Roster::new(),
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            crowding: AtomicU32::new(0),
            is_reported: AtomicBool::new(false),
            walk: Mutex::default(),
            is_walked: AtomicBool::new(false),
            moved: Mutex::default(),
        }
    }

    // Versions ────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// The number of a policy's version. A charge asks once: the answer may be another one later.
    #[inline]
    pub(super) fn version(&self, policy: &Policy) -> u16 {
        match self.registry.cached(policy) {
            Some(version) => version,
            None => self.version_slowly(policy),
        }
    }

    /// Looks for the key in every place, if it is not found at once. The caller must hold no lock.
    #[cold]
    #[inline(never)]
    fn version_slowly(&self, policy: &Policy) -> u16 {
        let mut version = self.registry.look_up(policy);
        if self.registry.is_crowded() && self.free_versions() && version == UNNAMED {
            version = self.registry.look_up(policy);
        }
        if version == UNNAMED && !self.is_reported.swap(true, Ordering::Relaxed) {
            if let Some(observer) = &self.setup.observer {
                observer.on_event(&LimiterEvent::TooManyQuotas);
            }
        }
        version
    }

    /// Frees the versions that nobody asked for since this was done last, and that have no live states. `false` if that is
    /// not long ago, or another thread is at it.
    fn free_versions(&self) -> bool {
        let mut walks = match self.walk.try_lock() {
            Ok(walks) => walks,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let now = self.now();
        // A clock that stepped back is waited for no longer than a phase.
        if now.at < walks.next_phase_us && walks.next_phase_us <= now.at + PHASE_US {
            return false;
        }
        walks.next_phase_us = now.at + PHASE_US;
        self.is_reported.store(false, Ordering::Relaxed);
        let mut unused = self.registry.idle();
        for seen in self.words.iter() {
            let version = version_of(seen.tag);
            if !unused.contains(version) {
                continue;
            }
            // A slot that has expired must not name a version that will mean something else.
            let expired = is_expired(seen.word, self.registry.shift(version), now);
            if expired && self.words.lock(seen) {
                self.words.put_back(seen.emptied());
            } else {
                unused.remove(version);
            }
        }
        for number in 0..self.large.get().map_or(0, Large::shards) {
            let Some(large) = self.large.get() else { break };
            large.lock(number).forget_versions(&mut unused, now.at);
        }
        self.registry.begin_phase(&unused);
        true
    }

    // Walks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Walks over all states with `walk`, and then with `meet` over the keys that moved meanwhile; at last `finish` is called.
    /// No other walk happens until then, so that each version means one thing.
    pub(super) fn while_walking<T>(
        &self,
        walk: impl FnOnce() -> T,
        mut meet: impl FnMut(&mut T, Fingerprint),
        finish: impl FnOnce(&mut T),
    ) -> T {
        let _one = lock(&self.walk);
        lock(&self.moved).clear();
        self.is_walked.store(true, Ordering::Relaxed);
        // Whoever moves a key holds its stripe. A move that did not see the walk is done after this.
        (0..STRIPES).for_each(|stripe| drop(self.lock_stripe(stripe)));
        let mut result = walk();
        self.is_walked.store(false, Ordering::Relaxed);
        let moved = std::mem::take(&mut *lock(&self.moved));
        moved.into_iter().for_each(|key| meet(&mut result, key));
        finish(&mut result);
        result
    }

    /// Under the stripe of a key whose state has moved to another place.
    pub(super) fn has_moved(&self, key: Fingerprint) {
        // Relaxed: the stripe orders this, see `while_walking`.
        if self.is_walked.load(Ordering::Relaxed) {
            lock(&self.moved).push(key);
        }
    }

    /// A reading of the clock before the state is read: a thread that loses the processor in between meets a state that
    /// is newer. Whoever decides by it gives up when the state is [ahead](PairRules::is_clamped) of it, and decides by
    /// [`now_after`](Self::now_after) instead.
    #[inline(always)] // called from several places, it would be a call in the usual charge (benches/instructions.rs)
    pub(super) fn now(&self) -> Now {
        Now::new(self.setup.clock.now_us(), self.setup.base)
    }

    /// A reading of the clock after the state was read. Only such a reading may rewind a state: if the state is ahead of
    /// it, the clock has stepped back.
    pub(super) fn now_after(&self) -> Now {
        Now::new(self.setup.clock.now_us_in_order(), self.setup.base)
    }

    /// The fingerprint of a key under a policy's name: its states under all quotas of that policy share it.
    #[inline]
    pub(super) fn fingerprint(&self, policy: &Policy, key: &Key) -> Fingerprint {
        let seed = self.setup.secret.seeds[0] ^ policy.name_fingerprint();
        let mut hasher = foldhash::quality::FoldHasher::with_seed(seed, &self.setup.secret.shared);
        hasher.write(key.as_bytes());
        Fingerprint::new(hasher.finish())
    }

    pub(super) fn large(&self) -> &Large {
        self.large.get_or_init(|| Large::new(self.setup.capacity, self.setup.entries))
    }

    pub(super) fn stripe_of(&self, key: Fingerprint) -> usize {
        (key.bits() >> 32) as usize % STRIPES
    }

    pub(super) fn lock_stripe(&self, stripe: usize) -> MutexGuard<'_, ()> {
        lock(&self.stripes[stripe % STRIPES])
    }

    pub(super) fn try_lock_stripe(&self, stripe: usize) -> Option<MutexGuard<'_, ()>> {
        match self.stripes[stripe % STRIPES].try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    /// What is to be told to the observer, once the locks that are taken after this are gone: an observer may do as it
    /// likes, ask this limiter or panic.
    pub(super) fn news(&self) -> News<'_> {
        News::of(self)
    }

    pub(super) fn crowd(&self, now: Now) -> Crowd<'_> {
        Crowd {
            registry: &self.registry,
            now: now.at,
            evict: self.setup.on_full == OnFull::Evict,
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
        Fingerprint::new(key.bits() ^ policy.state_fingerprint().rotate_left(17))
    }

    /// The rules of a version whose states are words.
    pub(super) fn word_rules(&self, version: u16) -> Option<(PairRules, WordLayout)> {
        self.registry.versions().word_rules(version).map(|(rules, layout)| (*rules, *layout))
    }
}
