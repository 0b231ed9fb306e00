//! A limiter behind an `Arc` is a limiter.

use std::sync::Arc;

use super::{Atomicity, Charge, Limiter, Refund, Reply, Roster, UnsupportedQuota};
use crate::decision::{ChargeDecision, Decision, Receipt};
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
    fn take_at_once(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        (**self).take_at_once(policy, key, cost)
    }

    #[inline]
    fn take_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool {
        (**self).take_quietly(charges, receipts)
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

    fn roster(&self) -> Option<&Roster> {
        (**self).roster()
    }
}
