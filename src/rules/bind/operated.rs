//! The settings of operators for the rules of a file: modes, overrides of single keys, and clients
//! that are always allowed or denied.

use super::super::names::Names;
use super::Bound;
use super::lists::client_list;
use crate::fleet::FleetRuleSettings;

/// Applies the operators' settings. The settings of a renamed rule follow its `was`, unless there are others under the
/// rule's name. The operators' access list comes before the access list of the file. Modes and
/// overrides do not apply to a file in Envoy's form, because its limits are not rules with names.
pub(in crate::rules) fn operate(bound: &mut Bound, settings: &FleetRuleSettings, names: &Names) {
    if let Some(clients) = &settings.clients {
        bound.lists.insert(0, client_list(clients.clone(), names));
    }
    if bound.tree.is_some() {
        return;
    }
    for bound in &mut bound.rules {
        let Some(policy) = bound.policies().first().cloned() else { continue };
        // The states of a renamed rule are stored under its first name.
        let names = || std::iter::once(policy.name()).chain(policy.stored_apart());
        if let Some(mode) = names().find_map(|name| settings.modes.get(name)) {
            let rule = bound.rule().clone().mode(*mode);
            *bound.rule_mut() = rule;
        }
        let tables: Vec<_> = names().filter_map(|name| settings.overrides.get(name)).collect();
        bound.override_quota(&tables);
    }
    // An override gives a rule of plans one policy instead of the policies of its plans, so the policies of later rules
    // get other indexes.
    let mut first = 0;
    let rules = std::mem::take(&mut bound.rules).into_iter().map(|rule| {
        let rule = rule.behind(first);
        first = rule.end();
        rule
    });
    bound.rules = rules.collect();
}
