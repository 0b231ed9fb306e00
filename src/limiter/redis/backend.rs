//! Redis, as the backend that checks use.

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::dispatch::Dispatcher;
use super::error::RedisError;
use super::keys::{KeySpace, StoredKey};
use super::wire::{RedisAnswer, WireOperation, WireRequest};
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::remote::{Backend, Claim, Events, Flights, HeldKey, Intent, Receiver, Return};
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::quota::Algorithm;
use crate::store_load::StoreLoad;

/// The Redis of a limiter.
pub(super) struct RedisBackend {
    pub(super) flights: Flights<Dispatcher>,
    pub(super) space: KeySpace,
    /// True for a cluster, in which charges of one set can be in different slots.
    pub(super) in_slots: bool,
}

impl RedisBackend {
    fn lane_of_slot(&self, slot: u16) -> u16 {
        if self.in_slots { slot } else { 0 }
    }
}

impl Backend for RedisBackend {
    type Request = WireRequest;
    type Error = RedisError;
    type Stored = StoredKey;

    /// Returns an error for a set that the script cannot decide. The script supports charges on refusal only for
    /// blocks and meters.
    fn refuses(&self, charges: &[Charge<'_>]) -> Option<RedisError> {
        let is_unknown = |charge: &&Charge<'_>| {
            let is_known = matches!(charge.policy.quota().algorithm(), Algorithm::Block | Algorithm::Meter);
            matches!(charge.effect, Effect::OnRefusal { .. }) && !is_known
        };
        let charge = charges.iter().find(is_unknown)?;
        let message = format!(
            "{:?} is charged on refusal, with the quota \"{}\": with Redis, only blocks and meters can be charged on \
             refusal (Quota::block, Quota::meter)",
            charge.policy.name(),
            charge.policy.quota()
        );
        Some(RedisError::new(StoreErrorKind::Misconfigured, message))
    }

    fn error_at_once(&self, lane: u16) -> Option<RedisError> {
        self.flights.store().store.error_at_once(lane)
    }

    fn answers_in_time(&self, lane: u16) -> Option<Result<(), RedisError>> {
        Some(self.flights.answers_in_time(lane)?.map_err(Into::into))
    }

    fn stored(&self, policy: &Policy, key: &Key) -> StoredKey {
        self.space.key(policy, key)
    }

    fn lane(&self, stored: &StoredKey) -> u16 {
        self.lane_of_slot(stored.slot)
    }

    fn charge<'a>(
        &self,
        intent: Intent,
        charges: impl Iterator<Item = (&'a Charge<'a>, &'a StoredKey, Claim)>,
    ) -> WireRequest {
        let operation = match intent {
            Intent::Take => WireOperation::Take,
            Intent::Peek => WireOperation::Peek,
        };
        WireRequest::claiming(operation, charges)
    }

    fn refund(&self, refund: &Refund) -> WireRequest {
        WireRequest::refund(refund, &self.space.key(&refund.policy, &refund.key))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> WireRequest {
        WireRequest::reset(policy, &self.space.key(policy, key))
    }

    fn keys(request: &WireRequest) -> usize {
        request.keys()
    }

    fn ask<T: Send + 'static, R: Receiver<RedisAnswer, RedisError> + 'static>(
        &self,
        request: WireRequest,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R + Send,
    ) -> impl Future<Output = Result<T, RedisError>> + Send {
        self.flights.ask(self.lane_of_slot(request.slot()), request, receiver)
    }

    fn send(
        &self,
        request: WireRequest,
        then: impl FnOnce(Result<RedisAnswer, RedisError>) + Send + 'static,
    ) -> Result<(), RedisError> {
        self.flights.send(self.lane_of_slot(request.slot()), request, then)
    }

    fn waiting(&self) -> usize {
        self.flights.len()
    }

    fn load(&self) -> StoreLoad {
        self.flights.load()
    }

    fn events(&self) -> &Events {
        self.flights.store().store.events()
    }

    fn runtime(&self) -> &Handle {
        self.flights.runtime()
    }

    fn close(&self) {
        self.flights.store().store.close();
    }

    fn held_key(&self, policy: &Policy, stored: &StoredKey) -> Option<HeldKey> {
        let held = || HeldKey { bytes: stored.bytes.clone(), slot: stored.slot, policy: policy.clone() };
        policy.limits_in_flight().then(held)
    }

    fn return_units(&self, back: &Return) -> WireRequest {
        WireRequest::return_units(back)
    }
}
