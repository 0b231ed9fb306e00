//! Clocks, from which limiters in memory read the time, and timers, with which requests wait. Only this
//! module reads the operating system's clocks.

mod alarm;
#[cfg(target_arch = "x86_64")]
mod counter;
mod system;
mod timer;
#[cfg(feature = "tokio")]
mod tokio;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

pub(crate) use self::alarm::{Alarm, time_of};
pub use self::system::SystemClock;
#[cfg(test)]
pub(crate) use self::timer::StoppedTimer;
#[cfg(feature = "tokio")]
pub use self::timer::TokioTimer;
pub(crate) use self::timer::default_timer;
pub use self::timer::{Sleep, Timer};
#[cfg(feature = "tokio")]
pub use self::tokio::TokioClock;
pub use crate::base::time::Timestamp;

/// A clock of a limiter. A limiter in memory reads the clock once for each decision, and again if it
/// finds a state that is ahead of the first reading.
///
/// Windows begin and end at the clock's time. So if a quota has windows of a day, or of the
/// [calendar](crate::quota::Calendar), the clock has to show the calendar time and [say
/// so](Self::follows_calendar). Rates only need a time that passes evenly.
///
/// A clock should not step. If a clock steps forward or back, by any amount:
///
/// * A step forward frees the units that would have been freed in the skipped time.
/// * A step back gives no key a second quota while the limiter keeps the key's state, because a window
///   that has begun continues. A step back costs a key at most the time in which its full bucket
///   drains, or one window.
///
/// A clock must not call the limiter that reads it, because the limiter may hold a lock.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a clock",
    note = "use `SystemClock` of the module `clock`, or its `ManualClock` or `TokioClock` in tests"
)]
pub trait Clock: fmt::Debug + Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Timestamp;

    /// Returns whether the clock shows the calendar time, also after a suspension of the machine and after a
    /// correction of the system's time. By default `false`.
    ///
    /// The result changes no decision. If the result is `false`, a layer reports the warning
    /// [`CalendarNotFollowed`](crate::observe::SetupWarningKind::CalendarNotFollowed) for quotas whose windows are
    /// meant to end with a date.
    ///
    /// ```
    /// use tower_ratelimit::clock::{Clock, ManualClock, MonotonicClock, SystemClock};
    ///
    /// assert!(SystemClock::new().follows_calendar());
    /// assert!(!MonotonicClock::new().follows_calendar());
    /// assert!(ManualClock::new().follows_calendar(), "it shows what a test says");
    /// ```
    fn follows_calendar(&self) -> bool {
        false
    }
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }

    fn follows_calendar(&self) -> bool {
        (**self).follows_calendar()
    }
}

/// The operating system's monotonic clock, set to the calendar time once, when it is made.
///
/// This clock does not step, and does not follow corrections of the calendar time. On many systems the
/// clock stands still while the machine is suspended. So windows that are aligned to the epoch or the
/// calendar drift from the calendar. [`SystemClock`], the default of limiters in memory, follows the
/// calendar.
///
/// On x86-64 the clock asks the operating system once per millisecond. Between two answers, the clock adds the
/// time that the processor's time stamp counter has counted, at a slightly low rate. Reading the counter takes
/// half of the time of asking the system, and makes the clock a few microseconds late. A counter that jumps or
/// differs between processors moves the clock by a millisecond at most. The clock uses the counter only if the
/// processor reports that the counter never stops and keeps its rate.
///
/// Clones show the same time.
///
/// On a target without an operating system, such as `wasm32-unknown-unknown`, making this clock panics.
/// On such a target, set a clock of your own with
/// [`MemoryLimiterBuilder::clock`](crate::limiter::memory::MemoryLimiterBuilder::clock).
#[derive(Clone, Debug)]
pub struct MonotonicClock {
    epoch: Timestamp,
    elapsed: ElapsedTime,
}

