//! Wakers that are woken after a lock is released.

use std::task::Waker;

use crate::base::sync::contained;

/// Wakers that were taken out of a line. Waking or dropping a waker runs the application's code, which may drop another
/// waiting request and thereby lock the line again. So wakers are woken and dropped after the lock is released.
#[derive(Default)]
pub(crate) struct Wakers {
    pub(crate) to_wake: Vec<Waker>,
    pub(crate) to_drop: Vec<Waker>,
}

impl Wakers {
    /// Wakes and drops each waker. If one waker panics, the other wakers are still woken.
    pub(crate) fn release(self) {
        self.to_wake.into_iter().for_each(|waker| contained(|| waker.wake()));
        self.to_drop.into_iter().for_each(|waker| contained(|| drop(waker)));
    }
}
