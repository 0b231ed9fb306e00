//! Takes the units of an account from the layer's limiter, under a policy and a key.

use std::sync::Arc;

use super::account::{BytePace, PaceAnswer, PaceReply, PaceSource, PaceTerms};
use super::body::{BodyPaces, PaceReport};
use crate::base::wait::Wait;
use crate::decision::{Decision, Receipt};
use crate::limiter::{Charge, Limiter, Refund, Reply};
use crate::middleware::compiled::Compiled;
use crate::middleware::rule::PacedBodies;
use crate::middleware::settings::OnError;
use crate::middleware::ticket::PacedBy;
use crate::mode::Mode;
use crate::policy::Policy;
use crate::quota::Quota;

/// Returns the paces of a request's bodies in one direction.
pub(crate) fn paces<L: Limiter>(layer: &Arc<Compiled<L>>, paced: &[PacedBy], bodies: PacedBodies) -> BodyPaces {
    let mut paces = BodyPaces::default();
    let Some(accounts) = &layer.accounts else { return paces };
    for paced in paced {
        let Some((rule, policy)) = layer.pacing_rule(paced.policy).zip(paced.policy_in(layer)) else { continue };
        if rule.pace.is_some_and(|own| own.includes(bodies)) {
            let source = || Box::new(LimiterSource { layer: Arc::clone(layer), paced: paced.clone() }) as Box<_>;
            // This comes first, because the observer is the application's code and may panic.
            let observer = layer.settings.observer.as_ref();
            let report = observer.map(|observer| PaceReport::begin(observer, accounts.timer(), policy));
            paces.add(accounts.enter((policy.fingerprint(), paced.key.clone()), source), rule.pace_after, report);
        }
    }
    paces
}

/// A policy and a key of a layer's limiter.
struct LimiterSource<L: Limiter> {
    layer: Arc<Compiled<L>>,
    paced: PacedBy,
}

impl<L: Limiter> PaceSource for LimiterSource<L> {
    fn terms(&self) -> PaceTerms {
        let Some(policy) = self.paced.policy_now(&self.layer) else { return PaceTerms::Free };
        let mode = self.layer.mode_now(self.paced.policy).unwrap_or(Mode::Enforce);
        let quota = policy.quota();
        if mode != Mode::Enforce || quota.is_unlimited() {
            return PaceTerms::Free;
        }
        // If bodies must meet several quotas, the fastest is the pace. The others are limits.
        let others = if self.paced.own.is_none() { self.layer.policies_together(self.paced.policy) } else { &[] };
        let fastest = others.iter().map(Policy::quota).fold(quota, |fastest, other| faster(fastest, other));
        PaceTerms::Paced(BytePace {
            units: fastest.limit(),
            period_us: fastest.spec().period_us,
            // Asks for half of it, so that units have come back in the meantime if a batch is late.
            most: (quota.capacity() / 2).max(1),
        })
    }

    fn ask(&self, units: u64) -> PaceReply {
        let Some(policy) = self.paced.policy_now(&self.layer) else { return PaceReply::Now(PaceAnswer::FailedOpen) };
        if let Some(error) = self.layer.unpaceable(&policy) {
            self.layer.report_failure(&error);
            return PaceReply::Now(failure(&self.layer, IsOverload::No));
        }
        match self.layer.limiter.take(&[Charge::new(&policy, &self.paced.key).cost(units)]) {
            Reply::Now(answer) => PaceReply::Now(read(&self.layer, answer)),
            Reply::Later(answer) => {
                let layer = Arc::clone(&self.layer);
                PaceReply::Later(Box::pin(async move { read(&layer, answer.await) }))
            }
        }
    }

    fn refund(&self, receipt: Receipt) {
        if let Some(policy) = self.paced.policy_of_refunds(&self.layer) {
            self.layer.refund(vec![Refund::new(policy, self.paced.key.clone(), receipt)]);
        }
    }
}

/// Returns the faster one of two quotas that have a pace.
fn faster<'a>(one: &'a Quota, other: &'a Quota) -> &'a Quota {
    // Compares the rates by cross-multiplication, which needs no division.
    let units = |quota: &Quota, period: &Quota| u128::from(quota.limit()) * u128::from(period.spec().period_us);
    let has_pace = other.algorithm().is_rate() && !other.is_unlimited();
    if has_pace && units(other, one) > units(one, other) { other } else { one }
}

/// Reads a limiter's answer.
fn read<L: Limiter>(layer: &Compiled<L>, answer: Result<Decision, L::Error>) -> PaceAnswer {
    match answer {
        Ok(mut decision) => {
            let is_allowed = decision.is_allowed();
            debug_assert_eq!(decision.charges().len(), 1, "one charge has one decision");
            let Some(charge) = decision.charge_mut(0) else {
                return PaceAnswer::Denied { wait: Wait::Unknown, remaining: 0 };
            };
            match is_allowed {
                true => PaceAnswer::Taken { receipt: charge.take_receipt(), delay: charge.delay() },
                false => PaceAnswer::Denied { wait: charge.wait(), remaining: charge.remaining() },
            }
        }
        Err(error) => {
            layer.report_failure(&error);
            let is_overload = if layer.limiter.is_overload(&error) { IsOverload::Yes } else { IsOverload::No };
            failure(layer, is_overload)
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum IsOverload {
    Yes,
    No,
}

/// Returns the effect of a failure of the limiter, as for a request.
fn failure<L: Limiter>(layer: &Compiled<L>, is_overload: IsOverload) -> PaceAnswer {
    let passes = match layer.settings.on_error {
        OnError::Deny => false,
        OnError::Allow => is_overload == IsOverload::No,
        OnError::AllowAlways => true,
    };
    if passes { PaceAnswer::FailedOpen } else { PaceAnswer::FailedClosed }
}
