//! The error of a file of rules: all of its problems, each with its position.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::error::Source;

/// The most problems that are kept. Others are only counted.
const PROBLEMS_MAX: usize = 100;

/// The most characters of a line that are shown.
const LINE_MAX: usize = 120;

/// The longest word that a suggestion is looked for, in bytes.
const WORD_MAX: usize = 64;

/// The position of a value in a file. Lines and columns begin with 1, and columns count characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

impl Position {
    /// The beginning of a file, for problems of the whole file.
    pub(crate) const START: Self = Self { line: 1, column: 1 };
}

/// The error of a file of rules. It has all problems of the file, in the order of their positions.
///
/// Its text has for each problem `file:line:column: message`, the line itself, and a mark below the
/// position. Rules that are not from a file have no `file:`.
///
/// ```text
/// rules.yaml:3:5: `quote` is not a field of a rule; did you mean `quota`?
///     quote: 100/min
///     ^
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesError {
    /// At least one.
    problems: Box<[Problem]>,
    /// The number of problems that were not kept.
    more: usize,
    /// The file that was read.
    file: Option<Arc<Path>>,
    /// The names that are not registered, if that is no problem.
    unregistered: Box<[UnregisteredName]>,
    /// Why the file could not be read.
    source: Option<Source>,
}

/// The kind of a [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RulesErrorKind {
    /// The file could not be opened or read, or its form does not fit its use, as with
    /// descriptors, which only Envoy's form has.
    File,
    /// The file is not one document of UTF-8 YAML, or uses parts of YAML that rules do not need,
    /// such as tags.
    Syntax,
    /// The file is too large, too deep, or has too many rules.
    TooLarge,
    /// A field is unknown, missing or given twice, or its value has the wrong type.
    Field,
    /// A value has the right type and is impossible, such as a quota of 5 per 400 days.
    Value,
    /// A name is taken by another rule, or means nothing: a key that the program did not register,
    /// or a plan without a quota.
    Name,
}

/// A problem of a file of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    kind: RulesErrorKind,
    position: Position,
    message: Box<str>,
    suggestion: Option<Box<str>>,
    excerpt: Box<str>,
    /// The column of the position in the excerpt.
    mark: usize,
}

impl RulesError {
    /// Makes the error of a file as a whole, whatever its text is.
    pub(crate) fn of_file(message: impl Into<String>) -> Self {
        let mut problems = Problems::new("");
        problems.add(RulesErrorKind::File, Position::START, message);
        problems.into_error()
    }

    /// Makes the error of a file that could not be read.
    pub(crate) fn unreadable(file: &Path, error: std::io::Error) -> Self {
        Self::of_file(format!("{}: the file cannot be read", file.display())).caused_by(error)
    }

    pub(crate) fn caused_by(self, error: std::io::Error) -> Self {
        Self { source: Some(Source::new(error)), ..self }
    }

    /// Makes the error of a name that the program registered and no file can use.
    pub(crate) fn unusable_name(name: &str) -> Self {
        let mut problems = Problems::new("");
        let message = format!(
            "no key can be registered as {}: take one word that is neither ready-made nor like `header:x` or `/x`",
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

    /// Returns the number of problems beyond those that are [kept](Self::problems).
    #[must_use]
    pub fn more(&self) -> usize {
        self.more
    }

    /// Returns the path of the file. `None` if the rules are not from a file.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Returns the names that the rules use and that are not registered, apart from the problems, if the error is from
    /// [`RulesBuilder::check`](super::RulesBuilder::check). Names of rules that could not be read may be missing.
    #[must_use]
    pub fn unregistered(&self) -> &[UnregisteredName] {
        &self.unregistered
    }

    /// Adds names that are not registered.
    pub(crate) fn with_unregistered(self, names: Vec<UnregisteredName>) -> Self {
        let unregistered = names.into_iter().chain(self.unregistered).collect();
        Self { unregistered, ..self }
    }

    /// Names the file that was read.
    pub(crate) fn in_file(self, file: Option<&Arc<Path>>) -> Self {
        Self { file: file.map(Arc::clone), ..self }
    }
}

impl fmt::Display for RulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.problems.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            // The message of a file that cannot be read names it.
            if let Some(file) = self.file.as_ref().filter(|_| problem.kind != RulesErrorKind::File) {
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
    /// Returns why the file could not be read, or why no thread could be started that reads it again, if that is the
    /// problem.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(Source::get)
    }
}

impl Problem {
    /// Returns the kind of the problem.
    #[must_use]
    pub fn kind(&self) -> RulesErrorKind {
        self.kind
    }

