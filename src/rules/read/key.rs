//! Reading keys.

use http::HeaderName;
use percent_encoding::percent_decode_str;

use super::super::document::{MapField, Node, NodeValue};
use super::super::problem::{Position, Quoted, RulesErrorKind, listed};
use super::super::report::NameKind;
use super::super::spec::{At, KeySpec};
use super::value::ValueReader;

/// The built-in keys, except the keys that are followed by a name.
pub(in crate::rules) const KEYS: &[(&str, KeySpec)] = &[
    ("client-ip", KeySpec::ClientIp),
    ("peer-ip", KeySpec::PeerIp),
    ("bearer-token", KeySpec::BearerToken),
    ("path", KeySpec::Path),
    ("host", KeySpec::Host),
    ("method", KeySpec::Method),
    ("global", KeySpec::Global),
];

/// The longest name of a query parameter, in bytes.
const PARAMETER_BYTES_MAX: usize = 1_000;

/// The built-in keys that are followed by a name.
const NAMED: [&str; 3] = ["header", "cookie", "query"];

/// Returns whether a program may register a key with this name. The name must not be built in, and must not look like a
/// header or a path.
pub(crate) fn can_be_registered(name: &str) -> bool {
    let is_word = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control());
    let is_other = NAMED.contains(&name) || named(name).is_some() || name.starts_with('/');
    is_word && !is_other && KEYS.iter().all(|(ready, _)| *ready != name)
}

/// Returns the two words of a text such as `header:x`, `header: x` or `cookie=x`, which means `header x` or `cookie x`.
fn named(text: &str) -> Option<(&str, &str)> {
    let (kind, name) = text.split_once([':', '='])?;
    let (kind, name) = (kind.trim(), name.trim());
    (NAMED.contains(&kind) && !name.contains(char::is_whitespace)).then_some((kind, name))
}

/// Returns whether a word is probably the name of a header that tells clients apart.
fn is_usual_header(word: &str) -> bool {
    let word = word.to_ascii_lowercase();
    word.starts_with("x-") || ["authorization", "api-key", "apikey", "user-agent", "cf-connecting-ip"].contains(&&*word)
}

