//! Units of concurrency limits that are held until their last holder is dropped.

use std::fmt;
use std::sync::{Arc, PoisonError, Weak};

use smallvec::SmallVec;

use super::{Charge, Limiter, Refund};
use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::Timestamp;
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::outcome::Observer;
use crate::policy::Policy;

/// Holds units of [concurrency limits](crate::Quota::concurrent) until this value is dropped.
///
/// [`Place::take`] takes a place for work that is not a request, and [`Ready::hold`](crate::limiter::Ready::hold)
/// waits for such a place. [`InFlight::hold`](crate::middleware::InFlight::hold) makes a place for work that
/// continues after the response has been sent.
#[must_use = "the units are returned when the place is dropped"]
pub struct Place {
    _held: SmallVec<[Arc<dyn AnyPlaces>; 1]>,
}

impl Place {
    /// Takes `cost` units of a [concurrency limit](crate::Quota::concurrent) from any limiter, and holds
    /// them. [`MemoryLimiter::hold`](crate::MemoryLimiter::hold) does the same without a future.
    ///
    /// ```
    /// use tower_ratelimit::limiter::{BoxLimiter, Place};
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = BoxLimiter::new(MemoryLimiter::new());
    /// let renders = Policy::new("renders", Quota::concurrent(4))?;
    /// match Place::take(&limiter, &renders, &Key::of("alice").unwrap(), 1).await? {
    ///     Ok(place) => {
    ///         // Render.
    ///         drop(place);
    ///     }
    ///     Err(denied) => println!("{} of {} are free", denied.remaining(), denied.limit()),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the limiter fails. Returns the decision as the inner error if the units are not
    /// free.
    pub async fn take<L: Limiter + Clone>(
        limiter: &L,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> Result<Result<Self, ChargeDecision>, L::Error> {
        let decision = limiter.take(&[Charge::new(policy, key).cost(cost)]).await?.into_charges().next();
        debug_assert!(decision.is_some(), "one charge has one decision");
        let mut decision = decision.unwrap_or(ChargeDecision::blank());
        if !decision.is_allowed() {
            return Ok(Err(decision));
        }
        let refund = |receipt| Refund::new(policy.clone(), key.clone(), receipt);
        Ok(Ok(Self::new(limiter.clone(), decision.take_receipt().map(refund))))
    }

    /// Makes the place of a charge. The place is empty if the charge took nothing.
    pub(crate) fn new(limiter: impl Limiter, refund: Option<Refund>) -> Self {
        let Some(refund) = refund else { return Self { _held: SmallVec::new() } };
        let held = HeldPlaces::of(limiter, SmallVec::from_buf([HeldCharge::new(0, refund)]), None);
        Self { _held: SmallVec::from_buf([held]) }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").finish_non_exhaustive()
    }
}

/// The units that a request holds, for each of its charges. The units that are still held are returned when
/// this value is dropped.
pub(crate) struct HeldPlaces<L: Limiter> {
    limiter: L,
    observer: Option<Arc<dyn Observer>>,
    held: Mutex<SmallVec<[HeldCharge; 1]>>,
}

/// The units that one charge holds.
pub(crate) struct HeldCharge {
    charge: usize,
    refund: Refund,
    /// The instant that the observer returned when the units were taken. `None` if the units were not reported
    /// to an observer.
    taken_at: Option<Timestamp>,
}

impl HeldCharge {
    /// Makes the record of the units that the charge at an index took.
    pub(crate) fn new(charge: usize, refund: Refund) -> Self {
        Self { charge, refund, taken_at: None }
    }
}

impl<L: Limiter> HeldPlaces<L> {
    /// Holds the units that these charges took, and reports the units to the observer.
    pub(crate) fn of(
        limiter: L,
        held: SmallVec<[HeldCharge; 1]>,
        observer: Option<&Arc<dyn Observer>>,
    ) -> Arc<dyn AnyPlaces> {
        let mut places = Arc::new(Self { limiter, observer: observer.cloned(), held: Mutex::new(held) });
        if observer.is_some() {
            Arc::get_mut(&mut places).into_iter().for_each(Self::report_taken); // nothing else has it yet
        }
        places
    }

