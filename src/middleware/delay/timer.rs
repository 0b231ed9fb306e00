//! What wakes a request when it is to depart.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// A timer by which requests wait for their departure. `TokioTimer` (feature `tokio`) is one; others wrap the timer of
/// another runtime, or a test's.
pub trait Timer: fmt::Debug + Send + Sync {
    /// The time since an instant of the timer's choice; it never goes back.
    fn now(&self) -> Duration;

    /// Ends when [`now`](Self::now) is `at` or later, never before. It is polled by the task of the request.
    fn sleep_until(&self, at: Duration) -> Sleep;
}

/// A wait of a [`Timer`].
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// Tokio's timer, of which one tick is a millisecond: requests depart up to one later, never earlier.
///
/// Requests have to be polled within a Tokio runtime that has its time driver enabled. Outside of any runtime nobody waits:
/// an admitted request goes on at once.
#[cfg(feature = "tokio")]
#[derive(Clone, Copy)]
pub struct TokioTimer {
    origin: tokio::time::Instant,
}

#[cfg(feature = "tokio")]
impl TokioTimer {
    /// A timer.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: tokio::time::Instant::now() }
    }
}

#[cfg(feature = "tokio")]
impl Default for TokioTimer {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(feature = "tokio")]
impl Timer for TokioTimer {
    fn now(&self) -> Duration {
        // Where nobody can wait, everybody is due.
        if tokio::runtime::Handle::try_current().is_err() { Duration::MAX } else { self.origin.elapsed() }
    }

    fn sleep_until(&self, at: Duration) -> Sleep {
        match (tokio::runtime::Handle::try_current(), self.origin.checked_add(at)) {
            (Ok(_), Some(at)) => Box::pin(tokio::time::sleep_until(at)),
            _ => Box::pin(std::future::ready(())),
        }
    }
}

#[cfg(feature = "tokio")]
impl fmt::Debug for TokioTimer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokioTimer").finish_non_exhaustive()
    }
}
