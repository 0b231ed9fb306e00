//! The calendars of quotas: their constructors, and their text.

use std::fmt;
use std::ops::Range;

use crate::base::calendar::{Calendar, CalendarUnit, CalendarWindows};
use crate::base::time::{CLOCK_US_MAX, Timestamp};
use crate::base::zone::{UnknownZone, Zone};
use crate::error::{ConfigError, ConfigErrorKind, labelled, printable};

labelled! {
    /// A day of the week, on which the windows of a [week](Calendar::week) begin.
    Weekday,
    /// Returns the day's name.
    as_str {
        /// The first day of a week, unless another day is chosen.
        Monday = "monday",
        /// The day after Monday.
        Tuesday = "tuesday",
        /// The day after Tuesday.
        Wednesday = "wednesday",
        /// The day after Wednesday.
        Thursday = "thursday",
        /// The day after Thursday.
        Friday = "friday",
        /// The day after Friday.
        Saturday = "saturday",
        /// The day before Monday.
        Sunday = "sunday",
    }
}

impl Calendar {
    /// Makes windows of one day.
    #[must_use]
    pub const fn day() -> Self {
        Self::of(CalendarUnit::Day)
    }

    /// Makes windows of one week, which begin on Monday.
    #[must_use]
    pub const fn week() -> Self {
        Self::of(CalendarUnit::Week)
    }

    /// Makes windows of one month, which begin on the first day of the month.
    #[must_use]
    pub const fn month() -> Self {
        Self::of(CalendarUnit::Month)
    }

    /// Makes windows of three months, which begin with January, April, July and October.
    #[must_use]
    pub const fn quarter() -> Self {
        Self::of(CalendarUnit::Quarter)
    }

    /// Makes windows of one year, which begin with January.
    #[must_use]
    pub const fn year() -> Self {
        Self::of(CalendarUnit::Year)
    }

    /// Sets the day on which each month begins, such as the day of a subscription. In a month that is too short, the
    /// window begins on the last day: with 31, the windows begin on January 31, February 28 or 29, and March 31.
    ///
    /// # Errors
    /// Returns an error if the windows are not months, or the day is not 1 to 31.
    pub fn from_day(self, day: u8) -> Result<Self, ConfigError> {
        if self.unit != CalendarUnit::Month {
            return Err(not_an_option("from_day", self.unit, "month"));
        }
        if !(1..=31).contains(&day) {
            return Err(ConfigError::new(
                ConfigErrorKind::Range,
                format!("a month begins on a day from 1 to 31, not {day}"),
            ));
        }
        Ok(Self { first: day, ..self })
    }

    /// Sets the day on which each week begins.
    ///
    /// # Errors
    /// Returns an error if the windows are not weeks.
    pub fn from_weekday(self, day: Weekday) -> Result<Self, ConfigError> {
        if self.unit != CalendarUnit::Week {
            return Err(not_an_option("from_weekday", self.unit, "week"));
        }
        let first = Weekday::ALL.iter().position(|other| *other == day).unwrap_or(0) as u8; // below 7
        Ok(Self { first, ..self })
    }

    /// Sets the time zone, by its name in the IANA database, such as `Europe/Berlin`. Without the feature
    /// `time-zones`, only `UTC` is known.
    ///
    /// The process reads the zone's rules from the system's database when it first names the zone. If the system does
    /// not have the zone, the process uses the rules that are built in. The process keeps the rules of a zone until
    /// the process ends. Processes that share a limiter should have the same rules. If their rules differ, the
    /// processes begin a window at different times, and between these times a key may get its quota once more.
    ///
    /// # Errors
    /// Returns an error if the zone is unknown.
    pub fn zone(self, name: &str) -> Result<Self, ConfigError> {
        let shown: String = name.chars().take(40).map(printable).collect();
        let zone = Zone::named(name).map_err(|why| {
            let fix = match why {
                UnknownZone::NotBuilt => "only `UTC` is known without the crate's feature `time-zones`",
                UnknownZone::NotFound => "use a name of the IANA database, such as `Europe/Berlin`",
            };
            ConfigError::new(ConfigErrorKind::Syntax, format!("`{shown}` is not a known time zone: {fix}"))
        })?;
        Ok(Self { zone, ..self })
    }