    /// Returns the line, which begins with 1. It is 1 if the problem is the whole file.
    #[must_use]
    pub fn line(&self) -> usize {
        self.position.line
    }

    /// Returns the column, which begins with 1 and counts characters. It is 1 if the problem is the
    /// whole file.
    #[must_use]
    pub fn column(&self) -> usize {
        self.position.column
    }

    /// Returns what is wrong and how to fix it, without the position.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the word that was probably meant. The message contains it.
    #[must_use]
    pub fn suggestion(&self) -> Option<&str> {
        self.suggestion.as_deref()
    }

    /// Returns the line of the file, or the part of a long line that contains the position. It is
    /// empty if the problem is the whole file.
    #[must_use]
    pub fn excerpt(&self) -> &str {
        &self.excerpt
    }
}

/// Prints `line:column: message`; of a file that could not be read, the message alone. In the alternate form (`{:#}`) the
/// excerpt follows, with a mark below the position.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind != RulesErrorKind::File {
            write!(f, "{}:{}: ", self.line(), self.column())?;
        }
        f.write_str(&self.message)?;
        if f.alternate() && !self.excerpt.is_empty() {
            write!(f, "\n{}\n{:>2$}", self.excerpt, '^', self.mark)?;
        }
        Ok(())
    }
}

/// The kind of a name that a program registers for files of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NameKind {
    /// An extractor, see [`RulesBuilder::key`](super::RulesBuilder::key).
    Key,
    /// A classifier, see [`RulesBuilder::action`](super::RulesBuilder::action).
    Action,
}

/// A name that rules use and that is not registered: what
/// [`RulesBuilder::check`](super::RulesBuilder::check) returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnregisteredName {
    kind: NameKind,
    name: Box<str>,
    problem: Problem,
}

impl UnregisteredName {
    /// Returns the kind of the name.
    #[must_use]
    pub fn kind(&self) -> NameKind {
        self.kind
    }

    /// Returns the name as the rules have it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the first use of the name, as the problem that it is for a program that does not register the name.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }
}

/// A found problem, before its line is looked up.
struct Found {
    kind: RulesErrorKind,
    position: Position,
    message: String,
    suggestion: Option<String>,
}

impl Found {
    /// Makes a problem with a word, for which `suggestion` was probably meant.
    fn of_word(
        kind: RulesErrorKind,
        position: Position,
        message: &str,
        suggestion: Option<&str>,
        otherwise: &str,
    ) -> Self {
        let message = match suggestion {
            Some(meant) => format!("{message}; did you mean `{meant}`?"),
            None => format!("{message}{otherwise}"),
        };
        Self { kind, position, message, suggestion: suggestion.map(str::to_owned) }
    }

    /// Adds the line.
    fn at(self, lines: &mut Lines<'_>) -> Problem {
        let Self { kind, position, message, suggestion } = self;
        let (excerpt, mark) = lines.excerpt(position);
        let message = message.chars().map(printable).collect();
        Problem { kind, position, message, suggestion: suggestion.map(Into::into), excerpt, mark }
    }
}

/// Collects the problems of a file.
pub(crate) struct Problems<'a> {
    text: &'a str,
    found: Vec<Found>,
    more: usize,
    /// The names that are not registered and may be, with their first uses.
    names: HashMap<(NameKind, Box<str>), Found>,
}

impl<'a> Problems<'a> {
    /// Makes an empty collection for the file with this text.
    pub(crate) fn new(text: &'a str) -> Self {
        Self { text, found: Vec::new(), more: 0, names: HashMap::new() }
    }

    /// Adds a problem.
    pub(crate) fn add(&mut self, kind: RulesErrorKind, position: Position, message: impl Into<String>) {
        self.push(Found { kind, position, message: message.into(), suggestion: None });
    }

