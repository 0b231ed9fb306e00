//! Calendars of any zone, at any instant: a window has the instant, the next one begins where it ends, and each instant
//! of a window has the same one.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::clock::Timestamp;
use tower_ratelimit::quota::{Calendar, Weekday};

/// Limiters take a later time for this one, of the year 2150.
const LATEST_US: u64 = 5_680_281_600_000_000;

fn calendar(kind: u8, option: u8) -> Option<Calendar> {
    Some(match kind % 7 {
        0 => Calendar::day(),
        1 => Calendar::week(),
        2 => Calendar::week().from_weekday(*Weekday::ALL.get(usize::from(option))?).ok()?,
        3 => Calendar::month(),
        4 => Calendar::month().from_day(option).ok()?,
        5 => Calendar::quarter(),
        _ => Calendar::year(),
    })
}

// The kind of the windows and their option, two instants, and the name of a zone.
fuzz_target!(|bytes: &[u8]| {
    let [kind, option, rest @ ..] = bytes else { return };
    let Some((first, rest)) = rest.split_first_chunk::<8>() else { return };
    let Some((within, zone)) = rest.split_first_chunk::<8>() else { return };
    let [first, within] = [first, within].map(|bytes| u64::from_le_bytes(*bytes));
    let (Some(calendar), Ok(zone)) = (calendar(*kind, *option), std::str::from_utf8(zone)) else { return };
    let Ok(calendar) = calendar.zone(zone) else { return };
    let at = |us: u64| calendar.window_at(Timestamp::from_micros(us));
    let window = at(first);
    assert!(window.start < window.end, "{window:?}");
    if first >= LATEST_US {
        return;
    }
    assert!(window.contains(&Timestamp::from_micros(first)), "{first}: {window:?}");
    let (start, end) = (window.start.as_micros(), window.end.as_micros());
    let other = start + within % (end - start);
    assert_eq!(at(other), window, "{other} is in the window of {first}");
    if end < LATEST_US {
        assert_eq!(at(end).start, window.end, "the window after that of {first}");
    }
    if start > 0 {
        assert_eq!(at(start - 1).end, window.start, "the window before that of {first}");
    }
});
