//! Takes the units of an account from the layer's limiter, under a policy and a key.

use std::sync::{Arc, Weak};

use super::account::{BytePace, PaceAnswer, PaceReply, PaceSource, PaceTerms};
use super::accounts::{AccountId, AccountOf};
use super::body::{BodyPaces, PaceReport};
use crate::base::wait::Wait;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::{Charge, Limiter, Refund, Reply};
use crate::middleware::compiled::Compiled;
use crate::middleware::latest::Latest;
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
            let source = || Box::new(LimiterSource::new(layer, paced)) as Box<_>;
            // Makes the report before the body enters its account, because the observer is the application's code and
            // may panic.
            let observer = layer.settings.observer.as_ref();
            let report = observer.map(|observer| PaceReport::begin(observer, accounts.timer(), policy));
            paces.add(accounts.enter(account_id(layer, paced, policy), source), rule.pace_after, report);
        }
    }
    paces
}

/// Returns the identity of the account of a policy and a key. If the quota is switched, the account
/// stays.
fn account_id<L: Limiter>(layer: &Compiled<L>, paced: &PacedBy, policy: &Policy) -> AccountId {
    let which = match &paced.own {
        Some(own) => AccountOf::Quota(own.quota().fingerprint()),
        None => AccountOf::Plan(layer.plan_of(paced.policy)),
    };
    (policy.name_fingerprint(), which, paced.key.clone())
}

/// A policy and a key of a layer's limiter.
struct LimiterSource<L: Limiter> {
    layer: Arc<Compiled<L>>,
    /// The holder of the layer's latest configuration. The holder is kept here, because bodies may
    /// outlast their service.
    _latest: Option<Arc<Latest<Compiled<L>>>>,
    paced: PacedBy,
}

impl<L: Limiter> LimiterSource<L> {
    fn new(layer: &Arc<Compiled<L>>, paced: &PacedBy) -> Self {
        let latest = layer.latest.get().and_then(Weak::upgrade);
        Self { layer: Arc::clone(layer), _latest: latest, paced: paced.clone() }
    }

    /// Returns the pace, and the policy under which units are taken. Returns `None` if bodies do
    /// not wait.
    fn pace(&self) -> Option<(BytePace, Policy)> {
        // A rule that no longer exists paces nothing.
        let (newer, at) = self.layer.latest_index(self.paced.policy)?;
        let layer = newer.as_ref().unwrap_or(&self.layer);
        layer.pacing_rule(at)?;
        let policy = self.paced.own.as_ref().or_else(|| layer.policy(at))?;
        let quota = policy.quota();
        if layer.mode_now(at) != Some(Mode::Enforce) || quota.is_unlimited() {
            return None;
        }
        // If bodies must meet several quotas, the fastest quota is the pace, and the other quotas are limits.
        let others = if self.paced.own.is_none() { layer.policies_together(at) } else { &[] };
        let fastest = others.iter().map(Policy::quota).fold(quota, |fastest, other| faster(fastest, other));
        let (units, period_us) = (fastest.limit(), fastest.spec().period_us);
        // A batch has at most half of the capacity. While a batch is late, the other half leaves room for the
        // units that come back.
        let most = (quota.capacity() / 2).max(1);
        Some((BytePace { units, period_us, most }, policy.clone()))
    }
}

impl<L: Limiter> PaceSource for LimiterSource<L> {
    fn terms(&self) -> PaceTerms {
        self.pace().map_or(PaceTerms::Free, |(pace, _)| PaceTerms::Paced(pace))
    }

    fn ask(&self, units: u64) -> PaceReply {
        let Some((_, policy)) = self.pace() else { return PaceReply::Now(PaceAnswer::FailedOpen) };
        if let Some(error) = self.layer.unpaceable(&policy) {
            self.layer.report_failure(&error);
            return PaceReply::Now(failure(&self.layer, IsOverload::No));
        }
        match self.layer.limiter.take(&[Charge::new(&policy, &self.paced.key).cost(units)]) {
            Reply::Now(answer) => PaceReply::Now(read(&self.layer, &policy, &self.paced.key, answer)),
            Reply::Later(answer) => {
                let (layer, key) = (Arc::clone(&self.layer), self.paced.key.clone());
                PaceReply::Later(Box::pin(async move { read(&layer, &policy, &key, answer.await) }))
            }
        }
    }

    fn refund(&self, refund: Refund) {
        let policy = self.layer.policy_of_refunds(&refund.policy);
        self.layer.refund(vec![Refund { policy, ..refund }]);
    }
}

/// Returns `other` if it has a pace and is the faster of the two quotas. Otherwise returns `one`.
fn faster<'a>(one: &'a Quota, other: &'a Quota) -> &'a Quota {
    // Compares the rates by cross-multiplication, which needs no division.
    let units = |quota: &Quota, period: &Quota| u128::from(quota.limit()) * u128::from(period.spec().period_us);
    let has_pace = other.algorithm().is_rate() && !other.is_unlimited();
    if has_pace && units(other, one) > units(one, other) { other } else { one }
}

/// Reads a limiter's answer.
fn read<L: Limiter>(layer: &Compiled<L>, policy: &Policy, key: &Key, answer: Result<Decision, L::Error>) -> PaceAnswer {
    match answer {
        Ok(mut decision) => {
            let is_allowed = decision.is_allowed();
            debug_assert_eq!(decision.charges().len(), 1, "one charge has one decision");
            let Some(charge) = decision.charge_mut(0) else {
                return PaceAnswer::Denied { wait: Wait::Unknown, remaining: 0 };
            };
            match is_allowed {
                true => {
                    let refund = |receipt| Refund::new(policy.clone(), key.clone(), receipt);
                    PaceAnswer::Taken { refund: charge.take_receipt().map(refund), delay: charge.delay() }
                }
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

/// Returns the effect of a failure of the limiter, which is the same as for a request.
fn failure<L: Limiter>(layer: &Compiled<L>, is_overload: IsOverload) -> PaceAnswer {
    let passes = match layer.settings.on_error {
        OnError::Deny => false,
        OnError::Allow => is_overload == IsOverload::No,
        OnError::AllowAlways => true,
    };
    if passes { PaceAnswer::FailedOpen } else { PaceAnswer::FailedClosed }
}
