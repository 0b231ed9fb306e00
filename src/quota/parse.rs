//! Prints quotas as text, and reads them from text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::builder::Quota;
use super::calendar::Weekday;
use super::spec::{Algorithm, Anchor, Oldest, Spec, UNITS_MAX};
use crate::base::calendar::{Calendar, CalendarUnit};
use crate::error::{ConfigError, ConfigErrorKind, printable};

/// The units of time, the longest first. Each unit has its length in microseconds, its name in
/// printed text, and its names in parsed text.
const UNITS: [(u64, &str, &[&str]); 6] = [
    (86_400_000_000, "day", &["day", "days", "d"]),
    (3_600_000_000, "hour", &["hour", "hours", "hr", "h"]),
    (60_000_000, "minute", &["minute", "minutes", "min", "mins", "m"]),
    (1_000_000, "second", &["second", "seconds", "sec", "secs", "s"]),
    (1_000, "millisecond", &["millisecond", "milliseconds", "ms"]),
    (1, "microsecond", &["microsecond", "microseconds", "us", "µs"]),
];

/// Further units of time in parsed text: the length in microseconds and the names. A printed quota has days instead,
/// because these months and years are not months and years of a calendar.
const LONG_UNITS: [(u64, &[&str]); 3] = [
    (7 * UNITS[0].0, &["week", "weeks", "w"]),
    (30 * UNITS[0].0, &["month", "months"]),
    (365 * UNITS[0].0, &["year", "years", "y"]),
];

/// The text of a quota that never refuses.
const UNLIMITED: &str = "unlimited";

/// The number of bytes of a unit, and the name of the unit.
type ByteUnit = (u64, &'static str);

/// The units of bytes, the largest first. The case of a unit matters, because `Mb` is a megabit.
const BYTES: [ByteUnit; 9] = [
    (1 << 40, "TiB"),
    (1_000_000_000_000, "TB"),
    (1 << 30, "GiB"),
    (1_000_000_000, "GB"),
    (1 << 20, "MiB"),
    (1_000_000, "MB"),
    (1 << 10, "KiB"),
    (1_000, "kB"),
    (1, "B"),
];

/// Reads a length of time of up to 366 days, such as `1 hour` or `30 min`.
#[cfg(any(feature = "rules", feature = "status"))]
#[allow(dead_code, reason = "a status page without a fleet reads no lengths")]
pub(crate) fn read_length(text: &str) -> Option<Duration> {
    let one: Quota = format!("1 per {text}").parse().ok()?;
    Quota::one_every(one.period()).is_ok_and(|plain| plain == one).then(|| one.period())
}

impl fmt::Display for Quota {
    /// Prints the limit, the period, the options that differ from the algorithm's defaults, and the
    /// algorithm, such as `100 per minute, burst 20, token bucket`. The text parses back to an
    /// equal quota.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spec = self.spec();
        if spec.unlimited {
            return f.write_str(UNLIMITED);
        }
        if spec.algorithm == Algorithm::Concurrency {
            write!(f, "{} at once", Amount(spec.limit, spec))?;
            return if spec.line_wait_us == 0 {
                Ok(())
            } else {
                write!(f, ", wait {}", PrintedSpan(spec.line_wait_us))
            };
        }
        let plain = Spec::new(spec.limit, spec.period_us, spec.algorithm);
        write!(f, "{} per ", Amount(spec.limit, spec))?;
        match (spec.calendar, in_units(spec.period_us)) {
            (Some(calendar), _) => write!(f, "calendar {calendar}")?,
            (None, (1, name)) => f.write_str(name)?,
            (None, (count, name)) => write!(f, "{count} {name}s")?,
        }
        if spec.burst != plain.burst {
            if spec.algorithm == Algorithm::LeakyQueue {
                write!(f, ", queue {}", Amount(spec.burst.saturating_sub(1), spec))?;
            } else {
                write!(f, ", burst {}", Amount(spec.burst, spec))?;
            }
        }
        if spec.delay_after != 0 {
            write!(f, ", delay after {}", Amount(spec.delay_after, spec))?;
        }
        let lasting = spec.lasting;
        if spec.algorithm == Algorithm::Block {
            write!(f, ", for {}", PrintedSpan(lasting.length_us))?;
        }
        if lasting.memory_us > 0 {
            let (longest, memory) = (PrintedSpan(lasting.longest_us), PrintedSpan(lasting.memory_us));
            write!(f, ", times {} up to {longest} within {memory}", lasting.factor)?;
        }
        if spec.debt_is_chosen {
            write!(f, ", debt up to {}", Amount(spec.debt, spec))?;
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
        // Prints no algorithm for a calendar, which has fixed windows only.
        if spec.calendar.is_some() { Ok(()) } else { write!(f, ", {}", spec.algorithm) }
    }
}

/// Units of a quota. Bytes are printed in the largest unit that divides their number.
struct Amount<'a>(u64, &'a Spec);

