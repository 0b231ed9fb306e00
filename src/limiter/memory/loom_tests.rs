//! Models of the locks and of the steps that read a slot without one: two threads, one promise each.
//!
//! `tests/all.sh` has the command that runs them.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use loom::sync::Arc;
use loom::thread;

use super::events::PendingEvents;
use super::setup::{AnyClock, OnFull, Setup};
use super::slot_table::{Fingerprint, Growth, HELD_VERSION, Seen, SlotClaim, SlotRef, SlotTable, version_of};
use super::states::{States, stripe_of};
use super::versions::PHASE_US;
use super::word::{HeldUnits, NO_STATE, Now};
use crate::algorithm::divisor::Divisor;
use crate::algorithm::{Decider, Pair, WordLayout};
use crate::clock::{Clock, ManualClock, StoppedTimer};
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::{BoundedTurn, Charge, Effect, LineStep};
use crate::policy::Policy;
use crate::quota::Quota;

// The table ───────────────────────────────────────────────────────────────────────────────────────────────────────────

const LAYOUT: WordLayout = WordLayout { shift: 0, grid: Divisor::new(1) };
const BASE: u64 = 1_000_000;

fn now() -> Now {
    Now::new(BASE + 500, BASE)
}

/// A live state, identified by its number.
fn live(n: u64) -> u64 {
    LAYOUT.pack(Pair { at: BASE + 10_000, n }, now())
}

fn number(word: u64) -> Option<u64> {
    LAYOUT.unpack(word, now()).map(|pair| pair.n)
}

fn key(n: u64) -> Fingerprint {
    Fingerprint::new(n << 40)
}

/// Puts a key into a free slot, as the holder of its stripe does.
fn put(table: &SlotTable, key: Fingerprint, version: u16, n: u64) -> bool {
    let free = table.candidates(key).into_iter().find(|seen| seen.word == NO_STATE && seen.try_lock());
    free.is_some_and(|seen| {
        seen.slot.unlock(key.tag(version), live(n));
        true
    })
}

/// In which thread each of two actions runs. Loom knows the latest access to a value only. If the first thread has read
/// it, and the other one reads it before it writes it, loom takes that for no race, and does not try the write before
/// the first read. So each of them has to be first once.
const BOTH_WAYS: [bool; 2] = [false, true];

/// Runs two actions at once, one of them in a thread of its own.
fn at_once<A: 'static, B: 'static>(
    is_swapped: bool,
    one: impl FnOnce() -> A + 'static,
    other: impl FnOnce() -> B + 'static,
) -> (A, B) {
    if is_swapped {
        let thread = thread::spawn(one);
        let other = other();
        (thread.join().expect("the thread ends"), other)
    } else {
        let thread = thread::spawn(other);
        let one = one();
        (one, thread.join().expect("the thread ends"))
    }
}

fn table_with(n: u64) -> Arc<SlotTable> {
    let table = Arc::new(SlotTable::new(1));
    assert!(put(&table, key(1), 1, n));
    table
}

/// Finds a key, and reads its slot.
fn find(table: &SlotTable, key: Fingerprint) -> Option<Seen<'_>> {
    loop {
        let seen = table.slot_of(key)?.read();
        if let Some(seen) = seen.filter(|seen| Fingerprint::of_tag(seen.tag) == key) {
            return Some(seen);
        }
        thread::yield_now();
    }
}

fn read(table: &SlotTable, key: Fingerprint) -> Option<(u16, Option<u64>)> {
    find(table, key).map(|seen| (version_of(seen.tag), number(seen.word)))
}

/// Charges a key the short way, if its slot is of this version.
fn charge_short(table: &SlotTable, key: Fingerprint, version: u16) -> bool {
    loop {
        let seen = table.prefetch(key).and_then(|line| table.look(&line, key, version));
        if seen.is_some_and(|seen| seen.replace(live(number(seen.word).unwrap_or(0) + 1))) {
            return true;
        }
        if find(table, key).is_none_or(|seen| version_of(seen.tag) != version) {
            return false;
        }
        thread::yield_now();
    }
}

/// Charges a key under the lock of its slot.
fn charge_locked(table: &SlotTable, key: Fingerprint) -> bool {
    let seen = table.slot_of(key).and_then(|slot| slot.lock_key(key));
    seen.is_some_and(|seen| {
        seen.slot.set_word(live(number(seen.word).unwrap_or(0) + 1));
        true
    })
}

/// Moves another key into the slot of a key.
fn overwrite(table: &SlotTable, from: Fingerprint, to: Fingerprint, version: u16, n: u64) -> bool {
    let seen = find(table, from).filter(|seen| seen.try_lock());
    seen.is_some_and(|seen| {
        seen.slot.unlock(to.tag(version), live(n));
        true
    })
}

