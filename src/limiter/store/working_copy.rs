//! Decides requests in order on a copy of the values, and returns the changes that write the
//! result.

use std::sync::Arc;

use smallvec::SmallVec;

use super::error::StoreError;
use super::known::KnownValues;
use super::value::{Foreign, History, Quotas, StateForm, StoredState, Written, read_history};
use super::{Change, Then, Value, Version};
use crate::algorithm::carry::Fit;
use crate::algorithm::entry_log::{Edit, EntryLog, Listed};
use crate::algorithm::{Decider, Next, Pair, TakeMode};
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Decision, Receipt, Several};
use crate::event::StoreErrorKind;
use crate::limiter::remote::{self, Claim, KeyRows, Keyed};
use crate::limiter::{Effect, Effective, binds, how, outlives_refusal, stands};
use crate::policy::Policy;

/// The action of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoreOperation {
    /// Takes all charges or none.
    Take,
    /// Answers as `Take` would, and takes nothing.
    Peek,
    Refund,
    /// Returns held units, or renews the row of this process.
    Return,
    Reset,
}

/// The answer to a request.
pub(super) type StoreAnswer = remote::Answer<StoreError>;

/// The charges of one set, a refund, a return or a reset.
#[derive(Debug)]
pub(super) struct StoreRequest {
    pub(super) operation: StoreOperation,
    pub(super) charges: Vec<StoreCharge>,
}

impl StoreRequest {
    pub(super) fn of(operation: StoreOperation, charges: impl IntoIterator<Item = StoreCharge>) -> Self {
        Self { operation, charges: charges.into_iter().collect() }
    }

    /// Returns whether a charge is of a concurrency limit.
    pub(super) fn holds_units(&self) -> bool {
        self.charges.iter().any(|charge| charge.policy.limits_in_flight())
    }
}

impl Keyed for StoreRequest {
    fn keys(&self) -> impl Iterator<Item = u64> {
        self.charges.iter().map(|charge| charge.hash)
    }
}

/// A charge, a refund or a reset of a state, and the key of that state in the store.
#[derive(Debug)]
pub(super) struct StoreCharge {
    pub(super) key: Arc<str>,
    /// The hash of the key.
    pub(super) hash: u64,
    pub(super) policy: Policy,
    /// The units to take, or to refund.
    pub(super) cost: u64,
    pub(super) effect: Effect,
    /// The instant and the number in the receipt that a refund returns.
    pub(super) own: Pair,
    /// The claim of this process, if the policy is a concurrency limit.
    pub(super) claim: Claim,
}

impl Effective for StoreCharge {
    fn policy(&self) -> &Policy {
        &self.policy
    }

    fn effect(&self) -> Effect {
        self.effect
    }
}

/// The states of the keys of some requests.
pub(super) struct WorkingCopy<'a> {
    quotas: &'a Quotas,
    cells: Vec<Cell>,
}

/// One key.
struct Cell {
    key: Arc<str>,
    hash: u64,
    /// The value that the store is expected to have.
    value: Option<Value>,
    /// The history of that value.
    history: History,
    /// The state after the requests that were decided so far. Before the first decision, this is the state of
    /// `value`.
    state: Result<Option<StoredState>, Foreign>,
    is_used: bool,
    is_changed: bool,
}

/// The state that a decision leaves.
struct Left {
    form: Option<StateForm>,
    is_written: bool,
    /// The rows to write if the charge is not taken.
    otherwise: Option<KeyRows>,
}

impl Left {
    fn of(form: Option<StateForm>, is_written: bool) -> Self {
        Self { form, is_written, otherwise: None }
    }
}

