//! Takes the requests of a flight to the store: decides them on copies of the values, swaps the results in, and
//! decides again after conflicts.
//!
//! Requests of a flight that are linked by common keys are a *party*. Each party is decided separately, and makes one
//! swap. The swaps of several parties share a call, if the store takes several swaps in a call. After a conflict,
//! only the party that had the conflict is decided again.
//!
//! # Lost answers
//!
//! A call whose connection was cut has no answer, so the same swap is sent again. If the current value has the
//! expected version, the second swap is made. If the current value has the version that the swap writes, the first
//! swap was made. The current value also names its earlier versions. If the version that the swap writes is
//! among the earlier versions, the swap was made. If the expected version is among the earlier versions, and a
//! version of another swap follows it, the swap was not made. If the value names neither version, the result is
//! unknown, and the requests fail as a timeout.
//!
//! A value may name all versions since its key had no value. If such a value names neither the expected version nor
//! the version that the swap writes, either the swap was not made, or the value was removed since. If the swap only
//! removes values, it counts as made in both cases, provided that the values that it kept are still the expected
//! ones. Charges are decided again, because nothing is left of the units that they took. Refunds and returns are
//! not decided again, because it is unknown whether they had an effect.
//!
//! A swap that expects a version is made at most once. A late swap that expects no value can be
//! made a second time, if the key has no value again. The charge then counts although it belongs to
//! no request, until it drains or its row lapses.
//!
//! # Late answers
//!
//! When the deadline of a flight has passed, the flight ends, so that the next flight can decide its keys. A task then
//! listens for the answer. If the swap was made, the charges are refunded, because their callers have gone.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::time::Instant;

use super::calls::{Answered, FromStore, Late, StoreCalls, is_cut};
use super::error::StoreError;
use super::known::KnownValues;
use super::store_time::{TimeUpdate, Trip};
use super::value::Quotas;
use super::working_copy::{Evidence, StoreAnswer, StoreOperation, StoreRequest, WorkingCopy, evidence};
use super::{Change, Loaded, NotSwapped, Store, Swapped, Value};
use crate::base::time::Timestamp;
use crate::clock::Clock;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{CallLimits, CallResult, Caller, Calls, Deadline, Events, Groups, RemoteStore, hand_out};

/// The maximum number of times that one swap is sent.
const SENDS: u32 = 4;

/// The first and the longest pause before a swap is tried again.
const PAUSE: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(8)];

/// The longest wait of a process before its next flight, for each conflict after the first. A swap that takes longer
/// than this takes long.
const REST: Duration = Duration::from_millis(2);

/// A process rests after one of this number of flights without a conflict.
const RESTS: u32 = 8;

/// The time from the deadline of a flight until its callers have surely gone.
const LEAVE: Duration = Duration::from_millis(10);

/// The first answer gives the store's time to within half of its round trip. If the round trip took
/// longer than [`CLOSE`], the store is asked again, up to [`NARROWS`] times.
const CLOSE: Duration = Duration::from_millis(2);
const NARROWS: u32 = 4;

pub(super) struct Swapper<S: Store>(Arc<Inner<S>>);

struct Inner<S: Store> {
    calls: Arc<StoreCalls<S>>,
    known: KnownValues,
    quotas: Quotas,
}

/// Requests of a flight that are linked by common keys.
struct Party<'a, S: Store> {
    callers: Vec<Caller<Swapper<S>>>,
    copy: WorkingCopy<'a>,
    /// True if the values come from the store, and are not guesses.
    is_current: bool,
    /// True if the party loads values that it does not know, instead of guessing them. A wrong guess in a swap of many
    /// parties costs more time than a load.
    loads_first: bool,
    /// The number of conflicts with other processes.
    conflicts: u32,
    /// True if another swap has undone a swap whose time was too far away from the store's time.
    has_undone: bool,
    next: Option<PartyStep>,
}

