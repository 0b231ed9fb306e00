//! A limiter without limits of requests in flight.
//!
//! A proxy asks before it passes a request on, and nobody says when the request has ended. So a rule such as
//! `3 at once` could not hold. This limiter does not support it, so that a file with such a rule is refused with the
//! rule's line, at the start and at each change.

use tower_ratelimit::limiter::{
    Charge, ChargeDecision, Decision, Limiter, LimiterHooks, Receipt, Refund, Reply, UnsupportedQuota,
    UnsupportedQuotaKind,
};
use tower_ratelimit::quota::Algorithm;
use tower_ratelimit::{Key, Policy, Quota};

/// Hands everything on to another limiter, except quotas of requests in flight.
#[derive(Clone, Debug)]
pub(crate) struct Rates<L>(pub(crate) L);

impl<L: Limiter> Limiter for Rates<L> {
    type Error = L::Error;
    type Future<T: Send + 'static> = L::Future<T>;

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        if quota.algorithm() == Algorithm::Concurrency {
            let reason = "a proxy does not say when a request has ended, so requests in flight cannot be counted: \
                          limit them in the proxy, or by the library in the application";
            return Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, reason));
        }
        self.0.supports(quota)
    }

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, L::Error, L::Future<Decision>> {
        self.0.take(charges)
    }

    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        self.0.try_take_one(policy, key, cost)
    }

    fn try_refund_one(&self, policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), Receipt> {
        self.0.try_refund_one(policy, key, receipt)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, L::Error, L::Future<Decision>> {
        self.0.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), L::Error, L::Future<()>> {
        self.0.refund(refunds)
    }

    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, L::Error, L::Future<Decision>> {
        self.0.settle(charges)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), L::Error, L::Future<()>> {
        self.0.reset(policy, key)
    }

    fn probe(&self) -> Reply<(), L::Error, L::Future<()>> {
        self.0.probe()
    }

    fn is_overload(&self, error: &L::Error) -> bool {
        self.0.is_overload(error)
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self.0.hooks()
    }
}
