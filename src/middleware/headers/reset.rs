//! `X-RateLimit-Reset` and its many meanings.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderValue;

use crate::decision::ChargeDecision;
use crate::time::Timestamp;

use super::text::{Text, integer};
use super::wait::{Waits, seconds_ceil};

/// The last second that the calendar formats can write: 9999-12-31 23:59:59 UTC.
const CALENDAR_END: u64 = 253_402_300_799;

/// How a field for the reset writes a time. All round up, so that nobody comes back too early.
///
/// The name `X-RateLimit-Reset` is in use with every one of these, so a server has to say which one it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResetEncoding {
    /// Seconds from now: `2`.
    DeltaSeconds,
    /// Seconds from now with decimals: `1.250`. Times are known to the microsecond; digits beyond the sixth are zeros.
    DeltaSecondsDecimal {
        /// How many digits follow the point; with none, there is no point either.
        digits: u8,
    },
    /// Seconds since the Unix epoch, of the server's clock: `1705420802`.
    EpochSeconds,
    /// Milliseconds since the Unix epoch, of the server's clock: `1705420801250`.
    EpochMillis,
    /// A date of RFC 3339 in UTC, to the second: `2024-01-16T16:00:02Z`.
    Rfc3339,
    /// A date of HTTP (the IMF-fixdate of RFC 9110): `Tue, 16 Jan 2024 16:00:02 GMT`.
    ImfDate,
    /// A duration as Go prints it, to the millisecond: `1.25s`, `6m0s`, `12ms`.
    GoDuration,
}

/// What a field for the reset tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResetMeaning {
    /// When one more unit, or after a refusal the same request, could pass; at once while something remains. There is no
    /// such field after a refusal that no wait helps.
    NextUnit,
    /// The end of the [effective window](ChargeDecision::effective_window), within which what remains may be used; after a
    /// refusal as [`NextUnit`](Self::NextUnit).
    Window,
    /// When the whole quota is back, if nothing else comes: a fixed window's end, a full bucket.
    #[default]
    Full,
}

impl ResetMeaning {
    /// The time to tell, if there is one.
    pub(super) fn time_us(self, decision: &ChargeDecision, refuses: bool, waits: Waits, seed: u64) -> Option<u64> {
        if refuses && decision.is_never() {
            return (self == Self::Full).then_some(decision.reset_us());
        }
        Some(match self {
            Self::Full if refuses => waits.jittered_us(decision.reset_us().max(decision.retry_us()), seed),
            Self::Full => decision.reset_us(),
            Self::NextUnit | Self::Window if refuses => waits.told_us(decision.retry_us(), seed),
            Self::NextUnit if decision.remaining() > 0 => 0,
            Self::NextUnit | Self::Window => decision.window_us(),
        })
    }
}

impl ResetEncoding {
    /// The time `after_us` from now as a header value.
    pub(super) fn value(self, after_us: u64, wall_now: &dyn Fn() -> Timestamp) -> Option<HeaderValue> {
        let at_us = || wall_now().as_micros().saturating_add(after_us);
        let mut text = Text::new();
        match self {
            Self::DeltaSeconds => return integer(seconds_ceil(after_us)),
            Self::EpochSeconds => return integer(seconds_ceil(at_us())),
            Self::EpochMillis => return integer(at_us().div_ceil(1_000)),
            Self::DeltaSecondsDecimal { digits } => push_decimal(&mut text, after_us, digits),
            Self::GoDuration => push_go(&mut text, after_us.div_ceil(1_000)),
            Self::Rfc3339 => write!(text, "{}", humantime::format_rfc3339_seconds(calendar(at_us()))).ok()?,
            Self::ImfDate => write!(text, "{}", httpdate::HttpDate::from(calendar(at_us()))).ok()?,
        }
        text.to_value()
    }
}

/// A second of the calendar, rounded up, and within what its formats can write.
fn calendar(at_us: u64) -> SystemTime {
    let seconds = Duration::from_secs(seconds_ceil(at_us).min(CALENDAR_END));
    UNIX_EPOCH.checked_add(seconds).unwrap_or(UNIX_EPOCH)
}

