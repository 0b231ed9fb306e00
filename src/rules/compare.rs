//! Compares two files of rules, and says what changes for which requests.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use super::contained::{covers, is_cost_within};
use super::error::RulesError;
use super::problem::Quoted;
use super::read::{KnownNames, read};
use super::spec::{
    At, DescriptorSpec, DomainSpec, FileSpec, KeySpec, LimitSpec, MatchSpec, PlansSpec, QuotaSpec, RuleSpec,
};
use super::tree::policy_name;
use crate::error::{labelled, printable};
use crate::middleware::rule::PacedBodies;
use crate::middleware::rule::definition::MissingKey;
use crate::mode::Mode;
use crate::quota::{Algorithm, Quota};

labelled! {
    /// The kind of a [`RuleChange`].
    RuleChangeKind,
    /// Returns the label.
    as_str {
        /// A rule limits requests that it did not limit before.
        Added = "added",
        /// A rule was removed, and limits no requests any more.
        Removed = "removed",
        /// Each client begins with a full allowance, because the name or the key of the rule changed.
        Afresh = "afresh",
        /// Some requests that were refused before now pass, and all requests that passed before
        /// still pass.
        Looser = "looser",
        /// Some requests that passed before are now refused, and all requests that were refused
        /// before are still refused.
        Stricter = "stricter",
        /// Something else is different.
        Changed = "changed",
    }
}

/// A difference between two files of rules: what [`compare`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleChange {
    kind: RuleChangeKind,
    rule: Option<Box<str>>,
    /// The field of the rule that changed, if not the whole rule.
    field: Option<&'static str>,
    message: Box<str>,
}

impl RuleChange {
    fn of_field(kind: RuleChangeKind, rule: &str, field: &'static str, message: impl Into<String>) -> Self {
        Self { field: Some(field), ..Self::of_rule(kind, rule, message) }
    }

    fn of_rule(kind: RuleChangeKind, rule: &str, message: impl Into<String>) -> Self {
        Self { rule: Some(plain(rule).into()), ..Self::of_file(kind, message) }
    }

    fn of_file(kind: RuleChangeKind, message: impl Into<String>) -> Self {
        Self { kind, rule: None, field: None, message: plain(&message.into()).into() }
    }

    /// Returns the kind of the change.
    #[must_use]
    pub fn kind(&self) -> RuleChangeKind {
        self.kind
    }

    /// Returns the name of the rule, or `None` for a change of the access list.
    #[must_use]
    pub fn rule(&self) -> Option<&str> {
        self.rule.as_deref()
    }

    /// Returns a text with the old and the new setting.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns whether the quotas and the mode of a rule show the change: a rule is new or gone, or one of its quotas
    /// or its mode changed.
    pub(super) fn is_of_quota_or_mode(&self) -> bool {
        matches!(self.kind, RuleChangeKind::Added | RuleChangeKind::Removed)
            || matches!(self.field, Some("quota" | "mode" | "block" | "candidate"))
    }
}

