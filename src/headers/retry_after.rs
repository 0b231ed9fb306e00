//! `Retry-After`, RFC 9110 section 10.2.3: one value, in whole seconds from now or a date.

use std::time::UNIX_EPOCH;

use http::header::{Entry, RETRY_AFTER};
use http::{HeaderMap, HeaderValue};

use crate::clock::Clock;
use crate::fields;
use crate::time::micros_ceil;

use super::wait::seconds_ceil;

/// Writes the longest wait: ours, which is in seconds, or one that is there already. A value that
/// cannot be read is replaced.
pub(super) fn write(headers: &mut HeaderMap, ours: Option<HeaderValue>, clock: &dyn Clock) {
    let Some(ours) = ours else { return };
    match headers.try_entry(RETRY_AFTER) {
        Ok(Entry::Vacant(vacant)) => {
            let _ = vacant.try_insert(ours); // the map may be full
        }
        Ok(Entry::Occupied(mut known)) => {
            let theirs = known.iter().filter_map(|value| Some((read(value, clock)?, value)));
            let longest = theirs.max_by_key(|(wait, _)| *wait).filter(|(wait, _)| Some(*wait) >= read(&ours, clock));
            let value = longest.map_or(ours, |(_, value)| value.clone());
            known.insert(value);
        }
        Err(_) => {} // the map is full
    }
}

/// Returns the seconds from now that a number or a date stands for.
fn read(value: &HeaderValue, clock: &dyn Clock) -> Option<u64> {
    if let Some(seconds) = fields::integer(value.as_bytes().trim_ascii()) {
        return Some(seconds);
    }
    let date = httpdate::parse_http_date(value.to_str().ok()?).ok()?;
    let since_epoch = date.duration_since(UNIX_EPOCH).unwrap_or_default();
    Some(seconds_ceil(micros_ceil(since_epoch).saturating_sub(clock.now().as_micros())))
}
