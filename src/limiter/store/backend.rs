//! A store that can compare and swap, as the checks see it.

use std::hash::BuildHasher;
use std::sync::Arc;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::Store;
use super::error::StoreError;
use super::swapper::Swapper;
use super::value::{STATE_MAX, state_bytes_max};
use super::working_copy::{StoreAnswer, StoreCharge, StoreOperation, StoreRequest};
use crate::algorithm::Pair;
use crate::base::keyed_hash::KeyedHash;
use crate::base::random::{self, Hasher};
use crate::clock::Clock;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::remote::{Backend, Claim, Events, Flights, HeldKey, Intent, Receiver, Return};
use crate::limiter::{Charge, Effect, Refund, UnsupportedQuota, UnsupportedQuotaKind};
use crate::policy::Policy;
use crate::quota::Quota;
use crate::store_load::StoreLoad;

/// The store of a limiter.
pub(super) struct Swaps<S: Store> {
    flights: Flights<Swapper<S>>,
    /// The beginning of all stored keys.
    before: Box<str>,
    callers: KeyedHash,
    hash: Hasher,
}

/// A stored key, and its hash.
pub(super) struct HashedKey {
    key: Arc<str>,
    hash: u64,
}

impl<S: Store> Swaps<S> {
    pub(super) fn new(flights: Flights<Swapper<S>>, before: Box<str>, secret: [u8; 16]) -> Self {
        Self { flights, before, callers: KeyedHash::new(secret), hash: random::hasher() }
    }

    pub(super) fn store(&self) -> &S {
        self.flights.store().store()
    }

    pub(super) fn chosen_clock(&self) -> Option<Arc<dyn Clock>> {
        self.flights.store().chosen_clock()
    }

    pub(super) fn before(&self) -> &str {
        &self.before
    }

    /// Returns how many keys have requests that wait or are in flight.
    #[cfg(test)]
    pub(super) fn keys_under_way(&self) -> usize {
        self.flights.in_queue(crate::limiter::remote::Groups::keys)
    }

    fn keyed(&self, policy: &Policy, key: &Key) -> StoreCharge {
        StoreCharge::of(&self.stored(policy, key), policy)
    }
}

impl<S: Store> Backend for Swaps<S> {
    type Request = StoreRequest;
    type Error = StoreError;
    type Stored = HashedKey;

    fn refuses(&self, charges: &[Charge<'_>]) -> Option<StoreError> {
        charges.iter().find_map(|charge| self.refuses_policy(charge.policy))
    }

    fn refuses_policy(&self, policy: &Policy) -> Option<StoreError> {
        let reason = supports(policy.quota()).err()?;
        Some(StoreError::new(StoreErrorKind::Misconfigured, format!("{:?}: {reason}", policy.name())))
    }

    fn error_at_once(&self, _lane: u16) -> Option<StoreError> {
        self.flights.store().error_at_once()
    }

    fn answers_in_time(&self, lane: u16) -> Option<Result<(), StoreError>> {
        Some(self.flights.answers_in_time(lane)?.map_err(Into::into))
    }

    fn stored(&self, policy: &Policy, key: &Key) -> HashedKey {
        let name = policy.stored_name();
        let mut text = String::with_capacity(self.before.len() + name.len() + 40);
        text.push_str(&self.before);
        text.extend(KeyedHash::digits(self.callers.hash(key.as_bytes())).map(char::from));
        text.push(':');
        if policy.limits_in_flight() {
            text.push('p'); // they are apart from those of a rate with the same name
        }
        text.push_str(itoa::Buffer::new().format(name.len()));
        text.push(':');
        text.push_str(name);
        let hash = self.hash.hash_one(&*text);
        HashedKey { key: text.into(), hash }
    }

    fn charge<'a>(
        &self,
        intent: Intent,
        charges: impl Iterator<Item = (&'a Charge<'a>, &'a HashedKey, Claim)>,
    ) -> StoreRequest {
        let operation = match intent {
            Intent::Take => StoreOperation::Take,
            Intent::Peek => StoreOperation::Peek,
        };
        let keyed = |(charge, stored, claim): (&Charge<'_>, &HashedKey, Claim)| StoreCharge {
            cost: charge.cost,
            effect: charge.effect,
            claim,
            ..StoreCharge::of(stored, charge.policy)
        };
        StoreRequest::of(operation, charges.map(keyed))
    }

    fn refund(&self, Refund { policy, key, receipt }: &Refund) -> StoreRequest {
        let own = Pair { at: receipt.at_us(), n: receipt.part() };
        StoreRequest::of(
            StoreOperation::Refund,
            [StoreCharge { cost: receipt.units(), own, ..self.keyed(policy, key) }],
        )
    }

    fn reset(&self, policy: &Policy, key: &Key) -> StoreRequest {
        StoreRequest::of(StoreOperation::Reset, [self.keyed(policy, key)])
    }

    fn keys(request: &StoreRequest) -> usize {
        request.charges.len()
    }

    fn ask<T: Send + 'static, R: Receiver<StoreAnswer, StoreError> + 'static>(
        &self,
        request: StoreRequest,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R + Send,
    ) -> impl Future<Output = Result<T, StoreError>> + Send {
        self.flights.ask(0, request, receiver)
    }

    fn send(
        &self,
        request: StoreRequest,
        then: impl FnOnce(Result<StoreAnswer, StoreError>) + Send + 'static,
    ) -> Result<(), StoreError> {
        self.flights.send(0, request, then)
    }

    fn waiting(&self) -> usize {
        self.flights.len()
    }

    fn load(&self) -> StoreLoad {
        self.flights.load()
    }

    fn events(&self) -> &Events {
        self.flights.store().events()
    }

    fn runtime(&self) -> &Handle {
        self.flights.runtime()
    }

    fn held_key(&self, policy: &Policy, stored: &HashedKey) -> Option<HeldKey> {
        let bytes = || Bytes::copy_from_slice(stored.key.as_bytes());
        policy.limits_in_flight().then(|| HeldKey { bytes: bytes(), slot: 0, policy: policy.clone() })
    }

    fn return_units(&self, back: &Return) -> StoreRequest {
        let key: Arc<str> = String::from_utf8_lossy(&back.key.bytes).into(); // it was made of text
        let stored = HashedKey { hash: self.hash.hash_one(&*key), key };
        let charge = StoreCharge { cost: back.units, claim: back.claim, ..StoreCharge::of(&stored, &back.key.policy) };
        StoreRequest::of(StoreOperation::Return, [charge])
    }
}

impl StoreCharge {
    /// A charge of no units.
    fn of(stored: &HashedKey, policy: &Policy) -> Self {
        let HashedKey { key, hash } = stored;
        let (key, policy, own) = (Arc::clone(key), policy.clone(), Pair { at: 0, n: 0 });
        Self { key, hash: *hash, policy, cost: 0, effect: Effect::Enforce, own, claim: Claim::default() }
    }
}

/// Checks whether the store can keep the states of a quota.
pub(super) fn supports(quota: &Quota) -> Result<(), UnsupportedQuota> {
    let bytes = state_bytes_max(quota);
    if bytes <= STATE_MAX as u64 {
        return Ok(());
    }
    let reason = format!(
        "a state can take {bytes} bytes, and a value has at most {STATE_MAX}; use a Quota::sliding_window with fewer \
         buckets, a smaller limit, a smaller max_debt, or a RedisLimiter"
    );
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, reason))
}
