//! The [`Limiter`] trait and its contract, and the limiters of this crate.
//!
//! * [`MemoryLimiter`](crate::MemoryLimiter) keeps the states in this process; see [`memory`].
//! * `RedisLimiter` keeps them in Redis, for many processes; see the module `redis`.
//! * `StoreLimiter` keeps them in any store that can compare and swap, such as PostgreSQL; see the module `store`.
//! * [`FallbackLimiter`] asks a second limiter while the first one fails.
//! * [`BoxLimiter`] hides which limiter it is, to choose one at run time.
//! * [`Blocks`] and [`Meters`] close, open, read and settle keys by hand.
//!
//! The guide has pages on [Redis and failures](crate::guide::redis_and_failures) and on
//! [writing a limiter of your own](crate::guide::writing_a_backend).

mod admin;
mod boxed;
mod fallback;
mod hold;
pub mod memory;
mod observers;
mod occupancy;
mod place;
mod place_lines;
mod policy_registry;
mod queue_refunds;
#[cfg(any(feature = "fred", feature = "redis-rs"))]
pub mod redis;
#[cfg(all(test, any(feature = "_redis", feature = "postgres")))]
#[path = "../../tests/support/redis.rs"]
mod redis_server;
#[cfg(any(feature = "_redis", feature = "store"))]
#[cfg_attr(
    not(all(feature = "_redis", feature = "store")),
    allow(dead_code, unused_imports, reason = "each of the two uses a part")
)]
mod remote;
mod reply;
#[cfg(feature = "store")]
pub mod store;
mod support;
#[cfg(all(test, any(feature = "_redis", feature = "postgres")))]
#[path = "../../tests/support/proxy.rs"]
mod tcp_proxy;

use std::future::Future;
use std::sync::Arc;

use crate::algorithm::TakeMode;
use crate::key::Key;
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

pub use crate::decision::{ChargeDecision, Decision, Receipt};
pub use crate::event::StoreErrorKind;
pub use crate::store_load::{StoreLoad, StoreLoadReader};
pub use admin::{Blocks, Meters};
pub use boxed::{BoxLimiter, LimiterError};
pub use fallback::FallbackLimiter;
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) use hold::hold;
pub(crate) use hold::hold_in_line;
pub use occupancy::Occupancy;
pub use place::Place;
pub(crate) use place::{AnyPlaces, HeldCharge, HeldPlaces, shared_place};
pub use place_lines::PlaceLines;
pub(crate) use place_lines::{BoundedTurn, FAILED_POLLS_MAX, LineStep};
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) use place_lines::{FirstInLine, LeftLine, Standing};
pub use policy_registry::PolicyRegistry;
pub(crate) use policy_registry::{Contradiction, Entered};
pub(crate) use reply::BoxFuture;
pub use reply::{Reply, ReplyFuture};
pub use support::{UnsupportedQuota, UnsupportedQuotaKind};
pub(crate) use support::{supports_in_layer, supports_rates};

