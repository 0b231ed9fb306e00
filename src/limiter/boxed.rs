//! Limiters behind a pointer: an `Arc` of a limiter, and a limiter that is chosen at run time.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use super::{Charge, Limiter, LimiterHooks, Refund, Reply, UnsupportedQuota};
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::reply::BoxFuture;
use crate::policy::Policy;
use crate::quota::Quota;

type BoxReply<T> = Reply<T, LimiterError, BoxFuture<'static, Result<T, LimiterError>>>;

/// Hides the type of a limiter, so that the backend can be chosen at run time. Answers that are
/// known at once are not boxed.
///
/// ```
/// use tower_ratelimit::{limiter::BoxLimiter, MemoryLimiter};
///
/// let limiter: BoxLimiter = BoxLimiter::new(MemoryLimiter::new());
/// ```
///
/// A setting can choose the limiter when the program starts:
///
/// ```no_run
/// # #[cfg(feature = "_redis")] {
/// use tower_ratelimit::{
///     MemoryLimiter, Quota, RateLimitLayer, RedisLimiter, key, limiter::BoxLimiter,
/// };
///
/// # async fn layer() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = match std::env::var("REDIS_URL") {
///     Ok(url) => BoxLimiter::new(RedisLimiter::connect(&url).await?),
///     Err(_) => BoxLimiter::new(MemoryLimiter::new()), // on a developer's machine
/// };
/// let limit = RateLimitLayer::new(limiter, Quota::per_minute(100), key::peer_ip());
/// # Ok(()) }
/// # }
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

/// Declares the methods that a `BoxLimiter` and an `Arc` of a limiter forward to the limiter inside.
macro_rules! forwarded {
    (replies { $($reply:ident($($asked:ident: $asked_type:ty),*) -> $answer:ty;)+ }
     values { $($value:ident($($argument:ident: $type:ty),*) -> $result:ty;)+ }) => {
        trait ErasedLimiter: Send + Sync {
            fn is_overload(&self, error: &LimiterError) -> bool;
            $(fn $reply(&self, $($asked: $asked_type),*) -> BoxReply<$answer>;)+
            $(fn $value(&self, $($argument: $type),*) -> $result;)+
        }

        impl<L: Limiter> ErasedLimiter for L {
            fn is_overload(&self, error: &LimiterError) -> bool {
                error.downcast_ref().is_some_and(|error| Limiter::is_overload(self, error))
            }
            $(fn $reply(&self, $($asked: $asked_type),*) -> BoxReply<$answer> {
                erase(Limiter::$reply(self, $($asked),*))
            })+
            $(fn $value(&self, $($argument: $type),*) -> $result {
                Limiter::$value(self, $($argument),*)
            })+
        }

        #[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
        impl Limiter for BoxLimiter {
            type Error = LimiterError;
            type Future<T: Send + 'static> = BoxFuture<'static, Result<T, LimiterError>>;

            fn is_overload(&self, error: &LimiterError) -> bool {
                self.0.is_overload(error)
            }
            $(fn $reply(&self, $($asked: $asked_type),*) -> BoxReply<$answer> {
                self.0.$reply($($asked),*)
            })+
            $(fn $value(&self, $($argument: $type),*) -> $result {
                self.0.$value($($argument),*)
            })+
        }

        #[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
        impl<L: Limiter + ?Sized> Limiter for Arc<L> {
            type Error = L::Error;
            type Future<T: Send + 'static> = L::Future<T>;

            fn is_overload(&self, error: &L::Error) -> bool {
                Limiter::is_overload(&**self, error)
            }
            $(#[inline]
            fn $reply(&self, $($asked: $asked_type),*) -> Reply<$answer, L::Error, L::Future<$answer>> {
                Limiter::$reply(&**self, $($asked),*)
            })+
            $(#[inline]
            fn $value(&self, $($argument: $type),*) -> $result {
                Limiter::$value(&**self, $($argument),*)
            })+
        }
    };
}
forwarded! {
    replies {
        take(charges: &[Charge<'_>]) -> Decision;
        peek(charges: &[Charge<'_>]) -> Decision;
        refund(refunds: Vec<Refund>) -> ();
        settle(charges: &[Charge<'_>]) -> Decision;
        reset(policy: &Policy, key: &Key) -> ();
        probe() -> ();
    }
    values {
        try_take_one(policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision>;
        try_refund_one(policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), Receipt>;
        supports(quota: &Quota) -> Result<(), UnsupportedQuota>;
        hooks() -> &dyn LimiterHooks;
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

/// The error of the limiter in a [`BoxLimiter`].
///
/// [`downcast_ref`](Self::downcast_ref) returns the limiter's own error, for example to read its kind.
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