#[test]
fn two_charges_of_the_short_way_are_both_counted() {
    loom::model(|| {
        let table = table_with(0);
        let other = table.clone();
        let thread = thread::spawn(move || charge_short(&other, key(1), 1));
        assert!(charge_short(&table, key(1), 1));
        assert!(thread.join().expect("the thread ends"));
        assert_eq!(read(&table, key(1)), Some((1, Some(2))));
    });
}

#[test]
fn charges_with_and_without_a_lock_are_both_counted() {
    for is_swapped in BOTH_WAYS {
        loom::model(move || {
            let table = table_with(0);
            let [one, other] = [table.clone(), table.clone()];
            let charge = move || charge_short(&one, key(1), 1);
            assert_eq!(at_once(is_swapped, charge, move || charge_locked(&other, key(1))), (true, true));
            assert_eq!(read(&table, key(1)), Some((1, Some(2))));
        });
    }
}

#[test]
fn two_charges_under_the_lock_are_both_counted() {
    loom::model(|| {
        let table = table_with(0);
        let other = table.clone();
        let thread = thread::spawn(move || charge_locked(&other, key(1)));
        assert!(charge_locked(&table, key(1)));
        assert!(thread.join().expect("the thread ends"));
        assert_eq!(read(&table, key(1)), Some((1, Some(2))));
    });
}

#[test]
fn short_charge_lands_in_its_own_version_or_nowhere() {
    for is_swapped in BOTH_WAYS {
        loom::model(move || {
            let table = table_with(11);
            let [one, other] = [table.clone(), table.clone()];
            let (charged, converted) = at_once(
                is_swapped,
                move || charge_short(&one, key(1), 1),
                move || overwrite(&other, key(1), key(1), 2, 22),
            );
            assert!(charged || converted);
            let expected = if converted { (2, Some(22)) } else { (1, Some(12)) };
            assert_eq!(read(&table, key(1)), Some(expected));
        });
    }
}

#[test]
fn reader_sees_either_key_whole_while_one_replaces_another() {
    for is_swapped in BOTH_WAYS {
        loom::model(move || {
            let table = table_with(11);
            let [one, other] = [table.clone(), table.clone()];
            // Either key may be missed while it comes or goes, but no key is ever seen with the other's state.
            let read_both = move || {
                for seen in [1, 2].map(|n| one.slot_of(key(n)).and_then(SlotRef::read)).into_iter().flatten() {
                    let expected = if Fingerprint::of_tag(seen.tag) == key(1) { (1, Some(11)) } else { (2, Some(22)) };
                    assert_eq!((version_of(seen.tag), number(seen.word)), expected);
                }
            };
            let ((), is_replaced) = at_once(is_swapped, read_both, move || overwrite(&other, key(1), key(2), 2, 22));
            assert!(is_replaced);
            assert_eq!(read(&table, key(2)), Some((2, Some(22))));
        });
    }
}

/// A reader may take the state of the other key for that of the key. It writes nothing then.
#[test]
fn charge_never_changes_a_key_that_left_and_came_back() {
    for is_swapped in BOTH_WAYS {
        loom::model(move || {
            let table = table_with(11);
            let [one, other] = [table.clone(), table.clone()];
            let charge = move || {
                let seen = one.slot_of(key(1)).and_then(SlotRef::read).filter(|seen| seen.tag == key(1).tag(1));
                seen.is_some_and(|seen| seen.replace(live(number(seen.word).unwrap_or(0) + 1)))
            };
            let (charged, came_back) = at_once(is_swapped, charge, move || {
                overwrite(&other, key(1), key(2), 1, 22) && overwrite(&other, key(2), key(1), 1, 33)
            });
            match (charged, came_back) {
                (true, true) => assert!(matches!(read(&table, key(1)), Some((1, Some(33 | 34))))),
                (true, false) => assert_eq!(read(&table, key(1)), Some((1, Some(12)))),
                (false, true) => assert_eq!(read(&table, key(1)), Some((1, Some(33)))),
                (false, false) => {}
            }
        });
    }
}

#[test]
fn charge_never_lands_on_another_key_with_the_same_state() {
    for (is_locked, is_swapped) in [(false, false), (false, true), (true, false), (true, true)] {
        loom::model(move || {
            let table = table_with(5);
            let [one, other] = [table.clone(), table.clone()];
            let charge = move || match is_locked {
                true => charge_locked(&one, key(1)),
                false => find(&one, key(1)).is_some_and(|seen| seen.replace(live(6))),
            };
            // However many keys move in and out, the last of them has the very state that was read.
            let (charged, _) = at_once(is_swapped, charge, move || {
                overwrite(&other, key(1), key(2), 1, 7) && overwrite(&other, key(2), key(3), 1, 5)
            });
            match read(&table, key(3)) {
                Some(found) => assert_eq!(found, (1, Some(5)), "the new key pays nothing"),
                None => assert!(charged || read(&table, key(2)) == Some((1, Some(7)))),
            }
        });
    }
}

