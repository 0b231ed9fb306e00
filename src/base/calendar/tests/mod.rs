//! The windows of calendars, beside those of another implementation.

use super::*;

/// The edges by Python's zoneinfo; see edges.py beside it.
const GOLDEN: &str = include_str!("edges.txt");

const BY_TEXT: [(&str, Calendar); 10] = [
    ("day", Calendar::of(CalendarUnit::Day)),
    ("week", Calendar::of(CalendarUnit::Week)),
    ("week from sunday", Calendar { first: 6, ..Calendar::of(CalendarUnit::Week) }),
    ("month", Calendar::of(CalendarUnit::Month)),
    ("month from day 15", Calendar { first: 15, ..Calendar::of(CalendarUnit::Month) }),
    ("month from day 29", Calendar { first: 29, ..Calendar::of(CalendarUnit::Month) }),
    ("month from day 30", Calendar { first: 30, ..Calendar::of(CalendarUnit::Month) }),
    ("month from day 31", Calendar { first: 31, ..Calendar::of(CalendarUnit::Month) }),
    ("quarter", Calendar::of(CalendarUnit::Quarter)),
    ("year", Calendar::of(CalendarUnit::Year)),
];

fn fnv(numbers: impl Iterator<Item = i64>) -> u64 {
    let bytes = numbers.flat_map(i64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns the edges of the years from 1971 to 2169, in seconds.
fn edges(calendar: Calendar) -> impl Iterator<Item = i64> {
    let [begin, end] = [1971, 2170].map(|year| calendar.zone.begin_of_day(first_of_month(12 * year)));
    let first = calendar.window_s(begin - 1).1;
    std::iter::successors(Some(first), move |edge| Some(calendar.window_s(*edge).1)).take_while(move |at| *at < end)
}

#[test]
fn edges_are_those_of_another_implementation() {
    let (mut zone, mut compared, mut left_out) = (None, 0, Vec::new());
    let zones = GOLDEN.lines().filter(|line| !line.starts_with(' ')).count();
    let step = if cfg!(debug_assertions) { crate::base::sampling::stride().min(zones / 4) } else { 1 };
    let mut number = 0;
    for line in GOLDEN.lines() {
        let (name, rest) = line.trim().split_once(": ").unwrap();
        if !line.starts_with(' ') {
            number += 1;
            let days = first_of_month(12 * 1970)..first_of_month(12 * 2170);
            let is_chosen = |_: &Zone| number == 1 || number % step == 0;
            zone = Zone::named(name).ok().filter(is_chosen).filter(|zone| {
                let offsets = days.map(|day| zone.offset_s(day * DAY_S + DAY_S / 2));
                let is_same = format!("{:016x}", fnv(offsets)) == rest;
                left_out.extend((!is_same).then(|| name.to_owned()));
                is_same
            });
            continue;
        }
        let Some(zone) = zone else { continue };
        let calendar = BY_TEXT.iter().find(|(text, _)| *text == name).unwrap().1;
        let edges: Vec<i64> = edges(Calendar { zone, ..calendar }).collect();
        let found = format!("{} {:016x}", edges.len(), fnv(edges.iter().copied()));
        assert_eq!(found, rest, "{name} in {zone:?}");
        for windows in [1, 2] {
            let shortest = edges.windows(windows + 1).map(|edges| (edges[windows] - edges[0]) as u64).min().unwrap();
            let claimed = Calendar { zone, ..calendar }.shortest_us(windows as u64) / SECOND_US;
            assert!(shortest >= claimed, "{windows} of {name} in {zone:?}: {shortest} < {claimed}");
        }
        compared += 1;
    }
    let told = format!("{compared} calendars were compared; these zones have other data here: {left_out:?}");
    println!("{told}");
    assert!(compared >= if cfg!(feature = "time-zones") { 40 } else { 10 }, "{told}");
}

#[test]
fn windows_before_and_after_an_edge_meet_at_it() {
    let day = Calendar::of(CalendarUnit::Month);
    let edge = first_of_month(12 * 2024 + 1) * DAY_S; // 2024-02-01
    assert_eq!(edge, 1_706_745_600);
    assert_eq!(day.window_s(edge - 1), (edge - 31 * DAY_S, edge));
    assert_eq!(day.window_s(edge), (edge, edge + 29 * DAY_S));
    let windows = CalendarWindows::of(day);
    let (edge, january, february) = (edge as u64 * SECOND_US, 31 * 86_400 * SECOND_US, 29 * 86_400 * SECOND_US);
    assert_eq!(windows.at(edge - 1), CalendarWindow { end: edge, length: january });
    assert_eq!(windows.at(edge), CalendarWindow { end: edge + february, length: february });
    assert_eq!(windows.at(edge - 1), CalendarWindow { end: edge, length: january }, "right before the last window");
    assert_eq!(windows.at(edge - january), CalendarWindow { end: edge, length: january });
    assert_eq!(windows.after(windows.at(edge - 1)), windows.at(edge));
    assert!(windows.at(edge).begins_at(edge) && !windows.at(edge).begins_at(edge + 1));
}

#[test]
fn window_that_began_before_1970_has_its_whole_length() {
    let week = CalendarWindows::of(Calendar::of(CalendarUnit::Week)).at(0);
    assert_eq!(week, CalendarWindow { end: 4 * 86_400 * SECOND_US, length: 7 * 86_400 * SECOND_US });
    assert_eq!((week.start(), week.begins_at(0)), (0, false));
}

#[test]
fn windows_at_both_ends_of_time_are_found() {
    use crate::base::time::CLOCK_US_MAX;
    let names = ["UTC", "Pacific/Apia", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Africa/Monrovia"];
    let zones: Vec<Zone> = names.iter().filter_map(|name| Zone::named(name).ok()).collect();
    for (calendar, zone) in BY_TEXT.iter().flat_map(|(_, calendar)| zones.iter().map(move |zone| (calendar, zone))) {
        let calendar = Calendar { zone: *zone, ..*calendar };
        let windows = CalendarWindows::of(calendar);
        for now in [0, 1, CLOCK_US_MAX - 1, CLOCK_US_MAX, 0] {
            let window = windows.at(now);
            assert!(window.start() <= now && now < window.end && window.length > 0, "{calendar} at {now}");
            assert!(windows.after(window).end > window.end, "{calendar} at {now}");
        }
        let last = calendar.window_at(crate::clock::Timestamp::from_micros(u64::MAX));
        assert!(last.contains(&crate::clock::Timestamp::from_micros(CLOCK_US_MAX)), "{calendar}");
    }
}

#[cfg(feature = "time-zones")]
#[test]
fn days_of_zones_begin_with_their_first_instant() {
    let hours = |zone: &str, at_s: i64| {
        let calendar = Calendar { zone: Zone::named(zone).unwrap(), ..Calendar::of(CalendarUnit::Day) };
        let (begin, end) = calendar.window_s(at_s);
        assert!(begin <= at_s && at_s < end);
        assert_eq!(calendar.window_s(end - 1), (begin, end));
        ((end - begin) / 3_600, begin.rem_euclid(86_400) / 60)
    };
    // The length in hours, and the beginning in minutes of UTC.
    assert_eq!(hours("Europe/Berlin", 1_711_850_400), (23, 23 * 60), "2024-03-31");
    assert_eq!(hours("europe/berlin", 1_730_023_200), (25, 22 * 60), "2024-10-27");
    assert_eq!(hours("Australia/Lord_Howe", 1_712_404_800).1, 13 * 60, "2024-04-06, before half an hour more");
    assert_eq!(hours("Pacific/Apia", 1_325_152_800), (24, 10 * 60), "2011-12-29, before a day that was left out");
    assert_eq!(hours("Pacific/Apia", 1_325_239_200), (24, 10 * 60), "2011-12-31");
    // At midnight the clocks of Cairo went forward to one o'clock, and those of Havana back to midnight.
    assert_eq!(hours("Africa/Cairo", 1_714_122_000), (23, 22 * 60), "2024-04-26");
    assert_eq!(hours("America/Havana", 1_730_620_800), (25, 4 * 60), "2024-11-03");
    // A minute after midnight the clocks of St. John's went back by an hour, to the day before.
    assert_eq!(hours("America/St_Johns", 1_162_089_900), (25, 2 * 60 + 30), "2006-10-29");
}

#[cfg(feature = "time-zones")]
#[test]
fn names_that_are_no_places_are_unknown() {
    let hostile = ["", " ", "Europe", "../../etc/passwd", "/etc/localtime", "right/Europe/Berlin", "\0"];
    // These are in many databases, or mean something to the library that reads them.
    let other = ["localtime", "posixrules", "factory", "Etc/Unknown", "Europe/Nowhere", "zone.tab"];
    assert_eq!(Zone::named("EUROPE/BERLIN"), Zone::named("europe/berlin"));
    for name in hostile.into_iter().chain(other) {
        assert_eq!(Zone::named(name), Err(crate::base::zone::UnknownZone::NotFound), "{name}");
    }
}
