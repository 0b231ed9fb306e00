//! The limiter over a store: its methods and the trait `Limiter`.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::Store;
use super::backend::{Swaps, supports};
use super::error::StoreError;
use super::shared_text::StoreText;
use crate::clock::Clock;
use crate::decision::Decision;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::remote::{Backend, Checks};
use crate::limiter::{
    Charge, Limiter, LimiterHooks, PlaceLines, PolicyRegistry, Refund, Reply, SharedText, UnsupportedQuota,
};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::store_load::StoreLoad;

/// A future of a [`StoreLimiter`]'s answer.
///
/// The limiter sends a request when the future is first polled, and the request needs no further
/// poll. If the future of a `take` is dropped before it returned its answer, the limiter refunds
/// the charged units as soon as the answer arrives. Refunds and settlements are sent at once.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A limiter whose states are in a [`Store`]. All processes that use the store share each limit, for as long as the
/// store keeps its values.
///
/// Clones are one limiter. Each set of charges is all or nothing. A check takes one round trip, or two if another
/// process has written the key since this process last saw it. All algorithms are supported, except logs and sliding
/// windows whose state can be larger than 16 kB.
///
/// The value of a [concurrency limit](Quota::concurrent) has a row for each process. A process
/// renews its rows. The process returns units with a separate swap, after the response. At most 256
/// processes can hold units of one key, and at most 128 processes can have requests in line for units of that key. So
/// prefer Redis for keys that many processes use at once.
///
/// The limiter decides at the store's time. This process knows the store's time only to within a
/// round trip. If the store's clock steps, the decisions under way can be off by 100 milliseconds
/// plus a round trip. A decision that is off by more is made again, unless another process has written the same
/// keys since, or an answer was lost. If the store reports no time, the limiter decides at the process's own
/// time. In that case, a process whose clock is ahead by a second refills a second early.
///
/// A call is sent again only if its connection was cut, and never after a timeout. So the
/// [deadline] has to be longer than two round trips, and longer still if other processes write the
/// same keys. If an answer comes after the deadline, the limiter refunds the charged units.
///
/// If other processes change a key so often that no swap succeeds before the deadline, the check fails as
/// [`Contended`](StoreErrorKind::Contended).
///
/// [deadline]: crate::limiter::store::StoreLimiterBuilder::deadline
///
/// The limiter works in the tokio runtime in which it was made, and may be used from any other
/// runtime.
///
/// ```
/// # use std::sync::Arc;
/// # use tower_ratelimit::limiter::store::{Change, Loaded, Store, StoreError, Swapped};
/// # struct MyStore;
/// # impl Store for MyStore {
/// #     async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
/// #         Ok(Loaded::new(vec![None; keys.len()]))
/// #     }
/// #     async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
/// #         Ok(Swapped::done())
/// #     }
/// # }
/// use tower_ratelimit::limiter::{Charge, Limiter};
/// use tower_ratelimit::limiter::store::StoreLimiterBuilder;
/// use tower_ratelimit::{Key, Policy, Quota};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = StoreLimiterBuilder::new().prefix("shop").build(MyStore)?;
/// let policy = Policy::new("api", Quota::per_minute(100))?;
/// let alice = Key::of("alice").expect("it is short");
/// let decision = limiter.take(&[Charge::new(&policy, &alice)]).await?;
/// assert!(decision.is_allowed());
/// # Ok(())
/// # }
/// ```
pub struct StoreLimiter<S: Store>(pub(super) Arc<Checks<Swaps<S>>>);

impl<S: Store> StoreLimiter<S> {
    /// Returns how many checks wait for an answer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.backend().waiting()
    }

    /// Returns how busy the store is, as this process sees it.
    #[must_use]
    pub fn store_load(&self) -> StoreLoad {
        self.0.load()
    }

    /// Closes the limiter. The units of [concurrency limits](Quota::concurrent) that this process holds go back to
    /// the store. Later checks fail.
    ///
    /// A task of the limiter's runtime returns the units. The task takes at most a check's
    /// [deadline] for each 64 keys. If the runtime ends before the task, the units [lapse].
    ///
    /// [deadline]: crate::limiter::store::StoreLimiterBuilder::deadline
    /// [lapse]: crate::limiter::store::StoreLimiterBuilder::places_lapse_after
    pub fn close(&self) {
        self.0.close();
    }
}

impl<S: Store> Limiter for StoreLimiter<S> {
    type Error = StoreError;
    type Future<T: Send + 'static> = StoreFuture<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, StoreError, StoreFuture<Decision>> {
        self.0.take(charges)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, StoreError, StoreFuture<Decision>> {
        self.0.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), StoreError, StoreFuture<()>> {
        self.0.refund(refunds)
    }

    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, StoreError, StoreFuture<Decision>> {
        self.0.settle(charges)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), StoreError, StoreFuture<()>> {
        self.0.reset(policy, key)
    }

    /// Fails if the store does not decide within the
    /// [deadline](crate::limiter::store::StoreLimiterBuilder::deadline).
    fn probe(&self) -> Reply<(), StoreError, StoreFuture<()>> {
        self.0.probe()
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supports(quota)
    }

    fn is_overload(&self, error: &StoreError) -> bool {
        error.kind() == StoreErrorKind::Overloaded
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self
    }
}

impl<S: Store> LimiterHooks for StoreLimiter<S> {
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
        self.0.backend().chosen_clock()
    }

    fn shared_text(&self) -> Option<Arc<dyn SharedText>> {
        Some(Arc::new(StoreText::new(Arc::clone(&self.0))))
    }
}

impl<S: Store> Clone for StoreLimiter<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Store> fmt::Debug for StoreLimiter<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreLimiter")
            .field("keys", &self.0.backend().before())
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}