#[test]
fn two_threads_never_get_the_same_free_slot() {
    loom::model(|| {
        let table = Arc::new(SlotTable::new(1));
        let other = table.clone();
        let thread = thread::spawn(move || put(&other, key(1), 1, 1));
        let mine = put(&table, key(2), 1, 2);
        let theirs = thread.join().expect("the thread ends");
        assert_eq!(read(&table, key(2)), mine.then_some((1, Some(2))));
        assert_eq!(read(&table, key(1)), theirs.then_some((1, Some(1))));
    });
}

// The states ───────────────────────────────────────────────────────────────────────────────────────────────────────────

const HOUR: Duration = Duration::from_secs(3_600);

struct Limiter {
    states: States,
    clock: ManualClock,
    policy: Policy,
    key: Key,
}

fn setup(capacity: usize) -> Setup {
    Setup { capacity, entries: 1, ..Setup::default() }
}

impl Limiter {
    fn new(quota: Quota) -> Arc<Self> {
        Self::of(quota, 1, 0)
    }

    /// A limiter for this many keys, which is asked about this one.
    fn of(quota: Quota, capacity: usize, key: u64) -> Arc<Self> {
        Self::that(setup(capacity), quota, key)
    }

    fn that(setup: Setup, quota: Quota, key: u64) -> Arc<Self> {
        let clock = ManualClock::new();
        let shared = AnyClock::Other(std::sync::Arc::new(clock.clone()));
        let policy = Policy::new("p", quota).expect("it is a name");
        Arc::new(Self {
            states: States::new(setup, shared, [1, 2]),
            clock,
            policy,
            key: Key::of(key).expect("it is short"),
        })
    }

    fn take(&self) -> bool {
        self.states.charge(Charge::new(&self.policy, &self.key)).is_allowed()
    }

    /// Takes one unit, and returns its receipt.
    fn take_receipt(&self) -> Option<Receipt> {
        self.states.charge(Charge::new(&self.policy, &self.key)).take_receipt()
    }

    /// Returns what a receipt holds of a concurrency limit.
    fn release(&self, receipt: &Receipt) {
        self.states.release(&self.policy, &self.key, receipt);
    }

    fn remaining(&self) -> u64 {
        self.states.charge(Charge::new(&self.policy, &self.key).cost(0)).remaining()
    }

    fn fingerprint(&self) -> Fingerprint {
        match self.policy.quota().decider() {
            Decider::Places(_) => self.states.fingerprint_of_held(&self.policy, &self.key),
            Decider::Pair(..) | Decider::EntryLog(_) => self.states.fingerprint(&self.policy, &self.key),
        }
    }

    /// The slots of all live states.
    fn live(&self) -> Vec<usize> {
        let seen = self.states.table.all_slots().filter_map(SlotRef::read);
        seen.filter(|seen| seen.tag != 0).map(|seen| seen.slot.address()).collect()
    }

    /// Moves the key to its other line, if it is free to move. A thread that moves a key holds the stripe of the key
    /// that it makes room for.
    fn move_key(&self) {
        let _stripe = self.states.lock_stripe(stripe_of(self.fingerprint()) + 1);
        let slot = self.states.table.slot_of(self.fingerprint());
        if let Some(seen) = slot.and_then(SlotRef::read).filter(|seen| seen.tag != 0) {
            let now = self.states.now();
            let vacated = self.states.vacate(seen, now, false).or_else(|| self.states.vacate_pinned(seen, now, 1));
            if let Some(slot) = vacated {
                slot.unlock(0, NO_STATE);
            }
        }
    }
}

/// Explores all interleavings with at most `preemptions` preemptions. These steps are too long for all of them.
fn model(preemptions: usize, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000; // a table is filled in some
    builder.check(run);
}

fn bucket() -> Quota {
    Quota::token_bucket(10, HOUR).expect("the quota is possible")
}

#[test]
fn new_key_of_two_threads_gets_one_slot_and_both_charges() {
    model(3, || {
        let limiter = Limiter::new(bucket());
        let other = limiter.clone();
        let thread = thread::spawn(move || other.take());
        assert!(limiter.take() && thread.join().expect("the thread ends"));
        assert_eq!((limiter.remaining(), limiter.live().len()), (8, 1));
    });
}

