//! The encodings and meanings of `X-RateLimit-Reset`, which says when a quota resets.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderValue;

use crate::base::wait::Wait;
use crate::clock::Clock;

use super::text::integer;
use super::view::PolicyView;
use super::wait::{SECOND_US, Waits, seconds_ceil};

/// The last second that the date formats can represent: 9999-12-31 23:59:59 UTC.
const CALENDAR_END: u64 = 253_402_300_799;

/// The encoding of a reset header. All encodings round up, so that no client returns too early.
///
/// Different servers use the name `X-RateLimit-Reset` with each of these encodings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResetEncoding {
    /// Seconds from now: `2`.
    DeltaSeconds,
    /// Seconds from now with decimals: `1.250`. Times are in whole microseconds, so digits after the
    /// sixth are zeros.
    DeltaSecondsDecimal {
        /// The number of digits after the decimal point. With 0 digits there is no decimal point.
        digits: u8,
    },
    /// Seconds since the Unix epoch, according to the [headers' clock](crate::Headers::clock):
    /// `1705420802`.
    EpochSeconds,
    /// Milliseconds since the Unix epoch, according to the [headers' clock](crate::Headers::clock):
    /// `1705420801250`.
    EpochMillis,
    /// A date of RFC 3339 in UTC, to the second: `2024-01-16T16:00:02Z`.
    Rfc3339,
    /// A date of HTTP (the IMF-fixdate of RFC 9110): `Tue, 16 Jan 2024 16:00:02 GMT`.
    ImfDate,
    /// A duration as Go prints it, to the millisecond: `1.25s`, `6m0s`, `12ms`.
    GoDuration,
}

/// The meaning of a reset header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ResetMeaning {
    /// The instant at which one more unit could pass, which is now if units remain. After a refusal,
    /// the reset is the instant at which the same request could pass. The header is absent if this
    /// instant is not known, or if the request can never pass.
    NextUnit,
    /// The end of the [effective window](crate::limiter::ChargeDecision::effective_window), within which
    /// the remaining units may be used. The header is absent if this end is not known. After a refusal, the
    /// meaning is [`NextUnit`](Self::NextUnit).
    Window,
    /// The instant at which the quota is full again if nothing else is charged: the end of a fixed window, or the
    /// instant at which a bucket is full. The header is absent if this instant is not known. The header is also
    /// absent if a refused request can never pass, because clients would read the header as a time to retry.
    #[default]
    Full,
}

impl ResetMeaning {
    /// Returns the time from now until the reset. Returns `None` if the time is not known, or if the
    /// request can never pass.
    pub(super) fn time_us(self, view: &PolicyView<'_>, waits: Waits, seed: u64) -> Option<u64> {
        let decision = view.decision;
        let full_us = decision.known_reset_us();
        if !view.refuses {
            return match self {
                Self::Full => full_us,
                Self::NextUnit if decision.remaining() > 0 => Some(0),
                Self::NextUnit | Self::Window => (decision.window_us > 0).then_some(decision.window_us),
            };
        }
        match (self, view.wait_us()) {
            (Self::Full, None) if decision.wait() == Wait::Never => None,
            (Self::Full, None) => full_us,
            (Self::Full, Some(wait_us)) => Some(waits.jittered_us(full_us?.max(wait_us), seed)),
            (Self::NextUnit | Self::Window, wait_us) => Some(waits.reported_us(wait_us?, seed)),
        }
    }
}

impl ResetEncoding {
    pub(super) fn is_date(self) -> bool {
        match self {
            Self::EpochSeconds | Self::EpochMillis | Self::Rfc3339 | Self::ImfDate => true,
            Self::DeltaSeconds | Self::DeltaSecondsDecimal { .. } | Self::GoDuration => false,
        }
    }

    /// Returns the header value for the time `after_us` from now.
    pub(super) fn value(self, after_us: u64, clock: &dyn Clock) -> Option<HeaderValue> {
        let at_us = || clock.now().as_micros().saturating_add(after_us);
        let text = match self {
            Self::DeltaSeconds => return integer(seconds_ceil(after_us)),
            Self::EpochSeconds => return integer(seconds_ceil(at_us())),
            Self::EpochMillis => return integer(at_us().div_ceil(1_000)),
            Self::DeltaSecondsDecimal { digits } => decimal(after_us, digits),
            Self::GoDuration => go_duration(after_us.div_ceil(1_000)),
            Self::Rfc3339 => humantime::format_rfc3339_seconds(calendar(at_us())).to_string(),
            Self::ImfDate => httpdate::fmt_http_date(calendar(at_us())),
        };
        HeaderValue::try_from(text).ok()
    }
}

/// Returns the date in whole seconds, rounded up, and at most the last second that the date formats can
/// represent.
fn calendar(at_us: u64) -> SystemTime {
    let seconds = Duration::from_secs(seconds_ceil(at_us).min(CALENDAR_END));
    UNIX_EPOCH.checked_add(seconds).unwrap_or(UNIX_EPOCH)
}

fn decimal(us: u64, digits: u8) -> String {
    let (precise, zeros) = (usize::from(digits.min(6)), usize::from(digits.saturating_sub(6)));
    let scale = 10_u64.pow(u32::from(digits.min(6)));
    let parts = us.div_ceil(SECOND_US / scale); // `scale` divides a second
    if digits == 0 {
        return parts.to_string();
    }
    format!("{}.{:0precise$}{:0<zeros$}", parts / scale, parts % scale, "")
}

/// Writes a duration in the format of Go's `time.Duration`. Omits leading units that are zero, and
/// zeros at the end of the decimals.
fn go_duration(millis: u64) -> String {
    let (hours, minutes, seconds) = (millis / 3_600_000, millis / 60_000 % 60, millis / 1_000 % 60);
    let decimals = format!(".{:03}", millis % 1_000);
    let seconds = format!("{seconds}{}s", decimals.trim_end_matches(['0', '.']));
    match (hours, minutes) {
        _ if (1..1_000).contains(&millis) => format!("{millis}ms"),
        (0, 0) => seconds,
        (0, _) => format!("{minutes}m{seconds}"),
        _ => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::time::Timestamp;
    use crate::clock::ManualClock;

    /// 2024-01-16 16:00:00 UTC.
    const NOW: u64 = 1_705_420_800_000_000;

    fn value(encoding: ResetEncoding, us: u64) -> String {
        let value = encoding.value(us, &ManualClock::at(Timestamp::from_micros(NOW))).unwrap();
        value.to_str().unwrap().to_owned()
    }

    #[test]
    fn encodings_round_up() {
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
    fn go_durations_are_written_as_go_writes_them() {
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
    fn dates_beyond_the_calendar_saturate() {
        use ResetEncoding::*;
        assert_eq!(value(Rfc3339, u64::MAX), "9999-12-31T23:59:59Z");
        assert_eq!(value(ImfDate, u64::MAX), "Fri, 31 Dec 9999 23:59:59 GMT");
        for encoding in [DeltaSeconds, DeltaSecondsDecimal { digits: 255 }, EpochSeconds, EpochMillis, GoDuration] {
            assert!(!value(encoding, u64::MAX).is_empty());
        }
    }
}
