//! Instants in whole microseconds.
//!
//! Every time is an integer number of microseconds. Redis' `TIME` is in microseconds. Lua's numbers
//! hold integers exactly up to 2^53, which is an instant of the year 2255 in microseconds since 1970.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest period of a quota: 366 days.
pub(crate) const PERIOD_US_MAX: u64 = 366 * 86_400 * 1_000_000;

/// The longest time in which a full bucket may drain, about 8.9 years. The debt of a bucket may take at
/// most this time to drain, too.
pub(crate) const DRAIN_US_MAX: u64 = 1 << 48;

/// The latest instant that a limiter accepts from a clock, in the year 2150. A limiter replaces a later
/// instant with this instant.
pub(crate) const CLOCK_US_MAX: u64 = 5_680_281_600_000_000;

/// The latest instant in any calculation: the instant at which a bucket with its whole debt has drained
/// after the latest clock reading. This instant is below 2^53, so a double holds it exactly.
#[cfg(test)]
pub(crate) const INSTANT_US_MAX: u64 = CLOCK_US_MAX + 2 * DRAIN_US_MAX;
const _: () = assert!(CLOCK_US_MAX + 2 * DRAIN_US_MAX < 1 << 53);

/// An instant of a [`Clock`](crate::clock::Clock), in whole microseconds since the Unix epoch.
///
/// A clock may start at any instant, for example at zero. Windows that are aligned to the epoch are
/// then aligned to the clock's zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Makes the instant `micros` microseconds after the Unix epoch.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Returns the microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Returns this instant plus a duration, which is rounded up to whole microseconds. Saturates.
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros_ceil(duration)))
    }

    /// Returns the time from `earlier` to this instant, or zero if `earlier` is later.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl From<SystemTime> for Timestamp {
    /// Returns the instant in whole microseconds, rounded down. A time before the Unix epoch becomes the epoch.
    fn from(time: SystemTime) -> Self {
        Self(micros_floor(time.duration_since(UNIX_EPOCH).unwrap_or_default()))
    }
}

impl From<Timestamp> for SystemTime {
    /// Returns the instant as a `SystemTime`. An instant that the platform cannot represent becomes the
    /// latest instant that limiters accept, in the year 2150.
    fn from(timestamp: Timestamp) -> Self {
        let at = |micros| UNIX_EPOCH.checked_add(Duration::from_micros(micros));
        at(timestamp.0).or_else(|| at(CLOCK_US_MAX)).unwrap_or(UNIX_EPOCH)
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0 / 1_000_000, self.0 % 1_000_000)
    }
}

const DAY_MS: u64 = 86_400_000;

/// Prints a duration for people, such as `32days 1h 2m 3s`, rounded up to milliseconds. The largest unit is the day,
/// because months and years have no fixed length.
pub(crate) struct Humane(pub(crate) Duration);

impl fmt::Display for Humane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = u64::try_from(self.0.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX);
        let (days, rest) = (millis / DAY_MS, Duration::from_millis(millis % DAY_MS));
        if days > 0 {
            write!(f, "{days}day{}", if days > 1 { "s" } else { "" })?;
        }
        match (days, rest) {
            (1.., Duration::ZERO) => Ok(()),
            (1.., rest) => write!(f, " {}", humantime::format_duration(rest)),
            (0, rest) => humantime::format_duration(rest).fmt(f),
        }
    }
}

/// Prints an instant of the calendar in UTC, such as `2025-01-01T00:00:00Z`, rounded down to seconds. An
/// instant after the latest that limiters accept, in the year 2150, is printed as this latest instant.
#[cfg(any(feature = "status", feature = "_redis", feature = "fleet", test))]
pub(crate) struct Utc(pub(crate) Timestamp);

#[cfg(any(feature = "status", feature = "_redis", feature = "fleet", test))]
impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = UNIX_EPOCH + Duration::from_secs(self.0.0.min(CLOCK_US_MAX) / 1_000_000);
        humantime::format_rfc3339_seconds(at).fmt(f)
    }
}

/// Returns a duration in whole microseconds, rounded up. Saturates.
pub(crate) fn micros_ceil(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX)
}

/// Returns a duration in whole microseconds, rounded down. Saturates.
pub(crate) fn micros_floor(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns a duration in microseconds. Returns `None` if the duration is not a whole number of
/// microseconds, or is too long for a `u64`.
pub(crate) fn micros_exact(duration: Duration) -> Option<u64> {
    if duration.subsec_nanos() % 1_000 != 0 {
        return None;
    }
    u64::try_from(duration.as_micros()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamp_is_an_instant_of_the_calendar() {
        let time = UNIX_EPOCH + Duration::from_micros(1_735_689_600_000_001);
        assert_eq!(SystemTime::from(Timestamp::from_micros(1_735_689_600_000_001)), time);
        assert_eq!(Timestamp::from(time + Duration::from_nanos(999)).as_micros(), 1_735_689_600_000_001);
        assert_eq!(Timestamp::from(UNIX_EPOCH - Duration::from_secs(1)), Timestamp::default());
        assert!(SystemTime::from(Timestamp::from_micros(u64::MAX)) >= time, "nothing panics");
    }

    #[test]
    fn duration_is_printed_in_days_at_most() {
        let print = |millis| Humane(Duration::from_millis(millis)).to_string();
        assert_eq!((print(0), print(DAY_MS - 1)), ("0s".to_owned(), "23h 59m 59s 999ms".to_owned()));
        assert_eq!((print(DAY_MS), print(2 * DAY_MS + 1_000)), ("1day".to_owned(), "2days 1s".to_owned()));
        assert_eq!(print(366 * DAY_MS + 60_000), "366days 1m");
        assert!(Humane(Duration::MAX).to_string().starts_with("213503982334days 14h"));
    }

    #[test]
    fn instant_of_any_clock_is_printed() {
        let print = |micros| Utc(Timestamp::from_micros(micros)).to_string();
        assert_eq!(print(1_735_689_661_999_999), "2025-01-01T00:01:01Z");
        assert_eq!((print(0).as_str(), print(u64::MAX).get(..4)), ("1970-01-01T00:00:00Z", Some("2150")));
    }
}
