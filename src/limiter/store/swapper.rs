//! Takes the requests of a flight to the store: decides them on a copy, swaps, and decides again after a conflict.
//!
//! # Lost answers
//!
//! If a swap has no answer, the same swap is sent again. If the current value is the expected one, it is made now. If
//! it is the limiter's own, the first one was made. Otherwise the value names the versions before it: if the own one is
//! among them, the swap was made; if the expected one is, followed by another one, it was not. If neither is, nothing
//! is known, and the requests fail as a timeout.
//!
//! If a value names all versions since the key had none, and neither is among them, the swap was not made, or the value
//! was removed since. A swap that only removes values has had its effect in both cases, if the values that were only
//! looked at are still the expected ones. Charges are decided again: nothing is left of what they took before. Refunds
//! and returns are not, because what they gave back is not known.
//!
//! A swap that expects a version is made at most once. One of a key that has no value can be made late once more, when
//! the key has none again. Its charge then counts although no request has it, until it drains or its row lapses.

use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::BuildHasher;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;

use super::error::StoreError;
use super::groups::{Fly, Waiting};
use super::known::Known;
use super::store_time::{StoreTime, Trip};
use super::value::Quotas;
use super::working_copy::{Answer, Evidence, Verb, WorkingCopy, evidence};
use super::{Change, NotSwapped, Store, Value, Version};
use crate::event::StoreErrorKind;
use crate::limiter::remote::{Breaker, Due, Events, hand_over};
use crate::random;
use crate::time::Timestamp;

/// The most times that one swap is sent.
const SENDS: u32 = 4;

/// The first and the longest pause before a swap is tried again.
const PAUSE: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(8)];

/// The longest rest of a process for each conflict that it had.
const REST: Duration = Duration::from_millis(2);

/// The first and the longest pause before a store that is believed dead is asked again.
const PROBE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// The failures in a row after which the store is believed dead.
const FAILURES: u32 = 5;

pub(super) struct Swapper<S: Store>(Arc<Inner<S>>);

struct Inner<S: Store> {
    store: S,
    name: String,
    time: StoreTime,
    known: Known,
    quotas: Quotas,
    breaker: Breaker,
    events: Events,
    deadline: Duration,
    answered: AtomicU64,
    random: Random,
    /// A key that has no value, for probes.
    probe: Arc<str>,
    runtime: Handle,
}

/// The result of a swap.
enum Outcome {
    /// It was made. The current time is known unless its answer was lost.
    Made { is_away: bool },
    /// Nothing was changed, and these are the current values.
    Conflict(Vec<Option<Value>>),
}

impl<S: Store> Swapper<S> {
    pub(super) fn new(
        store: S,
        time: StoreTime,
        events: Events,
        deadline: Duration,
        probe: Arc<str>,
        runtime: Handle,
    ) -> Self {
        Self(Arc::new(Inner {
            name: store.name(),
            store,
            time,
            known: Known::new(),
            quotas: Quotas::default(),
            breaker: Breaker::new(FAILURES),
            events,
            deadline,
            answered: AtomicU64::new(0),
            random: Random::new(),
            probe,
            runtime,
        }))
    }

    pub(super) fn events(&self) -> &Events {
        &self.0.events
    }

    /// Returns the error of a check that would fail at once, because the store is believed dead.
    pub(super) fn error_at_once(&self) -> Option<StoreError> {
        self.0.breaker.is_open().then(|| self.0.unavailable())
    }
}

impl<S: Store> Fly for Swapper<S> {
    async fn fly(&self, batch: Vec<Waiting>) -> Duration {
        let inner = &self.0;
        let mut riders = Vec::with_capacity(batch.len());
        // A call whose caller has gone is not sent, and must not be noted as sent.
        for mut rider in batch.into_iter().filter(|rider| !rider.receiver.is_gone()) {
            match rider.receiver.known() {
                Some(answer) => hand_over(rider.receiver, Ok(answer)),
                None => riders.push(rider),
            }
        }
        match inner.decide(&mut riders).await {
            Ok(conflicts) => inner.rest(conflicts),
            Err(error) => {
                inner.events.report_failure(error.kind(), &error);
                riders.into_iter().for_each(|rider| hand_over(rider.receiver, Err(error.clone())));
                Duration::ZERO
            }
        }
    }

