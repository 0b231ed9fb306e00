//! Atomics and locks of the standard library, or of loom in tests that model interleavings.

#[cfg(ratelimit_loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(ratelimit_loom))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(ratelimit_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Locks a mutex. Poison is ignored, because a thread that panicked under the lock left complete
/// values behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits a moment for another thread that holds a slot. Spins at first, then yields the processor,
/// because that thread may have been preempted.
#[derive(Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    pub(crate) fn wait(&mut self) {
        const SPINS: u32 = 64;
        self.0 += 1;
        if cfg!(ratelimit_loom) || self.0 > SPINS {
            #[cfg(ratelimit_loom)]
            loom::thread::yield_now();
            #[cfg(not(ratelimit_loom))]
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}
