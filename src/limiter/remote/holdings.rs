//! What this process holds of concurrency limits whose units are counted in a store.
//!
//! The store has a row for each process that holds units of a key: a *holder*. The row lapses unless the process renews
//! it, so a process that dies loses its places by itself. This table knows, better than the store, what this process
//! holds: answers and calls can be lost. So each call carries a [`Claim`], by which the store corrects its row.
//!
//! # Epochs
//!
//! An *epoch* of a key is a number of this process that only grows. Its *base* is the number of units that the process
//! held, or may have been granted, when it began. The store refuses a call of an earlier epoch than the row's. A call of
//! a later one, whichever arrives first, sets the row to the base, and then takes or returns its units. A new epoch
//! begins when a call has an unknown outcome, after a reconnect, and with each renewal. So whatever was lost, the row is
//! right after the next call.
//!
//! A take that is under way when an epoch begins is part of its base, because it may be granted. If it is not, its
//! units are returned as soon as that is known.
//!
//! # Resets
//!
//! A reset sets all rows of a key to 0 and counts in each how often that happened. A process learns of it by the
//! refusal of its next call. Its places of before belong to an earlier *run*, and return nothing any more.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use foldhash::quality::RandomState;

use crate::clock::Clock;
use crate::policy::Policy;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::time::Timestamp;

/// Parts of the table, each with a lock.
const PARTS: usize = 64;

/// The most units of a base: stores calculate with numbers that are exact up to 2^53.
const BASE_MAX: u64 = 1 << 44;

/// What a call about a key's units says of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claim {
    /// The number of the process: from 1 to 2^53.
    pub(crate) holder: u64,
    /// How many resets of the key it knows.
    pub(crate) resets: u32,
    pub(crate) epoch: u64,
    /// The units that it held when the epoch began.
    pub(crate) base: u64,
    /// The time after which the row lapses.
    pub(crate) lapse_us: u64,
    /// Whether the row has to stay until it lapses, even if it has no units.
    pub(crate) keeps_row: bool,
}

/// A stored key of a concurrency limit.
#[derive(Clone, Debug)]
pub(crate) struct HeldKey {
    pub(crate) bytes: Bytes,
    pub(crate) slot: u16,
    pub(crate) policy: Policy,
}

/// Units to return to the store, or none to renew the row.
#[derive(Debug)]
pub(crate) struct Return {
    pub(crate) key: HeldKey,
    pub(crate) units: u64,
    pub(crate) claim: Claim,
}

/// The answer of the store to a [`Return`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Returned {
    Done,
    /// There was no row, although the process held something.
    Missing,
    Refused(Row),
    /// Whether it was done is not known.
    Lost,
}

/// The resets and the epoch of a row that refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) resets: u32,
    pub(crate) epoch: u64,
}

/// What this process holds, by the stored key.
pub(crate) struct Holdings {
    holder: u64,
    lapse: Duration,
    parts: Box<[Mutex<HashMap<Bytes, Holding, RandomState>>]>,
    hasher: RandomState,
    epochs: AtomicU64,
    runs: AtomicU64,
    /// In microseconds of the clock: until then a call of an earlier epoch may still arrive at the store.
    doubtful_until: AtomicU64,
    clock: Arc<dyn Clock>,
}

struct Holding {
    slot: u16,
    policy: Policy,
    run: u64,
    held: u64,
    /// The units of takes that have no answer yet.
    under_way: u64,
    /// Calls that have no answer yet.
    calls: u32,
    resets: u32,
    epoch: u64,
    base: u64,
    /// An epoch had a base. Calls of it may arrive when the row is gone.
    had_base: bool,
    /// When the epoch began.
    began: Timestamp,
    /// The store's row may be wrong.
    is_doubtful: bool,
    /// The number of connections that were made when the epoch began.
    connections: u64,
}

impl Holdings {
    pub(crate) fn new(lapse: Duration, clock: Arc<dyn Clock>) -> Self {
        let hasher = RandomState::default();
        // The keys of the standard library's hasher are random numbers of the operating system.
        let holder = std::collections::hash_map::RandomState::new().hash_one("holder") >> 11 | 1; // below 2^53
        let part = || Mutex::new(HashMap::with_hasher(hasher.clone()));
        Self {
            holder,
            lapse,
            parts: (0..PARTS).map(|_| part()).collect(),
            hasher,
            epochs: AtomicU64::new(1),
            runs: AtomicU64::new(1),
            doubtful_until: AtomicU64::new(0),
            clock,
        }
    }

    pub(crate) fn lapse(&self) -> Duration {
        self.lapse
    }

    /// Begins a take of `units`. `connections` is how many connections to the store were made so far.
    pub(crate) fn bid(self: &Arc<Self>, key: HeldKey, units: u64, connections: u64) -> (Claim, Bid) {
        let mut part = self.part(&key.bytes);
        let holding = self.holding(&mut part, &key);
        let claim = self.claim(holding, connections);
        holding.under_way = holding.under_way.saturating_add(units);
        let bid = Bid {
            holdings: Arc::clone(self),
            run: holding.run,
            held: holding.held,
            key,
            units,
            claim,
            is_sent: false,
            is_open: true,
        };
        (claim, bid)
    }

