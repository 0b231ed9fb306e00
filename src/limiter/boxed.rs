//! A limiter chosen at run time.

use std::convert::identity;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::{Atomicity, Charge, Limiter, PolicyRegistry, Refund, Reply, UnsupportedQuota};
use crate::decision::{ChargeDecision, Decision};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, LimiterError>> + Send>>;
type BoxReply<T> = Reply<T, LimiterError, BoxFuture<T>>;

/// Hides the type of a limiter, so that the backend can be chosen at run time. Answers that are
/// known at once are not boxed.
///
/// ```
/// use tower_ratelimit::{limiter::BoxLimiter, MemoryLimiter};
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

/// Declares what is erased: a method of the limiter, and what makes its answer that of the box.
macro_rules! erased {
    ($($method:ident($($argument:ident: $type:ty),*) -> $answer:ty, $erase:path;)+) => {
        trait ErasedLimiter: Send + Sync {
            $(fn $method(&self, $($argument: $type),*) -> $answer;)+
        }

        impl<L: Limiter> ErasedLimiter for L {
            $(fn $method(&self, $($argument: $type),*) -> $answer {
                $erase(Limiter::$method(self, $($argument),*))
            })+
        }

        #[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
        impl Limiter for BoxLimiter {
            type Error = LimiterError;
            type Future<T: Send + 'static> = BoxFuture<T>;

            $(fn $method(&self, $($argument: $type),*) -> $answer {
                self.0.$method($($argument),*)
            })+
        }
    };
}
erased! {
    take(charges: &[Charge<'_>]) -> BoxReply<Decision>, erase;
    try_take_one(policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision>, identity;
    peek(charges: &[Charge<'_>]) -> BoxReply<Decision>, erase;
    refund(refunds: Vec<Refund>) -> BoxReply<()>, erase;
    settle(charges: &[Charge<'_>]) -> BoxReply<Decision>, erase;
    reset(policy: &Policy, key: &Key) -> BoxReply<()>, erase;
    supports(quota: &Quota) -> Result<(), UnsupportedQuota>, identity;
    atomicity() -> Atomicity, identity;
    policy_registry() -> Option<&PolicyRegistry>, identity;
}

fn erase<T: 'static, E: Error + Send + Sync + 'static>(
    reply: Reply<T, E, impl Future<Output = Result<T, E>> + Send + 'static>,
) -> BoxReply<T> {
    match reply {
        Reply::Now(answer) => Reply::Now(answer.map_err(LimiterError::new)),
        Reply::Later(future) => Reply::Later(Box::pin(async move { future.await.map_err(LimiterError::new) })),
    }
}

/// The error of the limiter in a [`BoxLimiter`].
///
/// [`downcast_ref`](Self::downcast_ref) returns the limiter's own error, which has a kind.
#[derive(Debug)]
pub struct LimiterError(Box<dyn Error + Send + Sync>);

impl LimiterError {
    /// Wraps a limiter's own error.
    #[must_use]
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }

    /// Returns the limiter's own error if its type is `E`.
    #[must_use]
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }

    /// Returns the limiter's own error.
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
