//! Finds what is probably not meant in rules that are right.

use super::contained::never_binding;
use super::problem::Quoted;
use super::report::{Noticed, RulesWarningKind};
use super::spec::{FileSpec, Name, QuotaSpec, RuleSpec};
use crate::mode::Mode;

/// Returns the warnings of a file.
pub(super) fn warnings(file: &FileSpec) -> Vec<Noticed> {
    let disabled = file.rules.iter().filter(|rule| !rule.is_enabled).map(disabled_rule);
    let unused = file.unused.iter().map(unused_template);
    let closed = file.rules.iter().filter_map(closed_rule);
    disabled.chain(closed).chain(unused).chain(never_binding(&file.rules)).collect()
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

/// Returns a note if a quota of the rule is 0. A plan of 0 stands beside others, so it is no mistake.
fn closed_rule(rule: &RuleSpec) -> Option<Noticed> {
    let QuotaSpec::All(quotas) = &rule.quota else { return None };
    let refuses = rule.is_enabled && rule.mode == Mode::Enforce;
    let quota = quotas.iter().find(|quota| refuses && quota.limit() == 0)?;
    let message = format!(
        "the quota of the rule {} is 0, so each request that it applies to is refused; `enabled: false` switches a rule off",
        Quoted(&rule.name)
    );
    Some(Noticed { kind: RulesWarningKind::RefusesAll, position: quota.position, message })
}
