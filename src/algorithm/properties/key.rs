//! One key, kept outside the pure functions as a limiter keeps it.

use crate::algorithm::carry::{Fit, NewState, OldState};
use crate::algorithm::entry_log::{Edit, EntryLog, Listed, LogEntries};
use crate::algorithm::{Decider, Layout, NUMBER_BITS, Next, Pair, PairDecider, TakeMode, Used, WORD_AHEAD_US};
use crate::decision::{ChargeDecision, Receipt};
use crate::quota::Quota;

/// Dated entries in a list: applies an [`Edit`] in the order that its documentation gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Log(pub(crate) Vec<(u64, u64)>);

impl Log {
    fn push(&mut self, (start, units): (u64, u64), most: u64) {
        match self.0.last_mut() {
            Some(last) if last.0 == start => last.1 = (last.1 + units).min(most),
            last => {
                assert!(last.is_none_or(|last| last.0 < start), "entries are in order");
                self.0.push((start, units));
            }
        }
    }

    pub(super) fn apply(&mut self, edit: Edit, most: u64) {
        if let Some(move_to) = edit.move_to {
            for (start, units) in std::mem::take(&mut self.0) {
                self.push((start.min(move_to), units), most);
            }
        }
        self.0.drain(..edit.drop);
        if let Some(added) = edit.add {
            assert!(added.1 > 0, "nothing is not added");
            self.push(added, most);
        }
        if let Some(keep) = edit.keep {
            let mut over = Listed(&self.0).total().saturating_sub(keep);
            for entry in &mut self.0 {
                let trimmed = entry.1.min(over);
                entry.1 -= trimmed;
                over -= trimmed;
            }
        }
        self.0.retain(|entry| entry.1 > 0);
    }

    fn take(&mut self, start: u64, units: u64) {
        self.0.iter_mut().filter(|entry| entry.0 == start).for_each(|entry| entry.1 -= units);
        self.0.retain(|entry| entry.1 > 0);
    }
}

/// One key's state under one quota.
#[derive(Clone, Debug)]
pub(crate) enum State {
    Pair(PairDecider, Option<Pair>),
    EntryLog(EntryLog, Log),
}

impl State {
    pub(crate) fn new(quota: &Quota) -> Self {
        match quota.decider() {
            Decider::Pair(decider, _) => Self::Pair(*decider, None),
            Decider::EntryLog(decider) => Self::EntryLog(*decider, Log::default()),
            Decider::Places(_) => panic!("a concurrency limit has no clock: its laws are in algorithm/places.rs"),
        }
    }

    /// Does what [`decide_how`](Self::decide_how) does for a charge that belongs to no other.
    pub(crate) fn decide(&mut self, now: u64, cost: u64, force: bool) -> (ChargeDecision, bool) {
        self.decide_how(now, cost, if force { TakeMode::Force } else { TakeMode::IfAllowed })
    }

    /// Answers, writes what is to be written, and says whether anything was.
    fn decide_how(&mut self, now: u64, cost: u64, how: TakeMode) -> (ChargeDecision, bool) {
        match self {
            Self::Pair(decider, state) => {
                let answer = decider.decide_how(*state, now, cost, how);
                set(state, answer.next);
                (answer.decision, answer.next != Next::Keep)
            }
            Self::EntryLog(decider, log) => {
                let answer = decider.decide_how(&Listed(&log.0), now, cost, how);
                if let Some(edit) = answer.edit {
                    log.apply(edit, decider.most());
                }
                (answer.decision, answer.edit.is_some())
            }
        }
    }

    /// The answer, and nothing is written.
    pub(super) fn look(&self, now: u64, cost: u64) -> ChargeDecision {
        self.clone().decide(now, cost, false).0
    }

    pub(super) fn admits(&self, now: u64, cost: u64) -> bool {
        self.look(now, cost).is_allowed()
    }

    /// Returns whether the refund has no effect because a later slot of the queue is taken.
    pub(crate) fn refund(&mut self, now: u64, receipt: &Receipt, units: u64) -> bool {
        match self {
            Self::Pair(decider, state) => {
                let own = Pair { at: receipt.at_us(), n: receipt.part() };
                let Some(kept) = *state else { return false };
                set(state, decider.get().refund(kept, now, units, own));
                decider.get().is_behind(kept, now, own)
            }
            Self::EntryLog(decider, log) => {
                if let Some((start, units)) = decider.refundable(&Listed(&log.0), now, units, receipt.at_us()) {
                    log.take(start, units);
                }
                false
            }
        }
    }

    pub(crate) fn used(&self, now: u64) -> Used {
        match self {
            Self::Pair(_, None) => Used { parts: 0, of: 1 },
            Self::Pair(decider, Some(state)) => decider.get().carried(*state, now, false).used,
            Self::EntryLog(decider, log) => decider.carried(&Listed(&log.0), now).used,
        }
    }

