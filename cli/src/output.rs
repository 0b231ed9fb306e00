//! Printing the results of commands.

use std::fmt::{Display, Write as _};
use std::io::{ErrorKind, Write as _};

use tower_ratelimit::rules::RulesError;

use crate::exit;

/// Collects what a command prints. It is written at the end, so a reader that has gone ends no command early.
#[derive(Default)]
pub(crate) struct Output {
    results: String,
    troubles: String,
}

impl Output {
    /// Adds a line to the standard output.
    pub(crate) fn line(&mut self, text: impl Display) {
        self.results.push_str(&printable(&text.to_string()));
        self.results.push('\n');
    }

    /// Adds JSON to the standard output. Characters that a terminal must not get are in its strings, and escaped there.
    pub(crate) fn json(&mut self, json: impl Display) {
        for c in json.to_string().chars() {
            match is_harmful(c) {
                true => _ = write!(self.results, "\\u{:04x}", u32::from(c)), // writing into a text never fails
                false => self.results.push(c),
            }
        }
        self.results.push('\n');
    }

    /// Adds a program for a shell to the standard output. Nothing in it is of a file.
    pub(crate) fn script(&mut self, text: &str) {
        self.results.push_str(text);
    }

    /// Adds a line to the standard error: why the command could not do what it should.
    pub(crate) fn trouble(&mut self, text: impl Display) {
        self.troubles.push_str(&printable(&text.to_string()));
        self.troubles.push('\n');
    }

    /// Adds the problems of a file to the standard error.
    pub(crate) fn problems(&mut self, file: &str, error: &RulesError) {
        for problem in error.problems() {
            self.trouble(format_args!("{file}:{problem:#}"));
        }
        if error.more() > 0 {
            self.trouble(format_args!("{file}: and {} more", error.more()));
        }
    }

    /// Writes everything. Returns the exit code.
    pub(crate) fn write(self, code: u8) -> u8 {
        let _ = std::io::stderr().write_all(self.troubles.as_bytes());
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(self.results.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) => code,
            // The reader has seen enough.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => code,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "error: the output cannot be written: {error}");
                exit::TROUBLE
            }
        }
    }
}

/// Replaces characters that a terminal must not get. They can be in names of files, and in what files say.
fn printable(text: &str) -> String {
    text.chars().map(|c| if is_harmful(c) { '\u{fffd}' } else { c }).collect()
}

/// Returns whether a character could move the cursor of a terminal, or turn the direction of its text.
fn is_harmful(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || c.is_control() && c != '\n'
}