impl MonotonicClock {
    /// Makes a clock that shows the current calendar time. On x86-64, making the first clock in a
    /// process measures the counter, which takes about a millisecond.
    #[must_use]
    pub fn new() -> Self {
        Self { elapsed: ElapsedTime::begin(), epoch: wall_now() }
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    #[inline]
    fn now(&self) -> Timestamp {
        let system_us = || self.epoch.as_micros().saturating_add(self.elapsed.passed_us());
        Timestamp::from_micros(self.elapsed.now_us(system_us))
    }
}

/// The monotonic time that has passed since a clock was made. Clones show the same time.
#[derive(Clone, Debug)]
struct ElapsedTime {
    began: Instant,
    #[cfg(target_arch = "x86_64")]
    counter: Arc<counter::Counter>,
}

impl ElapsedTime {
    #[expect(clippy::disallowed_methods, reason = "only this file may read clocks")]
    fn begin() -> Self {
        Self {
            began: Instant::now(),
            #[cfg(target_arch = "x86_64")]
            counter: Arc::new(counter::Counter::new()),
        }
    }

    /// Asks the operating system for the time that has passed, in microseconds.
    fn passed_us(&self) -> u64 {
        let passed = self.began.elapsed();
        passed.as_secs().wrapping_mul(1_000_000).wrapping_add(u64::from(passed.subsec_micros()))
    }

    /// Returns the time of a clock in microseconds. `system_us` computes this time from
    /// [`passed_us`](Self::passed_us). `system_us` is called only if there is no counter, or if the
    /// counter's last answer is too old.
    #[inline]
    fn now_us(&self, system_us: impl Fn() -> u64) -> u64 {
        #[cfg(target_arch = "x86_64")]
        return self.counter.now_us(system_us);
        #[cfg(not(target_arch = "x86_64"))]
        system_us()
    }
}

/// A clock for tests, which stands still until a test moves it. Clones show the same time.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::clock::{Clock, ManualClock, Timestamp};
///
/// let clock = ManualClock::new();
/// let shared = clock.clone();
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(
///     shared.now().saturating_since(ManualClock::new().now()),
///     Duration::from_secs(1)
/// );
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Makes a clock that shows 2025-01-01 00:00:00 UTC.
    #[must_use]
    pub fn new() -> Self {
        Self::at(Timestamp::from_micros(1_735_689_600_000_000))
    }

    /// Makes a clock that shows `now`.
    #[must_use]
    pub fn at(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_micros())))
    }

    /// Moves the clock forward by this time, rounded up to whole microseconds. Saturates.
    pub fn advance(&self, by: Duration) {
        let later = |now| Some(Timestamp::from_micros(now).saturating_add(by).as_micros());
        // Updates the time in one atomic step, because one of two concurrent advances would otherwise be lost.
        // `Release` is needed as in `set`. `Acquire` is needed so that a thread that sees the new time also sees what
        // was done before each advance.
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }

    /// Sets the clock, forward or back.
    pub fn set(&self, now: Timestamp) {
        // `Release` pairs with the `Acquire` in `now`, so a thread that sees the new time also sees what was done
        // before the time was set.
        self.0.store(now.as_micros(), Ordering::Release);
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Acquire))
    }

    fn follows_calendar(&self) -> bool {
        true
    }
}

/// The calendar time of the operating system, with all of its corrections.
#[derive(Debug)]
pub(crate) struct CalendarClock;

impl Clock for CalendarClock {
    fn now(&self) -> Timestamp {
        wall_now()
    }

    fn follows_calendar(&self) -> bool {
        true
    }
}

/// Returns the calendar time. Returns the year 1970 on a target without an operating system, where reading the time
/// would panic.
#[cfg_attr(
    not(all(target_family = "wasm", target_os = "unknown")),
    expect(clippy::disallowed_methods, reason = "only this file may read clocks")
)]
pub(crate) fn wall_now() -> Timestamp {
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    return Timestamp::default();
    #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_that_two_threads_advance_loses_no_time() {
        let clock = ManualClock::new();
        let begin = clock.now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..100_000).for_each(|_| clock.advance(Duration::from_micros(1))));
            }
        });
        assert_eq!(clock.now().saturating_since(begin), Duration::from_micros(200_000));
    }
}
