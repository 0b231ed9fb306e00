//! A file as a tree in which every value has its position.
//!
//! The format is YAML 1.2, which includes JSON. There are bounds for the bytes of a file, for the depth of its tree,
//! for the number of its values and for the bytes of their texts. Each alias counts as the value that it repeats.

use std::borrow::Cow;
use std::collections::HashMap;
use std::rc::Rc;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Span};

use super::error::Problems;
use super::problem::{Position, Quoted, RulesErrorKind};

/// The largest file, in bytes.
pub(crate) const BYTES_MAX: usize = 1 << 20;

const DEPTH_MAX: usize = 32;

const NODES_MAX: usize = 250_000;

/// The maximum number of bytes of all texts together, which only a file with aliases can reach.
pub(super) const TEXTS_MAX: usize = 2 * BYTES_MAX;

/// The maximum number of the characters `[]{},?:` in a file. These characters separate the tokens of a list in
/// brackets, and the parser holds all tokens of such a list at once.
const SEPARATORS_MAX: usize = 200_000;

/// A value and its position.
#[derive(Debug)]
pub(crate) struct Node<'a> {
    pub(crate) position: Position,
    pub(crate) value: NodeValue<'a>,
    pub(crate) size: Size,
    /// The number of levels in this value, 1 for a scalar.
    height: usize,
}

/// The size of a value and all values in it. Each alias counts as the value that it repeats.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Size {
    pub(crate) nodes: usize,
    /// The bytes of all texts.
    pub(crate) texts: usize,
}

impl Size {
    /// Returns the size of a text. If `text` is empty, this is also the size of a list or mapping without its values.
    fn of(text: &str) -> Self {
        Self { nodes: 1, texts: text.len() }
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self { nodes: self.nodes.saturating_add(other.nodes), texts: self.texts.saturating_add(other.texts) }
    }
}

#[derive(Debug)]
pub(crate) enum NodeValue<'a> {
    /// A text. A text that was written without quotes (`is_plain`) may also be a number, a truth value or null.
    Scalar {
        text: Cow<'a, str>,
        is_plain: bool,
    },
    List(Vec<Rc<Node<'a>>>),
    Map(Vec<MapField<'a>>),
}

/// A field of a mapping.
#[derive(Debug)]
pub(crate) struct MapField<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) position: Position,
    pub(crate) node: Rc<Node<'a>>,
}

/// The type of a value in YAML's core schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    Nothing,
    Truth,
    Number,
    Text,
    List,
    Map,
}

impl Node<'_> {
    pub(crate) fn kind(&self) -> Type {
        match &self.value {
            NodeValue::Scalar { text, is_plain: true } => plain_type(text),
            NodeValue::Scalar { .. } => Type::Text,
            NodeValue::List(_) => Type::List,
            NodeValue::Map(_) => Type::Map,
        }
    }
}

/// Returns the type of a text without quotes.
fn plain_type(text: &str) -> Type {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => Type::Nothing,
        "true" | "True" | "TRUE" | "false" | "False" | "FALSE" => Type::Truth,
        ".inf" | ".Inf" | ".INF" | "-.inf" | "+.inf" | ".nan" | ".NaN" | ".NAN" => Type::Number,
        _ if is_number(text) => Type::Number,
        _ => Type::Text,
    }
}

fn is_number(text: &str) -> bool {
    let all = |digits: &str, is: fn(&u8) -> bool| !digits.is_empty() && digits.bytes().all(|byte| is(&byte));
    if let Some(digits) = text.strip_prefix("0x") {
        return all(digits, u8::is_ascii_hexdigit);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return all(digits, |byte| (b'0'..=b'7').contains(byte));
    }
    // Rust's `f64` parser accepts every decimal number of YAML's core schema, and also a few words that begin with a
    // letter.
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') && digits.parse::<f64>().is_ok()
}

