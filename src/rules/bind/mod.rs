//! Makes the rules of a layer from the rules of a file.

mod condition;
mod cost;
mod history;
mod key;
mod lists;
#[cfg(feature = "fleet")]
mod operated;

use std::collections::HashMap;
use std::sync::Arc;

use super::error::Problems;
use super::names::Names;
use super::problem::{Position, RulesErrorKind};
use super::spec::{
    AccessSpec, At, CostSpec, DescriptorSpec, DomainSpec, FileSpec, LimitSpec, Name, PlansSpec, QuotaSpec, RuleSpec,
};
use super::tree::{self, Limit, LimitQuota, Tree, TreeLevel};
use crate::base::head::Head;
use crate::error::ConfigError;
use crate::key::Key;
use crate::middleware::charge::access::{Access, AccessList, BoundList};
use crate::middleware::rule::{BoundRule, Condition, LinkedRole, Rule};
use crate::mode::Mode;
use crate::policy::Policy;
use crate::quota::Quota;

use history::StoredNames;
use key::KeyError;
use lists::client_list;

pub(super) use history::RulesHistory;
#[cfg(feature = "fleet")]
pub(super) use operated::operate;

/// The rules of a file in the form that a layer uses.
pub(super) struct Bound {
    pub(super) rules: Vec<BoundRule>,
    /// The number of rules in the file, or the number of limits if the file has Envoy's form.
    pub(super) count: usize,
    pub(super) lists: Vec<BoundList>,
    /// The limits of a file in Envoy's form.
    pub(super) tree: Option<Arc<Tree>>,
    /// The quotas with their positions, to report quotas that a limiter does not support.
    pub(super) quotas: Vec<(Quota, Position)>,
    /// The names of the policies and the names that their states are stored under, each with the position of its
    /// rule.
    pub(super) names: Vec<(Box<str>, Position)>,
    pub(super) history: RulesHistory,
}

/// Makes the rules of a file. `history` has the facts about earlier files.
pub(super) fn bind(file: &FileSpec, names: &Arc<Names>, history: RulesHistory, problems: &mut Problems<'_>) -> Bound {
    let mut binder = Binder {
        names,
        problems,
        stored: StoredNames::new(history),
        rules: Vec::with_capacity(file.rules.len()),
        quotas: Vec::new(),
        policy_names: Vec::new(),
    };
    for rule in &file.rules {
        if let Some(old) = &rule.was {
            binder.record_rename(old, &rule.name);
        }
        binder.add_rule(rule);
    }
    let is_complete = binder.rules.len() >= file.rules.len();
    debug_assert!(is_complete || !binder.problems.is_empty(), "each rule that is left out has a problem");
    let tree = file.domain.as_ref().map(|domain| Arc::new(binder.tree(domain)));
    let count = if tree.is_some() { binder.rules.len() } else { file.rules.len() };
    let lists = access_list(&file.access, names).into_iter().collect();
    let Binder { rules, quotas, policy_names, stored, .. } = binder;
    Bound { rules, count, lists, tree, quotas, names: policy_names, history: stored.into_history() }
}

struct Binder<'b, 't> {
    names: &'b Arc<Names>,
    problems: &'b mut Problems<'t>,
    stored: StoredNames,
    rules: Vec<BoundRule>,
    quotas: Vec<(Quota, Position)>,
    policy_names: Vec<(Box<str>, Position)>,
}

impl Binder<'_, '_> {
    fn record_rename(&mut self, old: &Name, new: &Name) {
        if let Some(first) = self.stored.rename(old, new) {
            // The field `was` has to name the rule's first name, because the usage is stored under that name. A process
            // that starts with this file has not seen the earlier files, so it could not find the first name itself.
            let message = format!(
                "the usage of `{}` is stored under the rule's first name, `{first}`: write `was: {first}`",
                old.value
            );
            self.problems.add(RulesErrorKind::Name, old.position, message);
        }
    }

