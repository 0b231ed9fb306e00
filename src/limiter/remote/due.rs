//! Whether this process notices too late that a time is over. Then it had no time to read an answer,
//! and nothing is known about the server.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

/// A process with enough time notices the end of a time within some milliseconds.
const LATE: Duration = Duration::from_millis(20);

/// The end of a time.
#[derive(Clone, Copy)]
pub(crate) struct Due(Instant);

impl Due {
    pub(crate) fn at(instant: Instant) -> Self {
        Self(instant)
    }

    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// Waits for a future until then.
    pub(crate) async fn timeout<T>(self, future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout_at(self.0, future).await.ok()
    }

    /// Waits until then.
    pub(crate) async fn wait(self) {
        tokio::time::sleep_until(self.0).await;
    }

    /// Waits for this time, but no longer than until then.
    pub(crate) async fn pause(self, time: Duration) {
        tokio::time::sleep_until(self.0.min(Instant::now() + time)).await;
    }

    /// Returns the time until then.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether the time is over.
    pub(crate) fn is_over(self) -> bool {
        Instant::now() >= self.0
    }

    /// Whether the end is noticed too late.
    pub(crate) fn is_late(self) -> bool {
        Instant::now().saturating_duration_since(self.0) > LATE
    }
}