impl ValueReader<'_, '_, '_> {
    pub(super) fn key(&mut self, node: &Node<'_>) -> Option<Vec<At<KeySpec>>> {
        self.one_or_more(node, "key", |reader, node| reader.key_part(node, "`key`"))
    }

    pub(super) fn key_part(&mut self, node: &Node<'_>, what: &str) -> Option<At<KeySpec>> {
        if let Some((kind, name)) = pair(node).filter(|(kind, _)| NAMED.contains(kind)) {
            let message = format!("{what} must be text: write {}", Quoted(&format!("{kind} {name}")));
            return self.refuse(RulesErrorKind::Field, node.position, message);
        }
        let text = self.short_text(node, what)?;
        let words: Vec<&str> = text.split_whitespace().take(3).collect();
        let value = match words.as_slice() {
            [kind @ ("header" | "cookie" | "query")] => {
                let message = format!("`{kind}` is followed by a name, such as `{kind} session`");
                self.refuse(RulesErrorKind::Value, node.position, message)
            }
            ["header", name] => self.header_name(name, node.position).map(KeySpec::Header),
            ["cookie", name] if !name.contains(['=', ';', ',', '"']) => {
                self.decoded(name, node.position).map(|name| KeySpec::Cookie(name.into()))
            }
            ["query", name] => self.parameter_name(name, node.position).map(KeySpec::Query),
            [word] => match KEYS.iter().find(|(ready, _)| ready == word) {
                Some((_, key)) => Some(key.clone()),
                None => self.registered_key(word, node.position),
            },
            _ if named(text).is_some() => self.named_with_mark(text, node.position),
            words => {
                let first = words.first().filter(|first| !NAMED.contains(first)).unwrap_or(&"");
                let message = format!("{} is not a key", Quoted(text));
                let otherwise = ": write it like `client-ip` or `header x-api-key`";
                self.problems.add_word(RulesErrorKind::Value, node.position, &message, first, NAMED, otherwise);
                None
            }
        };
        Some(At { value: value?, position: node.position })
    }

    fn registered_key(&mut self, name: &str, position: Position) -> Option<KeySpec> {
        let registered = self.names.keys;
        if registered.contains(&name) {
            return Some(KeySpec::Registered(name.into()));
        }
        if named(name).is_some() {
            return self.named_with_mark(name, position);
        }
        if name.starts_with('/') {
            let message = format!(
                "{} is not a key: a key says whose allowance is charged; to limit the requests of a path, write {}",
                Quoted(name),
                Quoted(&format!("match: {{path: {name}}}"))
            );
            return self.refuse(RulesErrorKind::Value, position, message);
        }
        let ready = KEYS.iter().map(|(ready, _)| *ready);
        let known: Vec<&str> = ready.chain(NAMED).chain(registered.iter().copied()).collect();
        let message = format!("no key is named {}", Quoted(name));
        let otherwise = if is_usual_header(name) {
            format!("; did you mean {}?", Quoted(&format!("header {name}")))
        } else {
            format!("; register it in the program, or use {}", listed(known.iter().copied().take(20)))
        };
        let can_be_used = self.unregistered(NameKind::Key, name, position, &message, known, &otherwise);
        can_be_used.then(|| KeySpec::Registered(name.into()))
    }

    /// Refuses `header:x` and the like.
    fn named_with_mark(&mut self, text: &str, position: Position) -> Option<KeySpec> {
        let (kind, name) = named(text)?;
        let name = if name.is_empty() { "session" } else { name };
        let message = format!("{} is not a key: write {}", Quoted(text), Quoted(&format!("{kind} {name}")));
        self.refuse(RulesErrorKind::Value, position, message)
    }

    /// Reads the name of a query parameter.
    pub(super) fn parameter_name(&mut self, name: &str, position: Position) -> Option<Box<str>> {
        if name.is_empty() || name.contains('*') || name.len() > PARAMETER_BYTES_MAX {
            let message = format!(
                "{} is not the name of a parameter, which has 1 to {PARAMETER_BYTES_MAX} bytes and no `*`: write it like \
                 `page`",
                Quoted(name)
            );
            return self.refuse(RulesErrorKind::Value, position, message);
        }
        self.decoded(name, position).map(Into::into)
    }

    /// Refuses a percent-encoded text where a decoded name or value of a parameter, or a decoded
    /// name of a cookie, is needed.
    pub(super) fn decoded<'t>(&mut self, text: &'t str, position: Position) -> Option<&'t str> {
        let decoded = percent_decode_str(text).decode_utf8_lossy();
        if *decoded == *text {
            return Some(text);
        }
        let message = format!(
            "{} is percent-encoded, and cookies and parameters are compared decoded: write {}",
            Quoted(text),
            Quoted(&decoded)
        );
        self.refuse(RulesErrorKind::Value, position, message)
    }

    pub(super) fn header_name(&mut self, name: &str, position: Position) -> Option<HeaderName> {
        match HeaderName::try_from(name) {
            // HTTP allows a `*` in a header's name, but no header has such a name, so the user meant a
            // pattern.
            Ok(header) if !name.contains('*') => Some(header),
            _ => {
                let message = format!("{} is not the name of a header: write it like `x-api-key`", Quoted(name));
                self.refuse(RulesErrorKind::Value, position, message)
            }
        }
    }
}

/// Returns the name and the text of the only field of a mapping, such as `header` and `x` of
/// `{header: x}`.
fn pair<'n>(node: &'n Node<'_>) -> Option<(&'n str, &'n str)> {
    let NodeValue::Map(entries) = &node.value else { return None };
    let [MapField { name, node, .. }] = entries.as_slice() else { return None };
    match &node.value {
        NodeValue::Scalar { text, .. } => Some((name, text)),
        _ => None,
    }
}
