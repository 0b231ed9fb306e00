//! Blocks and meters for operators and programs: closes and opens keys, counts strikes, and reads and
//! settles meters.

use std::time::Duration;

use super::{Charge, Effect, Limiter, Refund};
use crate::decision::{Decision, Receipt};
use crate::error::{ConfigError, ConfigErrorKind};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// Works on the keys of a [block](crate::quota::Quota::block): counts strikes that do not come from a
/// layer, such as wrong passwords, and closes and opens keys for an operator.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, limiter::Blocks};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let hour = Duration::from_secs(3_600);
/// let blocks = Blocks::new(
///     MemoryLimiter::new(),
///     Policy::new("login-block", Quota::block(3, hour, hour)?)?,
/// )?;
/// let alice = Key::of("alice").unwrap();
///
/// assert_eq!(blocks.strike(&alice, 2).await?, None);
/// assert_eq!(blocks.strike(&alice, 1).await?, Some(hour), "the third closes it");
/// blocks.unblock(&alice).await?;
/// assert_eq!(blocks.blocked_for(&alice).await?, None);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Blocks<L> {
    limiter: L,
    policy: Policy,
}

impl<L: Limiter> Blocks<L> {
    /// Makes a handle from a limiter and a policy with the block's name and quota. For a block of a
    /// layer, use [`RateLimitLayer::blocks`](crate::RateLimitLayer::blocks).
    ///
    /// # Errors
    /// Returns an error if the policy's quota is not a [block](crate::quota::Quota::block).
    pub fn new(limiter: L, policy: Policy) -> Result<Self, ConfigError> {
        only(&policy, Algorithm::Block)?;
        Ok(Self { limiter, policy })
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Adds strikes to a key. Returns how long the key is now closed, or `None` if it is open. Strikes
    /// on a closed key do not prolong the block, unless the quota [counts them](crate::quota::Quota::count_denied).
    /// But the limiter remembers these strikes. After a refund of earlier strikes, the key stays closed if the
    /// strikes that remain would have closed it.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn strike(&self, key: &Key, strikes: u64) -> Result<Option<Duration>, L::Error> {
        self.take(Charge::new(&self.policy, key).cost(strikes).effect(Effect::Force)).await
    }

    /// Closes a key as if its strikes had reached the limit. Returns how long the key is closed. A key
    /// that is already closed stays as it is.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn block(&self, key: &Key) -> Result<Option<Duration>, L::Error> {
        self.strike(key, self.policy.quota().limit()).await
    }

    /// Closes a key for the time `lasting`. Returns how long the key is closed. The returned time is longer than
    /// `lasting` if the key was already closed for a longer time.
    ///
    /// `lasting` is rounded up: a time of up to 1,000 seconds to whole seconds, up to 1,000 minutes
    /// to minutes, up to 1,000 hours to hours, and a longer time to days. A longer time than 366 days
    /// becomes 366 days.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn block_for(&self, key: &Key, lasting: Duration) -> Result<Option<Duration>, L::Error> {
        // Charges the key under a changed quota of the same policy name. The next charge under the policy's own
        // quota converts the state, and the key stays closed.
        let policy = self.policy.with_quota(self.policy.quota().closing_for(lasting));
        let strikes = policy.quota().limit();
        self.take(Charge::new(&policy, key).cost(strikes).effect(Effect::Force)).await
    }

    /// Opens a key and forgets its strikes and earlier blocks. With Redis or another store, other processes remember
    /// denials, and may continue to refuse the key for about a second.
    ///
    /// The units that the key has used under other policies stay used, so the key's next request may be refused
    /// again. [`RateLimitLayer::reset`](crate::RateLimitLayer::reset) opens the blocks of a layer and resets its
    /// quotas. On a [status page](crate::guide::observing#a-status-page), operators can open blocks and reset
    /// quotas.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn unblock(&self, key: &Key) -> Result<(), L::Error> {
        self.limiter.reset(&self.policy, key).await
    }

    /// Returns how long a key is still closed, or `None` if it is open.
    ///
    /// # Errors
    /// Returns the limiter's error.
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
    decision.charges().first()?.wait().duration()
}

/// Works on the keys of a [meter](crate::quota::Quota::meter): reads and settles the units that each
/// key used beyond its quota.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, limiter::Meters};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quarter = Duration::from_secs(92 * 86_400);
/// let meters = Meters::new(
///     MemoryLimiter::new(),
///     Policy::new("api-over", Quota::meter(1_000_000, quarter)?)?,
/// )?;
/// let alice = Key::of("alice").unwrap();
///
/// let units = meters.usage(&alice).await?;
/// // Send an invoice, then settle those units. Units that were counted in between stay.
/// meters.settle(&alice, units).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Meters<L> {
    limiter: L,
    policy: Policy,
}

impl<L: Limiter> Meters<L> {
    /// Makes a handle from a limiter and a policy with the meter's name and quota. For a meter of a
    /// layer, use [`RateLimitLayer::meters`](crate::RateLimitLayer::meters).
    ///
    /// # Errors
    /// Returns an error if the policy's quota is not a [meter](crate::quota::Quota::meter).
    pub fn new(limiter: L, policy: Policy) -> Result<Self, ConfigError> {
        only(&policy, Algorithm::Meter)?;
        Ok(Self { limiter, policy })
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the units that were counted for a key and have not been settled.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn usage(&self, key: &Key) -> Result<u64, L::Error> {
        let decision = self.limiter.peek(&[Charge::new(&self.policy, key).cost(0)]).await?;
        Ok(decision.charges().first().map_or(0, |told| told.limit().saturating_sub(told.remaining())))
    }

    /// Subtracts `units` from the count of a key, for example the [usage](Self::usage) that you have read. Units
    /// that were counted since then are kept.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn settle(&self, key: &Key, units: u64) -> Result<(), L::Error> {
        // A refund has no effect after the instant that its receipt names. This receipt names the latest possible
        // instant, so its refund always subtracts the units that the meter has.
        let receipt = Receipt::new(units, crate::base::time::CLOCK_US_MAX, 0);
        self.limiter.refund(vec![Refund::new(self.policy.clone(), key.clone(), receipt)]).await
    }

    /// Forgets the units that were counted for a key.
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub async fn reset(&self, key: &Key) -> Result<(), L::Error> {
        self.limiter.reset(&self.policy, key).await
    }
}

fn only(policy: &Policy, algorithm: Algorithm) -> Result<(), ConfigError> {
    if policy.quota().algorithm() == algorithm {
        return Ok(());
    }
    Err(ConfigError::new(
        ConfigErrorKind::NotAnOption,
        format!(
            "{:?} has the quota \"{}\" of another algorithm: use Quota::{algorithm}",
            policy.name(),
            policy.quota()
        ),
    ))
}
