//! Reading keys.

use http::HeaderName;

use super::super::document::Node;
use super::super::problem::{NameKind, Place, Quoted, RulesErrorKind, listed};
use super::super::spec::{At, KeySpec};
use super::value::Reader;

/// The keys that need no registration. `header` and `cookie` are followed by a name.
pub(in crate::rules) const KEYS: &[(&str, KeySpec)] = &[
    ("client-ip", KeySpec::ClientIp),
    ("peer-ip", KeySpec::PeerIp),
    ("bearer-token", KeySpec::BearerToken),
    ("path", KeySpec::Path),
    ("host", KeySpec::Host),
    ("method", KeySpec::Method),
    ("global", KeySpec::Global),
];

/// Returns whether a program may register a key by this name, which must not be ready-made.
pub(crate) fn can_be_registered(name: &str) -> bool {
    let is_word = !name.is_empty() && !name.contains(|c: char| c.is_whitespace() || c.is_control());
    is_word && !matches!(name, "header" | "cookie") && KEYS.iter().all(|(ready, _)| *ready != name)
}

impl Reader<'_, '_, '_> {
    pub(super) fn key(&mut self, node: &Node<'_>) -> Option<Vec<At<KeySpec>>> {
        self.one_or_more(node, "key", |reader, node| reader.key_part(node, "`key`"))
    }

    pub(super) fn key_part(&mut self, node: &Node<'_>, what: &str) -> Option<At<KeySpec>> {
        let text = self.text_of(node, what)?;
        let words: Vec<&str> = text.split_whitespace().take(3).collect();
        let value = match words.as_slice() {
            [kind @ ("header" | "cookie")] => {
                let message = format!("`{kind}` is followed by a name, such as `{kind} session`");
                self.refuse(RulesErrorKind::Value, node.place, message)
            }
            ["header", name] => self.header_name(name, node.place).map(KeySpec::Header),
            ["cookie", name] if !name.contains(['=', ';', ',', '"']) => Some(KeySpec::Cookie((*name).into())),
            [word] => match KEYS.iter().find(|(ready, _)| ready == word) {
                Some((_, key)) => Some(key.clone()),
                None => self.registered_key(word, node.place),
            },
            words => {
                let first = words.first().filter(|first| !["header", "cookie"].contains(first)).unwrap_or(&"");
                let message = format!("{} is not a key", Quoted(text));
                let otherwise = ": write it like `client-ip` or `header x-api-key`";
                let kinds = ["header", "cookie"];
                self.problems.add_word(RulesErrorKind::Value, node.place, &message, first, kinds, otherwise);
                None
            }
        };
        Some(At { value: value?, place: node.place })
    }

    fn registered_key(&mut self, name: &str, place: Place) -> Option<KeySpec> {
        let registered = self.names.keys;
        if registered.contains(&name) {
            return Some(KeySpec::Registered(name.into()));
        }
        let ready = KEYS.iter().map(|(ready, _)| *ready);
        let known: Vec<&str> = ready.chain(["header", "cookie"]).chain(registered.iter().copied()).collect();
        let message = format!("no key is named {}", Quoted(name));
        let otherwise = format!("; register it in the program, or use {}", listed(known.iter().copied().take(20)));
        let can_be_used = self.unregistered(NameKind::Key, name, place, &message, known, &otherwise);
        can_be_used.then(|| KeySpec::Registered(name.into()))
    }

    pub(super) fn header_name(&mut self, name: &str, place: Place) -> Option<HeaderName> {
        match HeaderName::try_from(name) {
            Ok(name) => Some(name),
            Err(_) => {
                let message = format!("{} is not the name of a header: write it like `x-api-key`", Quoted(name));
                self.refuse(RulesErrorKind::Value, place, message)
            }
        }
    }
}
