//! Printing quotas as text, and reading them from text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::builder::Quota;
use super::error::{QuotaError, QuotaErrorKind};
use super::spec::{Algorithm, Anchor, Oldest, Spec};

/// The units of time, the longest first: the microseconds, the name for printing, and the names for
/// reading.
const UNITS: [(u64, &str, &[&str]); 6] = [
    (86_400_000_000, "day", &["day", "days", "d"]),
    (3_600_000_000, "hour", &["hour", "hours", "hr", "h"]),
    (60_000_000, "minute", &["minute", "minutes", "min", "mins", "m"]),
    (1_000_000, "second", &["second", "seconds", "sec", "secs", "s"]),
    (1_000, "millisecond", &["millisecond", "milliseconds", "ms"]),
    (1, "microsecond", &["microsecond", "microseconds", "us", "µs"]),
];

impl Algorithm {
    /// All algorithms.
    /// Returns the algorithm's name as it is printed and read.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::TokenBucket => "token bucket",
            Self::StepBucket => "step bucket",
            Self::Gcra => "gcra",
            Self::LeakyBucket => "leaky bucket",
            Self::LeakyQueue => "leaky queue",
            Self::FixedWindow => "fixed window",
            Self::SlidingWindow => "sliding window",
            Self::SlidingLog => "sliding log",
            Self::Block => "block",
            Self::Meter => "meter",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

impl fmt::Display for Quota {
    /// Prints what differs from the algorithm's defaults, such as
    /// `100 per minute, burst 20, token bucket`. The text parses back to an equal quota.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = self.spec();
        let plain = Spec::new(spec.limit, spec.period_us, spec.algorithm);
        write!(f, "{} per ", spec.limit)?;
        match in_units(spec.period_us) {
            (1, name) => f.write_str(name)?,
            (count, name) => write!(f, "{count} {name}s")?,
        }
        if spec.burst != plain.burst {
            if spec.algorithm == Algorithm::LeakyQueue {
                write!(f, ", queue {}", spec.burst.saturating_sub(1))?;
            } else {
                write!(f, ", burst {}", spec.burst)?;
            }
        }
        if spec.delay_after != 0 {
            write!(f, ", delay after {}", spec.delay_after)?;
        }
        let lasting = spec.lasting;
        if spec.algorithm == Algorithm::Block {
            write!(f, ", for {}", Span(lasting.length_us))?;
        }
        if lasting.memory_us > 0 {
            let (longest, memory) = (Span(lasting.longest_us), Span(lasting.memory_us));
            write!(f, ", times {} up to {longest} within {memory}", lasting.factor)?;
        }
        if spec.debt != spec.algorithm.debt_of(spec.burst) {
            write!(f, ", debt {}", spec.debt)?;
        }
        if spec.anchor == Anchor::FirstRequest {
            f.write_str(", from the first request")?;
        }
        if spec.buckets != 1 {
            write!(f, ", {} buckets", spec.buckets)?;
        }
        match spec.oldest {
            Oldest::Weighted => {}
            Oldest::Dropped => f.write_str(", oldest dropped")?,
            Oldest::Counted => f.write_str(", oldest counted")?,
        }
        if spec.count_denied {
            f.write_str(", counting denied")?;
        }
        if spec.proportional {
            f.write_str(", in proportion")?;
        }
        write!(f, ", {}", spec.algorithm)
    }
}

/// A span of time, printed in the longest unit of which it is a whole number.
fn in_units(us: u64) -> (u64, &'static str) {
    let unit = UNITS.iter().find(|(length, ..)| us % length == 0);
    unit.map_or((us, "microsecond"), |(length, name, _)| (us / length, name))
}

/// Makes a span of microseconds.
struct Span(u64);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, name) = in_units(self.0);
        write!(f, "{count} {name}{}", if count == 1 { "" } else { "s" })
    }
}

impl FromStr for Quota {
    type Err = QuotaError;

    /// Reads `100/min burst 20`, `10 per 500 ms, sliding log`, and everything that
    /// [`Display`](fmt::Display) prints.
    ///
    /// The limit and the period come first, then in any order: an algorithm (`token bucket` if none
    /// is named), `burst N`, `queue N`, `delay after N`, `debt N`, `from the first request`,
    /// `N buckets`, `oldest weighted|dropped|counted`, `counting denied`, `in proportion`, and for
    /// a block `for TIME` and `times N up to TIME within TIME`. Case and commas do not matter.
    /// Numbers may contain `_`.
    fn from_str(text: &str) -> Result<Self, QuotaError> {
        let lower = text.to_ascii_lowercase().replace('/', " per ").replace([',', ';'], " ");
        let words: Vec<&str> = lower.split_whitespace().collect();
        Reader { text, words: &words }.quota()
    }
}

/// The words that are not read yet.
struct Reader<'a> {
    text: &'a str,
    words: &'a [&'a str],
}

impl<'a> Reader<'a> {
    fn quota(mut self) -> Result<Quota, QuotaError> {
        let limit = self.number("a limit")?;
        self.expect("per")?;
        let period = self.period()?;
        let options = self.words;
        let quota = build(self.algorithm()?, limit, period)?;
        self.words = options;
        self.options(quota)
    }

