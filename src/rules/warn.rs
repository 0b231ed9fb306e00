//! Finds what is probably not meant in rules that are right.

use super::problem::Quoted;
use super::report::{Noticed, RulesWarningKind};
use super::spec::{FileSpec, RuleSpec};

/// Returns the warnings of a file.
pub(super) fn warnings(file: &FileSpec) -> Vec<Noticed> {
    let disabled = file.rules.iter().filter(|rule| !rule.is_enabled);
    disabled.map(disabled_rule).collect()
}

fn disabled_rule(rule: &RuleSpec) -> Noticed {
    let message = format!("the rule {} is not applied, because `enabled` is false", Quoted(&rule.name));
    Noticed { kind: RulesWarningKind::Disabled, position: rule.name.position, message }
}
