//! `Limiter` for an `Arc` of a limiter.

use std::sync::Arc;

use super::{Atomicity, Charge, Limiter, PolicyRegistry, Refund, Reply, UnsupportedQuota};
use crate::decision::{ChargeDecision, Decision};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

#[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
impl<L: Limiter + ?Sized> Limiter for Arc<L> {
    type Error = L::Error;
    type Future<T: Send + 'static> = L::Future<T>;

    #[inline]
    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        (**self).take(charges)
    }

    #[inline]
    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        (**self).try_take_one(policy, key, cost)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        (**self).peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Self::Error, Self::Future<()>> {
        (**self).refund(refunds)
    }

    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        (**self).settle(charges)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Self::Error, Self::Future<()>> {
        (**self).reset(policy, key)
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        (**self).supports(quota)
    }

    fn atomicity(&self) -> Atomicity {
        (**self).atomicity()
    }

    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        (**self).policy_registry()
    }
}