impl fmt::Display for Amount<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(units, spec) = *self;
        if !spec.in_bytes {
            return units.fmt(f);
        }
        let of = BYTES.iter().find(|(size, _)| units != 0 && units % size == 0);
        let (size, name) = of.unwrap_or(&(1, "B"));
        write!(f, "{} {name}", units / size)
    }
}

/// Returns a span of time as a whole number of the longest unit that divides it.
fn in_units(us: u64) -> (u64, &'static str) {
    let unit = UNITS.iter().find(|(length, ..)| us % length == 0);
    unit.map_or((us, "microsecond"), |(length, name, _)| (us / length, name))
}

/// Prints a span of microseconds.
struct PrintedSpan(u64);

impl fmt::Display for PrintedSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, name) = in_units(self.0);
        write!(f, "{count} {name}{}", if count == 1 { "" } else { "s" })
    }
}

impl FromStr for Quota {
    type Err = ConfigError;

    /// Reads `100/min burst 20`, `10 per 500 ms, sliding log`, `3 at once`, and everything that
    /// [`Display`](fmt::Display) prints.
    ///
    /// The limit and the period come first. The options follow in any order: an algorithm (`token bucket` if none is
    /// named), `burst N`, `queue N`, `wait TIME` for a leaky queue or a concurrency limit, `delay after N`,
    /// `debt up to N`, `from the first request`, `N buckets`, `oldest weighted|dropped|counted`, `counting denied`,
    /// `in proportion`, and for a block `for TIME` and `times N up to TIME within TIME`. A [concurrency
    /// limit](Quota::concurrent) is `N at once`. Case and commas do not matter, and `up to` may be left out of a debt.
    /// Numbers may contain `_`. A quota that [never refuses](Quota::unlimited) is `unlimited`.
    ///
    /// A week has 7 days, a month 30 days and a year 365 days, whichever day they begin on. An `M` alone is refused,
    /// because it may be a minute or a month. The windows of a [calendar](Quota::calendar) are
    /// `10000 per calendar month`, `10000 per calendar month from day 15 in Europe/Berlin`,
    /// `500 per calendar week from sunday`: a calendar day, week, month, quarter or year, the day on which each month
    /// or week begins, and a time zone.
    ///
    /// The word `requests` may follow a limit, and `a` or `an` may stand for `per`: `100 requests a minute`.
    ///
    /// A quota that [counts bytes](Quota::in_bytes) has a unit after each number of bytes:
    /// `10 MiB per hour, burst 20 MiB`. The units are `B`, the powers of 1,000 (`kB`, `MB`, `GB`, `TB`), and the powers
    /// of 1,024 (`KiB`, `MiB`, `GiB`, `TiB`). Their case matters.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.trim().eq_ignore_ascii_case(UNLIMITED) {
            return Ok(Self::unlimited());
        }
        let spaced = spaced(text);
        let lower = spaced.to_ascii_lowercase();
        let (words, written) = (lower.split_whitespace().collect(), spaced.split_whitespace().collect());
        WordReader { text, words, written, at: 0, in_bytes: false }.quota()
    }
}

/// Returns the text with one space after each word, and with `per` instead of each slash outside of a time zone's name.
fn spaced(text: &str) -> String {
    let (mut spaced, mut is_zone) = (String::with_capacity(text.len() + 8), false);
    for word in text.split(|c: char| c.is_whitespace() || matches!(c, ',' | ';')).filter(|word| !word.is_empty()) {
        if is_zone {
            spaced.push_str(word);
        } else {
            spaced.push_str(&word.replace('/', " per "));
        }
        spaced.push(' ');
        is_zone = word.eq_ignore_ascii_case("in");
    }
    spaced
}

