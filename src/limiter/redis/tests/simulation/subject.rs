//! The limiters that are simulated.

use std::num::NonZeroU32;

use bytes::Bytes;
use tokio::time::Instant;

use super::ledger::CALLS;
use super::network::Wire;
use super::plan::Plan;
#[cfg(feature = "store")]
use super::table::Remote;
use crate::MemoryLimiter;
use crate::base::time::Timestamp;
use crate::clock::Clock;
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::limiter::RedisLimiter;
#[cfg(feature = "store")]
use crate::limiter::store::{StoreError, StoreLimiter, StoreLimiterBuilder};
use crate::limiter::tests::hold_in_line;
use crate::limiter::{Charge, FallbackLimiter, Limiter, Place, Refund};
use crate::policy::Policy;

/// A limiter that is simulated.
pub(super) trait Subject: Limiter + Clone {
    /// Whether the ledger knows the server's decisions.
    const IS_SERVER_KNOWN: bool;

    /// Whether a refund says that it failed.
    const ARE_LOST_REFUNDS_KNOWN: bool = true;

    /// Makes the limiter of a process.
    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self;

    /// Returns a name of a key.
    fn stored(&self, policy: &Policy, key: &Key) -> Bytes;

    /// Ends what the limiter holds.
    fn close(&self);

    /// Whether another limiter decided a charge of this policy, in place of the one that failed.
    fn fell_back(&self, _: &Policy, _: &ChargeDecision) -> bool {
        false
    }

    /// Returns the units of a key that callers hold of a fallback.
    fn held_of_fallback(&self, _: &Policy, _: &Key) -> u64 {
        0
    }

    /// Takes a place, and waits in line for it if the quota says so. Returns it, and whether it is one of a fallback.
    fn hold(
        &self,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> impl Future<Output = Result<Result<(Place, bool), ChargeDecision>, Self::Error>> + Send;
}

impl Subject for RedisLimiter {
    const IS_SERVER_KNOWN: bool = true;

    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self {
        let number = (wire.process as u64 + 1) * CALLS;
        let builder = Self::builder()
            .deadline(plan.deadline)
            .max_denials(plan.denials)
            .lease_units(plan.lease_units)
            .places_lapse_after(plan.lapse);
        builder.simulated(wire, clock, number).expect("the setup is possible")
    }

    fn stored(&self, policy: &Policy, key: &Key) -> Bytes {
        self.0.backend().space.key(policy, key).bytes
    }

    async fn hold(
        &self,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> Result<Result<(Place, bool), ChargeDecision>, RedisError> {
        let held = hold_in_line(self, policy, key, cost).await?;
        Ok(held.map(|place| (place, false)))
    }

    fn close(&self) {
        Self::close(self);
    }
}

/// Redis, and memory while Redis fails.
pub(super) type WithFallback = FallbackLimiter<RedisLimiter, MemoryLimiter>;

impl Subject for WithFallback {
    const IS_SERVER_KNOWN: bool = true;
    const ARE_LOST_REFUNDS_KNOWN: bool = false;

    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self {
        let memory =
            MemoryLimiter::builder().max_keys(100).clock(clock.clone()).build().expect("the setup is possible");
        let processes = u32::try_from(plan.processes).ok().and_then(NonZeroU32::new).expect("there are a few");
        Self::new(RedisLimiter::make(plan, wire, clock), memory, processes)
    }

    fn stored(&self, policy: &Policy, key: &Key) -> Bytes {
        self.first().stored(policy, key)
    }

    fn held_of_fallback(&self, policy: &Policy, key: &Key) -> u64 {
        let told = self.second().peek_one(policy, key, 0);
        told.limit() - told.remaining()
    }

    async fn hold(
        &self,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> Result<Result<(Place, bool), ChargeDecision>, Self::Error> {
        let taken = self.take(&[Charge::new(policy, key).cost(cost)]);
        let mut decision = taken.await?.into_charges().next().expect("one charge has one decision");
        let Some(receipt) = decision.take_receipt() else { return Ok(Err(decision)) };
        let (receipt, is_of_fallback) = receipt.unnoted();
        let refund = Refund::new(policy.clone(), key.clone(), receipt.noted(is_of_fallback));
        Ok(Ok((Place::new(self.clone(), Some(refund)), is_of_fallback)))
    }

    fn close(&self) {
        self.first().close();
    }

    /// The share of a limit is smaller than the limit.
    fn fell_back(&self, policy: &Policy, told: &ChargeDecision) -> bool {
        told.limit() != policy.quota().limit()
    }
}

#[cfg(feature = "store")]
impl Subject for StoreLimiter<Remote> {
    const IS_SERVER_KNOWN: bool = false;

    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self {
        let builder = StoreLimiterBuilder::new().deadline(plan.deadline).max_denials(plan.denials);
        builder.places_lapse_after(plan.lapse).own_clock(clock).build(Remote(wire)).expect("the setup is possible")
    }

    fn stored(&self, policy: &Policy, key: &Key) -> Bytes {
        [policy.name().as_bytes(), key.as_bytes()].concat().into()
    }

    async fn hold(
        &self,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> Result<Result<(Place, bool), ChargeDecision>, StoreError> {
        let held = hold_in_line(self, policy, key, cost).await?;
        Ok(held.map(|place| (place, false)))
    }

    fn close(&self) {
        Self::close(self);
    }
}

/// The clock of a process.
#[derive(Clone, Debug)]
pub(super) struct OwnClock {
    pub(super) began: Instant,
    pub(super) at_first: Timestamp,
}

impl Clock for OwnClock {
    fn now(&self) -> Timestamp {
        self.at_first.saturating_add(self.began.elapsed())
    }
}
