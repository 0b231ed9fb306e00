//! Time zones: how far the local time of a place is from UTC.
//!
//! UTC needs no data. Other zones come with the feature `time-zones`. A zone is looked up once, when it is
//! configured, and its data stays in memory. There are only a few hundred zones.

use std::hash::{Hash, Hasher};

/// The seconds of a day.
pub(crate) const DAY_S: i64 = 86_400;

/// A time zone. The value is one word. Two zones are equal if their names differ only in spelling.
#[derive(Clone, Copy)]
pub(crate) struct Zone(ZoneData);

/// The reason why no zone with a given name was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UnknownZone {
    /// The crate was built without the feature `time-zones`.
    #[cfg_attr(feature = "time-zones", expect(dead_code, reason = "it was built with them"))]
    NotBuilt,
    /// The database has no zone with this name, or the zone could not be read.
    #[cfg_attr(not(feature = "time-zones"), expect(dead_code, reason = "there is no database"))]
    NotFound,
}

impl Zone {
    pub(crate) const UTC: Self = Self(ZoneData::UTC);

    /// Returns the zone with this name. Upper and lower case are the same.
    pub(crate) fn named(name: &str) -> Result<Self, UnknownZone> {
        let is_utc = ["utc", "z", "etc/utc"].iter().any(|utc| name.eq_ignore_ascii_case(utc));
        if is_utc { Ok(Self::UTC) } else { ZoneData::named(name).map(Self) }
    }

    /// Returns the name of the zone, as the database spells it.
    pub(crate) fn name(self) -> &'static str {
        self.0.name()
    }

    /// Returns the number of the zone, which no other zone in this process has.
    pub(crate) fn number(self) -> u16 {
        self.0.number()
    }

    /// Returns the zone with this number.
    pub(crate) fn of_number(number: u16) -> Option<Self> {
        ZoneData::of_number(number).map(Self)
    }

    pub(crate) fn is_utc(self) -> bool {
        self.number() == 0
    }

    /// Returns by how many seconds the local time is ahead of UTC at an instant.
    pub(crate) fn offset_s(self, at_s: i64) -> i64 {
        self.0.offset_s(at_s)
    }

    /// Returns the first instant in a range at which the offset differs from the offset at the beginning of
    /// the range.
    #[cfg_attr(not(feature = "rules"), expect(dead_code, reason = "only the times of rules need this function"))]
    pub(crate) fn change_of_offset(self, from_s: i64, to_s: i64) -> Option<i64> {
        let offset = self.offset_s(from_s);
        if self.offset_s(to_s) == offset {
            return None;
        }
        let (mut before, mut after) = (from_s, to_s);
        while after - before > 1 {
            let middle = before + (after - before) / 2;
            if self.offset_s(middle) == offset {
                before = middle;
            } else {
                after = middle;
            }
        }
        Some(after)
    }

    /// Returns the first instant at which the local date is `day` or later. The instant is in seconds since 1970, and
    /// `day` in days. The instant is the midnight that begins the day. If this midnight does not exist, the instant
    /// is the first of the day. If this midnight happens twice, the instant is the first of the two.
    pub(crate) fn begin_of_day(self, day: i64) -> i64 {
        let midnight = day * DAY_S; // as if the zone were UTC
        if self.is_utc() {
            return midnight;
        }
        let is_reached = |at_s: i64| at_s + self.offset_s(at_s) >= midnight;
        // In every zone, the offset that is in force a day before this midnight is still in force right before the day
        // begins. If the day has two midnights, the first of them is at this offset.
        let (mut before, mut after) = (midnight - DAY_S - DAY_S / 2, midnight + DAY_S + DAY_S / 2);
        for offset in [self.offset_s(midnight - DAY_S), self.offset_s(midnight), self.offset_s(midnight + DAY_S)] {
            // Tries each candidate, because clocks may be set back between two candidates.
            let at_s = midnight - offset;
            if is_reached(at_s) {
                after = after.min(at_s);
            } else {
                before = before.max(at_s);
            }
        }
        if before + 1 == after || !is_reached(after - 1) {
            return after;
        }
        // The local time jumps over midnight, so the day begins at the first instant after the jump.
        before = before.min(after - 1);
        while after - before > 1 {
            let middle = before + (after - before) / 2;
            if is_reached(middle) {
                after = middle;
            } else {
                before = middle;
            }
        }
        after
    }
}

impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        self.number() == other.number()
    }
}