type Changed = Result<Quota, ConfigError>;
type NumberOption = (&'static str, fn(Quota, u64) -> Changed);
type Phrase = (&'static str, fn(Quota) -> Changed);

/// The options that are followed by a number. `queue` comes before `delay after`, because a delay is compared with the
/// length of the queue.
const NUMBERS: [NumberOption; 4] =
    [("burst", Quota::burst), ("queue", Quota::queue), ("delay after", Quota::delay_after), ("debt", Quota::max_debt)];

/// The words for requests, which a limit without a unit counts. These words may be left out of a
/// text.
const COUNTED: [&str; 4] = ["requests", "request", "reqs", "req"];

const PHRASES: [Phrase; 6] = [
    ("from the first request", |quota| quota.anchor(Anchor::FirstRequest)),
    ("oldest weighted", |quota| quota.oldest(Oldest::Weighted)),
    ("oldest dropped", |quota| quota.oldest(Oldest::Dropped)),
    ("oldest counted", |quota| quota.oldest(Oldest::Counted)),
    ("counting denied", Quota::count_denied),
    ("in proportion", Quota::in_proportion),
];

/// Returns the names of the options that a quota's algorithm has.
fn options_of(quota: Quota) -> Vec<&'static str> {
    let is_option =
        |changed: Changed| changed.map_or_else(|error| error.kind() != ConfigErrorKind::NotAnOption, |_| true);
    let numbers = NUMBERS.iter().filter(|(_, set)| is_option(set(quota, 1))).map(|(name, _)| *name);
    let phrases = PHRASES.iter().filter(|(_, set)| is_option(set(quota))).map(|(name, _)| *name);
    let others = [
        ("wait", is_option(quota.max_wait(Duration::from_secs(1)))),
        ("buckets", is_option(quota.buckets(1))),
        ("times", quota.algorithm() == Algorithm::Block),
    ];
    numbers.chain(phrases).chain(others.into_iter().filter(|(_, is)| *is).map(|(name, _)| name)).collect()
}

/// If a known phrase differs from the first words by at most two letters, returns a question that suggests this
/// phrase. Otherwise returns an empty text.
fn similar(words: &[&str], known: &mut dyn Iterator<Item = &str>) -> String {
    let letters = |phrase: &str| phrase.len().div_ceil(4).min(2);
    let distances = known.filter_map(|phrase| {
        let written: Vec<&str> = words.iter().take(phrase.split(' ').count()).copied().collect();
        let written = written.join(" ").replace(['-', '_'], " ");
        // Also compares the first word as a whole, because a hyphenated phrase is one word.
        let whole = words.first().unwrap_or(&"").replace(['-', '_'], " ");
        let distance = edits(&written, phrase).min(edits(&whole, phrase));
        (distance <= letters(phrase) && !written.is_empty()).then_some((distance, phrase))
    });
    distances
        .min_by_key(|(distance, _)| *distance)
        .map_or_else(String::new, |(_, phrase)| format!(" (did you mean `{phrase}`?)"))
}

/// Counts the letters to insert, remove or replace to make both texts equal. Long texts count as different.
fn edits(one: &str, other: &str) -> usize {
    if one.len() > 40 {
        return usize::MAX;
    }
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (line, letter) in one.chars().enumerate() {
        let mut before = line;
        row[0] = line + 1;
        for (column, expected) in other.chars().enumerate() {
            let replaced = before + usize::from(letter != expected);
            before = row[column + 1];
            row[column + 1] = replaced.min(before + 1).min(row[column] + 1);
        }
    }
    row.last().copied().unwrap_or_default()
}

/// Returns the calendar unit for which price lists and other programs use this word. `mo` is a month, not a misspelt
/// `m` (a minute).
fn calendar_unit_of_others(word: &str) -> Option<CalendarUnit> {
    match word {
        "daily" => Some(CalendarUnit::Day),
        "wk" | "wks" | "weekly" => Some(CalendarUnit::Week),
        "mo" | "mos" | "mon" | "mth" | "mths" | "mnth" | "monthly" | "p1m" => Some(CalendarUnit::Month),
        "qtr" | "quarter" | "quarters" | "quarterly" => Some(CalendarUnit::Quarter),
        "yr" | "yrs" | "yearly" | "annum" | "annually" | "p1y" => Some(CalendarUnit::Year),
        _ => None,
    }
}

/// Returns whether the words after a period name a day or a place, which only windows of a calendar have.
fn says_day_or_place(words: &[&str]) -> bool {
    let is_day = |word: &&str| {
        word.starts_with(|c: char| c.is_ascii_digit()) || *word == "day" || word.parse::<Weekday>().is_ok()
    };
    match words.first().map(|word| word.trim_matches(['(', ')'])) {
        Some("calendar" | "in" | "local" | "utc") => true,
        Some("from" | "on" | "at" | "starting" | "since") => words.iter().any(is_day),
        _ => false,
    }
}

/// Prints a word in quotes. Only the beginning of a long word is printed.
struct QuotedWord<'a>(&'a str);

