//! The stores of limiters, with the load that each store has when a snapshot is made.

use crate::base::sync::{Mutex, lock};
use crate::store_load::{StoreLoad, StoreLoadReader};

/// The maximum number of stores that are remembered.
const STORES_MAX: usize = 32;

#[derive(Default)]
pub(super) struct Stores(Mutex<Vec<StoreLoadReader>>);

impl Stores {
    /// Adds a store, and removes the stores of limiters that were dropped.
    pub(super) fn add(&self, store: &StoreLoadReader) {
        let gone: Vec<bool> = self.readers().iter().map(|reader| reader.read().is_none()).collect();
        let mut readers = lock(&self.0);
        let mut gone = gone.into_iter();
        // Stores that were added after `gone` was collected are at the end of the list, and are kept.
        readers.retain(|_| !gone.next().unwrap_or(false));
        if readers.len() < STORES_MAX {
            readers.push(store.clone());
        }
    }

    /// Returns the load of all stores together, or `None` if there are no stores.
    pub(super) fn load(&self) -> Option<StoreLoad> {
        self.readers().iter().filter_map(StoreLoadReader::read).reduce(StoreLoad::with)
    }

    /// Returns the readers. The readers are called without the lock, because they may be the application's code.
    fn readers(&self) -> Vec<StoreLoadReader> {
        lock(&self.0).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Makes the reader of a limiter with this number of waiting checks.
    fn reader(limiter: &Arc<usize>) -> StoreLoadReader {
        let limiter = Arc::downgrade(limiter);
        StoreLoadReader::new(move || Some(StoreLoad { waiting: *limiter.upgrade()?, ..StoreLoad::default() }))
    }

    #[test]
    fn store_counts_while_its_limiter_lives() {
        let stores = Stores::default();
        let waiting = || stores.load().map(|load| load.waiting);
        assert_eq!(waiting(), None);
        let (first, second) = (Arc::new(3), Arc::new(4));
        stores.add(&reader(&first));
        stores.add(&reader(&second));
        assert_eq!(waiting(), Some(7));
        drop(first);
        assert_eq!(waiting(), Some(4));
        drop(second);
        assert_eq!(waiting(), None);
    }

    #[test]
    fn stores_are_bounded_and_dropped_ones_make_room() {
        let stores = Stores::default();
        for _ in 0..100 {
            stores.add(&reader(&Arc::new(1)));
        }
        assert_eq!(stores.readers().len(), 1);
        let limiters: Vec<Arc<usize>> = (0..100).map(|_| Arc::new(1)).collect();
        limiters.iter().for_each(|limiter| stores.add(&reader(limiter)));
        assert_eq!(stores.load().map(|load| load.waiting), Some(STORES_MAX));
    }
}
