//! Instants in whole microseconds.
//!
//! One integer unit everywhere: Redis' `TIME` is in microseconds, and Lua's numbers hold whole numbers exactly up to
//! 2^53, which in microseconds since 1970 reaches the year 2255.

use std::fmt;
use std::time::Duration;

/// The longest period of a quota: 366 days.
pub(crate) const PERIOD_US_MAX: u64 = 366 * 86_400 * 1_000_000;

/// The longest time in which a full bucket may drain, and the longest allowed debt beyond it, each: about 8.9 years.
pub(crate) const DRAIN_US_MAX: u64 = 1 << 48;

/// The latest instant that a clock is believed: the year 2150. Limiters read a later one as this.
pub(crate) const CLOCK_US_MAX: u64 = 5_680_281_600_000_000;

/// The latest instant that arithmetic can meet: a full drain with all its debt later.
/// Everything below 2^53 is exact in a double as well.
#[cfg(test)]
pub(crate) const INSTANT_US_MAX: u64 = CLOCK_US_MAX + 2 * DRAIN_US_MAX;
const _: () = assert!(CLOCK_US_MAX + 2 * DRAIN_US_MAX < 1 << 53);

/// An instant: whole microseconds since the Unix epoch, as told by a [`Clock`](crate::Clock).
///
/// Nothing else about the calendar is known or needed; a clock that starts at zero is as good, only windows aligned to
/// the epoch then align to its zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The instant `micros` microseconds after the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// This instant moved later, in whole microseconds rounded up; saturates.
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros_ceil(duration)))
    }

    /// The time from `earlier` to this instant, zero if `earlier` is later.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

/// Whole microseconds of a duration, rounded up; saturates.
pub(crate) fn micros_ceil(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}

/// Whole microseconds of a duration, rounded down; saturates.
pub(crate) fn micros_floor(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Whole microseconds of a duration, if it is a whole number of them and fits.
pub(crate) fn micros_exact(duration: Duration) -> Option<u64> {
    if duration.subsec_nanos() % 1_000 != 0 {
        return None;
    }
    u64::try_from(duration.as_micros()).ok()
}
