//! Windows of the calendar: which day, week, month, quarter or year contains an instant.
//!
//! This module computes with seconds and days since 1970, as 64-bit integers on every platform.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::base::zone::{DAY_S, Zone};

const SECOND_US: u64 = 1_000_000;

/// The windows of a calendar quota: days, weeks, months, quarters or years, in a time zone.
///
/// ```
/// use tower_ratelimit::Quota;
/// use tower_ratelimit::quota::{Calendar, Weekday};
/// # fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let monthly = Quota::calendar(10_000, Calendar::month())?;
/// let from_the_15th = Quota::calendar(10_000, Calendar::month().from_day(15)?)?;
/// let weekly = Quota::calendar(500, Calendar::week().from_weekday(Weekday::Sunday)?)?;
/// assert_eq!(from_the_15th.to_string(), "10000 per calendar month from day 15");
/// # Ok(()) }
/// ```
///
/// A window begins at an edge and ends right before the next edge. The edges are midnights of the
/// calendar's time zone, which is UTC unless [`zone`](Self::zone) names another zone. So a day in a zone
/// with daylight saving time may have 23 or 25 hours. If a midnight does not exist, the edge is the
/// day's first instant. If a midnight happens twice, the edge is the first of the two. Time is Unix
/// time, without leap seconds.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Calendar {
    pub(crate) unit: CalendarUnit,
    /// The first day of a week (0 is Monday), or the day on which a month begins (1 to 31). For other
    /// units, 0.
    pub(crate) first: u8,
    pub(crate) zone: Zone,
}

/// The length of a window of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum CalendarUnit {
    Day,
    Week,
    Month,
    Quarter,
    Year,
}

impl CalendarUnit {
    pub(crate) const ALL: [Self; 5] = [Self::Day, Self::Week, Self::Month, Self::Quarter, Self::Year];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
            Self::Quarter => "quarter",
            Self::Year => "year",
        }
    }

    /// Returns the smallest and the largest number of days in this unit.
    const fn days(self) -> (u64, u64) {
        match self {
            Self::Day => (1, 1),
            Self::Week => (7, 7),
            Self::Month => (28, 31),
            Self::Quarter => (90, 92),
            Self::Year => (365, 366),
        }
    }

    /// Returns the number of months. Days and weeks have none.
    fn months(self) -> Option<i64> {
        match self {
            Self::Day | Self::Week => None,
            Self::Month => Some(1),
            Self::Quarter => Some(3),
            Self::Year => Some(12),
        }
    }
}

/// A window of a calendar, in microseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CalendarWindow {
    /// The first instant after the window.
    pub(crate) end: u64,
    /// The length of the whole window, with any part of it that lies before 1970.
    pub(crate) length: u64,
}

impl CalendarWindow {
    /// Returns whether `now` is the window's first instant or earlier.
    #[inline]
    pub(crate) fn begins_at(self, now: u64) -> bool {
        now + self.length <= self.end
    }

    /// Returns the first instant of the window, or 0 if the window began before 1970.
    pub(crate) fn start(self) -> u64 {
        self.end.saturating_sub(self.length)
    }
}

impl Calendar {
    pub(crate) const fn of(unit: CalendarUnit) -> Self {
        let first = if matches!(unit, CalendarUnit::Month) { 1 } else { 0 };
        Self { unit, first, zone: Zone::UTC }
    }

    /// Returns the length of the longest window in UTC, in microseconds.
    pub(crate) fn longest_us(self) -> u64 {
        self.unit.days().1 * DAY_S as u64 * SECOND_US
    }

    /// Returns the shortest time that `windows` windows in a row can take, in microseconds. A time zone may skip
    /// some hours, and rarely a whole date. A skipped date has no window, and its week, month, quarter or year is a
    /// day shorter.
    pub(crate) fn shortest_us(self, windows: u64) -> u64 {
        let left_out = match self.unit {
            _ if self.zone.is_utc() => 0,
            CalendarUnit::Day => DAY_S / 2,
            _ => DAY_S + DAY_S / 2,
        };
        (windows * self.unit.days().0 * DAY_S as u64 - left_out as u64) * SECOND_US
    }

    /// Returns the first second of the window that contains an instant, and the first second of the next
    /// window.
    pub(crate) fn window_s(self, at_s: i64) -> (i64, i64) {
        let local = at_s + self.zone.offset_s(at_s);
        let mut first = self.first_day(local.div_euclid(DAY_S));
        let mut begin = self.zone.begin_of_day(first);
        // If a zone sets its clocks back over midnight, the local date goes back to the day before for a while.
        loop {
            let next = self.next_first_day(first);
            let end = self.zone.begin_of_day(next);
            if at_s < end {
                return (begin, end);
            }
            (first, begin) = (next, end);
        }
    }

