//! The text format of Prometheus, version 0.0.4.

use std::fmt::{self, Write};
use std::time::Duration;

use smallvec::SmallVec;

use super::histogram::HistogramSnapshot;
use super::series::{MetricKind, Sink, write_all};
use super::snapshot::StatsSnapshot;

/// Writes all metrics.
pub(super) fn text(stats: &StatsSnapshot) -> String {
    let mut text = Exposition { text: String::with_capacity(8_192), name: "" };
    write_all(&mut text, stats);
    text.text
}

/// The text so far, and the name of the metric that is being written.
struct Exposition {
    text: String,
    name: &'static str,
}

impl Sink for Exposition {
    fn begin(&mut self, name: &'static str, kind: MetricKind, help: &'static str) {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        self.name = name;
        self.text.push_str(&format!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    fn sample(&mut self, labels: &[(&'static str, &str)], value: u64) {
        self.line("", labels, format_args!("{value}"));
    }

    fn seconds(&mut self, time: Duration) {
        self.line("", &[], format_args!("{}", Seconds(time)));
    }

    fn histogram(&mut self, policy: Option<&str>, histogram: &HistogramSnapshot) {
        let own = policy.map(|policy| ("policy", policy));
        let with_bound = |bound| own.into_iter().chain([("le", bound)]).collect::<SmallVec<[_; 2]>>();
        for ((_, bound), count) in histogram.cumulative() {
            self.line("_bucket", &with_bound(bound), format_args!("{count}"));
        }
        let count = histogram.count();
        self.line("_bucket", &with_bound("+Inf"), format_args!("{count}"));
        self.line("_sum", own.as_slice(), format_args!("{}", Seconds(histogram.sum())));
        self.line("_count", own.as_slice(), format_args!("{count}"));
    }
}

impl Exposition {
    fn line(&mut self, suffix: &str, labels: &[(&str, &str)], value: fmt::Arguments<'_>) {
        let _ = self.try_line(suffix, labels, value); // writing to a string does not fail
    }

    fn try_line(&mut self, suffix: &str, labels: &[(&str, &str)], value: fmt::Arguments<'_>) -> fmt::Result {
        write!(self.text, "{}{suffix}", self.name)?;
        for (at, (label, text)) in labels.iter().enumerate() {
            write!(self.text, "{}{label}=\"{}\"", if at == 0 { '{' } else { ',' }, Escaped(text))?;
        }
        writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" })
    }
}

/// A duration in seconds, to the microsecond.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}", self.0.as_secs(), self.0.subsec_micros())
    }
}

/// A label's value, escaped as the format requires.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            other => f.write_char(other),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::histogram::Histogram;
    use super::*;

    fn text() -> Exposition {
        Exposition { text: String::new(), name: "name" }
    }

    #[test]
    fn label_is_escaped_and_stays_on_its_line() {
        let mut text = text();
        text.sample(&[("a", "\"}\n\\x{<b>ü\r"), ("b", "")], 7);
        assert_eq!(text.text, "name{a=\"\\\"}\\n\\\\x{<b>ü\r\",b=\"\"} 7\n");
    }

    #[test]
    fn histogram_has_cumulative_buckets_a_sum_and_a_count() {
        let histogram = Histogram::default();
        [50, 250, 30_000_000].into_iter().for_each(|us| histogram.record(Duration::from_micros(us)));
        let mut text = text();
        text.histogram(Some("client"), &histogram.snapshot());
        let lines: Vec<&str> = text.text.lines().collect();
        assert_eq!(lines.len(), 18);
        assert_eq!(lines[0], "name_bucket{policy=\"client\",le=\"0.0001\"} 1");
        assert_eq!(lines[10], "name_bucket{policy=\"client\",le=\"10\"} 2");
        assert_eq!(lines[14], "name_bucket{policy=\"client\",le=\"1000\"} 3");
        assert_eq!(lines[15], "name_bucket{policy=\"client\",le=\"+Inf\"} 3");
        assert_eq!(lines[16..], ["name_sum{policy=\"client\"} 30.000300", "name_count{policy=\"client\"} 3"]);
    }
}