    fn answered(&self) -> u64 {
        self.0.answered.load(Ordering::Relaxed)
    }
}

impl<S: Store> Inner<S> {
    /// Decides the requests, and answers them. Returns the number of conflicts with other processes.
    ///
    /// # Errors
    /// Why the store did not decide. No request was answered then.
    async fn decide(self: &Arc<Self>, riders: &mut Vec<Waiting>) -> Result<u32, StoreError> {
        if riders.is_empty() {
            return Ok(0);
        }
        if self.breaker.is_open() {
            return Err(self.unavailable());
        }
        let due = Due::after(self.deadline);
        let mut copy = WorkingCopy::new(riders.iter().map(|rider| &rider.request), &self.quotas, &self.known);
        let looks = riders.iter().all(|rider| rider.request.verb == Verb::Peek);
        // Whether the values are the store's own, and no guess.
        let mut is_current = false;
        let (mut conflicts, mut has_undone) = (0, false);
        loop {
            let now = match self.time.now() {
                Some(now) if is_current || !looks => now,
                _ => {
                    self.load(&mut copy, due).await?;
                    is_current = true;
                    continue;
                }
            };
            let answers = copy.decide(riders.iter().map(|rider| &rider.request), now.as_micros());
            if !copy.has_changes() {
                if is_current {
                    self.answer(riders, answers);
                    return Ok(conflicts);
                }
                self.load(&mut copy, due).await?;
                is_current = true;
                continue;
            }
            let changes = copy.changes(now.as_micros(), || self.random.version());
            let only_takes = riders.iter().all(|rider| matches!(rider.request.verb, Verb::Take | Verb::Peek));
            match self.swap(&changes, now, due, only_takes).await? {
                Outcome::Made { is_away } => {
                    // The time of the decision was too far away from the store's: it is made again, once.
                    if is_away && !has_undone && self.undo(&mut copy, &changes, due).await? {
                        (has_undone, is_current) = (true, true);
                        continue;
                    }
                    if !is_away || has_undone {
                        copy.note_done(&changes, &self.known);
                    }
                    self.answer(riders, answers);
                    return Ok(conflicts);
                }
                Outcome::Conflict(current) => {
                    // It is tried again at once, because these values are current now. Those who win rest.
                    copy.set_used(&current, &self.known);
                    is_current = true;
                    conflicts += 1;
                    if due.is_over() {
                        let message = format!(
                            "other processes changed the keys {conflicts} times within {:?}: use a longer deadline, or \
                             fewer processes for such hot keys",
                            self.deadline
                        );
                        return Err(StoreError::new(StoreErrorKind::Contended, message));
                    }
                    if conflicts > 1 {
                        tokio::task::yield_now().await; // a store in memory answers at once, and would keep the thread
                    }
                }
            }
            riders.retain(|rider| !rider.receiver.is_gone());
            if riders.is_empty() {
                return Ok(conflicts);
            }
        }
    }

    /// Hands the answers out. Those of callers that have gone come last and in reverse order: their charges are
    /// refunded, and a queue accepts the refund of its newest slot only.
    fn answer(&self, riders: &mut Vec<Waiting>, answers: Vec<Result<Answer, StoreError>>) {
        debug_assert!(answers.len() == riders.len(), "each request was decided");
        self.answered.fetch_add(1, Ordering::Relaxed);
        match answers.iter().find_map(|answer| answer.as_ref().err()) {
            Some(error) => self.events.report_failure(error.kind(), error),
            None => self.events.record_success(),
        }
        let mut gone = Vec::new();
        for (rider, answer) in riders.drain(..).zip(answers) {
            match rider.receiver.is_gone() {
                true => gone.push((rider, answer)),
                false => hand_over(rider.receiver, answer),
            }
        }
        gone.into_iter().rev().for_each(|(rider, answer)| hand_over(rider.receiver, answer));
    }

