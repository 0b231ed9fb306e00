//! The default clock of a limiter in memory. This clock shows the calendar time, and runs with the
//! monotonic clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Clock, ElapsedTime, Timestamp, wall_now};

/// The time between two readings of the calendar time, in microseconds of the monotonic clock.
const LOOK_US: u64 = 100_000;

/// The smallest difference between the calendar time and this clock that counts as a step, in microseconds.
const STEP_US: u64 = 100_000;

/// The longest time that reading the calendar time may take, in microseconds. A slower reading is ignored, because the
/// thread lost the processor during the reading.
const GLANCE_US: u64 = 10_000;

/// The default clock of a [`MemoryLimiter`](crate::MemoryLimiter): it shows the calendar time, and runs with the
/// operating system's monotonic clock.
///
/// When the clock is read, it compares itself with the calendar time, at most ten times per second. If the clock
/// differs from the calendar time by a tenth of a second or more, it steps to the calendar time, forward or back.
/// Windows of the calendar therefore begin and end with the calendar also in these cases:
///
/// * after the machine was suspended, during which the monotonic clock may have stood still;
/// * after the system's time is corrected, for example on a device that starts in 1970 and gets the time
///   later.
///
/// A smaller difference stays. [`Clock`] says how a step affects limits. [`MonotonicClock`](super::MonotonicClock)
/// never steps.
///
/// On x86-64 the clock asks the operating system once per millisecond, as `MonotonicClock` does. Clones
/// show the same time. On a target without an operating system, making this clock panics. On such a
/// target, set a clock of your own with
/// [`MemoryLimiterBuilder::clock`](crate::limiter::memory::MemoryLimiterBuilder::clock).
#[derive(Clone, Debug)]
pub struct SystemClock {
    elapsed: ElapsedTime,
    calendar: Arc<FollowedCalendar>,
}

impl SystemClock {
    /// Makes a clock that shows the current calendar time.
    #[must_use]
    pub fn new() -> Self {
        let elapsed = ElapsedTime::begin();
        Self { elapsed, calendar: Arc::new(FollowedCalendar::new(wall_now().as_micros())) }
    }

    /// Returns the time. The clock is read after all earlier loads of this thread, because a fence
    /// precedes the reading. Without the fence, the processor may read its counter while an earlier
    /// load still waits for memory.
    pub(crate) fn now_in_order(&self) -> Timestamp {
        std::sync::atomic::fence(Ordering::SeqCst);
        self.now()
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Timestamp {
        let system_us = || self.calendar.at(|| self.elapsed.passed_us(), || wall_now().as_micros());
        Timestamp::from_micros(self.elapsed.now_us(system_us))
    }

    fn follows_calendar(&self) -> bool {
        true
    }
}

/// The calendar time at the beginning of the monotonic time. This calendar time changes when the clock
/// steps.
#[derive(Debug)]
struct FollowedCalendar {
    /// The calendar time at the beginning of the monotonic time, in microseconds. It wraps.
    begin: AtomicU64,
    /// The monotonic time of the last reading of the calendar time.
    looked: AtomicU64,
}

impl FollowedCalendar {
    fn new(now: u64) -> Self {
        Self { begin: AtomicU64::new(now), looked: AtomicU64::new(0) }
    }

    /// Returns the time. Compares the time with the calendar time if the last comparison is [`LOOK_US`]
    /// or longer ago.
    fn at(&self, passed: impl Fn() -> u64, calendar: impl Fn() -> u64) -> u64 {
        let mut passed_us = passed();
        let looked = self.looked.load(Ordering::Relaxed);
        // Only the thread whose `compare_exchange` succeeds looks at the calendar. `Relaxed` suffices, because
        // nothing else is published.
        if passed_us.wrapping_sub(looked) >= LOOK_US
            && self.looked.compare_exchange(looked, passed_us, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            let (now, after) = (calendar(), passed());
            let shown = self.begin.load(Ordering::Relaxed).wrapping_add(after);
            if after.wrapping_sub(passed_us) <= GLANCE_US && now.abs_diff(shown) >= STEP_US {
                self.begin.store(now.wrapping_sub(after), Ordering::Relaxed);
            }
            passed_us = after;
        }
        self.begin.load(Ordering::Relaxed).wrapping_add(passed_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_US: u64 = 3_600_000_000;
    const TODAY_US: u64 = 1_790_000_000_000_000;

    #[test]
    fn clock_follows_the_calendar_after_a_suspension() {
        let calendar = FollowedCalendar::new(TODAY_US);
        assert_eq!(calendar.at(|| 50_000, || unreachable!("it is not time to look")), TODAY_US + 50_000);
        // The machine was suspended for eight hours, in which the monotonic clock stood still.
        let suspended = 8 * HOUR_US;
        assert_eq!(calendar.at(|| 150_000, || TODAY_US + suspended + 150_000), TODAY_US + suspended + 150_000);
        assert_eq!(calendar.at(|| 160_000, || unreachable!()), TODAY_US + suspended + 160_000);
    }

    #[test]
    fn clock_that_begins_in_1970_follows_the_correction() {
        let calendar = FollowedCalendar::new(30);
        assert_eq!(calendar.at(|| LOOK_US, || TODAY_US), TODAY_US);
        // And one that was ahead steps back.
        assert_eq!(calendar.at(|| 2 * LOOK_US, || TODAY_US - HOUR_US), TODAY_US - HOUR_US);
    }

    #[test]
    fn clock_does_not_follow_small_differences() {
        let calendar = FollowedCalendar::new(TODAY_US);
        for (at, ahead) in [(1, STEP_US - 1), (2, 1), (3, 0)] {
            let passed = at * LOOK_US;
            assert_eq!(calendar.at(|| passed, || TODAY_US + passed + ahead), TODAY_US + passed);
            assert_eq!(calendar.at(|| passed + 1, || unreachable!()), TODAY_US + passed + 1);
        }
        assert_eq!(calendar.at(|| 4 * LOOK_US, || TODAY_US + 4 * LOOK_US - STEP_US), TODAY_US + 4 * LOOK_US - STEP_US);
    }

    #[test]
    fn look_that_took_too_long_is_not_believed() {
        let calendar = FollowedCalendar::new(TODAY_US);
        let reads = std::cell::Cell::new(0);
        let passed = || {
            reads.set(reads.get() + 1);
            if reads.get() == 1 { LOOK_US } else { LOOK_US + HOUR_US } // the thread slept in between
        };
        assert_eq!(calendar.at(passed, || TODAY_US + LOOK_US), TODAY_US + LOOK_US + HOUR_US);
        // It looks again, and finds nothing.
        let later = LOOK_US + HOUR_US + 1;
        assert_eq!(calendar.at(|| later, || TODAY_US + later), TODAY_US + later);
    }
}
