//! The parts of a limiter in memory, and what they share.

use std::hash::Hasher;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock, TryLockError};

use foldhash::SharedSeed;

use crate::clock::{Clock, MonotonicClock};
use crate::key::Key;
use crate::limiter::PolicyRegistry;
use crate::outcome::{LimiterEvent, Observer};
use crate::policy::Policy;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, lock};

use super::OnFull;
use super::entry_arena::EntryArena;
use super::slot_table::{Fingerprint, SlotTable, version_of};
use super::versions::{PHASE_US, UNNAMED, Versions};
use super::word::{NO_STATE, Now, is_expired};

/// Stripes: a new key's slot is made under one.
const STRIPES: usize = if cfg!(ratelimit_loom) { 2 } else { 1_024 };

/// The clock that a limiter reads.
pub(super) enum AnyClock {
    Monotonic(MonotonicClock),
    #[cfg(feature = "fast-clock")]
    Fast(crate::clock::FastClock),
    Other(Arc<dyn Clock>),
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

/// The states, and all that deciding needs.
pub(super) struct Store {
    pub(super) table: SlotTable,
    arena: OnceLock<EntryArena>,
    pub(super) versions: Versions,
    pub(super) setup: Setup,
    pub(super) policy_registry: PolicyRegistry,
    stripes: Box<[Mutex<()>]>,
    /// How many new keys in a row found the table full, up to a bound; only a hint.
    pub(super) crowding: AtomicU32,
    /// The observer knows that no version is left.
    is_reported: AtomicBool,
    /// Held by the thread that walks over all slots: the earliest instant at which unused versions may be looked for again.
    walk: Mutex<u64>,
    /// A thread walks over all slots, and no key moves.
    pub(super) is_walked: AtomicBool,
}

impl Store {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            table: SlotTable::new(setup.capacity),
            arena: OnceLock::new(),
            versions: Versions::new(),
            setup,
            policy_registry: PolicyRegistry::new(),
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            crowding: AtomicU32::new(0),
            is_reported: AtomicBool::new(false),
            walk: Mutex::new(0),
            is_walked: AtomicBool::new(false),
        }
    }

    /// Returns the arena, which is made when the first state needs it.
    #[inline]
    pub(super) fn arena(&self) -> &EntryArena {
        self.arena.get_or_init(|| EntryArena::new(self.setup.entries, self.table.len()))
    }

    /// Returns how many dated entries one key can have.
    pub(super) fn entries_max(&self) -> usize {
        EntryArena::entries_for(self.setup.entries, self.table.len())
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.arena.get().map_or(0, EntryArena::bytes)
    }

    /// Returns the fingerprint of a key under a policy's name: its states under all quotas of that policy share it.
    #[inline]
    pub(super) fn fingerprint(&self, policy: &Policy, key: &Key) -> Fingerprint {
        let seed = self.setup.secret.seeds[0] ^ policy.name_fingerprint();
        let mut hasher = foldhash::quality::FoldHasher::with_seed(seed, &self.setup.secret.shared);
        hasher.write(key.as_bytes());
        Fingerprint::new(hasher.finish())
    }

    // Time ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the clock before the state is read. A thread that loses the processor in between finds a state that is newer. So
    /// a decision by this reading is given up if the state is [ahead](crate::algorithm::PairRules::is_clamped) of it.
    #[inline(always)] // called from several places, it would be a call in the usual charge (benches/instructions.rs)
    pub(super) fn now(&self) -> Now {
        Now::new(self.setup.clock.now_us(), self.setup.base)
    }

    /// Reads the clock after the state was locked. Only such a reading may rewind a state: if the state is ahead of it, the
    /// clock has stepped back.
    pub(super) fn now_after(&self) -> Now {
        Now::new(self.setup.clock.now_us_in_order(), self.setup.base)
    }

    // Stripes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    pub(super) fn lock_stripe(&self, stripe: usize) -> MutexGuard<'_, ()> {
        lock(&self.stripes[stripe % STRIPES])
    }

    pub(super) fn try_lock_stripe(&self, key: Fingerprint) -> Option<MutexGuard<'_, ()>> {
        try_lock(&self.stripes[stripe_of(key)])
    }

    // Walks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Walks over all slots while no key moves. No other walk happens meanwhile, so each version means one thing.
    pub(super) fn while_no_key_moves<T>(&self, walk: impl FnOnce() -> T) -> T {
        let _one = lock(&self.walk);
        self.walk_with(walk)
    }

    fn walk_with<T>(&self, walk: impl FnOnce() -> T) -> T {
        self.is_walked.store(true, Ordering::Relaxed);
        // A key moves under its stripe. A move that did not see the walk is done after this.
        (0..STRIPES).for_each(|stripe| drop(self.lock_stripe(stripe)));
        let result = walk();
        self.is_walked.store(false, Ordering::Relaxed);
        result
    }

    // Versions ────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the number of a policy's version. A charge asks once: the answer may be another one later.
    #[inline]
    pub(super) fn version(&self, policy: &Policy) -> u16 {
        match self.versions.cached(policy) {
            Some(version) => version,
            None => self.version_slowly(policy),
        }
    }

    /// Looks a policy's version up. The caller must hold no lock.
    #[cold]
    #[inline(never)]
    fn version_slowly(&self, policy: &Policy) -> u16 {
        let mut version = self.versions.look_up(policy);
        if self.versions.is_crowded() && self.free_versions() && version == UNNAMED {
            version = self.versions.look_up(policy);
        }
        if version == UNNAMED && !self.is_reported.swap(true, Ordering::Relaxed) {
            if let Some(observer) = &self.setup.observer {
                observer.on_event(&LimiterEvent::TooManyQuotas);
            }
        }
        version
    }

    /// Frees the versions that no charge asked for since this was done last, and that have no live states. It returns `false`
    /// if that is not long ago, or another thread is at it.
    pub(super) fn free_versions(&self) -> bool {
        let Some(mut next_phase_us) = try_lock(&self.walk) else { return false };
        let now = self.now();
        // A clock that stepped back is waited for no longer than a phase.
        if now.at < *next_phase_us && *next_phase_us <= now.at + PHASE_US {
            return false;
        }
        *next_phase_us = now.at + PHASE_US;
        self.is_reported.store(false, Ordering::Relaxed);
        let mut unused = self.versions.idle();
        self.walk_with(|| {
            for place in self.table.places() {
                if self.table.read(place).is_some_and(|seen| !unused.contains(version_of(seen.tag))) {
                    continue;
                }
                let Some(seen) = self.table.lock(place) else { continue };
                let version = version_of(seen.tag);
                let is_expired = is_expired(seen.word, self.versions.form(version).shift, now);
                if unused.contains(version) && is_expired {
                    // Its tag must not name a version that will mean something else.
                    self.free_blocks(seen);
                    self.table.unlock(place, 0, NO_STATE);
                } else {
                    unused.remove(version);
                    self.table.put_back(seen);
                }
            }
        });
        self.versions.begin_phase(&unused);
        true
    }
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Returns the number of a key's stripe.
pub(super) fn stripe_of(key: Fingerprint) -> usize {
    (key.bits() >> 32) as usize % STRIPES
}
