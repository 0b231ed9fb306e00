//! The units of concurrency limits that this process holds, if a store counts them.
//!
//! The store has a row for each process that holds units of a key: a *holder*. The row lapses unless the process renews
//! it, so a process that dies loses its places when its rows lapse. If this table and the store differ about what this
//! process holds, the table is right, because answers and calls can be lost. So each call carries a [`Claim`], with
//! which the store corrects its row.
//!
//! # Epochs
//!
//! An *epoch* of a key is a number of this process that only grows. The *base* of an epoch is the number of units that
//! the process held, or may have been granted, when the epoch began. The store refuses a call of an earlier epoch than
//! the row's epoch. The first call of a later epoch that arrives sets the row to the base, and then takes or returns
//! its units. A new epoch begins when a call has an unknown outcome, when a connection has ended, after a reconnect,
//! and with each renewal. So after the next call the row is correct, even if earlier calls were lost. A take that is
//! made while there is no connection is sent over the next one, perhaps to a server that has lost the row. So the end
//! of a connection begins an epoch, too. Otherwise the take would not report the units that are held, and their return
//! would then subtract the units that were taken.
//!
//! If a take is under way when an epoch begins, the units of the take are part of the base, because the store may
//! grant them. If the store denies the take, the process returns these units as soon as it learns of the denial.
//!
//! # Calls that are not sent
//!
//! A take may be given up before it is sent, for example while the store is down. If no call of its key was sent, the
//! store counts no units for the key, so there is nothing to correct. Such a key is forgotten at once. Otherwise
//! anybody who makes up keys while the store is down could fill the table.
//!
//! # Resets
//!
//! A reset sets all rows of a key to 0 and counts the resets in each row. A process learns of the reset when the store
//! refuses its next call. The places that the process took before the reset belong to an earlier *run*. When such a
//! place ends, no units are returned to the store.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;

use crate::base::random::{self, Hasher};
use crate::base::sync::{Mutex, MutexGuard, lock};
use crate::base::time::Timestamp;
use crate::clock::Clock;
use crate::limiter::Standing;
use crate::policy::Policy;

/// The number of parts of the table, each of which has a lock.
const PARTS: usize = 64;

/// The maximum number of units of a base: stores calculate with numbers that are exact up to 2^53.
const BASE_MAX: u64 = 1 << 44;

/// The claim of this process in a call about a key's units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claim {
    /// The number of the process: from 1 to 2^53.
    pub(crate) holder: u64,
    /// The number of resets of the key that the process knows of.
    pub(crate) resets: u32,
    pub(crate) epoch: u64,
    /// The units that the process held, or may have been granted, when the epoch began.
    pub(crate) base: u64,
    /// The time after which the row lapses.
    pub(crate) lapse_us: u64,
    /// True if the row has to stay until it lapses, even if it has no units.
    pub(crate) keeps_row: bool,
    /// The position of the charge relative to the requests in line.
    pub(crate) standing: Standing,
}

/// A stored key of a concurrency limit.
#[derive(Clone, Debug)]
pub(crate) struct HeldKey {
    pub(crate) bytes: Bytes,
    pub(crate) slot: u16,
    pub(crate) policy: Policy,
}

/// Units to return to the store, or 0 units to renew the row.
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
    /// There was no row, although the process held units.
    Missing,
    Refused(CurrentRow),
    /// It is unknown whether the store executed the call.
    Lost,
}

/// The resets and the epoch of a row that refused a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CurrentRow {
    pub(crate) resets: u32,
    pub(crate) epoch: u64,
}

/// The units that this process holds, by the stored key.
pub(crate) struct Holdings {
    holder: u64,
    lapse: Duration,
    parts: Box<[Mutex<HashMap<Bytes, Holding, Hasher>>]>,
    hasher: Hasher,
    epochs: AtomicU64,
    runs: AtomicU64,
    /// The instant, in microseconds of the clock, until which a call of an earlier epoch may still reach the store.
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
    /// The number of calls that have no answer yet.
    calls: u32,
    resets: u32,
    epoch: Epoch,
    /// True if an epoch had a base. If a late call of that epoch found no row, the store would count the base
    /// again. So the row is kept while calls are under way.
    had_base: bool,
    /// The store's row may be wrong, so the next call begins an epoch.
    is_doubtful: bool,
    /// A call was sent, and has ended. Before that, the store counts no units that could be wrong.
    was_sent: bool,
}

