//! Tests of the reader, over two tables of files.
//!
//! `problems.txt` has files that are refused, each with its error. `REWRITE_GOLDEN=1` writes the
//! errors anew. `rules.txt` has files that are read.

mod mutations;
mod positions;
mod schema;

use std::fmt::Write as _;

use super::error::RulesError;
use super::read::{KnownNames, read};
use super::spec::FileSpec;

const NAMES: KnownNames<'_> =
    KnownNames { keys: &["tenant"], actions: &["create_account", "create_post"], are_all: true };

/// Stands before the errors of a file.
const ERRORS: &str = "-->\n";

pub(super) fn spec(text: &str) -> Result<FileSpec, RulesError> {
    read(text.as_bytes(), NAMES, |file, _| file)
}

/// Returns the nanoseconds that this thread has been running, which other programs do not change. They are those of the
/// last tick of the scheduler, so they are for work of many milliseconds.
#[cfg(target_os = "linux")]
pub(super) fn running_time() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stat.split(' ').next().unwrap().parse().unwrap()
}

/// A file of a table.
struct Case {
    title: &'static str,
    /// Whether the schema refuses it.
    is_against_schema: bool,
    text: String,
    expected: &'static str,
}

fn cases(table: &'static str) -> Vec<Case> {
    let files = table.split("=== ").skip(1).map(|case| {
        let (title, rest) = case.split_once('\n').unwrap();
        let (text, expected) = rest.split_once(ERRORS).unwrap_or((rest, ""));
        let plain = title.trim_end_matches(" (schema)");
        let text = text.replace('␀', "\0").replace('␍', "\r");
        Case { title: plain, is_against_schema: plain != title, text, expected }
    });
    files.collect()
}

fn refused() -> Vec<Case> {
    cases(include_str!("problems.txt"))
}

fn accepted() -> Vec<Case> {
    cases(include_str!("rules.txt"))
}

#[test]
fn refused_files_have_these_errors() {
    let mut table = String::new();
    let mut differing = Vec::new();
    for case in refused() {
        let error = spec(&case.text).expect_err(case.title).to_string();
        if error.trim_end() != case.expected.trim_end() {
            differing.push(format!("{}:\n{error}", case.title));
        }
        let mark = if case.is_against_schema { " (schema)" } else { "" };
        let text = case.text.replace('\0', "␀").replace('\r', "␍");
        writeln!(table, "=== {}{mark}\n{text}{ERRORS}{error}", case.title).unwrap();
    }
    if std::env::var_os("REWRITE_GOLDEN").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/rules/tests/problems.txt"), table).unwrap();
        return;
    }
    assert!(differing.is_empty(), "REWRITE_GOLDEN=1 accepts these:\n{}", differing.join("\n"));
}

#[test]
fn accepted_files_have_no_error() {
    for case in accepted() {
        if let Err(error) = spec(&case.text) {
            panic!("{}:\n{error}", case.title);
        }
    }
}

#[test]
fn debug_of_the_error_is_its_text_with_the_kind() {
    let error = spec("rules: [{nam: a}]").unwrap_err();
    assert_eq!(format!("{error:?}"), format!("RulesError(Field): {error}"));
    let gone = RulesError::unreadable("gone.yaml".as_ref(), std::io::Error::other("no such file"));
    assert_eq!(format!("{gone:?}"), "RulesError(File): gone.yaml: the file cannot be read: no such file");
}