    /// Returns units that were taken in a run. Returns the call for that, or `None` if the run is over.
    pub(crate) fn give_back(&self, key: HeldKey, run: u64, units: u64, connections: u64) -> Option<Return> {
        let mut part = self.part(&key.bytes);
        let holding = part.get_mut(&key.bytes).filter(|holding| holding.run == run)?;
        let units = units.min(holding.held);
        holding.held -= units;
        if holding.held == 0 && holding.under_way == 0 && holding.base > 0 {
            holding.is_doubtful = true; // its row can go once a new epoch has no base
        }
        let before = holding.epoch;
        let claim = self.claim(holding, connections);
        let units = if holding.epoch == before { units } else { 0 }; // the new base is without them
        Some(Return { key, units, claim })
    }

    /// Records the answer to a return. Returns the units that the store had forgotten.
    pub(crate) fn record_return(&self, key: &HeldKey, returned: Returned) -> u64 {
        let mut part = self.part(&key.bytes);
        let Some(holding) = part.get_mut(&key.bytes) else { return 0 }; // closed
        holding.calls = holding.calls.saturating_sub(1);
        let mut forgotten = 0;
        match returned {
            Returned::Done => {}
            Returned::Missing => {
                forgotten = holding.held;
                self.doubt(holding);
            }
            Returned::Refused(row) => self.learn(holding, row),
            Returned::Lost => self.doubt(holding),
        }
        tidy(&mut part, &key.bytes);
        forgotten
    }

    /// Returns the keys whose rows have to be renewed or corrected, and forgets keys of which nothing is held and whose
    /// rows have lapsed.
    pub(crate) fn due(&self, connections: u64) -> Vec<HeldKey> {
        let (now, mut due) = (self.clock.now(), Vec::new());
        for part in &self.parts {
            lock(part).retain(|key, holding| {
                let age = now.saturating_since(holding.began);
                let is_empty = holding.held == 0 && holding.under_way == 0 && holding.calls == 0;
                if is_empty && (!holding.is_doubtful || age > 2 * self.lapse) {
                    return false;
                }
                let is_moved = holding.connections != connections;
                if holding.is_doubtful || is_moved || age >= self.lapse / 3 {
                    due.push(HeldKey { bytes: key.clone(), slot: holding.slot, policy: holding.policy.clone() });
                }
                true
            });
        }
        due
    }

    /// Begins an epoch of a key that is due. Returns the call that says so, or `None` if nothing is left to say.
    pub(crate) fn renew(&self, key: HeldKey, connections: u64) -> Option<Return> {
        let mut part = self.part(&key.bytes);
        let holding = part.get_mut(&key.bytes)?;
        holding.is_doubtful = true;
        let claim = self.claim(holding, connections);
        Some(Return { key, units: 0, claim })
    }

    /// Ends all runs. Returns the calls that return everything.
    pub(crate) fn give_all_back(&self) -> Vec<Return> {
        let mut all = Vec::new();
        for part in &self.parts {
            for (key, mut holding) in lock(part).drain() {
                (holding.held, holding.under_way, holding.is_doubtful) = (0, 0, true);
                let claim = self.claim(&mut holding, 0);
                let key = HeldKey { bytes: key, slot: holding.slot, policy: holding.policy };
                all.push(Return { key, units: 0, claim });
            }
        }
        all
    }

    fn part(&self, key: &Bytes) -> MutexGuard<'_, HashMap<Bytes, Holding, RandomState>> {
        let hash = self.hasher.hash_one(key) as usize; // any bits will do
        lock(&self.parts[hash % self.parts.len()])
    }

    fn holding<'a>(
        &self,
        part: &'a mut MutexGuard<'_, HashMap<Bytes, Holding, RandomState>>,
        key: &HeldKey,
    ) -> &'a mut Holding {
        match part.entry(key.bytes.clone()) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Holding {
                slot: key.slot,
                policy: key.policy.clone(),
                run: self.next_run(),
                held: 0,
                under_way: 0,
                calls: 0,
                resets: 0,
                epoch: 0,
                base: 0,
                had_base: false,
                began: Timestamp::default(),
                is_doubtful: true, // so that an epoch begins
                connections: 0,
            }),
        }
    }

    /// Returns the claim of a call, which has to be recorded when it is answered. Begins an epoch if the row may be
    /// wrong or about to lapse.
    fn claim(&self, holding: &mut Holding, connections: u64) -> Claim {
        let now = self.clock.now();
        let is_old = now.saturating_since(holding.began) > self.lapse / 2;
        if holding.is_doubtful || holding.connections != connections || is_old {
            holding.epoch = self.epochs.fetch_add(1, Ordering::Relaxed);
            holding.base = holding.held.saturating_add(holding.under_way).min(BASE_MAX);
            holding.had_base |= holding.base > 0;
            (holding.began, holding.is_doubtful, holding.connections) = (now, false, connections);
        }
        let is_doubtful = now.as_micros() < self.doubtful_until.load(Ordering::Relaxed);
        let keeps_row = is_doubtful || holding.had_base && holding.calls > 0;
        holding.calls = holding.calls.saturating_add(1);
        Claim {
            holder: self.holder,
            resets: holding.resets,
            epoch: holding.epoch,
            base: holding.base,
            lapse_us: self.lapse.as_micros() as u64, // at most a day
            keeps_row,
        }
    }

    fn doubt(&self, holding: &mut Holding) {
        holding.is_doubtful = true;
        let until = self.clock.now().saturating_add(self.lapse);
        self.doubtful_until.fetch_max(until.as_micros(), Ordering::Relaxed);
    }

    /// Learns from the row that refused a call.
    fn learn(&self, holding: &mut Holding, row: Row) {
        if row.resets > holding.resets {
            holding.resets = row.resets;
            (holding.run, holding.held, holding.under_way) = (self.next_run(), 0, 0);
            // Calls of before are refused only while the row is there.
            (holding.is_doubtful, holding.had_base) = (true, true);
        }
    }

    fn next_run(&self) -> u64 {
        self.runs.fetch_add(1, Ordering::Relaxed)
    }
}

