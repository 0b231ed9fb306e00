//! A writer of header values. The writer fills a buffer on the stack, and then makes the value with at
//! most one allocation.

use bytes::Bytes;
use http::HeaderValue;

use crate::quota::UNITS_MAX;

/// A header value that is being written. The text moves to the heap if it does not fit the buffer on the
/// stack.
#[derive(Debug)]
pub(crate) struct Text {
    stack: [u8; 128],
    length: usize,
    heap: Vec<u8>,
}

impl Text {
    #[inline]
    pub(crate) fn new() -> Self {
        Self { stack: [0; 128], length: 0, heap: Vec::new() }
    }

    // This is not a `SmallVec`, which takes twice the instructions for a short text (bench "layer of three policies,
    // header fields").
    #[inline]
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let end = self.length + bytes.len();
        if let Some(room) = self.stack.get_mut(self.length..end) {
            room.copy_from_slice(bytes);
        } else {
            if self.heap.is_empty() {
                self.heap.extend(self.stack.iter().take(self.length));
            }
            self.heap.extend(bytes);
        }
        self.length = end;
    }

    /// Removes all text.
    pub(crate) fn clear(&mut self) {
        self.length = 0;
        self.heap.clear();
    }

    fn as_bytes(&self) -> &[u8] {
        self.stack.get(..self.length).unwrap_or(&self.heap)
    }

    /// Writes an integer of RFC 9651, which has at most 15 digits. Larger integers saturate.
    #[inline]
    pub(crate) fn push_integer(&mut self, n: u64) {
        self.push(itoa::Buffer::new().format(n.min(UNITS_MAX)).as_bytes());
    }

    /// Writes the separator of list members, unless the text is empty.
    pub(crate) fn push_separator(&mut self) {
        if self.length > 0 {
            self.push(b", ");
        }
    }

    /// Returns the header value, in one allocation. Returns `None` if the text is empty, or has bytes
    /// that are invalid in a header.
    pub(crate) fn to_value(&self) -> Option<HeaderValue> {
        if self.length == 0 { None } else { HeaderValue::from_bytes(self.as_bytes()).ok() }
    }

    /// Returns a header value that is cheap to clone, because its clones share one buffer.
    pub(crate) fn to_shared_value(&self) -> Option<HeaderValue> {
        let value = self.to_value();
        drop(value.clone()); // the first clone allocates the reference count: not while a request waits
        value
    }
}

/// Returns an integer as a header value. Integers with more than 15 digits saturate. Integers below
/// 4,000, such as the seconds of an hour, need no allocation.
pub(crate) fn integer(n: u64) -> Option<HeaderValue> {
    if let Some(digits) = usize::try_from(n).ok().and_then(|n| SMALL.get(n)) {
        let zeros = usize::from(n < 1_000) + usize::from(n < 100) + usize::from(n < 10);
        return HeaderValue::from_maybe_shared(Bytes::from_static(digits.get(zeros..)?)).ok();
    }
    HeaderValue::from_str(itoa::Buffer::new().format(n.min(UNITS_MAX))).ok()
}

/// The texts `0000` to `3999`.
static SMALL: [[u8; 4]; 4_000] = {
    let mut table = [[b'0'; 4]; 4_000];
    let mut n = 0;
    while n < table.len() {
        let digits = [n / 1_000, n / 100 % 10, n / 10 % 10, n % 10];
        let mut at = 0;
        while at < digits.len() {
            table[n][at] += digits[at] as u8; // below 10
            at += 1;
        }
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
            assert_eq!(text.to_value().unwrap(), n.to_string());
            assert_eq!(integer(n).unwrap(), n.to_string());
        }
    }

    #[test]
    fn integer_has_at_most_fifteen_digits() {
        assert_eq!(integer(u64::MAX).unwrap(), "999999999999999");
    }
}
