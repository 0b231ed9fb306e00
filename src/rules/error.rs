//! The error of a file of rules, and the collection of its problems.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::problem::{FoundProblem, Position, Problem, Quoted, RulesErrorKind, TextLines, similar};
use super::report::{NameKind, Noticed, RulesWarning, UnregisteredName};
use crate::error::{Source, debug_as_text, printable};

/// The maximum number of problems that are kept. Further problems are only counted.
const PROBLEMS_MAX: usize = 100;

/// The maximum number of comparisons of two letters to find suggestions for the misspelt words of one file. The work is
/// bounded because a file can have very many templates, and very many names that do not exist.
const COMPARED_MAX: usize = 20_000_000;

/// The error of a file of rules. The error has the problems of the file, in the order of their positions.
///
/// The text of the error has for each problem `file:line:column: message`, the line itself, and a
/// mark below the position. If the rules are not from a file, `file:` is missing.
///
/// ```text
/// rules.yaml:3:5: `quote` is not a field of a rule; did you mean `quota`?
///     quote: 100/min
///     ^
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct RulesError {
    /// The problems that were kept, at least one.
    problems: Box<[Problem]>,
    /// The number of problems that were counted but not kept.
    more: usize,
    /// The file that was read.
    file: Option<Arc<Path>>,
    /// The names that a check found not to be registered. Outside of a check, such names are
    /// problems.
    unregistered: Box<[UnregisteredName]>,
    /// The warnings of a check.
    warnings: Box<[RulesWarning]>,
    /// The reason why the file could not be read.
    source: Option<Source>,
    /// The sentence that says who pushed the rules, if operators put them in force.
    pushed: Option<Arc<str>>,
}

impl RulesError {
    /// Makes an error for a whole file, without a position in its text.
    pub(crate) fn of_file(message: impl Into<String>) -> Self {
        let mut problems = Problems::new("");
        problems.add(RulesErrorKind::File, Position::START, message);
        problems.into_error()
    }

    /// Makes the error for a file that could not be read.
    pub(crate) fn unreadable(file: &Path, error: std::io::Error) -> Self {
        Self::caused_by(format!("{}: the file cannot be read", file.display()), error)
    }

    /// Makes an error for a whole file, with its cause. The message also says the cause, because a [`Problem`] has no
    /// source.
    pub(crate) fn caused_by(message: impl fmt::Display, error: std::io::Error) -> Self {
        let made = Self::of_file(format!("{message}: {error}"));
        Self { source: Some(Source::new(error)), ..made }
    }

    /// Makes the error for a name that the program registered but that no file can use.
    pub(crate) fn unusable_name(name: &str) -> Self {
        let mut problems = Problems::new("");
        let message = format!(
            "no key can be registered as {}: use one word that is not a built-in key and not like `header:x` or `/x`",
            Quoted(name)
        );
        problems.add(RulesErrorKind::Name, Position::START, message);
        problems.into_error()
    }

    /// Returns the kind of the first problem.
    #[must_use]
    pub fn kind(&self) -> RulesErrorKind {
        self.problems.first().map_or(RulesErrorKind::File, Problem::kind)
    }

    /// Returns the problems in the order of their positions, at most 100. There is at least one.
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Returns how many problems were found beyond the [problems](Self::problems) that were kept.
    #[must_use]
    pub fn more(&self) -> usize {
        self.more
    }

    /// Returns the path of the file, or `None` if the rules are not from a file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns the unregistered names that the rules use, if the error is from
    /// [`RulesBuilder::check`](super::RulesBuilder::check). Unregistered names are not among the problems of a check.
    /// Names in rules that could not be read may be missing.
    #[must_use]
    pub fn unregistered(&self) -> &[UnregisteredName] {
        &self.unregistered
    }

    /// Returns the warnings of the rules that could be read, if the error is from
    /// [`RulesBuilder::check`](super::RulesBuilder::check).
    #[must_use]
    pub fn warnings(&self) -> &[RulesWarning] {
        &self.warnings
    }

    /// Adds warnings.
    pub(crate) fn with_warnings(self, warnings: Vec<RulesWarning>) -> Self {
        Self { warnings: warnings.into(), ..self }
    }

    /// Adds names that are not registered.
    pub(crate) fn with_unregistered(self, names: Vec<UnregisteredName>) -> Self {
        let unregistered = names.into_iter().chain(self.unregistered).collect();
        Self { unregistered, ..self }
    }

    /// Adds the path of the file that was read.
    pub(crate) fn in_file(self, file: Option<&Arc<Path>>) -> Self {
        Self { file: file.map(Arc::clone), ..self }
    }

    /// Adds the operator who pushed the rules, and the revision in which they were pushed.
    #[cfg(feature = "fleet")]
    pub(crate) fn in_pushed(self, by: &str, revision: u64) -> Self {
        Self { pushed: Some(format!("{by} pushed these rules in revision {revision}").into()), ..self }
    }
}

debug_as_text!(RulesError);

