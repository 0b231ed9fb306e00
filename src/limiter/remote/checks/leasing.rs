//! Asks for leases, and refunds their remaining units.

use std::sync::{Arc, Weak};

use super::Checks;
use crate::limiter::Charge;
use crate::limiter::remote::backend::{Answer, Backend, Intent};
use crate::limiter::remote::holdings::Claim;
use crate::limiter::remote::leases::{HELD, Leases, Wanted};

impl<B: Backend> Checks<B> {
    /// Sends the request for a lease.
    pub(super) fn lease(self: &Arc<Self>, leases: &Arc<Leases>, wanted: Wanted) {
        let charge = Charge::new(&wanted.policy, &wanted.key).cost(wanted.units);
        let stored = self.backend.stored(charge.policy, charge.key);
        let request = self.backend.charge(Intent::Take, [(&charge, &stored, Claim::default())].into_iter());
        let (checks, held) = (Arc::downgrade(self), Arc::clone(leases));
        let wanted = Arc::new(wanted);
        let asked = Arc::clone(&wanted);
        let sent = self.send(request, move |answer| {
            let answer = match answer {
                Ok(Answer::Decided(decision)) => decision.into_charges().next(),
                _ => None,
            };
            if let (Some(refund), Some(checks)) = (held.record_answer(&asked, answer), checks.upgrade()) {
                checks.send_refunds(vec![refund]);
            }
        });
        if sent.is_err() {
            leases.record_answer(&wanted, None);
        }
    }

    /// Returns how many units are leased now.
    #[cfg(test)]
    pub(crate) fn leased(&self) -> u64 {
        self.leases.as_ref().map_or(0, |leases| leases.held())
    }

    /// Refunds the remaining units of leases that are over, until the limiter is dropped.
    pub(super) async fn refund_leases(limiter: Weak<Self>) {
        let mut ticks = tokio::time::interval(HELD / 2);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(checks) = limiter.upgrade() else { return };
            if let Some(leases) = &checks.leases {
                checks.send_refunds(leases.end_expired());
            }
        }
    }
}
