//! Deadlines, and whether this process notices too late that a deadline has passed. A process that is late had no
//! time to read an answer, so it knows nothing about the server.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

/// The delay from which a process counts as late. A process that is not overloaded notices a deadline within
/// some milliseconds.
const LATE: Duration = Duration::from_millis(20);

/// An instant at which waiting ends.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn at(instant: Instant) -> Self {
        Self(instant)
    }

    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// Waits for a future until the deadline. Returns `None` if the deadline passes first.
    pub(crate) async fn timeout<T>(self, future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout_at(self.0, future).await.ok()
    }

    /// Waits until the deadline.
    pub(crate) async fn wait(self) {
        tokio::time::sleep_until(self.0).await;
    }

    /// Waits for this time, but not beyond the deadline.
    pub(crate) async fn pause(self, time: Duration) {
        tokio::time::sleep_until(self.0.min(Instant::now() + time)).await;
    }

    /// Returns the time until the deadline.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Returns whether the deadline has passed.
    pub(crate) fn is_over(self) -> bool {
        Instant::now() >= self.0
    }

    /// Returns whether this process notices too late that the deadline has passed.
    pub(crate) fn is_late(self) -> bool {
        Instant::now().saturating_duration_since(self.0) > LATE
    }
}
