//! Times of the week at which a rule applies.

use std::time::Duration;

use super::problem::{Quoted, similar};
use crate::base::time::{CLOCK_US_MAX, Timestamp};
use crate::base::zone::{UnknownZone, Zone};

const DAY: u32 = 24 * 60;

const WEEK: u32 = 7 * DAY;

/// The minutes from the beginning of the week, a Monday, to the Unix epoch, a Thursday.
const EPOCH: i64 = 3 * DAY as i64;

const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];

/// Times of each week.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Times {
    /// The spans of each zone, at least one.
    zones: Vec<ZoneTimes>,
}

/// Times of each week in one zone.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ZoneTimes {
    zone: Zone,
    /// The first minute of each span, and the minute after the span, counted from Monday 00:00 in the zone. There is at
    /// least one span. The spans are sorted, and do not overlap or touch each other.
    spans: Vec<(u32, u32)>,
}

/// The maximum number of steps in the search for the instant at which a rule starts or stops
/// applying. Each step goes to the next change in any of the zones.
const CHANGES_MAX: usize = 100;

impl Times {
    /// Reads `mon-fri 08:00-18:00 +01:00` or `mon-fri 08:00-18:00 Europe/Berlin`.
    ///
    /// # Errors
    /// Returns an error that says what is wrong and what to write.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let lower = text.to_ascii_lowercase();
        let words: Vec<&str> = lower.split([' ', ',']).filter(|word| !word.is_empty()).collect();
        let Some((last, before)) = words.split_last() else {
            return Err("it is empty: write it like `mon-fri 08:00-18:00 +01:00`".to_owned());
        };
        let (zone, offset) = zone_or_offset(last)?;
        let (mut days, mut clock) = (Vec::new(), None);
        for word in before {
            if word.starts_with(|c: char| c.is_ascii_digit()) {
                if clock.replace(times_of_day(word)?).is_some() {
                    return Err("it has two times: write a list of texts with one time each".to_owned());
                }
            } else {
                days.extend(days_of(word)?);
            }
        }
        if days.is_empty() {
            if clock.is_none() {
                return Err(
                    "it has neither days nor times before the offset: write it like `mon-fri 08:00-18:00 +01:00`"
                        .to_owned(),
                );
            }
            days.extend(0..7);
        }
        let (begin, end) = clock.unwrap_or((0, DAY));
        let length = if begin < end { end - begin } else { end + DAY - begin };
        let spans = days.into_iter().map(|day| {
            let local = i64::from(day * DAY + begin) - offset;
            (u32::try_from(local.rem_euclid(i64::from(WEEK))).unwrap_or(0), length)
        });
        let times = Self { zones: vec![ZoneTimes::of(zone, spans.collect())] };
        if times.is_always() { Err("`time` includes every time: leave it out".to_owned()) } else { Ok(times) }
    }

    /// Returns times that include each of the given times.
    pub(super) fn any_of<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut zones: Vec<ZoneTimes> = Vec::new();
        for times in all.into_iter().flat_map(|times| &times.zones) {
            match zones.iter_mut().find(|known| known.zone == times.zone) {
                Some(known) => {
                    let spans = known.spans.iter().chain(&times.spans);
                    *known = ZoneTimes::of(times.zone, spans.map(|(begin, end)| (*begin, end - begin)).collect());
                }
                None => zones.push(times.clone()),
            }
        }
        Self { zones }
    }

    fn is_always(&self) -> bool {
        self.zones.iter().any(ZoneTimes::is_always)
    }

    /// Returns whether an instant is within these times.
    pub(super) fn contains(&self, now: Timestamp) -> bool {
        self.zones.iter().any(|times| times.span_at(times.minute(now)).is_some())
    }

    /// Returns whether these times include all of `other`. Times in different zones are not compared.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let is_covered = |inner: &ZoneTimes| {
            let own = self.zones.iter().find(|outer| outer.zone == inner.zone);
            own.is_some_and(|outer| outer.covers(inner))
        };
        self.is_always() || other.zones.iter().all(is_covered)
    }

    /// Returns the time until a rule with these times starts or stops applying, or `None` if it never does.
    pub(super) fn changes_in(&self, now: Timestamp) -> Option<Duration> {
        if self.is_always() {
            return None;
        }
        let (applies, mut then) = (self.contains(now), now);
        for _ in 0..CHANGES_MAX {
            then = self.zones.iter().filter_map(|times| times.next_change(then)).min()?;
            if self.contains(then) != applies {
                break;
            }
        }
        Some(then.saturating_since(now))
    }
}

