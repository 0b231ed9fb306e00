//! A limiter chosen at run time.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::{Atomicity, Charge, Limiter, Refund, Reply, Roster, UnsupportedQuota};
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, LimiterError>> + Send>>;
type BoxReply<T> = Reply<T, LimiterError, BoxFuture<T>>;

/// Any limiter behind one type, for choosing the backend at run time. Answers that are known at once are not boxed.
///
/// ```
/// use tower_ratelimit::{BoxLimiter, MemoryLimiter};
///
/// let limiter: BoxLimiter = BoxLimiter::new(MemoryLimiter::new());
/// ```
#[derive(Clone)]
pub struct BoxLimiter(Arc<dyn ErasedLimiter>);

impl BoxLimiter {
    /// Erases the type of a limiter.
    #[must_use]
    pub fn new(limiter: impl Limiter) -> Self {
        Self(Arc::new(limiter))
    }
}

impl fmt::Debug for BoxLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BoxLimiter")
    }
}

#[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
impl Limiter for BoxLimiter {
    type Error = LimiterError;
    type Future<T: Send + 'static> = BoxFuture<T>;

    fn take(&self, charges: &[Charge<'_>]) -> BoxReply<Decision> {
        self.0.take(charges)
    }

    fn take_at_once(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        self.0.take_at_once(policy, key, cost)
    }

    fn take_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool {
        self.0.take_quietly(charges, receipts)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> BoxReply<Decision> {
        self.0.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> BoxReply<()> {
        self.0.refund(refunds)
    }

    fn settle(&self, charges: &[Charge<'_>]) -> BoxReply<Decision> {
        self.0.settle(charges)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> BoxReply<()> {
        self.0.reset(policy, key)
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.0.supports(quota)
    }

    fn atomicity(&self) -> Atomicity {
        self.0.atomicity()
    }

    fn roster(&self) -> Option<&Roster> {
        self.0.roster()
    }
}

trait ErasedLimiter: Send + Sync {
    fn take(&self, charges: &[Charge<'_>]) -> BoxReply<Decision>;
    fn take_at_once(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision>;
    fn take_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool;
    fn peek(&self, charges: &[Charge<'_>]) -> BoxReply<Decision>;
    fn refund(&self, refunds: Vec<Refund>) -> BoxReply<()>;
    fn settle(&self, charges: &[Charge<'_>]) -> BoxReply<Decision>;
    fn reset(&self, policy: &Policy, key: &Key) -> BoxReply<()>;
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota>;
    fn atomicity(&self) -> Atomicity;
    fn roster(&self) -> Option<&Roster>;
}

impl<L: Limiter> ErasedLimiter for L {
    fn take(&self, charges: &[Charge<'_>]) -> BoxReply<Decision> {
        erase(Limiter::take(self, charges))
    }

    fn take_at_once(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        Limiter::take_at_once(self, policy, key, cost)
    }

    fn take_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool {
        Limiter::take_quietly(self, charges, receipts)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> BoxReply<Decision> {
        erase(Limiter::peek(self, charges))
    }

    fn refund(&self, refunds: Vec<Refund>) -> BoxReply<()> {
        erase(Limiter::refund(self, refunds))
    }

    fn settle(&self, charges: &[Charge<'_>]) -> BoxReply<Decision> {
        erase(Limiter::settle(self, charges))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> BoxReply<()> {
        erase(Limiter::reset(self, policy, key))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        Limiter::supports(self, quota)
    }

    fn atomicity(&self) -> Atomicity {
        Limiter::atomicity(self)
    }

    fn roster(&self) -> Option<&Roster> {
        Limiter::roster(self)
    }
}

fn erase<T: 'static, E: Error + Send + Sync + 'static>(
    reply: Reply<T, E, impl Future<Output = Result<T, E>> + Send + 'static>,
) -> BoxReply<T> {
    match reply {
        Reply::Now(answer) => Reply::Now(answer.map_err(LimiterError::new)),
        Reply::Later(future) => Reply::Later(Box::pin(async move { future.await.map_err(LimiterError::new) })),
    }
}

/// The error of a [`BoxLimiter`]'s limiter.
///
/// Its kind is that of the limiter's own error, which [`downcast_ref`](Self::downcast_ref) returns.
#[derive(Debug)]
pub struct LimiterError(Box<dyn Error + Send + Sync>);

impl LimiterError {
    /// Wraps a limiter's own error.
    #[must_use]
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }

    /// The limiter's own error, if it is an `E`.
    #[must_use]
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }

    /// The limiter's own error.
    #[must_use]
    pub fn get_ref(&self) -> &(dyn Error + Send + Sync + 'static) {
        &*self.0
    }
}

impl fmt::Display for LimiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for LimiterError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
