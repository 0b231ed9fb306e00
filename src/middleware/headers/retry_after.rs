//! `Retry-After`, RFC 9110 section 10.2.3: one value, whole seconds from now.

use std::time::UNIX_EPOCH;

use http::header::{Entry, RETRY_AFTER};
use http::{HeaderMap, HeaderValue};

use crate::time::{Timestamp, micros_ceil};

use super::merge;
use super::prepared::View;
use super::text::integer;
use super::wait::seconds_ceil;

/// The longest wait of the policies that refused. Nothing if none did, or if one did for good.
pub(super) fn longest_wait(views: &[View<'_>]) -> Option<u64> {
    let refusing = || views.iter().filter(|view| view.refuses);
    if refusing().any(|view| view.decision.is_never()) {
        return None;
    }
    refusing().map(|view| view.decision.retry_us()).max()
}

/// Of several waits the longest is told, on one line. One that cannot be read does not count.
pub(super) fn write(headers: &mut HeaderMap, seconds: u64, wall_now: &dyn Fn() -> Timestamp) {
    let Ok(entry) = headers.try_entry(RETRY_AFTER) else {
        return;
    };
    match entry {
        Entry::Vacant(vacant) => {
            if let Some(value) = integer(seconds) {
                let _ = vacant.try_insert(value);
            }
        }
        Entry::Occupied(mut known) => {
            let theirs = known.iter().filter_map(|value| Some((read(value, wall_now)?, value)));
            let longest = theirs.max_by_key(|(wait, _)| *wait).filter(|(wait, _)| *wait >= seconds);
            if let Some(value) = longest.map(|(_, value)| value.clone()).or_else(|| integer(seconds)) {
                known.insert(value);
            }
        }
    }
}

/// Seconds from now, of a number of seconds or a date.
fn read(value: &HeaderValue, wall_now: &dyn Fn() -> Timestamp) -> Option<u64> {
    if let Some(seconds) = merge::integer(value.as_bytes().trim_ascii()) {
        return Some(seconds);
    }
    let date = httpdate::parse_http_date(value.to_str().ok()?).ok()?;
    let since_epoch = date.duration_since(UNIX_EPOCH).unwrap_or_default();
    Some(seconds_ceil(micros_ceil(since_epoch).saturating_sub(wall_now().as_micros())))
}
