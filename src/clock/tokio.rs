//! A clock that follows Tokio's time.

use tokio::time::Instant;

use super::{Clock, wall_now};
use crate::base::time::Timestamp;

/// Tokio's clock. The clock is set to the calendar time once, when it is made.
///
/// The clock follows the monotonic clock until a test stops Tokio's time with `tokio::time::pause`.
/// After a `pause`, `tokio::time::advance` and `tokio::time::sleep` also move the limiter's time. Make
/// and read this clock within the runtime whose time is stopped. Outside of any runtime the clock shows
/// the operating system's time.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{
///     Key, MemoryLimiter, Policy, Quota, clock::TokioClock, limiter::Charge,
/// };
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = MemoryLimiter::builder().clock(TokioClock::new()).build()?;
/// let (policy, key) =
///     (Policy::new("login", Quota::per_minute(1))?, Key::of("alice").unwrap());
/// assert!(limiter.take_now(&[Charge::new(&policy, &key)]).is_allowed());
/// assert!(!limiter.take_now(&[Charge::new(&policy, &key)]).is_allowed());
/// tokio::time::advance(Duration::from_secs(60)).await;
/// assert!(limiter.take_now(&[Charge::new(&policy, &key)]).is_allowed());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    started: Instant,
    epoch: Timestamp,
}

impl TokioClock {
    /// Makes a clock that shows the current calendar time.
    #[must_use]
    pub fn new() -> Self {
        Self { started: Instant::now(), epoch: wall_now() }
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        let passed = self.started.elapsed().as_micros();
        Timestamp::from_micros(self.epoch.as_micros().saturating_add(u64::try_from(passed).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn tokio_clock_moves_only_with_the_time_of_tokio() {
        let clock = TokioClock::new();
        let before = clock.now();
        assert_eq!(clock.now(), before);
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(clock.now().saturating_since(before), Duration::from_secs(90));
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(clock.now().saturating_since(before), Duration::from_secs(100));
    }

    #[test]
    fn tokio_clock_works_outside_of_a_runtime() {
        let clock = TokioClock::new();
        assert!(clock.now() >= clock.epoch);
    }
}
