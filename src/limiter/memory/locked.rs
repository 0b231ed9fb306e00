//! The states of a set of charges, locked together.
//!
//! # Order of locks
//!
//! First the stripes of the keys that have no slot, in order; then the slots, in order of their places. A thread that holds
//! slots locks others out of order only if they are free at once (see [`room`](super::room)). The locks of the versions and
//! of the arena's lists are taken last, and nothing is waited for under them. No lock is held while an observer is told.

use smallvec::SmallVec;

use super::state::Hold;
use super::store::{Store, stripe_of};
use crate::sync::MutexGuard;

/// States of a request that need no memory of their own.
pub(super) const INLINE: usize = 4;

/// Locked states, in an array or a list. Dropped, it unlocks those that were not written, as they were.
pub(super) struct LockedSet<'a, H: AsMut<[Hold<'a>]>> {
    store: &'a Store,
    pub(super) holds: H,
    /// The stripes of the keys that have no slot: while they are locked, no other thread makes one.
    stripes: SmallVec<[MutexGuard<'a, ()>; INLINE]>,
}

impl<'a, H: AsMut<[Hold<'a>]>> LockedSet<'a, H> {
    /// Locks the states of these keys, each of which has its slot afterwards, or is known to have none.
    #[inline]
    pub(super) fn lock(store: &'a Store, holds: H) -> Self {
        let mut set = Self { store, holds, stripes: SmallVec::new() };
        while !set.lock_all() {
            set.unlock(); // a key moved or was forgotten meanwhile
        }
        set
    }

    fn lock_all(&mut self) -> bool {
        let store = self.store;
        let mut missing = self.find();
        if !missing.is_empty() {
            missing.sort_unstable();
            missing.dedup();
            self.stripes = missing.iter().map(|stripe| store.lock_stripe(*stripe)).collect();
            // A key that was made or moved meanwhile is found now. The others have no slot as long as this lasts, unless
            // another key lost its slot meanwhile.
            if self.find().iter().any(|stripe| !missing.contains(stripe)) {
                return false;
            }
        }
        let mut last = None;
        while let Some(hold) =
            self.holds.as_mut().iter_mut().filter(|hold| hold.place > last).min_by_key(|hold| hold.place)
        {
            last = hold.place;
            hold.slot = hold.place.and_then(|place| store.table.lock_key(place, hold.key));
            if hold.slot.is_none() {
                return false;
            }
        }
        // Two keys were found in one place if it changed hands in between. Then one of them is not locked.
        self.holds.as_mut().iter().all(|hold| hold.place.is_none() || hold.slot.is_some())
    }

    /// Notes where the keys are, and returns the stripes of those that have no slot.
    fn find(&mut self) -> SmallVec<[usize; INLINE]> {
        let mut missing = SmallVec::new();
        for hold in self.holds.as_mut().iter_mut().filter(|hold| !hold.is_twice) {
            hold.place = self.store.table.place_of(hold.key);
            if hold.place.is_none() {
                missing.push(stripe_of(hold.key));
            }
        }
        missing
    }

    fn unlock(&mut self) {
        for hold in self.holds.as_mut().iter_mut().filter(|hold| hold.slot.is_some()) {
            self.store.put_back(hold);
        }
        self.stripes.clear();
    }
}

impl<'a, H: AsMut<[Hold<'a>]>> Drop for LockedSet<'a, H> {
    fn drop(&mut self) {
        self.unlock();
    }
}
