//! Whether this process notices too late that a time is over. Then it had no time to read an answer,
//! and nothing is known about the server.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::error::{RedisError, RedisErrorKind};

/// A process with enough time notices the end of a time within some milliseconds.
const LATE: Duration = Duration::from_millis(20);

/// The end of a time.
#[derive(Clone, Copy)]
pub(super) struct Due(Instant);

impl Due {
    pub(super) fn at(instant: Instant) -> Self {
        Self(instant)
    }

    pub(super) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// Waits for a future until then.
    pub(super) async fn timeout<T>(self, future: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout_at(self.0, future).await.ok()
    }

    /// Whether the end is noticed too late.
    pub(super) fn is_late(self) -> bool {
        Instant::now().saturating_duration_since(self.0) > LATE
    }
}

/// Returns the error of a check for which this process had no time.
pub(super) fn error(what: &str) -> RedisError {
    RedisError::new(RedisErrorKind::Overloaded, format!("{what}: this process is too busy"))
}