    /// Adds a problem with a word. If one of `known` is similar, the message suggests it; otherwise
    /// the message ends with `otherwise`. Returns the suggestion.
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
        let suggestion = if is_full { None } else { similar(word, known) };
        self.push(Found::of_word(kind, position, message, suggestion, otherwise));
        suggestion
    }

    /// Notes a name that is not registered, unless it was noted before. The message is as in
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
        if let Entry::Vacant(entry) = self.names.entry((kind, name.into())) {
            entry.insert(Found::of_word(RulesErrorKind::Name, position, message, similar(name, known), otherwise));
        }
    }

    /// Takes the noted names out, in the order of their positions.
    pub(crate) fn take_names(&mut self) -> Vec<UnregisteredName> {
        let mut names: Vec<_> = self.names.drain().collect();
        names.sort_by_key(|(_, found)| found.position);
        let mut lines = Lines::of(self.text);
        let names = names.into_iter();
        names.map(|((kind, name), found)| UnregisteredName { kind, name, problem: found.at(&mut lines) }).collect()
    }

    fn push(&mut self, found: Found) {
        if self.found.len() < PROBLEMS_MAX {
            self.found.push(found);
        } else {
            self.more += 1;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Returns the value, or the error if it is absent or a problem was added.
    pub(crate) fn into_result<T>(self, value: Option<T>) -> Result<T, RulesError> {
        match value {
            Some(value) if self.is_empty() => Ok(value),
            _ => Err(self.into_error()),
        }
    }

    pub(crate) fn into_error(mut self) -> RulesError {
        let unregistered = self.take_names().into();
        self.found.sort_by_key(|found| found.position);
        let mut lines = Lines::of(self.text);
        let problems = self.found.into_iter().map(|found| found.at(&mut lines));
        RulesError { problems: problems.collect(), more: self.more, file: None, unregistered, source: None }
    }
}

/// The rest of a text, from the beginning of a line. The breaks are those of YAML. Places must come in their order, so
/// that each part of the text is passed once.
struct Lines<'a> {
    rest: &'a str,
    number: usize,
    /// A position in the rest that is in the line: the bytes before it, and the characters.
    passed: (usize, usize),
}

impl<'a> Lines<'a> {
    fn of(text: &'a str) -> Self {
        Self { rest: text, number: 1, passed: (0, 0) }
    }

    /// Goes to a line. Returns `None` if there is none.
    fn go_to(&mut self, number: usize) -> Option<()> {
        while self.number < number {
            let end = self.rest.find(['\n', '\r'])?;
            let rest = self.rest.get(end..)?;
            let rest = rest.strip_prefix("\r\n").or_else(|| rest.get(1..))?;
            *self = Self { rest, number: self.number + 1, passed: (0, 0) };
        }
        Some(())
    }

    /// Returns the part of a line that contains a position, and the column in that part.
    fn excerpt(&mut self, position: Position) -> (Box<str>, usize) {
        let skipped = if position.column > LINE_MAX { position.column - LINE_MAX / 2 } else { 0 };
        if self.go_to(position.line).is_none() {
            return ("".into(), position.column - skipped);
        }
        let (mut bytes, mut chars) = self.passed;
        let rest = self.rest.get(bytes..).unwrap_or_default();
        let line = rest.chars().take_while(|c| !matches!(c, '\n' | '\r'));
        for c in line.take(skipped.saturating_sub(chars)) {
            (bytes, chars) = (bytes + c.len_utf8(), chars + 1);
        }
        self.passed = (bytes, chars);
        let rest = self.rest.get(bytes..).unwrap_or_default();
        let shown = rest.chars().take_while(|c| !matches!(c, '\n' | '\r')).take(LINE_MAX);
        let shown: String = shown.map(|c| if c == '\t' { ' ' } else { printable(c) }).collect();
        (shown.trim_end().into(), position.column - skipped)
    }
}

/// Replaces a character that could move the cursor of the terminal that shows the error, or turn the direction of its
/// text.
fn printable(c: char) -> char {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if c.is_control() || turns { '\u{fffd}' } else { c }
}

/// Returns the known word that is most similar to `word`, if one is similar enough to be meant.
pub(crate) fn similar<'w>(word: &str, known: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    if word.len() > WORD_MAX {
        return None;
    }
    let lower = word.to_ascii_lowercase().replace('_', "-");
    let near = known.into_iter().filter(|one| one.len() <= WORD_MAX).filter_map(|one| {
        let distance = strsim::osa_distance(&lower, &one.to_ascii_lowercase().replace('_', "-"));
        (distance <= one.chars().count().max(3) / 3).then_some((distance, one))
    });
    near.min_by_key(|(distance, _)| *distance).map(|(_, one)| one)
}

/// Prints text of the file in a message: quoted by backticks, and shortened.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 60;
        let end = self.0.char_indices().nth(SHOWN).map(|(at, _)| at);
        match end.and_then(|end| self.0.get(..end)) {
            Some(shown) => write!(f, "`{shown}…`"),
            None => write!(f, "`{}`", self.0),
        }
    }
}

/// Lists words in a message: `a`, `b` and `c`.
pub(crate) fn listed<'w>(words: impl IntoIterator<Item = &'w str>) -> String {
    let words: Vec<String> = words.into_iter().map(|word| format!("`{word}`")).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        Some((last, _)) => last.clone(),
        None => "none".to_owned(),
    }
}
