//! `tower-ratelimit check`: the problems of files of rules.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tower_ratelimit::rules::{NameKind, Problem, RulesBuilder, RulesWarning, RulesWarningKind, UnregisteredName};

use crate::output::Output;
use crate::{exit, files};

/// Check files of rules, and print each problem with its place
///
/// A problem is printed as `FILE:LINE:COLUMN: message`, with the line. Names of keys and actions that the program
/// registers are not known here. They are warnings, unless --key or --action lists them. A name that is similar to
/// another one is a problem.
///
/// The exit code is 0 if all files are right, 1 if one has a problem, and 2 if one cannot be read or an option is
/// wrong.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Files of rules; `-` is the standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A key that the program registers; may be repeated
    #[arg(long = "key", value_name = "NAME")]
    keys: Vec<String>,
    /// An action that the program registers; may be repeated
    #[arg(long = "action", value_name = "NAME")]
    actions: Vec<String>,
    /// Take warnings for problems
    #[arg(long)]
    deny_warnings: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The most names that are printed of one file.
const SHOWN_MAX: usize = 100;

/// The result of checking a file.
#[derive(Default)]
struct Checked {
    file: String,
    trouble: Option<String>,
    problems: Vec<Problem>,
    /// The number of problems that are not listed.
    more: usize,
    /// Names that are not listed, and similar to other names.
    misspelt: Vec<UnregisteredName>,
    /// Other names that are not listed.
    unknown: Vec<UnregisteredName>,
    /// A part of the rules that is probably not meant, or that a reader should know about.
    warnings: Vec<RulesWarning>,
    /// The names that the file uses, listed or not, if its rules are right.
    names: Option<Vec<UnregisteredName>>,
}

pub(crate) fn run(options: &Options, output: &mut Output) -> Result<u8, String> {
    let mut builder = files::builder()?;
    for key in &options.keys {
        builder = builder.key(key, tower_ratelimit::key::global());
    }
    for action in &options.actions {
        builder = builder.action(action, |_| false);
    }
    files::check_names(&builder)?;
    let all: Vec<Checked> = options.files.iter().map(|file| Checked::new(file, &builder)).collect();
    let unused = unused(options, &all);
    if options.json {
        let files: Vec<Value> = all.iter().map(Checked::json).collect();
        output.json(json!({ "files": files, "unused": unused }));
    } else {
        unused.iter().for_each(|option| output.line(format_args!("warning: no file uses what {option} names")));
    }
    for checked in &all {
        if let Some(trouble) = &checked.trouble {
            output.trouble(trouble);
        }
        if !options.json {
            checked.print(output);
        }
    }
    let codes = all.iter().map(|checked| checked.exit_code(options.deny_warnings));
    let is_wrong = options.deny_warnings && !unused.is_empty();
    Ok(codes.max().unwrap_or(exit::FINE).max(if is_wrong { exit::PROBLEMS } else { exit::FINE }))
}

/// Returns the options whose names no file uses. It is not known if a file could not be read.
fn unused(options: &Options, all: &[Checked]) -> Vec<String> {
    let keys = options.keys.iter().map(|name| (NameKind::Key, "--key", name));
    let given = keys.chain(options.actions.iter().map(|name| (NameKind::Action, "--action", name)));
    let is_unused = |kind, name: &str| {
        all.iter().all(|checked| {
            checked
                .names
                .as_ref()
                .is_some_and(|used| used.iter().all(|used| (used.kind(), used.name()) != (kind, name)))
        })
    };
    given.filter(|(kind, _, name)| is_unused(*kind, name)).map(|(_, option, name)| format!("{option} {name}")).collect()
}

impl Checked {
    fn new(file: &Path, builder: &RulesBuilder) -> Self {
        let mut checked = Self { file: files::name(file), ..Self::default() };
        let text = match files::read(file) {
            Ok(text) => text,
            Err(trouble) => return Self { trouble: Some(trouble), ..checked },
        };
        let (names, warnings) = match builder.check(&text) {
            Ok(report) => (report.unregistered().to_vec(), report.warnings().to_vec()),
            Err(error) => {
                (checked.problems, checked.more) = (error.problems().to_vec(), error.more());
                (error.unregistered().to_vec(), error.warnings().to_vec())
            }
        };
        // A name that is similar to another one is probably misspelt.
        let (misspelt, unknown) = names.into_iter().partition(|name| name.problem().suggestion().is_some());
        (checked.misspelt, checked.unknown) = (misspelt, unknown);
        checked.warnings = warnings;
        let report = files::builder().ok().and_then(|builder| builder.check(&text).ok());
        checked.names = report.map(|report| report.unregistered().to_vec());
        checked
    }

