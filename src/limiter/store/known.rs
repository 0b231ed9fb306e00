//! The values that this process saw last, for guesses.

use std::sync::Arc;

use super::Value;
use crate::sync::{Mutex, lock};

/// The most values that are known. The latest of those that share a slot is known.
const SLOTS: usize = 4_096;

/// A larger value is not kept, so that all of them take at most 8 MB. Its key costs a round trip more.
const BYTES_MAX: usize = 2_048;

/// The last values of some keys. A value that is no longer the current one costs a round trip, and no more.
pub(super) struct Known(Box<[Slot]>);

type Slot = Mutex<Option<(Arc<str>, Value)>>;

impl Known {
    pub(super) fn new() -> Self {
        Self((0..SLOTS).map(|_| Mutex::default()).collect())
    }

    /// Returns the last value of a key, with the hash of its name.
    pub(super) fn get(&self, key: &Arc<str>, hash: u64) -> Option<Value> {
        let slot = lock(self.slot(hash));
        slot.as_ref().filter(|(known, _)| known == key).map(|(_, value)| value.clone())
    }

    /// Notes the current value of a key, or that there is none.
    pub(super) fn put(&self, key: &Arc<str>, hash: u64, value: Option<&Value>) {
        let mut slot = lock(self.slot(hash));
        match value.filter(|value| value.bytes.len() <= BYTES_MAX) {
            Some(value) => *slot = Some((Arc::clone(key), value.clone())),
            None if slot.as_ref().is_some_and(|(known, _)| known == key) => *slot = None,
            None => {}
        }
    }

    fn slot(&self, hash: u64) -> &Slot {
        &self.0[(hash % SLOTS as u64) as usize] // below the number of slots
    }
}