/// Replaces characters that must not be sent to a terminal.
fn plain(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// Returns the changes if the file `new` replaces the file `old`, in the order of the new file. Removed rules come
/// last. Files that express the same rules in different ways have no changes.
///
/// Names that are not built in count as registered.
///
/// ```
/// use tower_ratelimit::rules::{RuleChangeKind, compare};
/// let old = "rules: [{name: login, quota: 5 per minute, key: peer-ip}]";
/// let new = "rules: [{name: login, quota: 3 per minute, key: peer-ip}]";
/// let changes = compare(old, new)?;
/// assert_eq!(changes[0].kind(), RuleChangeKind::Stricter);
/// # Ok::<(), tower_ratelimit::rules::RulesError>(())
/// ```
///
/// # Errors
/// Returns all problems of the old file, or if it has none, all problems of the new file.
pub fn compare(old: impl AsRef<[u8]>, new: impl AsRef<[u8]>) -> Result<Vec<RuleChange>, RulesError> {
    let file = |text: &[u8]| read(text, KnownNames::default(), |file, _| file);
    let (old, new) = (file(old.as_ref())?, file(new.as_ref())?);
    let mut changes = Vec::new();
    rules(&old, &new, &mut changes);
    limits(old.domain.as_ref(), new.domain.as_ref(), &mut changes);
    let lists = [
        ("allow", &old.access.allow, &new.access.allow, RuleChangeKind::Looser, RuleChangeKind::Stricter),
        ("deny", &old.access.deny, &new.access.deny, RuleChangeKind::Stricter, RuleChangeKind::Looser),
    ];
    for (list, old, new, added, removed) in lists {
        let (old, new): (BTreeSet<IpNet>, BTreeSet<IpNet>) =
            (old.iter().map(|network| network.value).collect(), new.iter().map(|network| network.value).collect());
        for (kind, networks, what) in [(added, new.difference(&old), "new"), (removed, old.difference(&new), "gone")] {
            let networks: Vec<String> = networks.map(ToString::to_string).collect();
            if !networks.is_empty() {
                changes.push(RuleChange::of_file(kind, format!("`{list}`, {what}: {}", networks.join(", "))));
            }
        }
    }
    Ok(changes)
}

/// Returns the name under which the usage of a rule is stored.
fn stored_name(rule: &RuleSpec) -> &str {
    rule.was.as_ref().map_or(&rule.name, |was| was)
}

fn rules(old: &FileSpec, new: &FileSpec, changes: &mut Vec<RuleChange>) {
    let mut gone: BTreeMap<&str, &RuleSpec> = old.rules.iter().map(|rule| (stored_name(rule), rule)).collect();
    let mut unpaired = Vec::new();
    let mut found: Vec<(usize, Vec<RuleChange>)> = Vec::new();
    for (at, rule) in new.rules.iter().enumerate() {
        match gone.remove(stored_name(rule)) {
            Some(before) => found.push((at, of_rule(before, rule))),
            None => unpaired.push((at, rule)),
        }
    }
    for (at, rule) in unpaired {
        let is_renamed = |before: &&RuleSpec| are_alike(before, rule);
        let change = match gone.values().copied().find(is_renamed) {
            Some(before) => {
                gone.remove(stored_name(before));
                let was = stored_name(before);
                let message = format!(
                    "its name was {}: each client begins with a full allowance; write `was: {was}` to keep what was used",
                    Quoted(&before.name)
                );
                RuleChange::of_field(RuleChangeKind::Afresh, &rule.name, "name", message)
            }
            None => RuleChange::of_rule(RuleChangeKind::Added, &rule.name, summary(rule)),
        };
        found.push((at, vec![change]));
    }
    found.sort_by_key(|(at, _)| *at);
    changes.extend(found.into_iter().flat_map(|(_, changes)| changes));
    for rule in old.rules.iter().filter(|rule| gone.contains_key(stored_name(rule))) {
        changes.push(RuleChange::of_rule(RuleChangeKind::Removed, &rule.name, summary(rule)));
    }
}

/// Returns whether two rules differ at most in their names.
fn are_alike(old: &RuleSpec, new: &RuleSpec) -> bool {
    of_rule(old, new).iter().all(|change| change.field == Some("name"))
}

fn summary(rule: &RuleSpec) -> String {
    let disabled = if rule.is_enabled { "" } else { ", not enabled" };
    format!("{}, key {}, {}{disabled}", quota(&rule.quota), key(&rule.key), rule.mode)
}

/// Returns the changes of a rule.
fn of_rule(old: &RuleSpec, new: &RuleSpec) -> Vec<RuleChange> {
    use RuleChangeKind::{Afresh, Changed, Looser, Stricter};
    let mut changes = Vec::new();
    let mut add = |kind, field, message: String| changes.push(RuleChange::of_field(kind, &new.name, field, message));
    if old.name.value != new.name.value {
        add(Changed, "name", format!("its name in headers and metrics was {}; the usage is kept", Quoted(&old.name)));
    }
    match (old.is_enabled, new.is_enabled) {
        (true, false) => add(Looser, "enabled", "`enabled` is false now".to_owned()),
        (false, true) => add(Stricter, "enabled", "`enabled` was false".to_owned()),
        _ => {}
    }
    if let Some(kind) = of_quotas(&old.quota, &new.quota) {
        add(kind, "quota", was("quota", &quota(&old.quota), &quota(&new.quota)));
    }
    let keys = [old, new].map(|rule| rule.key.iter().map(|part| &part.value).collect::<Vec<_>>());
    if keys[0] != keys[1] {
        add(Afresh, "key", was("key", &key(&old.key), &key(&new.key)));
    }
    match (covers(&new.matches, &old.matches), covers(&old.matches, &new.matches)) {
        (true, true) => {}
        (true, false) => {
            add(Stricter, "match", format!("it applies to more requests: {}", conditions(&old.matches, &new.matches)))
        }
        (false, true) => {
            add(Looser, "match", format!("it applies to fewer requests: {}", conditions(&old.matches, &new.matches)))
        }
        (false, false) => {
            add(Changed, "match", format!("it applies to other requests: {}", conditions(&old.matches, &new.matches)))
        }
    }
    if old.mode != new.mode {
        let kind = if strictness(new.mode) > strictness(old.mode) { Stricter } else { Looser };
        add(kind, "mode", was("mode", old.mode.as_str(), new.mode.as_str()));
    }
    if old.missing_key != new.missing_key {
        let rank = |missing: MissingKey| match missing {
            MissingKey::Exempt => 0,
            MissingKey::Shared => 1,
            MissingKey::Reject => 2,
        };
        let kind = if rank(new.missing_key) > rank(old.missing_key) { Stricter } else { Looser };
        add(kind, "missing-key", was("missing-key", old.missing_key.as_str(), new.missing_key.as_str()));
    }
    match (is_cost_within(old.cost.as_ref(), new.cost.as_ref()), is_cost_within(new.cost.as_ref(), old.cost.as_ref())) {
        (true, true) => {}
        (true, false) => add(Stricter, "cost", "a request costs more".to_owned()),
        (false, true) => add(Looser, "cost", "a request costs less".to_owned()),
        (false, false) => add(Changed, "cost", "`cost` is another".to_owned()),
    }
    let text = |quota: &Option<At<Quota>>| quota.as_ref().map_or("none".to_owned(), |quota| quota.to_string());
    for (field, old, new) in [("block", &old.block, &new.block), ("candidate", &old.candidate, &new.candidate)] {
        let kind = match (old, new) {
            (None, Some(_)) if field == "block" => Stricter,
            (Some(_), None) if field == "block" => Looser,
            _ => Changed,
        };
        let (old, new) = (text(old), text(new));
        if old != new {
            add(kind, field, was(field, &old, &new));
        }
    }
    if old.warn_at != new.warn_at {
        let text = |percent: Option<u8>| percent.map_or("none".to_owned(), |percent| percent.to_string());
        add(Changed, "warn-at", was("warn-at", &text(old.warn_at), &text(new.warn_at)));
    }
    if old.pace != new.pace {
        let text = |pace: Option<PacedBodies>| pace.map_or("none", PacedBodies::word);
        add(Changed, "pace", was("pace", text(old.pace), text(new.pace)));
    }
    let after = |rule: &RuleSpec| rule.pace_after.unwrap_or(0);
    match after(old).cmp(&after(new)) {
        std::cmp::Ordering::Less => {
            add(Looser, "pace-after", was("pace-after", &after(old).to_string(), &after(new).to_string()))
        }
        std::cmp::Ordering::Equal => {}
        std::cmp::Ordering::Greater => {
            add(Stricter, "pace-after", was("pace-after", &after(old).to_string(), &after(new).to_string()))
        }
    }
    changes
}

fn was(field: &str, old: &str, new: &str) -> String {
    format!("`{field}` was {old}, is {new}")
}

fn strictness(mode: Mode) -> u8 {
    match mode {
        Mode::Shadow => 0,
        Mode::Degrade => 1,
        Mode::Enforce => 2,
    }
}

/// Returns how the quotas of a rule change, or `None` if they do not.
fn of_quotas(old: &QuotaSpec, new: &QuotaSpec) -> Option<RuleChangeKind> {
    match (old, new) {
        (QuotaSpec::All(old), QuotaSpec::All(new)) => {
            let pairs = old.iter().zip(new).filter_map(|(old, new)| of_quota(old, new));
            let more = match new.len().cmp(&old.len()) {
                std::cmp::Ordering::Less => Some(RuleChangeKind::Looser),
                std::cmp::Ordering::Equal => None,
                std::cmp::Ordering::Greater => Some(RuleChangeKind::Stricter),
            };
            together(pairs.chain(more))
        }
        (QuotaSpec::Plans(old), QuotaSpec::Plans(new)) => of_plans(old, new),
        _ => Some(RuleChangeKind::Changed),
    }
}

fn of_plans(old: &PlansSpec, new: &PlansSpec) -> Option<RuleChangeKind> {
    let quotas = |plans: &PlansSpec| -> BTreeMap<Box<str>, Quota> {
        plans.quotas.iter().map(|(name, quota)| (name.value.clone(), quota.value)).collect()
    };
    let otherwise = |plans: &PlansSpec| plans.quotas.get(plans.otherwise).map(|(name, _)| name.value.clone());
    let (before, now) = (quotas(old), quotas(new));
    let is_other = old.by.value != new.by.value || otherwise(old) != otherwise(new) || !before.keys().eq(now.keys());
    let pairs = before.values().zip(now.values()).filter_map(|(old, new)| of_quota(old, new));
    if is_other { Some(RuleChangeKind::Changed) } else { together(pairs) }
}

/// Returns the kind of several changes: the kind that all of them have, or otherwise `Changed`.
/// Returns `None` if there are no changes.
fn together(kinds: impl Iterator<Item = RuleChangeKind>) -> Option<RuleChangeKind> {
    kinds.reduce(|a, b| if a == b { a } else { RuleChangeKind::Changed })
}

/// Returns how a quota changes, judged by the units that it allows over time and at once.
fn of_quota(old: &Quota, new: &Quota) -> Option<RuleChangeKind> {
    if old == new {
        return None;
    }
    match (old.is_unlimited(), new.is_unlimited()) {
        (true, false) => return Some(RuleChangeKind::Stricter),
        (false, true) => return Some(RuleChangeKind::Looser),
        _ => {}
    }
    let is_known = old.algorithm() == new.algorithm()
        && (old.algorithm().is_rate() || old.algorithm() == Algorithm::Concurrency)
        && old.counts_bytes() == new.counts_bytes();
    if !is_known {
        return Some(RuleChangeKind::Changed);
    }
    let rate =
        |quota: &Quota, other: &Quota| u128::from(quota.limit()).saturating_mul(other.period().as_micros().max(1));
    let over_time = rate(new, old).cmp(&rate(old, new));
    let at_once = new.capacity().cmp(&old.capacity());
    Some(match (over_time.is_ge() && at_once.is_ge(), over_time.is_le() && at_once.is_le()) {
        (true, false) => RuleChangeKind::Looser,
        (false, true) => RuleChangeKind::Stricter,
        _ => RuleChangeKind::Changed,
    })
}

fn quota(quota: &QuotaSpec) -> String {
    match quota {
        QuotaSpec::All(quotas) => {
            let quotas: Vec<String> = quotas.iter().map(|quota| format!("`{}`", quota.value)).collect();
            quotas.join(" and ")
        }
        QuotaSpec::Plans(plans) => {
            let quotas: Vec<String> =
                plans.quotas.iter().map(|(name, quota)| format!("{} `{}`", name.value, quota.value)).collect();
            let otherwise = plans.quotas.get(plans.otherwise).map_or("", |(name, _)| name);
            format!("plans by {}: {}, otherwise {otherwise}", part(&plans.by), quotas.join(", "))
        }
    }
}

fn key(parts: &[At<KeySpec>]) -> String {
    let parts: Vec<String> = parts.iter().map(|key| part(key)).collect();
    if let [one] = parts.as_slice() { one.clone() } else { format!("[{}]", parts.join(", ")) }
}

/// Returns a part of a key as a file of rules writes it.
fn part(key: &KeySpec) -> String {
    match key {
        KeySpec::ClientIp => "client-ip".to_owned(),
        KeySpec::PeerIp => "peer-ip".to_owned(),
        KeySpec::Path => "path".to_owned(),
        KeySpec::Host => "host".to_owned(),
        KeySpec::Method => "method".to_owned(),
        KeySpec::Global => "global".to_owned(),
        KeySpec::BearerToken => "bearer-token".to_owned(),
        KeySpec::Header(name) => format!("header {name}"),
        KeySpec::Cookie(name) => format!("cookie {name}"),
        KeySpec::Query(name) => format!("query {name}"),
        KeySpec::Registered(name) => name.to_string(),
    }
}

/// Returns the names of the fields of `match` in which two rules differ.
fn conditions(old: &MatchSpec, new: &MatchSpec) -> String {
    fn only(of: &MatchSpec, field: &str) -> MatchSpec {
        let mut one = MatchSpec::default();
        match field {
            "method" => one.method.clone_from(&of.method),
            "path" => one.path.clone_from(&of.path),
            "host" => one.host.clone_from(&of.host),
            "header" => one.header.clone_from(&of.header),
            "query" => one.query.clone_from(&of.query),
            "client" => one.client.clone_from(&of.client),
            "user-agent" => one.user_agent.clone_from(&of.user_agent),
            "action" => one.action.clone_from(&of.action),
            "time" => one.time.clone_from(&of.time),
            _ => one.not.clone_from(&of.not),
        }
        one
    }
    let fields = ["method", "path", "host", "header", "query", "client", "user-agent", "action", "time", "not"];
    let differing = fields.into_iter().filter(|field| {
        let (old, new) = (only(old, field), only(new, field));
        !covers(&old, &new) || !covers(&new, &old)
    });
    let named: Vec<String> = differing.map(|field| format!("`{field}`")).collect();
    if named.is_empty() { "`match`".to_owned() } else { named.join(", ") }
}

/// Compares the limits of files in Envoy's form.
fn limits(old: Option<&DomainSpec>, new: Option<&DomainSpec>, changes: &mut Vec<RuleChange>) {
    fn collect<'s>(
        domain: &DomainSpec,
        specs: &'s [DescriptorSpec],
        path: &mut Vec<&'s DescriptorSpec>,
        found: &mut Vec<(String, &'s LimitSpec)>,
    ) {
        for spec in specs {
            path.push(spec);
            found.extend(spec.limit.iter().map(|limit| (policy_name(&domain.name, path), limit)));
            collect(domain, &spec.descriptors, path, found);
            path.pop();
        }
    }
    let all = |domain: Option<&DomainSpec>| -> Vec<(String, LimitSpec)> {
        let mut found = Vec::new();
        if let Some(domain) = domain {
            collect(domain, &domain.descriptors, &mut Vec::new(), &mut found);
        }
        found.into_iter().map(|(name, limit)| (name, limit.clone())).collect()
    };
    let (old, new) = (all(old), all(new));
    let quota_of = |limit: &LimitSpec| limit.quota.as_ref().map_or_else(Quota::unlimited, |quota| quota.value);
    let mut gone: BTreeMap<&str, &LimitSpec> = old.iter().map(|(name, limit)| (&**name, limit)).collect();
    for (name, limit) in &new {
        let quota = quota_of(limit);
        let Some(before) = gone.remove(&**name) else {
            let message = format!("`{quota}`, {}", limit.mode);
            changes.push(RuleChange::of_rule(RuleChangeKind::Added, name, message));
            continue;
        };
        let earlier = quota_of(before);
        if let Some(kind) = of_quota(&earlier, &quota) {
            let message = was("quota", &format!("`{earlier}`"), &format!("`{quota}`"));
            changes.push(RuleChange::of_field(kind, name, "quota", message));
        }
        if before.mode != limit.mode {
            let is_stricter = strictness(limit.mode) > strictness(before.mode);
            let kind = if is_stricter { RuleChangeKind::Stricter } else { RuleChangeKind::Looser };
            let message = was("mode", before.mode.as_str(), limit.mode.as_str());
            changes.push(RuleChange::of_field(kind, name, "mode", message));
        }
        if before.replaces != limit.replaces {
            changes.push(RuleChange::of_field(RuleChangeKind::Changed, name, "replaces", "`replaces` is another"));
        }
    }
    for (name, limit) in old.iter().filter(|(name, _)| gone.contains_key(&**name)) {
        let message = format!("`{}`, {}", quota_of(limit), limit.mode);
        changes.push(RuleChange::of_rule(RuleChangeKind::Removed, name, message));
    }
}

#[cfg(test)]
mod tests {
    use super::super::read::rule::RULE;
    use super::*;

    fn compared(old: &str, new: &str) -> Vec<String> {
        let changes = compare(old, new).unwrap();
        let text =
            |change: &RuleChange| format!("{} {}: {}", change.kind, change.rule().unwrap_or("-"), change.message());
        changes.iter().map(text).collect()
    }

    fn rule(fields: &str) -> String {
        let rest = ["name: a", "quota: 10/min", "key: peer-ip"].into_iter().filter(|field| {
            let name = field.split(':').next().unwrap();
            let has = |name: &str| fields.starts_with(&format!("{name}:")) || fields.contains(&format!(", {name}:"));
            let is_replaced = name == "quota" && has("plans");
            !has(name) && !is_replaced
        });
        format!(
            "rules: [{{{}}}]",
            rest.chain([fields].into_iter().filter(|fields| !fields.is_empty())).collect::<Vec<_>>().join(", ")
        )
    }

    #[test]
    fn each_change_of_a_rule_is_named_with_what_it_means() {
        let cases = [
            ("", "", ""),
            ("quota: '600 per hour, burst 10'", "quota: '600 per 60 minutes, burst 10'", ""),
            (
                "",
                "quota: 5/min",
                "stricter a: `quota` was `10 per minute, token bucket`, is `5 per minute, token bucket`",
            ),
            ("", "quota: 20/min", "looser a: `quota`"),
            ("", "quota: '20/min, burst 5'", "changed a: `quota`"),
            ("", "quota: '10/min, sliding window'", "changed a: `quota`"),
            ("", "quota: unlimited", "looser a: `quota`"),
            ("", "quota: [10/min, 100/hour]", "stricter a: `quota`"),
            ("quota: 3 at once", "quota: 2 at once", "stricter a: `quota`"),
            ("", "key: path", "afresh a: `key` was peer-ip, is path"),
            ("", "key: [peer-ip, path]", "afresh a: `key` was peer-ip, is [peer-ip, path]"),
            ("", "match: {path: /a}", "looser a: it applies to fewer requests: `path`"),
            (
                "match: {path: /a, method: GET}",
                "match: {path: /a}",
                "stricter a: it applies to more requests: `method`",
            ),
            ("match: {path: /a}", "match: {path: /b}", "changed a: it applies to other requests: `path`"),
            ("match: {path: [/a, /b], host: '*.e.org'}", "match: {host: '*.e.org', path: [/b, /a]}", ""),
            ("", "mode: shadow", "looser a: `mode` was enforce, is shadow"),
            ("mode: shadow", "", "stricter a: `mode` was shadow, is enforce"),
            ("", "enabled: false", "looser a: `enabled` is false now"),
            ("", "cost: 5", "stricter a: a request costs more"),
            ("cost: 5", "cost: {reserve: 5}", "changed a: `cost` is another"),
            ("cost: {reserve: 5}", "cost: {reserve: 5}", ""),
            ("cost: {reserve: 5}", "cost: {reserve: 2}", "looser a: a request costs less"),
            ("", "missing-key: exempt", "looser a: `missing-key` was reject, is exempt"),
            ("", "block: {after: 5/min, for: 1 hour}", "stricter a: `block` was none, is"),
            ("", "candidate: 5/min", "changed a: `candidate` was none, is"),
            ("", "warn-at: 80", "changed a: `warn-at` was none, is 80"),
            ("", "pace: both", "changed a: `pace` was none, is both"),
            ("pace: both", "pace: both, pace-after: 5", "looser a: `pace-after` was 0, is 5"),
            ("", "name: b", "afresh b: its name was `a`: each client begins with a full allowance; write `was: a`"),
            ("", "name: b, was: a", "changed b: its name in headers and metrics was `a`; the usage is kept"),
            (
                "plans: {by: header x, quotas: {p: 5/min, q: 9/min}, otherwise: p}",
                "plans: {by: header x, quotas: {q: 8/min, p: 4/min}, otherwise: p}",
                "stricter a: `quota` was plans by header x: p `5 per minute, token bucket`",
            ),
        ];
        for (old, new, expected) in cases {
            let changes = compared(&rule(old), &rule(new));
            assert_eq!(changes.len(), usize::from(!expected.is_empty()), "{old} | {new}: {changes:?}");
            assert!(changes.concat().starts_with(expected), "{old} | {new}: {changes:?}");
        }
        for field in RULE.iter().filter(|field| **field != "use") {
            let has =
                |(_, new, _): &(&str, &str, &str)| new.split(", ").any(|text| text.starts_with(&format!("{field}:")));
            assert!(cases.iter().any(has), "no case changes `{field}`, which `compare` has to name");
        }
    }

    #[test]
    fn rules_and_networks_come_and_go() {
        let old = "rules: [{name: a, quota: 5/s, key: peer-ip}, {name: b, quota: 5/s, key: path}]\naccess: {deny: [192.0.2.0/24, 198.51.100.7]}";
        let new = "rules: [{name: c, quota: 7/s, key: host}, {name: a, quota: 5/s, key: peer-ip}]\naccess: {allow: [10.0.0.0/8], deny: 192.0.2.0/24}";
        assert_eq!(
            compared(old, new),
            [
                "added c: `7 per second, token bucket`, key host, enforce",
                "removed b: `5 per second, token bucket`, key path, enforce",
                "looser -: `allow`, new: 10.0.0.0/8",
                "looser -: `deny`, gone: 198.51.100.7/32",
            ]
        );
        assert!(compare("rules: {}", new).is_err() && compare(old, "rules: {}").is_err());
    }

    #[test]
    fn limits_of_descriptors_are_compared() {
        let domain = |rest: &str| {
            format!("domain: d\ndescriptors:\n- {{key: a, rate_limit: {{unit: hour, requests_per_unit: 5}}}}\n{rest}")
        };
        let old = domain(
            "- {key: b, rate_limit: {unit: hour, requests_per_unit: 5}}\n- {key: c, rate_limit: {unlimited: true}}",
        );
        let new = domain("- {key: b, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 5}}");
        assert_eq!(
            compared(&old, &new),
            [
                "looser d:b: `quota` was `5 per hour, fixed window`, is `5 per minute, fixed window`",
                "looser d:b: `mode` was enforce, is shadow",
                "removed d:c: `unlimited`, enforce",
            ]
        );
        assert_eq!(compared(&old, &old), Vec::<String>::new());
    }
}
