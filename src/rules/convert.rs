//! Converts a file in Envoy's form into a file in the native form.

use std::fmt::Write as _;

use super::error::RulesError;
use super::problem::{Position, Quoted, RulesErrorKind};
use super::read::{KnownNames, METHODS, can_be_registered, path_pattern, read};
use super::spec::{DescriptorSpec, DomainSpec, LimitSpec};
use super::tree::{encoded, policy_name};
use crate::error;
use crate::key::parse_network;
use crate::mode::Mode;

/// Returns the rules of a file in Envoy's form as a file in the native form.
///
/// The result is only a first draft. The converted file lacks the settings that Envoy's routes define, and comments say
/// what the program has to add. The keys `remote_address`, `path`, `method` and `host` become this crate's keys for the
/// same parts of a request. Other keys become names that the program [registers](super::RulesBuilder::key). Other
/// values become [actions](super::RulesBuilder::action).
///
/// ```
/// let native = tower_ratelimit::rules::convert_envoy(
///     "domain: edge
/// descriptors:
///   - key: remote_address
///     rate_limit: {unit: minute, requests_per_unit: 100}",
/// )?;
/// assert!(native.ends_with(
///     r#"
///   - name: "edge:remote_address"
///     quota: "100 per minute, fixed window"
///     key: client-ip
/// "#,
/// ));
/// # Ok::<(), tower_ratelimit::rules::RulesError>(())
/// ```
///
/// # Errors
/// Returns an error with all problems of the file, or an error if the file does not have
/// Envoy's form.
pub fn convert_envoy(text: impl AsRef<[u8]>) -> Result<String, RulesError> {
    read(text.as_ref(), KnownNames::default(), |file, problems| match file.domain {
        Some(domain) => converted(&domain),
        None => {
            let message = "the file does not have Envoy's form, which begins with `domain`";
            problems.add(RulesErrorKind::Value, Position::START, message);
            String::new()
        }
    })
}

fn converted(domain: &DomainSpec) -> String {
    let mut writer = Writer { domain, rules: String::new(), is_empty: true, has_addresses: false };
    writer.level(&domain.descriptors, &mut Vec::new());
    let mut text = format!(
        "# Made of the domain {} in Envoy's form. Here all rules that match a request count.\n",
        Quoted(&printable(&domain.name))
    );
    if writer.has_addresses {
        text += "# In Envoy's form each IPv6 address counts by itself. Here its /64 does.\n";
    }
    text += if writer.is_empty { "rules: []\n" } else { "rules:\n" };
    text + &writer.rules
}

struct Writer<'s> {
    domain: &'s DomainSpec,
    rules: String,
    is_empty: bool,
    /// True if the key of a rule has the client's address.
    has_addresses: bool,
}

impl<'s> Writer<'s> {
    fn level(&mut self, specs: &'s [DescriptorSpec], path: &mut Vec<&'s DescriptorSpec>) {
        for spec in specs {
            path.push(spec);
            match &spec.limit {
                Some(limit) => self.limit(limit, path, specs),
                None if spec.descriptors.is_empty() => {
                    self.note(&format!("{} has no limit, so it needs no rule.", self.name(path)));
                }
                None => {}
            }
            self.level(&spec.descriptors, path);
            path.pop();
        }
    }

    fn limit(&mut self, limit: &LimitSpec, path: &[&DescriptorSpec], siblings: &[DescriptorSpec]) {
        let name = self.name(path);
        let Some(quota) = &limit.quota else {
            self.note(&format!("{name} is unlimited, so it needs no rule."));
            return;
        };
        self.is_empty = false;
        let rule = ConvertedRule::new(path);
        self.has_addresses |= rule.key.iter().any(|part| part == CLIENT_IP);
        for note in notes(limit, path, siblings).into_iter().chain(rule.notes) {
            self.note(&note);
        }
        let mut text = format!("  - name: {}\n    quota: {}\n", quoted(&name), quoted(&quota.to_string()));
        let key = match rule.key.as_slice() {
            [] => "global".to_owned(),
            [one] => one.clone(),
            several => format!("[{}]", several.join(", ")),
        };
        // Writing into a `String` never fails.
        let _ = writeln!(text, "    key: {key}");
        if !rule.matches.is_empty() {
            let _ = writeln!(text, "    match: {{{}}}", rule.matches.join(", "));
        }
        if rule.is_registered {
            text += "    missing-key: exempt\n";
        }
        if limit.mode == Mode::Shadow {
            text += "    mode: shadow\n";
        }
        self.rules += &text;
    }

