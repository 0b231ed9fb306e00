//! Makes the rules of a layer of what a file says.

use std::collections::HashMap;
use std::sync::Arc;

use http::header::USER_AGENT;
use http::request::Parts;
use http::{HeaderName, HeaderValue};

use super::names::Names;
use super::pattern::AnyOf;
use super::problem::{Place, Problems, RulesErrorKind};
use super::spec::{
    AccessSpec, At, CostSpec, DescriptorSpec, DomainSpec, FileSpec, KeySpec, LimitSpec, MatchSpec, Name, PlansSpec,
    QuotaSpec, RuleSpec, Wildcard,
};
use super::tree::{self, Level, Limit, LimitQuota, Tree};
use crate::explanation::NotCharged;
use crate::key::{self, IntoKey, Key, Prefixes};
use crate::middleware::charge::access::{Access, AccessList, BoundList};
use crate::middleware::rule::{BoundRule, Condition, IntoRule, Read, Rule};
use crate::mode::Mode;
use crate::policy::Policy;
use crate::quota::{PolicyError, Quota};

/// Rules that a layer can take.
pub(super) struct Bound {
    pub(super) rules: Vec<BoundRule>,
    /// The number of rules in the file, or of limits in a file of Envoy's form.
    pub(super) count: usize,
    pub(super) lists: Vec<BoundList>,
    /// The limits of a file in Envoy's form.
    pub(super) tree: Option<Arc<Tree>>,
    /// The quotas with their places, for limiters that do not support them.
    pub(super) quotas: Vec<(Quota, Place)>,
    /// The names of the policies, and those that their states are stored under, with the places of their rules.
    pub(super) names: Vec<(Box<str>, Place)>,
    pub(super) history: History,
}

/// The facts about earlier files that the next one needs.
#[derive(Clone, Default)]
pub(super) struct History {
    /// The largest capacity that the quotas of a stored name have had: what was used under it needs room in a smaller
    /// quota.
    largest: HashMap<Box<str>, u64>,
    /// The rules that had another name, and the name that their states are stored under.
    renamed: HashMap<Box<str>, Box<str>>,
}

/// Makes the rules of a file. `history` is that of the files before.
pub(super) fn bind(file: FileSpec, names: &Arc<Names>, history: History, problems: &mut Problems<'_>) -> Bound {
    let History { largest, renamed: before } = history;
    let mut binder = Binder {
        names,
        problems,
        stored: HashMap::new(),
        bound: Bound {
            rules: Vec::with_capacity(file.rules.len()),
            count: file.rules.len(),
            lists: Vec::new(),
            quotas: Vec::new(),
            names: Vec::new(),
            history: History { largest, renamed: HashMap::new() },
            tree: None,
        },
    };
    for rule in file.rules {
        if let Some(was) = &rule.was {
            binder.renamed(&rule, was, before.get(&*was.value).map(|first| &**first));
        }
        binder.rule(&rule);
    }
    binder.lists(&file.access);
    if let Some(domain) = &file.domain {
        binder.domain(domain);
        binder.bound.count = binder.bound.rules.len();
    }
    // Names that no rule has any more are forgotten, as their states expire.
    let Binder { stored, mut bound, .. } = binder;
    bound.history.largest.retain(|name, _| stored.contains_key(name));
    bound
}

struct Binder<'b, 't> {
    names: &'b Arc<Names>,
    problems: &'b mut Problems<'t>,
    /// The names that states are stored under, and the line of the rule.
    stored: HashMap<Box<str>, usize>,
    bound: Bound,
}

impl Binder<'_, '_> {
    /// Notes that a rule had another name. `first` is the name that this one's states are stored under, if it is
    /// another.
    fn renamed(&mut self, rule: &RuleSpec, was: &Name, first: Option<&str>) {
        if let Some(first) = first {
            // Not followed: a process that starts with this file could not know it.
            let message = format!(
                "what clients used under `{}` is stored as `{first}`, its first name: write `was: {first}`",
                was.value
            );
            self.problems.add(RulesErrorKind::Name, was.place, message);
        }
        self.bound.history.renamed.insert(rule.name.value.clone(), was.value.clone());
    }