    /// Returns the first day of the window that contains a day.
    fn first_day(self, day: i64) -> i64 {
        let Some(months) = self.unit.months() else {
            let into = if self.unit == CalendarUnit::Day { 0 } else { weekday(day) - i64::from(self.first) };
            return day - into.rem_euclid(7);
        };
        let month = month_of(day);
        let own = self.edge(month - month.rem_euclid(months));
        if day >= own { own } else { self.edge(month - months) }
    }

    /// Returns the first day of the next window.
    fn next_first_day(self, first: i64) -> i64 {
        match (self.unit, self.unit.months()) {
            (CalendarUnit::Day, _) => first + 1,
            (_, None) => first + 7,
            (_, Some(months)) => self.edge(month_of(first) + months),
        }
    }

    /// Returns the first day of the window that begins in a month. Months are counted from January of
    /// the year 0.
    fn edge(self, month: i64) -> i64 {
        let (first, next) = (first_of_month(month), first_of_month(month + 1));
        (first + i64::from(self.first.max(1)) - 1).min(next - 1)
    }
}

/// Returns the day of the week; 0 is Monday. The first day of 1970 was a Thursday.
fn weekday(day: i64) -> i64 {
    (day + 3).rem_euclid(7)
}

/// The number of days from the first of March of the year 0 to the beginning of 1970.
const MARCH_OF_0: i64 = 719_468;

/// The number of days in 400 years, after which the calendar repeats.
const ERA: i64 = 146_097;

/// Returns the first day of a month. Months are counted from January of the year 0.
fn first_of_month(month: i64) -> i64 {
    // Counts years from March, so that the leap day is the last day of a year.
    let since_march = month - 2;
    let (year, month) = (since_march.div_euclid(12), since_march.rem_euclid(12));
    let before = (153 * month + 2) / 5; // days of the months before: 31, 30, 31, 30, 31 and again
    365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + before - MARCH_OF_0
}

/// Returns the month of a day. Months are counted from January of the year 0.
fn month_of(day: i64) -> i64 {
    let since_march = day + MARCH_OF_0;
    let (era, of_era) = (since_march.div_euclid(ERA), since_march.rem_euclid(ERA));
    // Subtracts the earlier leap days. Every fourth year has one, but of the years divisible by 100 only
    // those divisible by 400.
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    12 * (400 * era + year) + (5 * of_year + 2) / 153 + 2
}

/// Computes the windows of a calendar, and caches the window that was last asked for.
///
/// The cached window is stored in one word. So a thread reads a consistent window while another thread
/// replaces it.
#[derive(Debug)]
pub(crate) struct CalendarWindows {
    calendar: Calendar,
    /// The end of the cached window in the upper bits, and the length of the window in the lower bits,
    /// both in seconds.
    last: AtomicU64,
}

/// How many bits of the word hold the window's length in seconds.
const LENGTH_BITS: u32 = 31;
const _: () = assert!(4 * 366 * DAY_S < 1 << LENGTH_BITS, "every length fits");

impl CalendarWindows {
    /// Returns the windows of a calendar. A `CalendarWindows` is made once for each calendar and never
    /// freed, because there are few: each zone has only 41 calendars.
    pub(crate) fn of(calendar: Calendar) -> &'static Self {
        static KNOWN: LazyLock<Mutex<HashMap<Calendar, &'static CalendarWindows>>> = LazyLock::new(Mutex::default);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(calendar).or_insert_with(|| Box::leak(Box::new(Self { calendar, last: AtomicU64::new(0) })))
    }

    /// Returns the window that contains an instant.
    #[inline]
    pub(crate) fn at(&self, now: u64) -> CalendarWindow {
        let window = unpack(self.last.load(Ordering::Relaxed)); // one word, so nothing has to be ordered
        if window.end.wrapping_sub(now).wrapping_sub(1) < window.length { window } else { self.find(now) }
    }

    /// Returns the length of the shortest window, in microseconds.
    pub(crate) fn shortest_us(&self) -> u64 {
        self.calendar.shortest_us(1)
    }

    /// Returns the next window after a window of this calendar.
    pub(crate) fn after(&self, window: CalendarWindow) -> CalendarWindow {
        self.compute(window.end).0
    }

    #[cold]
    #[inline(never)]
    fn find(&self, now: u64) -> CalendarWindow {
        let (window, word) = self.compute(now);
        self.last.store(word, Ordering::Relaxed);
        window
    }

    fn compute(&self, now: u64) -> (CalendarWindow, u64) {
        let (begin, end) = self.calendar.window_s((now / SECOND_US) as i64); // below 2^45
        let length = (end - begin) as u64; // not negative
        let word = (end as u64) << LENGTH_BITS | length; // the end is after `now`
        (unpack(word), word)
    }
}

#[inline]
fn unpack(word: u64) -> CalendarWindow {
    let length = word & ((1 << LENGTH_BITS) - 1);
    CalendarWindow { end: (word >> LENGTH_BITS) * SECOND_US, length: length * SECOND_US }
}