impl fmt::Display for QuotedWord<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(40).and_then(|(end, _)| self.0.get(..end)) {
            Some(shown) => write!(f, "`{shown}…`"),
            None => write!(f, "`{}`", self.0),
        }
    }
}

/// The words of a quota. A word that was read is empty.
struct WordReader<'a> {
    text: &'a str,
    /// In lower case.
    words: Vec<&'a str>,
    /// The words as they were written. No word is empty.
    written: Vec<&'a str>,
    /// The index of the next word.
    at: usize,
    /// True if the limit has a unit of bytes. The numbers of the options in [`NUMBERS`] must have a unit of
    /// bytes if the limit has one.
    in_bytes: bool,
}

impl<'a> WordReader<'a> {
    /// Reads the quota. Searches the text for each option, so that the options may be in any order.
    fn quota(mut self) -> Result<Quota, ConfigError> {
        let limit = self.limit()?;
        let _ = !self.in_bytes && COUNTED.iter().any(|word| self.skip(word));
        let (mut quota, is_named) = match self.skip("at once") {
            true => (Quota::checked(Spec::new(limit, 0, Algorithm::Concurrency))?, true),
            false => self.timed(limit)?,
        };
        for (option, set) in NUMBERS {
            if self.find(option) {
                if option == "debt" {
                    self.skip("up to");
                }
                let amount = self.amount(option)?;
                quota = set(quota, amount)?;
            }
        }
        for (option, set) in PHRASES {
            if self.find(option) {
                quota = set(quota)?;
            }
        }
        if self.find("wait") {
            let wait = self.period()?;
            quota = quota.max_wait(wait)?;
        }
        if self.find("buckets") {
            self.at = self.at.saturating_sub(2); // the number comes first
            let count = self.number("the number before `buckets`")?;
            quota = quota.buckets(u32::try_from(count).unwrap_or(u32::MAX))?;
        }
        if self.find("times") {
            let factor = self.number("the number after `times`")?;
            self.expect("up to")?;
            let longest = self.period()?;
            self.expect("within")?;
            quota = quota.growing(u32::try_from(factor).unwrap_or(u32::MAX), longest, self.period()?)?;
        }
        match self.words.iter().position(|word| !word.is_empty()) {
            Some(at) => Err(self.unknown(at, quota, is_named)),
            None if self.in_bytes => quota.in_bytes(),
            None => Ok(quota),
        }
    }

    /// Returns the error for a word that is left after all options were read.
    fn unknown(&self, at: usize, quota: Quota, is_named: bool) -> ConfigError {
        let algorithms: Vec<&str> =
            if is_named { Vec::new() } else { Algorithm::timed().map(Algorithm::as_str).collect() };
        let options = options_of(quota);
        let rest = self.words.get(at..).unwrap_or_default();
        let mut hint = similar(rest, &mut algorithms.iter().chain(&options).copied());
        let (first, own, options) = (*rest.first().unwrap_or(&""), quota.algorithm(), options.join(", "));
        let word = QuotedWord(first);
        if hint.is_empty() && quota.calendar_windows().is_some() {
            hint = "; a first day and a zone follow the unit, as in `month from day 15 in Europe/Berlin`".to_owned();
        } else if hint.is_empty() && says_day_or_place(rest) {
            return self.error(&format!(
                "{word} belongs to windows of a calendar: `per calendar month from day 15 in Europe/Berlin`"
            ));
        }
        let options = if options.is_empty() { "which has none".to_owned() } else { options };
        self.error(&match &*algorithms.join(", ") {
            "" => format!("{word} is not an option of a {own} ({options}), or is given twice{hint}"),
            all => format!(
                "{word} is neither an algorithm ({all}) nor an option of a {own} ({options}), or is given twice{hint}"
            ),
        })
    }