    fn exit_code(&self, denies_warnings: bool) -> u8 {
        let has_warnings = !self.unknown.is_empty() || !self.warnings.iter().all(is_note);
        let is_wrong = !self.problems.is_empty() || !self.misspelt.is_empty() || denies_warnings && has_warnings;
        match self.trouble {
            Some(_) => exit::TROUBLE,
            None if is_wrong => exit::PROBLEMS,
            None => exit::FINE,
        }
    }

    fn print(&self, output: &mut Output) {
        let file = &self.file;
        for problem in &self.problems {
            output.line(format_args!("{file}:{problem:#}"));
        }
        if self.more > 0 {
            output.line(format_args!("{file}: and {} more", self.more));
        }
        for name in self.misspelt.iter().take(SHOWN_MAX) {
            output.line(format_args!("{file}:{:#}", name.problem()));
        }
        if let Some(more) = self.misspelt.len().checked_sub(SHOWN_MAX).filter(|more| *more > 0) {
            output.line(format_args!("{file}: and {more} more"));
        }
        print_all(output, file, "warning", self.unknown.iter().map(UnregisteredName::problem));
        print_warnings(output, file, &self.warnings);
        for name in self.misspelt.iter().take(SHOWN_MAX).chain(self.unknown.iter().take(SHOWN_MAX)) {
            let option = if name.kind() == NameKind::Action { "--action" } else { "--key" };
            output.line(format_args!(
                "{file}: if the program registers `{}`, add {option} {}",
                name.name(),
                name.name()
            ));
        }
    }

    fn json(&self) -> Value {
        let (notes, warnings): (Vec<_>, Vec<_>) = self.warnings.iter().partition(|warning| is_note(warning));
        json!({
            "file": self.file,
            "trouble": self.trouble,
            "problems": self.problems.iter().chain(self.misspelt.iter().map(UnregisteredName::problem)).map(problem)
                .collect::<Vec<_>>(),
            "more": self.more,
            "warnings": self.unknown.iter().map(UnregisteredName::problem)
                .chain(warnings.into_iter().map(RulesWarning::problem)).map(problem).collect::<Vec<_>>(),
            "notes": notes.into_iter().map(RulesWarning::problem).map(problem).collect::<Vec<_>>(),
        })
    }
}

/// Returns whether a reader should know about something that may well be meant.
fn is_note(warning: &RulesWarning) -> bool {
    matches!(
        warning.kind(),
        RulesWarningKind::Disabled
            | RulesWarningKind::NoRules
            | RulesWarningKind::NotCalendar
            | RulesWarningKind::ObservesOnly
            | RulesWarningKind::RefusesAll
    )
}

/// Prints the warnings and notes of a file.
pub(crate) fn print_warnings(output: &mut Output, file: &str, warnings: &[RulesWarning]) {
    let (notes, warnings): (Vec<_>, Vec<_>) = warnings.iter().partition(|warning| is_note(warning));
    print_all(output, file, "warning", warnings.into_iter().map(RulesWarning::problem));
    print_all(output, file, "note", notes.into_iter().map(RulesWarning::problem));
}

/// Prints the first warnings or notes.
fn print_all<'p>(output: &mut Output, file: &str, what: &str, all: impl ExactSizeIterator<Item = &'p Problem>) {
    let more = all.len().saturating_sub(SHOWN_MAX);
    for problem in all.take(SHOWN_MAX) {
        let text = format!("{problem:#}");
        let place = format!("{}:{}: ", problem.line(), problem.column());
        output.line(format_args!("{file}:{place}{what}: {}", text.strip_prefix(&place).unwrap_or(&text)));
    }
    if more > 0 {
        output.line(format_args!("{file}: {what}: and {more} more"));
    }
}

fn problem(problem: &Problem) -> Value {
    json!({
        "line": problem.line(),
        "column": problem.column(),
        "message": problem.message(),
        "suggestion": problem.suggestion(),
        "excerpt": problem.excerpt(),
    })
}