/// An epoch of a key.
#[derive(Clone, Copy, Default)]
struct Epoch {
    number: u64,
    base: u64,
    began: Timestamp,
    /// The number of connections to the store that had been made when the epoch began, plus the number of those that
    /// had ended.
    connection_changes: u64,
}

impl Holdings {
    pub(crate) fn new(lapse: Duration, clock: Arc<dyn Clock>) -> Self {
        let hasher = random::hasher();
        let holder = random::secret() >> 11 | 1; // below 2^53
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

    /// Returns the number of this process.
    pub(crate) fn holder(&self) -> u64 {
        self.holder
    }

    pub(crate) fn lapse(&self) -> Duration {
        self.lapse
    }

    /// Begins a take of `units`. `connection_changes` is the number of connections to the store made so far, plus the
    /// number of those that have ended.
    pub(crate) fn bid(self: &Arc<Self>, key: HeldKey, units: u64, connection_changes: u64) -> (Claim, Bid) {
        let mut part = self.part(&key.bytes);
        let holding = self.holding(&mut part, &key);
        let before = holding.epoch.number;
        let claim = self.claim(holding, connection_changes);
        holding.under_way = holding.under_way.saturating_add(units);
        let bid = Bid {
            holdings: Arc::clone(self),
            run: holding.run,
            held: holding.held,
            key,
            units,
            claim,
            begins_epoch: claim.epoch != before,
            is_sent: false,
            is_open: true,
        };
        (claim, bid)
    }

    /// Subtracts units of a run from the units that this process holds. Returns the call that returns
    /// the units to the store, or `None` if the run is over.
    pub(crate) fn return_units(&self, key: HeldKey, run: u64, units: u64, connection_changes: u64) -> Option<Return> {
        let mut part = self.part(&key.bytes);
        let holding = part.get_mut(&key.bytes).filter(|holding| holding.run == run)?;
        let units = units.min(holding.held);
        holding.held -= units;
        if holding.held == 0 && holding.under_way == 0 && holding.epoch.base > 0 {
            holding.is_doubtful = true; // its row can go once a new epoch has no base
        }
        let before = holding.epoch.number;
        let claim = self.claim(holding, connection_changes);
        let units = if holding.epoch.number == before { units } else { 0 }; // the new base is without them
        Some(Return { key, units, claim })
    }

    /// Records the answer to a return. Returns the units that the store had forgotten.
    pub(crate) fn record_return(&self, key: &HeldKey, returned: Returned) -> u64 {
        let mut part = self.part(&key.bytes);
        let Some(holding) = part.get_mut(&key.bytes) else { return 0 }; // closed
        holding.calls = holding.calls.saturating_sub(1);
        holding.was_sent = true;
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

    /// Returns the keys whose rows have to be renewed or corrected. Forgets keys that have neither held units
    /// nor calls under way. A key whose row may be wrong is forgotten only after the row has surely lapsed.
    pub(crate) fn due(&self, connection_changes: u64) -> Vec<HeldKey> {
        let (now, mut due) = (self.clock.now(), Vec::new());
        for part in &self.parts {
            lock(part).retain(|key, holding| {
                let age = now.saturating_since(holding.epoch.began);
                if holding.is_idle() && (!holding.is_doubtful || age > 2 * self.lapse) {
                    return false;
                }
                let is_moved = holding.epoch.connection_changes != connection_changes;
                if holding.is_doubtful || is_moved || age >= self.lapse / 3 {
                    due.push(HeldKey { bytes: key.clone(), slot: holding.slot, policy: holding.policy.clone() });
                }
                true
            });
        }
        due
    }

    /// Begins a new epoch of a key that [`Holdings::due`] returned. Returns the call that reports the epoch to the
    /// store, or `None` if the table no longer has the key.
    pub(crate) fn renew(&self, key: HeldKey, connection_changes: u64) -> Option<Return> {
        let mut part = self.part(&key.bytes);
        let holding = part.get_mut(&key.bytes)?;
        holding.is_doubtful = true;
        let claim = self.claim(holding, connection_changes);
        Some(Return { key, units: 0, claim })
    }

    /// Returns the call which says that no request of this process waits in line for units of a key any more.
    pub(crate) fn leave_line(&self, key: HeldKey, connection_changes: u64) -> Return {
        let mut part = self.part(&key.bytes);
        let claim = self.claim(self.holding(&mut part, &key), connection_changes);
        Return { key, units: 0, claim: Claim { standing: Standing::Left, ..claim } }
    }

    /// Ends all runs. Returns the calls that return all units.
    pub(crate) fn return_all(&self) -> Vec<Return> {
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

    fn part(&self, key: &Bytes) -> MutexGuard<'_, HashMap<Bytes, Holding, Hasher>> {
        let hash = self.hasher.hash_one(key) as usize; // any bits will do
        lock(&self.parts[hash % self.parts.len()])
    }

    fn holding<'a>(
        &self,
        part: &'a mut MutexGuard<'_, HashMap<Bytes, Holding, Hasher>>,
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
                epoch: Epoch::default(),
                had_base: false,
                is_doubtful: true, // so that an epoch begins
                was_sent: false,
            }),
        }
    }

    /// Returns the claim of a call, and counts the call until its answer is recorded. Begins an epoch if the row
    /// may be wrong or about to lapse.
    fn claim(&self, holding: &mut Holding, connection_changes: u64) -> Claim {
        let now = self.clock.now();
        let is_old = now.saturating_since(holding.epoch.began) > self.lapse / 2;
        if holding.is_doubtful || holding.epoch.connection_changes != connection_changes || is_old {
            let number = self.epochs.fetch_add(1, Ordering::Relaxed);
            let base = holding.held.saturating_add(holding.under_way).min(BASE_MAX);
            holding.epoch = Epoch { number, base, began: now, connection_changes };
            holding.had_base |= base > 0;
            holding.is_doubtful = false;
        }
        let is_doubtful = now.as_micros() < self.doubtful_until.load(Ordering::Relaxed);
        let keeps_row = is_doubtful || holding.had_base && holding.calls > 0;
        holding.calls = holding.calls.saturating_add(1);
        Claim {
            holder: self.holder,
            resets: holding.resets,
            epoch: holding.epoch.number,
            base: holding.epoch.base,
            lapse_us: self.lapse.as_micros() as u64, // at most a day
            keeps_row,
            standing: Standing::Newcomer,
        }
    }

    fn doubt(&self, holding: &mut Holding) {
        holding.is_doubtful = true;
        let until = self.clock.now().saturating_add(self.lapse);
        self.doubtful_until.fetch_max(until.as_micros(), Ordering::Relaxed);
    }

    /// Compares the number of resets in a row that refused a call with the number that this process knows. If the row's
    /// number is larger, adopts the row's number and begins a new run, which holds no units.
    fn learn(&self, holding: &mut Holding, row: CurrentRow) {
        if row.resets > holding.resets {
            holding.resets = row.resets;
            (holding.run, holding.held, holding.under_way) = (self.next_run(), 0, 0);
            // Begins an epoch and keeps the row, because the store refuses calls of earlier epochs only while the
            // row exists.
            (holding.is_doubtful, holding.had_base) = (true, true);
        }
    }

    fn next_run(&self) -> u64 {
        self.runs.fetch_add(1, Ordering::Relaxed)
    }
}