    /// Reads the period and the algorithm of a quota whose limit was read. Returns whether the algorithm is named.
    fn timed(&mut self, limit: u64) -> Result<(Quota, bool), ConfigError> {
        if !["per", "a", "an"].iter().any(|word| self.skip(word)) {
            return Err(self.without_per(limit));
        }
        if self.skip("calendar") {
            return self.of_calendar(limit);
        }
        let period = self.period()?;
        let mut algorithms = Algorithm::timed().filter(|algorithm| self.find(algorithm.as_str()));
        let named = algorithms.next();
        if algorithms.next().is_some() {
            return Err(self.error("it names two algorithms"));
        }
        let quota = match named.unwrap_or(Algorithm::TokenBucket) {
            Algorithm::Block if self.find("for") => Quota::block(limit, period, self.period()?)?,
            Algorithm::Block => return Err(self.error("the length of the block is missing, such as `for 1 h`")),
            algorithm => Quota::build(limit, period, algorithm)?,
        };
        Ok((quota, named.is_some()))
    }

    /// Returns the error for a text that has no `per` after the limit.
    fn without_per(&mut self, limit: u64) -> ConfigError {
        let is_in_flight = ["in flight", "at a time", "in parallel"].iter().any(|phrase| self.is_next(phrase));
        let Some(word) = self.next() else { return self.error("`per` is missing") };
        if is_in_flight || ["concurrent", "concurrently", "parallel", "simultaneous"].contains(&word) {
            return self.error(&format!("to limit the requests in flight, write `{limit} at once`"));
        }
        let is_part = word.len() == 3 && word.bytes().all(|byte| byte.is_ascii_digit());
        if is_part && self.text.contains(&format!("{limit},{word}")) {
            let number = self.text.trim_start().chars().take_while(|c| c.is_ascii_digit() || *c == ',').take(40);
            let number: String = number.filter(|c| *c != ',').collect();
            return self.error(&format!("a number has no commas: write `{number}`"));
        }
        self.error(&format!(
            "{} stands where `per` should be, as in `per minute` or `per calendar month`",
            QuotedWord(word)
        ))
    }

    /// Reads the windows of a quota of the calendar.
    fn of_calendar(&mut self, limit: u64) -> Result<(Quota, bool), ConfigError> {
        let unit = self.next().unwrap_or_default();
        let Some(known) = CalendarUnit::ALL.iter().find(|known| known.as_str() == unit) else {
            let units = CalendarUnit::ALL.map(CalendarUnit::as_str);
            let hint = similar(&[unit], &mut units.into_iter());
            return Err(self.error(&format!(
                "{} stands where `{}` should be{hint}",
                QuotedWord(unit),
                units.join("`, `")
            )));
        };
        let mut calendar = Calendar::of(*known);
        if self.skip("from day") {
            let day = self.number("the day after `from day`")?;
            calendar = calendar.from_day(u8::try_from(day).unwrap_or(u8::MAX))?;
        } else if let Some(day) = self.weekday() {
            self.at += 2;
            calendar = calendar.from_weekday(day)?;
        }
        if !self.is_next("in proportion") && self.skip("in") {
            let zone = self.next().ok_or_else(|| self.error("a time zone is missing after `in`"))?;
            calendar = calendar.zone(self.written.get(self.at - 1).copied().unwrap_or(zone))?;
        }
        let others = Algorithm::timed().filter(|algorithm| *algorithm != Algorithm::FixedWindow);
        if let Some(other) = others.into_iter().find(|algorithm| self.find(algorithm.as_str())) {
            return Err(self.error(&format!("a calendar has fixed windows: leave out `{other}`")));
        }
        self.find(Algorithm::FixedWindow.as_str());
        Ok((Quota::calendar(limit, calendar)?, true))
    }

    /// Returns the day of the week of the next words, such as `from sunday`, and marks them as read.
    fn weekday(&mut self) -> Option<Weekday> {
        let words = self.words.get_mut(self.at..self.at + 2)?;
        let day = words.get(1).filter(|_| words.first() == Some(&"from"))?.parse().ok()?;
        words.fill("");
        Some(day)
    }