    /// Loads the current values.
    async fn load(self: &Arc<Self>, copy: &mut WorkingCopy<'_>, due: Due) -> Result<(), StoreError> {
        let keys = copy.keys();
        for sends in 1.. {
            match self.call(self.store.load(&keys), if sends < SENDS { due.half() } else { due }).await {
                Ok((loaded, trip)) => {
                    if loaded.values.len() != keys.len() {
                        return Err(self.miscounted(loaded.values.len(), keys.len()));
                    }
                    self.time.record(trip, loaded.now, None);
                    copy.set_all(&loaded.values, &self.known);
                    return Ok(());
                }
                Err(error) if !may_succeed(&error) || sends >= SENDS || due.is_over() => {
                    return Err(self.record_failure(error));
                }
                Err(_) => self.pause(sends, due).await,
            }
        }
        Err(self.unavailable())
    }

    /// Swaps, and finds out whether it was made if the answer is lost. `only_takes` says that the changes give nothing
    /// back.
    async fn swap(
        self: &Arc<Self>,
        changes: &[Change],
        decided: Timestamp,
        due: Due,
        only_takes: bool,
    ) -> Result<Outcome, StoreError> {
        for sends in 1.. {
            match self.call(self.store.swap(changes), if sends < SENDS { due.half() } else { due }).await {
                Ok((swapped, trip)) => {
                    let is_away = self.time.record(trip, swapped.now, Some(decided));
                    let current = match swapped.result {
                        Ok(()) => return Ok(Outcome::Made { is_away: is_away && sends == 1 }),
                        Err(NotSwapped::Conflict(current)) => current,
                        Err(NotSwapped::Skipped) => return Err(self.miscounted(0, changes.len())),
                    };
                    if current.len() != changes.len() {
                        return Err(self.miscounted(current.len(), changes.len()));
                    }
                    return match if sends == 1 { Evidence::NotMade } else { evidence(changes, &current) } {
                        Evidence::Made => Ok(Outcome::Made { is_away: false }),
                        Evidence::NotMade => Ok(Outcome::Conflict(current)),
                        Evidence::Gone if only_takes => Ok(Outcome::Conflict(current)),
                        Evidence::Gone | Evidence::None => Err(StoreError::new(
                            StoreErrorKind::Timeout,
                            format!(
                                "an answer of {} was lost, and what became of the charge is not known: others have \
                                 written since",
                                self.name
                            ),
                        )),
                    };
                }
                Err(error) if !may_succeed(&error) || sends >= SENDS || due.is_over() => {
                    return Err(self.record_failure(error));
                }
                // At once, before others have written more often than a value remembers.
                Err(_) if sends == 1 => {}
                Err(_) => self.pause(sends, due).await,
            }
        }
        Err(self.unavailable())
    }

    /// Undoes changes that were made. Returns whether they are undone: not if another process has written since.
    ///
    /// # Errors
    /// It is not known. The requests must not be admitted then, because what they took may be free again.
    async fn undo(self: &Arc<Self>, copy: &mut WorkingCopy<'_>, made: &[Change], due: Due) -> Result<bool, StoreError> {
        let now = self.time.now().unwrap_or_default();
        let changes = copy.undoing(made, now.as_micros(), || self.random.version());
        if changes.is_empty() {
            return Ok(false);
        }
        match self.swap(&changes, now, due, false).await? {
            Outcome::Made { .. } => {
                copy.note_done(&changes, &self.known);
                Ok(true)
            }
            Outcome::Conflict(_) => Ok(false),
        }
    }

    /// Waits for an answer of the store until then.
    async fn call<T>(
        self: &Arc<Self>,
        answer: impl Future<Output = Result<T, StoreError>> + Send,
        due: Due,
    ) -> Result<(T, Trip), StoreError> {
        let sent = self.time.own();
        let error = match due.timeout(answer).await {
            Some(Ok(answer)) => {
                self.breaker.record_answer();
                return Ok((answer, Trip { sent, answered: self.time.own() }));
            }
            Some(Err(error)) => error,
            None if due.is_late() => {
                let message = format!("no answer of {} was read in time: this process is too busy", self.name);
                return Err(StoreError::new(StoreErrorKind::Overloaded, message));
            }
            None => StoreError::new(StoreErrorKind::Timeout, format!("no answer of {} in time", self.name)),
        };
        Err(error)
    }

