//! The headers of draft-ietf-httpapi-ratelimit-headers: revisions 11 (the format since 08), 07 and 06.
//!
//! Strings, integers, lists and parameters are serialized as in RFC 9651. Parameters are always in one
//! order.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::base::fields::List;
use crate::policy::{Policy, REQUESTS};
use crate::quota::{Algorithm, Quota, UNITS_MAX};

use super::text::Text;
use super::wait::{SECOND_US, seconds_ceil};

/// A quota as it is reported to clients: `quota` units per `window` seconds, or `quota` units in flight
/// at once if there is no window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Advertised {
    pub(crate) quota: u64,
    pub(crate) window: Option<u64>,
}

impl Advertised {
    /// Returns the capacity, and the time in which the capacity refills, in whole seconds. For example,
    /// a bucket with burst 20 at 100 per minute is reported as 20 per 12 s.
    ///
    /// The window is at least one second. If the capacity refills sooner, the number of units that pass
    /// in one second is reported instead, rounded down. For example, 10 per 100 ms is reported as 100
    /// per 1 s, and 50 per second with burst 10 as 50 per 1 s. A concurrency limit has no window.
    pub(crate) fn new(quota: &Quota) -> Self {
        let (capacity, period_us) = (quota.capacity(), quota.spec().period_us);
        let seconds = |us| Some(seconds_ceil(us).max(1));
        if quota.algorithm() == Algorithm::Concurrency {
            return Self { quota: capacity, window: None };
        }
        if capacity == 0 {
            return Self { quota: 0, window: seconds(period_us) };
        }
        let refill_us = quota.spec().refill_us();
        if refill_us < SECOND_US {
            return Self { quota: units_within(quota, SECOND_US).max(capacity), window: Some(1) };
        }
        Self { quota: capacity, window: seconds(refill_us) }
    }

    /// Returns the reported form of a calendar quota while a window of this length is open.
    pub(super) fn within(self, window_us: u64) -> Self {
        Self { window: Some(seconds_ceil(window_us).max(1)), ..self }
    }
}

/// Returns how many units pass in this time after the capacity is used up, rounded down.
fn units_within(quota: &Quota, time_us: u64) -> u64 {
    let units = u128::from(quota.limit()) * u128::from(time_us) / u128::from(quota.spec().period_us.max(1));
    u64::try_from(units).unwrap_or(u64::MAX).min(UNITS_MAX)
}

/// The remaining units and the effective window, if these are known more exactly than `r` and `t` say. The
/// parameters `tower-r` and `tower-ms` report the exact numbers, because the drafts' parameters are in
/// whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Precise {
    /// The units that can pass at this instant, if these are fewer than `r`.
    pub(super) remaining: Option<u64>,
    pub(super) window_us: u64,
}

/// If a capacity refills in less than this time, `r` is the number of units that pass within the next second, and not
/// the number that can pass at this instant. If `r` were the number that can pass at this instant, a client that
/// waits for a whole second whenever nothing remains would get less than half of such a quota.
const SHORT_REFILL_US: u64 = SECOND_US / 2;

/// A window of at least this time is reported in whole seconds only, which lengthens the window by less than a
/// twentieth.
const LONG_WINDOW_US: u64 = 20 * SECOND_US;

/// Returns `r` and the more exact numbers for an allowed charge whose effective window is short or whose quota
/// has nothing left.
#[cold]
pub(super) fn precisely(quota: &Quota, remaining: u64, window_us: u64) -> (u64, Option<Precise>) {
    if quota.spec().refill_us() < SHORT_REFILL_US {
        let (limit, period_us) = (u128::from(quota.limit()), u128::from(quota.spec().period_us.max(1)));
        let later = limit * u128::from(SECOND_US.saturating_sub(window_us));
        // If nothing remains, the first unit comes back as soon as the window ends. Therefore a fraction of a unit
        // counts as a whole unit.
        let later = if remaining == 0 { later.div_ceil(period_us) } else { later / period_us };
        let within = u64::try_from(later).unwrap_or(u64::MAX).saturating_add(remaining).min(UNITS_MAX);
        return (within, Some(Precise { remaining: (within > remaining).then_some(remaining), window_us }));
    }
    let is_rounded = remaining == 0 && window_us < LONG_WINDOW_US && window_us % SECOND_US > 0;
    (remaining, is_rounded.then_some(Precise { remaining: None, window_us }))
}

/// Writes `;tower-r=9;tower-ms=180`. Omits the units if they equal `r`.
pub(super) fn push_precise(text: &mut Text, precise: Precise) {
    if let Some(remaining) = precise.remaining {
        text.push(b";tower-r=");
        text.push_integer(remaining);
    }
    text.push(b";tower-ms=");
    text.push_integer(precise.window_us.div_ceil(1_000));
}

/// Writes a policy as `"default";q=100;w=60` or `"default";q=100;qu="tokens";w=60`, or, in a list
/// without names, as `100;w=60`. A quota without a window has no `w`.
pub(super) fn push_policy(text: &mut Text, policy: &Policy, advertised: Advertised, list: List) {
    let Advertised { quota, window } = advertised;
    if list != List::Nameless {
        push_string(text, policy.name());
        text.push(b";q=");
    }
    text.push_integer(quota);
    if list != List::Nameless && policy.unit() != REQUESTS {
        text.push(b";qu=");
        push_string(text, policy.unit());
    }
    if let Some(window) = window {
        text.push(b";w=");
        text.push_integer(window);
    }
}

