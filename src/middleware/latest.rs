//! The latest of several versions of a value, for readers that keep a copy.

use std::sync::Arc;

use crate::base::sync::{AtomicU64, Mutex, Ordering, lock};

/// A value with a version, whose number grows.
pub(super) trait Versioned {
    fn version(&self) -> u64;
}

/// Holds the latest version of a value. A reader keeps a copy, and finds out with one atomic load whether the
/// copy is the latest version.
pub(super) struct Latest<T> {
    value: Mutex<Arc<T>>,
    version: AtomicU64,
}

impl<T: Versioned> Latest<T> {
    pub(super) fn new(value: Arc<T>) -> Self {
        Self { version: AtomicU64::new(value.version()), value: Mutex::new(value) }
    }

    /// Returns the latest version.
    pub(super) fn get(&self) -> Arc<T> {
        Arc::clone(&lock(&self.value))
    }

    /// Replaces a copy that is not the latest version.
    #[inline]
    pub(super) fn update(&self, copy: &mut Arc<T>) {
        // `Acquire` pairs with the `Release` in `replace`, so the value that is read under the lock is at least as
        // new as the version.
        if self.version.load(Ordering::Acquire) != copy.version() {
            *copy = self.get();
        }
    }

    /// Replaces `before` with a newer version. Returns `false` if another thread replaced `before`
    /// first.
    pub(super) fn replace(&self, before: &Arc<T>, next: &Arc<T>) -> bool {
        let mut latest = lock(&self.value);
        if !Arc::ptr_eq(&latest, before) {
            return false;
        }
        self.version.store(next.version(), Ordering::Release);
        *latest = Arc::clone(next);
        true
    }
}