/// The next step of a party.
enum PartyStep {
    /// Load the current values.
    Load,
    Swap(Decided),
    /// Answer the callers, without a call.
    Answer(StoreAnswers),
}

type StoreAnswers = Vec<Result<StoreAnswer, StoreError>>;

/// A decision to swap in.
struct Decided {
    changes: Vec<Change>,
    at: Timestamp,
    answers: StoreAnswers,
    /// True if all requests are takes or peeks.
    only_takes: bool,
    /// The number of times that the swap was sent.
    sends: u32,
}

/// A party and its swap.
type Swapping<'a, S> = (Party<'a, S>, Decided);

/// The result of a flight.
#[derive(Clone, Copy, Default)]
struct FlightResult {
    /// True if the store has decided any of the flight's requests.
    is_answered: bool,
    /// The number of conflicts with other processes, of the party that had the most.
    conflicts: u32,
    /// The time of the longest swap that was answered.
    took: Duration,
}

impl FlightResult {
    fn add(&mut self, other: Self) {
        self.is_answered |= other.is_answered;
        self.conflicts = self.conflicts.max(other.conflicts);
        self.took = self.took.max(other.took);
    }
}

/// The requests of a swap whose answer is late, with the answers that they get if the swap was
/// made.
type LateSwap<S> = (Vec<(Caller<Swapper<S>>, Result<StoreAnswer, StoreError>)>, Decided);

/// The result of a swap.
enum SwapResult {
    /// The swap was made. `is_away` is true if the time of the decision was too far away from the store's time,
    /// and false if an answer was lost.
    Made { is_away: bool },
    /// Nothing was changed, and these are the current values.
    Conflict(Vec<Option<Value>>),
    /// Nothing was changed: the swap is to be sent alone.
    Skipped,
}

/// Some swaps, and the answers to them.
type Called = (Vec<Vec<Change>>, Vec<Result<Swapped, StoreError>>);

impl<S: Store> Swapper<S> {
    pub(super) fn new(calls: StoreCalls<S>) -> Self {
        Self(Arc::new(Inner { calls: Arc::new(calls), known: KnownValues::new(), quotas: Quotas::default() }))
    }

    pub(super) fn store(&self) -> &S {
        &self.0.calls.store
    }

    /// Returns the clock that is used instead of the store's clock, if any.
    pub(super) fn chosen_clock(&self) -> Option<Arc<dyn Clock>> {
        self.0.calls.time.chosen()
    }

    pub(super) fn events(&self) -> &Events {
        &self.0.calls.events
    }

    /// Returns the error of a check that would fail at once, because the store is believed dead.
    pub(super) fn error_at_once(&self) -> Option<StoreError> {
        self.0.calls.breaker.is_open().then(|| self.0.calls.unavailable())
    }
}

impl<S: Store> RemoteStore for Swapper<S> {
    type Request = StoreRequest;
    type Answer = StoreAnswer;
    type Error = StoreError;
    type Queue = Groups<Self>;

    async fn send_batch(&self, callers: Vec<Caller<Self>>, until: Instant, _: Option<Timestamp>) -> CallResult {
        let inner = &self.0;
        if inner.calls.breaker.is_open() {
            inner.fail(callers, &inner.calls.unavailable());
            return CallResult::Failed;
        }
        let (landed, parties) = inner.take(callers, Deadline::at(until)).await;
        match landed.is_answered {
            // A conflict of one party is no reason to keep the keys of the others waiting.
            true => {
                let conflicts = if parties == 1 { landed.conflicts } else { 0 };
                CallResult::Answered { rest: inner.rest(conflicts, landed.took), clock: None }
            }
            false => CallResult::Failed,
        }
    }

    fn limits(&self) -> CallLimits {
        let store = &self.0.calls.store;
        CallLimits { units: store.max_swaps().max(1), calls: Calls::Separate(store.max_calls()) }
    }

