//! Models of every lock-free step of the table: two or three threads, one promise each.
//!
//! `RUSTFLAGS="--cfg ratelimit_loom" CARGO_TARGET_DIR=target/loom cargo test --lib loom`

use loom::sync::Arc;
use loom::thread;

use super::words::{Fingerprint, Found, NO_STATE, Now, Seen, Words, version_of};
use crate::algorithm::{Pair, WordLayout};
use crate::sync::{Mutex, lock};

const LAYOUT: WordLayout = WordLayout::MICROSECONDS;
const BASE: u64 = 1_000_000;

fn now() -> Now {
    Now::new(BASE + 500, BASE)
}

/// A live state, told apart by its number.
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
fn put(words: &Words, key: Fingerprint, version: u16, n: u64) -> bool {
    let free = words.candidates(key).into_iter().find(|seen| seen.word == NO_STATE && words.lock(*seen));
    free.is_some_and(|seen| {
        words.publish(seen, key.tag(version), live(n));
        true
    })
}

fn read(words: &Words, key: Fingerprint) -> Option<(u16, Option<u64>)> {
    words.find(key).map(|seen| (version_of(seen.tag), number(seen.word)))
}

#[test]
fn two_charges_of_one_key_are_both_counted() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 0));
        let charge = |words: &Words| loop {
            let Some(seen) = words.find(key(1)) else { continue };
            let n = number(seen.word).unwrap_or(0);
            if words.replace(seen, live(n + 1)) {
                break;
            }
        };
        let other = words.clone();
        let thread = thread::spawn(move || charge(&other));
        charge(&words);
        thread.join().expect("the thread ends");
        assert_eq!(read(&words, key(1)), Some((1, Some(2))));
    });
}

/// What the usual charge does: finds the very tag, and replaces; again if another was quicker.
fn charge_quickly(words: &Words, key: Fingerprint, version: u16) -> Option<()> {
    loop {
        let seen = match words.find_quietly(key, version) {
            Found::Slot(seen) => seen,
            Found::Nothing => return None,
            Found::Changing => {
                loom::thread::yield_now();
                continue;
            }
        };
        let n = number(seen.word).unwrap_or(0);
        if words.replace(seen, live(n + 1)) {
            return Some(());
        }
    }
}

#[test]
fn two_quick_charges_of_one_key_are_both_counted_at_once() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 0));
        let other = words.clone();
        let thread = thread::spawn(move || charge_quickly(&other, key(1), 1));
        // Either may find the slot held, for as long as the other writes it.
        assert_eq!(charge_quickly(&words, key(1), 1), Some(()));
        assert_eq!(thread.join().expect("the thread ends"), Some(()));
        assert_eq!(read(&words, key(1)), Some((1, Some(2))));
    });
}

#[test]
fn a_quick_charge_lands_in_its_own_version_or_nowhere() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 11));
        let other = words.clone();
        let thread = thread::spawn(move || {
            let Some(seen) = other.find(key(1)) else { return false };
            let locked = other.lock(seen);
            if locked {
                other.publish(seen, key(1).tag(2), live(22));
            }
            locked
        });
        let charged = charge_quickly(&words, key(1), 1).is_some();
        let converted = thread.join().expect("the thread ends");
        // The conversion goes ahead on what it has read: a charge before that is in it, one between makes it try again.
        assert!(charged || converted);
        let expected = if converted { (2, Some(22)) } else { (1, Some(12)) };
        assert_eq!(read(&words, key(1)), Some(expected));
    });
}

#[test]
fn who_reads_while_another_key_moves_in_sees_either_key_whole() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 11));
        let other = words.clone();
        let thread = thread::spawn(move || {
            let Some(seen) = other.find(key(1)) else { return };
            if other.lock(seen) {
                other.publish(seen, key(2).tag(2), live(22));
            }
        });
        // Either key may be missed while it comes or goes, but no key is ever seen with the other's state.
        if let Some(found) = read(&words, key(1)) {
            assert_eq!(found, (1, Some(11)));
        }
        if let Some(found) = read(&words, key(2)) {
            assert_eq!(found, (2, Some(22)));
        }
        thread.join().expect("the thread ends");
        assert_eq!(read(&words, key(2)), Some((2, Some(22))));
    });
}

