//! Growth of the table: the table uses one part of its memory, then two parts, then four.
//!
//! When a new key finds no room, the table doubles: each line is *split*. A key of the line keeps its slot, or moves
//! to the same slot of a new line. One bit of the key's hash decides whether the key moves. No call splits more than
//! a few lines, and nothing runs in the background. Growth has three steps:
//!
//! 1. The table begins to use the new lines ([`Announced`](Growth::Announced)). A thread that is about to place a
//!    key with the old mask holds a stripe. So the growing thread waits for such threads: it locks and unlocks each
//!    stripe once.
//! 2. Each call that takes the long way splits a few lines, in order ([`Splitting`](Growth::Splitting)). A key that
//!    is not in its own lines may still be in the lines from which its own lines are split. A new line stays empty
//!    until its split is done, so every key that has to move finds its new slot free.
//! 3. When all lines are split ([`Settled`](Growth::Settled)), the table may double again.
//!
//! A key moves while its stripe is locked, and always to a later slot. So a [walk](States::walk), which visits the
//! slots in order, misses no key, but may meet a key twice.
//!
//! The table never shrinks. Expired states are free space, so in a table that is too large the keys only lie
//! further apart.

use super::slot_table::{Fingerprint, Growth, SlotRef};
use super::states::States;
use super::word::NO_STATE;
use crate::base::sync::{MutexGuard, lock, try_lock};

/// The number of lines that each call splits.
const LINES_PER_CALL: usize = 4;

/// The number of lines that a call splits for a key that finds no room although its own lines are already
/// split.
const LINES_FOR_ROOM: usize = 16;

impl States {
    /// Splits a few lines, if the table is growing and no other thread is splitting lines. The caller must hold no
    /// lock.
    #[inline]
    pub(super) fn go_on_growing(&self) {
        if self.table.growth() != Growth::Settled {
            self.split_some();
        }
    }

    #[cold]
    #[inline(never)]
    fn split_some(&self) {
        if let Some(next) = try_lock(&self.growth) {
            self.split_lines(next, LINES_PER_CALL);
        }
    }

    /// Makes room for a key that [found no room](super::slot_table::SlotClaim::AfterGrowth). The caller must hold no
    /// lock.
    #[cold]
    pub(super) fn grow_for(&self, key: Fingerprint) {
        let mut next = lock(&self.growth);
        if self.table.growth() == Growth::Settled {
            if !self.table.announce() {
                return; // another thread has made room
            }
            self.pass_stripes();
            self.table.begin_splitting();
            *next = 0;
        }
        let [first, second] = self.table.parents(key).map(|line| self.split(line));
        self.split_lines(next, if first || second { LINES_PER_CALL } else { LINES_FOR_ROOM });
    }

    /// Splits about one line for each charge of a set, while the table is growing. The caller must hold no lock.
    #[cold]
    pub(super) fn grow_for_set(&self, charges: usize) {
        for _ in 0..charges / LINES_FOR_ROOM {
            if self.table.growth() == Growth::Settled {
                return;
            }
            self.split_lines(lock(&self.growth), LINES_FOR_ROOM);
        }
    }

    /// Splits the next lines in order.
    fn split_lines(&self, mut next: MutexGuard<'_, usize>, count: usize) {
        if self.table.growth() == Growth::Settled {
            return; // another thread was quicker
        }
        let end = self.table.in_use() / 2;
        let until = next.saturating_add(count).min(end);
        (*next..until).for_each(|line| _ = self.split(line));
        *next = until;
        if until == end {
            self.table.settle();
        }
    }

    /// Moves a key to its first line, where a charge looks first, if the table now has room there.
    fn move_home(&self, slot: SlotRef<'_>) -> bool {
        let moved = slot.read().and_then(|seen| self.vacate(seen, self.free_until(self.now()), false));
        moved.inspect(|slot| slot.unlock(0, NO_STATE)).is_some()
    }