    fn record_unsent(&self, error: &StoreError) {
        self.0.calls.events.report_failure(error.kind(), error);
    }
}

impl<S: Store> Inner<S> {
    /// Takes requests to the store, and answers them. Returns the result of the flight, and the
    /// number of parties.
    async fn take(self: &Arc<Self>, callers: Vec<Caller<Swapper<S>>>, deadline: Deadline) -> (FlightResult, usize) {
        let mut parties = self.parties(callers);
        if parties.len() == 1 {
            return (self.drive(parties, deadline).await, 1);
        }
        let count = parties.len();
        // Separates the parties whose next step is to load values, so that these parties do not keep the others
        // waiting.
        let mut loads = Vec::new();
        for party in &mut parties {
            party.loads_first = true;
            party.next = Some(self.step(party));
        }
        parties = parties
            .into_iter()
            .filter_map(|party| match party.next {
                Some(PartyStep::Load) => {
                    loads.push(party);
                    None
                }
                _ => Some(party),
            })
            .collect();
        let (mut landed, other) = join(self.drive(loads, deadline), self.drive(parties, deadline)).await;
        landed.add(other);
        (landed, count)
    }

    /// Returns the parties of a flight, each with its requests in their order.
    fn parties(&self, callers: Vec<Caller<Swapper<S>>>) -> Vec<Party<'_, S>> {
        let is_one = self.calls.store.max_swaps() < 2 || callers.len() == 1;
        let groups = if is_one { vec![callers] } else { joined(callers) };
        let party = |callers: Vec<Caller<Swapper<S>>>| Party {
            copy: WorkingCopy::new(callers.iter().map(|caller| &caller.request), &self.quotas, &self.known),
            callers,
            is_current: false,
            loads_first: false,
            conflicts: 0,
            has_undone: false,
            next: None,
        };
        groups.into_iter().map(party).collect()
    }

    /// Decides and swaps until each request of these parties is answered.
    async fn drive(self: &Arc<Self>, mut parties: Vec<Party<'_, S>>, deadline: Deadline) -> FlightResult {
        let mut landed = FlightResult::default();
        let mut alone = Vec::new();
        while !parties.is_empty() {
            let (mut loads, mut swaps) = (Vec::new(), Vec::new());
            for mut party in parties {
                landed.conflicts = landed.conflicts.max(party.conflicts);
                match party.next.take().unwrap_or_else(|| self.step(&mut party)) {
                    PartyStep::Load => loads.push(party),
                    PartyStep::Swap(decided) => swaps.push((party, decided)),
                    PartyStep::Answer(answers) => {
                        landed.is_answered = true;
                        self.answer(party.callers, answers);
                    }
                }
            }
            (parties, alone) = match (loads.is_empty(), swaps.is_empty()) {
                (true, true) => (Vec::new(), alone),
                (false, true) => (self.load(loads, deadline).await, alone),
                (true, false) => self.swap(swaps, alone, &mut landed, deadline).await,
                (false, false) => {
                    let (mut loaded, (swapped, alone)) =
                        join(self.load(loads, deadline), self.swap(swaps, alone, &mut landed, deadline)).await;
                    loaded.extend(swapped);
                    (loaded, alone)
                }
            };
            for party in &mut parties {
                party.callers.retain(|caller| !caller.receiver.is_gone());
            }
            parties.retain(|party| !party.callers.is_empty());
            // Yields the thread after repeated conflicts, because a store in memory answers at once and this loop
            // would otherwise never yield.
            if parties.iter().any(|party| party.conflicts > 1) {
                tokio::task::yield_now().await;
            }
        }
        let alone = join_all(alone.into_iter().map(|swapping| Box::pin(self.drive_alone(swapping, deadline)))).await;
        alone.into_iter().for_each(|other| landed.add(other));
        landed
    }

    /// Sends a swap that was skipped, in a call of its own.
    async fn drive_alone(self: &Arc<Self>, swapping: Swapping<'_, S>, deadline: Deadline) -> FlightResult {
        let mut landed = FlightResult::default();
        let (parties, _) = self.swap(vec![swapping], Vec::new(), &mut landed, deadline).await;
        if !parties.is_empty() {
            landed.add(Box::pin(self.drive(parties, deadline)).await);
        }
        landed
    }

    /// Decides the requests of a party on its values.
    fn step(&self, party: &mut Party<'_, S>) -> PartyStep {
        let is_look = |caller: &Caller<Swapper<S>>| caller.request.operation == StoreOperation::Peek;
        let is_guess = party.callers.iter().all(is_look) || (party.loads_first && party.copy.has_unknown());
        let is_sure = party.is_current || !is_guess;
        let Some(now) = self.calls.time.now().filter(|_| is_sure) else { return PartyStep::Load };
        let answers = party.copy.decide(party.callers.iter().map(|caller| &caller.request), now.as_micros());
        if !party.copy.has_changes() {
            return if party.is_current { PartyStep::Answer(answers) } else { PartyStep::Load };
        }
        let changes = party.copy.changes(now.as_micros(), || self.calls.random.version());
        let only_takes = party
            .callers
            .iter()
            .all(|caller| matches!(caller.request.operation, StoreOperation::Take | StoreOperation::Peek));
        PartyStep::Swap(Decided { changes, at: now, answers, only_takes, sends: 0 })
    }

    fn answer(&self, callers: Vec<Caller<Swapper<S>>>, answers: StoreAnswers) {
        debug_assert!(answers.len() == callers.len(), "each request was decided");
        match answers.iter().find_map(|answer| answer.as_ref().err()) {
            Some(error) => self.calls.events.report_failure(error.kind(), error),
            None => self.calls.events.record_success(),
        }
        hand_out(callers, answers);
    }

    fn fail(&self, callers: Vec<Caller<Swapper<S>>>, error: &StoreError) {
        self.calls.events.report_failure(error.kind(), error);
        callers.into_iter().for_each(|caller| caller.answer(Err(error.clone())));
    }

    /// Loads the current values of these parties. Returns the parties that go on.
    async fn load<'a>(self: &Arc<Self>, mut parties: Vec<Party<'a, S>>, deadline: Deadline) -> Vec<Party<'a, S>> {
        let keys: Arc<[Arc<str>]> = parties.iter().flat_map(|party| party.copy.keys()).collect();
        let loaded = match self.load_keys(&keys, deadline).await {
            Ok(loaded) => loaded,
            Err(error) => {
                parties.into_iter().for_each(|party| self.fail(party.callers, &error));
                return Vec::new();
            }
        };
        let mut values = &loaded.values[..];
        for party in &mut parties {
            let (own, others) = values.split_at_checked(party.copy.len()).unwrap_or((values, &[]));
            party.copy.set_all(own, &self.known);
            party.is_current = true;
            values = others;
        }
        parties
    }

    async fn load_keys(self: &Arc<Self>, keys: &Arc<[Arc<str>]>, deadline: Deadline) -> Result<Loaded, StoreError> {
        let (mut sends, mut narrows) = (0, 0);
        loop {
            sends += 1;
            let load = {
                let (inner, keys) = (Arc::clone(self), Arc::clone(keys));
                async move { inner.calls.store.load(&keys).await }
            };
            match self.calls.call(load, deadline).await {
                Ok(Answered { answer: Ok(loaded), trip, took, .. }) => {
                    if loaded.values.len() != keys.len() {
                        return Err(self.miscounted(loaded.values.len(), keys.len()));
                    }
                    let is_first = self.calls.time.record(trip, loaded.now, None) == TimeUpdate::First;
                    // Loads again until the store's time is known exactly. Otherwise a later, more exact answer could
                    // move the time of decisions back.
                    narrows += u32::from(is_first || narrows > 0);
                    let is_close = loaded.now.is_none() || trip.answered.saturating_since(trip.sent) <= CLOSE;
                    if narrows == 0 || narrows > NARROWS || is_close || took.saturating_mul(4) > deadline.left() {
                        return Ok(loaded);
                    }
                }
                Ok(Answered { answer: Err(error), .. }) if is_cut(&error) && sends < SENDS && !deadline.is_over() => {
                    self.pause(sends, deadline).await;
                }
                Ok(Answered { answer: Err(error), sent, .. }) => return Err(self.calls.record_failure(error, sent)),
                Err(late) => {
                    let (inner, error) = (Arc::clone(self), late.error.clone());
                    self.calls.listen(late, move |answered| {
                        if let Some(Answered { answer: Ok(loaded), trip, .. }) = answered {
                            inner.calls.time.record(trip, loaded.now, None);
                        }
                    });
                    return Err(error);
                }
            }
        }
    }

    /// Makes the swaps of some parties in one call. Returns the parties that go on, and `alone` together with
    /// the parties whose swap was skipped.
    async fn swap<'a>(
        self: &Arc<Self>,
        mut swaps: Vec<Swapping<'a, S>>,
        mut alone: Vec<Swapping<'a, S>>,
        landed: &mut FlightResult,
        deadline: Deadline,
    ) -> (Vec<Party<'a, S>>, Vec<Swapping<'a, S>>) {
        let mut going_on = Vec::new();
        while !swaps.is_empty() {
            let is_alone = swaps.len() == 1;
            let changes = swaps.iter_mut().map(|(_, decided)| std::mem::take(&mut decided.changes)).collect();
            let Answered { answer, trip, took, sent } = match self.calls.call(self.swap_call(changes), deadline).await {
                Ok(answered) => answered,
                Err(late) => {
                    self.listen_for_swaps(late, swaps);
                    return (going_on, alone);
                }
            };
            landed.took = landed.took.max(took);
            let (changes, mut answers) = answer;
            if answers.len() != swaps.len() {
                let error = self.miscounted(answers.len(), swaps.len());
                answers = changes.iter().map(|_| Err(error.clone())).collect();
            }
            let mut again = Vec::new();
            let mut is_recorded = false; // one call is one failure, however many swaps it had
            for (((mut party, mut decided), changes), answer) in swaps.into_iter().zip(changes).zip(answers) {
                decided.changes = changes;
                decided.sends += 1;
                match answer.and_then(|swapped| self.outcome(&decided, swapped, trip)) {
                    Ok(SwapResult::Made { is_away }) => {
                        landed.is_answered = true;
                        going_on.extend(self.made(party, decided, is_away, deadline).await);
                    }
                    Ok(SwapResult::Conflict(current)) => {
                        // The party swaps again at once, because it now has the current values. The processes whose
                        // swaps succeeded pause meanwhile.
                        party.copy.set_used(&current, &self.known);
                        party.is_current = true;
                        party.conflicts += 1;
                        landed.is_answered = true;
                        // Fails the callers if another try would end after the deadline.
                        match deadline.is_over() || deadline.left() < took {
                            true => self.fail(party.callers, &self.contended(party.conflicts)),
                            false => going_on.push(party),
                        }
                    }
                    Ok(SwapResult::Skipped) if !is_alone => {
                        decided.sends -= 1; // the store did not try it
                        alone.push((party, decided));
                    }
                    Ok(SwapResult::Skipped) => self.fail(party.callers, &self.miscounted(0, decided.changes.len())),
                    Err(error) if is_cut(&error) && decided.sends < SENDS && !deadline.is_over() => {
                        again.push((party, decided));
                    }
                    Err(error) if std::mem::replace(&mut is_recorded, true) => self.fail(party.callers, &error),
                    Err(error) => self.fail(party.callers, &self.calls.record_failure(error, sent)),
                }
            }
            swaps = again;
            // The first retry is immediate. After a pause, other processes may have written a value so often that its
            // history no longer shows whether the first swap was made.
            if let Some(sends) = swaps.iter().map(|(_, decided)| decided.sends).max().filter(|sends| *sends > 1) {
                self.pause(sends, deadline).await;
            }
        }
        (going_on, alone)
    }

    /// Returns the call that makes these swaps.
    fn swap_call(self: &Arc<Self>, changes: Vec<Vec<Change>>) -> impl Future<Output = Called> + Send + 'static {
        let inner = Arc::clone(self);
        async move {
            let answers = match &changes[..] {
                [only] => vec![inner.calls.store.swap(only).await],
                several => {
                    let several: Vec<&[Change]> = several.iter().map(Vec::as_slice).collect();
                    inner.calls.store.swap_each(&several).await
                }
            };
            (changes, answers)
        }
    }

    /// Finds out whether a swap was made.
    fn outcome(&self, decided: &Decided, swapped: Swapped, trip: Trip) -> Result<SwapResult, StoreError> {
        let is_away = self.calls.time.record(trip, swapped.now, Some(decided.at)) == TimeUpdate::Away;
        let current = match swapped.result {
            Ok(()) => return Ok(SwapResult::Made { is_away: is_away && decided.sends == 1 }),
            Err(NotSwapped::Conflict(current)) => current,
            Err(NotSwapped::Skipped) => return Ok(SwapResult::Skipped),
        };
        if current.len() != decided.changes.len() {
            return Err(self.miscounted(current.len(), decided.changes.len()));
        }
        match if decided.sends == 1 { Evidence::NotMade } else { evidence(&decided.changes, &current) } {
            Evidence::Made => Ok(SwapResult::Made { is_away: false }),
            Evidence::NotMade => Ok(SwapResult::Conflict(current)),
            Evidence::Gone if decided.only_takes => Ok(SwapResult::Conflict(current)),
            Evidence::Gone | Evidence::None => Err(StoreError::new(
                StoreErrorKind::Timeout,
                format!(
                    "an answer of {} was lost, and other processes have written since: it is unknown whether the \
                     charge was taken",
                    self.calls.name
                ),
            )),
        }
    }

    /// Answers the requests of a party whose swap was made. If the swap was decided at a time too far away from the
    /// store's time, another swap undoes it, at most once for each party, and the party goes on.
    async fn made<'a>(
        self: &Arc<Self>,
        mut party: Party<'a, S>,
        decided: Decided,
        is_away: bool,
        deadline: Deadline,
    ) -> Option<Party<'a, S>> {
        if is_away && !party.has_undone {
            match Box::pin(self.undo(&mut party.copy, &decided.changes, deadline)).await {
                Ok(true) => {
                    (party.has_undone, party.is_current) = (true, true);
                    return Some(party);
                }
                Ok(false) => {}
                Err(error) => {
                    self.fail(party.callers, &error);
                    return None;
                }
            }
        }
        if !is_away || party.has_undone {
            party.copy.note_done(&decided.changes, &self.known);
        }
        self.answer(party.callers, decided.answers);
        None
    }

    /// Undoes changes that were made. Returns whether the changes were undone. The changes stay if another
    /// process has written since.
    ///
    /// # Errors
    /// Returns an error if it is unknown whether the changes were undone. After such an error, the requests must
    /// not be admitted, because the units that they took may be free again.
    async fn undo(
        self: &Arc<Self>,
        copy: &mut WorkingCopy<'_>,
        made: &[Change],
        deadline: Deadline,
    ) -> Result<bool, StoreError> {
        let at = self.calls.time.now().unwrap_or_default();
        let changes = copy.undoing(made, at.as_micros(), || self.calls.random.version());
        if changes.is_empty() {
            return Ok(false);
        }
        let mut undoing = Decided { changes, at, answers: Vec::new(), only_takes: false, sends: 0 };
        loop {
            undoing.sends += 1;
            let (answer, trip, sent) =
                match self.calls.call(self.swap_call(vec![undoing.changes.clone()]), deadline).await {
                    Ok(Answered { answer: (_, answers), trip, sent, .. }) => (answers.into_iter().next(), trip, sent),
                    Err(late) => {
                        let error = late.error.clone();
                        self.calls.listen(late, |_| {});
                        return Err(error);
                    }
                };
            let answer = answer.unwrap_or_else(|| Err(self.miscounted(0, 1)));
            match answer.and_then(|swapped| self.outcome(&undoing, swapped, trip)) {
                Ok(SwapResult::Made { .. }) => {
                    copy.note_done(&undoing.changes, &self.known);
                    return Ok(true);
                }
                Ok(SwapResult::Conflict(_)) => return Ok(false),
                Ok(SwapResult::Skipped) => return Err(self.miscounted(0, undoing.changes.len())),
                Err(error) if is_cut(&error) && undoing.sends < SENDS && !deadline.is_over() => {
                    if undoing.sends > 1 {
                        self.pause(undoing.sends, deadline).await;
                    }
                }
                Err(error) => return Err(self.calls.record_failure(error, sent)),
            }
        }
    }

    /// Listens for late answers to swaps. When a late answer comes, the callers of the checks have gone, so the
    /// charges of the checks are refunded. Corrections fail after [`LEAVE`] if no answer has come by then. Requests
    /// about held units fail at once and need no refund, because the next claim of this process corrects its row.
    fn listen_for_swaps(self: &Arc<Self>, mut late: Late<Called>, swaps: Vec<Swapping<'_, S>>) {
        let error = late.error.clone();
        self.calls.events.report_failure(error.kind(), &error);
        let mut waiting: Vec<LateSwap<S>> = Vec::with_capacity(swaps.len());
        for (party, mut decided) in swaps {
            let callers = party.callers.into_iter().zip(std::mem::take(&mut decided.answers));
            waiting.push((fail_some(callers, &error, |caller| caller.request.holds_units()), decided));
        }
        let inner = Arc::clone(self);
        self.calls.runtime.spawn(async move {
            if let Some(answer) = Deadline::after(LEAVE).timeout(&mut late.call).await {
                let answered = inner.calls.hear(answer, late.sent);
                inner.answer_late(waiting, Some(answered), &error);
                return;
            }
            for (callers, _) in &mut waiting {
                *callers = fail_some(std::mem::take(callers).into_iter(), &error, |caller| !caller.receiver.is_gone());
            }
            let listening = Arc::clone(&inner);
            inner.calls.listen(late, move |answered| listening.answer_late(waiting, answered, &error));
        });
    }

    /// Hands out late answers to swaps.
    fn answer_late(&self, waiting: Vec<LateSwap<S>>, answered: Option<Answered<Called>>, error: &StoreError) {
        let trip = answered.as_ref().map(|answered| answered.trip);
        let (changes, answers) = answered.map(|answered| answered.answer).unwrap_or_default();
        let mut called = changes.into_iter().zip(answers);
        for (callers, mut decided) in waiting {
            let outcome = called.next().zip(trip).map(|((changes, answer), trip)| {
                decided.sends += 1;
                decided.changes = changes;
                answer.and_then(|swapped| self.outcome(&decided, swapped, trip))
            });
            match outcome {
                Some(Ok(SwapResult::Made { .. })) => {
                    let (callers, answers): (Vec<_>, Vec<_>) = callers.into_iter().unzip();
                    hand_out(callers, answers);
                }
                Some(Ok(SwapResult::Conflict(_) | SwapResult::Skipped) | Err(_)) | None => {
                    callers.into_iter().for_each(|(caller, _)| caller.answer(Err(error.clone())));
                }
            }
        }
    }

    /// Waits for a random time, whose maximum grows with `tries`.
    async fn pause(&self, tries: u32, deadline: Deadline) {
        let most = PAUSE[0].saturating_mul(1 << tries.min(8)).min(PAUSE[1]);
        let part = self.calls.random.next() % 1_024;
        deadline.pause(most * (part as u32) / 1_024).await; // below 1,024
    }

    /// Returns how long the next flight waits so that other processes can change the keys. `took` is the time of a
    /// swap.
    ///
    /// The first conflict only means that this process knew an old value, unless a swap takes long. Further conflicts
    /// mean that other processes wait as well. This process now knows the current values, and would win again without
    /// a rest.
    ///
    /// A process that always wins does not learn that others wait. If their swaps take as long as its own, each of
    /// their swaps finds the value that it has just written. So it rests for one swap now and then.
    fn rest(&self, conflicts: u32, took: Duration) -> Duration {
        let random = (self.calls.random.next() % 1_024) as u32; // below 1,024
        let most = self.calls.deadline / 8;
        if conflicts == 0 {
            return if random < 1_024 / RESTS { took.min(most) } else { Duration::ZERO };
        }
        let of_conflicts = REST.saturating_mul(conflicts - 1).min(PAUSE[1]);
        of_conflicts.max(took.saturating_sub(REST)).min(most) * random / 1_024
    }

    fn contended(&self, conflicts: u32) -> StoreError {
        let message = format!(
            "other processes changed the keys {conflicts} times within {:?}: use a longer deadline, or fewer processes \
             for such hot keys",
            self.calls.deadline
        );
        StoreError::new(StoreErrorKind::Contended, message)
    }

    fn miscounted(&self, found: usize, expected: usize) -> StoreError {
        let message = format!("{} returned {found} values for {expected} keys", self.calls.name);
        StoreError::new(StoreErrorKind::Foreign, message)
    }
}