impl<'a> WorkingCopy<'a> {
    /// Makes the copy of the keys of these requests, with the values that this process saw last.
    pub(super) fn new<'r>(
        requests: impl Iterator<Item = &'r StoreRequest>,
        quotas: &'a Quotas,
        known: &KnownValues,
    ) -> Self {
        let mut cells: Vec<Cell> = Vec::with_capacity(1);
        for charge in requests.flat_map(|request| &request.charges) {
            if !cells.iter().any(|cell| cell.hash == charge.hash && cell.key == charge.key) {
                cells.push(Cell {
                    key: Arc::clone(&charge.key),
                    hash: charge.hash,
                    value: known.get(&charge.key, charge.hash),
                    history: History::fresh(),
                    state: Ok(None),
                    is_used: false,
                    is_changed: false,
                });
            }
        }
        Self { quotas, cells }
    }

    /// Returns `true` if a key has no value, or a value that this process does not know.
    pub(super) fn has_unknown(&self) -> bool {
        self.cells.iter().any(|cell| cell.value.is_none())
    }

    /// Returns the number of keys.
    pub(super) fn len(&self) -> usize {
        self.cells.len()
    }

    /// Returns the keys.
    pub(super) fn keys(&self) -> Vec<Arc<str>> {
        self.cells.iter().map(|cell| Arc::clone(&cell.key)).collect()
    }

    /// Replaces the values of all keys with the current values.
    pub(super) fn set_all(&mut self, values: &[Option<Value>], known: &KnownValues) {
        self.cells.iter_mut().zip(values).for_each(|(cell, value)| cell.set_value(value, known));
    }

    /// Replaces the values of the used keys with the current values.
    pub(super) fn set_used(&mut self, values: &[Option<Value>], known: &KnownValues) {
        let used = self.cells.iter_mut().filter(|cell| cell.is_used);
        used.zip(values).for_each(|(cell, value)| cell.set_value(value, known));
    }

    /// Decides requests in their order, beginning with the copied values. Returns the answer to
    /// each request.
    pub(super) fn decide<'r>(
        &mut self,
        requests: impl Iterator<Item = &'r StoreRequest>,
        now: u64,
    ) -> Vec<Result<StoreAnswer, StoreError>> {
        for cell in &mut self.cells {
            (cell.is_used, cell.is_changed) = (false, false);
        }
        requests.map(|request| self.answer(request, now)).collect()
    }

    /// Returns whether the decisions change any value.
    pub(super) fn has_changes(&self) -> bool {
        self.cells.iter().any(|cell| cell.is_changed)
    }

    fn answer(&mut self, request: &StoreRequest, now: u64) -> Result<StoreAnswer, StoreError> {
        let mut places: SmallVec<[usize; 2]> = SmallVec::new();
        for charge in &request.charges {
            let place = self.cells.iter().position(|cell| cell.hash == charge.hash && cell.key == charge.key);
            debug_assert!(place.is_some(), "the copy was made of the requests' keys");
            let Some(place) = place else { return Err(lost_track()) };
            let quota = self.quotas.of(&charge.policy);
            self.read(place, &quota);
            places.push(place);
        }
        for cell in
            places.iter().map(|place| &self.cells[*place]).filter(|_| request.operation != StoreOperation::Reset)
        {
            if let Err(Foreign(why)) = cell.state {
                let message = format!(
                    "this limiter did not write the value of {:?}: {why}. Reset the key, or use another prefix",
                    cell.key
                );
                return Err(StoreError::new(StoreErrorKind::Foreign, message));
            }
        }
        if matches!(request.operation, StoreOperation::Take | StoreOperation::Return) {
            for (at, (charge, place)) in request.charges.iter().zip(&places).enumerate() {
                let rows = self.rows(*place).filter(|_| charge.policy.limits_in_flight());
                if let Some(row) = rows.and_then(|rows| rows.refuses(&charge.claim, now)) {
                    return Ok(StoreAnswer::Refused(at, row));
                }
            }
        }
        match request.operation {
            StoreOperation::Take | StoreOperation::Peek => Ok(StoreAnswer::Decided(self.charge(request, &places, now))),
            StoreOperation::Return => {
                let back = request.charges.first().zip(places.first().copied());
                let is_missing = back.is_some_and(|(charge, place)| self.return_units(charge, place, now));
                Ok(if is_missing { StoreAnswer::Missing } else { StoreAnswer::Done })
            }
            StoreOperation::Refund => {
                let refund = request.charges.first().zip(places.first().copied());
                let is_behind = refund.is_some_and(|(charge, place)| self.refund(charge, place, now));
                Ok(if is_behind { StoreAnswer::Behind } else { StoreAnswer::Done })
            }
            StoreOperation::Reset => {
                for (charge, place) in request.charges.iter().zip(&places) {
                    match &self.cells[*place].state {
                        Ok(Some(StoredState { form: StateForm::Rows(rows), .. })) => {
                            let rows = rows.reset(now);
                            self.set(*place, &charge.policy, form_of(rows));
                        }
                        _ => self.cells[*place].clear(),
                    }
                }
                Ok(StoreAnswer::Done)
            }
        }
    }

    /// Reads the value of a key when a request uses the key for the first time.
    fn read(&mut self, place: usize, likely: &Arc<Written>) {
        let cell = &mut self.cells[place];
        if std::mem::replace(&mut cell.is_used, true) {
            return;
        }
        match cell.value.as_ref().map(|value| self.quotas.read(value, Some(likely))) {
            None => (cell.history, cell.state) = (History::fresh(), Ok(None)),
            Some(Ok((history, state))) => (cell.history, cell.state) = (history, Ok(Some(state))),
            Some(Err(foreign)) => (cell.history, cell.state) = (History::default(), Err(foreign)),
        }
    }

    /// Takes all charges or none.
    fn charge(&mut self, request: &StoreRequest, places: &[usize], now: u64) -> Decision {
        let charges = &request.charges;
        let mut changes: SmallVec<[Left; 2]> = SmallVec::new();
        let mut decisions = Several::new();
        for (at, (charge, place)) in charges.iter().zip(places).enumerate() {
            if places[..at].contains(place) {
                // This charge has the same key as an earlier charge of the request. The caller has to merge the two
                // charges.
                decisions.push(ChargeDecision::denied(charge.policy.quota().capacity(), 0, Wait::Never));
                changes.push(Left::of(None, false));
                continue;
            }
            let how = how(charges, at, |at| is_denied(&decisions, at));
            let (decision, change) = self.look(request.operation, charge, *place, now, (charge.cost, how));
            decisions.push(decision);
            changes.push(change);
        }
        let denies = |at: usize| binds(charges, at) && is_denied(&decisions, at);
        let allowed = !(0..charges.len()).any(denies);
        let takes = request.operation == StoreOperation::Take;
        let looks: SmallVec<[bool; 2]> =
            (0..charges.len()).map(|at| !allowed && stands(charges, at, is_denied(&decisions, at))).collect();
        let outlives: SmallVec<[bool; 2]> =
            (0..charges.len()).map(|at| outlives_refusal(charges, at, is_denied(&decisions, at))).collect();
        for (at, (charge, place)) in charges.iter().zip(places).enumerate() {
            if looks[at] {
                decisions[at] = self.look(request.operation, charge, *place, now, (0, TakeMode::IfAllowed)).0;
            }
            if !allowed || !takes {
                let missing = decisions[at].receipt().at_us();
                decisions[at].untaken();
                if charge.policy.limits_in_flight() {
                    decisions[at].put_receipt(Receipt::new(0, missing, 0)); // whether this process had a row
                }
            }
        }
        for (at, (change, place)) in changes.into_iter().zip(places).enumerate() {
            let policy = &charges[at].policy;
            match change.otherwise {
                _ if !takes => {}
                _ if change.is_written && (allowed || outlives[at]) => self.set(*place, policy, change.form),
                Some(rows) => self.set(*place, policy, form_of(rows)),
                None => {}
            }
        }
        Decision::of(allowed, decisions)
    }

    /// Returns the decision about a charge, and the state that the decision leaves.
    fn look(
        &self,
        operation: StoreOperation,
        charge: &StoreCharge,
        place: usize,
        now: u64,
        (cost, how): (u64, TakeMode),
    ) -> (ChargeDecision, Left) {
        let quota = charge.policy.quota();
        let (form, fit) = self.under(charge, place, now);
        let (decision, mut change) = match quota.decider() {
            Decider::Pair(decider, _) => {
                let pair = if let Some(StateForm::Pair(pair)) = &form { Some(*pair) } else { None };
                let answer = decider.decide_how(pair, now, cost, how);
                (answer.decision, after(answer.next, form))
            }
            Decider::EntryLog(log) => {
                let mut entries = if let Some(StateForm::Entries(entries)) = form { entries } else { Vec::new() };
                let answer = log.decide_how(&Listed(&entries), now, cost, how);
                if let Some(edit) = answer.edit {
                    apply(&mut entries, &edit, log);
                }
                let form = (!entries.is_empty()).then_some(StateForm::Entries(entries));
                (answer.decision, Left::of(form, answer.edit.is_some()))
            }
            Decider::Places(places) => {
                let charged =
                    rows_of(form).charge(*places, &charge.claim, (cost, how), operation == StoreOperation::Peek, now);
                let (is_written, otherwise) = (charged.if_taken.is_some(), charged.otherwise);
                let form = charged.if_taken.and_then(form_of);
                (charged.decision, Left { form, is_written, otherwise })
            }
        };
        match fit {
            Fit::Ahead => change.is_written |= cost > 0,
            Fit::Over => change.is_written = false,
            Fit::Fits => {}
        }
        (decision, change)
    }

    fn under(&self, charge: &StoreCharge, place: usize, now: u64) -> (Option<StateForm>, Fit) {
        match &self.cells[place].state {
            Ok(Some(state)) => state.under(&self.quotas.of(&charge.policy), charge.policy.quota(), now),
            Ok(None) | Err(_) => (None, Fit::Fits),
        }
    }

    /// Refunds the units of the charge that the state still holds. Returns `true` if the refund has no effect yet,
    /// because a later slot of the queue is taken.
    fn refund(&mut self, charge: &StoreCharge, place: usize, now: u64) -> bool {
        let (form, fit) = self.under(charge, place, now);
        let (change, is_behind) = match (form, charge.policy.quota().decider()) {
            _ if fit == Fit::Over => return false,
            (Some(StateForm::Pair(pair)), Decider::Pair(decider, _)) => {
                let decider = decider.get();
                let next = decider.refund(pair, now, charge.cost, charge.own);
                (after(next, Some(StateForm::Pair(pair))), decider.is_behind(pair, now, charge.own))
            }
            (Some(StateForm::Entries(mut entries)), Decider::EntryLog(log)) => {
                let held = log.refundable(&Listed(&entries), now, charge.cost, charge.own.at);
                let Some((start, units)) = held else { return false };
                entries.iter_mut().filter(|entry| entry.0 == start).for_each(|entry| entry.1 -= units);
                entries.retain(|entry| entry.1 > 0);
                let form = (!entries.is_empty()).then_some(StateForm::Entries(entries));
                (Left::of(form, true), false)
            }
            _ => return false,
        };
        if change.is_written {
            self.set(place, &charge.policy, change.form);
        }
        is_behind
    }

    /// Returns units to the state of a charge, or renews the row of the process. Returns `true` if there was no row
    /// although the process held units.
    fn return_units(&mut self, charge: &StoreCharge, place: usize, now: u64) -> bool {
        let rows = self.rows(place).cloned().unwrap_or_default();
        let (rows, is_missing) = rows.return_units(&charge.claim, charge.cost, now);
        self.set(place, &charge.policy, form_of(rows));
        is_missing
    }

    fn rows(&self, place: usize) -> Option<&KeyRows> {
        let state = self.cells[place].state.as_ref().ok()?.as_ref()?;
        if let StateForm::Rows(rows) = &state.form { Some(rows) } else { None }
    }

    fn set(&mut self, place: usize, policy: &Policy, form: Option<StateForm>) {
        let written = self.quotas.of(policy);
        let cell = &mut self.cells[place];
        cell.state = Ok(form.map(|form| StoredState { written, form }));
        cell.is_changed = true;
    }

    // Changes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the changes that write the decisions. They include the keys that were only read, so that the swap fails
    /// if one of these has changed.
    pub(super) fn changes(&self, now: u64, mut version: impl FnMut() -> Version) -> Vec<Change> {
        let used = self.cells.iter().filter(|cell| cell.is_used);
        used.map(|cell| {
            let expect = cell.value.as_ref().map(|value| value.version);
            let then = match &cell.state {
                _ if !cell.is_changed => Then::Keep,
                Ok(Some(state)) => {
                    let value = Value::new(version(), state.write(&cell.history_after()));
                    Then::Put(value, state.time_to_live(now))
                }
                Ok(None) | Err(_) if expect.is_some() => Then::Delete,
                Ok(None) | Err(_) => Then::Keep,
            };
            Change { key: Arc::clone(&cell.key), expect, then }
        })
        .collect()
    }

    /// Returns the changes that undo `done`.
    pub(super) fn undoing(&self, done: &[Change], now: u64, mut version: impl FnMut() -> Version) -> Vec<Change> {
        let used = self.cells.iter().filter(|cell| cell.is_used).zip(done);
        used.filter_map(|(cell, change)| {
            let (expect, history) = match &change.then {
                Then::Keep => return None,
                Then::Put(value, _) => (Some(value.version), cell.history_after().after(value.version)),
                Then::Delete => (None, History::fresh()),
            };
            let state = cell.value.as_ref().map(|value| self.quotas.read(value, None));
            let then = match state {
                Some(Ok((_, state))) => {
                    Then::Put(Value::new(version(), state.write(&history)), state.time_to_live(now))
                }
                Some(Err(_)) => return None, // it was a reset, which is done again
                None => Then::Delete,
            };
            Some(Change { key: Arc::clone(&change.key), expect, then })
        })
        .collect()
    }

    /// Records that these changes of the used keys were made.
    pub(super) fn note_done(&mut self, done: &[Change], known: &KnownValues) {
        for change in done {
            let Some(cell) = self.cells.iter_mut().find(|cell| cell.key == change.key) else { continue };
            match &change.then {
                Then::Keep => continue,
                Then::Put(value, _) => cell.value = Some(value.clone()),
                Then::Delete => cell.value = None,
            }
            known.put(&cell.key, cell.hash, cell.value.as_ref());
        }
    }
}

