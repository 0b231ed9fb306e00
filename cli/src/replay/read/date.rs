//! Dates as logs write them, in microseconds since the Unix epoch.

/// An instant of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    /// Microseconds since the Unix epoch.
    pub(crate) us: u64,
    /// Whether the log writes whole seconds only.
    pub(crate) is_coarse: bool,
}

const SECOND: u64 = 1_000_000;

/// The names of the months in logs.
pub(crate) const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];

/// Reads a date in one of the forms that logs use: `17/May/2015:10:05:03 +0000`, `2015-05-17T10:05:03.123Z`, or a
/// number of seconds, milliseconds, microseconds or nanoseconds since the epoch. Dates before 1970 and after 2149 are
/// not read.
pub(crate) fn parse(text: &[u8]) -> Option<Stamp> {
    let text = text.strip_prefix(b"[").unwrap_or(text);
    let text = text.strip_suffix(b"]").unwrap_or(text);
    match text {
        [_, _, b'/', ..] => common(text),
        [_, _, _, _, b'-', ..] => iso(text),
        _ => epoch(text),
    }
}

/// Reads `17/May/2015:10:05:03 +0000`, and `17/May/2015:10:05:03.123` as HAProxy writes it.
fn common(text: &[u8]) -> Option<Stamp> {
    let (date, rest) = text.split_at_checked(12)?;
    let (time, rest) = rest.split_at_checked(8)?;
    // Python's server writes a space before the time.
    let [d1, d2, b'/', month @ .., b'/', y1, y2, y3, y4, b':' | b' '] = date else { return None };
    let month = MONTHS.iter().position(|known| *known == month)? as u64 + 1;
    let days = days(number(&[*y1, *y2, *y3, *y4])?, month, number(&[*d1, *d2])?)?;
    stamp(days, time, rest)
}

/// Reads `2015-05-17T10:05:03.123Z`, also with a space for the `T` and with an offset for the `Z`.
fn iso(text: &[u8]) -> Option<Stamp> {
    let (date, rest) = text.split_at_checked(10)?;
    let [y1, y2, y3, y4, b'-', m1, m2, b'-', d1, d2] = date else { return None };
    let (time, rest) = rest.strip_prefix(b"T").or_else(|| rest.strip_prefix(b" "))?.split_at_checked(8)?;
    let days = days(number(&[*y1, *y2, *y3, *y4])?, number(&[*m1, *m2])?, number(&[*d1, *d2])?)?;
    stamp(days, time, rest)
}

/// Reads the time of a day, and what follows it: a fraction of a second and an offset. Without an offset it is UTC.
fn stamp(days: u64, time: &[u8], rest: &[u8]) -> Option<Stamp> {
    let (fraction, zone, is_coarse) = match rest {
        [b'.' | b',', rest @ ..] => {
            let length = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let (digits, zone) = rest.split_at_checked(length)?;
            (micros(digits), zone, digits.is_empty())
        }
        zone => (0, zone, true),
    };
    let zone = zone.strip_prefix(b" ").unwrap_or(zone);
    // The name of a zone does not say its offset, so it counts as UTC.
    let is_name = zone.len() <= 5 && zone.iter().all(u8::is_ascii_uppercase);
    let offset = if is_name || zone == b"z" { 0 } else { offset(zone)? };
    Some(Stamp { us: shifted(days, clock(time)?, fraction, offset)?, is_coarse })
}

/// Returns the microseconds of a fraction of a second, given its digits.
fn micros(digits: &[u8]) -> u64 {
    (0..6).fold(0, |us, at| us * 10 + digits.get(at).map_or(0, |digit| u64::from(digit - b'0')))
}

/// Reads a number since the epoch. Its size says its unit: whole seconds have 11 digits until the year 5138.
fn epoch(text: &[u8]) -> Option<Stamp> {
    let whole = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if whole == 0 || whole > 19 {
        return None;
    }
    let (digits, rest) = text.split_at_checked(whole)?;
    let value: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    let (us, is_coarse) = match whole {
        ..=11 => match rest {
            [] => (value.checked_mul(SECOND)?, true),
            [b'.', fraction @ ..] if fraction.iter().all(u8::is_ascii_digit) => {
                (value.checked_mul(SECOND)?.checked_add(micros(fraction))?, fraction.is_empty())
            }
            // A number like 1.5e9, from a program that prints floating-point numbers.
            _ => (seconds(std::str::from_utf8(text).ok()?.parse().ok()?)?, false),
        },
        12..=14 => (value.checked_mul(1_000)?, false),
        15..=17 => (value, false),
        _ => (value / 1_000, false),
    };
    is_in_range(us).then_some(Stamp { us, is_coarse })
}

/// Returns a number of seconds as microseconds, rounded down.
pub(crate) fn seconds(seconds: f64) -> Option<u64> {
    let micros = seconds * 1e6;
    // A double holds whole microseconds exactly up to the year 2255.
    (micros.is_finite() && (0.0..9e18).contains(&micros)).then_some(micros as u64)
}

/// The limiter's time ends in 2150.
fn is_in_range(us: u64) -> bool {
    us < 5_680_281_600 * SECOND
}