/// Returns the text of a file, or the problem if the file has no valid text.
pub(crate) fn decode(bytes: &[u8]) -> Result<&str, Problems<'_>> {
    let problem = |text, kind, position, message: String| {
        let mut problems = Problems::new(text);
        problems.add(kind, position, message);
        problems
    };
    if bytes.len() > BYTES_MAX {
        let message = format!("the file has more than {BYTES_MAX} bytes");
        return Err(problem("", RulesErrorKind::TooLarge, Position::START, message));
    }
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let (text, is_whole) = match std::str::from_utf8(bytes) {
        Ok(text) => (text, true),
        Err(error) => {
            let valid = bytes.get(..error.valid_up_to()).unwrap_or_default();
            (std::str::from_utf8(valid).unwrap_or_default(), false)
        }
    };
    // The parser would treat a NUL as the end of the file, and files that were not written in full often have NULs.
    let odd = text.char_indices().find(|(_, c)| c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\u{85}'));
    match odd {
        Some((at, odd)) => {
            let position = end_of(text.get(..at).unwrap_or_default());
            let message = format!("the file has the control character U+{:04X}; write it as text", u32::from(odd));
            Err(problem(text, RulesErrorKind::Syntax, position, message))
        }
        None if !is_whole => {
            let message = "the file is not UTF-8: save it in this encoding".to_owned();
            Err(problem(text, RulesErrorKind::Syntax, end_of(text), message))
        }
        None => Ok(text),
    }
}

/// Says what is wrong with a text that is not YAML, and how to fix it. The parser's own messages name productions of
/// the grammar, and may change with any version. Therefore words in the parser's messages only select one of our own
/// messages.
fn not_yaml(info: &str) -> &'static str {
    const INDENTED: &str = "the line does not fit the lines before it: give lines that belong together the same \
                            indent, and write a space after the colon of `name: value`";
    const CHOICES: &[(&[&str], &str)] = &[
        (
            &["expected ','"],
            "here a text with a brace, a bracket, a comma, or a colon and a space in it needs quotes (a key is written \
             without a colon, as `header x-api-key`), or a bracket or a brace before it is not closed",
        ),
        (
            &["tabs ", "tab cannot", "found a tab", "with a tab", "valid YAML whitespace"],
            "YAML is indented by spaces, so write spaces instead of the tab",
        ),
        (
            &["mapping values", "placement of ':'"],
            "the line is indented wrongly, or a text with a colon and a space in it has no quotes (a key is written \
             without a colon, as `header x-api-key`)",
        ),
        (
            &["escape", "hexadecimal"],
            "a backslash in double quotes begins an escape that does not exist: write it twice, or use single quotes",
        ),
        (&["eof", "end of stream"], "the text ends too early: a quotation mark, a bracket or a brace is not closed"),
        (&["trailing content"], "nothing can stand after the closing quotation mark: put the whole text into quotes"),
        (&["<document", "next token"], INDENTED),
        (
            &["anchor"],
            "`*name` stands for the value with `&name` before it, and there is no such value: a text that begins with \
             `*` or `&` needs quotes",
        ),
        (&["tag", "TAG", "handle"], "rules have no tags: a text that begins with `!` needs quotes"),
        (
            &["directive", "document", "version"],
            "a line that begins with `%`, `---` or `...` cannot stand here: leave it out",
        ),
        (&["bracket"], "a closing bracket or brace stands here without an opening one"),
        (&["unexpected character", "cannot start with '-'"], "a text that begins with this character needs quotes"),
        (
            &["quoted"],
            "a quotation mark before this place is not closed, or the lines within the quotes are indented less than \
             the first",
        ),
        (&["indent", "block", "key", "node"], INDENTED),
    ];
    let chosen = CHOICES.iter().find(|(words, _)| words.iter().any(|word| info.contains(word)));
    chosen.map_or("put a text with YAML's special characters in it into quotes", |(_, text)| *text)
}

/// Returns the position after the last character of a text.
pub(super) fn end_of(text: &str) -> Position {
    let breaks = text.replace("\r\n", "\n");
    let line = breaks.matches(['\n', '\r']).count() + 1;
    let column = breaks.rsplit(['\n', '\r']).next().unwrap_or_default().chars().count() + 1;
    Position { line, column }
}