    fn is_next(&self, phrase: &str) -> bool {
        let words = phrase.split(' ');
        let next = self.words.get(self.at..).unwrap_or_default().iter().copied();
        next.take(words.clone().count()).eq(words)
    }

    /// Reads a phrase anywhere in the text. Returns whether the text has the phrase.
    fn find(&mut self, phrase: &str) -> bool {
        let phrase: Vec<&str> = phrase.split(' ').collect();
        let found = self.words.windows(phrase.len()).position(|words| words == phrase);
        if let Some(at) = found {
            self.at = at + phrase.len();
            self.words[at..self.at].fill("");
        }
        found.is_some()
    }

    /// Reads a phrase if the phrase comes next. Returns whether the phrase was read.
    fn skip(&mut self, phrase: &str) -> bool {
        let words: Vec<&str> = phrase.split(' ').collect();
        let end = self.at + words.len();
        let next = self.words.get_mut(self.at..end).filter(|next| **next == *words);
        let is_next = next.is_some();
        if let Some(next) = next {
            next.fill("");
            self.at = end;
        }
        is_next
    }

    fn period(&mut self) -> Result<Duration, ConfigError> {
        let word = self.next().ok_or_else(|| self.error("a period is missing, such as `min` or `10 s`"))?;
        let digits = word.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(word.len());
        let (count, unit) = word.split_at(digits);
        let count = if count.is_empty() { 1 } else { self.parse(count)? };
        let unit = match unit {
            "" => {
                let next = self.next();
                next.ok_or_else(|| {
                    self.error(&format!("a unit of time is missing after `{count}`, such as `{count} s`"))
                })?
            }
            unit => unit,
        };
        // Some users write `M` for a minute, and others for a month.
        if unit == "m" && self.written.get(self.at.saturating_sub(1)).is_some_and(|written| written.ends_with('M')) {
            return Err(self.error("`M` may mean minutes or months: write `min`, or `calendar month`"));
        }
        let units = UNITS.iter().map(|(length, _, names)| (length, *names));
        let units = units.chain(LONG_UNITS.iter().map(|(length, names)| (length, *names)));
        let Some((length, _)) = units.into_iter().find(|(_, names)| names.contains(&unit)) else {
            let names = UNITS.iter().map(|(_, _, names)| *names).chain(LONG_UNITS.iter().map(|(_, names)| *names));
            let hint = match calendar_unit_of_others(unit) {
                Some(meant) => format!(" (did you mean `calendar {}`?)", meant.as_str()),
                None => similar(&[unit], &mut names.flatten().copied().chain(["calendar"])),
            };
            return Err(self.error(&format!(
                "{} is not a unit of time: year, month (30 days), week, d, h, min, s, ms, µs, or `calendar month`{}",
                QuotedWord(unit),
                hint
            )));
        };
        let micros = count.checked_mul(*length).ok_or_else(|| self.error("the period is too long"))?;
        Ok(Duration::from_micros(micros))
    }