    fn name(&self, path: &[&DescriptorSpec]) -> String {
        policy_name(&self.domain.name, path)
    }

    fn note(&mut self, note: &str) {
        let _ = writeln!(self.rules, "  # {}", printable(note));
    }
}

/// The maximum number of other entries that a comment names.
const SHOWN_MAX: usize = 5;

/// Returns comments about the properties of a limit that the native form cannot express.
fn notes(limit: &LimitSpec, path: &[&DescriptorSpec], siblings: &[DescriptorSpec]) -> Vec<String> {
    let mut notes = Vec::new();
    let own = path.last().copied();
    let is_exact = |spec: &DescriptorSpec| spec.value.as_ref().is_some_and(|value| !value.contains('*'));
    let mut before = true;
    let more_specific = siblings.iter().filter(|other| {
        before &= !own.is_some_and(|own| std::ptr::eq(own, *other));
        let Some(own) = own.filter(|own| own.key == other.key && !is_exact(own)) else { return false };
        // Exact values come first, then the patterns in the order of the file.
        is_exact(other) || other.value.is_some() && (own.value.is_none() || before)
    });
    // Keeps at most `SHOWN_MAX + 1` values, because a file can have very many values.
    let values = more_specific.filter_map(|other| other.value.as_ref()).take(SHOWN_MAX + 1);
    let values: Vec<String> = values.map(|value| Quoted(value).to_string()).collect();
    if let (Some(own), false) = (own, values.is_empty()) {
        let shown = values.iter().take(SHOWN_MAX).cloned().collect::<Vec<_>>().join(", ");
        let more = if values.len() > SHOWN_MAX { ", and others" } else { "" };
        notes.push(format!(
            "In Envoy's form, other entries limit {} {shown}{more}. Here this rule limits them, too.",
            own.key
        ));
    }
    if !limit.replaces.is_empty() {
        let names: Vec<String> = limit.replaces.iter().map(|name| Quoted(name).to_string()).collect();
        notes.push(format!("In Envoy's form it replaces {}. Here both count.", names.join(", ")));
    }
    if let Some(name) = &limit.name {
        notes.push(format!("Its name in Envoy's form is {}.", Quoted(name)));
    }
    notes
}

/// The key of a client's address.
const CLIENT_IP: &str = "client-ip";

/// The key and the conditions of a rule.
#[derive(Default)]
struct ConvertedRule {
    key: Vec<String>,
    /// Fields of `match`.
    matches: Vec<String>,
    notes: Vec<String>,
    is_registered: bool,
}

impl ConvertedRule {
    fn new(path: &[&DescriptorSpec]) -> Self {
        let mut rule = Self::default();
        let mut action: Vec<String> = Vec::new();
        for spec in path {
            let is_pattern = spec.value.as_ref().is_some_and(|value| value.contains('*'));
            if (spec.value.is_none() || is_pattern) && !spec.shares {
                rule.add_key(&spec.key);
            }
            let Some(value) = &spec.value else { continue };
            let field = match_field(&spec.key, value).filter(|(name, _)| !rule.has_condition(name));
            match field {
                Some((name, value)) => {
                    if name != "client" {
                        rule.note_meaning(&spec.key, name);
                    }
                    rule.matches.push(format!("{name}: {value}"));
                }
                None => action.push(format!("{}={}", encoded(&spec.key), encoded(value))),
            }
        }
        if !action.is_empty() {
            let action = action.join(",");
            rule.notes.push(format!("The program says with RulesBuilder::action which requests are {action}."));
            rule.matches.push(format!("action: {}", quoted(&action)));
        }
        rule
    }

    fn has_condition(&self, name: &str) -> bool {
        self.matches.iter().any(|field| field.starts_with(&format!("{name}:")))
    }

