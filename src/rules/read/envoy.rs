//! Reads files in the form of Envoy's rate limit service: a domain and its descriptors.

use std::collections::HashMap;
use std::time::Duration;

use super::super::document::{MapField, Node, NodeValue, Type};
use super::super::problem::{Quoted, RulesErrorKind, listed};
use super::super::spec::{At, DescriptorSpec, DomainSpec, LimitSpec};
use super::quota::UNITS;
use super::value::{Fields, RULES_MAX, ValueReader};
use crate::mode::Mode;
use crate::quota::Quota;

pub(in crate::rules) const DOMAIN: &[&str] = &["domain", "descriptors"];

pub(in crate::rules) const DESCRIPTOR: &[&str] = &[
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "share_threshold",
    "detailed_metric",
    "value_to_metric",
    "metadata",
];

pub(in crate::rules) const RATE_LIMIT: &[&str] =
    &["unit", "requests_per_unit", "unlimited", "name", "replaces", "metadata"];

pub(in crate::rules) const REPLACES: &[&str] = &["name"];

/// The field of `metadata` that has this crate's settings.
pub(in crate::rules) const OURS: &str = "tower_ratelimit";

pub(in crate::rules) const METADATA: &[&str] = &["options"];

/// The longest text, in bytes. Texts are bounded because the name of a limit contains all keys and
/// values on the path to the limit.
const TEXT_MAX: usize = 1_000;

/// Returns whether a file has Envoy's form.
pub(super) fn is_domain(root: &Node<'_>) -> bool {
    let NodeValue::Map(entries) = &root.value else { return false };
    let has = |name| entries.iter().any(|entry| entry.name == name);
    (has("domain") || has("descriptors")) && !has("rules")
}