    /// Returns the window that contains an instant: the window's first instant, and the first instant of the next
    /// window, at which the quota renews. A window that began before 1970 has 1970 as its first instant. Limiters
    /// replace an instant after January 1, 2150, by that day's first instant in UTC, and so does this method.
    ///
    /// This asks no limiter. After a key's quota has changed from one calendar to another, its units may stay used
    /// until a later edge. The [`effective_window`](crate::limiter::ChargeDecision::effective_window) of a decision
    /// is the time until that edge.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use tower_ratelimit::quota::Calendar;
    ///
    /// let new_year = SystemTime::UNIX_EPOCH + Duration::from_secs(1_735_689_600); // 2025
    /// let window = Calendar::month().window_at(new_year.into());
    /// assert_eq!(SystemTime::from(window.start), new_year);
    /// assert_eq!(SystemTime::from(window.end), new_year + Duration::from_secs(31 * 86_400));
    /// ```
    #[must_use]
    pub fn window_at(self, now: Timestamp) -> Range<Timestamp> {
        let window = CalendarWindows::of(self).at(now.as_micros().min(CLOCK_US_MAX));
        Timestamp::from_micros(window.start())..Timestamp::from_micros(window.end)
    }
}

fn not_an_option(option: &str, unit: CalendarUnit, of: &str) -> ConfigError {
    let message = format!("`{option}` has no meaning for a calendar {}: it belongs to a {of}", unit.as_str());
    ConfigError::new(ConfigErrorKind::NotAnOption, message)
}

impl fmt::Display for Calendar {
    /// Prints the calendar as the text of a quota does: `month from day 15 in Europe/Berlin`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.unit.as_str())?;
        match self.unit {
            CalendarUnit::Month if self.first > 1 => write!(f, " from day {}", self.first)?,
            CalendarUnit::Week => match Weekday::ALL.get(usize::from(self.first)) {
                Some(day) if *day != Weekday::Monday => write!(f, " from {day}")?,
                _ => {}
            },
            _ => {}
        }
        if self.zone.is_utc() { Ok(()) } else { write!(f, " in {}", self.zone.name()) }
    }
}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calendar({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_has_only_the_options_that_were_changed() {
        let (month, week) = (Calendar::month(), Calendar::week());
        for (calendar, text) in [
            (month, "month"),
            (month.from_day(1).unwrap(), "month"),
            (month.from_day(2).unwrap(), "month from day 2"),
            (week, "week"),
            (week.from_weekday(Weekday::Monday).unwrap(), "week"),
            (week.from_weekday(Weekday::Tuesday).unwrap(), "week from tuesday"),
        ] {
            assert_eq!(calendar.to_string(), text);
        }
    }

    #[test]
    fn option_of_another_calendar_is_an_error() {
        for calendar in [Calendar::day(), Calendar::month(), Calendar::quarter(), Calendar::year()] {
            let error = calendar.from_weekday(Weekday::Sunday).unwrap_err();
            assert_eq!(error.kind(), ConfigErrorKind::NotAnOption, "{calendar}");
        }
        for calendar in [Calendar::day(), Calendar::week(), Calendar::quarter(), Calendar::year()] {
            assert_eq!(calendar.from_day(2).unwrap_err().kind(), ConfigErrorKind::NotAnOption, "{calendar}");
        }
        for (day, is_one) in [(0, false), (1, true), (31, true), (32, false)] {
            assert_eq!(Calendar::month().from_day(day).is_ok(), is_one, "{day}");
        }
        for day in Weekday::ALL {
            assert!(Calendar::week().from_weekday(*day).is_ok(), "{day}");
        }
    }
}
