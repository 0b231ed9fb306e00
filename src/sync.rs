//! Atomics and locks: the standard library's, or loom's where an interleaving is modelled.

#[cfg(ratelimit_loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(ratelimit_loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(ratelimit_loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// Locks. A thread that panicked under the lock left whole values behind, so poison is no reason to stop.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits a moment for another thread that holds a slot: first spinning, then giving the processor away, since that
/// thread may have lost it.
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

/// Leaves a slot to the thread that was quicker, for longer the more often that happened. Threads that all go on take the
/// slot's cache line from each other for each charge; one that steps aside for half a microsecond lets another do ten charges
/// as if it were alone, so together they do twice as many.
#[cold]
#[inline(never)]
pub(crate) fn step_aside(times: usize) {
    #[cfg(ratelimit_loom)]
    {
        let _ = times;
        loom::thread::yield_now();
    }
    #[cfg(not(ratelimit_loom))]
    for _ in 0..16_u32 << times.min(2) {
        std::hint::spin_loop();
    }
}