/// Each of these methods adds a problem if it returns `None`.
impl ValueReader<'_, '_, '_> {
    pub(super) fn domain(&mut self, root: &Node<'_>) -> Option<DomainSpec> {
        let fields = self.fields(root, "a file in Envoy's form", DOMAIN)?;
        let name = self.needed(&fields, "domain", ", such as `domain: edge`");
        let mut count = 0;
        let descriptors = match present(&fields, "descriptors") {
            Some(node) => self.descriptors(&node.node, &mut count),
            None => Vec::new(),
        };
        if count > RULES_MAX {
            let message = format!("the file has {count} descriptors; the most is {RULES_MAX}");
            self.problems.add(RulesErrorKind::TooLarge, root.position, message);
        }
        Some(DomainSpec { name: name?, descriptors })
    }

    fn descriptors(&mut self, node: &Node<'_>, count: &mut usize) -> Vec<DescriptorSpec> {
        let items = self.items(node, "`descriptors`", "a list of mappings, such as `- key: remote_address`");
        *count += items.len();
        if *count > RULES_MAX {
            return Vec::new(); // reported once, by the domain
        }
        let mut lines: HashMap<(Box<str>, Option<Box<str>>), usize> = HashMap::new();
        let mut read = Vec::with_capacity(items.len());
        for item in items {
            let Some(descriptor) = self.descriptor(item, count) else { continue };
            let name = (descriptor.key.clone(), descriptor.value.clone());
            if let Some(first) = lines.insert(name.clone(), descriptor.position.line) {
                lines.insert(name, first);
                let value = descriptor
                    .value
                    .as_ref()
                    .map_or_else(|| "no value".to_owned(), |value| format!("the value {}", Quoted(value)));
                let message = format!(
                    "two descriptors have the key {} and {value}; the first is in line {first}",
                    Quoted(&descriptor.key)
                );
                self.problems.add(RulesErrorKind::Name, descriptor.position, message);
            } else {
                read.push(descriptor);
            }
        }
        read
    }

    fn descriptor(&mut self, node: &Node<'_>, count: &mut usize) -> Option<DescriptorSpec> {
        let fields = self.fields(node, "a descriptor", DESCRIPTOR)?;
        let key = self.needed(&fields, "key", ", such as `key: remote_address`");
        if let Some(entry) = fields.entry("key").filter(|_| key.as_ref().is_some_and(|key| key.contains('*'))) {
            let message = "a `key` has no `*`: only a `value` can be a pattern";
            self.problems.add(RulesErrorKind::Value, entry.node.position, message);
        }
        let value = self.any_text(&fields, "value");
        let shadow = self.is_true(&fields, "shadow_mode");
        self.quota_mode(&fields);
        // These fields name counters in Envoy's service. The fields have no effect here, because observers choose
        // their own names.
        self.is_true(&fields, "detailed_metric");
        self.is_true(&fields, "value_to_metric");
        let options = self.our_options(&fields);
        let limit = match present(&fields, "rate_limit") {
            Some(entry) => self.rate_limit(&entry.node, shadow, options.as_ref()).map(Some),
            None => {
                if let Some(options) = &options {
                    let message = "`options` needs a `rate_limit` beside `metadata`";
                    self.problems.add(RulesErrorKind::Field, options.position, message);
                }
                Some(None)
            }
        };
        let shares = self.is_true(&fields, "share_threshold");
        let has_pattern = matches!(&value, Some(Some(value)) if value.contains('*'));
        if shares && !has_pattern && value.is_some() {
            let position = fields.entry("share_threshold").map_or(fields.position, |entry| entry.position);
            let message = "`share_threshold` needs a `value` with `*`, whose values then share one counter";
            self.problems.add(RulesErrorKind::Field, position, message);
        }
        let descriptors = match present(&fields, "descriptors") {
            Some(entry) => self.descriptors(&entry.node, count),
            None => Vec::new(),
        };
        Some(DescriptorSpec { position: fields.position, key: key?, value: value?, shares, limit: limit?, descriptors })
    }

    fn rate_limit(&mut self, node: &Node<'_>, shadow: bool, options: Option<&At<String>>) -> Option<LimitSpec> {
        let fields = self.fields(node, "`rate_limit`", RATE_LIMIT)?;
        let name = self.any_text(&fields, "name");
        let replaces = self.replaces(&fields, name.as_ref().and_then(Option::as_deref));
        if let Some(ours) = fields.get("metadata").and_then(ours) {
            let message = "`metadata.tower_ratelimit` stands beside `rate_limit`, not in it";
            self.problems.add(RulesErrorKind::Field, ours.position, message);
        }
        let is_unlimited = self.is_true(&fields, "unlimited");
        let quota = if is_unlimited {
            if let Some(unit) = present(&fields, "unit") {
                let message = "`unlimited` has no `unit`: leave one of them out";
                self.problems.add(RulesErrorKind::Field, unit.position, message);
            }
            if let Some(options) = options {
                let message = "`unlimited` has no `options`: leave one of them out";
                self.problems.add(RulesErrorKind::Field, options.position, message);
            }
            Some(None)
        } else {
            self.envoy_quota(&fields, options).map(Some)
        };
        let mode = if shadow { Mode::Shadow } else { Mode::Enforce };
        Some(LimitSpec { quota: quota?, mode, name: name?, replaces: replaces? })
    }

    /// Reads a `rate_limit`. The quota counts as in Envoy's service, unless there are options.
    fn envoy_quota(&mut self, fields: &Fields<'_, '_>, options: Option<&At<String>>) -> Option<At<Quota>> {
        let unit = self.required(fields, "unit", ", such as `unit: minute`").and_then(|node| self.unit(node));
        let limit = self.required(fields, "requests_per_unit", ", such as `requests_per_unit: 100`");
        let limit = limit.and_then(|node| {
            let limit = self.number(node, "`requests_per_unit`", "a whole number")?;
            if limit > u64::from(u32::MAX) {
                let message = format!("`requests_per_unit` must be at most {}, not {limit}", u32::MAX);
                return self.refuse(RulesErrorKind::Value, node.position, message);
            }
            Some((limit, node.position))
        });
        let (seconds, (limit, position)) = (unit?, limit?);
        let (quota, position) = match options {
            Some(options) => {
                let quota = format!("{limit} per {seconds} s, {}", options.value).parse::<Quota>();
                (quota, options.position)
            }
            None => (Quota::fixed_window(limit, Duration::from_secs(seconds)), position),
        };
        match quota {
            Ok(value) if value.algorithm().is_rate() => Some(At { value, position }),
            Ok(other) => {
                let algorithm = other.algorithm();
                let message =
                    format!("a descriptor has a limit, not a {algorithm}: write options like `sliding window`");
                self.refuse(RulesErrorKind::Value, position, message)
            }
            Err(error) => self.refuse(RulesErrorKind::Value, position, error.to_string()),
        }
    }

    /// Reads a unit of time in any case of its letters. Returns the unit in seconds.
    fn unit(&mut self, node: &Node<'_>) -> Option<u64> {
        let text = self.text(node, "unit")?;
        let lower = text.to_ascii_lowercase();
        let found = UNITS.iter().find(|(unit, _)| *unit == lower).map(|(_, seconds)| *seconds);
        if found.is_none() {
            let units = || UNITS.iter().map(|(unit, _)| *unit);
            let message = format!("`unit` cannot be {}", Quoted(text));
            let otherwise = format!("; it is one of {}", listed(units()));
            self.problems.add_word(RulesErrorKind::Value, node.position, &message, text, units(), &otherwise);
        }
        found
    }

    fn replaces(&mut self, fields: &Fields<'_, '_>, own: Option<&str>) -> Option<Vec<Box<str>>> {
        let Some(entry) = present(fields, "replaces") else { return Some(Vec::new()) };
        let items = self.items(&entry.node, "`replaces`", "a list of names, such as `[{name: read}]`");
        let read: Vec<Option<Box<str>>> = items.into_iter().map(|item| self.replaced(item, own)).collect();
        read.into_iter().collect()
    }

    fn replaced(&mut self, node: &Node<'_>, own: Option<&str>) -> Option<Box<str>> {
        let fields = self.fields(node, "an entry of `replaces`", REPLACES)?;
        let name = self.needed(&fields, "name", ", the name of the limit that this limit replaces")?;
        if own == Some(&name) {
            return self.refuse(RulesErrorKind::Name, node.position, "a limit cannot replace itself");
        }
        Some(name)
    }

    fn quota_mode(&mut self, fields: &Fields<'_, '_>) {
        if self.is_true(fields, "quota_mode") {
            let position = fields.entry("quota_mode").map_or(fields.position, |entry| entry.position);
            let message = "`quota_mode` is not supported: each limit that a request exceeds refuses it. Leave \
                           `quota_mode` out if each request meets only one such limit, because the effect is then the \
                           same. Write `shadow_mode: true` instead to count requests and let them pass";
            self.problems.add(RulesErrorKind::Field, position, message);
        }
    }

    /// Reads this crate's fields of `metadata`. The other fields of `metadata` are not checked, as in Envoy's service.
    fn our_options(&mut self, fields: &Fields<'_, '_>) -> Option<At<String>> {
        let ours = ours(fields.get("metadata")?)?;
        let fields = self.fields(&ours.node, "`metadata.tower_ratelimit`", METADATA)?;
        let node = self.required(&fields, "options", ", such as `options: sliding window`")?;
        let text = self.text(node, "options")?;
        Some(At { value: text.to_owned(), position: node.position })
    }

    /// Reads a text that must be present and not empty.
    fn needed(&mut self, fields: &Fields<'_, '_>, field: &str, such_as: &str) -> Option<Box<str>> {
        self.required(fields, field, such_as)?;
        match self.any_text(fields, field)? {
            Some(text) => Some(text),
            None => {
                let position = fields.get(field).map_or(fields.position, |node| node.position);
                self.refuse(RulesErrorKind::Field, position, format!("`{field}` is empty"))
            }
        }
    }

    /// Reads a text. A number or a truth value is also accepted, as in Envoy's service. An empty text counts as absent.
    fn any_text(&mut self, fields: &Fields<'_, '_>, field: &str) -> Option<Option<Box<str>>> {
        let Some(node) = fields.get(field) else { return Some(None) };
        match (&node.value, node.kind()) {
            (_, Type::Nothing) => Some(None),
            (NodeValue::Scalar { text, .. }, _) if text.len() > TEXT_MAX => {
                let message = format!("`{field}` has {} bytes; the most is {TEXT_MAX}", text.len());
                self.refuse(RulesErrorKind::TooLarge, node.position, message)
            }
            (NodeValue::Scalar { text, .. }, _) => Some((!text.is_empty()).then(|| text.as_ref().into())),
            _ => self.wrong_type(node, &format!("`{field}`"), "text"),
        }
    }

    /// Reads `true` or `false`. The default is `false`.
    fn is_true(&mut self, fields: &Fields<'_, '_>, field: &str) -> bool {
        present(fields, field).and_then(|entry| self.truth(&entry.node, field)).unwrap_or_default()
    }
}

/// Returns this crate's fields of `metadata`.
fn ours<'n, 'a>(metadata: &'n Node<'a>) -> Option<&'n MapField<'a>> {
    let NodeValue::Map(entries) = &metadata.value else { return None };
    entries.iter().find(|entry| entry.name == OURS)
}

/// Returns a field that is present and not `null`.
fn present<'n, 'a>(fields: &Fields<'n, 'a>, field: &str) -> Option<&'n MapField<'a>> {
    fields.entry(field).filter(|entry| entry.node.kind() != Type::Nothing)
}
