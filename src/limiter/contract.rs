//! The trait that every limiter implements, and how strictly a set of charges is all or nothing.

use std::future::Future;
use std::sync::Arc;

use super::charge::{Charge, Refund};
use super::occupancy::Occupancy;
use super::place_lines::PlaceLines;
use super::policy_registry::PolicyRegistry;
use super::reply::Reply;
use super::shared_text::SharedText;
use super::support::{UnsupportedQuota, supports_rates};
use crate::clock::Clock;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::store_load::StoreLoad;

/// Keeps the states of keys and decides about charges.
///
/// [`MemoryLimiter`](crate::MemoryLimiter), `RedisLimiter`, `StoreLimiter`,
/// [`FallbackLimiter`](crate::limiter::FallbackLimiter) and [`BoxLimiter`](crate::limiter::BoxLimiter)
/// implement this trait. To write a limiter of your own, start with the
/// [guide](crate::guide::writing_a_backend).
///
/// # Contract
///
/// * **Sharing.** Clones of a limiter share all states, so a clone is never a second allowance.
/// * **All or nothing.** [`take`](Self::take) takes all of its charges or none. The decision is allowed if every
///   [enforced](crate::limiter::Effect::Enforce) charge is allowed. [`Atomicity`] says how strictly a limiter
///   keeps to all or nothing.
/// * **A denied set changes nothing.** The exceptions are quotas that [count denied](crate::Quota::count_denied)
///   requests, and charges [on refusal](crate::limiter::Effect::OnRefusal). The limiter writes their states in the
///   same step as the decision, or right after the decision if the limiter is `Compensated`. If a set is denied, a
///   charge that its own quota allows takes nothing, and the answer reports the state of that quota.
/// * **The answer** has one [`ChargeDecision`] for each charge, in order, and a receipt for each charge that
///   took something. The charges of a set are for different (policy, key) pairs, because the caller adds up
///   the charges for equal pairs. If two charges of a set have an equal pair, the limiter may answer
///   anything, but must not panic or hang.
/// * **Cost 0** looks: it takes nothing, and is allowed unless the key is
///   [blocked](crate::Quota::block).
/// * **Unsupported quotas and effects** are errors; they are never ignored. [`supports`](Self::supports) says
///   whether a limiter can keep the states of a quota.
/// * **Errors** mean that the limiter failed, for example because its store is away. A refusal is not an
///   error. The middleware's [`OnError`](crate::OnError) decides what happens to a request whose limiter
///   failed.
/// * **Now or later.** A limiter that knows the answer returns [`Reply::Now`], and no future is made. A
///   remote limiter encodes the charges before it returns [`Reply::Later`], because the limiter borrows the
///   charges for the call only.
/// * **Cancel safety.** If a future of `take` is dropped, at most its own charges stay taken, and the limiter should
///   refund these charges. A future that was never polled should leave no charge.
/// * **Held futures.** A future that was polled and is not polled again delays no other caller.
/// * No caller can make the limiter panic, hang, or use memory without bound.
///
/// The suite in `tower_ratelimit::conformance` (feature `conformance`) checks an implementation
/// against this contract.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a limiter",
    note = "a layer takes a limiter, a rule or a quota, and a key: \
            `RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip())`",
    note = "`RedisLimiter::connect(..)` is `async` and returns a `Result`: end it with `.await?`",
    note = "for one of several types of limiters, or a boxed limiter, use `limiter::BoxLimiter`"
)]
pub trait Limiter: Send + Sync + 'static {
    /// The error of a limiter that failed. [`Infallible`](std::convert::Infallible) if it cannot
    /// fail.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The future of an answer that comes later. [`std::future::Ready`] if every answer is known at
    /// once.
    type Future<T: Send + 'static>: Future<Output = Result<T, Self::Error>> + Send + 'static;

    /// Takes all charges or none of them.
    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>>;

    /// Returns the answer that [`take`](Self::take) would give, and takes nothing.
    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>>;

    /// Refunds what each receipt still holds.
    ///
    /// A refund to a [leaky queue](crate::Quota::leaky_queue) has no effect while another request is queued behind
    /// the refunded request, because that other request has already been promised its departure time. The limiters of
    /// this crate keep such a refund, and apply it as soon as all requests behind the refunded request are refunded
    /// too. Each limiter keeps at most 4,096 such refunds.
    ///
    /// A refund never removes more usage than its receipt holds, even if the key has since been charged under a larger
    /// quota of the policy. If the key has more units in use than the refund's quota can store, the refund has no
    /// effect.
    ///
    /// The caller may drop a [`Reply::Later`] without polling it. A remote limiter therefore sends the refund
    /// before `refund` returns; the future only waits for the answer.
    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Self::Error, Self::Future<()>>;

    /// Takes [forced](crate::limiter::Effect::Force) charges: the cost of a request above its reservation.
    ///
    /// The caller may drop a [`Reply::Later`] without polling it. So a remote limiter whose
    /// [`take`](Self::take) sends nothing before its future is polled needs its own `settle`.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.take(charges)
    }

    /// Forgets the state of a (policy, key) pair, so that its whole quota is available.
    ///
    /// A limiter that remembers the denials of its store forgets the denials of the pair in this process at once.
    /// Other processes may refuse the key for as long as they remember its denials: about a second with this
    /// crate's limiters.
    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Self::Error, Self::Future<()>>;

    /// Asks whether the limiter can decide now, for a readiness probe. By default `probe` returns `Ok` and
    /// asks nothing.
    ///
    /// A limiter of this crate with a store checks a key that only probes use, at most once a second. All probes of a
    /// second get the same answer. So a probe succeeds again after the store recovers, even without requests, and
    /// fails if the store cannot write. A probe also fails if the store answers later than the deadline. An
    /// [overload](Self::is_overload) is not an error. But after a failed probe, probes succeed again
    /// only if the store has answered within the deadline. The probe of a
    /// [`FallbackLimiter`](crate::limiter::FallbackLimiter) fails if the probes of both limiters fail.
    ///
    /// The guide says [how to use the answer](crate::guide::redis_and_failures#readiness). Do not answer a probe with
    /// the error that the statistics show. That error stays until a check succeeds. A process that gets no requests
    /// because of its failed probes would never make such a check.
    fn probe(&self) -> Reply<(), Self::Error, Self::Future<()>> {
        Reply::Now(Ok(()))
    }

    /// Checks whether this limiter can keep the states of a quota. By default a limiter can keep the states
    /// of all quotas except [concurrency limits](Quota::concurrent), whose units come back only by refunds. A
    /// limiter whose store outlives the process supports concurrency limits only if the limiter refunds the
    /// units of a process that dies.
    ///
    /// The layer's `check()` reports a quota that its limiter does not support, and the conformance suite skips such a
    /// quota. A limiter that gets a charge under an unsupported quota anyway returns an error or denies the charge.
    /// The only option that a limiter may ignore is a [wait in line](Quota::max_wait). A limiter without lines decides
    /// as if the quota had no wait, because not the limiter but the layer lets requests wait.
    ///
    /// # Errors
    /// Returns an error if the limiter does not support the quota. The error says why, and what to
    /// use instead.
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supports_rates(quota)
    }

    /// Returns the optional parts of the limiter: events, a registry of policies, lines, and numbers for status
    /// pages. By default a limiter has none of these parts.
    fn hooks(&self) -> &dyn LimiterHooks {
        &NoHooks
    }

    /// Returns whether the check failed because of an overload: there were more checks than could be answered in
    /// time. By default `false`.
    ///
    /// A client can cause an overload with many requests at once, so [`OnError::Allow`](crate::OnError::Allow) does
    /// not let a request pass if its check failed because of an overload. A slow store can cause an overload, too.
    fn is_overload(&self, error: &Self::Error) -> bool {
        let _ = error;
        false
    }

    /// Takes one [enforced](crate::limiter::Effect::Enforce) charge, if the limiter has a faster way to do so than
    /// [`take`](Self::take).
    ///
    /// The answer is the one that `take` would give for this charge alone. A limiter without a faster way
    /// returns `None` and takes nothing; the caller then calls `take`.
    #[inline]
    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        let _ = (policy, key, cost);
        None
    }

    /// Refunds one receipt at once, if the limiter has a faster way to do so than
    /// [`refund`](Self::refund).
    ///
    /// The effect is that of `refund` with this receipt alone.
    ///
    /// # Errors
    /// A limiter without a faster way returns the receipt and refunds nothing; the caller then calls `refund`.
    #[inline]
    fn try_refund_one(&self, policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), Receipt> {
        let _ = (policy, key);
        Err(receipt)
    }
}