/// Keeps the states of keys and decides about charges.
///
/// [`MemoryLimiter`](crate::MemoryLimiter), `RedisLimiter`, `StoreLimiter`, [`FallbackLimiter`] and
/// [`BoxLimiter`] implement it. To implement it yourself, start with the
/// [guide](crate::guide::writing_a_backend).
///
/// # Contract
///
/// * **Sharing.** A clone is the same limiter, never a second allowance.
/// * **All or nothing.** [`take`](Self::take) takes all of its charges or none. The decision is
///   allowed if every [enforced](Effect::Enforce) charge is. [`Atomicity`] says how strictly this
///   holds.
/// * **A denied set changes nothing.** The exceptions are quotas that [count
///   denied](crate::Quota::count_denied) requests, and charges [on refusal](Effect::OnRefusal).
///   These are written in the same step, or right after it if the limiter is `Compensated`. A
///   charge of the denied set that its own quota allows is reported as that quota stands, with
///   nothing taken.
/// * **The answer** has one [`ChargeDecision`] for each charge, in order, and a receipt for each
///   charge that took something. The charges of a set are for different (policy, key) pairs,
///   because the caller adds equal ones up. If a set breaks this, the limiter may answer anything,
///   but must not panic or hang.
/// * **Cost 0** looks: it takes nothing, and is allowed unless the key is
///   [blocked](crate::Quota::block).
/// * **Unsupported quotas and effects** are errors; they are never ignored.
///   [`supports`](Self::supports) says which quotas a limiter can keep.
/// * **Errors** mean that the limiter failed, for example because its store is away. A refusal is
///   not an error. The middleware's [`OnError`](crate::OnError) decides what happens to the
///   request.
/// * **Now or later.** A limiter that knows the answer returns [`Reply::Now`], and no future is
///   made. A remote limiter encodes the charges before it returns [`Reply::Later`], because they
///   are borrowed for the call only.
/// * **Cancel safety.** A future of `take` that is dropped leaves at most its own charges behind, and
///   should refund them. A future that was never polled should leave nothing.
/// * **Held futures.** A future that was polled and is not polled again delays no other caller.
/// * No caller can make it panic, hang, or use memory without bound.
///
/// The suite in `tower_ratelimit::conformance` (feature `conformance`) checks an implementation
/// against this contract.
pub trait Limiter: Send + Sync + 'static {
    /// The error of a limiter that failed. [`Infallible`](std::convert::Infallible) if it cannot
    /// fail.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The future of an answer that comes later. [`std::future::Ready`] if every answer is known at
    /// once.
    type Future<T: Send + 'static>: Future<Output = Result<T, Self::Error>> + Send + 'static;

    /// Takes all charges or none of them.
    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>>;

    /// Takes one [enforced](Effect::Enforce) charge, if the limiter has a faster way to do so than
    /// [`take`](Self::take).
    ///
    /// The answer is that of `take` for a set of this one charge. A limiter without such a way
    /// returns `None` and takes nothing; `take` is called then.
    #[inline]
    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        let _ = (policy, key, cost);
        None
    }

    /// Refunds one receipt at once, if the limiter has a faster way to do so than
    /// [`refund`](Self::refund).
    ///
    /// It has the effect of `refund` with this one receipt.
    ///
    /// # Errors
    /// A limiter without such a way returns the receipt and refunds nothing; `refund` is called then.
    #[inline]
    fn try_refund_one(&self, policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), Receipt> {
        let _ = (policy, key);
        Err(receipt)
    }

    /// Returns the answer that [`take`](Self::take) would give, and takes nothing.
    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>>;

    /// Refunds what each receipt still holds.
    ///
    /// A refund to a [leaky queue](crate::Quota::leaky_queue) has no effect while another request is
    /// queued behind it, because that request has already been promised its departure time. The
    /// limiters of this crate keep such a refund, and make it once the requests behind it are refunded
    /// too. Each keeps at most 4,096 of them.
    ///
    /// A refund never removes more usage than its receipt holds, even if the key has since been charged under a larger
    /// quota of the policy. If that usage does not fit the refund's quota, the refund has no effect.
    ///
    /// The caller may drop a [`Reply::Later`] without polling it. A remote limiter therefore sends
    /// the refund before it returns; its future only waits for the answer.
    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Self::Error, Self::Future<()>>;

    /// Takes [forced](Effect::Force) charges: the cost of a request above its reservation.
    ///
    /// The caller may drop a [`Reply::Later`] without polling it. A remote limiter whose
    /// [`take`](Self::take) sends nothing before its future is polled therefore needs its own
    /// implementation.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.take(charges)
    }

    /// Forgets the state of a (policy, key) pair, so that its whole quota is available.
    ///
    /// A limiter with a store that remembers denials forgets them in this process at once. Other processes may go on
    /// refusing the key as long as they remember: those with this crate's limiters for about a second.
    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Self::Error, Self::Future<()>>;

    /// Asks whether the limiter can decide now, for a readiness probe. By default it can: nothing is asked.
    ///
    /// The limiters of this crate that have a store ask it to decide a check that takes nothing, at most once a second.
    /// So the answer recovers without requests, once the store does. A process that asks for more than it can carry is
    /// no error. A [`FallbackLimiter`] fails if both of its limiters do.
    ///
    /// The guide says [what to do with it](crate::guide::redis_and_failures#readiness).
    fn probe(&self) -> Reply<(), Self::Error, Self::Future<()>> {
        Reply::Now(Ok(()))
    }

    /// Checks whether this limiter can keep the states of a quota. By default it can keep all except
    /// those of a [concurrency limit](Quota::concurrent), whose units come back only when they are
    /// refunded. A limiter with a store that outlives the process supports them only if it returns what
    /// a process held when that process dies.
    ///
    /// The layer's `check()` reports a quota that its limiter does not support, and the conformance
    /// suite skips it. If the limiter is asked about such a quota anyway, it returns its
    /// error or denies the charge. Only a [wait in line](Quota::max_wait) may be left out: a limiter without lines
    /// may decide as if the quota had none, because it is the layer that lets requests wait.
    ///
    /// # Errors
    /// Returns an error if the limiter does not support the quota. The error says why, and what to
    /// use instead.
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supports_rates(quota)
    }

    /// Returns whether this limiter failed because this process asks for more than it can carry, and
    /// not because its store failed. By default `false`.
    ///
    /// A client can cause such a failure by many requests at once, so [`OnError::Allow`](crate::OnError::Allow) does
    /// not let the request pass.
    fn is_overload(&self, error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// Returns how strictly a set of charges is all or nothing.
    fn atomicity(&self) -> Atomicity {
        Atomicity::Atomic
    }

    /// Adds an observer of the limiter's [events](crate::observe::LimiterEvent). A layer that has an observer calls
    /// this before its first request. By default nothing happens.
    ///
    /// A limiter reports each event to each of its observers. It keeps one of those with the same
    /// [identity](Observer::identity). The limiters of this crate keep at most 32 observers each, and leave out further
    /// ones.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = observer;
    }

    /// Returns how full the limiter is, for [status pages](crate::observe::StatusPage). By default `None`: its states
    /// are elsewhere, or it does not count them. May take a millisecond for each million states.
    fn occupancy(&self) -> Option<Occupancy> {
        None
    }

    /// Returns the load of the limiter's store as this process sees it. By default `None`: there is no store.
    fn store_load(&self) -> Option<StoreLoad> {
        None
    }

    /// Returns the registry in which layers enter their policies, so that contradictory ones are
    /// reported. Returns `None` if the limiter has none.
    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        None
    }

    /// Returns the lines in which requests wait for units of [concurrency limits](Quota::concurrent). By default
    /// `None`: no request can wait for them. [`supports`](Self::supports) should then return an error for a quota with
    /// [such a wait](Quota::max_wait). The layer reports that quota as not supported in any case.
    fn place_lines(&self) -> Option<&PlaceLines> {
        None
    }
}