impl Cell {
    fn set_value(&mut self, value: &Option<Value>, known: &KnownValues) {
        known.put(&self.key, self.hash, value.as_ref());
        self.value.clone_from(value);
    }

    fn clear(&mut self) {
        if self.value.is_some() || matches!(self.state, Ok(Some(_))) {
            self.state = Ok(None);
            self.is_changed = true;
        }
    }

    /// Returns the history of the next value.
    fn history_after(&self) -> History {
        self.value.as_ref().map_or_else(History::fresh, |value| self.history.after(value.version))
    }
}

/// The evidence that current values give about changes whose answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Evidence {
    Made,
    NotMade,
    /// If the changes were made, other processes have removed the values since, and nothing of the
    /// changes is left.
    Gone,
    None,
}

/// Finds out from the current values whether changes were made.
pub(super) fn evidence(changes: &[Change], current: &[Option<Value>]) -> Evidence {
    let (mut is_not_made, mut is_unknown, mut is_gone, mut only_removes) = (false, false, false, true);
    for (change, value) in changes.iter().zip(current) {
        let own = match &change.then {
            Then::Put(own, _) => Some(own.version),
            Then::Delete => None,
            Then::Keep => {
                only_removes &= change.expects(value.as_ref()); // or it was decided on a value that may have been old
                continue;
            }
        };
        only_removes &= own.is_none();
        let Some(value) = value else {
            is_gone = true;
            continue;
        };
        let history = read_history(value).unwrap_or_default();
        let knows = |version: Version| value.version == version || history.has(version);
        if own.is_some_and(knows) {
            return Evidence::Made;
        } else if change.expect.is_some_and(knows) {
            is_not_made = true; // another one followed the expected value
        } else if history.is_whole() {
            is_gone = true; // the value is a new one: the key had none since
        } else {
            is_unknown = true;
        }
    }
    match (is_not_made, is_unknown, is_gone) {
        (true, ..) => Evidence::NotMade,
        (_, true, _) => Evidence::None,
        // If the value is gone, the removal counts as made, whichever process made it. If the requests were decided
        // again, the same units could be returned twice.
        (.., true) if only_removes => Evidence::Made,
        (.., true) => Evidence::Gone,
        // Peeks change nothing, so it does not matter whether they were made.
        _ => Evidence::NotMade,
    }
}

