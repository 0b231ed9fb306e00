//! A set of charges on its way: what was granted here, what is asked for, and how the answers make one decision.

use smallvec::SmallVec;

use super::denials::Watch;
use super::error::RedisError;
use super::tag::Tag;
use super::wire::{Answer, nonsense};
use crate::decision::{ChargeDecision, Decision};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Effective, Refund, binds};
use crate::policy::Policy;

/// A charge of a set that waits for its answer.
pub(super) struct Pending {
    policy: Policy,
    key: Key,
    effect: Effect,
    pub(super) tag: Tag,
    /// What is needed to remember its denial, if it is to be.
    pub(super) watch: Option<Watch>,
    cost: u64,
    /// There from the start if a lease had its units.
    decision: Option<ChargeDecision>,
    /// Units that it took and that go back.
    given_back: Option<u64>,
    /// Those who answered took it, or would have, for all that they know of the set.
    passed: bool,
}

/// The charges of a set.
pub(super) type Set = SmallVec<[Pending; 2]>;

impl Pending {
    pub(super) fn new(charge: &Charge<'_>, tag: Tag, watch: Option<Watch>, granted: Option<ChargeDecision>) -> Self {
        let (policy, key) = (charge.policy.clone(), charge.key.clone());
        Self {
            policy,
            key,
            effect: charge.effect,
            tag,
            watch,
            cost: charge.cost,
            decision: granted,
            given_back: None,
            passed: true,
        }
    }

    pub(super) fn decision(&self) -> Option<&ChargeDecision> {
        self.decision.as_ref()
    }

    /// The answer, and whether what was asked together passed.
    pub(super) fn answer(&mut self, decision: ChargeDecision, passed: bool) {
        self.decision = Some(decision);
        self.passed = passed;
    }

    /// Tells how it stands once it is given back: what is left exactly, and no wait shorter than it is. Who is in debt is not
    /// told more than nothing.
    fn stand(&mut self) {
        if let (true, Some(decision)) = (self.passed, &mut self.decision) {
            let in_debt = self.effect == Effect::Force && decision.remaining() == 0;
            // What belongs to others has taken something only if it has a receipt.
            let is_hit = !matches!(self.effect, Effect::OnRefusal { .. });
            if decision.is_allowed() && !in_debt {
                decision.stand(self.given_back.unwrap_or(if is_hit { self.cost } else { 0 }));
            }
        }
    }

    fn give_back(&mut self) -> Option<Refund> {
        let receipt = self.decision.as_mut()?.take_receipt()?;
        self.given_back = Some(receipt.units());
        Some(Refund::new(self.policy.clone(), self.key.clone(), receipt))
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

/// Which charges of a set an ask is for.
pub(super) type Places = SmallVec<[usize; 2]>;

/// Puts an answer in its places, and says whether it was decided in one step; or why there is none, and then the set has
/// what was taken all the same.
pub(super) fn answer(set: &mut Set, places: Places, answer: Result<Answer, RedisError>) -> Result<bool, RedisError> {
    let (decision, atomic, failed) = match answer? {
        Answer::Decided(decision) => (decision, true, None),
        Answer::Pieced(decision, failed) => (decision, false, failed),
        Answer::Failed(error) => return Err(error),
        Answer::Done | Answer::Again | Answer::Elsewhere | Answer::Refused(_) => return Err(nonsense()),
    };
    let passed = decision.is_allowed();
    for (place, decision) in places.into_iter().zip(decision.into_charges()) {
        set[place].answer(decision, passed);
    }
    failed.map_or(Ok(atomic), Err)
}

/// What the set took, to be given back.
pub(super) fn undo(set: &mut Set) -> Vec<Refund> {
    set.iter_mut().filter_map(Pending::give_back).collect()
}

/// The decision about the whole set, and what is to be given back if it is refused.
pub(super) fn decide(mut set: Set) -> (Decision, Vec<Refund>) {
    let denied = |pending: &Pending| pending.decision().is_none_or(|decision| !decision.is_allowed());
    let allowed = !set.iter().enumerate().any(|(at, pending)| denied(pending) && binds(&set, at));
    let refunds = if allowed { Vec::new() } else { undo(&mut set) };
    if !allowed {
        set.iter_mut().for_each(Pending::stand);
    }
    let decisions =
        set.into_iter().map(|pending| pending.decision.unwrap_or_else(|| ChargeDecision::denied(0, 0, None)));
    (Decision::new(allowed, decisions), refunds)
}
