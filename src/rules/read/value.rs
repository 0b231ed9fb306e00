//! Reads single values, and the fields of mappings.

use super::super::document::{MapField, Node, NodeValue, Type};
use super::super::error::Problems;
use super::super::problem::{Position, Quoted, RulesErrorKind, listed};
use super::super::report::NameKind;

/// The maximum number of rules of a file.
pub(super) const RULES_MAX: usize = 10_000;

/// The maximum number of patterns with `*` in the hosts, headers, parameters and user agents of a file. A request may
/// have to be compared with all these patterns.
pub(super) const PATTERNS_MAX: usize = 10_000;

/// The longest name of a key or an action, in bytes.
const NAME_BYTES_MAX: usize = 1_000;

/// The fields of `match`.
pub(in crate::rules) const MATCH: &[&str] =
    &["method", "path", "host", "header", "query", "client", "user-agent", "action", "time", "not"];

/// The fields of `not`: the fields of `match` except `not` itself.
pub(in crate::rules) const NOT: &[&str] =
    &["method", "path", "host", "header", "query", "client", "user-agent", "action", "time"];

/// The names that the program registered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KnownNames<'a> {
    pub(crate) keys: &'a [&'a str],
    pub(crate) actions: &'a [&'a str],
    /// True if `keys` and `actions` are all names that the program registers, so that any other
    /// name is a problem. Otherwise a name that is not among them is only noted.
    pub(crate) are_all: bool,
}

/// The fields of a mapping.
pub(super) struct Fields<'n, 'a> {
    pub(super) what: &'static str,
    pub(super) position: Position,
    pub(super) entries: &'n [MapField<'a>],
    /// The known fields that are similar to misspelt fields. A field for which a misspelt field was
    /// reported is not also reported as missing.
    pub(super) meant: Vec<&'static str>,
}

impl<'n, 'a> Fields<'n, 'a> {
    pub(super) fn entry(&self, name: &str) -> Option<&'n MapField<'a>> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    pub(super) fn get(&self, name: &str) -> Option<&'n Node<'a>> {
        Some(&self.entry(name)?.node)
    }
}

/// Returns a suggestion for a field without a value. A field without a value is often the end of a text with a
/// comma, as in `{quota: 100 per minute, burst 20}`. Or the space between a field and its value is missing.
pub(super) fn meant_by_bare(entries: &[MapField<'_>], at: usize, known: &[&str]) -> Option<String> {
    let entry = entries.get(at)?;
    if !matches!(&entry.node.value, NodeValue::Scalar { text, is_plain: true } if text.is_empty()) {
        return None;
    }
    if let Some((field, value)) = entry.name.split_once(':').filter(|(field, _)| known.contains(field)) {
        return Some(format!("; write a space after the colon: {}", Quoted(&format!("{field}: {value}"))));
    }
    let before = entries.get(at.checked_sub(1)?)?;
    let NodeValue::Scalar { text, is_plain: true } = &before.node.value else { return None };
    let is_torn = before.position.line == entry.position.line && before.node.kind() == Type::Text;
    is_torn.then(|| {
        let whole = format!("{}: \"{text}, {}\"", before.name, entry.name);
        format!("; if a comma belongs to the text before it, put quotes around the text: {}", Quoted(&whole))
    })
}

pub(super) struct ValueReader<'p, 't, 'n> {
    pub(super) problems: &'p mut Problems<'t>,
    pub(super) names: KnownNames<'n>,
    /// The number of patterns so far.
    pub(super) patterns: usize,
}

