//! Prints texts, numbers and times for the page.

use std::fmt::{self, Display, Write as _};
use std::time::Duration;

use crate::base::time::Humane;
use crate::error::turns_text;
use crate::stats::HistogramSnapshot;

/// Prints foreign text in HTML. Markup is escaped, and characters that could change the direction of the page's text
/// are left out.
pub(super) struct HtmlText<'a>(pub(super) &'a str);

impl Display for HtmlText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                '\r' => {} // a browser sends it before each line's end
                '\n' | '\t' => f.write_char(char)?,
                _ if char.is_control() || turns_text(char) => f.write_char('\u{fffd}')?,
                _ => f.write_char(char)?,
            }
        }
        Ok(())
    }
}

/// Prints a number with spaces between groups of three digits.
pub(super) struct Count(pub(super) u64);

impl Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at) % 3 == 0 {
                f.write_char('\u{202f}')?;
            }
            f.write_char(digit)?;
        }
        Ok(())
    }
}

/// Prints the requests of a span of time as a number per second.
pub(super) struct PerSecond(pub(super) u64, pub(super) Duration);

impl Display for PerSecond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.1.as_micros().max(1);
        let tenths = (u128::from(self.0) * 10_000_000 + micros / 2) / micros;
        let whole = u64::try_from(tenths / 10).unwrap_or(u64::MAX);
        if whole >= 100 { Count(whole).fmt(f) } else { write!(f, "{whole}.{}", tenths % 10) }
    }
}

/// Prints a ratio as a percentage with one decimal.
pub(super) struct Percent(pub(super) Option<u64>);

impl Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(0) => f.write_str("0 %"),
            Some(per_mille) => write!(f, "{}.{} %", per_mille / 10, per_mille % 10),
            None => f.write_str("–"),
        }
    }
}

/// Prints a time roughly, in its largest unit.
pub(super) struct About(pub(super) Duration);

impl Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0..=119 => write!(f, "{seconds} s"),
            120..=7_199 => write!(f, "{} min", seconds / 60),
            7_200..=172_799 => write!(f, "{} h", seconds / 3_600),
            _ => write!(f, "{} days", seconds / 86_400),
        }
    }
}

/// Prints a wait. A wait of ten seconds or more is rounded up to seconds.
pub(super) struct Roughly(pub(super) Duration);

impl Display for Roughly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = u64::try_from(self.0.as_nanos().div_ceil(1_000_000_000)).unwrap_or(u64::MAX);
        if seconds > 10 { Humane(Duration::from_secs(seconds)).fmt(f) } else { Humane(self.0).fmt(f) }
    }
}

/// Prints a hash of 48 bits.
pub(super) fn hash(hash: u64) -> String {
    format!("{hash:012x}")
}

/// Prints a duration in milliseconds.
pub(super) fn millis(duration: Duration) -> String {
    let micros = duration.as_micros();
    let digits = match micros {
        0..=9_999 => 2,
        10_000..=99_999 => 1,
        _ => 0,
    };
    format!("{:.digits$} ms", micros as f64 / 1_000.0)
}

/// Prints the upper bound of the bucket that holds a percentile, or a dash if the histogram has no
/// durations.
pub(super) fn bound(histogram: &HistogramSnapshot, percent: u8) -> String {
    match histogram.percentile(percent) {
        Some(bound) => format!("≤ {} ms", bound.as_micros() as f64 / 1_000.0),
        None if histogram.count() == 0 => "–".to_owned(),
        None => "> 1,000 s".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_others_is_no_markup() {
        let shown = HtmlText("<b a='1'>&\"\u{202e}\u{0}\u{1b}[2J\r\n").to_string();
        assert_eq!(shown, "&lt;b a=&#39;1&#39;&gt;&amp;&quot;\u{fffd}\u{fffd}\u{fffd}[2J\n");
    }

    #[test]
    fn percentile_of_no_durations_is_a_dash() {
        assert_eq!(bound(&HistogramSnapshot::default(), 99), "–");
    }

    #[test]
    fn milliseconds_have_three_digits() {
        let shown = [0, 4, 9_994, 12_345, 123_456].map(|us| millis(Duration::from_micros(us)));
        assert_eq!(shown, ["0.00 ms", "0.00 ms", "9.99 ms", "12.3 ms", "123 ms"]);
    }

    #[test]
    fn numbers_are_short() {
        let seconds = Duration::from_secs;
        assert_eq!(Count(1_234_567).to_string(), "1\u{202f}234\u{202f}567");
        assert_eq!((Count(0).to_string(), Count(999).to_string()), ("0".into(), "999".into()));
        assert_eq!(
            (PerSecond(1, seconds(3)).to_string(), PerSecond(1_500, seconds(1)).to_string()),
            ("0.3".into(), "1\u{202f}500".into())
        );
        assert_eq!(
            (Percent(Some(1)).to_string(), Percent(Some(1_000)).to_string(), Percent(None).to_string()),
            ("0.1 %".into(), "100.0 %".into(), "–".into())
        );
        assert_eq!(
            (About(seconds(119)).to_string(), About(seconds(7_199)).to_string()),
            ("119 s".into(), "119 min".into())
        );
        assert_eq!(
            [9_001, 10_000, 10_001, 3_589_218].map(|millis| Roughly(Duration::from_millis(millis)).to_string()),
            ["9s 1ms", "10s", "11s", "59m 50s"]
        );
        assert_eq!((About(seconds(172_799)).to_string(), About(Duration::MAX).to_string().len()), ("47 h".into(), 20));
    }
}