impl FromStore for Called {
    fn is_heard(&self) -> bool {
        self.1.iter().any(FromStore::is_heard)
    }
}

/// Groups the requests that are linked by common keys. Each group keeps the order of its requests.
fn joined<S: Store>(callers: Vec<Caller<Swapper<S>>>) -> Vec<Vec<Caller<Swapper<S>>>> {
    let mut of_keys: HashMap<u64, usize, foldhash::fast::RandomState> = HashMap::default();
    // `merged[group]` is the group that `group` was merged into, or `group` itself.
    let mut merged: Vec<usize> = Vec::new();
    let find = |merged: &[usize], mut group: usize| {
        while merged[group] != group {
            group = merged[group];
        }
        group
    };
    let mut groups = Vec::with_capacity(callers.len());
    for caller in &callers {
        let new = merged.len();
        merged.push(new);
        let mut own = new;
        for charge in &caller.request.charges {
            let other = find(&merged, *of_keys.entry(charge.hash).or_insert(own));
            let (first, last) = (own.min(other), own.max(other));
            (merged[last], own) = (first, first);
        }
        groups.push(own);
    }
    let mut together: Vec<Vec<Caller<Swapper<S>>>> = merged.iter().map(|_| Vec::new()).collect();
    for (caller, group) in callers.into_iter().zip(groups) {
        together[find(&merged, group)].push(caller);
    }
    together.retain(|callers| !callers.is_empty());
    together
}

/// A request with its answer.
type CallerAnswer<S> = (Caller<Swapper<S>>, Result<StoreAnswer, StoreError>);

/// Fails the requests for which `fails` returns true, and returns the other requests.
fn fail_some<S: Store>(
    callers: impl Iterator<Item = CallerAnswer<S>>,
    error: &StoreError,
    fails: impl Fn(&Caller<Swapper<S>>) -> bool,
) -> Vec<CallerAnswer<S>> {
    let (failed, others): (Vec<_>, Vec<_>) = callers.partition(|(caller, _)| fails(caller));
    failed.into_iter().for_each(|(caller, _)| caller.answer(Err(error.clone())));
    others
}
