//! The limiter on Redis: its public methods, and its implementation of the trait `Limiter`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::backend::RedisBackend;
use super::error::RedisError;
use super::shared_text::RedisText;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::remote::{Backend, Checks};
use crate::limiter::{
    Atomicity, Charge, Limiter, LimiterHooks, PlaceLines, PolicyRegistry, Refund, Reply, SharedText, UnsupportedQuota,
};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::store_load::StoreLoad;

/// A future of a [`RedisLimiter`]'s answer.
///
/// A request is sent when the future is first polled, and needs no further poll. If the future of a `take` is
/// dropped before it returned its answer, the limiter refunds what was charged as soon as the answer arrives.
/// Refunds and settlements are sent without a poll.
pub type RedisFuture<T> = Pin<Box<dyn Future<Output = Result<T, RedisError>> + Send>>;

/// A limiter whose states are in Redis: one limit for any number of processes.
///
/// Clones are one limiter. One script call decides a request's whole set of charges, at the server's time. While
/// calls are in flight, new checks wait, and are sent together in the next call. A check that would be answered too
/// late is [not sent](crate::guide::redis_and_failures#when-redis-is-slow).
///
/// **The connection has to be trusted, or encrypted with `rediss://`.** An attacker who runs the
/// server, or can put bytes into a connection without TLS, decides the answer to every check.
/// If the client library is fred, the attacker can also end the process with one deeply nested reply: fred reads
/// replies by recursion, and overflows its stack.
///
/// Callers' keys may be secrets, so they are stored as hashes: see `key_secret` and `readable_keys`
/// of the [builder](Self::builder).
///
/// The limiter works in the tokio runtime in which it was connected, and may be used from any other runtime. After
/// that first runtime has ended, checks fail as [`Unavailable`](StoreErrorKind::Unavailable). If the first runtime is
/// not driven, like a current-thread runtime outside of `block_on`, checks fail after the deadline.
#[derive(Clone)]
pub struct RedisLimiter(pub(super) Arc<Checks<RedisBackend>>);

impl RedisLimiter {
    /// Finds out, within the given time, whether the user has the rights that checks need.
    pub(super) async fn check_rights(&self, within: Duration) -> Result<(), RedisError> {
        let policy = Policy::new("rights", Quota::per_second(1));
        debug_assert!(policy.is_ok(), "the name is valid");
        let Ok(policy) = policy else { return Ok(()) };
        let key = self.0.backend().space.key(&policy, &Key::global());
        self.0.backend().flights.store().check_rights(&key, within).await
    }

    /// Returns how many checks wait for an answer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.backend().waiting()
    }

    /// Returns how busy Redis is, as this process sees it.
    #[must_use]
    pub fn store_load(&self) -> StoreLoad {
        self.0.load()
    }

    /// Closes the limiter, and the connections that were opened for it. The units of
    /// [concurrency limits](Quota::concurrent) that this process holds go back to Redis. Later checks fail.
    ///
    /// A task of the limiter's runtime returns the units. The task takes at most a check's [deadline] for each 64
    /// keys. If the runtime ends before the task, the units [lapse].
    ///
    /// [deadline]: crate::limiter::redis::RedisLimiterBuilder::deadline
    /// [lapse]: crate::limiter::redis::RedisLimiterBuilder::places_lapse_after
    pub fn close(&self) {
        self.0.close();
    }
}

impl Limiter for RedisLimiter {
    type Error = RedisError;
    type Future<T: Send + 'static> = RedisFuture<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        self.0.take(charges)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        self.0.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), RedisError, RedisFuture<()>> {
        self.0.refund(refunds)
    }

    /// Sends the charges before `settle` returns. Forced charges do not use the units of leases.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        self.0.settle(charges)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), RedisError, RedisFuture<()>> {
        self.0.reset(policy, key)
    }

    /// Fails if Redis does not decide within the [deadline](crate::limiter::redis::RedisLimiterBuilder::deadline). In
    /// a cluster, `probe` fails if no server decides.
    fn probe(&self) -> Reply<(), RedisError, RedisFuture<()>> {
        self.0.probe()
    }

    /// Supports every quota.
    fn supports(&self, _quota: &Quota) -> Result<(), UnsupportedQuota> {
        Ok(())
    }

    fn is_overload(&self, error: &RedisError) -> bool {
        error.kind() == StoreErrorKind::Overloaded
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self
    }
}

impl LimiterHooks for RedisLimiter {
    /// Returns `Atomic` on one server without leases, and otherwise `Compensated`.
    fn atomicity(&self) -> Atomicity {
        if self.0.backend().in_slots || self.0.has_leases() { Atomicity::Compensated } else { Atomicity::Atomic }
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.0.backend().events().observe(observer);
    }

    fn store_load(&self) -> Option<StoreLoad> {
        Some(self.0.load())
    }

    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        Some(self.0.registry())
    }

    fn place_lines(&self) -> Option<&PlaceLines> {
        Some(self.0.lines())
    }

    fn clock(&self) -> Option<Arc<dyn Clock>> {
        self.0.backend().flights.store().clock.clone()
    }

    fn shared_text(&self) -> Option<Arc<dyn SharedText>> {
        Some(Arc::new(RedisText::new(Arc::clone(&self.0))))
    }
}

impl fmt::Debug for RedisLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLimiter")
            .field("keys", &self.0.backend().space)
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}