/// Each of these methods adds a problem if it returns `None`.
impl ValueReader<'_, '_, '_> {
    /// Reads a field that may be absent.
    pub(super) fn optional<T>(
        &mut self,
        fields: &Fields<'_, '_>,
        field: &'static str,
        read: impl FnOnce(&mut Self, &Node<'_>, &'static str) -> Option<T>,
    ) -> Option<Option<T>> {
        match fields.get(field) {
            Some(node) => read(self, node, field).map(Some),
            None => Some(None),
        }
    }

    /// Reads a condition with one or several alternative values.
    pub(super) fn any_of<T>(
        &mut self,
        fields: &Fields<'_, '_>,
        field: &'static str,
        read: impl FnMut(&mut Self, &Node<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        match fields.get(field) {
            Some(node) => self.one_or_more(node, field, read),
            None => Some(Vec::new()),
        }
    }

    pub(super) fn one_or_more<T>(
        &mut self,
        node: &Node<'_>,
        field: &str,
        mut read: impl FnMut(&mut Self, &Node<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let NodeValue::List(items) = &node.value else { return Some(vec![read(self, node)?]) };
        if items.is_empty() {
            let message = format!("`{field}` is an empty list: give it at least one value");
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        let read: Vec<Option<T>> = items.iter().map(|item| read(self, item)).collect();
        read.into_iter().collect()
    }

    /// Returns the items of a list. If the value is not a list, adds a problem and returns no
    /// items.
    pub(super) fn items<'n, 'a>(&mut self, node: &'n Node<'a>, what: &str, expected: &str) -> Vec<&'n Node<'a>> {
        match &node.value {
            NodeValue::List(items) => items.iter().map(|item| &**item).collect(),
            _ => {
                self.wrong_type::<()>(node, what, expected);
                Vec::new()
            }
        }
    }

    /// Returns the fields of a mapping, and reports unknown fields.
    pub(super) fn fields<'n, 'a>(
        &mut self,
        node: &'n Node<'a>,
        what: &'static str,
        known: &[&'static str],
    ) -> Option<Fields<'n, 'a>> {
        let NodeValue::Map(entries) = &node.value else {
            return self.wrong_type(
                node,
                what,
                &format!("a mapping with the fields {}", listed(known.iter().copied())),
            );
        };
        let mut meant = Vec::new();
        for (at, entry) in entries.iter().enumerate().filter(|(_, entry)| !known.contains(&&*entry.name)) {
            if entry.name == "<<" {
                let message = "`<<` is not supported: write the fields out, or give single values an anchor";
                self.problems.add(RulesErrorKind::Field, entry.position, message);
                continue;
            }
            let message = format!("{} is not a field of {what}", Quoted(&entry.name));
            if let Some(hint) = meant_by_bare(entries, at, known) {
                self.problems.add(RulesErrorKind::Field, entry.position, message + &hint);
                continue;
            }
            if known.contains(&"match") && MATCH.contains(&&*entry.name) {
                let message = format!("{message}: write it in `match`, as in `match: {{{}: …}}`", entry.name);
                self.problems.add(RulesErrorKind::Field, entry.position, message);
                continue;
            }
            if known.contains(&"enabled") && ["disabled", "disable"].contains(&&*entry.name) {
                self.problems.add(RulesErrorKind::Field, entry.position, message + ": write `enabled: false`");
                continue;
            }
            if known.contains(&"quota")
                && ["limit", "limits", "rate", "rates", "rate-limit", "rate_limit"].contains(&&*entry.name)
            {
                self.problems.add(RulesErrorKind::Field, entry.position, message + "; did you mean `quota`?");
                meant.push("quota");
                continue;
            }
            let otherwise = format!(", which has {}", listed(known.iter().copied()));
            let (word, known) = (&entry.name, known.iter().copied());
            meant.extend(self.problems.add_word(
                RulesErrorKind::Field,
                entry.position,
                &message,
                word,
                known,
                &otherwise,
            ));
        }
        Some(Fields { what, position: node.position, entries, meant })
    }

    /// Returns the value of a field, or reports that the field is missing. `such_as` is the end of
    /// the message that the field is missing.
    pub(super) fn required<'n, 'a>(
        &mut self,
        fields: &Fields<'n, 'a>,
        field: &str,
        such_as: &str,
    ) -> Option<&'n Node<'a>> {
        let node = fields.get(field);
        if node.is_none() && !fields.meant.contains(&field) {
            let message = format!("{} needs `{field}`{such_as}", fields.what);
            self.problems.add(RulesErrorKind::Field, fields.position, message);
        }
        node
    }

    pub(super) fn text<'n>(&mut self, node: &'n Node<'_>, field: &str) -> Option<&'n str> {
        self.text_of(node, &format!("`{field}`"))
    }

    pub(super) fn text_of<'n>(&mut self, node: &'n Node<'_>, what: &str) -> Option<&'n str> {
        match (&node.value, node.kind()) {
            (NodeValue::Scalar { text, .. }, Type::Text) => Some(text),
            (NodeValue::Scalar { text, .. }, Type::Number | Type::Truth) => {
                let message = format!("{what} must be text: put quotes around {}", Quoted(text));
                self.refuse(RulesErrorKind::Field, node.position, message)
            }
            _ => self.wrong_type(node, what, "text"),
        }
    }

    /// Reads a name. The name must be short, because messages repeat it in full.
    pub(super) fn short_text<'n>(&mut self, node: &'n Node<'_>, what: &str) -> Option<&'n str> {
        let text = self.text_of(node, what)?;
        if text.len() > NAME_BYTES_MAX {
            let message = format!("{what} has {} bytes; the most is {NAME_BYTES_MAX}", text.len());
            return self.refuse(RulesErrorKind::TooLarge, node.position, message);
        }
        Some(text)
    }

    pub(super) fn number(&mut self, node: &Node<'_>, what: &str, expected: &str) -> Option<u64> {
        match (&node.value, node.kind()) {
            (NodeValue::Scalar { text, .. }, Type::Number) if has_leading_zero(text) => {
                let digits = text.trim_start_matches('0');
                let message = format!(
                    "{what} is written {}, which some readers of YAML take for an octal number: write {}",
                    Quoted(text),
                    Quoted(if digits.is_empty() { "0" } else { digits })
                );
                self.refuse(RulesErrorKind::Value, node.position, message)
            }
            (NodeValue::Scalar { text, .. }, Type::Number) => match text.parse() {
                Ok(number) => Some(number),
                Err(_) => {
                    let message = format!("{what} must be {expected}, not {}", Quoted(text));
                    self.refuse(RulesErrorKind::Value, node.position, message)
                }
            },
            _ => self.wrong_type(node, what, expected),
        }
    }

    pub(super) fn truth(&mut self, node: &Node<'_>, field: &str) -> Option<bool> {
        match (&node.value, node.kind()) {
            (NodeValue::Scalar { text, .. }, Type::Truth) => Some(text.eq_ignore_ascii_case("true")),
            _ => self.wrong_type(node, &format!("`{field}`"), "`true` or `false`"),
        }
    }

    pub(super) fn wrong_type<T>(&mut self, node: &Node<'_>, what: &str, expected: &str) -> Option<T> {
        let found = match (&node.value, node.kind()) {
            (_, Type::Nothing) => "nothing".to_owned(),
            (NodeValue::Scalar { text, is_plain: true }, _) => Quoted(text).to_string(),
            (NodeValue::Scalar { text, is_plain: false }, _) => format!("the text {}", Quoted(text)),
            (NodeValue::List(items), _) if items.is_empty() => "an empty list".to_owned(),
            (NodeValue::Map(entries), _) if entries.is_empty() => "an empty mapping".to_owned(),
            (NodeValue::List(_), _) => "a list".to_owned(),
            (NodeValue::Map(_), _) => "a mapping".to_owned(),
        };
        self.refuse(RulesErrorKind::Field, node.position, format!("{what} must be {expected}, not {found}"))
    }

    /// Adds a problem, and returns `None` as the value.
    pub(super) fn refuse<T>(
        &mut self,
        kind: RulesErrorKind,
        position: Position,
        message: impl Into<String>,
    ) -> Option<T> {
        self.problems.add(kind, position, message);
        None
    }

    /// Adds a problem for an unregistered name, or notes the name if the program may register more
    /// names than are known here. Returns `true` if the name was noted. The message is made as in
    /// [`Problems::add_word`].
    pub(super) fn unregistered<'w>(
        &mut self,
        kind: NameKind,
        name: &str,
        position: Position,
        message: &str,
        known: impl IntoIterator<Item = &'w str>,
        otherwise: &str,
    ) -> bool {
        if self.names.are_all {
            self.problems.add_word(RulesErrorKind::Name, position, message, name, known, otherwise);
        } else {
            self.problems.note_name(kind, name, position, message, known, otherwise);
        }
        !self.names.are_all
    }

    pub(super) fn choice<T: Clone>(&mut self, node: &Node<'_>, field: &str, choices: &[(&str, T)]) -> Option<T> {
        let text = self.text(node, field)?;
        let found = choices.iter().find(|(name, _)| *name == text).map(|(_, value)| value.clone());
        if found.is_none() {
            let names = || choices.iter().map(|(name, _)| *name);
            let message = format!("`{field}` cannot be {}", Quoted(text));
            let otherwise = format!("; it is one of {}", listed(names()));
            self.problems.add_word(RulesErrorKind::Value, node.position, &message, text, names(), &otherwise);
        }
        found
    }
}

/// Returns whether a number is written like `010`, which Envoy's service and YAML 1.1 read as 8.
fn has_leading_zero(text: &str) -> bool {
    text.len() > 1 && text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
}