    /// Adds a rule of the file, and a second rule if the rule has a candidate.
    fn add_rule(&mut self, spec: &RuleSpec) {
        self.refuse_unfolded_paths(spec);
        let name = &*spec.name.value;
        let stored = spec.was.as_ref().map_or(name, |old| &old.value);
        let conditions = condition::conditions(&spec.matches, self.names);
        let Some(mut rule) = self.rule_of_quotas(spec, name, stored) else { return };
        if let Some(block) = &spec.block {
            let (name, stored) = (RuleSpec::block_name(name), RuleSpec::block_name(stored));
            let Some(block) = self.policy(spec.position, &name, &stored, block) else { return };
            let blocked = rule.linked_to(block, LinkedRole::Block);
            let Some(blocked) = self.or_problem(spec.position, blocked) else { return };
            rule = blocked;
        }
        if let Some(percent) = spec.warn_at {
            rule = rule.warn_at_percent(percent);
        }
        if let Some(bodies) = spec.pace {
            if self.names.heads_only {
                let message = "`pace` applies to bodies, but this program sees only heads: set it in a program that the bodies pass";
                self.problems.add(RulesErrorKind::Field, spec.position, message);
                return;
            }
            rule = rule.pacing(bodies).pace_after(spec.pace_after.unwrap_or(0));
        }
        self.add_with_key(with_options(rule, spec, &conditions, spec.mode), spec);
        if let Some(candidate) = &spec.candidate {
            let (name, stored) = (RuleSpec::candidate_name(name), RuleSpec::candidate_name(stored));
            let Some(policy) = self.policy(spec.position, &name, &stored, candidate) else { return };
            self.add_with_key(with_options(policy.into(), spec, &conditions, Mode::Shadow), spec);
        }
    }

    /// Adds a problem for a pattern that cannot match, because paths are folded before they are compared.
    fn refuse_unfolded_paths(&mut self, spec: &RuleSpec) {
        let of_not = spec.matches.not.iter().flat_map(|not| &not.path);
        let mut patterns = spec.matches.path.iter().chain(of_not);
        let Some(pattern) = patterns.find(|pattern| self.names.folded_paths && !pattern.is_folded()) else { return };
        let message = format!(
            "no path matches `{pattern}`, because paths are compared in lower case, without `;parameters` and without \
             a slash at the end: write the pattern in this form"
        );
        self.problems.add(RulesErrorKind::Value, spec.position, message);
    }

    /// Makes the rule with its quotas and no other options.
    fn rule_of_quotas(&mut self, spec: &RuleSpec, name: &str, stored: &str) -> Option<Rule> {
        match &spec.quota {
            QuotaSpec::All(quotas) => match quotas.as_slice() {
                [quota] => Some(self.policy(spec.position, name, stored, quota)?.into()),
                quotas => self.rule_of_all(spec.position, name, stored, quotas),
            },
            QuotaSpec::Plans(plans) => self.rule_of_plans(spec.position, name, stored, plans),
        }
    }

    /// Makes a rule with several quotas. The states of a quota are stored by the index of the quota in the list, so
    /// that the usage is kept when the quota changes.
    fn rule_of_all(&mut self, position: Position, name: &str, stored: &str, quotas: &[At<Quota>]) -> Option<Rule> {
        // The policies are named after the quotas of the file. The states need quotas with more room, which are put
        // into the policies afterwards.
        let mut roomy = Vec::with_capacity(quotas.len());
        for (at, quota) in quotas.iter().enumerate() {
            let stored = if at == 0 { stored.to_owned() } else { format!("{stored}-quota-{}", at + 1) };
            roomy.push((self.roomy_quota(position, &stored, quota)?, stored));
        }
        let rule = self.or_problem(position, Rule::all_of(name, quotas.iter().map(|quota| quota.value)))?;
        let policies = rule.policies().iter().zip(roomy);
        let policies = policies.map(|(policy, (quota, stored))| self.stored_as(&policy.with_quota(quota), &stored));
        let policies = policies.collect::<Result<Vec<_>, _>>();
        Some(Rule { policies: self.or_problem(position, policies)?, ..rule })
    }

    /// Makes a rule with plans, which share their states.
    fn rule_of_plans(&mut self, position: Position, name: &str, stored: &str, plans: &PlansSpec) -> Option<Rule> {
        let capacity = plans.quotas.iter().map(|(_, quota)| quota.value.capacity_to_hold()).max().unwrap_or(0);
        let largest = self.take_stored_name(position, stored, capacity)?;
        let quotas: Vec<Quota> = plans.quotas.iter().map(|(_, quota)| self.with_room(quota, largest)).collect();
        let by_name: HashMap<Key, usize> =
            plans.quotas.iter().enumerate().filter_map(|(at, (name, _))| Some((Key::of(&*name.value)?, at))).collect();
        let plan_name = key::extractor(&plans.by, self.names);
        let (plan_name, otherwise) = (self.key_or_problem(plan_name)?, plans.otherwise);
        let choose =
            move |head: &Head<'_>| plan_name(head).and_then(|key| by_name.get(&key).copied()).or(Some(otherwise));
        let rule = self.or_problem(position, Rule::plans(name, quotas, choose))?;
        let policies = rule.policies().iter().zip(&plans.quotas);
        let policies = policies
            .map(|(policy, (plan, _))| self.stored_as(policy, stored).map(|policy| policy.of_plan(&plan.value)));
        let policies = policies.collect::<Result<Vec<_>, _>>();
        Some(Rule { policies: self.or_problem(position, policies)?, ..rule })
    }