impl Eq for Zone {}

impl Hash for Zone {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number().hash(state);
    }
}

impl std::fmt::Debug for Zone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(feature = "time-zones")]
use self::with::KnownZone as ZoneData;
#[cfg(not(feature = "time-zones"))]
use self::without::OnlyUtc as ZoneData;

/// Without the feature `time-zones`, UTC is the only zone.
#[cfg(not(feature = "time-zones"))]
mod without {
    use super::UnknownZone;

    #[derive(Clone, Copy)]
    pub(super) struct OnlyUtc;

    impl OnlyUtc {
        pub(super) const UTC: Self = Self;

        pub(super) fn named(_name: &str) -> Result<Self, UnknownZone> {
            Err(UnknownZone::NotBuilt)
        }

        pub(super) fn name(self) -> &'static str {
            "UTC"
        }

        pub(super) fn number(self) -> u16 {
            0
        }

        pub(super) fn of_number(number: u16) -> Option<Self> {
            (number == 0).then_some(Self)
        }

        pub(super) fn offset_s(self, _at_s: i64) -> i64 {
            0
        }
    }
}

#[cfg(feature = "time-zones")]
mod with {
    use std::sync::{LazyLock, Mutex, PoisonError};

    use jiff::Timestamp;
    use jiff::tz::{TimeZone, TimeZoneDatabase};

    use super::UnknownZone;

    /// A zone of the database. UTC is none.
    #[derive(Clone, Copy)]
    pub(super) struct KnownZone(Option<&'static ZoneEntry>);

    struct ZoneEntry {
        number: u16,
        name: Box<str>,
        zone: TimeZone,
    }

    /// Names in a database that are not names of places. The first two names stand for a different zone on each
    /// machine, and the other names stand for no zone.
    const NO_PLACES: [&str; 4] = ["localtime", "posixrules", "Factory", "Etc/Unknown"];

    static BUILT_IN: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

    /// The zones that were looked up, each of them once. The number of a zone is its position in this
    /// list, counted from 1.
    static KNOWN: Mutex<Vec<&'static ZoneEntry>> = Mutex::new(Vec::new());

    impl KnownZone {
        pub(super) const UTC: Self = Self(None);

        /// Returns the zone with this name. After a zone was first used, its data stays the same, even if the
        /// database changes.
        pub(super) fn named(name: &str) -> Result<Self, UnknownZone> {
            if NO_PLACES.iter().any(|other| name.eq_ignore_ascii_case(other)) {
                return Err(UnknownZone::NotFound);
            }
            if let Some(known) = Self::known(&KNOWN.lock().unwrap_or_else(PoisonError::into_inner), name) {
                return Ok(known);
            }
            // Looks the zone up without the lock, because the look-up may read files. Falls back to the built-in
            // database, because the system's time-zone database may be missing or may lack the older names.
            let zone = TimeZone::get(name).or_else(|_| BUILT_IN.get(name)).map_err(|_| UnknownZone::NotFound)?;
            let name = zone.iana_name().ok_or(UnknownZone::NotFound)?;
            let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = Self::known(&all, name) {
                return Ok(known);
            }
            let number = u16::try_from(all.len() + 1).map_err(|_| UnknownZone::NotFound)?;
            let entry: &'static ZoneEntry =
                Box::leak(Box::new(ZoneEntry { number, name: name.into(), zone: zone.clone() }));
            all.push(entry);
            Ok(Self(Some(entry)))
        }

        fn known(all: &[&'static ZoneEntry], name: &str) -> Option<Self> {
            all.iter().find(|entry| entry.name.eq_ignore_ascii_case(name)).map(|entry| Self(Some(entry)))
        }

        pub(super) fn name(self) -> &'static str {
            self.0.map_or("UTC", |entry| &entry.name)
        }

        pub(super) fn number(self) -> u16 {
            self.0.map_or(0, |entry| entry.number)
        }

        pub(super) fn of_number(number: u16) -> Option<Self> {
            let Some(place) = usize::from(number).checked_sub(1) else { return Some(Self::UTC) };
            let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(place).map(|entry| Self(Some(entry)))
        }

        pub(super) fn offset_s(self, at_s: i64) -> i64 {
            let Some(entry) = self.0 else { return 0 };
            // Every instant of a limiter is between the years 1968 and 2170.
            let at = Timestamp::from_second(at_s).unwrap_or_default();
            i64::from(entry.zone.to_offset(at).seconds())
        }
    }
}
