//! A set of charges under way: leases grant some charges, the store decides the other charges, and
//! all answers make one decision.

use smallvec::SmallVec;

use super::denial_cache::Watch;
use super::holdings::Bid;
use super::tag::Tag;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::{Arrival, Charge, Effect, Effective, Refund, binds};
use crate::policy::Policy;

/// A charge of a set.
pub(crate) struct Pending {
    /// The charge's index in the set.
    pub(crate) at: usize,
    policy: Policy,
    key: Key,
    effect: Effect,
    cost: u64,
    arrival: Arrival,
    pub(crate) tag: Tag,
    /// The data with which the charge's denial is remembered, or `None` if the denial must not be
    /// remembered.
    pub(crate) watch: Option<Watch>,
    /// The decision about the charge. The decision is `None` until the store has answered, unless a
    /// lease granted the charge.
    pub(crate) decision: Option<ChargeDecision>,
    /// The take of a concurrency limit's units, until the answer to the take is recorded.
    pub(crate) bid: Option<Box<Bid>>,
    /// False if the store refused the request in which the charge was sent.
    passed: bool,
}

/// The charges of a set. The charges are moved between futures several times, so they are not
/// stored inline.
pub(crate) type Set = Vec<Pending>;

/// The indices of a request's charges in their set, in order.
pub(crate) type Indices = SmallVec<[usize; 2]>;

impl Pending {
    pub(crate) fn new(at: usize, charge: &Charge<'_>, tag: Tag) -> Self {
        let Charge { policy, key, effect, cost, arrival } = *charge;
        let (policy, key) = (policy.clone(), key.clone());
        Self { at, policy, key, effect, cost, arrival, tag, watch: None, decision: None, bid: None, passed: true }
    }

    pub(crate) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the charge.
    pub(crate) fn charge(&self) -> Charge<'_> {
        let Self { policy, key, cost, effect, arrival, .. } = self;
        Charge { policy, key, cost: *cost, effect: *effect, arrival: *arrival }
    }

    /// Takes the receipt out of the decision, and returns it as a refund. The decision then reports the state as if
    /// nothing had been taken. The remaining units are exact. A wait may be too long, but not too short.
    fn refund(&mut self) -> Option<Refund> {
        let decision = self.decision.as_mut()?;
        let receipt = decision.take_receipt();
        // A charge on refusal has taken something only if it has a receipt. A forced charge in debt adds nothing to
        // the units that are left, because no unit was left before the charge.
        let on_refusal = matches!(self.effect, Effect::OnRefusal { .. });
        let in_debt = self.effect == Effect::Force && decision.remaining() == 0;
        let taken = receipt.as_ref().map_or(if on_refusal { 0 } else { self.cost }, Receipt::units);
        if self.passed && decision.is_allowed() && !in_debt {
            decision.stand(taken);
        }
        receipt.map(|receipt| Refund::new(self.policy.clone(), self.key.clone(), receipt))
    }
}

impl Effective for Pending {
    fn policy(&self) -> &Policy {
        &self.policy
    }

    fn effect(&self) -> Effect {
        self.effect
    }
}

/// Stores the store's decision about each charge in that charge.
pub(crate) fn fill(set: &mut Set, decision: Decision) {
    let passed = decision.is_allowed();
    for (pending, decision) in set.iter_mut().zip(decision.into_charges()) {
        (pending.decision, pending.passed) = (Some(decision), passed);
    }
}

/// Returns the refunds of all charges that the set took.
pub(crate) fn undo(set: &mut Set) -> Vec<Refund> {
    set.iter_mut().filter_map(Pending::refund).collect()
}

/// Returns the decision about the whole set, and the refunds if it is refused.
pub(crate) fn decide(mut set: Set) -> (Decision, Vec<Refund>) {
    debug_assert!(set.iter().all(|pending| pending.decision.is_some()), "a set is decided after all its answers");
    let denied = |pending: &Pending| pending.decision.as_ref().is_none_or(|decision| !decision.is_allowed());
    let allowed = !set.iter().enumerate().any(|(at, pending)| denied(pending) && binds(&set, at));
    let refunds = if allowed { Vec::new() } else { undo(&mut set) };
    let decisions = set.into_iter().map(|pending| pending.decision.unwrap_or_else(ChargeDecision::blank));
    (Decision::new(allowed, decisions), refunds)
}
