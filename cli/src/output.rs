//! Printing the results of commands.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

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

/// Replaces characters that could move the cursor of a terminal. They can be in names of files.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}