#[test]
fn charge_of_a_key_that_moves_is_counted_once() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = Limiter::new(bucket());
            assert!(limiter.take());
            let before = limiter.live();
            let [one, other] = [limiter.clone(), limiter.clone()];
            let (is_taken, ()) = at_once(is_swapped, move || one.take(), move || other.move_key());
            assert!(is_taken);
            assert_eq!((limiter.remaining(), limiter.live().len()), (8, 1));
            limiter.move_key();
            assert_eq!(limiter.remaining(), 8);
            assert!(before.len() == 1);
        });
    }
}

#[test]
fn charge_of_a_log_that_moves_is_counted_once() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = Limiter::new(Quota::sliding_log(10, HOUR).expect("the quota is possible"));
            assert!(limiter.take());
            let [one, other] = [limiter.clone(), limiter.clone()];
            let (is_taken, ()) = at_once(is_swapped, move || one.take(), move || other.move_key());
            assert!(is_taken);
            assert_eq!((limiter.remaining(), limiter.live().len()), (8, 1));
        });
    }
}

#[test]
fn version_of_a_key_that_moves_is_not_used_again() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = Limiter::new(bucket());
            assert!(limiter.take());
            // In the phase that follows, no charge asks for the version, but its state lives.
            assert!(limiter.states.free_versions());
            limiter.clock.advance(Duration::from_micros(PHASE_US));
            let [one, other] = [limiter.clone(), limiter.clone()];
            let (is_done, ()) = at_once(is_swapped, move || one.states.free_versions(), move || other.move_key());
            assert!(is_done);
            assert_eq!(limiter.live().len(), 1);
            assert_eq!(limiter.states.versions.known().in_use(), 1, "a live state has it");
        });
    }
}

#[test]
fn version_is_not_used_again_while_a_charge_revives_its_state() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = Limiter::new(bucket());
            assert!(limiter.take());
            assert!(limiter.states.free_versions());
            limiter.clock.advance(2 * HOUR); // the state has expired
            let [one, other] = [limiter.clone(), limiter.clone()];
            assert_eq!(at_once(is_swapped, move || one.states.free_versions(), move || other.take()), (true, true));
            // The charge has asked for the version, unless it did so before this phase.
            assert_eq!(limiter.remaining(), 9);
        });
    }
}

/// The instant at which the look began is later than the charge.
#[test]
fn state_of_an_unused_version_stays_when_the_clock_steps_back() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = Limiter::new(bucket());
            assert!(limiter.take());
            assert!(limiter.states.free_versions());
            let now = limiter.clock.now();
            limiter.clock.advance(2 * HOUR);
            let [one, other] = [limiter.clone(), limiter.clone()];
            let step_back_and_take = move || {
                other.clock.set(now);
                other.take()
            };
            let (_, is_taken) = at_once(is_swapped, move || one.states.free_versions(), step_back_and_take);
            assert!(is_taken);
            let taken = 10 - limiter.remaining();
            assert!(taken == 1 || taken == 2, "{taken} are taken"); // the first had expired, or is live again
        });
    }
}

#[test]
fn set_and_single_charge_share_the_last_unit() {
    let quota = Quota::fixed_window(1, HOUR).expect("the quota is possible");
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = Limiter::new(quota);
            let first = Policy::new("first", bucket()).expect("it is a name");
            let [one, other] = [limiter.clone(), limiter.clone()];
            let charged = first.clone();
            let take_set = move || {
                let charges = [Charge::new(&charged, &other.key), Charge::new(&other.policy, &other.key)];
                other.states.charge_all(&charges, &mut smallvec::SmallVec::new(), true)
            };
            let (single, set) = at_once(is_swapped, move || one.take(), take_set);
            assert!(set != single, "one unit, one of them got it");
            let left = limiter.states.charge(Charge::new(&first, &limiter.key).cost(0)).remaining();
            assert_eq!(left, 10 - u64::from(set), "all or nothing");
        });
    }
}