/// Writes a policy's name or unit as a string. Names and units are printable ASCII, see [`Policy`].
fn push_string(text: &mut Text, name: &str) {
    text.push(b"\"");
    for byte in name.bytes() {
        if byte == b'"' || byte == b'\\' {
            text.push(b"\\");
        }
        text.push(&[byte]);
    }
    text.push(b"\"");
}

/// Writes `"default";r=`, the beginning of an item of draft 11.
pub(super) fn item_start(text: &mut Text, policy: &Policy) {
    push_string(text, policy.name());
    text.push(b";r=");
}

/// Stands before the window of an item of draft 11.
const BEFORE_WINDOW: &[u8] = b";t=";

/// Writes an item of draft 11: its `start`, and `99;t=60`.
pub(super) fn push_item(text: &mut Text, start: &[u8], remaining: u64, window: Option<u64>) {
    text.push(start);
    text.push_integer(remaining);
    if let Some(window) = window {
        text.push(BEFORE_WINDOW);
        text.push_integer(window);
    }
}

/// Returns the text of [`push_item`] in a `Vec` without spare room. This function writes the text only once, because
/// copying a text that was just written stalls on store forwarding (bench "layer, allowed, header fields").
#[inline]
pub(super) fn item_text(start: &[u8], remaining: u64, window: Option<u64>) -> Vec<u8> {
    let mut digits = [itoa::Buffer::new(); 2];
    let [of_remaining, of_window] = &mut digits;
    let remaining = of_remaining.format(remaining.min(UNITS_MAX)).as_bytes();
    let window = window.map(|window| of_window.format(window.min(UNITS_MAX)).as_bytes());
    let length = start.len() + remaining.len() + window.map_or(0, |window| BEFORE_WINDOW.len() + window.len());
    let mut text = Vec::with_capacity(length);
    text.extend_from_slice(start);
    text.extend_from_slice(remaining);
    if let Some(window) = window {
        text.extend_from_slice(BEFORE_WINDOW);
        text.extend_from_slice(window);
    }
    text
}

/// Writes `;pk=:d2hvbQ==:`, the end of an item with a partition key.
pub(super) fn push_partition(text: &mut Text, partition: &[u8]) {
    text.push(b";pk=:");
    text.push(STANDARD.encode(partition).as_bytes());
    text.push(b":");
}

/// Writes the dictionary of draft 07: `limit=100, remaining=50, reset=5`. Omits `reset` if it is `None`.
pub(super) fn push_dictionary(text: &mut Text, limit: u64, remaining: u64, reset: Option<u64>) {
    text.push(b"limit=");
    text.push_integer(limit);
    text.push(b", remaining=");
    text.push_integer(remaining);
    if let Some(reset) = reset {
        text.push(b", reset=");
        text.push_integer(reset);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn advertised(quota: Quota) -> (u64, u64) {
        let Advertised { quota, window } = Advertised::new(&quota);
        (quota, window.expect("its units come back with time"))
    }

    #[test]
    fn quota_is_advertised_as_capacity_and_refill_time() {
        assert_eq!(advertised(Quota::per_minute(100)), (100, 60));
        assert_eq!(advertised(Quota::per_minute(100).burst(20).unwrap()), (20, 12));
        assert_eq!(advertised(Quota::per_minute(100).burst(1).unwrap()), (1, 1));
        assert_eq!(advertised(Quota::per_minute(100).burst(21).unwrap()), (21, 13));
        assert_eq!(advertised(Quota::per_day(1_000)), (1_000, 86_400));
        assert_eq!(advertised(Quota::leaky_queue(5, Duration::from_secs(60)).unwrap()), (6, 72));
        assert_eq!(advertised(Quota::fixed_window(7, Duration::from_millis(1_500)).unwrap()), (7, 2));
        assert_eq!(advertised(Quota::step_bucket(10, Duration::from_secs(5)).unwrap().burst(25).unwrap()), (25, 15));
    }

    #[test]
    fn advertised_window_is_at_least_one_second() {
        let tenth = Duration::from_millis(100);
        assert_eq!(advertised(Quota::new(10, tenth).unwrap()), (100, 1));
        assert_eq!(advertised(Quota::new(10, tenth).unwrap().burst(5).unwrap()), (100, 1));
        assert_eq!(advertised(Quota::new(10, tenth).unwrap().burst(200).unwrap()), (200, 2));
        assert_eq!(advertised(Quota::per_second(50).burst(10).unwrap()), (50, 1));
        assert_eq!(advertised(Quota::gcra(1_000, Duration::from_secs(1)).unwrap()), (1_000, 1));
        assert_eq!(advertised(Quota::fixed_window(10, Duration::from_millis(700)).unwrap()), (14, 1));
        assert_eq!(advertised(Quota::new(UNITS_MAX, Duration::from_micros(1)).unwrap()), (UNITS_MAX, 1));
    }

    #[test]
    fn closed_quota_is_advertised_as_zero_per_period() {
        assert_eq!(advertised(Quota::per_minute(0)), (0, 60));
        assert_eq!(advertised(Quota::new(0, Duration::from_millis(5)).unwrap()), (0, 1));
    }
}