    fn rule(&mut self, spec: &RuleSpec) {
        let name = &*spec.name.value;
        let was = spec.was.as_ref().map_or(name, |was| &was.value);
        let (conditions, paths) = (self.conditions(&spec.matches), spec.matches.path.clone());
        let common = |mut rule: Rule, mode: Mode| {
            rule.paths.clone_from(&paths);
            rule = rule.missing_key(spec.missing_key);
            rule.conditions.clone_from(&conditions);
            if let Some(cost) = &spec.cost {
                rule = rule.cost(cost_of(&cost.value));
            }
            if mode == Mode::Enforce { rule } else { rule.mode(mode) }
        };
        let Some(mut rule) = self.of_quotas(spec, name, was) else { return };
        if let Some(block) = &spec.block {
            let (name, was) = (RuleSpec::block_name(name), RuleSpec::block_name(was));
            let Some(block) = self.policy(spec.place, &name, &was, block) else { return };
            let Some(blocked) = self.or_problem(spec.place, rule.block(block)) else { return };
            rule = blocked;
        }
        if let Some(percent) = spec.warn_at {
            rule = rule.warn_at_percent(percent);
        }
        self.add(spec, common(rule, spec.mode));
        if let Some(candidate) = &spec.candidate {
            let (name, was) = (RuleSpec::candidate_name(name), RuleSpec::candidate_name(was));
            let Some(policy) = self.policy(spec.place, &name, &was, candidate) else { return };
            self.add(spec, common(policy.into_rule(), Mode::Shadow));
        }
    }

    /// Makes the rule with its quotas alone.
    fn of_quotas(&mut self, spec: &RuleSpec, name: &str, was: &str) -> Option<Rule> {
        match &spec.quota {
            QuotaSpec::All(quotas) => {
                let [quota] = quotas.as_slice() else { return self.of_several(spec.place, name, was, quotas) };
                Some(self.policy(spec.place, name, was, quota)?.into_rule())
            }
            QuotaSpec::Plans(plans) => self.of_plans(spec.place, name, was, plans),
        }
    }

    /// The quotas are stored by their places in the list, so that a quota that changes keeps what was used.
    fn of_several(&mut self, place: Place, name: &str, was: &str, quotas: &[At<Quota>]) -> Option<Rule> {
        let stored: Vec<String> = (0..quotas.len())
            .map(|at| if at == 0 { was.to_owned() } else { format!("{was}-quota-{}", at + 1) })
            .collect();
        let mut roomy = Vec::with_capacity(quotas.len());
        for (quota, stored) in quotas.iter().zip(&stored) {
            roomy.push(self.quota(place, stored, std::slice::from_ref(quota))?.pop()?);
        }
        // They are named after the words of the file, which do not say what room the states need.
        let named = self.or_problem(place, Policy::all_of(name, quotas.iter().map(|quota| quota.value)))?;
        let policies = named.policies().iter().zip(roomy).zip(&stored);
        let policies = policies.map(|((policy, quota), stored)| self.kept(&policy.with_quota(quota), stored));
        let policies = self.or_problem(place, policies.collect::<Result<Vec<_>, _>>())?;
        Some(Rule { policies, ..named })
    }