impl Holding {
    /// Returns `true` if no units are held and no call is under way.
    fn is_idle(&self) -> bool {
        self.held == 0 && self.under_way == 0 && self.calls == 0
    }
}

/// Forgets a key without held units, unless its row may be wrong or the key was reset. A key that was reset is
/// left to [`Holdings::due`], because its row may stay for a while and refuses calls that do not know of the
/// reset.
fn tidy(part: &mut HashMap<Bytes, Holding, Hasher>, key: &Bytes) {
    let is_right = |holding: &Holding| !holding.was_sent || !holding.is_doubtful && holding.resets == 0;
    if part.get(key).is_some_and(|holding| holding.is_idle() && is_right(holding)) {
        part.remove(key);
    }
}

/// A take that is under way. If a take was sent, and is dropped before its answer is recorded, its outcome is
/// unknown.
pub(crate) struct Bid {
    holdings: Arc<Holdings>,
    key: HeldKey,
    units: u64,
    claim: Claim,
    /// The epoch began with this call, so no other call can have reported it to the store.
    begins_epoch: bool,
    run: u64,
    /// The units that were held when the take began.
    held: u64,
    is_sent: bool,
    is_open: bool,
}

/// The record of a take that was answered.
#[derive(Debug)]
pub(crate) struct RecordedTake {
    /// The run of the units that were taken.
    pub(crate) run: u64,
    /// The return of units that a newer epoch's base contains although they were not taken.
    pub(crate) surplus: Option<Return>,
    /// The units that the store had forgotten.
    pub(crate) forgotten: u64,
}