    /// This state of a quota as another takes it over, and what that one may write.
    pub(crate) fn taken_over(&self, from: &Quota, to: &Quota, now: u64) -> (Self, Fit) {
        let share = to.spec().proportional.then_some((from.capacity(), to.capacity()));
        let (kept, fit) = match self {
            Self::Pair(_, None) => return (Self::new(to), Fit::Fits),
            Self::Pair(_, Some(state)) => {
                to.decider().take_over::<Listed<'_>>(from.decider(), &OldState::Pair(*state), now, share)
            }
            Self::EntryLog(_, log) => {
                to.decider().take_over(from.decider(), &OldState::Entries(&Listed(&log.0)), now, share)
            }
        };
        let state = match (Self::new(to), kept) {
            (Self::Pair(decider, _), NewState::Pair(state)) => Self::Pair(decider, state),
            (Self::EntryLog(decider, _), NewState::Entries(entries)) => Self::EntryLog(decider, Log(entries)),
            (state, kept) => panic!("{kept:?} is no state like {state:?}"),
        };
        (state, fit)
    }

    /// Returns whether the key is out of allowance, for choosing which state to forget. Returns `None` if there is no
    /// state.
    pub(super) fn is_throttled(&self, now: u64) -> Option<bool> {
        match self {
            Self::Pair(_, None) => None,
            Self::Pair(decider, Some(state)) => Some(decider.get().fullness(*state, now).throttled),
            Self::EntryLog(decider, log) => Some(decider.fullness(&Listed(&log.0), now).throttled),
        }
    }

    /// Whether the state's own instant or entries are over.
    pub(super) fn is_over(&self, now: u64) -> bool {
        match self {
            Self::Pair(PairDecider::Gcra(_) | PairDecider::WideGcra(_), state) => {
                state.is_none_or(|pair| pair.at + u64::from(pair.n > 0) <= now)
            }
            Self::Pair(_, state) => state.is_none_or(|pair| pair.at <= now),
            Self::EntryLog(decider, log) => log.0.last().is_none_or(|newest| newest.0 + decider.life_us() <= now),
        }
    }

    /// The latest instant that the state holds.
    pub(super) fn latest(&self) -> Option<u64> {
        match self {
            Self::Pair(_, state) => state.map(|pair| pair.at),
            Self::EntryLog(_, log) => log.0.last().map(|newest| newest.0),
        }
    }

    /// Checks that the state fits the word that its layout promises, and can be read back from it.
    pub(super) fn check_layout(&self, quota: &Quota, now: u64) {
        let (Self::Pair(_, Some(pair)), Layout::Word(word)) = (self, quota.decider().layout()) else { return };
        assert_eq!(pair.n >> (NUMBER_BITS + word.shift), 0, "{pair:?} of {quota:?}");
        assert!(pair.at.saturating_sub(now) <= WORD_AHEAD_US, "{pair:?} at {now} of {quota:?}");
        assert_eq!(pair.at % word.grid.get(), 0, "{pair:?} of {quota:?}");
        let rounded = pair.at.div_ceil(1 << word.shift) << word.shift;
        assert_eq!(rounded / word.grid.get() * word.grid.get(), pair.at, "{pair:?} of {quota:?}");
    }

    pub(super) fn words(&self) -> (Option<Pair>, Vec<(u64, u64)>) {
        match self {
            Self::Pair(_, state) => (*state, Vec::new()),
            Self::EntryLog(_, log) => (None, log.0.clone()),
        }
    }
}

fn set(state: &mut Option<Pair>, next: Next) {
    match next {
        Next::Keep => {}
        Next::Clear => *state = None,
        Next::Set(pair) => *state = Some(pair),
    }
}

/// A key under quotas that change: a state, and the quota that it was written under.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) state: State,
    pub(crate) written: Quota,
}

impl Planned {
    pub(crate) fn new(quota: &Quota) -> Self {
        Self { state: State::new(quota), written: *quota }
    }

    /// The state as this quota finds it, and what it may write.
    pub(crate) fn under(&self, quota: &Quota, now: u64) -> (State, Fit) {
        match self.written == *quota {
            true => (self.state.clone(), Fit::Fits),
            false => self.state.taken_over(&self.written, quota, now),
        }
    }

    /// Does what [`decide_how`](Self::decide_how) does for a charge that belongs to no other.
    pub(crate) fn decide(&mut self, quota: &Quota, now: u64, cost: u64, force: bool) -> (ChargeDecision, bool) {
        self.decide_how(quota, now, cost, if force { TakeMode::Force } else { TakeMode::IfAllowed })
    }

    /// Answers, and writes what is to be written: a quota that takes nothing writes only what it counts, or what is
    /// further ahead than it can put it; and nothing of what it could not keep.
    pub(crate) fn decide_how(&mut self, quota: &Quota, now: u64, cost: u64, how: TakeMode) -> (ChargeDecision, bool) {
        let (mut state, fit) = self.under(quota, now);
        let (decision, wrote) = state.decide_how(now, cost, how);
        let writes = fit != Fit::Over && (wrote || fit == Fit::Ahead && cost > 0);
        if writes {
            *self = Self { state, written: *quota };
        }
        (decision, writes)
    }

    /// Refunds what the state still holds of the receipt. Writes nothing if it holds nothing. Returns whether the
    /// refund has no effect because a later slot of the queue is taken.
    #[cfg(feature = "_redis")]
    pub(crate) fn refund(&mut self, quota: &Quota, now: u64, receipt: &Receipt, units: u64) -> bool {
        let (before, fit) = self.under(quota, now);
        let mut after = before.clone();
        let is_behind = after.refund(now, receipt, units);
        if fit != Fit::Over && after.words() != before.words() {
            *self = Self { state: after, written: *quota };
        }
        fit != Fit::Over && is_behind
    }
}