    /// Makes the policy of one quota.
    fn policy(&mut self, position: Position, name: &str, stored: &str, quota: &At<Quota>) -> Option<Policy> {
        let quota = self.roomy_quota(position, stored, quota)?;
        let policy = Policy::new(name, quota).and_then(|policy| self.stored_as(&policy, stored));
        self.or_problem(position, policy)
    }

    /// Returns the policy with its states stored under a name, and with a number that identifies these rules.
    /// While the rules are replaced, requests may still be decided with the policy's earlier version. The number
    /// prevents a warning that the two versions contradict each other.
    fn stored_as(&self, policy: &Policy, stored: &str) -> Result<Policy, ConfigError> {
        policy.following(*policy.quota(), Arc::as_ptr(self.names).addr()).stored_as(stored)
    }

    /// Returns a quota whose states are stored under a name, with room for the units that were used under that name.
    fn roomy_quota(&mut self, position: Position, stored: &str, quota: &At<Quota>) -> Option<Quota> {
        let largest = self.take_stored_name(position, stored, quota.value.capacity())?;
        Some(self.with_room(quota, largest))
    }

    /// Reserves a stored name. Returns the largest capacity that quotas with this stored name have
    /// had.
    fn take_stored_name(&mut self, position: Position, stored: &str, capacity: u64) -> Option<u64> {
        let taken = self.stored.take(stored, capacity, position.line);
        let problem = |line: usize| {
            let message = format!(
                "this rule's usage is stored as `{stored}`, which is also the stored name of the rule in line {line}"
            );
            self.problems.add(RulesErrorKind::Name, position, message);
        };
        taken.map_err(problem).ok()
    }

    fn with_room(&mut self, quota: &At<Quota>, largest: u64) -> Quota {
        let roomy = quota.value.holding(largest);
        self.quotas.push((roomy, quota.position));
        roomy
    }

    /// Makes the limits of a domain, and adds a rule for each limit.
    fn tree(&mut self, spec: &DomainSpec) -> Tree {
        let root = self.level(&spec.name, &spec.descriptors, &mut Vec::new());
        Tree { domain: spec.name.clone(), root, describe: self.names.describe.clone() }
    }

