//! The fields of draft-ietf-httpapi-ratelimit-headers: revision 11 (on the wire the same since 08), 07, and 06.
//!
//! Strings, integers, lists and parameters are written as RFC 9651 serializes them; parameters always in the same order.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::HeaderValue;

use crate::quota::{Quota, UNITS_MAX};

use super::kept;
use super::text::{Text, four_digits, leading_zeros};
use super::wait::seconds_ceil;

const SECOND_US: u64 = 1_000_000;

/// A quota as it is told: `quota` units per `window` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Advertised {
    pub(crate) quota: u64,
    pub(crate) window: u64,
}

impl Advertised {
    /// The capacity, and the time in which it comes back, in whole seconds: a bucket of burst 20 at 100 per minute is
    /// 20 per 12 s.
    ///
    /// A window cannot be told to be below one second. A quota of a shorter period whose capacity is its limit is scaled
    /// to one second, rounded down (10 per 100 ms is 100 per 1 s); another capacity is told per 1 s, which is cautious.
    pub(crate) fn new(quota: &Quota) -> Self {
        let period_us = quota.spec().period_us;
        if quota.capacity() == 0 {
            return Self { quota: 0, window: seconds_ceil(period_us).max(1) };
        }
        if quota.capacity() == quota.limit() && period_us < SECOND_US {
            let scaled = u128::from(quota.limit()) * u128::from(SECOND_US) / u128::from(period_us.max(1));
            return Self { quota: u64::try_from(scaled).unwrap_or(u64::MAX).min(UNITS_MAX), window: 1 };
        }
        let refill_us = crate::time::micros_ceil(quota.refill_time());
        Self { quota: quota.capacity(), window: seconds_ceil(refill_us).max(1) }
    }

    /// `;q=100;w=60`, after the policy's name, or `;q=100;qu="tokens";w=60`.
    pub(super) fn push_parameters(self, unit: Option<&str>, text: &mut Text) {
        text.push(b";q=");
        text.push_field_integer(self.quota);
        if let Some(unit) = unit {
            text.push(b";qu=");
            push_string(text, unit);
        }
        text.push(b";w=");
        text.push_field_integer(self.window);
    }

    /// `100;w=60`, as until draft 07.
    pub(super) fn push_nameless(self, text: &mut Text) {
        text.push_field_integer(self.quota);
        text.push(b";w=");
        text.push_field_integer(self.window);
    }
}

/// A policy's name or unit as a string of RFC 9651. Both are printable ASCII, see [`Policy`](crate::Policy).
pub(super) fn push_string(text: &mut Text, name: &str) {
    text.push(b"\"");
    for byte in name.bytes() {
        if byte == b'"' || byte == b'\\' {
            text.push(b"\\");
        }
        text.push(&[byte]);
    }
    text.push(b"\"");
}

/// `"default";r=`, the start of draft 11's item.
pub(super) fn push_item_start(text: &mut Text, name: &str) {
    push_string(text, name);
    text.push(b";r=");
}

/// `"default";r=99;t=60`, beginning with its `start`.
pub(super) fn push_item(text: &mut Text, start: &[u8], remaining: u64, window: Option<u64>) {
    text.push_separator();
    text.push(start);
    text.push(ItemEnd::new(remaining, window).as_bytes());
}

/// `;pk=:d2hvbQ==:`, the end of an item that names its partition.
pub(super) fn push_partition(text: &mut Text, partition: &[u8]) {
    text.push(b";pk=:");
    text.push(STANDARD.encode(partition).as_bytes());
    text.push(b":");
}

/// A list of one such item, in one allocation at most.
#[inline]
pub(super) fn item_value(start: &[u8], remaining: u64, window: Option<u64>) -> Option<HeaderValue> {
    let write = || {
        let end = ItemEnd::new(remaining, window);
        let end = end.as_bytes();
        // Exactly as long as it has to be: else the buffer would be allocated twice.
        let mut item = Vec::with_capacity(start.len() + end.len());
        item.extend_from_slice(start);
        item.extend_from_slice(end);
        Bytes::from(item)
    };
    match (remaining, window) {
        (0, Some(window)) => kept::exhausted(start, window, write),
        _ => HeaderValue::from_maybe_shared(write()).ok(),
    }
}