impl Bid {
    /// Records that the call is sent now.
    pub(crate) fn record_sending(&mut self) {
        self.is_sent = true;
    }

    /// Records that `taken` units were taken. `is_missing` is true if the store had no row of this process before.
    pub(crate) fn land(mut self, taken: u64, is_missing: bool) -> RecordedTake {
        self.is_open = false;
        let mut landed = RecordedTake { run: self.run, surplus: None, forgotten: 0 };
        let holdings = Arc::clone(&self.holdings);
        let mut part = holdings.part(&self.key.bytes);
        let Some(holding) = part.get_mut(&self.key.bytes) else { return landed }; // closed
        holding.calls = holding.calls.saturating_sub(1);
        holding.was_sent |= self.is_sent;
        if holding.run == self.run {
            holding.under_way = holding.under_way.saturating_sub(self.units);
            holding.held = holding.held.saturating_add(taken);
            if is_missing && self.is_sent && (self.held > 0 || self.claim.base > 0) {
                // If the call has no base, a missing row does not show that the store forgot units: a return that was
                // sent after this take may have arrived first and removed the row.
                landed.forgotten = if self.claim.base > 0 { self.held } else { 0 };
                holdings.doubt(holding);
            } else if holding.epoch.number != self.claim.epoch && taken < self.units && !holding.is_doubtful {
                let Epoch { number: before, connection_changes, .. } = holding.epoch;
                let claim = holdings.claim(holding, connection_changes);
                let units = if holding.epoch.number == before { self.units - taken } else { 0 };
                landed.surplus = Some(Return { key: self.key.clone(), units, claim });
            } else if self.begins_epoch && !self.is_sent && holding.epoch.number == self.claim.epoch {
                holding.is_doubtful = true; // the store does not know the epoch
            }
        }
        tidy(&mut part, &self.key.bytes);
        landed
    }