/// The set looks at one key and charges another. The other thread charges the first key, and then takes and returns a
/// unit of the second one. The word of the second key is then as the set read it, so only the word of the first key
/// shows that the set decides later. What is left after the other thread took its unit tells whether it came first.
#[test]
fn set_looks_at_a_key_when_it_charges_another() {
    for effect in [Effect::Enforce, Effect::Observe] {
        for is_swapped in BOTH_WAYS {
            model(2, move || {
                let limiter = Limiter::new(Quota::fixed_window(10, HOUR).expect("the quota is possible"));
                let looked_at = Policy::new("looked at", bucket()).expect("it is a name");
                assert!(limiter.take());
                assert!(limiter.states.charge(Charge::new(&looked_at, &limiter.key)).is_allowed());
                // The bucket denies an observed charge of 10 before and after the other thread's charge.
                let cost = if effect == Effect::Observe { 10 } else { 0 };
                let [one, other] = [limiter.clone(), limiter.clone()];
                let charged = looked_at.clone();
                let take_set = move || {
                    let look = Charge::new(&looked_at, &one.key).cost(cost).effect(effect);
                    let mut decisions = smallvec::SmallVec::new();
                    assert!(one.states.charge_set(&[Charge::new(&one.policy, &one.key), look], &mut decisions));
                    decisions[1].remaining()
                };
                let charge_and_return = move || {
                    assert!(other.states.charge(Charge::new(&charged, &other.key)).is_allowed());
                    let mut taken = other.states.charge(Charge::new(&other.policy, &other.key));
                    let receipt = taken.take_receipt().expect("it took a unit");
                    other.states.refund(&other.policy, &other.key, &receipt);
                    taken.remaining() == 8
                };
                let (left, is_before) = at_once(is_swapped, take_set, charge_and_return);
                assert!(left == 8 || !is_before && left == 9, "{left} are left of what was charged before");
            });
        }
    }
}

/// A limiter of a concurrency limit whose key has its slot.
fn held(limit: u64) -> Arc<Limiter> {
    let limiter = Limiter::new(Quota::concurrent(limit));
    let receipt = limiter.take_receipt().expect("none is held");
    limiter.release(&receipt);
    limiter
}

#[test]
fn last_place_goes_to_one_of_two_threads() {
    loom::model(|| {
        let limiter = held(1);
        let other = limiter.clone();
        let thread = thread::spawn(move || other.take_receipt());
        let mine = limiter.take_receipt();
        let theirs = thread.join().expect("the thread ends");
        assert!(mine.is_some() != theirs.is_some());
        mine.iter().chain(&theirs).for_each(|receipt| limiter.release(receipt));
        assert_eq!(limiter.remaining(), 1);
    });
}

#[test]
fn place_that_is_returned_while_another_is_taken_is_free_again() {
    for is_swapped in BOTH_WAYS {
        loom::model(move || {
            let limiter = held(2);
            let first = limiter.take_receipt().expect("none is held");
            let [one, other] = [limiter.clone(), limiter.clone()];
            let (second, ()) = at_once(is_swapped, move || one.take_receipt(), move || other.release(&first));
            assert_eq!(limiter.remaining(), 1);
            limiter.release(&second.expect("one is held"));
            assert_eq!((limiter.remaining(), limiter.live().len()), (2, 1));
        });
    }
}

#[test]
fn place_that_is_returned_while_its_key_moves_is_free_again() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = held(2);
            let first = limiter.take_receipt().expect("none is held");
            let second = limiter.take_receipt().expect("one is held");
            let before = limiter.live();
            let [one, other] = [limiter.clone(), limiter.clone()];
            let ((), ()) = at_once(is_swapped, move || one.release(&first), move || other.move_key());
            assert_eq!((limiter.remaining(), limiter.live().len()), (1, 1));
            limiter.move_key();
            assert_eq!((limiter.remaining(), limiter.live().len()), (1, 1));
            limiter.release(&second);
            assert_eq!((limiter.remaining(), before.len()), (2, 1));
        });
    }
}

#[test]
fn place_that_is_taken_while_its_key_moves_is_counted_once() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = held(2);
            let first = limiter.take_receipt();
            let [one, other] = [limiter.clone(), limiter.clone()];
            let (second, ()) = at_once(is_swapped, move || one.take_receipt(), move || other.move_key());
            assert_eq!((limiter.remaining(), limiter.live().len()), (0, 1));
            first.iter().chain(&second).for_each(|receipt| limiter.release(receipt));
            assert_eq!(limiter.remaining(), 2);
        });
    }
}

#[test]
fn last_place_is_returned_once_while_another_thread_asks() {
    loom::model(|| {
        let limiter = held(1);
        let first = limiter.take_receipt().expect("none is held");
        let other = limiter.clone();
        // The thread that takes is the second one: a denial only reads, see `BOTH_WAYS`.
        let thread = thread::spawn(move || other.take_receipt());
        limiter.release(&first);
        let second = thread.join().expect("the thread ends");
        assert_eq!(limiter.remaining(), u64::from(second.is_none()));
        second.iter().for_each(|receipt| limiter.release(receipt));
        assert_eq!((limiter.remaining(), limiter.live().len()), (1, 1));
    });
}

