//! Writing header values: first into a buffer on the stack, then with at most one allocation.

use std::fmt;

use bytes::Bytes;
use http::HeaderValue;
use smallvec::SmallVec;

use crate::quota::UNITS_MAX;

/// A header value that is being written. Values longer than the buffer spill to the heap.
#[derive(Debug, Default)]
pub(crate) struct Text(SmallVec<[u8; 160]>);

impl Text {
    pub(crate) fn new() -> Self {
        Self(SmallVec::new())
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Writes an integer of RFC 9651, which has at most 15 digits. Larger ones saturate.
    pub(crate) fn push_integer(&mut self, n: u64) {
        let mut digits = Backward::new();
        digits.put_integer(n);
        self.push(digits.as_bytes());
    }

    /// Writes the separator of list members, unless the text is empty.
    pub(crate) fn push_separator(&mut self) {
        if !self.0.is_empty() {
            self.push(b", ");
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the header value, in one allocation. Returns `None` if the text is empty, or has bytes
    /// that are invalid in a header.
    pub(crate) fn to_value(&self) -> Option<HeaderValue> {
        if self.is_empty() { None } else { HeaderValue::from_bytes(&self.0).ok() }
    }

    /// Returns a header value that is cheap to clone, because its clones share one buffer.
    pub(crate) fn to_shared_value(&self) -> Option<HeaderValue> {
        if self.is_empty() {
            return None;
        }
        let bytes = Bytes::copy_from_slice(&self.0);
        drop(bytes.clone()); // the first clone allocates the reference count: not while a request waits
        HeaderValue::from_maybe_shared(bytes).ok()
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(SmallVec::from_slice(text.as_bytes()))
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

/// Returns an integer as a header value. Larger ones than 15 digits saturate. Integers below 4,000,
/// such as the seconds of an hour, need no allocation.
pub(crate) fn integer(n: u64) -> Option<HeaderValue> {
    if let Some(digits) = small(n).and_then(|digits| digits.get(leading_zeros(n)..)) {
        return HeaderValue::from_maybe_shared(Bytes::from_static(digits)).ok();
    }
    let mut text = Text::new();
    text.push_integer(n);
    text.to_value()
}

/// A short text that is written from its end to its front, like the digits of a number.
pub(super) struct Backward {
    bytes: [u8; Self::MAX],
    start: usize,
}

impl Backward {
    /// At least two integers of 15 digits, `;t=`, and the zeros before a number's first digits.
    const MAX: usize = 40;

    #[inline]
    pub(super) fn new() -> Self {
        Self { bytes: [0; Self::MAX], start: Self::MAX }
    }

    /// Puts four bytes in front and skips the first `skip` of them.
    #[inline]
    pub(super) fn put(&mut self, bytes: [u8; 4], skip: usize) {
        let start = self.start.saturating_sub(4);
        if let Some(room) = self.bytes.get_mut(start..start + 4) {
            room.copy_from_slice(&bytes);
            self.start = start + skip;
        }
    }

    /// Puts an integer of at most 15 digits in front. Larger ones saturate.
    #[inline]
    pub(super) fn put_integer(&mut self, n: u64) {
        let four_digits = |n| small(n).copied().unwrap_or_default();
        let mut rest = n.min(UNITS_MAX);
        while rest >= 1_000 {
            self.put(four_digits(rest % 1_000), 1);
            rest /= 1_000;
        }
        self.put(four_digits(rest), leading_zeros(rest));
    }

    #[inline]
    pub(super) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }
}

/// Returns how many of a number's four digits are leading zeros.
#[inline]
fn leading_zeros(n: u64) -> usize {
    usize::from(n < 1_000) + usize::from(n < 100) + usize::from(n < 10)
}

#[inline]
fn small(n: u64) -> Option<&'static [u8; 4]> {
    usize::try_from(n).ok().and_then(|n| SMALL.get(n))
}

const SMALL_COUNT: usize = 4_000;

const fn digit(n: usize, of: usize) -> u8 {
    b'0' + (n / of % 10) as u8 // below 10
}

/// The texts `0000` to `3999`.
static SMALL: [[u8; 4]; SMALL_COUNT] = {
    let mut table = [[b'0'; 4]; SMALL_COUNT];
    let mut n = 0;
    while n < SMALL_COUNT {
        table[n] = [digit(n, 1_000), digit(n, 100), digit(n, 10), digit(n, 1)];
        n += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_written_as_in_the_standard_library() {
        for n in (0..5_000).chain([9_999, 10_000, UNITS_MAX - 1, UNITS_MAX]) {
            let mut text = Text::new();
            text.push_integer(n);
            assert_eq!(text.as_bytes(), n.to_string().as_bytes());
            assert_eq!(integer(n).unwrap(), n.to_string());
        }
    }

    #[test]
    fn integer_has_at_most_fifteen_digits() {
        assert_eq!(integer(u64::MAX).unwrap(), "999999999999999");
    }
}
