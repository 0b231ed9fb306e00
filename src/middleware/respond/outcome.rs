//! The outcome of a request, for the observer and the service.

use crate::base::head::Head;
use crate::base::sync::contained;
use crate::headers::is_near;
use crate::middleware::charge::access::deciding_network;
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::kind::OutcomeCause;
use crate::middleware::decide::linked;
use crate::middleware::ticket::Ticket;
use crate::outcome::{Observed, Outcome, OutcomeKind, PolicyStatus};

impl Ticket {
    pub(crate) fn outcome<L>(&self, layer: &Compiled<L>) -> Outcome {
        let statuses = self.answered().iter().enumerate().filter_map(|(at, charged)| {
            let warn_at = layer.warn_at_percent(charged.policy);
            Some(PolicyStatus {
                policy: charged.policy_in(layer)?.clone(),
                cost: charged.cost,
                mode: charged.mode,
                refuses: linked::refuses(&self.charges, at),
                near: warn_at.is_some_and(|percent| charged.decision.is_known() && is_near(&charged.decision, percent)),
                taken: self.taken(at),
                decision: charged.decision.clone(),
            })
        });
        Outcome::new(self.kind, statuses.collect()).lacking_peer(self.lacks_peer)
    }

    /// Reports the outcome to the observer. Returns the outcome if the request has to carry it to the
    /// service.
    #[inline]
    pub(crate) fn report<L>(&self, layer: &Compiled<L>, request: &Head<'_>) -> Option<Outcome> {
        let carries = layer.settings.expose_outcome || self.kind.is_always_exposed();
        if !carries && layer.settings.observer.is_none() {
            return None;
        }
        let outcome = self.outcome(layer);
        self.observe(layer, request, &outcome);
        carries.then_some(outcome)
    }

    /// Reports that the request was dropped before the limiter answered. A panic of the application's observer ends
    /// here, because this method is called while a value is dropped.
    #[cold]
    pub(crate) fn report_dropped<L>(&mut self, layer: &Compiled<L>, request: &Head<'_>) {
        self.decide(layer, OutcomeCause::Dropped);
        contained(|| self.observe(layer, request, &self.outcome(layer)));
    }

    #[inline(never)]
    pub(crate) fn observe<L>(&self, layer: &Compiled<L>, request: &Head<'_>, outcome: &Outcome) {
        if let Some(observer) = &layer.settings.observer {
            let keys = self.charges.iter().filter_map(|charged| Some((charged.policy_in(layer)?, &charged.key)));
            let observed = Observed::new(outcome, request, keys);
            observer.on_outcome(&match self.kind {
                // Looked up again, so that a ticket need not have it.
                OutcomeKind::Denied => observed.with_denied_network(deciding_network(&layer.settings.access, request)),
                _ => observed,
            });
        }
    }
}
