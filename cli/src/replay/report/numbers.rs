//! Numbers as a report prints them.

use super::super::read::date::civil;

/// Returns a number with commas: `1,234,567`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a share in percent, with enough digits to distinguish it from none and from all.
pub(crate) fn share(part: u64, of: u64) -> String {
    if part == 0 || of == 0 {
        return "0%".to_owned();
    }
    let percent = part as f64 * 100.0 / of as f64;
    match percent {
        _ if part >= of => "100%".to_owned(),
        ..0.01 => "<0.01%".to_owned(),
        ..1.0 => format!("{percent:.2}%"),
        ..99.0 => format!("{percent:.1}%"),
        ..99.99 => format!("{percent:.2}%"),
        _ => ">99.99%".to_owned(),
    }
}

/// Returns `1 client` or `2 clients`.
pub(crate) fn counted(number: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(number), if number == 1 { "" } else { "s" })
}

/// Returns an instant as `2015-05-17 10:05:03`, in UTC.
pub(crate) fn instant(us: u64) -> String {
    let [year, month, day, hour, minute, second] = civil(us);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// Returns a duration in the two largest units that it has: `3 days 2 h`.
pub(crate) fn duration(us: u64) -> String {
    let mut rest = us;
    let mut words = Vec::new();
    for (length, unit) in [(86_400_000_000, "day"), (3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s")] {
        let number = rest / length;
        rest %= length;
        if number > 0 {
            words.push(format!("{number} {unit}{}", if unit == "day" && number > 1 { "s" } else { "" }));
        }
    }
    words.truncate(2);
    if words.is_empty() { "less than 1 s".to_owned() } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_printed_for_people() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        let shares = [(0, 5), (5, 5), (1, 1_000_000), (1, 1_000), (1, 3), (999, 1_000), (999_999, 1_000_000), (1, 0)];
        let expected = ["0%", "100%", "<0.01%", "0.10%", "33.3%", "99.90%", ">99.99%", "0%"];
        assert_eq!(shares.map(|(part, of)| share(part, of)), expected);
        assert_eq!(instant(1_431_857_103_000_000), "2015-05-17 10:05:03");
        assert_eq!(duration(266_400_000_000), "3 days 2 h");
        assert_eq!(duration(60_000_000), "1 min");
        assert_eq!(duration(5), "less than 1 s");
    }
}
