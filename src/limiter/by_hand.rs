//! Blocks and meters by hand: closing and opening keys, counting strikes, reading and settling what was metered.

use std::fmt;
use std::time::Duration;

use super::{Charge, Effect, Limiter, Refund};
use crate::decision::{Decision, Receipt};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::{Algorithm, QuotaError, QuotaErrorKind};

/// The keys of a policy that is a [block](crate::Quota::block): strikes from outside of a layer, such as passwords that
/// were wrong, and what an operator does.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Blocks, Key, MemoryLimiter, Policy, Quota};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let hour = Duration::from_secs(3_600);
/// let blocks = Blocks::new(MemoryLimiter::new(), Policy::new("login-block", Quota::block(3, hour, hour)?)?)?;
/// let alice = Key::of("alice").unwrap();
///
/// assert_eq!(blocks.strike(&alice, 2).await?, None);
/// assert_eq!(blocks.strike(&alice, 1).await?, Some(hour), "the third closes it");
/// blocks.unblock(&alice).await?;
/// assert_eq!(blocks.blocked_for(&alice).await?, None);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Blocks<L> {
    limiter: L,
    policy: Policy,
}

impl<L: Limiter> Blocks<L> {
    /// The keys of this policy, which is the one that a layer's rule has, on the limiter that the layer has.
    ///
    /// A layer renames a policy whose name is [taken](crate::RateLimitLayer::and) in it: name each differently, or take the
    /// policy from [`RateLimitLayer::policies`](crate::RateLimitLayer::policies).
    ///
    /// # Errors
    /// If the policy's quota is not a [block](crate::Quota::block).
    pub fn new(limiter: L, policy: Policy) -> Result<Self, QuotaError> {
        only(&policy, Algorithm::Block)?;
        Ok(Self { limiter, policy })
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Counts so many strikes of a key, and returns for how long it is closed after them. Strikes while it is closed change
    /// nothing, unless the quota [counts them](crate::Quota::count_denied).
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn strike(&self, key: &Key, strikes: u64) -> Result<Option<Duration>, L::Error> {
        self.take(Charge::new(&self.policy, key).cost(strikes).effect(Effect::Force)).await
    }

    /// Closes a key as if its strikes were used up, and returns for how long: as long as its next block would be. A key that
    /// is closed stays as it is.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn block(&self, key: &Key) -> Result<Option<Duration>, L::Error> {
        self.strike(key, self.policy.quota().limit()).await
    }

    /// Closes a key for so long, and returns for how long it is closed then: longer if it was already.
    ///
    /// The time is rounded up to three digits or so: to whole seconds, above 1,000 of them to minutes, above 1,000 of those
    /// to hours, and then to days. It is at most 366 days.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn block_for(&self, key: &Key, lasting: Duration) -> Result<Option<Duration>, L::Error> {
        // The same name with another quota: the limiter converts its state, in which the key stays closed until then.
        let policy = self.policy.with_quota(self.policy.quota().closing_for(lasting));
        let strikes = policy.quota().limit();
        self.take(Charge::new(&policy, key).cost(strikes).effect(Effect::Force)).await
    }

    /// Opens a key, and forgets its strikes and its blocks.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn unblock(&self, key: &Key) -> Result<(), L::Error> {
        self.limiter.reset(&self.policy, key).await
    }

    /// For how long a key is closed; nothing if it is open.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn blocked_for(&self, key: &Key) -> Result<Option<Duration>, L::Error> {
        let reply = self.limiter.peek(&[Charge::new(&self.policy, key).cost(0)]);
        reply.await.map(|decision| closed_for(&decision))
    }

    async fn take(&self, charge: Charge<'_>) -> Result<Option<Duration>, L::Error> {
        let reply = self.limiter.take(&[charge]);
        reply.await.map(|decision| closed_for(&decision))
    }
}

fn closed_for(decision: &Decision) -> Option<Duration> {
    decision.charges().first()?.retry_after()
}

impl<L> fmt::Debug for Blocks<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("policy", &self.policy).finish_non_exhaustive()
    }
}

/// The keys of a policy that is a [meter](crate::Quota::meter): what each has beyond its quota, and its settling.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Key, MemoryLimiter, Meters, Policy, Quota};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quarter = Duration::from_secs(92 * 86_400);
/// let meters = Meters::new(MemoryLimiter::new(), Policy::new("api-over", Quota::meter(1_000_000, quarter)?)?)?;
/// let alice = Key::of("alice").unwrap();
///
/// let units = meters.usage(&alice).await?;
/// // ... bill them, then take off what was billed: nothing that came meanwhile is lost.
/// meters.settle(&alice, units).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Meters<L> {
    limiter: L,
    policy: Policy,
}

impl<L: Limiter> Meters<L> {
    /// The keys of this policy, which is the one that a layer's rule has, on the limiter that the layer has.
    ///
    /// # Errors
    /// If the policy's quota is not a [meter](crate::Quota::meter).
    pub fn new(limiter: L, policy: Policy) -> Result<Self, QuotaError> {
        only(&policy, Algorithm::Meter)?;
        Ok(Self { limiter, policy })
    }

    /// The policy.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The units that were counted for a key and not settled.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn usage(&self, key: &Key) -> Result<u64, L::Error> {
        let decision = self.limiter.peek(&[Charge::new(&self.policy, key).cost(0)]).await?;
        Ok(decision.charges().first().map_or(0, |told| told.limit().saturating_sub(told.remaining())))
    }

    /// Takes off so many of them, in one step: what was counted since they were read stays.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn settle(&self, key: &Key, units: u64) -> Result<(), L::Error> {
        // A receipt that is good for as long as there is anything to take off.
        let receipt = Receipt::new(units, crate::time::CLOCK_US_MAX, 0);
        self.limiter.refund(vec![Refund::new(self.policy.clone(), key.clone(), receipt)]).await
    }

    /// Forgets what was counted for a key.
    ///
    /// # Errors
    /// The limiter's own.
    pub async fn reset(&self, key: &Key) -> Result<(), L::Error> {
        self.limiter.reset(&self.policy, key).await
    }
}

impl<L> fmt::Debug for Meters<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meters").field("policy", &self.policy).finish_non_exhaustive()
    }
}

fn only(policy: &Policy, algorithm: Algorithm) -> Result<(), QuotaError> {
    if policy.quota().algorithm() == algorithm {
        return Ok(());
    }
    Err(QuotaError::new(
        QuotaErrorKind::NotAnOption,
        format!(
            "{:?} has the quota \"{}\", which is no {algorithm}: take Quota::{algorithm}",
            policy.name(),
            policy.quota()
        ),
    ))
}
