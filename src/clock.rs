//! Clocks, from which limiters in memory get their time. Only this module reads the operating
//! system's clocks.

#[cfg(feature = "tokio")]
mod tokio;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[cfg(feature = "tokio")]
pub use self::tokio::TokioClock;
pub use crate::time::Timestamp;

/// A clock of a limiter. A limiter in memory reads it once for each decision, and again if it finds
/// a state that is ahead of the first reading.
///
/// It should not step back. If it does, no limit over-admits, and a key loses at most one full
/// drain of its bucket or one period. It must not call the limiter that reads it, because the
/// limiter may hold a lock.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Timestamp;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

/// The default clock: the operating system's monotonic clock, set to the calendar time once, when
/// it is made.
///
/// It never steps back and does not follow corrections of the calendar time. So windows aligned to
/// the epoch drift from the calendar by those corrections.
///
/// On a target without an operating system, such as `wasm32-unknown-unknown`, making it panics. Set a
/// clock of your own there, by
/// [`MemoryLimiterBuilder::clock`](crate::limiter::memory::MemoryLimiterBuilder::clock).
#[derive(Clone, Debug)]
pub struct MonotonicClock {
    started: Instant,
    epoch: Timestamp,
}

impl MonotonicClock {
    /// Makes a clock that shows the current calendar time.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the file that may read clocks")]
    pub fn new() -> Self {
        Self { started: Instant::now(), epoch: wall_now() }
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
        let passed = self.started.elapsed();
        let passed = passed.as_secs().wrapping_mul(1_000_000).wrapping_add(u64::from(passed.subsec_micros()));
        Timestamp::from_micros(self.epoch.as_micros().saturating_add(passed))
    }
}

/// A clock that reads the CPU's time stamp counter, about 12 ns faster than [`MonotonicClock`].
///
/// The counters of several cores may differ. So the clock remembers the latest time it returned, to
/// the millisecond, and never returns an earlier one.
#[cfg(feature = "fast-clock")]
#[derive(Debug)]
pub struct FastClock {
    clock: quanta::Clock,
    /// The microseconds in one tick of the counter, in units of 2^-64.
    per_tick: u64,
    started: u64,
    epoch: Timestamp,
    latest: AtomicU64,
}

#[cfg(feature = "fast-clock")]
impl FastClock {
    /// Makes a clock that shows the current calendar time. The first one in a process calibrates
    /// the counter.
    #[must_use]
    pub fn new() -> Self {
        const TICKS: u32 = 40;
        let clock = quanta::Clock::new();
        // Over 2^40 ticks the nanoseconds are exact enough: the quotient is off by less than a
        // second in a century.
        let nanos = u128::from(clock.delta_as_nanos(0, 1 << TICKS));
        let per_tick = u64::try_from((nanos << (64 - TICKS)) / 1_000).unwrap_or(u64::MAX);
        let started = clock.raw();
        Self { clock, per_tick, started, epoch: wall_now(), latest: AtomicU64::new(0) }
    }
}

#[cfg(feature = "fast-clock")]
impl FastClock {
    /// Returns the time, read after every earlier load of this thread. Without the fence the
    /// processor may read the counter while an earlier load still waits for memory.
    pub(crate) fn now_in_order(&self) -> Timestamp {
        std::sync::atomic::fence(Ordering::SeqCst);
        self.now()
    }
}

#[cfg(feature = "fast-clock")]
impl Default for FastClock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(feature = "fast-clock")]
impl Clock for FastClock {
    #[inline]
    fn now(&self) -> Timestamp {
        const COARSE_US: u64 = 1_000;
        let ticks = self.clock.raw().saturating_sub(self.started);
        let passed = ((u128::from(ticks) * u128::from(self.per_tick)) >> 64) as u64; // below 2^64
        let now = self.epoch.as_micros().saturating_add(passed);
        // Relaxed: only the value itself is shared, no other data is published with it.
        let latest = self.latest.load(Ordering::Relaxed);
        // A branch for the usual case: the processor predicts it, and does not wait for the later of two values.
        if now.wrapping_sub(latest) < COARSE_US {
            return Timestamp::from_micros(now);
        }
        if now > latest {
            self.latest.fetch_max(now, Ordering::Relaxed);
        }
        Timestamp::from_micros(now.max(latest))
    }
}

/// A clock for tests, which stands still until it is moved. Clones show the same time.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::clock::{Clock, ManualClock, Timestamp};
///
/// let clock = ManualClock::new();
/// let shared = clock.clone();
/// clock.advance(Duration::from_secs(1));
/// assert_eq!(shared.now().saturating_since(ManualClock::new().now()), Duration::from_secs(1));
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

    /// Moves the clock forward, rounded up to whole microseconds. Saturates.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().saturating_add(by));
    }

    /// Sets the clock, forward or back.
    pub fn set(&self, now: Timestamp) {
        // Release, with the Acquire in `now`: a thread that sees the new time sees what was done
        // before it was set.
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
}

/// The calendar time of the operating system, with all of its corrections.
#[derive(Debug)]
pub(crate) struct CalendarClock;

impl Clock for CalendarClock {
    fn now(&self) -> Timestamp {
        wall_now()
    }
}

/// Returns the calendar time.
#[expect(clippy::disallowed_methods, reason = "this is the file that may read clocks")]
pub(crate) fn wall_now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp::from_micros(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(all(test, feature = "fast-clock"))]
mod tests {
    use super::*;

    #[test]
    fn the_fast_clock_keeps_the_pace_of_the_monotonic_one() {
        let (fast, monotonic) = (FastClock::new(), MonotonicClock::new());
        let since = |from: Timestamp, to: Timestamp| to.saturating_since(from).as_micros();
        let before = monotonic.now();
        let from = fast.now();
        let after = monotonic.now();
        while since(after, monotonic.now()) < 30_000 {
            std::hint::spin_loop();
        }
        let (least, to, most) = (monotonic.now(), fast.now(), monotonic.now());
        let (least, passed, most) = (since(after, least), since(from, to), since(before, most));
        // The counter is calibrated to a thousandth or better, and both clocks return whole
        // microseconds.
        assert!(passed + 2 + passed / 500 >= least, "{passed} of at least {least} µs");
        assert!(passed <= most + 2 + most / 500, "{passed} of at most {most} µs");
    }
}