    /// Makes the limits below a path of descriptors.
    fn level<'s>(
        &mut self,
        domain: &str,
        specs: &'s [DescriptorSpec],
        path: &mut Vec<&'s DescriptorSpec>,
    ) -> TreeLevel {
        let mut level = TreeLevel::default();
        for spec in specs {
            path.push(spec);
            let limit = spec.limit.as_ref().and_then(|limit| self.limit(domain, limit, path));
            let next = self.level(domain, &spec.descriptors, path);
            path.pop();
            level.add(spec, limit, next);
        }
        level
    }

    fn limit(&mut self, domain: &str, spec: &LimitSpec, path: &[&DescriptorSpec]) -> Option<Limit> {
        let quota = match &spec.quota {
            None => None,
            Some(quota) => {
                let name = tree::policy_name(domain, path);
                let policy = self.policy(quota.position, &name, &name, quota)?;
                let rule = with_mode(policy.clone().into(), spec.mode);
                // The tree finds the key.
                self.add_bound(BoundRule::new(rule, |_: &Head<'_>| None::<Key>), quota.position);
                Some(LimitQuota { rule: self.rules.len() - 1, policy, mode: spec.mode })
            }
        };
        Some(Limit { quota, name: spec.name.clone(), replaces: spec.replaces.clone() })
    }

    fn add_with_key(&mut self, rule: Rule, spec: &RuleSpec) {
        let bound = key::bound(rule, &spec.key, self.names);
        if let Some(bound) = self.key_or_problem(bound) {
            self.add_bound(bound, spec.position);
        }
    }

    /// Adds a rule, whose policies come after the policies of the earlier rules.
    fn add_bound(&mut self, rule: BoundRule, position: Position) {
        let first = self.rules.last().map_or(0, BoundRule::end);
        self.policy_names.extend(rule.names().map(|name| (name.into(), position)));
        self.rules.push(rule.behind(first));
    }

    /// Returns the value, or adds a problem if `made` is an error.
    fn or_problem<T>(&mut self, position: Position, made: Result<T, ConfigError>) -> Option<T> {
        made.map_err(|error| self.problems.add(RulesErrorKind::Value, position, error.to_string())).ok()
    }

    /// Returns the value, or adds a problem if `made` is an error.
    fn key_or_problem<T>(&mut self, made: Result<T, KeyError>) -> Option<T> {
        made.map_err(|error| self.problems.add(RulesErrorKind::Name, error.position, error.value)).ok()
    }
}

/// Sets the mode of a rule, and the options that a rule of the file shares with its candidate.
fn with_options(mut rule: Rule, spec: &RuleSpec, conditions: &[Condition], mode: Mode) -> Rule {
    rule.paths.clone_from(&spec.matches.path);
    rule.conditions = conditions.to_vec();
    if let Some(cost) = &spec.cost {
        rule = rule.cost(cost::cost_of(cost));
        if let CostSpec::Reserved(_) = cost.value {
            rule = rule.settle_by_usage();
        }
    }
    let rule = with_mode(rule.missing_key(spec.missing_key), mode);
    if spec.is_enabled { rule } else { rule.disabled() }
}

/// Sets a rule's mode, except [`Mode::Enforce`], which is the default.
fn with_mode(rule: Rule, mode: Mode) -> Rule {
    if mode == Mode::Enforce { rule } else { rule.mode(mode) }
}

/// Returns the access list of a file, if it has one.
fn access_list(spec: &AccessSpec, names: &Names) -> Option<BoundList> {
    if spec.allow.is_empty() && spec.deny.is_empty() {
        return None;
    }
    let list = AccessList::new();
    for (networks, access) in [(&spec.allow, Access::Allow), (&spec.deny, Access::Deny)] {
        networks.iter().for_each(|network| list.set_network(network.value, access));
    }
    Some(client_list(list, names))
}

#[cfg(test)]
mod tests {
    use super::super::handle::Rules;
    use super::super::read;
    use super::*;

    /// Returns the rules of a text, after others.
    fn bound(text: &str, history: RulesHistory) -> Bound {
        let names = Arc::new(Names::default());
        let read = |known: read::KnownNames<'_>| {
            read::read(text.as_bytes(), known, |file, problems| bind(&file, &names, history, problems))
        };
        names.known(true, read).expect("the file has no problem")
    }

    #[test]
    fn pattern_that_no_folded_path_matches_is_a_problem() {
        for (path, is_folded) in [
            ("/login", true),
            ("/", true),
            ("/a/{Id}/{*Rest}", true),
            ("/%C3%A4", true),
            ("/Login", false),
            ("/login/", false),
            ("/a;b", false),
        ] {
            for text in [format!("path: '{path}'"), format!("not: {{path: ['/x', '{path}']}}")] {
                let text = format!("rules: [{{name: a, quota: 5/s, key: global, match: {{{text}}}}}]");
                let read = Rules::builder().folded_paths(true).read_text(text.clone());
                assert_eq!(read.is_ok(), is_folded, "{text}: {read:?}");
                assert!(Rules::from_text(text).is_ok());
            }
        }
    }

    /// Returns the units that a rule's states can hold.
    fn room(bound: &Bound) -> u64 {
        let quota = bound.quotas[0].0;
        quota.capacity() + quota.spec().debt
    }

    #[test]
    fn quota_has_room_for_the_largest_that_its_rule_has_had() {
        let mut history = RulesHistory::default();
        for limit in [10, 1_000, 20, 30] {
            let bound = bound(&format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]"), history);
            let largest = if limit == 10 { 20 } else { 1_000 };
            assert!(room(&bound) >= largest, "{limit}: {}", room(&bound));
            history = bound.history;
        }
    }

    #[test]
    fn quota_of_a_rule_that_was_gone_has_its_own_room_only() {
        let file = |name: &str, limit: u64| format!("rules: [{{name: {name}, quota: {limit} per hour, key: peer-ip}}]");
        let first = bound(&file("a", 1_000), RulesHistory::default());
        let between = bound(&file("b", 5), first.history);
        assert_eq!(room(&bound(&file("a", 10), between.history)), 20);
    }
}