/// A list or a mapping that was not yet read completely.
struct OpenNode<'a> {
    position: Position,
    /// The number of characters before it.
    index: usize,
    anchor: usize,
    value: OpenValue<'a>,
    size: Size,
    height: usize,
}

enum OpenValue<'a> {
    List(Vec<Rc<Node<'a>>>),
    Map {
        entries: Vec<MapField<'a>>,
        /// The line of each field's name.
        lines: HashMap<Cow<'a, str>, usize>,
        /// The name of the field whose value is read next.
        name: Option<(Cow<'a, str>, Position)>,
    },
}

/// The tree of a text, as far as it could be read.
pub(crate) struct Parsed<'a> {
    /// The tree of the first document, if that document could be read.
    pub(crate) first: Option<Rc<Node<'a>>>,
    /// True if the first document is the whole text.
    is_whole: bool,
}

impl<'a> Parsed<'a> {
    /// Returns the tree, if the first document is the whole text.
    pub(crate) fn whole(self) -> Option<Rc<Node<'a>>> {
        self.first.filter(|_| self.is_whole)
    }
}

/// Reads the tree of a text. If the text cannot be read as a tree, adds the problem that prevents this.
pub(crate) fn parse<'a>(text: &'a str, problems: &mut Problems<'_>) -> Parsed<'a> {
    let separators = text.bytes().filter(|byte| b"[]{},?:".contains(byte)).count();
    if separators > SEPARATORS_MAX {
        let message = format!("the file has more than {SEPARATORS_MAX} brackets, braces, commas and colons");
        problems.add(RulesErrorKind::TooLarge, Position::START, message);
        return Parsed { first: None, is_whole: false };
    }
    let mut builder =
        Builder { problems, open: Vec::new(), anchored: HashMap::new(), root: None, size: Size::default() };
    let is_whole = builder.events(text).is_some();
    if builder.root.is_none() && is_whole {
        let message = "the file is empty: if you want no rules, write `rules: []`";
        builder.problems.add(RulesErrorKind::Syntax, Position::START, message);
    }
    Parsed { first: builder.root, is_whole }
}

/// Returns the innermost bracket or brace before the index `end` that is not closed, and its index. Looks from the
/// index `from`, at which the text is in no quotes and no comment. Brackets in quotes, comments and words do not count.
/// Returns `None` if a quotation mark is not closed, because the parser says so.
fn unclosed_before(text: &str, from: usize, end: usize) -> Option<(char, usize)> {
    let mut open: Vec<(char, usize)> = Vec::new();
    let mut chars = text.chars().enumerate().skip(from);
    let mut before = ' ';
    while let Some((at, char)) = chars.next() {
        let begins = before.is_whitespace() || "[{,:".contains(before);
        match char {
            '#' if before.is_whitespace() => drop(chars.find(|(_, char)| *char == '\n')),
            '"' | '\'' if begins => loop {
                match chars.next()?.1 {
                    '\\' if char == '"' => drop(chars.next()), // it escapes the next character
                    end if end == char => break,
                    _ => {}
                }
            },
            // Outside of brackets, a word may have a bracket in it.
            '[' | '{' if begins || !open.is_empty() => open.push((char, at)),
            ']' | '}' => match open.pop() {
                Some((bracket, at)) if (bracket == '[') != (char == ']') => return Some((bracket, at)),
                _ => {}
            },
            _ => {}
        }
        before = char;
    }
    open.into_iter().rfind(|(_, at)| *at < end)
}

/// Returns the position of the character with this index.
fn position_of(text: &str, index: usize) -> Position {
    let mut found = Position::START;
    let mut chars = text.chars().take(index).peekable();
    while let Some(char) = chars.next() {
        if char == '\n' || char == '\r' && chars.peek() != Some(&'\n') {
            found = Position { line: found.line + 1, column: 1 };
        } else {
            found.column += 1;
        }
    }
    found
}