/// The strictness with which a set of charges is all or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Atomicity {
    /// No caller ever sees a charge of a denied set.
    Atomic,
    /// The charges of a denied set are refunded at once. In between, another caller may be refused
    /// early, but is never admitted over a limit.
    Compensated,
}

/// A request's number among those that wait in line, below 2^48. It fits beside the effect, so that a charge stays four
/// words: each more costs every check (`benches/instructions`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival([u16; 3]);

impl Arrival {
    /// The number of a request that waits in no line. It is later than all others.
    const NEWCOMER: Self = Self([u16::MAX; 3]);

    fn of(number: u64) -> Self {
        debug_assert!(number < (1 << 48) - 1, "so many requests never waited in line");
        Self([0, 16, 32].map(|shift| (number >> shift) as u16)) // the lower 48 bits
    }

    fn number(self) -> u64 {
        let [low, middle, high] = self.0.map(u64::from);
        low | middle << 16 | high << 32
    }
}

const _: () = assert!(size_of::<Charge<'_>>() <= 4 * size_of::<u64>());

/// A cost to take from the allowance that a policy gives a key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Charge<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The key.
    pub key: &'a Key,
    /// Units to take; 0 looks.
    pub cost: u64,
    /// The effect that a denial of this charge has on the set.
    pub effect: Effect,
    /// The request's number among those that wait in line, see [`PlaceLines`].
    arrival: Arrival,
}

impl<'a> Charge<'a> {
    /// Makes an enforced charge of one unit.
    #[must_use]
    pub fn new(policy: &'a Policy, key: &'a Key) -> Self {
        Self { policy, key, cost: 1, effect: Effect::Enforce, arrival: Arrival::NEWCOMER }
    }

    /// Sets the cost in units.
    #[must_use]
    pub fn cost(mut self, cost: u64) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the effect.
    #[must_use]
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// Sets the request's number among those that wait in line, which it got when it joined. Requests with later
    /// numbers do not hold it back.
    #[must_use]
    pub(crate) fn arrived(mut self, number: u64) -> Self {
        self.arrival = Arrival::of(number);
        self
    }
}

