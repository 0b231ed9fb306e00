//! Units of concurrency limits that are held, and returned when their last holder is dropped.

use std::fmt;
use std::sync::{Arc, PoisonError, Weak};

use smallvec::SmallVec;

use super::{Limiter, Refund};
use crate::outcome::Observer;
use crate::sync::{Mutex, contained, lock};
use crate::time::Timestamp;

/// Holds units of [concurrency limits](crate::Quota::concurrent) until it is dropped.
///
/// [`MemoryLimiter::hold`](crate::MemoryLimiter::hold) makes one for work that is not a request, and
/// [`InFlight::hold`](crate::middleware::InFlight::hold) one for work that goes on when the response
/// has been sent.
#[must_use = "the units are returned when this is dropped"]
pub struct Place {
    _held: SmallVec<[Arc<dyn AnyPlaces>; 1]>,
}

impl Place {
    /// Makes the place of a charge that took something, or an empty one.
    pub(crate) fn new(limiter: impl Limiter, refund: Option<Refund>) -> Self {
        let held = refund.map(|refund| HeldPlaces::of(limiter, [(0, refund)], None));
        Self::of(held.into_iter().flatten())
    }

    /// Makes the place that shares what others hold.
    pub(crate) fn of(held: impl IntoIterator<Item = Arc<dyn AnyPlaces>>) -> Self {
        Self { _held: held.into_iter().collect() }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").finish_non_exhaustive()
    }
}

/// Units that a request holds, by the places of its charges. What is left of them is returned when this is dropped.
pub(crate) struct HeldPlaces<L: Limiter> {
    limiter: L,
    observer: Option<Arc<dyn Observer>>,
    held: Mutex<SmallVec<[Held; 1]>>,
}

/// The units that one charge holds.
struct Held {
    charge: usize,
    refund: Refund,
    /// The instant that the observer returned when the units were taken. `None` if they were not reported to it.
    taken_at: Option<Timestamp>,
}

impl<L: Limiter> HeldPlaces<L> {
    /// Holds what these charges took, and reports it to the observer. Returns `None` if there are none.
    pub(crate) fn of(
        limiter: L,
        held: impl IntoIterator<Item = (usize, Refund)>,
        observer: Option<&Arc<dyn Observer>>,
    ) -> Option<Arc<dyn AnyPlaces>> {
        let held = held.into_iter().map(|(charge, refund)| Held { charge, refund, taken_at: None });
        let held: SmallVec<[Held; 1]> = held.collect();
        if held.is_empty() {
            return None;
        }
        let mut places = Self { limiter, observer: observer.cloned(), held: Mutex::new(held) };
        places.report_taken();
        Some(Arc::new(places))
    }

    /// The observer is the application's code. If it panics, everything is returned.
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
    /// Returns the units that the charge at a place holds.
    fn units(&self, charge: usize) -> u64;

    /// Returns whether anything is held.
    fn holds_any(&self) -> bool;

    /// Returns the units of the charges for which `is_over` is true, unless `is_shared`. Returns whether anything is
    /// held after that.
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
        // Under the lock: a holder that comes meanwhile finds out under the lock whether anything is left.
        if is_shared() {
            return true;
        }
        let (over, rest): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) = held.drain(..).partition(|held| is_over(held.charge));
        *held = rest;
        let is_left = !held.is_empty();
        drop(held);
        self.refund(over);
        is_left
    }
}

impl<L: Limiter> HeldPlaces<L> {
    fn refund(&self, held: SmallVec<[Held; 1]>) {
        if held.is_empty() {
            return;
        }
        // Observer and limiter may be the application's code, and may panic. The observer is told first, so that it never
        // counts more than the limit.
        for Held { refund: Refund { policy, key, receipt }, taken_at, .. } in &held {
            if let (Some(observer), Some(taken_at)) = (&self.observer, taken_at) {
                contained(|| observer.on_place_returned(policy, key, receipt.units(), *taken_at));
            }
        }
        contained(|| drop(self.limiter.refund(held.into_iter().map(|held| held.refund).collect())));
    }
}

impl<L: Limiter> Drop for HeldPlaces<L> {
    fn drop(&mut self) {
        let held = std::mem::take(&mut *lock(&self.held));
        self.refund(held);
    }
}

/// Returns the place that shares what these hold, or `None` if none of them holds anything any more.
pub(crate) fn shared_place(held: impl Iterator<Item = Weak<dyn AnyPlaces>>) -> Option<Place> {
    // Each is shared before it is asked, see `AnyPlaces::release`.
    let held: SmallVec<[Arc<dyn AnyPlaces>; 1]> = held.filter_map(|held| held.upgrade()).collect();
    let held: SmallVec<[Arc<dyn AnyPlaces>; 1]> = held.into_iter().filter(|held| held.holds_any()).collect();
    (!held.is_empty()).then(|| Place::of(held))
}
