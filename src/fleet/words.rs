//! Functions that write and read lines of words. Processes of all versions read these lines.

use std::sync::Arc;

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

/// The bytes that are percent-encoded in a word.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%');

/// Writes a space, and then a text as a word. An empty text is written as `-`.
pub(crate) fn push_word(text: &mut String, word: &str) {
    text.push(' ');
    push_encoded(text, word);
}

/// Writes a text as a word.
pub(super) fn push_encoded(text: &mut String, word: &str) {
    match word {
        "" => text.push('-'),
        "-" => text.push_str("%2D"),
        word => text.extend(percent_encode(word.as_bytes(), ENCODED)),
    }
}

/// Writes a space and a number.
pub(crate) fn push_number(text: &mut String, number: u64) {
    text.push(' ');
    text.push_str(itoa::Buffer::new().format(number));
}

/// Returns the words of a line, or `None` if the line does not have `COUNT` words.
pub(crate) fn words<const COUNT: usize>(line: &str) -> Option<[&str; COUNT]> {
    let (mut words, mut rest) = ([""; COUNT], line.split(' '));
    for word in &mut words {
        *word = rest.next()?;
    }
    rest.next().is_none().then_some(words)
}

/// Returns the text that a word encodes.
pub(crate) fn read_text(word: &str) -> Option<Arc<str>> {
    if word == "-" { Some("".into()) } else { Some(percent_decode_str(word).decode_utf8().ok()?.into()) }
}
