//! `Retry-After`, RFC 9110 section 10.2.3: one value, in whole seconds from now or a date. Also writes
//! `retry-after-ms`, which some clients prefer.

use std::time::UNIX_EPOCH;

use http::header::{Entry, RETRY_AFTER};
use http::{HeaderMap, HeaderValue};

use crate::base::fields;
use crate::base::header_names::RETRY_AFTER_MS;
use crate::base::time::micros_ceil;
use crate::clock::Clock;

use super::text::integer;
use super::wait::seconds_ceil;

/// Writes the longer wait: the layer's wait in seconds, or the wait that the response already has. A value that
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

/// Writes `retry-after-ms` with the longest wait: the layer's wait, or a wait in seconds or milliseconds that the
/// response already has. This function is called before the layer's `Retry-After` is written, because that header
/// is rounded up.
pub(super) fn write_millis(headers: &mut HeaderMap, ours: Option<HeaderValue>, clock: &dyn Clock) {
    let Some(ours) = ours else { return };
    let seconds = headers.get_all(RETRY_AFTER).iter().filter_map(|value| read(value, clock));
    let seconds = seconds.map(|seconds| seconds.saturating_mul(1_000));
    let millis =
        headers.get_all(RETRY_AFTER_MS).iter().filter_map(|value| fields::integer(value.as_bytes().trim_ascii()));
    let longest = seconds.chain(millis).max().filter(|theirs| Some(*theirs) > fields::integer(ours.as_bytes()));
    let value = longest.and_then(integer).unwrap_or(ours);
    let _ = headers.try_insert(RETRY_AFTER_MS, value); // the map may be full
}

/// Reads a number or a date, and returns the seconds from now.
fn read(value: &HeaderValue, clock: &dyn Clock) -> Option<u64> {
    if let Some(seconds) = fields::integer(value.as_bytes().trim_ascii()) {
        return Some(seconds);
    }
    let date = httpdate::parse_http_date(value.to_str().ok()?).ok()?;
    let since_epoch = date.duration_since(UNIX_EPOCH).unwrap_or_default();
    Some(seconds_ceil(micros_ceil(since_epoch).saturating_sub(clock.now().as_micros())))
}
