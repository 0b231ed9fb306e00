//! Parsers for the formats in which servers write times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::base::time::PERIOD_US_MAX;

/// The longest time that is accepted from a server: the longest period of a quota.
pub(super) const LONGEST: Duration = Duration::from_micros(PERIOD_US_MAX);

/// The default for the longest wait of a request.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(300);

const NANOS: u128 = 1_000_000_000;

/// Numbers from this bound up to [`EPOCH_MILLIS`] are seconds since 1970.
const EPOCH_SECONDS: u128 = 1_000_000_000 * NANOS;

/// Numbers from this bound on are milliseconds since 1970.
const EPOCH_MILLIS: u128 = 1_000_000_000_000 * NANOS;

/// Returns the time from now for which a value stands, according to the table in the documentation of
/// [`client`](crate::client). The time may be longer than [`LONGEST`].
pub(super) fn from_now(value: &str, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    // A text of more than 64 bytes is not a time, so the text is not passed to the parsers of other crates.
    if value.len() > 64 {
        return None;
    }
    if let Some(nanos) = decimal(value) {
        return match nanos {
            EPOCH_MILLIS.. => until(epoch(nanos.div_ceil(1_000))?, now),
            EPOCH_SECONDS.. => until(epoch(nanos)?, now),
            _ => Some(duration_of(nanos)),
        };
    }
    if let Some(nanos) = words(value) {
        return Some(duration_of(nanos));
    }
    let date = rfc3339(value).or_else(|| httpdate::parse_http_date(value).ok())?;
    until(date, now)
}

/// Returns the time until a date: zero if the date has passed, and `None` if the date was more than
/// [`LONGEST`] ago.
fn until(date: SystemTime, now: SystemTime) -> Option<Duration> {
    match date.duration_since(now) {
        Ok(time) => Some(time),
        Err(over) => (over.duration() <= LONGEST).then_some(Duration::ZERO),
    }
}

/// Returns [`LONGEST`] for an integer that [`from_now`] does not read, because it has more than 15
/// digits or would be a date long ago. The standard defines integers in `Retry-After` as seconds,
/// so such an integer is a long wait.
pub(super) fn beyond(value: &str) -> Option<Duration> {
    let value = value.trim();
    let is_integer = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    is_integer.then_some(LONGEST)
}

fn epoch(nanos: u128) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(duration_of(nanos))
}

/// Saturates.
pub(super) fn duration_of(nanos: u128) -> Duration {
    let seconds = u64::try_from(nanos / NANOS).unwrap_or(u64::MAX);
    Duration::new(seconds, u32::try_from(nanos % NANOS).unwrap_or(0))
}

/// Parses a number of up to 15 digits, with or without decimals. Returns the number multiplied by 10^9,
/// rounded up.
pub(super) fn decimal(text: &str) -> Option<u128> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
    let are_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !are_digits(whole) || !are_digits(decimals) || whole.len() > 15 {
        return None;
    }
    let digits = |text: &str| text.bytes().fold(0_u128, |n, digit| n * 10 + u128::from(digit - b'0'));
    let (precise, beyond) = decimals.split_at(decimals.len().min(9));
    let nanos = precise.bytes().chain(*b"000000000").take(9).fold(0, |n, digit| n * 10 + u128::from(digit - b'0'));
    let round_up = u128::from(beyond.bytes().any(|digit| digit != b'0'));
    Some(digits(whole) * NANOS + nanos + round_up)
}

/// Parses a duration as Go prints it, such as `1h2m3.5s` or `20ms`, and returns its nanoseconds,
/// rounded up.
fn words(text: &str) -> Option<u128> {
    let (mut rest, mut total) = (text, 0_u128);
    while !rest.is_empty() {
        let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(unit_at);
        let unit_end = after.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(after.len());
        let (unit, after) = after.split_at(unit_end);
        let unit_nanos = match unit {
            "d" => 86_400 * NANOS,
            "h" => 3_600 * NANOS,
            "m" => 60 * NANOS,
            "s" => NANOS,
            "ms" => 1_000_000,
            "us" => 1_000,
            "ns" => 1,
            _ => return None,
        };
        // The text has at most 64 bytes, so there are fewer than 32 summands, each below 10^39 / 32.
        total += (decimal(number)? * unit_nanos).div_ceil(NANOS);
        rest = after;
    }
    (!text.is_empty()).then_some(total)
}