    fn of_plans(&mut self, place: Place, name: &str, was: &str, plans: &PlansSpec) -> Option<Rule> {
        let quotas: Vec<At<Quota>> = plans.quotas.iter().map(|(_, quota)| quota.clone()).collect();
        let quotas = self.quota(place, was, &quotas)?;
        let of_name: HashMap<Key, usize> =
            plans.quotas.iter().enumerate().filter_map(|(at, (name, _))| Some((Key::of(&*name.value)?, at))).collect();
        let (by, otherwise) = (self.key(&plans.by)?, plans.otherwise);
        let choose = move |parts: &Parts| by(parts).and_then(|key| of_name.get(&key).copied()).or(Some(otherwise));
        let rule = self.or_problem(place, Policy::plans(name, quotas, choose))?;
        let policies = rule.policies().iter().map(|policy| self.kept(policy, was)).collect::<Result<Vec<_>, _>>();
        Some(Rule { policies: self.or_problem(place, policies)?, ..rule })
    }

    fn policy(&mut self, place: Place, name: &str, stored: &str, quota: &At<Quota>) -> Option<Policy> {
        let quota = self.quota(place, stored, std::slice::from_ref(quota))?.pop()?;
        let policy = Policy::new(name, quota).and_then(|policy| self.kept(&policy, stored));
        self.or_problem(place, policy)
    }

    /// Returns the policy with its states stored under a name, and with the number of these rules: an earlier version
    /// of it, under which requests are still decided, does not contradict it.
    fn kept(&self, policy: &Policy, stored: &str) -> Result<Policy, PolicyError> {
        policy.following(*policy.quota(), Arc::as_ptr(self.names).addr()).stored_as(stored)
    }

    /// Returns quotas that are stored under one name, with room for what was used under each earlier one.
    fn quota(&mut self, place: Place, stored: &str, quotas: &[At<Quota>]) -> Option<Vec<Quota>> {
        if let Some(line) = self.stored.insert(stored.into(), place.line) {
            let message =
                format!("what clients used is stored as `{stored}`, and so it is for the rule in line {line}");
            self.problems.add(RulesErrorKind::Name, place, message);
            return None;
        }
        let now = quotas.iter().map(|quota| quota.value.capacity()).max().unwrap_or(0);
        let largest = self.bound.history.largest.entry(stored.into()).or_default();
        *largest = now.max(*largest);
        let roomy: Vec<Quota> = quotas.iter().map(|quota| quota.value.holding(*largest)).collect();
        self.bound.quotas.extend(roomy.iter().copied().zip(quotas.iter().map(|quota| quota.place)));
        Some(roomy)
    }

    fn domain(&mut self, spec: &DomainSpec) {
        let root = self.level(&spec.name, &spec.descriptors, &mut Vec::new());
        let describe = self.names.describe.clone();
        self.bound.tree = Some(Arc::new(Tree { domain: spec.name.clone(), root, describe }));
    }