    /// Records that the store did not decide, however often it was asked.
    fn record_failure(self: &Arc<Self>, error: StoreError) -> StoreError {
        if !is_sent_again(&error) {
            self.breaker.record_answer();
        } else if self.breaker.record_silence() {
            self.events.report_down(&self.name, &error);
            self.runtime.spawn(probe(Arc::downgrade(self)));
        }
        error
    }

    /// Waits a random time, which is longer each time.
    async fn pause(&self, tries: u32, due: Due) {
        let most = PAUSE[0].saturating_mul(1 << tries.min(8)).min(PAUSE[1]);
        let part = self.random.next() % 1_024;
        due.pause(most * (part as u32) / 1_024).await; // below 1,024
    }

    /// Returns for how long the next flight waits, so that other processes get at the keys. The first conflict is only
    /// about an old value. Further ones mean that others wait as well, and this process knows the current values now:
    /// without a rest it would win again.
    fn rest(&self, conflicts: u32) -> Duration {
        let most = REST.saturating_mul(conflicts.saturating_sub(1)).min(PAUSE[1]).min(self.deadline / 8);
        most * (self.random.next() % 1_024) as u32 / 1_024 // below 1,024
    }

    fn unavailable(&self) -> StoreError {
        let message = format!("{} does not answer, and is asked again by and by", self.name);
        StoreError::new(StoreErrorKind::Unavailable, message)
    }

    fn miscounted(&self, found: usize, expected: usize) -> StoreError {
        let message = format!("{} returned {found} values for {expected} keys", self.name);
        StoreError::new(StoreErrorKind::Foreign, message)
    }
}

impl<S: Store> Drop for Inner<S> {
    fn drop(&mut self) {
        if self.breaker.is_open() {
            self.events.report_left(&self.name);
        }
    }
}

/// Returns whether the store may answer if it is asked again at once.
fn is_sent_again(error: &StoreError) -> bool {
    matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout)
}

/// Returns whether the same call may succeed in the time that is left: the store may answer, or this process read the
/// answer in time.
fn may_succeed(error: &StoreError) -> bool {
    is_sent_again(error) || error.kind() == StoreErrorKind::Overloaded
}

/// Asks a store that is believed dead until it answers, or the limiter is dropped.
async fn probe<S: Store>(inner: Weak<Inner<S>>) {
    let mut pause = PROBE[0];
    loop {
        Due::after(pause).wait().await;
        let Some(inner) = inner.upgrade() else { return };
        let keys = [Arc::clone(&inner.probe)];
        // A store that panics is asked again, as one that fails.
        let load = AssertUnwindSafe(async { inner.store.load(&keys).await }).catch_unwind();
        let answer = Due::after(inner.deadline.max(PROBE[1])).timeout(load).await;
        if matches!(answer, Some(Ok(Ok(_)))) {
            inner.breaker.close();
            inner.events.report_up(&inner.name);
            return;
        }
        pause = (pause * 2).min(PROBE[1]);
    }
}

/// Random numbers of which no two processes have the same: hashes with keys of the operating system.
struct Random {
    hashers: [RandomState; 2],
    /// The seed of the pauses.
    seed: u64,
    count: AtomicU64,
}

impl Random {
    fn new() -> Self {
        Self { hashers: [RandomState::new(), RandomState::new()], seed: random::secret(), count: AtomicU64::new(0) }
    }

    fn next(&self) -> u64 {
        random::mixed(self.seed.wrapping_add(self.count.fetch_add(1, Ordering::Relaxed)))
    }

    fn version(&self) -> Version {
        let count = (std::process::id(), self.count.fetch_add(1, Ordering::Relaxed));
        let mut bytes = [0; 16];
        for (half, hasher) in bytes.chunks_exact_mut(8).zip(&self.hashers) {
            half.copy_from_slice(&hasher.hash_one(count).to_le_bytes());
        }
        Version::from_bytes(bytes)
    }
}