    /// Reports the units to the observer. The observer is the application's code: if it panics, all units are
    /// returned.
    fn report_taken(&mut self) {
        let Some(observer) = &self.observer else { return };
        for held in self.held.get_mut().unwrap_or_else(PoisonError::into_inner) {
            let Refund { policy, key, receipt } = &held.refund;
            held.taken_at = Some(observer.on_place_taken(policy, key, receipt.units()));
        }
    }
}

/// [`HeldPlaces`] whose limiter's type is erased.
pub(crate) trait AnyPlaces: Send + Sync {
    /// Returns the units that the charge at an index holds.
    fn units(&self, charge: usize) -> u64;

    /// Returns whether anything is held.
    fn holds_any(&self) -> bool;

    /// Does nothing if `is_shared` returns true. Otherwise refunds the units of the charges for which `is_over`
    /// returns true. The result says whether any units are still held.
    fn release(&self, is_over: &dyn Fn(usize) -> bool, is_shared: &dyn Fn() -> bool) -> bool;
}

impl<L: Limiter> AnyPlaces for HeldPlaces<L> {
    fn units(&self, charge: usize) -> u64 {
        lock(&self.held).iter().filter(|held| held.charge == charge).map(|held| held.refund.receipt.units()).sum()
    }

    fn holds_any(&self) -> bool {
        !lock(&self.held).is_empty()
    }

    fn release(&self, is_over: &dyn Fn(usize) -> bool, is_shared: &dyn Fn() -> bool) -> bool {
        let mut held = lock(&self.held);
        // Calls `is_shared` under the lock, so a holder that arrives meanwhile waits for the lock, and then reads
        // whether a unit is left.
        if is_shared() {
            return true;
        }
        let (over, rest): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) = held.drain(..).partition(|held| is_over(held.charge));
        *held = rest;
        let is_left = !held.is_empty();
        drop(held);
        return_units(&self.limiter, self.observer.as_ref(), over);
        is_left
    }
}

/// Refunds units to the limiter. The observer and the limiter may be the application's code, and may panic. The
/// observer learns of the refund before the limiter, so that the observer never counts more units than the limit.
fn return_units<L: Limiter>(
    limiter: &L,
    observer: Option<&Arc<dyn Observer>>,
    held: impl IntoIterator<Item = HeldCharge>,
) {
    // `None` rather than an empty list, because the drop of a list is a call (`benches/instructions`).
    let mut later: Option<Vec<Refund>> = None;
    for HeldCharge { refund: Refund { policy, key, receipt }, taken_at, .. } in held {
        if let (Some(observer), Some(taken_at)) = (observer, taken_at) {
            contained(|| observer.on_place_returned(&policy, &key, receipt.units(), taken_at));
        }
        contained(|| {
            if let Err(receipt) = limiter.try_refund_one(&policy, &key, receipt) {
                later.get_or_insert_default().push(Refund::new(policy, key, receipt));
            }
        });
    }
    if let Some(later) = later {
        contained(|| drop(limiter.refund(later)));
    }
}

impl<L: Limiter> Drop for HeldPlaces<L> {
    fn drop(&mut self) {
        // No lock is needed, because no other thread has the value any more.
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        return_units(&self.limiter, self.observer.as_ref(), held.drain(..));
    }
}

/// Returns a place that shares the units of all these values, or `None` if none of the values holds units any
/// more.
pub(crate) fn shared_place(held: impl Iterator<Item = Weak<dyn AnyPlaces>>) -> Option<Place> {
    // Upgrades each `Weak` before it calls the value (see `AnyPlaces::release`).
    let held: SmallVec<[Arc<dyn AnyPlaces>; 1]> = held.filter_map(|held| held.upgrade()).collect();
    let held: SmallVec<[Arc<dyn AnyPlaces>; 1]> = held.into_iter().filter(|held| held.holds_any()).collect();
    (!held.is_empty()).then(|| Place { _held: held })
}
