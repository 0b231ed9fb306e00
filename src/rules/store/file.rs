//! Reads a file of rules, and finds out whether the file was written in full.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use super::super::document::{BYTES_MAX, end_of};
use super::super::error::{Problems, RulesError};
use super::super::problem::RulesErrorKind;

/// The content of a file, or the error if it could not be read.
pub(super) type Reading = Result<Arc<[u8]>, RulesError>;

/// Reads a file up to one byte more than a file of rules may have, so that a larger file fails the check of its size.
pub(super) fn read_file(path: &Path) -> Reading {
    let unreadable = |error: std::io::Error| RulesError::unreadable(path, error);
    // Checks first whether this is a file, because opening a pipe would wait for the pipe's writer.
    let is_file = std::fs::metadata(path).map_err(unreadable)?.is_file();
    if !is_file {
        return Err(RulesError::of_file(format!("{}: it is not a file", path.display())));
    }
    let mut content = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(BYTES_MAX as u64 + 1).read_to_end(&mut content).map_err(unreadable)?;
    Ok(content.into())
}

/// Returns whether the last line is `...`, which ends a YAML document.
pub(super) fn has_end_mark(content: &[u8]) -> bool {
    content
        .trim_ascii_end()
        .strip_suffix(b"...")
        .is_some_and(|before| matches!(before.last(), None | Some(b'\n' | b'\r')))
}

/// Returns the error for a file without its end mark `...`.
pub(super) fn incomplete(content: &[u8]) -> RulesError {
    let text = std::str::from_utf8(content).unwrap_or_default();
    let mut problems = Problems::new(text);
    let message = "the file was not written in full: its last line is not `...` any more; to leave `...` out, \
                   restart the program";
    problems.add(RulesErrorKind::Syntax, end_of(text.trim_end()), message);
    problems.into_error()
}
