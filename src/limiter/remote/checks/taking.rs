//! A set of charges under way, until it is decided or its caller has gone.

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{Checks, put_bids};
use crate::base::time::Timestamp;
use crate::decision::Decision;
use crate::limiter::Charge;
use crate::limiter::remote::backend::{Answer, Backend, Intent};
use crate::limiter::remote::flights::Receiver;
use crate::limiter::remote::set::{self, Indices, Pending, Set};
use crate::limiter::remote::unanswered::Unanswered;

/// Charges are sent again if the answer names a key that was reset. They are sent at most this number of times, and
/// once more for each charge of a concurrency limit, because each of their keys may have been reset and an answer
/// names only one key.
const TRIES: usize = 2;

/// The receiver of the answer to some charges of a set. The flight owns the receiver, so the answer is noted even if
/// the caller has gone.
pub(super) struct PendingTake<B: Backend> {
    pub(super) sender: oneshot::Sender<TakeResult<B>>,
    pub(super) owed: UnsettledTake<B>,
    pub(super) terms: AskOptions,
}

/// The options of a request for charges.
#[derive(Clone, Copy)]
pub(super) struct AskOptions {
    /// The instant at which the request was sent.
    pub(super) sent: Timestamp,
    /// True if the denial of another check may answer this check.
    pub(super) repeats: bool,
    /// True if the request has all of the set's charges that the store decides.
    pub(super) is_alone: bool,
}

/// The answer for the caller. If the caller has gone, the set is dropped, which refunds the units that it
/// took.
pub(super) struct TakeResult<B: Backend> {
    pub(super) owed: UnsettledTake<B>,
    pub(super) is_repeated: bool,
    pub(super) result: Result<(), NotTaken<B::Error>>,
}

/// Why charges were not taken.
pub(super) enum NotTaken<E> {
    Failed(E),
    /// A key was reset after this process took units of it, or the call was late. Nothing was taken.
    Refused,
}

impl<E: From<Unanswered>> NotTaken<E> {
    pub(super) fn into_error(self) -> E {
        match self {
            Self::Failed(error) => error,
            Self::Refused => Unanswered::KeyReset.into(),
        }
    }
}

impl<E> From<E> for NotTaken<E> {
    fn from(error: E) -> Self {
        Self::Failed(error)
    }
}

impl<B: Backend> Receiver<Answer<B::Error>, B::Error> for PendingTake<B> {
    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    fn known(&mut self) -> Option<Answer<B::Error>> {
        let denials = &self.owed.checks.denials;
        self.terms.sent = denials.now();
        let charges = self.owed.set.iter().map(|pending| (pending.watch, pending.policy()));
        let repeated = if self.terms.repeats { denials.repeat(charges, self.terms.sent) } else { None };
        if repeated.is_none() {
            let bids = self.owed.set.iter_mut().filter_map(|pending| pending.bid.as_mut());
            bids.for_each(|bid| bid.record_sending());
        }
        repeated.map(Answer::Repeated)
    }

    fn answer(self: Box<Self>, answer: Result<Answer<B::Error>, B::Error>) {
        let Self { sender, mut owed, terms: AskOptions { sent, is_alone, .. } } = *self;
        let is_repeated = matches!(answer, Ok(Answer::Repeated(_)));
        let UnsettledTake { checks, set } = &mut owed;
        let answered = checks.put_answer(set, answer);
        // Remembers a denial only if the set was decided in one step. Otherwise the set of another caller may have
        // taken the missing units for a moment and may refund them.
        let is_noted = is_alone && matches!(answered, Ok(true));
        for pending in set.iter().filter(|_| answered.is_ok()) {
            debug_assert!(pending.decision.is_some(), "a request that was answered has a decision for each charge");
            let Some(decision) = &pending.decision else { continue };
            if let Some(leases) = &checks.leases {
                leases.record_remaining(pending.tag, decision);
            }
            if let Some(watch) = pending.watch.filter(|_| is_noted) {
                checks.denials.note(watch, sent, decision);
            }
        }
        drop(sender.send(TakeResult { owed, is_repeated, result: answered.map(drop) }));
    }
}

/// A set whose requests are under way. If the set is dropped before it is decided, the charges that it took
/// are refunded.
pub(super) struct UnsettledTake<B: Backend> {
    pub(super) checks: Arc<Checks<B>>,
    pub(super) set: Set,
}

impl<B: Backend> UnsettledTake<B> {
    /// Removes the charges at these indices.
    pub(super) fn part(&mut self, indices: &Indices) -> Self {
        Self { checks: Arc::clone(&self.checks), set: take_out(&mut self.set, indices) }
    }

    pub(super) fn decide(mut self) -> Decision {
        let (decision, refunds) = set::decide(std::mem::take(&mut self.set));
        self.checks.send_refunds(refunds);
        decision
    }
}

impl<B: Backend> Drop for UnsettledTake<B> {
    fn drop(&mut self) {
        self.checks.send_refunds(set::undo(&mut self.set));
    }
}

impl<B: Backend> Checks<B> {
    /// Makes the request for the charges of a lane once more.
    pub(super) fn request_again(self: &Arc<Self>, set: &mut Set) -> Result<B::Request, B::Error> {
        let mut bids = Vec::new();
        let parts = {
            let charges: SmallVec<[Charge<'_>; 2]> = set.iter().map(Pending::charge).collect();
            self.parts(Intent::Take, &charges, |_| true, |at, key| self.bid(key, &charges[at], at, &mut bids))
        };
        put_bids(set, bids);
        parts.into_iter().next().map(|part| part.request).ok_or_else(|| Unanswered::Misunderstood.into())
    }
}

/// Returns the maximum number of times that these charges are sent.
pub(super) fn tries(set: &Set) -> usize {
    TRIES + set.iter().filter(|pending| pending.bid.is_some()).count()
}

/// Removes the charges at these indices from a set.
pub(super) fn take_out(set: &mut Set, indices: &Indices) -> Set {
    if indices.len() == set.len() {
        return std::mem::take(set);
    }
    let (part, rest) = std::mem::take(set).into_iter().partition(|pending| indices.binary_search(&pending.at).is_ok());
    *set = rest;
    part
}

/// Puts the parts of a set together.
///
/// # Errors
/// Returns the first error.
pub(super) fn put_together<E>(parts: Vec<Result<Set, E>>) -> Result<Decision, E> {
    let mut whole = Set::new();
    for part in parts {
        whole.append(&mut part?);
    }
    whole.sort_unstable_by_key(|pending| pending.at);
    Ok(set::decide(whole).0)
}

/// Puts the decisions about these charges into the set. Returns whether the store decided the charges in one
/// step.
pub(super) fn put_decisions<E: From<Unanswered>>(set: &mut Set, answer: Result<Answer<E>, E>) -> Result<bool, E> {
    let (decision, in_one_step, failed) = match answer? {
        Answer::Decided(decision) => (decision, true, None),
        Answer::Repeated(decision) => (decision, false, None),
        Answer::Split(decision, failed) => (decision, false, failed),
        Answer::Done
        | Answer::Behind
        | Answer::Elsewhere
        | Answer::Outside(_)
        | Answer::Refused(..)
        | Answer::Missing => {
            return Err(Unanswered::Misunderstood.into());
        }
    };
    set::fill(set, decision);
    failed.map_or(Ok(in_one_step), Err)
}