/// A key that returned its last place keeps its slot, until another key takes it.
#[test]
fn place_never_lands_on_the_key_that_took_its_slot() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = held(1);
            let [one, other] = [limiter.clone(), limiter.clone()];
            let theirs = (
                Fingerprint::of_held(9 << 40).tag(HELD_VERSION),
                HeldUnits { units: 1, run: 0 }.pack().expect("the first run fits"),
            );
            let take_slot = move || {
                let key = other.states.fingerprint_of_held(&other.policy, &other.key);
                let seen = other.states.table.slot_of(key).and_then(SlotRef::read);
                let seen = seen.filter(|seen| other.states.is_free(*seen, other.states.now()) && seen.try_lock());
                seen.inspect(|seen| seen.slot.unlock(theirs.0, theirs.1)).is_some()
            };
            let (mine, is_taken) = at_once(is_swapped, move || one.take_receipt(), take_slot);
            assert!(mine.is_some(), "there is room for both");
            let held = limiter.states.table.all_slots().filter_map(SlotRef::read);
            assert_eq!(held.filter(|seen| (seen.tag, seen.word) == theirs).count(), usize::from(is_taken));
            assert_eq!(limiter.remaining(), 0);
        });
    }
}

#[test]
fn new_key_of_two_threads_gets_one_slot_and_two_places() {
    model(3, || {
        let limiter = Limiter::new(Quota::concurrent(3));
        let other = limiter.clone();
        let thread = thread::spawn(move || other.take());
        assert!(limiter.take() && thread.join().expect("the thread ends"));
        assert_eq!((limiter.remaining(), limiter.live().len()), (1, 1));
    });
}

fn is_called(turn: &mut BoundedTurn) -> bool {
    turn.poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(LineStep::Asks)
}

/// Either the request that joins its line finds what was returned, or it is woken, or a newcomer was quicker.
#[test]
fn request_that_joins_its_line_misses_no_release() {
    for newcomer_comes in [false, true] {
        model(3, move || {
            let limiter = held(1);
            let old = limiter.take_receipt().expect("none is held");
            let other = limiter.clone();
            let thread = thread::spawn(move || {
                other.release(&old);
                newcomer_comes && other.take_receipt().is_some()
            });
            let lines = &limiter.states.place_lines;
            let mut turn = BoundedTurn::join(
                lines,
                (&limiter.policy, &limiter.key),
                None,
                std::sync::Arc::new(StoppedTimer),
                Duration::MAX,
            );
            let charge = Charge::new(&limiter.policy, &limiter.key).arrived(turn.number());
            assert!(is_called(&mut turn), "it asks when it has joined");
            let has_found = limiter.states.charge(charge).is_allowed();
            let is_overtaken = thread.join().expect("the thread ends");
            assert!(!(has_found && is_overtaken), "one place is free");
            if !has_found && !is_overtaken {
                assert!(is_called(&mut turn), "the release wakes it");
                assert!(limiter.states.charge(charge).is_allowed());
            }
            drop(turn);
            assert!(lines.is_empty());
        });
    }
}

/// The request waits for two places of which one is free. Its denial says whether the newcomer was quicker.
#[test]
fn newcomer_never_overtakes_a_request_in_line() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = held(2);
            let _old = limiter.take_receipt().expect("none is held");
            let [one, other] = [limiter.clone(), limiter.clone()];
            let join_and_ask = move || {
                let (policy, key) = (&one.policy, &one.key);
                let timer = std::sync::Arc::new(StoppedTimer);
                let turn = BoundedTurn::join(&one.states.place_lines, (policy, key), None, timer, Duration::MAX);
                let denied = one.states.charge(Charge::new(policy, key).cost(2).arrived(turn.number()));
                assert!(!denied.is_allowed(), "one place is held for good");
                (turn, denied.remaining())
            };
            let ((_turn, left), is_taken) = at_once(is_swapped, join_and_ask, move || other.take());
            assert_eq!(left, u64::from(!is_taken), "the newcomer took the place before the request asked, or never");
        });
    }
}

/// Whatever the order is, a place of before the reset returns nothing of after it.
#[test]
fn place_of_before_a_reset_returns_nothing_of_after_it() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = held(1);
            let old = limiter.take_receipt().expect("none is held");
            let [one, other] = [limiter.clone(), limiter.clone()];
            let reset = move || other.states.reset(&other.policy, &other.key);
            let (new, ()) = at_once(is_swapped, move || one.take_receipt(), reset);
            // If it was taken after the reset, it is held; a reset after it cannot be, because the old one was held.
            limiter.release(&old);
            assert_eq!(limiter.remaining(), u64::from(new.is_none()));
        });
    }
}

#[test]
fn run_that_begins_during_a_reset_is_not_taken_for_the_one_before() {
    for is_swapped in BOTH_WAYS {
        model(3, move || {
            let limiter = held(1);
            let old = limiter.take_receipt().expect("none is held");
            let [one, other] = [limiter.clone(), limiter.clone()];
            let reset_and_take = move || {
                other.states.reset(&other.policy, &other.key);
                other.take_receipt()
            };
            let (new, theirs) = at_once(is_swapped, move || one.take_receipt(), reset_and_take);
            assert!(new.is_some() != theirs.is_some(), "one place was freed");
            limiter.release(&old);
            assert_eq!(limiter.remaining(), 0);
        });
    }
}