#[test]
fn a_charge_never_lands_on_a_key_that_moved_in_with_the_same_state() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 5));
        let other = words.clone();
        let thread = thread::spawn(move || {
            let Some(seen) = other.find(key(1)) else { return };
            if other.lock(seen) {
                other.publish(seen, key(2).tag(1), live(5));
            }
        });
        // Charges key 1 if it is still there.
        let charged = words.find(key(1)).is_some_and(|seen| words.replace(seen, live(6)));
        thread.join().expect("the thread ends");
        match read(&words, key(2)) {
            Some(found) => assert_eq!(found, (1, Some(5)), "the newcomer pays nothing"),
            None => assert!(charged, "key 2 moved in unless the charge was quicker"),
        }
    });
}

#[test]
fn charge_never_lands_on_another_key_after_the_slot_was_emptied_and_reused() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 5));
        let other = words.clone();
        // However many keys move in and out: the last of them has the very state that was read.
        let thread = thread::spawn(move || {
            for (from, to, n) in [(1, 2, 7), (2, 3, 5)] {
                let Some(seen) = other.find(key(from)) else { return };
                if other.lock(seen) {
                    other.publish(seen, key(to).tag(1), live(n));
                }
            }
        });
        let charged = words.find(key(1)).is_some_and(|seen| words.replace(seen, live(6)));
        thread.join().expect("the thread ends");
        if let Some(found) = read(&words, key(3)) {
            assert_eq!(found, (1, Some(5)), "the newcomer pays nothing");
        } else {
            assert!(charged || read(&words, key(2)) == Some((1, Some(7))));
        }
    });
}

#[test]
fn a_slot_that_changes_its_version_is_never_read_half() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 11));
        let other = words.clone();
        let thread = thread::spawn(move || {
            let Some(seen) = other.find(key(1)) else { return };
            if other.lock(seen) {
                other.publish(seen, key(1).tag(2), live(22));
            }
        });
        let found = read(&words, key(1));
        assert!(found == Some((1, Some(11))) || found == Some((2, Some(22))), "{found:?}");
        thread.join().expect("the thread ends");
    });
}

#[test]
fn a_key_that_moves_to_its_other_line_is_charged_where_it_is() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 1));
        let other = words.clone();
        let thread = thread::spawn(move || {
            let Some(seen) = other.find(key(1)) else { return };
            let to: Option<Seen> = other.elsewhere(seen).find(|to| other.lock(*to));
            let Some(to) = to else { return };
            if other.lock(seen) {
                other.publish(to, seen.tag, seen.word);
                other.put_back(seen.emptied());
            } else {
                other.put_back(to);
            }
        });
        // Who misses the key while it moves looks again under its stripe; here, when the thread is done.
        let charged = words.find(key(1)).is_some_and(|seen| words.replace(seen, live(2)));
        thread.join().expect("the thread ends");
        let expected = if charged { 2 } else { 1 };
        assert_eq!(read(&words, key(1)), Some((1, Some(expected))));
    });
}

#[test]
fn two_threads_never_get_the_same_free_slot() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        let other = words.clone();
        let thread = thread::spawn(move || put(&other, key(1), 1, 1));
        let mine = put(&words, key(2), 1, 2);
        let theirs = thread.join().expect("the thread ends");
        assert_eq!(read(&words, key(2)), mine.then_some((1, Some(2))));
        assert_eq!(read(&words, key(1)), theirs.then_some((1, Some(1))));
    });
}

/// What a charge does: finds, and replaces; or makes the slot under the stripe, unless another was quicker.
fn charge(words: &Words, stripe: &Mutex<()>, key: Fingerprint) {
    loop {
        if let Some(seen) = words.find(key) {
            let n = number(seen.word).unwrap_or(0);
            if words.replace(seen, live(n + 1)) {
                return;
            }
            continue;
        }
        let _held = lock(stripe);
        if words.find(key).is_none() {
            assert!(put(words, key, 1, 1));
            return;
        }
    }
}

