//! The tables, their locks, and what is asked of them everywhere.
//!
//! Order of locks: stripes, then shards, then slots of the table of words. Who holds a slot waits for nobody, except that a
//! set which holds slots of its own keys waits for another of its keys: that is held only by who claims or rewrites it,
//! and waits for nobody, since the keys of other sets that wait are under other stripes. The lock of the versions is taken
//! last, and nothing is locked under it. No lock is held while an observer is told.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use foldhash::SharedSeed;
use smallvec::SmallVec;
use std::hash::Hasher;

use crate::algorithm::{PairRules, WordLayout};
use crate::clock::{Clock, MonotonicClock};
use crate::key::Key;
use crate::limiter::Roster;
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::sync::{Mutex, MutexGuard, lock};

use super::OnFull;
use super::large::{Crowd, Large, Shard};
use super::news::News;
use super::registry::Registry;
use super::words::{Fingerprint, Now, Words};

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
        }
    }

    /// A reading of the clock before the state is read: a thread that loses the processor in between meets a state that
    /// is newer. Whoever decides by it gives up when the state is [ahead](PairRules::is_clamped) of it, and decides by
    /// [`now_after`](Self::now_after) instead.
    #[inline]
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
        Fingerprint::new(key.bits() ^ policy.fingerprint().rotate_left(17))
    }

    /// The rules of a version whose states are words.
    pub(super) fn word_rules(&self, version: u16) -> Option<(PairRules, WordLayout)> {
        self.registry.versions().word_rules(version).map(|(rules, layout)| (*rules, *layout))
    }
}