    fn period(&mut self) -> Result<Duration, QuotaError> {
        let word = self.next().ok_or_else(|| self.error("a period is missing, such as `min` or `10 s`"))?;
        let digits = word.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(word.len());
        let (count, unit) = word.split_at(digits);
        let count = if count.is_empty() { 1 } else { self.parse(count)? };
        let unit = if unit.is_empty() { self.next().unwrap_or_default() } else { unit };
        let Some((length, ..)) = UNITS.iter().find(|(_, _, names)| names.contains(&unit)) else {
            return Err(self.error(&format!("`{unit}` is not a unit of time: d, h, min, s, ms or µs")));
        };
        let micros = count.checked_mul(*length).ok_or_else(|| self.error("the period is too long"))?;
        Ok(Duration::from_micros(micros))
    }

    /// Finds the algorithm among the options, because the other options depend on it.
    fn algorithm(&self) -> Result<Algorithm, QuotaError> {
        let mut found = None;
        for algorithm in Algorithm::ALL {
            let name: Vec<&str> = algorithm.words().split(' ').collect();
            if self.words.windows(name.len()).any(|words| words == name) && found.replace(algorithm).is_some() {
                return Err(self.error("it names two algorithms"));
            }
        }
        Ok(found.unwrap_or(Algorithm::TokenBucket))
    }

    fn options(mut self, mut quota: Quota) -> Result<Quota, QuotaError> {
        let name: Vec<&str> = quota.algorithm().words().split(' ').collect();
        let (mut debt, mut delay_after) = (None, None); // compared with the capacity, which may come later in the text
        let (mut lasting, mut growing) = (None, None); // compared with each other
        while let Some(first) = self.words.first().copied() {
            if self.words.starts_with(&name) {
                self.words = &self.words[name.len()..];
                continue;
            }
            self.next();
            quota = match first {
                "burst" => quota.burst(self.number("a burst")?)?,
                "queue" => quota.queue(self.number("a length")?)?,
                "debt" => {
                    debt = Some(self.number("a debt")?);
                    quota
                }
                "delay" => {
                    self.expect("after")?;
                    delay_after = Some(self.number("a number of requests")?);
                    quota
                }
                "for" => {
                    lasting = Some(self.period()?);
                    quota
                }
                "times" => {
                    let factor = u32::try_from(self.number("a factor")?).unwrap_or(u32::MAX);
                    self.expect("up")?;
                    self.expect("to")?;
                    let longest = self.period()?;
                    self.expect("within")?;
                    growing = Some((factor, longest, self.period()?));
                    quota
                }
                "from" => {
                    self.expect("the")?;
                    self.expect("first")?;
                    self.expect("request")?;
                    quota.anchor(Anchor::FirstRequest)?
                }
                "counting" => {
                    self.expect("denied")?;
                    quota.count_denied()?
                }
                "in" => {
                    self.expect("proportion")?;
                    quota.in_proportion()?
                }
                "oldest" => quota.oldest(match self.next() {
                    Some("weighted") => Oldest::Weighted,
                    Some("dropped") => Oldest::Dropped,
                    Some("counted") => Oldest::Counted,
                    _ => return Err(self.error("`oldest` is followed by weighted, dropped or counted")),
                })?,
                count if self.words.first() == Some(&"buckets") => {
                    self.next();
                    let count = u32::try_from(self.parse(count)?).unwrap_or(u32::MAX);
                    quota.buckets(count)?
                }
                other => return Err(self.error(&format!("`{other}` is not an option of a quota"))),
            };
        }
        match lasting {
            Some(lasting) => quota = quota.lasting(lasting)?,
            None if quota.algorithm() == Algorithm::Block => {
                return Err(self.error("a block lasts for a time, which is missing, such as `for 1 h`"));
            }
            None => {}
        }
        if let Some((factor, longest, memory)) = growing {
            quota = quota.growing(factor, longest, memory)?;
        }
        if let Some(n) = delay_after {
            quota = quota.delay_after(n)?;
        }
        match debt {
            Some(units) => quota.max_debt(units),
            None => Ok(quota),
        }
    }

    fn next(&mut self) -> Option<&'a str> {
        let (first, rest) = self.words.split_first()?;
        self.words = rest;
        Some(first)
    }

    fn expect(&mut self, word: &str) -> Result<(), QuotaError> {
        match self.next() {
            Some(found) if found == word => Ok(()),
            Some(found) => Err(self.error(&format!("`{word}` was expected where `{found}` stands"))),
            None => Err(self.error(&format!("`{word}` is missing at the end"))),
        }
    }

    fn number(&mut self, what: &str) -> Result<u64, QuotaError> {
        let word = self.next().ok_or_else(|| self.error(&format!("{what} is missing")))?;
        self.parse(word)
    }

    fn parse(&self, word: &str) -> Result<u64, QuotaError> {
        let plain = word.replace('_', "");
        if plain.starts_with('+') {
            return Err(self.error(&format!("`{word}` is not a whole number")));
        }
        plain.parse().map_err(|_| self.error(&format!("`{word}` is not a whole number that fits")))
    }

    fn error(&self, why: &str) -> QuotaError {
        let text: String = self.text.chars().take(80).collect();
        QuotaError::new(
            QuotaErrorKind::Syntax,
            format!("`{text}` is not a quota: {why}; write it like `100/min burst 20` or `5 per 10 s, sliding log`"),
        )
    }
}

fn build(algorithm: Algorithm, limit: u64, period: Duration) -> Result<Quota, QuotaError> {
    match algorithm {
        Algorithm::SlidingLog => Quota::large_sliding_log(limit, period),
        Algorithm::Block => Quota::block(limit, period, Duration::from_secs(1)), // until `for` is read
        _ => Quota::build(limit, period, algorithm),
    }
}
