//! The edges of a calendar, written down day by day from its definition.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::base::calendar::{Calendar, CalendarUnit};

/// The years whose edges are written down: more than any clock shows.
const YEARS: std::ops::Range<i64> = 1968..2180;

/// Returns the last edge that is not after an instant, and the two after it, in microseconds.
pub(super) fn around(calendar: Calendar, now: u64) -> [i128; 3] {
    let edges = edges(calendar);
    let after = edges.partition_point(|edge| *edge <= i128::from(now));
    [edges[after - 1], edges[after], edges[after + 1]]
}

fn edges(calendar: Calendar) -> &'static [i128] {
    static WRITTEN: LazyLock<Mutex<HashMap<Calendar, &'static [i128]>>> = LazyLock::new(Mutex::default);
    let mut written = WRITTEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    written.entry(calendar).or_insert_with(|| Vec::leak(write(calendar)))
}

fn write(calendar: Calendar) -> Vec<i128> {
    let mut edges: Vec<i128> = Vec::new();
    let mut day = -731; // 1968-01-01
    for year in YEARS {
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let lengths = [31, if is_leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        for (month, length) in (1..).zip(lengths) {
            for of_month in 1..=length {
                // The first of January 1968 was a Monday.
                let weekday = (day + 731) % 7;
                let is_edge = match calendar.unit {
                    CalendarUnit::Day => true,
                    CalendarUnit::Week => weekday == i64::from(calendar.first),
                    CalendarUnit::Month => of_month == length.min(i64::from(calendar.first)),
                    CalendarUnit::Quarter => of_month == 1 && [1, 4, 7, 10].contains(&month),
                    CalendarUnit::Year => of_month == 1 && month == 1,
                };
                let edge = first_instant(calendar, (year, month, of_month), day);
                // A day that a zone left out has no instant.
                if is_edge && edges.last() != Some(&edge) {
                    edges.push(edge);
                }
                day += 1;
            }
        }
    }
    edges
}

/// Returns the first instant of a day.
fn first_instant(calendar: Calendar, (year, month, of_month): (i64, i64, i64), day: i64) -> i128 {
    #[cfg(feature = "time-zones")]
    if !calendar.zone.is_utc() {
        let zone = jiff::tz::TimeZone::get(calendar.zone.name()).unwrap();
        let date = jiff::civil::date(year as i16, month as i8, of_month as i8);
        return i128::from(
            zone.to_zoned(date.at(0, 0, 0, 0)).unwrap().start_of_day().unwrap().timestamp().as_microsecond(),
        );
    }
    let _ = (calendar, year, month, of_month);
    i128::from(day) * 86_400_000_000
}
