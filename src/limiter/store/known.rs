//! The values that this process saw last, for guesses.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::Value;
use crate::sync::{Mutex, lock};

/// The values are in parts with a lock each, by the hash of the key.
const PARTS: u64 = 64;

/// The most bytes of a part: 16 MB in all. With usual keys and values these are some 50,000.
const PART_BYTES: usize = 256 * 1_024;

/// A larger value is not kept. Its key costs a round trip more.
const VALUE_BYTES: usize = 2_048;

/// The bytes of an entry beside those of its key and its value: its place in the map, which is up to half empty, and in
/// the order.
const ENTRY_BYTES: usize = 192;

/// The last values of some keys: the oldest ones go if there are too many. A key without one, or with one that is no
/// longer the current one, costs a round trip, and no more.
pub(super) struct Known(Box<[Mutex<Part>]>);

#[derive(Default)]
struct Part {
    values: HashMap<u64, (Arc<str>, Value), foldhash::fast::RandomState>,
    /// The hashes of the keys in the order in which they came. Some have no value any more.
    order: VecDeque<u64>,
    bytes: usize,
}

impl Known {
    pub(super) fn new() -> Self {
        Self((0..PARTS).map(|_| Mutex::default()).collect())
    }

    /// Returns the last value of a key, with the hash of its name.
    pub(super) fn get(&self, key: &Arc<str>, hash: u64) -> Option<Value> {
        let part = lock(self.part(hash));
        part.values.get(&hash).filter(|(known, _)| known == key).map(|(_, value)| value.clone())
    }

    /// Notes the current value of a key, or that there is none.
    pub(super) fn put(&self, key: &Arc<str>, hash: u64, value: Option<&Value>) {
        let mut part = lock(self.part(hash));
        match value.filter(|value| value.bytes.len() <= VALUE_BYTES) {
            Some(value) => part.put(hash, (Arc::clone(key), value.clone())),
            None => part.remove(hash),
        }
        part.trim();
    }

    fn part(&self, hash: u64) -> &Mutex<Part> {
        &self.0[(hash % PARTS) as usize] // below the number of parts
    }
}

impl Part {
    fn put(&mut self, hash: u64, new: (Arc<str>, Value)) {
        self.bytes += bytes(&new);
        match self.values.entry(hash) {
            Entry::Occupied(mut entry) => self.bytes -= bytes(&entry.insert(new)),
            Entry::Vacant(entry) => {
                entry.insert(new);
                self.order.push_back(hash);
            }
        }
    }

    /// Removes the oldest values if there are too many, or if too many keys of the order have no value.
    fn trim(&mut self) {
        while self.bytes > PART_BYTES || self.order.len() > 2 * self.values.len() + 8 {
            let Some(oldest) = self.order.pop_front() else { return };
            self.remove(oldest);
        }
    }

    fn remove(&mut self, hash: u64) {
        if let Some(old) = self.values.remove(&hash) {
            self.bytes -= bytes(&old);
        }
    }
}

fn bytes((key, value): &(Arc<str>, Value)) -> usize {
    key.len() + value.bytes.len() + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use super::super::Version;
    use super::*;

    fn key(number: u64) -> Arc<str> {
        format!("key-{number}").into()
    }

    fn value(length: usize) -> Value {
        Value::new(Version::from_bytes([length as u8; 16]), vec![0; length])
    }

    /// Returns the bytes that are counted, and whether the parts count what they have.
    fn sum(known: &Known) -> usize {
        let parts = known.0.iter().map(|part| {
            let part = lock(part);
            assert_eq!(part.bytes, part.values.values().map(bytes).sum::<usize>());
            assert!(part.bytes <= PART_BYTES && part.order.len() <= 2 * part.values.len() + 8);
            part.bytes
        });
        parts.sum()
    }

    #[test]
    fn values_are_known_until_there_are_too_many() {
        let known = Known::new();
        // Longer values than usual, so that the bytes decide and not the number.
        for number in 0..200_000 {
            known.put(&key(number), number, Some(&value(100 + number as usize % 400)));
        }
        let newest = (180_000..200_000).all(|number| known.get(&key(number), number).is_some());
        assert!(newest && known.get(&key(0), 0).is_none());
        let bytes = sum(&known);
        assert!((15 << 20..=16 << 20).contains(&bytes), "{bytes}");
    }

    #[test]
    fn value_that_was_replaced_or_removed_is_not_known() {
        let known = Known::new();
        for round in 1..100_usize {
            known.put(&key(1), 1, Some(&value(round)));
            assert_eq!(known.get(&key(1), 1), Some(value(round)));
            // Another key of the same hash, a value that is too large, and none.
            known.put(&key(2), 1, Some(&value(3)));
            assert_eq!((known.get(&key(1), 1), known.get(&key(2), 1)), (None, Some(value(3))));
            known.put(&key(2), 1, (round % 2 == 0).then_some(&value(VALUE_BYTES + 1)));
            assert_eq!((known.get(&key(2), 1), sum(&known)), (None, 0));
        }
    }
}
