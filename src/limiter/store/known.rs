//! The values that this process last saw, which are guesses of the current values.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::Value;
use crate::base::sync::{Mutex, lock};

/// The number of parts, each of which has a lock. The hash of a key selects its part.
const PARTS: u64 = 64;

/// The maximum number of bytes of a part. All parts together have at most 16 MB, which is about 50,000 keys and
/// values of usual size.
const PART_BYTES: usize = 256 * 1_024;

/// The maximum number of bytes of a value that is kept. A check of a key with a larger value costs
/// one more round trip.
const VALUE_BYTES: usize = 2_048;

/// The bytes of an entry in addition to its key and its value: its slots in `order` and in `values`, which is up
/// to half empty.
const ENTRY_BYTES: usize = 208;

/// The last values of some keys. If the values have too many bytes, the oldest values are removed. If a key's
/// value is missing here or out of date, a check of the key costs one more round trip, and is otherwise the
/// same.
pub(super) struct KnownValues(Box<[Mutex<Shard>]>);

#[derive(Default)]
struct Shard {
    values: HashMap<u64, KnownValue, foldhash::fast::RandomState>,
    /// The hashes of the keys, by the numbers of their entries.
    order: BTreeMap<u64, u64>,
    /// The number of values that were put so far.
    noted: u64,
    bytes: usize,
}

struct KnownValue {
    key: Arc<str>,
    value: Value,
    /// The number of values that were put before this value.
    number: u64,
}

impl KnownValues {
    pub(super) fn new() -> Self {
        Self((0..PARTS).map(|_| Mutex::default()).collect())
    }

    /// Returns the last known value of a key. `hash` is the hash of the key.
    pub(super) fn get(&self, key: &Arc<str>, hash: u64) -> Option<Value> {
        let part = lock(self.part(hash));
        part.values.get(&hash).filter(|known| known.key == *key).map(|known| known.value.clone())
    }

    /// Stores the current value of a key, or removes the key if it has no value or too large a
    /// value.
    pub(super) fn put(&self, key: &Arc<str>, hash: u64, value: Option<&Value>) {
        let mut part = lock(self.part(hash));
        match value.filter(|value| value.bytes.len() <= VALUE_BYTES) {
            Some(value) => part.put(hash, key, value),
            None => part.remove(hash),
        }
        part.trim();
    }

    fn part(&self, hash: u64) -> &Mutex<Shard> {
        &self.0[(hash % PARTS) as usize] // below the number of parts
    }
}

impl Shard {
    fn put(&mut self, hash: u64, key: &Arc<str>, value: &Value) {
        self.remove(hash);
        let new = KnownValue { key: Arc::clone(key), value: value.clone(), number: self.noted };
        self.noted += 1;
        self.bytes += new.bytes();
        self.order.insert(new.number, hash);
        self.values.insert(hash, new);
    }

    /// Removes the oldest values until the part is small enough.
    fn trim(&mut self) {
        while self.bytes > PART_BYTES {
            let Some((_, oldest)) = self.order.first_key_value() else { return };
            self.remove(*oldest);
        }
    }

    fn remove(&mut self, hash: u64) {
        if let Some(old) = self.values.remove(&hash) {
            self.bytes -= old.bytes();
            self.order.remove(&old.number);
        }
    }
}

impl KnownValue {
    fn bytes(&self) -> usize {
        self.key.len() + self.value.bytes.len() + ENTRY_BYTES
    }
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
    fn sum(known: &KnownValues) -> usize {
        let parts = known.0.iter().map(|part| {
            let part = lock(part);
            assert_eq!(part.bytes, part.values.values().map(KnownValue::bytes).sum::<usize>());
            assert!(part.bytes <= PART_BYTES && part.order.len() == part.values.len());
            part.bytes
        });
        parts.sum()
    }

    #[test]
    fn values_are_known_until_there_are_too_many() {
        let known = KnownValues::new();
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
        let known = KnownValues::new();
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

    /// Each request in flight adds a row to a value, and removes the value when it is over.
    #[test]
    fn key_that_comes_and_goes_leaves_other_keys_known() {
        let known = KnownValues::new();
        let others: Vec<u64> = (1..500).map(|number| number * PARTS).collect();
        others.iter().for_each(|number| known.put(&key(*number), *number, Some(&value(100))));
        for _ in 0..5_000 {
            known.put(&key(0), 0, Some(&value(100)));
            known.put(&key(0), 0, None);
        }
        let left = others.iter().filter(|number| known.get(&key(**number), **number).is_some()).count();
        assert_eq!(left, others.len());
        sum(&known);
    }
}