/// The effect of a charge on the decision about its set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Effect {
    /// If this charge is denied, the whole set is denied.
    #[default]
    Enforce,
    /// The charge is decided and reported. The charge is taken if its own quota and the set allow it. It never denies
    /// the set.
    Observe,
    /// The charge is taken even if too few units are left, into debt (see [`Quota::max_debt`](crate::Quota::max_debt)),
    /// if the set is allowed.
    Force,
    /// The charge is taken only if a preceding charge is denied. Blocks and meters use it.
    ///
    /// It belongs to the `of` charges right before it in the set, its *partners*, which are for the
    /// same key.
    ///
    /// * If the quota of a partner denies the set, this charge is taken even if too few units are left. Only a full
    ///   [meter](crate::Quota::meter) denies it. If no partner is denied, this charge looks, like a cost of 0.
    /// * A [block](crate::Quota::block) or a full meter that denies this charge denies the set. A
    ///   block whose partners are all observed or forced is itself only observed.
    /// * If a partner is enforced, this charge is taken although the set is denied, because that
    ///   denial is what it counts. It then has no receipt.
    ///
    /// For quotas other than blocks and meters, `RedisLimiter` returns an error, and
    /// `MemoryLimiter` and `StoreLimiter` take the charge as [forced](Self::Force).
    OnRefusal {
        /// The number of partners. If fewer charges precede it, all of them are partners. With 0 it
        /// only looks.
        of: u8,
    },
}

/// Returns whether the charge at index `at` denies its set if it is denied itself.
pub(crate) fn binds(charges: &[impl Effective], at: usize) -> bool {
    debug_assert!(at < charges.len(), "a charge is asked about that is none of the set");
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        Effect::Enforce => true,
        Effect::Observe | Effect::Force => false,
        Effect::OnRefusal { of } => {
            let partners = partners(charges, at, of);
            charge.policy().quota().algorithm() == crate::quota::Algorithm::Meter
                || partners.is_empty()
                || partners.iter().any(|partner| partner.effect() == Effect::Enforce)
        }
    }
}

/// Returns whether the charge at index `at` is written although its set is denied. `denied` says
/// whether the charge was denied itself.
pub(crate) fn outlives_refusal(charges: &[impl Effective], at: usize, denied: bool) -> bool {
    debug_assert!(at < charges.len(), "a charge is asked about that is none of the set");
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        Effect::Enforce => denied,
        Effect::Observe | Effect::Force => false,
        Effect::OnRefusal { of } => partners(charges, at, of).iter().any(|partner| partner.effect() == Effect::Enforce),
    }
}

/// Returns whether the charge at index `at` of a denied set is reported as it stands, because its
/// own quota allows it and nothing is written.
pub(crate) fn stands(charges: &[impl Effective], at: usize, denied: bool) -> bool {
    !denied && !outlives_refusal(charges, at, denied)
}

/// Returns how the charge at index `at` is taken. `denied` says of each charge before it whether it
/// was denied.
pub(crate) fn how(charges: &[impl Effective], at: usize, denied: impl Fn(usize) -> bool) -> TakeMode {
    debug_assert!(at < charges.len(), "a charge is asked about that is none of the set");
    match charges.get(at).map_or(Effect::Observe, Effective::effect) {
        Effect::Enforce | Effect::Observe => TakeMode::IfAllowed,
        Effect::Force => TakeMode::Force,
        Effect::OnRefusal { of } => {
            let first = at.saturating_sub(usize::from(of));
            TakeMode::OnRefusal { refused: (first..at).any(denied) }
        }
    }
}

fn partners<C>(charges: &[C], at: usize, of: u8) -> &[C] {
    charges.get(at.saturating_sub(usize::from(of))..at).unwrap_or_default()
}

/// A charge of a set, borrowed or owned.
pub(crate) trait Effective {
    fn policy(&self) -> &Policy;
    fn effect(&self) -> Effect;
}

impl Effective for Charge<'_> {
    fn policy(&self) -> &Policy {
        self.policy
    }

    fn effect(&self) -> Effect {
        self.effect
    }
}

/// A receipt to refund, with the policy and the key that were charged.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refund {
    /// The policy that was charged.
    pub policy: Policy,
    /// The key that was charged.
    pub key: Key,
    /// The receipt of that charge.
    pub receipt: Receipt,
}

impl Refund {
    /// Makes a refund of what `receipt` still holds of a charge to (policy, key).
    #[must_use]
    pub fn new(policy: Policy, key: Key, receipt: Receipt) -> Self {
        Self { policy, key, receipt }
    }
}

#[cfg(test)]
mod tests;