/// Optional methods of a limiter, for warnings, observers, status pages and lines. Each method has a default for
/// limiters that do not support the method.
pub trait LimiterHooks: Send + Sync {
    /// Returns how strictly a set of charges is all or nothing.
    fn atomicity(&self) -> Atomicity {
        Atomicity::Atomic
    }

    /// Adds an observer of the limiter's [events](crate::observe::LimiterEvent). A layer that has an observer calls
    /// `observe` before its first request. By default `observe` does nothing.
    ///
    /// A limiter reports each event to each of its observers. If several observers have the same
    /// [identity](Observer::identity), the limiter keeps one of them. The limiters of this crate keep at most 32
    /// observers each, and ignore further observers.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = observer;
    }

    /// Returns how full the limiter is, for [status pages](crate::guide::observing#a-status-page). By default
    /// `None`: the limiter keeps its states elsewhere, or does not count them. The call may take a
    /// millisecond for each million states.
    fn occupancy(&self) -> Option<Occupancy> {
        None
    }

    /// Returns the load of the limiter's store as this process sees it. By default `None`: the limiter has no
    /// store.
    fn store_load(&self) -> Option<StoreLoad> {
        None
    }

    /// Returns the registry in which layers enter their policies, so that contradictory policies are
    /// reported. By default `None`: the limiter has no registry.
    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        None
    }

    /// Returns the lines in which requests wait for units of [concurrency limits](Quota::concurrent). By
    /// default `None`: no request can wait for such units. [`supports`](Limiter::supports) should then return
    /// an error for a quota with a [wait in line](Quota::max_wait). The layer reports a quota with such a
    /// wait as unsupported in any case.
    fn place_lines(&self) -> Option<&PlaceLines> {
        None
    }

    /// Returns the text that all processes with the limiter's store share, for a `fleet::Fleet`. By default
    /// `None`: the limiter has no store that keeps a shared text.
    fn shared_text(&self) -> Option<Arc<dyn SharedText>> {
        None
    }

    /// Returns the clock of this process by which the limiter decides. Headers read this clock to say how long the
    /// open window of a [calendar](Quota::calendar) is. By default `None`: another clock decides, such as a server's,
    /// and headers read the calendar time of the operating system.
    fn clock(&self) -> Option<Arc<dyn Clock>> {
        None
    }
}

/// The hooks of a limiter without optional parts.
struct NoHooks;

impl LimiterHooks for NoHooks {}

/// The strictness with which a set of charges is all or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Atomicity {
    /// No caller ever sees a charge of a denied set.
    Atomic,
    /// The charges of a denied set are refunded at once. Before the refund, another caller may be refused
    /// although units are left, but is never admitted over a limit.
    Compensated,
}
