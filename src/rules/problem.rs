//! A problem of a file of rules, with its position and its line.

use std::fmt;

use crate::error::printable;

/// The maximum number of characters that an excerpt shows of a line.
const LINE_MAX: usize = 120;

/// The longest word for which a suggestion is searched, in bytes.
const WORD_MAX: usize = 64;

/// The position of a value in a file. Lines and columns are counted from 1, and columns count
/// characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

impl Position {
    /// The beginning of a file, for problems of the whole file.
    pub(crate) const START: Self = Self { line: 1, column: 1 };
}

/// The kind of a [`Problem`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RulesErrorKind {
    /// The file could not be opened or read, or it has the wrong form for its use. For example,
    /// only a file in Envoy's form can limit descriptors.
    File,
    /// The file is not one document of UTF-8 YAML, or uses parts of YAML that rules do not need,
    /// such as tags.
    Syntax,
    /// The file is too large, too deep, or has too many rules.
    TooLarge,
    /// A field is unknown, missing or given twice, or its value has the wrong type.
    Field,
    /// A value has the right type but is impossible, such as a quota of 5 per 400 days.
    Value,
    /// A name is used by another rule, or is unknown. For example, the program did not register a
    /// key, or a plan has no quota.
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

impl Problem {
    /// Returns the kind of the problem.
    #[must_use]
    pub fn kind(&self) -> RulesErrorKind {
        self.kind
    }

    /// Returns the line, counted from 1. Returns 1 if the problem is the whole file.
    #[must_use]
    pub fn line(&self) -> usize {
        self.position.line
    }

    /// Returns the column, which is counted in characters from 1. Returns 1 if the problem is the
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

    /// Returns the line of the file, or the part of a long line that contains the position. Returns
    /// an empty text if the problem is the whole file.
    #[must_use]
    pub fn excerpt(&self) -> &str {
        &self.excerpt
    }
}

/// Prints `line:column: message`, or only the message for a file that could not be read. In the alternate form
/// (`{:#}`) the excerpt follows, with a mark below the position.
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

/// A problem without its excerpt, before its line is looked up.
pub(super) struct FoundProblem {
    pub(super) kind: RulesErrorKind,
    pub(super) position: Position,
    pub(super) message: String,
    pub(super) suggestion: Option<String>,
}

impl FoundProblem {
    /// Makes a problem with a misspelt word. `suggestion` is the word that was probably meant.
    pub(super) fn of_word(
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
    pub(super) fn at(self, lines: &mut TextLines<'_>) -> Problem {
        let Self { kind, position, message, suggestion } = self;
        let (excerpt, mark) = lines.excerpt(position);
        let message = message.chars().map(printable).collect();
        Problem { kind, position, message, suggestion: suggestion.map(Into::into), excerpt, mark }
    }
}

/// The rest of a text, from the beginning of a line. Line breaks are those of YAML. Positions must be looked up in
/// their order, so that each part of the text is read once.
pub(super) struct TextLines<'a> {
    rest: &'a str,
    number: usize,
    /// The position that was reached in the first line of `rest`: the number of bytes and the
    /// number of characters before it.
    passed: (usize, usize),
}

impl<'a> TextLines<'a> {
    pub(super) fn of(text: &'a str) -> Self {
        Self { rest: text, number: 1, passed: (0, 0) }
    }

    /// Goes to a line. Returns `None` if the text has fewer lines.
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

/// Returns the known word that is most similar to `word`, or `None` if no known word is similar
/// enough to be meant.
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

/// Prints a text of the file in a message, shortened and between backticks.
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
