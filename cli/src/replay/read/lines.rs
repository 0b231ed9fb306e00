//! Lines of a log, of bounded length.

use std::io::{self, BufRead};

use memchr::memchr;

/// The longest line that is read, in bytes. The rest of a longer one is skipped.
pub(crate) const LINE_MAX: usize = 64 << 10;

/// Reads lines one by one into one buffer.
pub(crate) struct Lines<R> {
    from: R,
    line: Vec<u8>,
    is_first: bool,
    is_too_long: bool,
}

/// A line without its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line<'a> {
    Whole(&'a [u8]),
    /// A line that is longer than [`LINE_MAX`], and how it begins.
    TooLong(&'a [u8]),
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(from: R) -> Self {
        Self { from, line: Vec::new(), is_first: true, is_too_long: false }
    }

    /// Reads the next line. Returns `None` at the end.
    pub(crate) fn advance(&mut self) -> io::Result<Option<()>> {
        self.is_too_long = false;
        self.line.clear();
        // The length of the whole line, of which at most a byte more than `LINE_MAX` is kept.
        let mut length = 0;
        loop {
            let text = match self.from.fill_buf() {
                Ok([]) if length == 0 => return Ok(None),
                Ok(text) => text,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let end = memchr(b'\n', text);
            let text = text.get(..end.unwrap_or(text.len())).unwrap_or_default();
            let room = LINE_MAX + 1 - self.line.len();
            self.line.extend_from_slice(text.get(..room).unwrap_or(text));
            length += text.len();
            let used = text.len() + usize::from(end.is_some());
            self.from.consume(used);
            if end.is_some() || used == 0 {
                break;
            }
        }
        if std::mem::take(&mut self.is_first) && self.line.starts_with(b"\xef\xbb\xbf") {
            self.line.drain(..3);
        }
        if length <= LINE_MAX + 1 && self.line.last() == Some(&b'\r') {
            self.line.pop();
        }
        self.is_too_long = self.line.len() > LINE_MAX;
        self.line.truncate(LINE_MAX);
        Ok(Some(()))
    }

    /// Returns the line that was read last.
    pub(crate) fn line(&self) -> Line<'_> {
        if self.is_too_long { Line::TooLong(&self.line) } else { Line::Whole(&self.line) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<R: BufRead> Lines<R> {
        fn next(&mut self) -> io::Result<Option<Line<'_>>> {
            Ok(self.advance()?.map(|()| self.line()))
        }
    }

    #[test]
    fn long_line_is_cut_and_the_next_is_whole() {
        let mut log = vec![b'a'; 10 * LINE_MAX];
        log.extend_from_slice(b"\nb\r\n\nlast");
        let mut lines = Lines::new(log.as_slice());
        assert_eq!(lines.next().unwrap(), Some(Line::TooLong(&[b'a'; LINE_MAX])));
        for expected in [&b"b"[..], b"", b"last"] {
            assert_eq!(lines.next().unwrap(), Some(Line::Whole(expected)));
        }
        assert_eq!(lines.next().unwrap(), None);
    }

    #[test]
    fn line_of_the_longest_length_is_whole() {
        let log = [vec![b'a'; LINE_MAX], b"\nb".to_vec()].concat();
        let mut lines = Lines::new(log.as_slice());
        assert_eq!(lines.next().unwrap(), Some(Line::Whole(&[b'a'; LINE_MAX])));
        assert_eq!(lines.next().unwrap(), Some(Line::Whole(b"b")));
    }

    #[test]
    fn carriage_return_is_removed_only_from_the_end_of_a_line() {
        for (end, is_whole) in [(&b"\r\n"[..], true), (b"\r", true), (b"\r \n", false), (b" \n", false)] {
            // A small buffer, so that a line comes in parts.
            let log = [vec![b'a'; LINE_MAX], end.to_vec()].concat();
            let mut lines = Lines::new(io::BufReader::with_capacity(7, log.as_slice()));
            let expected = [b'a'; LINE_MAX];
            let expected = if is_whole { Line::Whole(&expected) } else { Line::TooLong(&expected) };
            assert_eq!(lines.next().unwrap(), Some(expected), "{end:?}");
            assert_eq!(lines.next().unwrap(), None);
        }
    }

    #[test]
    fn byte_order_mark_is_no_part_of_a_line() {
        let mut lines = Lines::new(&b"\xef\xbb\xbfa\n"[..]);
        assert_eq!(lines.next().unwrap(), Some(Line::Whole(b"a")));
    }
}