struct Builder<'a, 'p, 't> {
    problems: &'p mut Problems<'t>,
    open: Vec<OpenNode<'a>>,
    anchored: HashMap<usize, Rc<Node<'a>>>,
    root: Option<Rc<Node<'a>>>,
    /// The size of all values so far.
    size: Size,
}

impl<'a> Builder<'a, '_, '_> {
    /// Handles the parser's events for a text. Returns `None` if a problem of the text prevents a tree.
    fn events(&mut self, text: &'a str) -> Option<()> {
        for event in Parser::new_from_str(text) {
            match event {
                Ok((event, span)) => self.event(event, span)?,
                Err(error) => {
                    let (position, message) = match self.unclosed_bracket(text, error.marker()) {
                        Some((bracket, position)) => (
                            position,
                            format!(
                                "this is not YAML: this `{bracket}` is not closed, or begins a text that needs quotes"
                            ),
                        ),
                        None => (position(error.marker()), format!("this is not YAML: {}", not_yaml(error.info()))),
                    };
                    return self.stop(RulesErrorKind::Syntax, position, message);
                }
            }
        }
        Some(())
    }

    /// Returns the innermost bracket or brace that is not closed, and its position. If the parser stopped at the end of
    /// the text, each one that is open is not closed. The line `...` is an end too.
    fn unclosed_bracket(&self, text: &str, stopped: &Marker) -> Option<(char, Position)> {
        let rest: String = text.chars().skip(stopped.index()).collect();
        let bracket = |open: &OpenNode<'_>| text.chars().nth(open.index).filter(|char| matches!(char, '[' | '{'));
        if matches!(rest.trim(), "" | "...") {
            let innermost = self.open.last()?;
            return Some((bracket(innermost)?, innermost.position));
        }
        let outermost = self.open.iter().find(|open| bracket(open).is_some());
        let from = outermost.or(self.open.last()).map_or(0, |open| open.index);
        let (bracket, at) = unclosed_before(text, from, stopped.index())?;
        Some((bracket, position_of(text, at)))
    }

    /// Handles an event of the parser. Returns `None` if the rest of the file must not be read.
    fn event(&mut self, event: Event<'a>, span: Span) -> Option<()> {
        let position = position(&span.start);
        match event {
            Event::DocumentStart(_) if self.root.is_some() => {
                let message = "the file has a second document: write all rules into one; in Envoy's form each domain has a \
                               file of its own";
                self.stop(RulesErrorKind::Syntax, position, message)
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.refuse_tag(tag.is_some(), position)?;
                let size = Size::of(&text);
                self.count(size, position)?;
                let value = NodeValue::Scalar { text, is_plain: style == ScalarStyle::Plain };
                self.node(Node { position, value, size, height: 1 }, anchor)
            }
            Event::SequenceStart(anchor, tag) => {
                self.refuse_tag(tag.is_some(), position)?;
                self.begin(OpenValue::List(Vec::new()), &span.start, anchor)
            }
            Event::MappingStart(anchor, tag) => {
                self.refuse_tag(tag.is_some(), position)?;
                let value = OpenValue::Map { entries: Vec::new(), lines: HashMap::new(), name: None };
                self.begin(value, &span.start, anchor)
            }
            Event::SequenceEnd | Event::MappingEnd => {
                let OpenNode { position, anchor, value, size, height, .. } = self.open.pop()?;
                let value = match value {
                    OpenValue::List(items) => NodeValue::List(items),
                    OpenValue::Map { entries, .. } => NodeValue::Map(entries),
                };
                self.node(Node { position, value, size, height }, anchor)
            }
            Event::Alias(anchor) => match self.anchored.get(&anchor).map(Rc::clone) {
                Some(node) => {
                    self.count(node.size, position)?;
                    if self.open.len() + node.height > DEPTH_MAX {
                        return self.too_deep(position);
                    }
                    self.put(node, position)
                }
                None => self.stop(RulesErrorKind::Syntax, position, "an alias cannot stand in the value that it names"),
            },
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) | Event::DocumentEnd => {
                Some(())
            }
        }
    }

    fn stop(&mut self, kind: RulesErrorKind, position: Position, message: impl Into<String>) -> Option<()> {
        self.problems.add(kind, position, message);
        None
    }

    fn too_deep(&mut self, position: Position) -> Option<()> {
        let message = format!("the values are nested too deeply; the most is {DEPTH_MAX} levels");
        self.stop(RulesErrorKind::TooLarge, position, message)
    }

    fn refuse_tag(&mut self, has_tag: bool, position: Position) -> Option<()> {
        if has_tag {
            self.stop(RulesErrorKind::Syntax, position, "rules have no tags: leave out the `!`")
        } else {
            Some(())
        }
    }

    fn count(&mut self, size: Size, position: Position) -> Option<()> {
        self.size = self.size.and(size);
        let message = if self.size.nodes > NODES_MAX {
            format!("the file has more than {NODES_MAX} values, aliases included")
        } else if self.size.texts > TEXTS_MAX {
            format!("the file's texts have more than {TEXTS_MAX} bytes, aliases included")
        } else {
            return Some(());
        };
        self.stop(RulesErrorKind::TooLarge, position, message)
    }

    fn begin(&mut self, value: OpenValue<'a>, start: &Marker, anchor: usize) -> Option<()> {
        let position = position(start);
        if self.open.len() + 1 >= DEPTH_MAX {
            return self.too_deep(position);
        }
        let size = Size::of("");
        self.count(size, position)?;
        self.open.push(OpenNode { position, index: start.index(), anchor, value, size, height: 1 });
        Some(())
    }

    /// Adds a value that is written out and is not an alias.
    fn node(&mut self, node: Node<'a>, anchor: usize) -> Option<()> {
        let position = node.position;
        let node = Rc::new(node);
        if anchor != 0 {
            self.anchored.insert(anchor, Rc::clone(&node));
        }
        self.put(node, position)
    }

    /// Adds a value to the innermost open list or mapping, or makes it the root.
    fn put(&mut self, node: Rc<Node<'a>>, position: Position) -> Option<()> {
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Some(());
        };
        open.size = open.size.and(node.size);
        open.height = open.height.max(node.height + 1);
        let (entries, lines, name) = match &mut open.value {
            OpenValue::List(items) => {
                items.push(node);
                return Some(());
            }
            OpenValue::Map { entries, lines, name } => (entries, lines, name),
        };
        if let Some((name, position)) = name.take() {
            if let Some(first) = lines.insert(name.clone(), position.line) {
                lines.insert(name.clone(), first);
                let message = format!("{} is given twice; the first is in line {first}", Quoted(&name));
                self.problems.add(RulesErrorKind::Field, position, message);
            } else {
                entries.push(MapField { name, position, node });
            }
            return Some(());
        }
        match &node.value {
            NodeValue::Scalar { text, .. } => {
                *name = Some((text.clone(), position));
                Some(())
            }
            NodeValue::List(_) | NodeValue::Map(_) => self.stop(
                RulesErrorKind::Syntax,
                position,
                "a field's name must be text: is a quote missing around `{…}`?",
            ),
        }
    }
}

fn position(marker: &Marker) -> Position {
    Position { line: marker.line(), column: marker.col() + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_without_quotes_has_the_type_of_the_core_schema() {
        for (words, kind) in [
            ("~ null Null NULL", Type::Nothing),
            ("true True TRUE false False FALSE", Type::Truth),
            (".inf .Inf .INF -.inf +.inf .nan .NaN .NAN 0 -1 +1 1.5 .5 1e3 0x1F 0o17", Type::Number),
            ("nULL tRUE inf nan -inf 0x 0xg 0o8 1.2.3 5/s . - +", Type::Text),
        ] {
            for word in words.split(' ') {
                assert_eq!(plain_type(word), kind, "{word}");
            }
        }
        assert_eq!(plain_type(""), Type::Nothing);
    }
}