    /// Moves the keys that have to leave a line, and returns whether there were any. The caller holds the lock of
    /// the growth.
    fn split(&self, line: usize) -> bool {
        let mut has_any = false;
        for (from, to) in self.table.splits(line) {
            let tag = from.tag();
            if self.table.is_second(line, tag) && self.move_home(from) || !self.table.leaves(line, tag) {
                continue;
            }
            has_any = true;
            let key = Fingerprint::of_tag(tag);
            let _stripe = self.lock_stripe_of(key);
            let Some(seen) = from.lock_key(key) else { continue }; // forgotten meanwhile
            if self.is_free(seen, self.free_until(self.now_under_lock(seen))) {
                self.free_blocks(seen);
            } else {
                to.lock().slot.unlock(seen.tag, seen.word);
            }
            from.unlock(0, NO_STATE);
        }
        has_any
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::base::sampling::cases;
    use crate::clock::ManualClock;
    use crate::key::Key;
    use crate::limiter::Charge;
    use crate::limiter::memory::setup::{AnyClock, Setup};
    use crate::limiter::memory::slot_table::{SLOTS_PER_LINE, Seen};
    use crate::policy::Policy;
    use crate::quota::Quota;

    struct Keys {
        states: States,
        clock: ManualClock,
        policy: Policy,
    }

    impl Keys {
        fn new() -> Self {
            let clock = ManualClock::new();
            let shared = AnyClock::Other(std::sync::Arc::new(clock.clone()));
            Self {
                states: States::new(Setup::default(), shared, [1, 2]),
                clock,
                policy: Policy::from(Quota::per_second(100)),
            }
        }

        fn charge(&self, keys: std::ops::Range<u64>) {
            for key in keys {
                let key = Key::of(key).expect("it is short");
                assert!(self.states.charge(Charge::new(&self.policy, &key)).is_allowed());
            }
        }

        /// How many of the keys are found on the short way.
        fn found_at_once(&self, keys: std::ops::Range<u64>) -> usize {
            let states = &self.states;
            let look = |key| {
                let hold = states.hold(&self.policy, &Key::of(key).expect("it is short"));
                let (key, version) = (hold.key, hold.version());
                states.table.look(&states.table.prefetch(key)?, key, version)
            };
            keys.filter_map(look).count()
        }

        /// Takes a place of each key, and returns it.
        fn visit(&self, keys: std::ops::Range<u64>) {
            for key in keys {
                let key = Key::of(key).expect("it is short");
                let receipt = self.states.charge(Charge::new(&self.policy, &key)).take_receipt().expect("one is free");
                self.states.release(&self.policy, &key, &receipt);
            }
        }

        fn slots_in_use(&self) -> usize {
            self.states.table.in_use() * SLOTS_PER_LINE
        }
    }

    #[test]
    fn table_is_as_large_as_its_keys_are_many() {
        let keys = Keys::new();
        let mut known = 0;
        for count in [1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000] {
            let count = if count > 30_000 { u64::from(cases(count)) } else { u64::from(count) }.max(known);
            keys.charge(known..count);
            known = count;
            // The first key without room comes when more than half of the slots are used, the sooner the larger the
            // table is.
            assert!(keys.slots_in_use() as u64 <= 4 * count, "{count}: {}", keys.slots_in_use());
        }
    }

    #[test]
    fn each_key_is_found_at_once_when_the_table_has_grown() {
        let keys = Keys::new();
        keys.charge(0..20_000);
        // Those that were still on their way were charged on the long way, which ends the growth.
        (0..20).for_each(|_| keys.charge(0..20_000));
        assert!(keys.states.table.growth() == Growth::Settled);
        assert_eq!(keys.found_at_once(0..20_000), 20_000);
    }

    /// A charge looks into the first line first.
    #[test]
    fn keys_return_to_their_first_lines_when_the_table_grows() {
        let keys = Keys::new();
        (0..20).for_each(|_| keys.charge(0..20_000));
        let table = &keys.states.table;
        assert!(table.growth() == Growth::Settled);
        let first = |key| table.parents(key)[0]; // before it was split
        let is_away = |seen: &Seen<'_>| {
            seen.tag != 0 && table.line_of(seen.slot) % (table.in_use() / 2) != first(Fingerprint::of_tag(seen.tag))
        };
        let away = table.all_slots().filter_map(SlotRef::read).filter(is_away).count();
        assert!(away < 3_000, "{away} of 20,000 keys are in their second lines"); // twice as many if none returned
    }

    #[test]
    fn keys_that_come_back_keep_their_expired_slots() {
        let keys = Keys::new();
        for _ in 0..20 {
            keys.charge(0..20_000);
            keys.clock.advance(Duration::from_secs(2)); // a state lasts for a second at most
        }
        assert_eq!(keys.found_at_once(0..20_000), 20_000);
    }

    #[test]
    fn keys_that_never_come_back_leave_the_table_small() {
        let keys = Keys::new();
        for round in 0..100 {
            keys.charge(1_000 * round..1_000 * (round + 1));
            keys.clock.advance(Duration::from_secs(12));
        }
        assert!(keys.slots_in_use() < 5_000, "{} slots for a thousand keys", keys.slots_in_use());
    }

    #[test]
    fn keys_that_returned_their_places_keep_their_slots() {
        let keys = Keys { policy: Policy::from(Quota::concurrent(1)), ..Keys::new() };
        for _ in 0..20 {
            keys.visit(0..20_000);
            keys.clock.advance(Duration::from_secs(2));
        }
        assert_eq!(keys.found_at_once(0..20_000), 20_000);
        assert!(keys.slots_in_use() <= 4 * 20_000, "{} slots", keys.slots_in_use());
    }

    #[test]
    fn places_of_keys_that_never_come_back_leave_the_table_small() {
        let keys = Keys { policy: Policy::from(Quota::concurrent(1)), ..Keys::new() };
        for round in 0..100 {
            keys.visit(1_000 * round..1_000 * (round + 1));
            keys.clock.advance(Duration::from_secs(12));
        }
        assert!(keys.slots_in_use() < 5_000, "{} slots for a thousand keys", keys.slots_in_use());
    }

    #[test]
    fn call_splits_a_few_lines_whatever_its_key_is() {
        let quotas = [Quota::per_hour(100), Quota::meter(100, Duration::from_secs(3_600)).expect("it is possible")];
        for others in [1, 2, 8] {
            let mut keys = Keys::new();
            let policies = quotas.map(Policy::from);
            for key in 0..u64::from(cases(60_000)) {
                keys.policy = policies[usize::from(key % others == 0)].clone();
                let (lines, split) = (keys.states.table.in_use(), *lock(&keys.states.growth));
                let was_settled = keys.states.table.growth() == Growth::Settled;
                keys.charge(key..key + 1);
                let (more, now_split) = (keys.states.table.in_use(), *lock(&keys.states.growth));
                let count = if more > lines { now_split } else { now_split - split };
                assert!(more == lines || more == 2 * lines && was_settled, "{key}: {lines} lines, then {more}");
                assert!(count <= 4 * LINES_FOR_ROOM, "{key}: {count} of {lines} lines");
            }
        }
    }
}
