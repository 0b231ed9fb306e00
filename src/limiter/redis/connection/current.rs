//! The connection that calls use.

use crate::base::sync::{Mutex, lock};

/// The connection that calls use, if there is one.
pub(super) struct Current<C>(Mutex<Option<C>>);

/// When this value is dropped, calls no longer use the connection.
pub(super) struct InUse<'a, C>(&'a Current<C>);

impl<C: Clone> Current<C> {
    pub(super) fn none() -> Self {
        Self(Mutex::new(None))
    }

    /// Lets calls use a connection.
    pub(super) fn set(&self, connection: C) -> InUse<'_, C> {
        *lock(&self.0) = Some(connection);
        InUse(self)
    }

    pub(super) fn get(&self) -> Option<C> {
        lock(&self.0).clone()
    }
}

impl<C> Drop for InUse<'_, C> {
    fn drop(&mut self) {
        let ended = lock(&self.0.0).take();
        drop(ended); // not while the lock is held
    }
}