/// Parses a date of RFC 3339. The seconds may be missing. The offset may be missing too, and the date
/// is then in UTC.
fn rfc3339(text: &str) -> Option<SystemTime> {
    let (date, time) = text.split_once(['T', 't', ' '])?;
    let (time, offset) = match time.find(['Z', 'z', '+', '-']) {
        Some(at) => time.split_at(at),
        None => (time, "Z"),
    };
    let seconds = if time.len() == 5 { ":00" } else { "" };
    let date = humantime::parse_rfc3339_weak(&format!("{date}T{time}{seconds}Z")).ok()?;
    if offset.eq_ignore_ascii_case("z") {
        return Some(date);
    }
    let (sign, of_offset) = offset.split_at_checked(1)?;
    let (hours, minutes) = of_offset.split_once(':')?;
    let two_digits = |text: &str, below: u64| {
        let is_number = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|n| is_number && *n < below)
    };
    let offset = Duration::from_secs(two_digits(hours, 24)? * 3_600 + two_digits(minutes, 60)? * 60);
    if sign == "+" { date.checked_sub(offset) } else { date.checked_add(offset) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2024-01-16 16:00:00 UTC.
    const NOW: u64 = 1_705_420_800;

    fn millis(value: &str) -> Option<u128> {
        let time = from_now(value, UNIX_EPOCH + Duration::from_secs(NOW))?;
        Some(time.as_nanos().div_ceil(1_000_000))
    }

    #[test]
    fn times_are_read_by_the_table() {
        for (value, expected) in [
            ("0", 0),
            ("60", 60_000),
            (" 60 ", 60_000),
            ("007", 7_000),
            ("2.0", 2_000),
            ("0.0000000001", 1),
            ("999999999", 999_999_999_000),
            ("1705420802", 2_000),
            ("1705420802.123", 2_123),
            ("1705420799", 0),
            ("1705420801250", 1_250),
            ("6m0s", 360_000),
            ("1.25s", 1_250),
            ("20ms", 20),
            ("2m59.56s", 179_560),
            ("1d2h", 93_600_000),
            ("500us", 1),
            ("1ns", 1),
            ("2024-01-16T16:00:02Z", 2_000),
            ("2024-01-16t16:00:02z", 2_000),
            ("2024-01-16T16:00:02.5Z", 2_500),
            ("2024-01-16T17:00:02+01:00", 2_000),
            ("2024-01-16T15:30:02-00:30", 2_000),
            ("2024-01-16T16:01Z", 60_000),
            ("2024-01-16 16:00:02", 2_000),
            ("2023-06-16T16:00:02Z", 0),
            ("Tue, 16 Jan 2024 16:00:02 GMT", 2_000),
            ("Tuesday, 16-Jan-24 16:00:02 GMT", 2_000),
            ("Tue Jan 16 16:00:02 2024", 2_000),
        ] {
            assert_eq!(millis(value), Some(expected), "{value:?}");
        }
    }

    #[test]
    fn nonsense_is_no_time() {
        let long = "1".repeat(1_000);
        for value in [
            "",
            " ",
            "-1",
            "+1",
            "-0",
            "NaN",
            "inf",
            "1e3",
            "0x10",
            "1.",
            ".5",
            "1.2.3",
            "1_000",
            "soon",
            "s",
            "6m0",
            "m6",
            "-5s",
            "1.s",
            "6 m",
            "1w",
            "1000000000000000",
            "1000000000",
            "1000000000000",
            "2024-01-16",
            "T",
            "TZ",
            "2024-13-16T16:00:02Z",
            "2024-01-16T16:00:02+1:00",
            "2024-01-16T16:00:02+99:00",
            "2024-01-16T16:00:02+",
            "2024-01-16T16:00:02+aa:bb",
            "0000-00-00T00:00:00Z",
            "1994-11-06T08:49:37Z",
            "Tue, 99 Jan 2024 16:00:02 GMT",
            long.as_str(),
        ] {
            assert_eq!(millis(value), None, "{value:?}");
        }
    }

    #[test]
    fn duration_words_do_not_overflow() {
        let most = "999999999999999d".repeat(4);
        assert_eq!(words(&most), Some(4 * 999_999_999_999_999 * 86_400 * NANOS));
        assert!(from_now(&most, UNIX_EPOCH).is_some_and(|time| time > LONGEST));
    }
}