impl ZoneTimes {
    /// Makes times from spans. Each span is given by its first minute and its length in minutes, which is at most a
    /// week.
    fn of(zone: Zone, spans: Vec<(u32, u32)>) -> Self {
        // A span that crosses the end of the week becomes two spans.
        let split = spans.into_iter().flat_map(|(begin, length)| {
            let end = begin + length;
            [(begin, end.min(WEEK)), (0, end.saturating_sub(WEEK))]
        });
        let mut split: Vec<(u32, u32)> = split.filter(|(begin, end)| begin < end).collect();
        split.sort_unstable();
        let mut spans: Vec<(u32, u32)> = Vec::new();
        for (begin, end) in split {
            match spans.last_mut().filter(|last| begin <= last.1) {
                Some(last) => last.1 = last.1.max(end),
                None => spans.push((begin, end)),
            }
        }
        Self { zone, spans }
    }

    fn is_always(&self) -> bool {
        self.spans == [(0, WEEK)]
    }

    /// Returns whether these times include all of `other`.
    fn covers(&self, other: &Self) -> bool {
        other.spans.iter().all(|(begin, end)| self.span_at(*begin).is_some_and(|(_, last)| *end <= last))
    }

    /// Returns the next instant at which a span begins or ends, or an earlier instant at which the zone changes its
    /// offset. Returns `None` if there is no such instant.
    fn next_change(&self, now: Timestamp) -> Option<Timestamp> {
        let minute = self.minute(now);
        let first = self.spans.first()?;
        let change = match self.span_at(minute) {
            _ if self.is_always() => return None,
            // The span continues in the next week.
            Some((_, WEEK)) if first.0 == 0 => WEEK + first.1,
            Some((_, end)) => end,
            None => self.spans.iter().map(|(begin, _)| *begin).find(|begin| *begin > minute).unwrap_or(WEEK + first.0),
        };
        let now_s = seconds(now);
        let whole = 60 * i64::from(change - minute);
        let then_s = now_s + whole - (now_s + self.zone.offset_s(now_s)).rem_euclid(60);
        let then_s = self.zone.change_of_offset(now_s, then_s).unwrap_or(then_s);
        Some(Timestamp::from_micros(u64::try_from(then_s).unwrap_or(0).saturating_mul(1_000_000)))
    }

    /// Returns the minute of the week in this zone.
    fn minute(&self, now: Timestamp) -> u32 {
        let now_s = seconds(now);
        let minutes = (now_s + self.zone.offset_s(now_s)).div_euclid(60) + EPOCH;
        u32::try_from(minutes.rem_euclid(i64::from(WEEK))).unwrap_or(0)
    }

    fn span_at(&self, minute: u32) -> Option<(u32, u32)> {
        let after = self.spans.partition_point(|(begin, _)| *begin <= minute);
        let last = self.spans.get(after.checked_sub(1)?)?;
        (minute < last.1).then_some(*last)
    }
}

/// Returns an instant in seconds. An instant after the latest time of limiters' clocks counts as that latest time.
fn seconds(now: Timestamp) -> i64 {
    (now.as_micros().min(CLOCK_US_MAX) / 1_000_000) as i64 // below 2^33
}

