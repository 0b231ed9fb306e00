//! What was decided, as the observer and the service are told it.

use smallvec::SmallVec;

use super::charging::Shared;
use super::companions;
use super::decided::Decided;
use crate::decision::ChargeDecision;
use crate::outcome::{Outcome, Standing};

impl<L> Shared<L> {
    /// Tells the observer, and returns the outcome if the request is to carry it on.
    #[inline(always)]
    pub(super) fn tell(&self, decided: &Decided) -> Option<Outcome> {
        if self.is_unobserved() && !decided.is_told() {
            return None;
        }
        let outcome = self.outcome(decided);
        if let Some(observer) = &self.settings.observer {
            observer.on_outcome(&outcome);
        }
        (self.settings.expose_outcome || decided.is_told()).then_some(outcome)
    }

    pub(super) fn outcome(&self, decided: &Decided) -> Outcome {
        let mut standings = SmallVec::new();
        let (charges, decisions) = decided.answers();
        for (at, (charge, decision)) in charges.iter().zip(decisions).enumerate() {
            if let Some(policy) = self.policy(charge.policy) {
                let near = self.near.get(charge.policy).copied().flatten();
                standings.push(Standing {
                    policy: policy.clone(),
                    cost: charge.cost,
                    mode: charge.mode(),
                    refuses: companions::refuses(charges, decisions, at),
                    near: near.is_some_and(|percent| is_near(decision, percent)),
                    decision: decision.clone(),
                });
            }
        }
        Outcome::new(decided.kind, standings)
    }
}

/// Whether so many percent of the capacity remain at most.
fn is_near(decision: &ChargeDecision, percent: u8) -> bool {
    let (remaining, limit) = (u128::from(decision.remaining()), u128::from(decision.limit()));
    decision.is_known() && remaining * 100 <= limit * u128::from(percent)
}