fn push_decimal(text: &mut Text, us: u64, digits: u8) {
    let known = u32::from(digits.min(6));
    let scale = 10_u64.pow(known);
    let parts = us.div_ceil(1_000_000 / scale); // divides: a power of ten, at most 10^6
    text.push_integer(parts / scale);
    if digits == 0 {
        return;
    }
    text.push(b".");
    let mut place = scale / 10;
    while place > 0 {
        text.push_integer(parts / place % 10);
        place /= 10;
    }
    for _ in 6..digits {
        text.push(b"0");
    }
}

/// As Go's `time.Duration` prints itself: the smallest unit that keeps a leading digit, hours and minutes without zeros in
/// front, no zeros at the end of the decimals.
fn push_go(text: &mut Text, millis: u64) {
    if millis == 0 {
        return text.push(b"0s");
    }
    if millis < 1_000 {
        text.push_integer(millis);
        return text.push(b"ms");
    }
    let (minutes, seconds) = (millis / 60_000, millis / 1_000 % 60);
    if minutes >= 60 {
        text.push_integer(minutes / 60);
        text.push(b"h");
    }
    if minutes > 0 {
        text.push_integer(minutes % 60);
        text.push(b"m");
    }
    text.push_integer(seconds);
    let mut rest = millis % 1_000;
    if rest > 0 {
        text.push(b".");
        let mut place = 100;
        while rest > 0 {
            text.push_integer(rest / place);
            rest %= place;
            place /= 10;
        }
    }
    text.push(b"s");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2024-01-16 16:00:00 UTC.
    const NOW: u64 = 1_705_420_800_000_000;

    fn value(encoding: ResetEncoding, us: u64) -> String {
        let value = encoding.value(us, &|| Timestamp::from_micros(NOW)).unwrap();
        value.to_str().unwrap().to_owned()
    }

    #[test]
    fn every_encoding_rounds_up() {
        use ResetEncoding::*;
        for (encoding, expected) in [
            (DeltaSeconds, "2"),
            (DeltaSecondsDecimal { digits: 3 }, "1.250"),
            (DeltaSecondsDecimal { digits: 1 }, "1.3"),
            (DeltaSecondsDecimal { digits: 0 }, "2"),
            (DeltaSecondsDecimal { digits: 8 }, "1.25000000"),
            (EpochSeconds, "1705420802"),
            (EpochMillis, "1705420801250"),
            (Rfc3339, "2024-01-16T16:00:02Z"),
            (ImfDate, "Tue, 16 Jan 2024 16:00:02 GMT"),
            (GoDuration, "1.25s"),
        ] {
            assert_eq!(value(encoding, 1_250_000), expected, "{encoding:?}");
        }
        assert_eq!(value(DeltaSecondsDecimal { digits: 3 }, 1), "0.001");
        assert_eq!(value(DeltaSecondsDecimal { digits: 6 }, 12_000_034), "12.000034");
        assert_eq!(value(DeltaSecondsDecimal { digits: 2 }, 999_999), "1.00");
        assert_eq!(value(DeltaSeconds, 0), "0");
    }

    #[test]
    fn durations_are_written_as_go_writes_them() {
        for (us, expected) in [
            (0, "0s"),
            (1, "1ms"),
            (12_000, "12ms"),
            (999_001, "1s"),
            (1_050_000, "1.05s"),
            (59_999_000, "59.999s"),
            (60_000_000, "1m0s"),
            (360_000_000, "6m0s"),
            (3_600_000_000, "1h0m0s"),
            (90_061_500_000, "25h1m1.5s"),
        ] {
            assert_eq!(value(ResetEncoding::GoDuration, us), expected);
        }
    }

    #[test]
    fn a_time_beyond_the_calendar_saturates_and_does_not_panic() {
        use ResetEncoding::*;
        assert_eq!(value(Rfc3339, u64::MAX), "9999-12-31T23:59:59Z");
        assert_eq!(value(ImfDate, u64::MAX), "Fri, 31 Dec 9999 23:59:59 GMT");
        for encoding in [DeltaSeconds, DeltaSecondsDecimal { digits: 255 }, EpochSeconds, EpochMillis, GoDuration] {
            assert!(!value(encoding, u64::MAX).is_empty());
        }
    }
}
