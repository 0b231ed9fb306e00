//! Atomics and locks from the standard library, or from loom and shuttle in tests of interleavings. This module
//! also has functions that catch panics, answer polls of finished futures, and ask the processor to load a
//! cache line.

use std::sync::TryLockError;
use std::task::Poll;

#[cfg(ratelimit_loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(ratelimit_loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(ratelimit_shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(ratelimit_shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard};
#[cfg(not(ratelimit_shuttle))]
pub(crate) use std::sync::OnceLock;
#[cfg(not(any(ratelimit_loom, ratelimit_shuttle)))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(any(ratelimit_loom, ratelimit_shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard};

/// A cell that is written once, like `std::sync::OnceLock`. Shuttle has no such cell. In the standard library's
/// cell, Shuttle's threads would block each other forever, because they share one thread of the operating system.
#[cfg(ratelimit_shuttle)]
pub(crate) struct OnceLock<T> {
    cell: std::sync::OnceLock<T>,
    writes: Mutex<()>,
}

#[cfg(ratelimit_shuttle)]
impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self { cell: std::sync::OnceLock::new(), writes: Mutex::new(()) }
    }
}

#[cfg(ratelimit_shuttle)]
impl<T: Clone> Clone for OnceLock<T> {
    fn clone(&self) -> Self {
        Self { cell: self.cell.clone(), ..Self::default() }
    }
}

#[cfg(ratelimit_shuttle)]
impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.cell.get()
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        let _alone = lock(&self.writes);
        self.cell.set(value)
    }

    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let _alone = self.cell.get().is_none().then(|| lock(&self.writes));
        self.cell.get_or_init(make)
    }
}

/// Locks a mutex. Poisoning is ignored, because a thread that panics under a lock leaves complete
/// values behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Locks a mutex if no other thread holds it. Poisoning is ignored, as in [`lock`].
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Runs code of the application and catches its panic. Callers catch the panic if they still have to notify other
/// tasks, or if they are in a destructor. If a value is dropped because of a panic, a second panic that leaves its
/// destructor aborts the process.
pub(crate) fn contained(run: impl FnOnce()) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
}

/// Returns the waker of an executor that panics.
#[cfg(all(test, any(feature = "_redis", feature = "store")))]
pub(crate) fn panicking_waker() -> std::task::Waker {
    struct Panics;

    impl std::task::Wake for Panics {
        fn wake(self: std::sync::Arc<Self>) {
            std::panic::resume_unwind(Box::new("the application's executor panics"))
        }
    }

    std::sync::Arc::new(Panics).into()
}

/// Answers a poll of a future that has already been ready or has panicked. The answer is always pending. Only a
/// caller that breaks the contract of futures polls a finished future, and no request can cause this.
#[cold]
pub(crate) fn polled_again<T>() -> Poll<T> {
    debug_assert!(false, "a future was polled again after it was ready");
    Poll::Pending
}

/// Waits a moment for another thread that holds a slot. At first the wait spins. Later the wait
/// yields the processor, because the other thread may have been preempted.
#[derive(Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    pub(crate) fn wait(&mut self) {
        const SPINS: u32 = 64;
        self.0 += 1;
        if cfg!(any(ratelimit_loom, ratelimit_shuttle)) || self.0 > SPINS {
            #[cfg(ratelimit_loom)]
            loom::thread::yield_now();
            #[cfg(ratelimit_shuttle)]
            shuttle::thread::yield_now();
            #[cfg(not(any(ratelimit_loom, ratelimit_shuttle)))]
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Asks the processor to load the cache line of a value, and does not wait for it.
#[allow(unsafe_code, reason = "there is no safe function for a prefetch hint")]
#[inline(always)]
pub(crate) fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the prefetch hint reads nothing that the program can see, and does not fault for any address. The
    // prefetch instruction is part of SSE, which each x86-64 processor has.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(value).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = value;
}
