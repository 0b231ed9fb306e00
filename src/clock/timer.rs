//! The timer that wakes a request at its departure.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// A timer with which requests wait for their departure: `TokioTimer` (feature `tokio`), or an implementation of
/// your own for another runtime or for tests.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a timer",
    note = "on Tokio use `clock::TokioTimer::new()` (feature `tokio`); an option of the quota says how long a request \
            may wait"
)]
pub trait Timer: fmt::Debug + Send + Sync {
    /// Returns the time since some origin, which the timer chooses. The time never goes back.
    fn now(&self) -> Duration;

    /// Returns a future that is ready when [`now`](Self::now) is `at` or later, never earlier. The request's task
    /// polls the future.
    fn sleep_until(&self, at: Duration) -> Sleep;
}

/// The future of [`Timer::sleep_until`].
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// Returns the timer of a layer for which no timer was set.
pub(crate) fn default_timer() -> Option<Arc<dyn Timer>> {
    #[cfg(feature = "tokio")]
    return Some(Arc::new(TokioTimer::new()));
    #[cfg(not(feature = "tokio"))]
    None
}

/// A timer whose time stands still.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct StoppedTimer;

#[cfg(test)]
impl Timer for StoppedTimer {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> Sleep {
        Box::pin(std::future::pending())
    }
}

/// Tokio's timer. The timer's tick is a millisecond, so requests depart up to one millisecond late,
/// never early.
///
/// Poll requests within a Tokio runtime whose time driver is enabled. Outside of a runtime no request waits: an
/// admitted request passes at once.
///
/// Write `TokioTimer::new()`. If `()` is missing, the compiler says ``expected value, found struct `TokioTimer` ``.
#[cfg(feature = "tokio")]
#[derive(Clone, Copy)]
pub struct TokioTimer {
    origin: tokio::time::Instant,
}

#[cfg(feature = "tokio")]
impl TokioTimer {
    /// Creates a timer.
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
        // Outside of a Tokio runtime this timer cannot sleep, so every departure counts as due.
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