/// Reads `10:05:03` as seconds. A leap second counts as the next one.
fn clock(text: &[u8]) -> Option<u64> {
    let [h1, h2, b':', m1, m2, b':', s1, s2] = text else { return None };
    let (hours, minutes, seconds) = (number(&[*h1, *h2])?, number(&[*m1, *m2])?, number(&[*s1, *s2])?);
    (hours < 24 && minutes < 60 && seconds <= 60).then_some(hours * 3_600 + minutes * 60 + seconds)
}

/// Reads `+0200` or `+02:00` as seconds east of Greenwich.
fn offset(text: &[u8]) -> Option<i64> {
    let ([sign, h1, h2, m1, m2] | [sign, h1, h2, b':', m1, m2]) = text else { return None };
    let (hours, minutes) = (number(&[*h1, *h2])?, number(&[*m1, *m2])?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    let seconds = i64::try_from(hours * 3_600 + minutes * 60).ok()?;
    match sign {
        b'+' => Some(seconds),
        b'-' => Some(-seconds),
        _ => None,
    }
}

/// Reads at most four digits.
fn number<const N: usize>(digits: &[u8; N]) -> Option<u64> {
    const { assert!(N <= 4) };
    let value = digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit.wrapping_sub(b'0')));
    digits.iter().all(u8::is_ascii_digit).then_some(value)
}

/// Returns the days from 1970-01-01 to a day of the Gregorian calendar, or `None` if there is no such day or it is
/// earlier.
///
/// Years begin in March here, so that the leap day is a year's last day.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if day == 0 || day > longest || year < 1970 {
        return None;
    }
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let of_months = (153 * month + 2) / 5;
    (year * 365 + year / 4 - year / 100 + year / 400 + of_months + day).checked_sub(719_469)
}

fn shifted(days: u64, seconds: u64, micros: u64, offset: i64) -> Option<u64> {
    let seconds = (days * 86_400 + seconds).checked_add_signed(-offset)?;
    seconds.checked_mul(SECOND)?.checked_add(micros).filter(|us| is_in_range(*us))
}

/// Returns the UTC date and time of an instant: year, month, day, hour, minute, second.
pub(crate) fn civil(us: u64) -> [u64; 6] {
    let seconds = us / SECOND;
    // The inverse of `days`, in cycles of 400 years.
    let days = seconds / 86_400 + 719_468;
    let (cycle, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (day, year) = (of_year - (153 * month + 2) / 5 + 1, year + cycle * 400);
    let (month, year) = if month < 10 { (month + 3, year) } else { (month - 9, year + 1) };
    [year, month, day, seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(text: &str) -> Option<u64> {
        parse(text.as_bytes()).map(|stamp| stamp.us)
    }

    #[test]
    fn date_is_read_in_every_form() {
        let day = 1_431_857_103;
        for (text, micros, is_coarse) in [
            ("17/May/2015:10:05:03 +0000", 0, true),
            ("[17/May/2015:12:05:03 +0200]", 0, true),
            ("17/May/2015:05:35:03 -0430", 0, true),
            ("17/May/2015:10:05:03.123", 123_000, false),
            ("17/May/2015 10:05:03", 0, true),
            ("17/May/2015:10:05:03 CDT", 0, true),
            ("2015-05-17T10:05:03Z", 0, true),
            ("2015-05-17 10:05:03", 0, true),
            ("2015-05-17T10:05:03.5Z", 500_000, false),
            ("2015-05-17T10:05:03.123456789Z", 123_456, false),
            ("2015-05-17T12:05:03.123+02:00", 123_000, false),
            ("1431857103", 0, true),
            ("1431857103.25", 250_000, false),
            ("1431857103250", 250_000, false),
            ("1431857103250001", 250_001, false),
            ("1431857103250001999", 250_001, false),
            ("1.431857103e9", 0, false),
        ] {
            let expected = Stamp { us: day * SECOND + micros, is_coarse };
            assert_eq!(parse(text.as_bytes()), Some(expected), "{text}");
        }
        assert_eq!(us("29/Feb/2016:00:00:00 +0000"), Some(1_456_704_000 * SECOND));
        assert_eq!(us("01/Jan/1970:00:00:00 +0000"), Some(0));
    }

    #[test]
    fn absurd_date_is_not_read() {
        for text in [
            "",
            "-",
            "29/Feb/2015:10:05:03 +0000",
            "31/Apr/2015:10:05:03 +0000",
            "00/May/2015:10:05:03 +0000",
            "17/Mai/2015:10:05:03 +0000",
            "17/May/2015:24:05:03 +0000",
            "17/May/2015:10:05:03 +9999",
            "17/May/2015:10:05",
            "01/Jan/2150:00:00:00 +0000",
            "17/May/9999:10:05:03 +0000",
            "17/May/20150:10:05:03 +0000",
            "17/May/215:10:05:03 +0000",
            "01/Jan/1970:00:00:00 +0100",
            "2015-13-17T10:05:03Z",
            "2015-05-17",
            "99999999999999999999",
            "18446744073709551615.5",
            "nan",
            "1e400",
            "+1431857103",
        ] {
            assert_eq!(us(text), None, "{text}");
        }
    }

    #[test]
    fn date_and_its_parts_are_inverse() {
        for day in (0..65_744_u64).step_by(17) {
            let [year, month, of_month, hour, minute, second] = civil((day * 86_400 + 45_296) * SECOND);
            assert_eq!(days(year, month, of_month), Some(day));
            assert_eq!([hour, minute, second], [12, 34, 56]);
        }
    }
}
