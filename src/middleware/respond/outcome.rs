//! The outcome of a request, for the observer and the service.

use http::request::Parts;

use super::headers::is_near;
use crate::limiter::Limiter;
use crate::middleware::decide::linked;
use crate::middleware::ticket::Ticket;
use crate::outcome::{Observed, Outcome, PolicyStatus};

impl<L: Limiter> Ticket<L> {
    pub(crate) fn outcome(&self) -> Outcome {
        let statuses = self.answered().iter().enumerate().filter_map(|(at, charged)| {
            let warn_at = self.layer.warn_at_percent(charged.policy);
            Some(PolicyStatus {
                policy: self.layer.policy(charged.policy)?.clone(),
                cost: charged.cost,
                mode: charged.mode,
                refuses: linked::refuses(&self.charges, at),
                near: warn_at.is_some_and(|percent| charged.decision.is_known() && is_near(&charged.decision, percent)),
                decision: charged.decision.clone(),
            })
        });
        Outcome::new(self.kind, statuses.collect())
    }

    /// Reports the outcome to the observer. Returns it if the request has to carry it to the service.
    #[inline]
    pub(crate) fn report(&self, request: &Parts) -> Option<Outcome> {
        let carries = self.layer.settings.expose_outcome || self.kind.is_told();
        if !carries && self.layer.settings.observer.is_none() {
            return None;
        }
        let outcome = self.outcome();
        self.observe(request, &outcome);
        carries.then_some(outcome)
    }

    #[inline(never)]
    pub(crate) fn observe(&self, request: &Parts, outcome: &Outcome) {
        if let Some(observer) = &self.layer.settings.observer {
            let keys =
                self.charges.iter().filter_map(|charged| Some((self.layer.policy(charged.policy)?, &charged.key)));
            observer.on_outcome(&Observed::new(outcome, request, keys));
        }
    }
}
