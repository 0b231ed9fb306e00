//! The reader of files of rules, which reports all problems of a file at once.

pub(super) mod condition;
pub(super) mod envoy;
mod foreign;
pub(super) mod key;
mod path;
pub(super) mod quota;
pub(super) mod rule;
pub(super) mod shared;
mod value;

use std::collections::HashMap;

use super::document::{Node, NodeValue, Type, decode, parse};
use super::error::{Problems, RulesError};
use super::problem::RulesErrorKind;
use super::spec::{AccessSpec, At, FileSpec, RuleSpec};
pub(super) use condition::METHODS;
pub(crate) use key::can_be_registered;
pub(super) use path::pattern as path_pattern;
use rule::UsedNames;
use shared::{RuleForm, SharedSettings};
pub(crate) use value::KnownNames;
use value::{RULES_MAX, ValueReader};

pub(in crate::rules) const FILE: &[&str] = &["version", "defaults", "templates", "rules", "access"];
pub(in crate::rules) const ACCESS: &[&str] = &["allow", "deny"];

/// Reads a file of rules, and calls `build` with its rules. `build` may add further problems.
///
/// # Errors
/// Returns all problems of the file.
pub(crate) fn read<T>(
    bytes: &[u8],
    names: KnownNames<'_>,
    build: impl FnOnce(FileSpec, &mut Problems<'_>) -> T,
) -> Result<T, RulesError> {
    read_and_look(bytes, names, |_, _| (), build)
}

/// Reads a file as [`read`] does. `look` gets the part of the file that could be read, even if the
/// file has problems.
pub(crate) fn read_and_look<T>(
    bytes: &[u8],
    names: KnownNames<'_>,
    look: impl FnOnce(&FileSpec, &Problems<'_>),
    build: impl FnOnce(FileSpec, &mut Problems<'_>) -> T,
) -> Result<T, RulesError> {
    let text = match decode(bytes) {
        Ok(text) => text,
        Err(problems) => return Err(problems.into_error()),
    };
    let mut problems = Problems::new(text);
    let parsed = parse(text, &mut problems);
    if let Some((position, message)) = parsed.first.as_ref().and_then(|first| foreign::recognised(first)) {
        problems = Problems::new(text);
        problems.add(RulesErrorKind::Value, position, message);
        return Err(problems.into_error());
    }
    let root = parsed.whole();
    let file = root.map(|root| ValueReader { problems: &mut problems, names, patterns: 0 }.file(&root));
    if let Some(file) = &file {
        look(file, &problems);
    }
    let built = match file {
        Some(file) if problems.is_empty() => Some(build(file, &mut problems)),
        _ => None,
    };
    problems.into_result(built)
}

/// Each of these methods adds a problem if it returns `None`.
impl ValueReader<'_, '_, '_> {
    fn file(&mut self, root: &Node<'_>) -> FileSpec {
        let mut file = FileSpec::default();
        let is_empty = |node: &Node<'_>| matches!(&node.value, NodeValue::List(items) if items.is_empty());
        match root.kind() {
            Type::List => {
                file.without_rules = is_empty(root).then_some(root.position);
                file.rules = self.rules(root, RuleForm::Entry, &mut SharedSettings::default());
            }
            Type::Map if envoy::is_domain(root) => file.domain = self.domain(root),
            Type::Map => {
                let Some(fields) = self.fields(root, "a file of rules", FILE) else { return file };
                if let Some(version) = fields.get("version") {
                    self.version(version);
                }
                let mut shared = self.shared(&fields);
                if let Some(rules) = self.required(&fields, "rules", "; if you want no rules, write `rules: []`") {
                    file.without_rules = is_empty(rules).then_some(rules.position);
                    file.rules = self.rules(rules, RuleForm::Rule, &mut shared);
                }
                file.unused = shared.unused();
                if let Some(access) = fields.get("access") {
                    file.access = self.access(access);
                }
            }
            _ => drop(self.wrong_type::<()>(root, "a file of rules", "a mapping with the field `rules`")),
        }
        file
    }

    fn version(&mut self, node: &Node<'_>) {
        if let Some(version) = self.number(node, "`version`", "1").filter(|version| *version != 1) {
            self.problems.add(RulesErrorKind::Value, node.position, format!("`version` must be 1, not {version}"));
        }
    }

    fn access(&mut self, node: &Node<'_>) -> AccessSpec {
        let mut access = AccessSpec::default();
        let Some(fields) = self.fields(node, "`access`", ACCESS) else { return access };
        let mut lines = HashMap::new();
        for (name, networks) in [("allow", &mut access.allow), ("deny", &mut access.deny)] {
            let Some(node) = fields.get(name) else { continue };
            let nodes = match &node.value {
                NodeValue::List(items) => items.iter().map(|item| &**item).collect(),
                _ => vec![node],
            };
            for node in nodes {
                let Some(network) = self.network(node) else { continue };
                if let Some(first) = lines.insert(network, node.position.line) {
                    let message = format!("{network} is listed twice; the first is in line {first}");
                    self.problems.add(RulesErrorKind::Value, node.position, message);
                }
                networks.push(At { value: network, position: node.position });
            }
        }
        access
    }

    fn rules(&mut self, node: &Node<'_>, form: RuleForm, shared: &mut SharedSettings) -> Vec<RuleSpec> {
        let nodes = self.items(node, "`rules`", "a list of rules");
        if let Some(beyond) = nodes.get(RULES_MAX) {
            let message = format!("the file has {} rules; the most is {RULES_MAX}", nodes.len());
            self.problems.add(RulesErrorKind::TooLarge, beyond.position, message);
            return Vec::new();
        }
        // Compares the names of all rules, even of a rule whose other fields could not be read.
        let mut taken = UsedNames::default();
        let rules: Vec<RuleSpec> = nodes.iter().filter_map(|node| self.rule(node, form, shared, &mut taken)).collect();
        debug_assert!(
            rules.len() == nodes.len() || !self.problems.is_empty(),
            "each rule that is left out has a problem"
        );
        taken.compare(self.problems);
        rules
    }
}