#[test]
fn set_and_single_charge_share_the_last_place() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = held(1);
            let first = Policy::new("first", bucket()).expect("it is a name");
            assert!(limiter.states.charge(Charge::new(&first, &limiter.key)).is_allowed());
            let [one, other] = [limiter.clone(), limiter.clone()];
            let charged = first.clone();
            let take_set = move || {
                let charges = [Charge::new(&charged, &other.key), Charge::new(&other.policy, &other.key)];
                other.states.charge_set(&charges, &mut smallvec::SmallVec::new())
            };
            let (single, set) = at_once(is_swapped, move || one.take(), take_set);
            assert!(set != single, "one place, one of them got it");
            let left = limiter.states.charge(Charge::new(&first, &limiter.key).cost(0)).remaining();
            assert_eq!(left, 9 - u64::from(set), "all or nothing");
        });
    }
}

/// A reset between the decision of a set and its writing: the run that the set begins has the number of after it.
#[test]
fn set_that_begins_a_run_during_a_reset_is_not_taken_for_the_one_before() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = held(1);
            let first = Policy::new("first", bucket()).expect("it is a name");
            assert!(limiter.states.charge(Charge::new(&first, &limiter.key)).is_allowed());
            let old = limiter.take_receipt().expect("none is held");
            let [one, other] = [limiter.clone(), limiter.clone()];
            let take_set = move || {
                let charges = [Charge::new(&first, &other.key), Charge::new(&other.policy, &other.key)];
                other.states.charge_set(&charges, &mut smallvec::SmallVec::new())
            };
            let ((), set) = at_once(is_swapped, move || one.states.reset(&one.policy, &one.key), take_set);
            limiter.release(&old);
            assert_eq!(limiter.remaining(), u64::from(!set));
        });
    }
}

/// A limiter whose table can double once, and a key that leaves its first line then.
fn growing(quota: &Quota) -> Arc<Limiter> {
    let leaves = |limiter: &Arc<Limiter>| {
        assert!(limiter.states.table.may_grow());
        let key = limiter.fingerprint();
        let before = limiter.states.table.parents(key)[0];
        limiter.states.grow_for(key);
        limiter.states.table.leaves(before, key.tag(1))
    };
    let key = (0..).find(|key| leaves(&Limiter::of(quota.clone(), 7, *key))).expect("every other key does");
    Limiter::of(quota.clone(), 7, key)
}

#[test]
fn charge_of_a_key_whose_line_is_split_is_counted_once() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = growing(&bucket());
            assert!(limiter.take());
            let before = limiter.live();
            let [one, other] = [limiter.clone(), limiter.clone()];
            let grow = move || other.states.grow_for(other.fingerprint());
            let (is_taken, ()) = at_once(is_swapped, move || one.take(), grow);
            assert!(is_taken);
            assert_eq!((limiter.remaining(), limiter.live().len()), (8, 1));
            assert!(limiter.live() != before, "it left its line");
        });
    }
}

#[test]
fn charge_of_a_log_whose_line_is_split_is_counted_once() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = growing(&Quota::sliding_log(10, HOUR).expect("the quota is possible"));
            assert!(limiter.take());
            let [one, other] = [limiter.clone(), limiter.clone()];
            let grow = move || other.states.grow_for(other.fingerprint());
            let (is_taken, ()) = at_once(is_swapped, move || one.take(), grow);
            assert!(is_taken);
            assert_eq!((limiter.remaining(), limiter.live().len()), (8, 1));
        });
    }
}

#[test]
fn place_that_is_returned_while_its_line_is_split_is_free_again() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = growing(&Quota::concurrent(2));
            let first = limiter.take_receipt().expect("none is held");
            let before = limiter.live();
            let [one, other] = [limiter.clone(), limiter.clone()];
            let take_and_release = move || {
                let second = one.take_receipt().expect("one is held");
                one.release(&first);
                second
            };
            let grow = move || other.states.grow_for(other.fingerprint());
            let (second, ()) = at_once(is_swapped, take_and_release, grow);
            assert_eq!((limiter.remaining(), limiter.live().len()), (1, 1));
            assert!(limiter.live() != before, "it left its line");
            limiter.release(&second);
            assert_eq!(limiter.remaining(), 2);
        });
    }
}