/// Returns the rows of a state, or no rows if the state has another form.
fn rows_of(form: Option<StateForm>) -> KeyRows {
    if let Some(StateForm::Rows(rows)) = form { rows } else { KeyRows::default() }
}

fn form_of(rows: KeyRows) -> Option<StateForm> {
    (!rows.is_empty()).then_some(StateForm::Rows(rows))
}

fn is_denied(decisions: &[ChargeDecision], at: usize) -> bool {
    decisions.get(at).is_some_and(|decision| !decision.is_allowed())
}

fn after(next: Next, before: Option<StateForm>) -> Left {
    match next {
        Next::Keep => Left::of(before, false),
        Next::Clear => Left::of(None, true),
        Next::Set(pair) => Left::of(Some(StateForm::Pair(pair)), true),
    }
}

/// Changes entries in the order that the documentation of [`Edit`] gives.
fn apply(entries: &mut Vec<(u64, u64)>, edit: &Edit, log: &EntryLog) {
    if let Some(move_to) = edit.move_to {
        for (start, units) in std::mem::take(entries) {
            push(entries, (start.min(move_to), units), log);
        }
    }
    entries.drain(..edit.drop.min(entries.len()));
    if let Some(added) = edit.add {
        push(entries, added, log);
    }
    if let Some(keep) = edit.keep {
        let mut over = entries.iter().map(|entry| entry.1).sum::<u64>().saturating_sub(keep);
        for entry in entries.iter_mut() {
            let trimmed = entry.1.min(over);
            entry.1 -= trimmed;
            over -= trimmed;
        }
    }
    entries.retain(|entry| entry.1 > 0);
}

/// Adds units to the entry that starts at `start`, which is the newest entry or a new entry.
fn push(entries: &mut Vec<(u64, u64)>, (start, units): (u64, u64), log: &EntryLog) {
    match entries.last_mut() {
        Some(last) if last.0 >= start => {
            debug_assert!(last.0 == start, "entries are in order");
            last.1 = (last.1 + units).min(log.most());
        }
        _ => entries.push((start, units)),
    }
}

fn lost_track() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "a key of the request was not loaded")
}
