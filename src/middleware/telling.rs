//! What was decided, as the observer and the service are told it.

use http::request::Parts;
use smallvec::SmallVec;

use super::charging::Shared;
use super::companions;
use super::decided::Decided;
use crate::decision::ChargeDecision;
use crate::outcome::{Observed, Outcome, Standing};

impl<L> Shared<L> {
    /// Whether an observer, or the service, is told the outcome of a request that passes.
    #[inline(always)]
    pub(super) fn has_to_tell(&self, decided: &Decided) -> bool {
        !self.is_unobserved() || decided.is_told()
    }

    /// Tells the observer, and returns the outcome if the request is to carry it on.
    pub(super) fn tell(&self, request: &Parts, decided: &Decided) -> Option<Outcome> {
        let outcome = self.outcome(decided);
        self.observe(request, decided, &outcome);
        (self.settings.expose_outcome || decided.is_told()).then_some(outcome)
    }

    /// Tells the observer.
    pub(super) fn observe(&self, request: &Parts, decided: &Decided, outcome: &Outcome) {
        if let Some(observer) = &self.settings.observer {
            let keys = decided.charges().filter_map(|(policy, key)| Some((self.policy(policy)?, key)));
            observer.on_outcome(&Observed::new(outcome, request, keys));
        }
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