#[test]
fn reset_forgets_a_key_whose_line_is_split() {
    for is_swapped in BOTH_WAYS {
        for quota in [bucket(), Quota::sliding_log(10, HOUR).expect("the quota is possible")] {
            model(2, move || {
                let limiter = growing(&quota);
                assert!(limiter.take());
                let [one, other] = [limiter.clone(), limiter.clone()];
                let grow = move || other.states.grow_for(other.fingerprint());
                at_once(is_swapped, move || one.states.reset(&one.policy, &one.key), grow);
                assert_eq!(limiter.remaining(), 10);
                assert!(limiter.take());
                assert_eq!((limiter.remaining(), limiter.live().len()), (9, 1));
            });
        }
    }
}

#[test]
fn new_key_gets_one_slot_while_the_table_doubles() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = growing(&bucket());
            let [one, other] = [limiter.clone(), limiter.clone()];
            let grow = move || other.states.grow_for(other.fingerprint());
            let (is_taken, ()) = at_once(is_swapped, move || one.take(), grow);
            assert!(is_taken);
            assert!(limiter.states.table.growth() == Growth::Settled);
            assert_eq!((limiter.remaining(), limiter.live().len()), (9, 1));
        });
    }
}

/// A key that has the same first line as the key of [`growing`] when the table has doubled.
fn following(quota: &Quota) -> u64 {
    let limiter = growing(quota);
    limiter.states.grow_for(limiter.fingerprint());
    let first_line = |key| {
        let key = limiter.states.fingerprint(&limiter.policy, &key);
        limiter.states.table.prefetch(key).map(|line| line.address())
    };
    let follows = |key: &u64| {
        let key = Key::of(*key).expect("it is short");
        key != limiter.key && first_line(key) == first_line(limiter.key.clone())
    };
    (0..).find(follows).expect("every fourth key does")
}

#[test]
fn new_key_never_takes_the_place_of_a_key_whose_line_is_split() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let key = Key::of(following(&bucket())).expect("it is short");
            let limiter = growing(&bucket());
            assert!(limiter.take());
            let [one, other] = [limiter.clone(), limiter.clone()];
            let new = key.clone();
            let take_new = move || one.states.charge(Charge::new(&one.policy, &new)).is_allowed();
            let (is_taken, ()) = at_once(is_swapped, take_new, move || other.states.grow_for(other.fingerprint()));
            assert!(is_taken);
            assert_eq!((limiter.remaining(), limiter.live().len()), (9, 2));
            assert_eq!(limiter.states.charge(Charge::new(&limiter.policy, &key).cost(0)).remaining(), 9);
        });
    }
}

#[test]
fn new_key_gets_an_expired_slot_while_the_growth_ends() {
    model(2, || {
        let limiter = Limiter::that(Setup { on_full: OnFull::Deny, ..setup(7) }, bucket(), 0);
        let (table, now) = (&limiter.states.table, limiter.states.now());
        assert!(table.announce());
        table.begin_splitting();
        // Each slot has a key whose state expired a second ago, so it is kept as long as the table can grow.
        let expired = LAYOUT.pack(Pair { at: now.at - 1_000_000, n: 0 }, now);
        let version = limiter.states.version(&limiter.policy);
        for n in 1_u64.. {
            let key = limiter.states.fingerprint(&limiter.policy, &Key::of(n).expect("it is short"));
            let free = table.candidates(key).into_iter().find(|seen| seen.word == NO_STATE && seen.try_lock());
            free.inspect(|seen| seen.slot.unlock(key.tag(version), expired));
            if table.all_slots().all(|slot| slot.tag() != 0) {
                break;
            }
        }
        let other = limiter.clone();
        let thread = thread::spawn(move || other.states.table.settle());
        let (key, mut events) = (limiter.fingerprint(), PendingEvents::of(&limiter.states));
        let stripe = limiter.states.lock_stripe_of(key);
        match limiter.states.claim(key, version, now, &mut events) {
            SlotClaim::Slot(slot) => slot.unlock(0, NO_STATE),
            SlotClaim::AfterGrowth => {} // which has ended then
            SlotClaim::Nothing => panic!("no slot is live"),
        }
        drop(stripe);
        thread.join().expect("the thread ends");
    });
}

#[test]
fn walk_meets_a_key_whose_line_is_split() {
    for is_swapped in BOTH_WAYS {
        model(2, move || {
            let limiter = growing(&bucket());
            assert!(limiter.take());
            let [one, other] = [limiter.clone(), limiter.clone()];
            let walk = move || {
                let mut met = 0;
                one.states.walk(
                    |_| false,
                    |seen| {
                        met += usize::from(seen.tag != 0);
                        seen
                    },
                );
                met
            };
            let (met, ()) = at_once(is_swapped, walk, move || other.states.grow_for(other.fingerprint()));
            assert!(met == 1 || met == 2, "it is met {met} times");
        });
    }
}
