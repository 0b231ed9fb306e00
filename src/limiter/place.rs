//! Units of concurrency limits that are held, and returned when their last holder is dropped.

use std::fmt;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::{Limiter, Refund};
use crate::sync::{Mutex, contained, lock};

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
        let held = refund.map(|refund| HeldPlaces::of(limiter, [(0, refund)]));
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
    held: Mutex<SmallVec<[(usize, Refund); 1]>>,
}

impl<L: Limiter> HeldPlaces<L> {
    /// Holds what these charges took. Returns `None` if there are none.
    pub(crate) fn of(limiter: L, held: impl IntoIterator<Item = (usize, Refund)>) -> Option<Arc<dyn AnyPlaces>> {
        let held: SmallVec<[(usize, Refund); 1]> = held.into_iter().collect();
        if held.is_empty() { None } else { Some(Arc::new(Self { limiter, held: Mutex::new(held) })) }
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
        lock(&self.held).iter().filter(|(at, _)| *at == charge).map(|(_, refund)| refund.receipt.units()).sum()
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
        let (over, rest): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) = held.drain(..).partition(|(at, _)| is_over(*at));
        *held = rest;
        let is_left = !held.is_empty();
        drop(held);
        self.refund(over);
        is_left
    }
}

impl<L: Limiter> HeldPlaces<L> {
    fn refund(&self, held: SmallVec<[(usize, Refund); 1]>) {
        if !held.is_empty() {
            // The limiter may be the application's code, and may panic.
            contained(|| drop(self.limiter.refund(held.into_iter().map(|(_, refund)| refund).collect())));
        }
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
