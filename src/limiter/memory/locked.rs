//! The states of one charge or of a set, locked together.
//!
//! # Order of locks
//!
//! A thread first locks the stripes of the keys that have no slot, in order, and then the slots, in order. See
//! [`slot_table`](super::slot_table) for all locks. A thread calls observers after it has released all locks.

use smallvec::SmallVec;

use super::locked_key::LockedKey;
use super::slot_table::SlotRef;
use super::states::{States, stripe_of};
use crate::base::order::sort_indices;
use crate::base::sync::MutexGuard;

/// The number of states that a request can lock without an allocation.
pub(super) const INLINE: usize = 4;

/// The number of states above which a set is sorted. In a smaller set, it is faster to search for each next slot.
pub(super) const MANY: usize = 32;

/// Locked states. When the set is dropped, the states that were not written are unlocked unchanged.
pub(super) struct LockedSet<'a, H: AsMut<[LockedKey<'a>]>> {
    states: &'a States,
    pub(super) holds: H,
    /// The stripes of the keys that have no slot. While a stripe is locked, no other thread makes a slot for a key of
    /// the stripe.
    stripes: SmallVec<[MutexGuard<'a, ()>; INLINE]>,
}

impl<'a, H: AsMut<[LockedKey<'a>]>> LockedSet<'a, H> {
    /// Locks the states of these keys. Afterwards each key has its slot, or is known to have no slot.
    #[inline(always)]
    pub(super) fn lock(states: &'a States, holds: H) -> Self {
        let mut set = Self { states, holds, stripes: SmallVec::new() };
        loop {
            // `is_known` is true if each key either has its slot or certainly has no slot.
            let is_known = set.find() || set.find_under_stripes();
            // `lock_found` returns true if each slot still belongs to its key after the slot was locked.
            if is_known && set.lock_found() {
                return set;
            }
            set.put_back();
            set.stripes.clear();
        }
    }

    /// Locks the stripes of the keys that have no slot. Returns whether, for each key, either the slot is found or
    /// the stripe is locked.
    #[cold]
    fn find_under_stripes(&mut self) -> bool {
        let missing = self.holds.as_mut().iter().filter(|hold| hold.slot.is_none() && !hold.is_twice);
        let mut stripes: SmallVec<[usize; 2 * INLINE]> = missing.map(|hold| stripe_of(hold.key)).collect();
        sort_indices(&mut stripes, &|one, other| one.cmp(&other));
        stripes.dedup();
        self.stripes = stripes.iter().map(|stripe| self.states.lock_stripe(*stripe)).collect();
        // This search also finds a key that got its slot or was moved after the first search. A key that the search
        // does not find gets no slot while the key's stripe is locked. If a key has lost its slot since the first
        // search, and its stripe is not locked, the function returns false.
        self.find();
        let is_held =
            |hold: &LockedKey<'_>| hold.slot.is_some() || hold.is_twice || stripes.contains(&stripe_of(hold.key));
        self.holds.as_mut().iter().all(is_held)
    }

    /// Notes the keys' slots, and returns whether each key has one.
    #[inline(always)]
    fn find(&mut self) -> bool {
        let mut is_found = true;
        for hold in self.holds.as_mut().iter_mut().filter(|hold| !hold.is_twice) {
            hold.slot = self.states.table.slot_of(hold.key);
            is_found &= hold.slot.is_some();
        }
        is_found
    }

    /// Locks the slots that were found, in their order, if each slot still belongs to its key.
    #[inline(always)]
    fn lock_found(&mut self) -> bool {
        if self.holds.as_mut().len() > MANY {
            return self.lock_found_of_many();
        }
        let order = |hold: &LockedKey<'_>| hold.slot.map(SlotRef::address);
        let mut last = None;
        while let Some(hold) =
            self.holds.as_mut().iter_mut().filter(|hold| order(hold) > last).min_by_key(|hold| order(hold))
        {
            last = order(hold);
            hold.locked = hold.slot.and_then(|slot| slot.lock_key(hold.key));
            // Another key got the slot between the search and the lock. The caller searches again.
            if hold.locked.is_none() {
                return false;
            }
        }
        // If a slot passed from one key to another in between, the search may have found the slot for both keys, but
        // only one of the keys is locked.
        self.holds.as_mut().iter().all(|hold| hold.slot.is_none() || hold.locked.is_some())
    }

    /// Does what [`lock_found`](Self::lock_found) does, for many keys. The time for each key grows with the logarithm
    /// of the number of keys.
    #[inline(never)]
    fn lock_found_of_many(&mut self) -> bool {
        let holds = self.holds.as_mut();
        let address =
            |holds: &[LockedKey<'_>], at: usize| holds.get(at).and_then(|hold| hold.slot).map(SlotRef::address);
        let mut order: Vec<usize> = (0..holds.len()).filter(|at| address(holds, *at).is_some()).collect();
        sort_indices(&mut order, &|one, other| address(holds, one).cmp(&address(holds, other)));
        let mut last = None;
        for at in order {
            let address = address(holds, at);
            let Some(hold) = holds.get_mut(at).filter(|_| last != address) else { return false };
            last = address;
            hold.locked = hold.slot.and_then(|slot| slot.lock_key(hold.key));
            // Another key got the slot between the search and the lock. The caller searches again.
            if hold.locked.is_none() {
                return false;
            }
        }
        true
    }

    fn put_back(&mut self) {
        self.holds.as_mut().iter_mut().for_each(|hold| self.states.put_back(hold));
    }
}

impl<'a, H: AsMut<[LockedKey<'a>]>> Drop for LockedSet<'a, H> {
    fn drop(&mut self) {
        self.put_back();
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::limiter::Charge;
    use crate::limiter::memory::setup::{AnyClock, Setup};
    use crate::policy::Policy;
    use crate::quota::Quota;

    #[test]
    fn two_keys_found_in_one_slot_are_not_both_locked() {
        let states = States::new(Setup { capacity: 1, ..Setup::default() }, AnyClock::default(), [1, 2]);
        let policy = Policy::from(Quota::per_hour(5));
        let [there, gone] = ["there", "gone"].map(|key| Key::of(key).expect("it is short"));
        assert!(states.charge(Charge::new(&policy, &there)).is_allowed());
        for keys in [[&there, &gone], [&gone, &there]] {
            let mut holds = keys.map(|key| states.hold(&policy, key));
            let slot = states.table.slot_of(states.fingerprint(&policy, &there));
            holds.iter_mut().for_each(|hold| hold.slot = slot);
            let mut set = LockedSet { states: &states, holds: &mut holds, stripes: SmallVec::new() };
            assert!(!set.lock_found());
        }
        assert_eq!(states.charge(Charge::new(&policy, &there).cost(0)).remaining(), 4, "nothing stays locked");
    }
}