    fn next(&mut self) -> Option<&'a str> {
        let word = std::mem::take(self.words.get_mut(self.at)?);
        self.at += 1;
        Some(word).filter(|word| !word.is_empty())
    }

    fn expect(&mut self, phrase: &str) -> Result<(), ConfigError> {
        for word in phrase.split(' ') {
            match self.next() {
                Some(found) if found == word => {}
                Some(found) => {
                    return Err(self.error(&format!("{} stands where `{phrase}` should be", QuotedWord(found))));
                }
                None => return Err(self.error(&format!("`{phrase}` is missing"))),
            }
        }
        Ok(())
    }

    /// Reads the limit. The unit of the limit decides whether the quota counts bytes.
    fn limit(&mut self) -> Result<u64, ConfigError> {
        let (number, unit) = self.number_and_unit("a limit")?;
        self.in_bytes = unit.is_some();
        self.bytes(number, unit)
    }

    /// Reads the number after an option. The number must have a unit of bytes if the limit has a unit of bytes, and
    /// only then.
    fn amount(&mut self, option: &str) -> Result<u64, ConfigError> {
        let (number, unit) = self.number_and_unit(&format!("the number after `{option}`"))?;
        if unit.is_some() == self.in_bytes {
            return self.bytes(number, unit);
        }
        Err(self.error(&match unit {
            None => {
                format!(
                    "the limit counts bytes: write a unit after `{option} {number}`, such as `{option} {number} kB`"
                )
            }
            Some((_, unit)) => {
                format!("`{option}` counts {unit}, so the limit needs a unit of bytes, too")
            }
        }))
    }

    /// Reads a number and the unit of bytes after it, if there is a unit. A space may separate them.
    fn number_and_unit(&mut self, what: &str) -> Result<(u64, Option<ByteUnit>), ConfigError> {
        let written = self.written.get(self.at).copied().unwrap_or_default();
        let word = self.next().ok_or_else(|| self.error(&format!("{what} is missing")))?;
        let digits = word.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(word.len());
        if let (Some(number), Some(unit)) = (word.get(..digits), written.get(digits..)) {
            if !number.is_empty() && !unit.is_empty() {
                return match self.byte_unit(unit)? {
                    Some(unit) => Ok((self.parse(number)?, Some(unit))),
                    None => self.parse(word).map(|number| (number, None)),
                };
            }
        }
        let number = self.parse(word)?;
        let next = self.written.get(self.at).filter(|_| self.words.get(self.at).is_some_and(|word| !word.is_empty()));
        let next = next.copied().unwrap_or_default();
        let unit = self.byte_unit(next)?;
        if unit.is_some() {
            self.next();
        }
        Ok((number, unit))
    }

    /// Returns the unit of bytes with this name.
    ///
    /// # Errors
    /// Returns an error if the word looks like a unit of bytes but could mean another
    /// unit.
    fn byte_unit(&self, word: &str) -> Result<Option<ByteUnit>, ConfigError> {
        if let Some(unit) = BYTES.iter().find(|(_, name)| *name == word) {
            return Ok(Some(*unit));
        }
        let lower = word.to_ascii_lowercase();
        let known = ["byte", "bytes", "kilobytes", "megabytes", "gigabytes", "terabytes", "pb", "pib"];
        let looks_like_one = known.contains(&&*lower) || BYTES.iter().any(|(_, name)| name.eq_ignore_ascii_case(word));
        if !looks_like_one {
            return Ok(None);
        }
        Err(self.error(&format!(
            "`{word}` is not a unit of bytes (case matters): B, kB, MB, GB or TB (powers of 1000), KiB, MiB, GiB or \
             TiB (powers of 1024)"
        )))
    }

    fn bytes(&self, number: u64, unit: Option<(u64, &str)>) -> Result<u64, ConfigError> {
        let Some((size, name)) = unit else { return Ok(number) };
        number.checked_mul(size).ok_or_else(|| {
            let message = format!("{number} {name} is too large: at most {UNITS_MAX} bytes");
            ConfigError::new(ConfigErrorKind::Range, message)
        })
    }

    fn number(&mut self, what: &str) -> Result<u64, ConfigError> {
        let word = self.next().ok_or_else(|| self.error(&format!("{what} is missing")))?;
        self.parse(word)
    }

    fn parse(&self, word: &str) -> Result<u64, ConfigError> {
        let digits = Some(word.replace('_', "")).filter(|digits| !digits.starts_with('+'));
        let number = digits.and_then(|digits| digits.parse().ok());
        let last = word.strip_suffix(['r', 'k', 'K', 'm', 'M']);
        let hint = match last.filter(|first| first.bytes().all(|digit| digit.is_ascii_digit())) {
            Some(_) if word.ends_with('r') => ": nginx's `5r/s` is `5/s, gcra`",
            Some(_) => ": write the number out, such as 1000",
            None if word.contains('.') => ": use a smaller unit",
            None => "",
        };
        number.ok_or_else(|| self.error(&format!("{} is not a whole number that fits{hint}", QuotedWord(word))))
    }

    fn error(&self, why: &str) -> ConfigError {
        let rest = format!(
            "` is not a quota: {why}; write it like `100/min burst 20`, `5 per 10 s, sliding log` or `3 at once`"
        );
        // The printed line has fewer than 400 characters, of which the quoted text has at most 80.
        let room = 398_usize.saturating_sub(rest.chars().count()).min(80);
        let text: String = self.text.chars().take(room).collect();
        let message = format!("`{text}{rest}");
        ConfigError::new(ConfigErrorKind::Syntax, message.chars().map(printable).collect::<String>())
    }
}