/// Reads a time zone or an offset from UTC. The offset is returned in minutes.
fn zone_or_offset(word: &str) -> Result<(Zone, i64), String> {
    if !word.contains('/') {
        return offset(word).map(|offset| (Zone::UTC, offset));
    }
    match Zone::named(word) {
        Ok(zone) => Ok((zone, 0)),
        Err(UnknownZone::NotBuilt) => Err(format!(
            "time zones such as {} are not known without the crate's feature `time-zones`: end the text with the \
             offset from UTC, such as `+01:00`, which does not follow daylight saving time",
            Quoted(word)
        )),
        Err(UnknownZone::NotFound) => Err(format!(
            "{} is not a known time zone: use a name of the IANA database, such as `Europe/Berlin`",
            Quoted(word)
        )),
    }
}

/// Reads an offset from UTC, and returns it in minutes.
fn offset(word: &str) -> Result<i64, String> {
    if ["utc", "z"].contains(&word) {
        return Ok(0);
    }
    let (sign, rest) = match (word.strip_prefix('+'), word.strip_prefix('-')) {
        (Some(rest), _) => (1, rest),
        (_, Some(rest)) => (-1, rest),
        _ => {
            return Err(
                "it does not end with an offset from UTC: write `UTC`, or an offset such as `+01:00`".to_owned()
            );
        }
    };
    match minutes(rest) {
        Some(minutes) if minutes <= 14 * 60 => Ok(sign * i64::from(minutes)),
        _ => Err(format!("{} is not an offset from UTC: write it like `+01:00`, up to 14 hours", Quoted(word))),
    }
}

/// Reads `08:00-18:00`.
fn times_of_day(word: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("{} is not a time of the day: write it like `08:00-18:00`", Quoted(word));
    let (begin, end) = word.split_once('-').ok_or_else(wrong)?;
    let (begin, end) = (minutes(begin).ok_or_else(wrong)?, minutes(end).ok_or_else(wrong)?);
    if begin >= DAY || end > DAY {
        return Err(format!(
            "{} is not a time of the day, which begins from 00:00 to 23:59 and ends by 24:00",
            Quoted(word)
        ));
    }
    if begin == end {
        return Err(format!("{} begins and ends at the same time: for the whole day leave it out", Quoted(word)));
    }
    Ok((begin, end))
}

/// Reads a time of the day, such as `08:00`, and returns it in minutes.
fn minutes(text: &str) -> Option<u32> {
    let (hours, minutes) = text.split_once(':')?;
    let number = |digits: &str| {
        let is_number = digits.len() == 2 && digits.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| digits.parse::<u32>().ok())?
    };
    let (hours, minutes) = (number(hours)?, number(minutes)?);
    (minutes < 60).then_some(hours * 60 + minutes)
}