    /// Records that the row refused the call, which did nothing.
    pub(crate) fn refused(mut self, row: CurrentRow) -> RecordedTake {
        if let Some(holding) = self.holdings.part(&self.key.bytes).get_mut(&self.key.bytes) {
            holding.was_sent = true;
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
            holding.was_sent = true;
            self.holdings.doubt(holding);
        } else if self.begins_epoch || holding.epoch.number != self.claim.epoch {
            holding.is_doubtful = true; // the store does not know the epoch, or its units are part of the base
        }
        tidy(&mut part, &self.key.bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::TestCaseError;

    use super::super::backend::ROW_MISSING;
    use super::super::rows::KeyRows;
    use super::*;
    use crate::algorithm::TakeMode;
    use crate::algorithm::places::Places;
    use crate::base::sampling::config;
    use crate::clock::ManualClock;
    use crate::quota::Quota;

    const LAPSE: Duration = Duration::from_secs(30);
    const LIMIT: u64 = 3;
    const PROCESSES: usize = 3;

    /// A store with one key.
    #[derive(Default)]
    struct Store {
        rows: KeyRows,
        resets: u32,
    }

    impl Store {
        /// Returns the units that were taken, and whether the row was missing.
        fn take(&mut self, claim: &Claim, units: u64, now: Timestamp) -> Result<(u64, bool), CurrentRow> {
            let now = now.as_micros();
            if let Some(row) = self.rows.refuses(claim, now) {
                return Err(row);
            }
            let places = Places::new(Quota::concurrent(LIMIT).spec());
            let charged = self.rows.charge(places, claim, (units, TakeMode::IfAllowed), false, now);
            if let Some(rows) = charged.if_taken.or(charged.otherwise) {
                self.rows = rows;
            }
            let receipt = charged.decision.receipt();
            Ok((receipt.units(), receipt.at_us() == ROW_MISSING))
        }

        fn return_units(&mut self, claim: &Claim, units: u64, now: Timestamp) -> Returned {
            let now = now.as_micros();
            if let Some(row) = self.rows.refuses(claim, now) {
                return Returned::Refused(row);
            }
            let (rows, is_missing) = self.rows.return_units(claim, units, now);
            self.rows = rows;
            if is_missing { Returned::Missing } else { Returned::Done }
        }

        fn reset(&mut self, now: Timestamp) {
            self.resets += 1;
            self.rows = self.rows.reset(now.as_micros());
        }

        fn units(&self, holder: u64) -> u64 {
            self.rows.held.iter().filter(|row| row.holder == holder).map(|row| row.units).sum()
        }
    }

    enum Call {
        Take(Option<Box<Bid>>),
        Return(Return),
    }

    /// A call on its way: of a process, with its claim and its units.
    struct Wire {
        process: usize,
        claim: Claim,
        units: u64,
        call: Call,
    }

    /// A place that a process was granted: its run, its units, and how often the key was reset when it was taken.
    struct Granted {
        process: usize,
        run: u64,
        units: u64,
        resets: u32,
    }

    struct World {
        clock: ManualClock,
        store: Store,
        processes: Vec<Arc<Holdings>>,
        /// Takes that are not sent yet.
        waiting: Vec<Wire>,
        wires: Vec<Wire>,
        /// Calls that were given up, and that may still reach the store.
        late: Vec<(Claim, u64, bool)>,
        granted: Vec<Granted>,
        key: HeldKey,
        connections: u64,
    }

    impl World {
        fn new() -> Self {
            let clock = ManualClock::at(Timestamp::from_micros(1_000_000_000));
            let process = |_| Arc::new(Holdings::new(LAPSE, Arc::new(clock.clone())));
            let policy = Policy::new("places", Quota::concurrent(LIMIT)).unwrap();
            Self {
                store: Store::default(),
                processes: (0..PROCESSES).map(process).collect(),
                waiting: Vec::new(),
                wires: Vec::new(),
                late: Vec::new(),
                granted: Vec::new(),
                key: HeldKey { bytes: Bytes::from_static(b"key"), slot: 0, policy },
                connections: 1,
                clock,
            }
        }

        fn now(&self) -> Timestamp {
            self.clock.now()
        }

        fn take(&mut self, process: usize, units: u64) {
            self.begin_take(process, units);
            self.send_take(self.waiting.len() - 1);
        }

        fn begin_take(&mut self, process: usize, units: u64) {
            let (claim, bid) = self.processes[process].bid(self.key.clone(), units, self.connections);
            self.waiting.push(Wire { process, claim, units, call: Call::Take(Some(Box::new(bid))) });
        }

        fn send_take(&mut self, at: usize) {
            let mut wire = self.waiting.swap_remove(at);
            if let Call::Take(Some(bid)) = &mut wire.call {
                bid.record_sending();
            }
            self.wires.push(wire);
        }

        /// Answers a take with a remembered denial, without the store.
        fn repeat_denial(&mut self, at: usize) {
            let Wire { process, call, .. } = self.waiting.swap_remove(at);
            let Call::Take(Some(bid)) = call else { return };
            if let Some(surplus) = bid.land(0, false).surplus {
                self.send(process, surplus);
            }
        }

        fn send(&mut self, process: usize, back: Return) {
            self.wires.push(Wire { process, claim: back.claim, units: back.units, call: Call::Return(back) });
        }

        fn return_units(&mut self, place: usize) {
            let Granted { process, run, units, .. } = self.granted.swap_remove(place);
            if let Some(back) = self.processes[process].return_units(self.key.clone(), run, units, self.connections) {
                self.send(process, back);
            }
        }

        fn tick(&mut self, process: usize) {
            for key in self.processes[process].due(self.connections) {
                if let Some(back) = self.processes[process].renew(key, self.connections) {
                    self.send(process, back);
                }
            }
        }

        /// Has a call reach the store, and its answer the process unless it is lost.
        fn arrive(&mut self, at: usize, is_lost: bool) {
            let Wire { process, claim, units, call } = self.wires.remove(at);
            let now = self.now();
            match call {
                Call::Take(bid) => {
                    let answer = self.store.take(&claim, units, now);
                    let Some(bid) = bid.filter(|_| !is_lost) else { return };
                    let (landed, taken) = match answer {
                        Ok((taken, is_missing)) => (bid.land(taken, is_missing), taken),
                        Err(row) => (bid.refused(row), 0),
                    };
                    assert_eq!(landed.forgotten, 0, "nothing was lost");
                    if let Some(surplus) = landed.surplus {
                        self.send(process, surplus);
                    }
                    if taken > 0 {
                        let resets = self.store.resets;
                        self.granted.push(Granted { process, run: landed.run, units: taken, resets });
                    }
                }
                Call::Return(back) => {
                    let returned = self.store.return_units(&claim, units, now);
                    let returned = if is_lost { Returned::Lost } else { returned };
                    self.processes[process].record_return(&back.key, returned);
                }
            }
        }

        /// Gives a call up. It may reach the store later.
        fn give_up(&mut self, at: usize) {
            let Wire { process, claim, units, call } = self.wires.remove(at);
            self.late.push((claim, units, matches!(call, Call::Take(_))));
            match call {
                Call::Take(bid) => drop(bid),
                Call::Return(back) => {
                    self.processes[process].record_return(&back.key, Returned::Lost);
                }
            }
        }

        fn arrive_late(&mut self, at: usize) {
            let (claim, units, is_take) = self.late.swap_remove(at);
            let now = self.now();
            if is_take {
                let _ = self.store.take(&claim, units, now);
            } else {
                self.store.return_units(&claim, units, now);
            }
        }

        /// Returns the units that were granted since the last reset.
        fn granted(&self, process: Option<usize>) -> u64 {
            let counts = |place: &&Granted| {
                place.resets == self.store.resets && process.is_none_or(|process| place.process == process)
            };
            self.granted.iter().filter(counts).map(|place| place.units).sum()
        }

        /// Has all calls arrive, and the processes renew, until nothing is left to do.
        fn settle(&mut self) {
            for _ in 0..4 {
                while !self.wires.is_empty() {
                    self.arrive(0, false);
                }
                self.clock.advance(LAPSE / 3);
                (0..PROCESSES).for_each(|process| self.tick(process));
            }
            while !self.wires.is_empty() {
                self.arrive(0, false);
            }
        }
    }

    fn play(steps: Vec<(u8, usize, usize)>) -> Result<(), TestCaseError> {
        let mut world = World::new();
        let pick = |of: usize, number: usize| (of > 0).then(|| number % of);
        for (what, a, b) in steps {
            match what {
                0..=5 => world.take(a % PROCESSES, 1 + b as u64 % 2),
                6..=9 => drop(pick(world.granted.len(), a).map(|at| world.return_units(at))),
                10..=19 => drop(pick(world.wires.len(), a).map(|at| world.arrive(at, false))),
                20..=21 => drop(pick(world.wires.len(), a).map(|at| world.arrive(at, true))),
                22..=23 => drop(pick(world.wires.len(), a).map(|at| world.give_up(at))),
                24..=25 => drop(pick(world.late.len(), a).map(|at| world.arrive_late(at))),
                26..=28 => world.tick(a % PROCESSES),
                // The whole schedule takes less than the time in which rows lapse.
                29..=30 => world.clock.advance(LAPSE / 200),
                31 if b % 4 == 0 => world.store.reset(world.now()),
                31..=33 => world.connections += 1,
                34..=36 => world.begin_take(a % PROCESSES, 1 + b as u64 % 2),
                37..=38 => drop(pick(world.waiting.len(), a).map(|at| world.send_take(at))),
                39 => drop(pick(world.waiting.len(), a).map(|at| world.waiting.swap_remove(at))),
                _ => drop(pick(world.waiting.len(), a).map(|at| world.repeat_denial(at))),
            }
            let granted = world.granted(None);
            prop_assert!(granted <= LIMIT, "{granted} of {LIMIT} are held");
        }
        world.waiting.clear();
        while let Some(at) = pick(world.late.len(), 0) {
            world.arrive_late(at);
        }
        world.settle();
        for (at, process) in world.processes.iter().enumerate() {
            let granted = world.granted(Some(at));
            prop_assert_eq!(world.store.units(process.holder), granted, "of process {}", at);
        }
        while !world.granted.is_empty() {
            world.return_units(0);
        }
        world.settle();
        prop_assert!(world.store.rows.held.iter().all(|row| row.units == 0));
        world.clock.advance(3 * LAPSE);
        for process in &world.processes {
            prop_assert!(process.due(world.connections).is_empty());
            prop_assert!(process.parts.iter().all(|part| lock(part).is_empty()), "a key is not forgotten");
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(config(20_000))]

        /// Calls and answers of three processes are lost, late and in any order, or not sent, keys are reset, and
        /// connections made.
        #[test]
        fn lost_and_late_calls_lose_no_units_and_grant_none_twice(
            steps in prop::collection::vec((0..41_u8, 0..100_usize, 0..100_usize), 1..150),
        ) {
            play(steps)?;
        }
    }

    /// The store is down, and each request has a key of its own.
    #[test]
    fn keys_of_takes_that_were_not_sent_are_forgotten_at_once() {
        let mut world = World::new();
        for number in 0..10_000_u32 {
            world.key.bytes = Bytes::copy_from_slice(&number.to_be_bytes());
            world.begin_take(0, 1);
            if number % 2 == 0 {
                world.begin_take(0, 1);
            }
            world.waiting.clear();
        }
        let kept: usize = world.processes[0].parts.iter().map(|part| lock(part).len()).sum();
        assert_eq!(kept, 0, "keys that the store never saw are in the table");
        assert!(world.processes[0].due(world.connections).is_empty());
    }

    /// The store may have granted the units of the first take, so the key is corrected.
    #[test]
    fn key_of_a_lost_take_is_kept_if_another_take_is_not_sent() {
        let mut world = World::new();
        world.begin_take(0, 1);
        world.take(0, 2);
        world.waiting.clear();
        let wire = world.wires.remove(0);
        world.store.take(&wire.claim, wire.units, world.now()).unwrap();
        drop(wire);
        world.settle();
        assert_eq!(world.store.units(world.processes[0].holder), 0);
    }

    /// A remembered denial answers the take that would have corrected the row.
    #[test]
    fn row_of_a_lost_take_is_corrected_after_a_repeated_denial() {
        let mut world = World::new();
        world.take(0, 2);
        world.arrive(0, true);
        world.begin_take(0, 1);
        world.repeat_denial(0);
        world.settle();
        assert_eq!(world.store.units(world.processes[0].holder), 0);
    }

    #[test]
    fn killed_process_is_forgotten_when_its_row_lapses() {
        let mut world = World::new();
        world.take(0, 2);
        world.arrive(0, false);
        world.clock.advance(LAPSE - Duration::from_micros(1));
        world.take(1, 2);
        world.arrive(0, false);
        assert_eq!(world.granted(Some(1)), 0);
        world.clock.advance(Duration::from_micros(1));
        world.take(1, 2);
        world.arrive(0, false);
        assert_eq!(world.granted(Some(1)), 2);
    }

    #[test]
    fn stopped_process_takes_its_places_back_and_says_so() {
        let mut world = World::new();
        world.take(0, 2);
        world.arrive(0, false);
        world.clock.advance(2 * LAPSE);
        let key = world.processes[0].due(world.connections).remove(0);
        let back = world.processes[0].renew(key.clone(), world.connections).unwrap();
        let returned = world.store.return_units(&back.claim, back.units, world.now());
        assert_eq!((returned, world.processes[0].record_return(&key, returned)), (Returned::Missing, 2));
        assert_eq!(world.store.units(world.processes[0].holder), 2);
    }
}
