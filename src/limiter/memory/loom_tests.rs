//! Models of every lock-free step of the table: two or three threads, one promise each.
//!
//! `RUSTFLAGS="--cfg ratelimit_loom" CARGO_TARGET_DIR=target/loom cargo test --lib loom`

use loom::sync::Arc;
use loom::thread;

use super::words::{Fingerprint, Now, Seen, Words, version_of};
use crate::algorithm::{Pair, WordLayout};

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
    let [first, second] = words.candidates(key);
    let free = first.into_iter().chain(second).find(|seen| seen.word <= 3 && words.lock(*seen));
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
            let to: Option<Seen> = other.elsewhere(seen).into_iter().find(|to| other.lock(*to));
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