/// Reads `mon` or `mon-fri`.
fn days_of(word: &str) -> Result<Vec<u32>, String> {
    let day = |name: &str| {
        let found = DAYS.iter().position(|day| *day == name).and_then(|at| u32::try_from(at).ok());
        found.ok_or_else(|| match DAYS.iter().find(|day| name.starts_with(**day)).copied().or(similar(name, DAYS)) {
            Some(meant) => format!("{} is not a day; did you mean `{meant}`?", Quoted(name)),
            None => format!(
                "{} is neither a day, such as `mon` or `mon-fri`, nor a time, such as `08:00-18:00`",
                Quoted(name)
            ),
        })
    };
    let Some((first, last)) = word.split_once('-') else { return Ok(vec![day(word)?]) };
    let (first, last) = (day(first)?, day(last)?);
    let length = (last + 7 - first) % 7;
    Ok((first..=first + length).map(|day| day % 7).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an instant of the week of Monday, 5 January 1970.
    fn at(day: u64, hour: u64, minute: u64) -> Timestamp {
        Timestamp::from_micros((((4 + day) * 24 + hour) * 60 + minute) * 60_000_000)
    }

    fn times(text: &str) -> Times {
        Times::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    const HOUR: u32 = 60;

    #[test]
    fn times_are_spans_of_the_week_in_utc() {
        for (text, spans) in [
            ("mon-tue 08:00-18:00 UTC", &[(8 * HOUR, 18 * HOUR), (32 * HOUR, 42 * HOUR)][..]),
            ("MON 08:00-18:00 +01:00", &[(7 * HOUR, 17 * HOUR)]),
            ("mon 00:00-24:00 z", &[(0, DAY)]),
            ("mon, wed utc", &[(0, DAY), (2 * DAY, 3 * DAY)]),
            ("mon tue UTC", &[(0, 2 * DAY)]),
            // The night after a day belongs to it.
            ("fri 22:00-06:00 UTC", &[(4 * DAY + 22 * HOUR, 5 * DAY + 6 * HOUR)]),
            ("sun 22:00-06:00 UTC", &[(0, 6 * HOUR), (WEEK - 2 * HOUR, WEEK)]),
            ("mon 00:00-01:00 +05:45", &[(WEEK - 345, WEEK - 285)]),
            ("sun 23:00-24:00 -12:00", &[(11 * HOUR, 12 * HOUR)]),
            ("sat-mon UTC", &[(0, DAY), (5 * DAY, WEEK)]),
            ("sun mon 12:00-12:01 UTC", &[(720, 721), (6 * DAY + 720, 6 * DAY + 721)]),
        ] {
            let found = times(text).zones;
            assert!(found.len() == 1 && found[0].zone.is_utc(), "{text}");
            assert_eq!(found[0].spans, spans, "{text}");
        }
    }

    #[test]
    fn time_that_cannot_be_read_says_what_to_write() {
        for (text, fix) in [
            ("", "it is empty"),
            ("mon-fri 08:00-18:00", "write `UTC`, or an offset such as `+01:00`"),
            #[cfg(not(feature = "time-zones"))]
            ("mon-fri 08:00-18:00 Europe/Berlin", "time zones such as `europe/berlin` are not known"),
            #[cfg(feature = "time-zones")]
            ("mon-fri 08:00-18:00 Europe/Nowhere", "`europe/nowhere` is not a known time zone"),
            ("mon-fri 08:00-18:00 CET", "write `UTC`, or an offset"),
            ("UTC", "neither days nor times"),
            ("mon 08:00-18:00 +1", "write it like `+01:00`"),
            ("mon 08:00-18:00 +14:01", "up to 14 hours"),
            ("mon 08:00-18:00 +é", "write it like `+01:00`"),
            ("mon 8-18 UTC", "write it like `08:00-18:00`"),
            ("mon 08:00-24:01 UTC", "ends by 24:00"),
            ("mon 24:00-08:00 UTC", "begins from 00:00 to 23:59"),
            ("mon 08:60-09:00 UTC", "write it like `08:00-18:00`"),
            ("mon 08:00-08:00 UTC", "for the whole day leave it out"),
            ("08:00-12:00 13:00-18:00 UTC", "write a list of texts"),
            ("monday UTC", "did you mean `mon`?"),
            ("m\u{f6}n UTC", "did you mean `mon`?"),
            ("weekdays UTC", "such as `mon` or `mon-fri`"),
            ("mon- UTC", "is neither a day"),
            ("mon-sun UTC", "leave it out"),
            ("00:00-24:00 +03:00", "leave it out"),
        ] {
            let error = Times::parse(text).expect_err(text);
            assert!(error.contains(fix), "{text}: {error}");
        }
    }

    #[test]
    fn times_know_when_they_begin_and_end() {
        let minutes = |minutes: u64| Some(Duration::from_secs(60 * minutes));
        let office = times("mon-fri 08:00-18:00 UTC");
        for (now, is_in, change) in [
            (at(0, 7, 59), false, 1),
            (at(0, 8, 0), true, 600),
            (at(0, 17, 59), true, 1),
            (at(0, 18, 0), false, 14 * 60),
            (at(4, 18, 0), false, (6 + 48 + 8) * 60),
        ] {
            assert_eq!((office.contains(now), office.changes_in(now)), (is_in, minutes(change)), "{now:?}");
        }
        let now = Timestamp::from_micros(at(0, 7, 59).as_micros() + 59_999_999);
        assert_eq!((office.contains(now), office.changes_in(now)), (false, Some(Duration::from_micros(1))));
        let night = times("sun 22:00-06:00 UTC");
        assert_eq!((night.contains(at(6, 23, 0)), night.changes_in(at(6, 23, 0))), (true, minutes(7 * 60)));
        assert_eq!((night.contains(at(7, 5, 0)), night.changes_in(at(7, 5, 0))), (true, minutes(60)));
        assert_eq!(night.changes_in(at(7, 6, 0)), minutes(7 * 24 * 60 - 8 * 60));
        let always = Times::any_of(&[times("mon-wed UTC"), times("thu-sun UTC")]);
        assert_eq!((always.contains(at(3, 0, 0)), always.changes_in(at(3, 0, 0))), (true, None));
        assert!(office.contains(Timestamp::from_micros(9 * 3_600_000_000)), "the epoch is a Thursday");
        assert!(
            !office.contains(Timestamp::from_micros(u64::MAX))
                || office.changes_in(Timestamp::from_micros(u64::MAX)).is_some()
        );
    }

    #[cfg(feature = "time-zones")]
    #[test]
    fn times_of_a_zone_follow_its_clocks() {
        let at = |seconds: u64| Timestamp::from_micros(seconds * 1_000_000);
        let minutes = |minutes: u64| Some(Duration::from_secs(60 * minutes));
        let office = times("sat-sun 01:30-08:00 Europe/Berlin");
        // On 30 March 2025, a Sunday, two o'clock became three o'clock at 01:00 UTC; on 26 October the other way round.
        let (spring, autumn) = (1_743_292_800, 1_761_436_800); // midnights of UTC
        for (now, is_in, change) in [
            (spring, false, 30),
            (spring + 1_799, false, 0),
            (spring + 1_800, true, 30 + 5 * 60),
            (spring + 3_600, true, 5 * 60),
            (spring + 6 * 3_600, false, 6 * 24 * 60 - 6 * 60 - 30),
            (autumn - 1_800, true, 7 * 60 + 30),
            (autumn + 3_600, true, 6 * 60),
        ] {
            let change = if change == 0 { Some(Duration::from_secs(1)) } else { minutes(change) };
            assert_eq!((office.contains(at(now)), office.changes_in(at(now))), (is_in, change), "{now}");
        }
        let both = Times::any_of(&[office.clone(), times("sun 00:00-03:00 UTC"), times("sun 03:00-04:00 UTC")]);
        assert_eq!(both.zones.len(), 2);
        assert_eq!((both.contains(at(spring)), both.changes_in(at(spring))), (true, minutes(6 * 60)));
        assert!(both.covers(&office) && !office.covers(&both));
        assert!(both.changes_in(Timestamp::from_micros(u64::MAX)).is_some());
    }

    #[test]
    fn times_cover_those_that_are_in_them() {
        let covers = |outer: &str, inner: &str| times(outer).covers(&times(inner));
        assert!(covers("mon-fri 08:00-18:00 UTC", "tue 09:00-18:00 UTC"));
        assert!(covers("mon-fri 08:00-18:00 UTC", "tue 10:00-19:00 +01:00"));
        assert!(covers("sat-mon UTC", "sun 22:00-06:00 UTC"));
        assert!(!covers("mon-fri 08:00-18:00 UTC", "tue 07:59-09:00 UTC"));
        assert!(!covers("mon UTC", "tue UTC"));
        assert!(covers("mon 08:00-18:00 UTC", "mon 08:00-18:00 UTC"));
    }
}