    /// Adds a comment that says how this crate reads a key, because in Envoy's form a route says what a key means.
    fn note_meaning(&mut self, key: &str, ready: &str) {
        let what = match ready {
            "path" => "the request's path without its query",
            "method" => "the request's method",
            _ => "the request's host without its port",
        };
        let note = format!("In Envoy's form a route says what {key} is. Here it is {what}.");
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn add_key(&mut self, key: &str) {
        let ready = match key {
            "remote_address" => Some(CLIENT_IP),
            "masked_remote_address" => {
                let note =
                    "In Envoy's form a route says how many bits of an address count. Here all bits of IPv4 count.";
                self.notes.push(note.to_owned());
                Some(CLIENT_IP)
            }
            "path" | ":path" => Some("path"),
            "method" | ":method" => Some("method"),
            "host" | ":authority" => Some("host"),
            _ => None,
        };
        if let Some(ready) = ready.filter(|ready| *ready != CLIENT_IP) {
            self.note_meaning(key, ready);
        }
        let part = ready.map_or_else(
            || {
                let name = encoded(key).to_string();
                let name = if can_be_registered(&name) { name } else { format!("descriptor-{name}") };
                self.is_registered = true;
                self.notes.push(format!("The program registers the key {name} with RulesBuilder::key."));
                quoted(&name)
            },
            str::to_owned,
        );
        if !self.key.contains(&part) {
            self.key.push(part);
        }
    }
}

/// Returns the field of `match` that replaces an entry of a descriptor, and the field's value as a file of rules writes
/// it.
fn match_field(key: &str, value: &str) -> Option<(&'static str, String)> {
    let is_exact = !value.contains('*');
    match key {
        "method" | ":method" => METHODS.contains(&value).then(|| ("method", quoted(value))),
        "path" | ":path" => {
            let patterns = match value.strip_suffix("/*") {
                // The star matches an empty text, but `{*rest}` does not.
                Some(begin) if !begin.contains('*') => {
                    let begin = braces_escaped(begin);
                    vec![format!("{begin}/"), format!("{begin}/{{*rest}}")]
                }
                _ if is_exact => vec![braces_escaped(value)],
                _ => return None,
            };
            let are_valid = patterns.iter().all(|pattern| path_pattern(pattern).is_ok());
            let patterns: Vec<String> = patterns.iter().map(|pattern| quoted(pattern)).collect();
            are_valid.then(|| {
                ("path", if patterns.len() == 1 { patterns.concat() } else { format!("[{}]", patterns.join(", ")) })
            })
        }
        "remote_address" if is_exact => parse_network(value)
            .is_ok_and(|network| network.prefix_len() == network.max_prefix_len())
            .then(|| ("client", quoted(value))),
        _ => None,
    }
}

fn braces_escaped(path: &str) -> String {
    path.replace('{', "{{").replace('}', "}}")
}

/// Writes a text in double quotes. The text must not contain control characters.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Returns a text that is safe in a comment, without control characters and line separators, which could end the
/// comment.
fn printable(text: &str) -> String {
    let separates = |c: char| matches!(c, '\u{2028}' | '\u{2029}');
    text.chars().map(|c| if separates(c) { '\u{fffd}' } else { error::printable(c) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the converted file, which the reader accepts.
    fn native(text: &str) -> String {
        let native = convert_envoy(text).unwrap();
        if let Err(error) = read(native.as_bytes(), KnownNames::default(), |_, _| ()) {
            panic!("{native}\n{error}");
        }
        native
    }

    #[test]
    fn every_kind_of_limit_is_converted() {
        let text = "
domain: shop
descriptors:
- key: path
  value: /search/*
  share_threshold: true
  descriptors:
  - {key: remote_address, rate_limit: {unit: minute, requests_per_unit: 6}}
- {key: method, value: POST, rate_limit: {unit: day, requests_per_unit: 0}, shadow_mode: true}
- {key: tenant, rate_limit: {unit: hour, requests_per_unit: 9, name: common}}
- {key: tenant, value: acme, rate_limit: {unlimited: true}}
- {key: tenant, value: 'a*', rate_limit: {unit: hour, requests_per_unit: 8, replaces: [{name: common}]}}
- key: remote_address
  value: 10.1.2.3
  descriptors:
  - {key: host, rate_limit: {unit: second, requests_per_unit: 7}}
- {key: masked_remote_address, rate_limit: {unit: hour, requests_per_unit: 5}}
- {key: internal}
";
        let expected = r#"# Made of the domain `shop` in Envoy's form. Here all rules that match a request count.
# In Envoy's form each IPv6 address counts by itself. Here its /64 does.
rules:
  # In Envoy's form a route says what path is. Here it is the request's path without its query.
  - name: "shop:path=/search/*,remote_address"
    quota: "6 per minute, fixed window"
    key: client-ip
    match: {path: ["/search/", "/search/{*rest}"]}
  # In Envoy's form a route says what method is. Here it is the request's method.
  - name: "shop:method=POST"
    quota: "0 per day, fixed window"
    key: global
    match: {method: "POST"}
    mode: shadow
  # In Envoy's form, other entries limit tenant `acme`, `a*`. Here this rule limits them, too.
  # Its name in Envoy's form is `common`.
  # The program registers the key tenant with RulesBuilder::key.
  - name: "shop:tenant"
    quota: "9 per hour, fixed window"
    key: "tenant"
    missing-key: exempt
  # shop:tenant=acme is unlimited, so it needs no rule.
  # In Envoy's form, other entries limit tenant `acme`. Here this rule limits them, too.
  # In Envoy's form it replaces `common`. Here both count.
  # The program registers the key tenant with RulesBuilder::key.
  # The program says with RulesBuilder::action which requests are tenant=a*.
  - name: "shop:tenant=a*"
    quota: "8 per hour, fixed window"
    key: "tenant"
    match: {action: "tenant=a*"}
    missing-key: exempt
  # In Envoy's form a route says what host is. Here it is the request's host without its port.
  - name: "shop:remote_address=10.1.2.3,host"
    quota: "7 per second, fixed window"
    key: host
    match: {client: "10.1.2.3"}
  # In Envoy's form a route says how many bits of an address count. Here all bits of IPv4 count.
  - name: "shop:masked_remote_address"
    quota: "5 per hour, fixed window"
    key: client-ip
  # shop:internal has no limit, so it needs no rule.
"#;
        assert_eq!(native(text), expected);
    }

    #[test]
    fn hostile_words_are_converted_to_words_that_can_be_read() {
        for word in [
            "a\\\"b",
            "\\n- x: y",
            "\\0",
            "é",
            "# x",
            "}",
            "header",
            "client-ip",
            "two words",
            "\\u2028x",
            "a,b=c:d%",
            "*",
            "{id}",
            "/{a}/*",
            ".",
        ] {
            // No key is a pattern.
            for key in ["path", "method", "remote_address", "\\x07key", &word.replace('*', "+")] {
                native(&format!(
                    "domain: \"{word}\"\ndescriptors: [{{key: \"{key}\", value: \"{word}\", rate_limit: {{unit: day, \
                     requests_per_unit: 1, name: \"{word}\"}}}}, {{key: \"{key}\", rate_limit: {{unit: day, requests_per_unit: 1}}}}]",
                ));
            }
        }
        let turned = native(
            "domain: \"a\\u202e\"\ndescriptors: [{key: \"b\\u2067\", rate_limit: {unit: day, requests_per_unit: 1, name: \"c\\u200f\"}}]",
        );
        assert!(!turned.contains(error::turns_text), "a comment shows what is there: {turned}");
        native(&format!(
            "domain: {}\ndescriptors: [{{key: b, rate_limit: {{unit: day, requests_per_unit: 1}}}}]",
            "a".repeat(300)
        ));
        assert_eq!(native("domain: a").lines().last(), Some("rules: []"));
    }

    #[test]
    fn native_file_is_not_converted() {
        assert_eq!(convert_envoy("rules: []").unwrap_err().kind(), RulesErrorKind::Value);
        assert_eq!(convert_envoy("domain: ''").unwrap_err().kind(), RulesErrorKind::Field);
    }
}
