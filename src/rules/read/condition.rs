//! Reading conditions.

use std::collections::HashMap;
use std::fmt::Display;
use std::hash::Hash;

use http::{HeaderName, Method};
use ipnet::IpNet;

use super::super::document::{Node, NodeValue};
use super::super::problem::{Position, Quoted, RulesErrorKind, similar};
use super::super::report::NameKind;
use super::super::spec::{At, MatchSpec, Name, Wildcard};
use super::super::times::Times;
use super::path;
use super::value::{Fields, PATTERNS_MAX, ValueReader};
pub(in crate::rules) use super::value::{MATCH, NOT};
use crate::key::parse_network;

/// The maximum number of headers, and also of query parameters, in a `match` or in an entry of `not`.
const NAMES_MAX: usize = 32;

/// The maximum number of entries of `not`. A request may have to be compared with all entries.
const NOT_MAX: usize = 32;

/// The methods that are compared with a misspelt method, to find a suggestion.
pub(in crate::rules) const METHODS: &[&str] =
    &["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];

impl ValueReader<'_, '_, '_> {
    pub(super) fn matches(&mut self, node: &Node<'_>) -> Option<MatchSpec> {
        let fields = self.fields(node, "`match`", MATCH)?;
        if fields.entries.is_empty() {
            let message = "`match` has no field: leave it out if the rule applies to every request";
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        let matches = self.conditions(&fields);
        let not = match fields.get("not") {
            Some(node) => self.exceptions(node),
            None => Some(Vec::new()),
        };
        Some(MatchSpec { not: not?, ..matches? })
    }

    /// Reads `not`: the requests that a rule leaves out.
    fn exceptions(&mut self, node: &Node<'_>) -> Option<Vec<MatchSpec>> {
        let count = if let NodeValue::List(items) = &node.value { items.len() } else { 1 };
        if count > NOT_MAX {
            let message = format!("`not` has at most {NOT_MAX} entries, not {count}");
            return self.refuse(RulesErrorKind::TooLarge, node.position, message);
        }
        self.one_or_more(node, "not", |reader, node| {
            let fields = reader.fields(node, "`not`", NOT)?;
            if fields.entries.is_empty() {
                let message = "`not` has no field: it would leave out every request";
                return reader.refuse(RulesErrorKind::Value, node.position, message);
            }
            reader.conditions(&fields)
        })
    }

    /// Reads the fields that `match` and `not` have in common.
    fn conditions(&mut self, fields: &Fields<'_, '_>) -> Option<MatchSpec> {
        let method = self.any_of(fields, "method", Self::method);
        let path = self.any_of(fields, "path", |reader, node| {
            let text = reader.text(node, "path")?;
            match path::pattern(text) {
                Ok(pattern) => Some(pattern),
                Err(why) => reader.refuse(RulesErrorKind::Value, node.position, why),
            }
        });
        let host = self.any_of(fields, "host", Self::host);
        let header = self.optional(fields, "header", |reader, node, _| reader.headers(node));
        let query = self.optional(fields, "query", |reader, node, _| reader.query(node));
        let client = self.any_of(fields, "client", Self::network);
        let user_agent = self.any_of(fields, "user-agent", |reader, node| reader.wildcard(node, "user-agent"));
        let action = self.any_of(fields, "action", |reader, node| {
            let name = reader.short_text(node, "`action`")?;
            reader.action(name, node.position)
        });
        let time = self.any_of(fields, "time", Self::time);
        Some(MatchSpec {
            method: method?,
            path: path?,
            host: host?,
            header: header?.unwrap_or_default(),
            query: query?.unwrap_or_default(),
            client: client?,
            user_agent: user_agent?,
            action: action?,
            time: time?,
            not: Vec::new(),
        })
    }

    fn time(&mut self, node: &Node<'_>) -> Option<(Box<str>, Times)> {
        let text = self.text(node, "time")?;
        match Times::parse(text) {
            Ok(times) => Some((text.into(), times)),
            Err(why) => {
                let message = format!("{} is not a time: {why}", Quoted(text));
                self.refuse(RulesErrorKind::Value, node.position, message)
            }
        }
    }

    fn method(&mut self, node: &Node<'_>) -> Option<Method> {
        let text = self.text(node, "method")?;
        if METHODS.contains(&text) {
            return Method::from_bytes(text.as_bytes()).ok();
        }
        // HTTP allows a `*` in the name of a method, so this text could be read as such a name. Clients send
        // no such method, so the rule would apply to no request.
        if text.contains('*') {
            let message = format!(
                "{} is not a method: list the methods, as in `[GET, POST]`, or leave `method` out for all of them",
                Quoted(text)
            );
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        let meant = similar(text, METHODS.iter().copied());
        match Method::from_bytes(text.as_bytes()) {
            Ok(method) if meant.is_none() && !text.contains(|c: char| c.is_ascii_lowercase()) => Some(method),
            _ => {
                let message = format!("{} is not a method", Quoted(text));
                let otherwise = ", which are words in capitals, such as `POST`";
                let known = METHODS.iter().copied();
                self.problems.add_word(RulesErrorKind::Value, node.position, &message, text, known, otherwise);
                None
            }
        }
    }

    fn host(&mut self, node: &Node<'_>) -> Option<Wildcard> {
        let Wildcard(text) = self.wildcard(node, "host")?;
        let port = text.rsplit_once(':').filter(|(name, port)| {
            let is_address = (name.contains(':') || name.starts_with('[')) && !name.ends_with(']');
            !is_address && port.bytes().all(|byte| byte.is_ascii_digit() || byte == b'*')
        });
        if port.is_some() {
            let message = format!("the host {} has a port, which is not compared: leave it out", Quoted(&text));
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        let is_odd = |c: char| c.is_ascii() && !c.is_ascii_alphanumeric() && !"-_.*[]:".contains(c);
        if text.contains(is_odd) || text.contains(':') && !text.starts_with(['[', '*']) {
            let message = format!(
                "{} is not a host: write it like `api.example.com`, `*.example.com` or `[2001:db8::1]`",
                Quoted(&text)
            );
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        if !text.is_ascii() {
            let message =
                format!("{} never matches, because clients send hosts in ASCII: write it as `xn--…`", Quoted(&text));
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        let text = text.strip_suffix('.').unwrap_or(&text);
        Some(Wildcard(text.to_ascii_lowercase().into()))
    }

    fn headers(&mut self, node: &Node<'_>) -> Option<Vec<(HeaderName, Wildcard)>> {
        let expected = "a mapping of headers, such as `{x-beta: \"*\"}`";
        self.named_values(node, "header", expected, |reader, name, value| {
            let read = reader.header_name(name, value.position);
            let value = reader.wildcard(&value, name);
            Some((read?, value?))
        })
    }

    fn query(&mut self, node: &Node<'_>) -> Option<Vec<(Box<str>, Wildcard)>> {
        let expected = "a mapping of parameters, such as `{page: \"*\"}`";
        self.named_values(node, "query", expected, |reader, name, value| {
            let read = reader.parameter_name(name, value.position);
            let value = reader.wildcard(&value, name).and_then(|text| {
                reader.decoded(&text.0, value.value.position)?;
                Some(text)
            });
            Some((read?, value?))
        })
    }

    /// Reads names with patterns for their values. `read` is called with each name, its position and the value.
    fn named_values<N: Clone + Display + Eq + Hash>(
        &mut self,
        node: &Node<'_>,
        field: &'static str,
        expected: &str,
        mut read: impl FnMut(&mut Self, &str, At<&Node<'_>>) -> Option<(N, Wildcard)>,
    ) -> Option<Vec<(N, Wildcard)>> {
        let entries = match &node.value {
            NodeValue::Map(entries) if entries.len() > NAMES_MAX => {
                let message = format!("`{field}` has at most {NAMES_MAX} names, not {}", entries.len());
                return self.refuse(RulesErrorKind::TooLarge, node.position, message);
            }
            NodeValue::Map(entries) if !entries.is_empty() => entries,
            _ => return self.wrong_type(node, &format!("`{field}`"), expected),
        };
        let mut lines = HashMap::new();
        let read = entries.iter().map(|entry| {
            let (name, value) = read(self, &entry.name, At { value: &entry.node, position: entry.position })?;
            if let Some(first) = lines.insert(name.clone(), entry.position.line) {
                let message = format!("`{name}` is given twice; the first is in line {first}");
                return self.refuse(RulesErrorKind::Field, entry.position, message);
            }
            Some((name, value))
        });
        let read: Vec<Option<_>> = read.collect();
        read.into_iter().collect()
    }

    fn wildcard(&mut self, node: &Node<'_>, field: &str) -> Option<Wildcard> {
        let text = self.text(node, field)?;
        if text.is_empty() || text.trim() != text || text.contains(|c: char| c.is_control()) {
            let message = format!("`{field}` must be text without spaces around it, in which `*` stands for anything");
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        if text.contains('*') {
            self.patterns += 1;
            if self.patterns == PATTERNS_MAX + 1 {
                self.too_many_patterns(node.position);
            }
        }
        Some(Wildcard(text.into()))
    }

    pub(super) fn too_many_patterns(&mut self, position: Position) {
        let message =
            format!("the file has more than {PATTERNS_MAX} patterns with `*`: a request would be compared with each");
        self.problems.add(RulesErrorKind::TooLarge, position, message);
    }

    pub(super) fn network(&mut self, node: &Node<'_>) -> Option<IpNet> {
        let text = self.text_of(node, "a network")?;
        match parse_network(text) {
            Ok(network) => Some(network.trunc()),
            Err(error) => self.refuse(RulesErrorKind::Value, node.position, error.to_string()),
        }
    }

    fn action(&mut self, name: &str, position: Position) -> Option<Name> {
        let registered = self.names.actions;
        if !registered.contains(&name) {
            let message = format!("no action is named {}", Quoted(name));
            let otherwise = "; register it in the program";
            let known = registered.iter().copied();
            if !self.unregistered(NameKind::Action, name, position, &message, known, otherwise) {
                return None;
            }
        }
        Some(At { value: name.into(), position })
    }

    /// Reads the action of an entry without conditions. The action is the name of the entry.
    pub(super) fn named_action(&mut self, name: &Name) -> Option<MatchSpec> {
        let registered = self.names.actions;
        if !registered.contains(&&*name.value) {
            let message = format!("nothing says which requests are {}", Quoted(name));
            let otherwise = "; give it a `match`, or register the action in the program";
            let known = registered.iter().copied();
            if !self.unregistered(NameKind::Action, name, name.position, &message, known, otherwise) {
                return None;
            }
        }
        Some(MatchSpec { action: vec![name.clone()], ..MatchSpec::default() })
    }
}