impl fmt::Display for RulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pushed) = &self.pushed {
            write!(f, "{}: ", pushed.chars().map(printable).collect::<String>())?;
        }
        for (at, problem) in self.problems.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            // If the file cannot be read, the message of the problem already names the file.
            if let Some(file) = self.file.as_ref().filter(|_| problem.kind() != RulesErrorKind::File) {
                let file = file.to_string_lossy();
                write!(f, "{}:", file.chars().map(printable).collect::<String>())?;
            }
            write!(f, "{problem:#}")?;
        }
        match self.more {
            0 => Ok(()),
            1 => f.write_str("\nand 1 more problem"),
            more => write!(f, "\nand {more} more problems"),
        }
    }
}

impl std::error::Error for RulesError {
    /// Returns the reason if the file could not be read, or if no thread for reloading could be started.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(Source::get)
    }
}

/// Collects the problems of a file.
pub(crate) struct Problems<'a> {
    text: &'a str,
    found: Vec<FoundProblem>,
    more: usize,
    /// The unregistered names that a program could register, with the first use of each.
    names: HashMap<(NameKind, Box<str>), FoundProblem>,
    /// The number of comparisons of two letters that are left.
    comparable: usize,
}

impl<'a> Problems<'a> {
    /// Makes an empty collection of problems for a file with this text.
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, found: Vec::new(), more: 0, names: HashMap::new(), comparable: COMPARED_MAX }
    }

    /// Adds a problem.
    pub(crate) fn add(&mut self, kind: RulesErrorKind, position: Position, message: impl Into<String>) {
        self.push(FoundProblem { kind, position, message: message.into(), suggestion: None });
    }

    /// Adds a problem with a word. If a word of `known` is similar, the message suggests that word;
    /// if not, the message ends with `otherwise`. Returns the suggestion.
    pub(crate) fn add_word<'w>(
        &mut self,
        kind: RulesErrorKind,
        position: Position,
        message: &str,
        word: &str,
        known: impl IntoIterator<Item = &'w str>,
        otherwise: &str,
    ) -> Option<&'w str> {
        let is_full = self.found.len() >= PROBLEMS_MAX; // the message is not shown
        let suggestion = if is_full { None } else { self.similar(word, known) };
        self.push(FoundProblem::of_word(kind, position, message, suggestion, otherwise));
        suggestion
    }

    /// Notes a name that is not registered, unless it was noted before. The message is made as in
    /// [`add_word`](Self::add_word).
    pub(crate) fn note_name<'w>(
        &mut self,
        kind: NameKind,
        name: &str,
        position: Position,
        message: &str,
        known: impl IntoIterator<Item = &'w str>,
        otherwise: &str,
    ) {
        if self.names.contains_key(&(kind, name.into())) {
            return;
        }
        let found =
            FoundProblem::of_word(RulesErrorKind::Name, position, message, self.similar(name, known), otherwise);
        self.names.insert((kind, name.into()), found);
    }

    /// Returns the known word that is probably meant. Returns `None` after the maximum number of comparisons for the
    /// file.
    fn similar<'w>(&mut self, word: &str, known: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
        let known = known.into_iter().take_while(|one| {
            self.comparable = self.comparable.saturating_sub(word.len() * one.len());
            self.comparable > 0
        });
        similar(word, known)
    }

    /// Removes and returns the noted names, in the order of their positions.
    pub(crate) fn take_names(&mut self) -> Vec<UnregisteredName> {
        let mut names: Vec<_> = self.names.drain().collect();
        names.sort_by_key(|(_, found)| found.position);
        let mut lines = TextLines::of(self.text);
        let names = names.into_iter();
        names.map(|((kind, name), found)| UnregisteredName { kind, name, problem: found.at(&mut lines) }).collect()
    }

    /// Returns warnings with their lines, in the order of their positions.
    pub(super) fn located(&self, mut warnings: Vec<Noticed>) -> Vec<RulesWarning> {
        warnings.sort_by_key(|noticed| noticed.position);
        let mut lines = TextLines::of(self.text);
        let located = warnings.into_iter().map(|Noticed { kind, position, message }| {
            let found = FoundProblem { kind: RulesErrorKind::Value, position, message, suggestion: None };
            RulesWarning { kind, problem: found.at(&mut lines) }
        });
        located.collect()
    }

    fn push(&mut self, found: FoundProblem) {
        // A wrong value in a template is found once for each rule that uses the template, but is reported only once.
        let is_same = |other: &FoundProblem| other.position == found.position && other.message == found.message;
        if self.found.iter().any(is_same) {
            return;
        }
        if self.found.len() < PROBLEMS_MAX {
            self.found.push(found);
        } else {
            self.more += 1;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Returns the value, or an error if the value is absent or a problem was added.
    pub(crate) fn into_result<T>(self, value: Option<T>) -> Result<T, RulesError> {
        match value {
            Some(value) if self.is_empty() => Ok(value),
            _ => Err(self.into_error()),
        }
    }

    pub(crate) fn into_error(mut self) -> RulesError {
        let unregistered = self.take_names().into();
        self.found.sort_by_key(|found| found.position);
        let mut lines = TextLines::of(self.text);
        let problems = self.found.into_iter().map(|found| found.at(&mut lines));
        RulesError {
            problems: problems.collect(),
            more: self.more,
            file: None,
            unregistered,
            warnings: [].into(),
            source: None,
            pushed: None,
        }
    }
}