/// Forgets a key of which nothing is held, unless its row may be wrong.
fn tidy(part: &mut HashMap<Bytes, Holding, RandomState>, key: &Bytes) {
    let is_over =
        |holding: &Holding| holding.held == 0 && holding.under_way == 0 && holding.calls == 0 && !holding.is_doubtful;
    if part.get(key).is_some_and(is_over) {
        part.remove(key);
    }
}

/// A take that is under way. If it is dropped before its answer is recorded, and it was sent, its outcome is unknown.
pub(crate) struct Bid {
    holdings: Arc<Holdings>,
    key: HeldKey,
    units: u64,
    claim: Claim,
    run: u64,
    /// The units that were held when it began.
    held: u64,
    is_sent: bool,
    is_open: bool,
}

/// What a take came to.
#[derive(Debug)]
pub(crate) struct Landed {
    /// The run of the units that were taken.
    pub(crate) run: u64,
    /// Units of a new epoch's base that were not taken.
    pub(crate) surplus: Option<Return>,
    /// The units that the store had forgotten.
    pub(crate) forgotten: u64,
}

impl Bid {
    /// Records that the call is sent now.
    pub(crate) fn record_sending(&mut self) {
        self.is_sent = true;
    }

    /// Records that `taken` units were taken. `is_missing` says that the store had no row of this process before.
    pub(crate) fn land(mut self, taken: u64, is_missing: bool) -> Landed {
        self.is_open = false;
        let mut landed = Landed { run: self.run, surplus: None, forgotten: 0 };
        let holdings = Arc::clone(&self.holdings);
        let mut part = holdings.part(&self.key.bytes);
        let Some(holding) = part.get_mut(&self.key.bytes) else { return landed }; // closed
        holding.calls = holding.calls.saturating_sub(1);
        if holding.run == self.run {
            holding.under_way = holding.under_way.saturating_sub(self.units);
            holding.held = holding.held.saturating_add(taken);
            if is_missing && self.is_sent && (self.held > 0 || self.claim.base > 0) {
                // Without a base, a later return may have removed the row before this take arrived.
                landed.forgotten = if self.claim.base > 0 { self.held } else { 0 };
                holdings.doubt(holding);
            } else if holding.epoch != self.claim.epoch && taken < self.units && !holding.is_doubtful {
                let (before, connections) = (holding.epoch, holding.connections);
                let claim = holdings.claim(holding, connections);
                let units = if holding.epoch == before { self.units - taken } else { 0 };
                landed.surplus = Some(Return { key: self.key.clone(), units, claim });
            }
        }
        tidy(&mut part, &self.key.bytes);
        landed
    }

    /// Records that the row refused the call, which did nothing.
    pub(crate) fn refused(mut self, row: Row) -> Landed {
        if let Some(holding) = self.holdings.part(&self.key.bytes).get_mut(&self.key.bytes) {
            self.holdings.learn(holding, row);
        }
        self.is_sent = false;
        self.land(0, false)
    }
}

impl Drop for Bid {
    fn drop(&mut self) {
        if !self.is_open {
            return;
        }
        let mut part = self.holdings.part(&self.key.bytes);
        let Some(holding) = part.get_mut(&self.key.bytes) else { return }; // closed
        holding.calls = holding.calls.saturating_sub(1);
        if holding.run == self.run {
            holding.under_way = holding.under_way.saturating_sub(self.units);
        }
        if self.is_sent {
            self.holdings.doubt(holding);
        } else if holding.epoch != self.claim.epoch {
            holding.is_doubtful = true; // its units are part of the base
        }
        tidy(&mut part, &self.key.bytes);
    }
}
