//! Finds what is probably not meant in rules that are right.

use super::contained::never_binding;
use super::problem::Quoted;
use super::report::{Noticed, RulesWarningKind};
use super::spec::{FileSpec, Name, RuleSpec};

/// Returns the warnings of a file.
pub(super) fn warnings(file: &FileSpec) -> Vec<Noticed> {
    let disabled = file.rules.iter().filter(|rule| !rule.is_enabled).map(disabled_rule);
    let unused = file.unused.iter().map(unused_template);
    disabled.chain(unused).chain(never_binding(&file.rules)).collect()
}

fn unused_template(name: &Name) -> Noticed {
    let name_text = Quoted(name);
    let message = format!("no rule uses the template {name_text}: write `use` in a rule, or leave the template out");
    Noticed { kind: RulesWarningKind::UnusedTemplate, position: name.position, message }
}

fn disabled_rule(rule: &RuleSpec) -> Noticed {
    let message = format!("the rule {} is not applied, because `enabled` is false", Quoted(&rule.name));
    Noticed { kind: RulesWarningKind::Disabled, position: rule.name.position, message }
}