/// `99;t=60`, written from its end to its front.
struct ItemEnd {
    bytes: [u8; Self::MAX],
    start: usize,
}

impl ItemEnd {
    /// Two integers of 15 digits, `;t=`, and the zeros before a number's first digits; rounded up.
    const MAX: usize = 40;

    #[inline]
    fn new(remaining: u64, window: Option<u64>) -> Self {
        let mut end = Self { bytes: [0; Self::MAX], start: Self::MAX };
        if let Some(window) = window {
            end.put_integer(window);
            end.put(*b" ;t=", 1);
        }
        end.put_integer(remaining);
        end
    }

    /// Puts four bytes in front, of which the first so many do not count.
    #[inline]
    fn put(&mut self, bytes: [u8; 4], skip: usize) {
        let start = self.start.saturating_sub(4);
        if let Some(room) = self.bytes.get_mut(start..start + 4) {
            room.copy_from_slice(&bytes);
            self.start = start + skip;
        }
    }

    #[inline]
    fn put_integer(&mut self, n: u64) {
        let mut rest = n.min(UNITS_MAX);
        while rest >= 1_000 {
            self.put(four_digits(rest % 1_000), 1);
            rest /= 1_000;
        }
        self.put(four_digits(rest), leading_zeros(rest));
    }

    #[inline]
    fn as_bytes(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }
}

/// `limit=100, remaining=50, reset=5`, the dictionary of draft 07.
pub(super) fn push_dictionary(text: &mut Text, limit: u64, remaining: u64, reset: u64) {
    text.push(b"limit=");
    text.push_field_integer(limit);
    text.push(b", remaining=");
    text.push_field_integer(remaining);
    text.push(b", reset=");
    text.push_field_integer(reset);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn advertised(quota: Quota) -> (u64, u64) {
        let Advertised { quota, window } = Advertised::new(&quota);
        (quota, window)
    }

    #[test]
    fn an_item_is_written_the_same_alone_and_in_a_list() {
        let numbers = [0, 7, 9, 10, 99, 100, 101, 999, 1_000, 123_456, UNITS_MAX - 1, UNITS_MAX, u64::MAX];
        for remaining in numbers {
            for window in numbers.map(Some).into_iter().chain([None]) {
                let told = |n: u64| n.min(UNITS_MAX);
                let mut expected = format!("\"a\";r={}", told(remaining));
                if let Some(window) = window {
                    expected += &format!(";t={}", told(window));
                }
                assert_eq!(item_value(b"\"a\";r=", remaining, window).unwrap(), expected);
                let mut text = Text::new();
                push_item(&mut text, b"\"a\";r=", remaining, window);
                assert_eq!(text.as_bytes(), expected.as_bytes());
            }
        }
    }

    #[test]
    fn a_quota_is_told_as_its_capacity_and_the_time_in_which_that_comes_back() {
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
    fn a_window_below_one_second_is_never_told_as_none() {
        let tenth = Duration::from_millis(100);
        assert_eq!(advertised(Quota::new(10, tenth).unwrap()), (100, 1));
        assert_eq!(advertised(Quota::new(10, tenth).unwrap().burst(5).unwrap()), (5, 1));
        assert_eq!(advertised(Quota::fixed_window(10, Duration::from_millis(700)).unwrap()), (14, 1));
        assert_eq!(advertised(Quota::new(UNITS_MAX, Duration::from_micros(1)).unwrap()), (UNITS_MAX, 1));
    }

    #[test]
    fn a_closed_quota_is_told_as_none_per_its_period() {
        assert_eq!(advertised(Quota::per_minute(0)), (0, 60));
        assert_eq!(advertised(Quota::new(0, Duration::from_millis(5)).unwrap()), (0, 1));
    }
}