    /// Makes the limits below a path.
    fn level<'s>(&mut self, domain: &str, specs: &'s [DescriptorSpec], path: &mut Vec<&'s DescriptorSpec>) -> Level {
        let mut level = Level::default();
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
                let policy = self.policy(quota.place, &name, &name, quota)?;
                let rule = policy.clone().into_rule();
                let rule = if spec.mode == Mode::Enforce { rule } else { rule.mode(spec.mode) };
                // The tree finds the key.
                self.place(BoundRule::new(rule, |_: &Parts| None::<Key>), quota.place);
                Some(LimitQuota { rule: self.bound.rules.len() - 1, policy, mode: spec.mode })
            }
        };
        Some(Limit { quota, name: spec.name.clone(), replaces: spec.replaces.clone() })
    }

    fn or_problem<T>(&mut self, place: Place, made: Result<T, PolicyError>) -> Option<T> {
        made.map_err(|error| self.problems.add(RulesErrorKind::Value, place, error.to_string())).ok()
    }

    /// Adds a rule with its key. A ready-made extractor keeps its type, by which the layer knows where addresses come
    /// from.
    fn add(&mut self, spec: &RuleSpec, rule: Rule) {
        let bound = match (spec.key.as_slice(), &self.names.proxies) {
            ([one], _) if one.value == KeySpec::PeerIp => BoundRule::new(rule, key::peer_ip()),
            ([one], Some(proxies)) if one.value == KeySpec::ClientIp => {
                BoundRule::new(rule, key::client_ip(proxies.clone()))
            }
            (parts, _) => {
                let parts: Option<Vec<Read<Option<Key>>>> = parts.iter().map(|part| self.key(part)).collect();
                let Some(parts) = parts else { return };
                BoundRule::new(rule, move |request: &Parts| {
                    let mut keys = parts.iter().map(|part| part(request));
                    let first = keys.next()??;
                    keys.try_fold(first, |key, next| (key, next?).into_key())
                })
            }
        };
        self.place(bound, spec.place);
    }

    fn place(&mut self, bound: BoundRule, place: Place) {
        let first = self.bound.rules.last().map_or(0, BoundRule::end);
        self.bound.names.extend(bound.names().map(|name| (name.into(), place)));
        self.bound.rules.push(bound.placed(first));
    }

    fn key(&mut self, spec: &At<KeySpec>) -> Option<Read<Option<Key>>> {
        fn read<K: IntoKey>(extract: impl Fn(&Parts) -> K + Send + Sync + 'static) -> Read<Option<Key>> {
            Arc::new(move |parts| extract(parts).into_key())
        }
        Some(match &spec.value {
            KeySpec::ClientIp => match &self.names.proxies {
                Some(proxies) => read(key::client_ip(proxies.clone())),
                None => {
                    let message = "`client-ip` needs the proxies whose reports are believed: name them by \
                                   RulesBuilder::trusted_proxies, or write `peer-ip` if clients connect directly";
                    self.problems.add(RulesErrorKind::Name, spec.place, message);
                    return None;
                }
            },
            KeySpec::PeerIp => read(key::peer_ip()),
            KeySpec::Path => read(key::original_path()),
            KeySpec::Host => read(key::host()),
            KeySpec::Method => read(key::method()),
            KeySpec::Global => read(key::global()),
            KeySpec::BearerToken => read(key::bearer_token()),
            KeySpec::Header(name) => read(key::header(name.as_str())),
            KeySpec::Cookie(name) => read(key::cookie(&**name)),
            KeySpec::Registered(name) => Arc::clone(self.names.keys.get(&**name)?),
        })
    }

    fn conditions(&self, spec: &MatchSpec) -> Vec<Condition> {
        let mut all: Vec<Condition> = Vec::new();
        let mut add = |of: NotCharged, expected: String, holds: Read<bool>| {
            all.push(Condition { of, expected: Some(shortened(expected).into()), holds });
        };
        let MatchSpec { method, path: _, host, header, client, user_agent, action } = spec.clone();
        if !method.is_empty() {
            add(NotCharged::Method, either(&method), Arc::new(move |parts| method.contains(&parts.method)));
        }
        if !host.is_empty() {
            let expected = either(host.iter().map(|Wildcard(host)| host));
            let hosts = AnyOf::new(host.iter().map(|Wildcard(host)| &**host), false);
            let holds = move |parts: &Parts| match key::host_of(parts) {
                Ok(name) if is_plain_host(&name) => hosts.matches(&name),
                // A request that hides its host, or has several, must not escape the rule. Servers read `a.b:x` as
                // `a.b`.
                _ => true,
            };
            add(NotCharged::Host, expected, Arc::new(holds));
        }
        for (name, value) in header {
            let expected = format!("{name}: {}", value.0);
            let values = AnyOf::new([&*value.0], false);
            let holds = move |parts: &Parts| has_value(parts, &name, |own| values.matches(own));
            add(NotCharged::Header, expected, Arc::new(holds));
        }
        if !user_agent.is_empty() {
            let expected = either(user_agent.iter().map(|Wildcard(agent)| agent));
            let agents = AnyOf::new(user_agent.iter().map(|Wildcard(agent)| &**agent), true);
            let holds = move |parts: &Parts| has_value(parts, &USER_AGENT, |own| agents.matches(own));
            add(NotCharged::UserAgent, expected, Arc::new(holds));
        }
        if !client.is_empty() {
            let (expected, proxies) = (either(&client), self.names.proxies.clone());
            let holds = move |parts: &Parts| {
                let address = match &proxies {
                    Some(proxies) => key::client_address(proxies, parts),
                    None => key::peer_address(parts),
                };
                // A client that hides its address must not escape the rule.
                address.is_none_or(|address| {
                    let address = address.to_canonical();
                    client.iter().any(|network| network.contains(&address))
                })
            };
            add(NotCharged::Client, expected, Arc::new(holds));
        }
        if !action.is_empty() {
            let expected = either(action.iter().map(|action| &action.value));
            let actions: Vec<Read<bool>> =
                action.iter().filter_map(|action| self.names.actions.get(&*action.value).cloned()).collect();
            add(NotCharged::Action, expected, Arc::new(move |parts| actions.iter().any(|is_it| is_it(parts))));
        }
        all
    }

    fn lists(&mut self, spec: &AccessSpec) {
        if spec.allow.is_empty() && spec.deny.is_empty() {
            return;
        }
        let list = AccessList::new();
        for (networks, access) in [(&spec.allow, Access::Allow), (&spec.deny, Access::Deny)] {
            networks.iter().for_each(|network| list.set_network(network.value, access));
        }
        let exact = Prefixes::exact();
        self.bound.lists.push(match &self.names.proxies {
            Some(proxies) => BoundList::new(list, key::client_network(proxies.clone(), exact)),
            None => BoundList::new(list, key::peer_network(exact)),
        });
    }
}