fn slots_of(words: &Words, key: Fingerprint) -> usize {
    words.iter().filter(|seen| seen.tag == key.tag(1)).count()
}

#[test]
fn a_new_key_that_two_threads_bring_gets_one_slot_and_both_charges() {
    loom::model(|| {
        let shared = Arc::new((Words::new(1), Mutex::new(())));
        let other = shared.clone();
        let thread = thread::spawn(move || charge(&other.0, &other.1, key(1)));
        charge(&shared.0, &shared.1, key(1));
        thread.join().expect("the thread ends");
        assert_eq!(read(&shared.0, key(1)), Some((1, Some(2))));
        assert_eq!(slots_of(&shared.0, key(1)), 1);
    });
}

#[test]
fn an_expired_slot_goes_to_a_newcomer_or_to_its_key_that_comes_back_and_no_charge_is_lost() {
    loom::model(|| {
        let shared = Arc::new((Words::new(1), Mutex::new(())));
        assert!(put(&shared.0, key(1), 1, 0));
        let seen = shared.0.find(key(1)).expect("it was put there");
        assert!(shared.0.replace(seen, NO_STATE));
        let other = shared.clone();
        // A newcomer claims just that slot if it can.
        let thread = thread::spawn(move || {
            let Some(seen) = other.0.find(key(1)) else { return false };
            let claimed = number(seen.word).is_none() && other.0.lock(seen);
            if claimed {
                other.0.publish(seen, key(2).tag(1), live(7));
            }
            claimed
        });
        charge(&shared.0, &shared.1, key(1));
        let claimed = thread.join().expect("the thread ends");
        assert_eq!(read(&shared.0, key(1)), Some((1, Some(1))), "the charge is counted");
        assert_eq!(read(&shared.0, key(2)), claimed.then_some((1, Some(7))));
        assert_eq!((slots_of(&shared.0, key(1)), slots_of(&shared.0, key(2))), (1, usize::from(claimed)));
    });
}

#[test]
fn a_set_that_holds_two_slots_is_seen_whole_by_single_charges() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 0) && put(&words, key(2), 1, 0));
        let other = words.clone();
        // A set of both, of at most one unit each: taken if both are as they were.
        let set = thread::spawn(move || {
            let (Some(one), Some(two)) = (other.find(key(1)), other.find(key(2))) else { return false };
            if number(one.word) != Some(0) || number(two.word) != Some(0) || !other.lock(one) {
                return false;
            }
            if !other.lock(two) {
                other.unlock(one, one.word);
                return false;
            }
            other.unlock(one, live(1));
            other.unlock(two, live(1));
            true
        });
        // A single charge of the second key.
        let single = loop {
            let Some(seen) = words.find(key(2)) else { continue };
            if number(seen.word) == Some(1) {
                break false;
            }
            if words.replace(seen, live(1)) {
                break true;
            }
        };
        let set = set.join().expect("the thread ends");
        assert!(set != single, "one unit, one of them got it");
        assert_eq!(read(&words, key(1)), Some((1, Some(u64::from(set)))), "all or nothing");
        assert_eq!(read(&words, key(2)), Some((1, Some(1))));
    });
}

#[test]
fn a_snapshot_that_meets_a_held_slot_waits_for_it() {
    loom::model(|| {
        let words = Arc::new(Words::new(1));
        assert!(put(&words, key(1), 1, 3));
        let other = words.clone();
        let thread = thread::spawn(move || {
            let Some(seen) = other.find(key(1)) else { return };
            if other.lock(seen) {
                other.publish(seen, seen.tag, live(4));
            }
        });
        let met: Vec<_> = words.iter().filter(|seen| seen.tag == key(1).tag(1)).map(|seen| number(seen.word)).collect();
        assert!(met == [Some(3)] || met == [Some(4)], "{met:?}");
        thread.join().expect("the thread ends");
    });
}