/// Lists values of which one must hold.
fn either(values: impl IntoIterator<Item: ToString>) -> String {
    // Enough of them for a text that is shortened.
    values.into_iter().take(EXPECTED_MAX).map(|value| value.to_string()).collect::<Vec<_>>().join(" or ")
}

/// The most characters of a condition's words.
const EXPECTED_MAX: usize = 80;

fn shortened(text: String) -> String {
    match text.char_indices().nth(EXPECTED_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

/// Returns whether all servers read a host alike: it is a name of letters, digits, `-`, `_` and `.`, or an address in
/// brackets.
fn is_plain_host(host: &[u8]) -> bool {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    match host {
        [b'[', address @ .., b']'] => address.iter().all(|byte| is_plain(byte) || *byte == b':'),
        name => name.iter().all(is_plain),
    }
}

fn has_value(parts: &Parts, name: &HeaderName, is_it: impl Fn(&[u8]) -> bool) -> bool {
    parts.headers.get_all(name).iter().any(|value| is_it(value.as_bytes().trim_ascii()))
}

/// Returns the units that a request takes. A header may only raise them above 1, up to the bound: clients can send it,
/// too.
fn cost_of(spec: &CostSpec) -> impl Fn(&Parts) -> u64 + Send + Sync + 'static {
    let spec = spec.clone();
    move |parts| match &spec {
        CostSpec::Units(units) => *units,
        CostSpec::Header { name, at_most } => {
            let units = |value: &HeaderValue| {
                let units = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
                units.unwrap_or(*at_most).clamp(1, *at_most)
            };
            // The largest of several values counts, because a client may put its own before that of a gateway.
            parts.headers.get_all(name).iter().map(units).max().unwrap_or(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_can_only_raise_the_cost() {
        let cost = cost_of(&CostSpec::Header { name: HeaderName::from_static("x-cost"), at_most: 100 });
        let of = |value: Option<&str>| {
            let mut request = http::Request::new(());
            if let Some(value) = value {
                request.headers_mut().insert("x-cost", value.parse().unwrap());
            }
            cost(&request.into_parts().0)
        };
        for (value, expected) in
            [(None, 1), (Some("0"), 1), (Some("7"), 7), (Some("101"), 100), (Some("-1"), 100), (Some("much"), 100)]
        {
            assert_eq!(of(value), expected, "{value:?}");
        }
    }
}
