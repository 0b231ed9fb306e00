//! A rule of a layer, with the extractor of its key. The names of the rule's policies are unique in the layer.

use std::any::TypeId;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::definition::{Condition, MissingKey, QuotaFrom, Read, Rule};
use super::names::TakenNames;
#[cfg(all(feature = "rules", feature = "fleet"))]
use super::overrides::Overrides;
use crate::base::head::Head;
use crate::key::AddressSource;
use crate::key::value::{IntoKey, Key};
use crate::policy::Policy;
use crate::quota::Quota;

/// A rule with the extractor of its key.
#[derive(Clone)]
pub(crate) struct BoundRule {
    rule: Rule,
    /// Returns a request's key. For a request without a key, returns the shared key if the rule
    /// says so.
    extract: Read<Option<Key>>,
    /// The type of the extractor, if all rules with this type have the same keys. This is so if the
    /// type captures nothing, and requests without a key do not share a key.
    extractor: Option<TypeId>,
    /// The index of the rule's first policy among the layer's policies.
    first: usize,
    /// The source of the address that the extractor reads.
    by: AddressSource,
    /// The first of the application's names that another rule of the layer already has, and the name that
    /// replaces it.
    numbered: Option<[Box<str>; 2]>,
}

/// How a rule matches a request.
#[derive(Clone, Copy)]
pub(crate) enum RuleMatch<'r, K> {
    /// The request is charged this cost under its key.
    Charged { key: K, cost: u64 },
    /// The rule does not charge the request, because this condition does not hold. `None` if the reason is that
    /// the request has no key, and the rule exempts such requests.
    Exempt(Option<&'r Condition>),
    /// The request has no key, and the rule does not exempt such requests.
    KeyMissing,
}

impl BoundRule {
    pub(crate) fn new<E, K>(mut rule: Rule, extract: E) -> Self
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let shares = rule.missing_key == MissingKey::Shared;
        let extract = move |head: &Head<'_>| extract(head).into_key().or_else(|| shares.then(Key::keyless));
        // A charge of 0 takes nothing, and passes even in debt. Therefore a rule that settles after the response
        // reserves at least one unit.
        if let Some(cost) = rule.cost.clone().filter(|_| rule.settlement.replaces_cost()) {
            rule.cost = Some(Arc::new(move |head: &Head<'_>| cost(head).max(1)));
        }
        let extractor = (size_of::<E>() == 0 && !shares).then(TypeId::of::<E>);
        Self { rule, extract: Arc::new(extract), extractor, first: 0, by: AddressSource::of::<E>(), numbered: None }
    }

    pub(crate) fn rule(&self) -> &Rule {
        &self.rule
    }

    pub(crate) fn rule_mut(&mut self) -> &mut Rule {
        &mut self.rule
    }

    /// Returns whether single keys can have quotas of their own. They can if the rule has one quota, or one for each
    /// plan.
    #[cfg(all(feature = "rules", feature = "fleet"))]
    pub(crate) fn can_override_quota(&self) -> bool {
        self.rule.policies.len() == 1 || self.rule.choose.is_some()
    }

    /// Allows single keys to have quotas of their own. A key has the override of the first table that has one for it.
    /// Does nothing if there is no table, if single keys [cannot](Self::can_override_quota) have such quotas, or if
    /// requests bring their quotas.
    #[cfg(all(feature = "rules", feature = "fleet"))]
    pub(crate) fn override_quota(&mut self, tables: &[&Overrides<Quota>]) {
        if tables.is_empty() || !self.can_override_quota() || self.rule.quota_from.is_some() {
            return;
        }
        let quotas: Vec<Quota> = self.rule.policies.iter().map(|policy| *policy.quota()).collect();
        let Some(policy) = self.rule.policies.first().map(|policy| policy.of_each_request(&quotas)) else { return };
        let choose = self.rule.choose.take();
        let usual = move |head: &Head<'_>| {
            let plan = choose.as_ref().and_then(|choose| choose(head)).unwrap_or(0);
            quotas.get(plan).or(quotas.first()).copied()
        };
        let mut read: Read<Option<Quota>> = Arc::new(usual);
        for table in tables.iter().rev() {
            let extract = Arc::clone(&self.extract);
            read = Arc::new(table.or(move |head: &Head<'_>| extract(head), move |head: &Head<'_>| read(head)));
        }
        self.rule.quota_from = Some(QuotaFrom::new(move |head: &Head<'_>| read(head)));
        self.rule.policies = [policy].into_iter().collect();
    }

    pub(crate) fn policies(&self) -> &[Policy] {
        &self.rule.policies
    }

    pub(crate) fn is_by_peer(&self) -> bool {
        self.by == AddressSource::Peer
    }

    pub(crate) fn is_by_proxies(&self) -> bool {
        self.by == AddressSource::Proxies
    }

    /// Returns whether the key is missing only if the peer's address is missing.
    pub(crate) fn needs_peer(&self) -> bool {
        self.by != AddressSource::Other
    }

    /// Returns the rule with `first` as the index of its first policy among the layer's policies.
    /// Renames no policy, so the names have to differ from those of the other policies.
    #[cfg(feature = "rules")]
    pub(crate) fn behind(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// Returns the index after the rule's last policy.
    pub(crate) fn end(&self) -> usize {
        self.first + self.policies().len()
    }

    /// Places the rule after the rules whose names are `taken`, and gives each policy whose name is taken a free name:
    /// `api` becomes `api-2`, `api-3` and so on.
    pub(crate) fn place_behind(&mut self, taken: &mut TakenNames) {
        self.first = taken.policies();
        for at in 0..self.policies().len() {
            if let (Some(renamed), Some(policy)) = (self.renamed(at, taken), self.rule.policies.get_mut(at)) {
                // Equal quotas without names are two allowances on purpose, such as one by address and one by user.
                let has_new_name = policy.name() != renamed.name();
                if has_new_name && self.numbered.is_none() && policy.unnamed().is_none() {
                    self.numbered = Some([policy.name().into(), renamed.name().into()]);
                }
                *policy = renamed;
            }
        }
        if let Some(linked) = &self.rule.linked {
            let own: Vec<&str> = self.policies().iter().map(Policy::name).collect();
            let renamed = taken.free(linked.policy.name(), &own).and_then(|name| {
                let stored = linked.policy.stored_apart().map(str::to_owned);
                linked.policy.with_names(name, stored)
            });
            if let (Some(renamed), Some(linked)) = (renamed, self.rule.linked.as_mut()) {
                linked.policy = renamed;
            }
        }
        self.add_names(taken);
    }

    /// Adds the rule's names to the taken names.
    pub(crate) fn add_names(&self, taken: &mut TakenNames) {
        taken.add(self.policies().len(), self.names());
    }

    /// Returns the first of the application's names that another rule of the layer already has, and the
    /// name that replaces it.
    pub(crate) fn numbered(&self) -> Option<&[Box<str>; 2]> {
        self.numbered.as_ref()
    }

    /// Returns the names of the rule's policies and of its linked policy, and the names under which their states
    /// are stored.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let policies = self.policies().iter().chain(self.rule.linked.as_ref().map(|linked| &linked.policy));
        policies.flat_map(|policy| [policy.name(), policy.stored_name()])
    }

    /// Returns the policy with free names for itself and its states, if one of its names is taken.
    fn renamed(&self, at: usize, taken: &mut TakenNames) -> Option<Policy> {
        let policy = self.policies().get(at)?;
        // All plans of a rule have the same name.
        let own = self.policies().iter().filter(|own| self.rule.choose.is_none() && *own != policy);
        let own: Vec<&str> = own.map(Policy::name).collect();
        let name = taken.free(policy.name(), &own);
        let stored = policy.stored_apart().map(|stored| taken.free(stored, &own).ok_or(stored));
        if name.is_none() && !matches!(stored, Some(Ok(_))) {
            return None;
        }
        let stored = stored.map(|stored| stored.unwrap_or_else(str::to_owned));
        policy.with_names(name.unwrap_or_else(|| policy.name().to_owned()), stored)
    }

    /// Returns the indices of the layer's policies to which a request is charged.
    #[inline]
    pub(crate) fn charged(&self, head: &Head<'_>) -> Range<usize> {
        let count = self.rule.policies.len();
        match &self.rule.choose {
            None => self.first..self.first + count,
            Some(choose) => {
                let plan = choose(head).filter(|plan| *plan < count).unwrap_or(0);
                self.first + plan..self.first + plan + 1
            }
        }
    }

    /// Returns how the rule matches a request. After the first condition that does not hold, this method checks
    /// nothing else.
    ///
    /// `see_quota` gets the quota that the request brings, if any. `find_key` returns the [key](Self::key), or a
    /// placeholder if rules share the key.
    #[inline(always)]
    pub(crate) fn match_request<K>(
        &self,
        head: &Head<'_>,
        see_quota: impl FnOnce(&Quota),
        find_key: impl FnOnce(&Self) -> Option<K>,
    ) -> RuleMatch<'_, K> {
        match self.unmet(head, see_quota) {
            Some(unmet) => RuleMatch::Exempt(Some(unmet)),
            None => self.match_key(head, find_key(self)),
        }
    }

    /// The first half of [`match_request`](Self::match_request): returns the first condition that does not hold.
    #[inline(always)]
    pub(crate) fn unmet(&self, head: &Head<'_>, see_quota: impl FnOnce(&Quota)) -> Option<&Condition> {
        let unmet = self.rule.conditions.iter().find(|condition| !(condition.holds)(head));
        if let (None, Some(QuotaFrom { read, absent })) = (unmet, &self.rule.quota_from) {
            return match &read(head) {
                Some(quota) => {
                    see_quota(quota);
                    None
                }
                None => Some(absent),
            };
        }
        unmet
    }

    /// The second half of [`match_request`](Self::match_request). The caller finds the key between the halves, so it
    /// can leave the key where it was written, and pass a reference. A copy of words that were just written stalls on
    /// store forwarding (`benches/instructions`, "layer, allowed, no header fields").
    #[inline(always)]
    pub(crate) fn match_key<K>(&self, head: &Head<'_>, key: Option<K>) -> RuleMatch<'_, K> {
        match key {
            Some(key) => RuleMatch::Charged { key, cost: self.cost(head) },
            None if self.rule.missing_key == MissingKey::Exempt => RuleMatch::Exempt(None),
            None => RuleMatch::KeyMissing,
        }
    }

    /// Returns the key of a request to which the rule applies.
    #[inline]
    pub(crate) fn key(&self, head: &Head<'_>) -> Option<Key> {
        (self.extract)(head)
    }

    /// Returns whether both rules have the same extractor, so that a request has the same key for
    /// both.
    #[inline]
    pub(crate) fn has_key_of(&self, other: &Self) -> bool {
        self.extractor.is_some() && self.extractor == other.extractor
    }

    /// Returns the cost of a request that has a key.
    #[inline]
    fn cost(&self, head: &Head<'_>) -> u64 {
        self.rule.cost.as_ref().map_or(1, |cost| cost(head))
    }
}

impl<'r, K> RuleMatch<'r, K> {
    /// Returns whether the request meets all conditions of the rule.
    pub(crate) fn applies(&self) -> bool {
        !matches!(self, Self::Exempt(Some(_)))
    }

    pub(crate) fn as_ref(&self) -> RuleMatch<'r, &K> {
        match self {
            Self::Charged { key, cost } => RuleMatch::Charged { key, cost: *cost },
            Self::Exempt(unmet) => RuleMatch::Exempt(*unmet),
            Self::KeyMissing => RuleMatch::KeyMissing,
        }
    }
}

impl fmt::Debug for BoundRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rule.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(name: &str, quota: Quota) -> BoundRule {
        BoundRule::new(Rule::new(name, quota).unwrap(), |_: &Head<'_>| Key::global())
    }

    fn taken(others: &[BoundRule]) -> TakenNames {
        let mut taken = TakenNames::default();
        others.iter().for_each(|other| other.add_names(&mut taken));
        taken
    }

    #[test]
    fn a_name_that_is_taken_is_numbered() {
        let others = [bound("api", Quota::per_second(1)), bound("api-2", Quota::per_second(1))];
        let mut third = bound("api", Quota::per_second(9));
        third.place_behind(&mut taken(&others));
        assert_eq!(third.policies()[0].name(), "api-3");
        assert_eq!(third.policies()[0].quota().limit(), 9);
    }

    #[test]
    fn the_longest_name_can_be_numbered_too() {
        let long = "n".repeat(128);
        let others = [bound(&long, Quota::per_second(1))];
        let mut second = bound(&long, Quota::per_second(1));
        second.place_behind(&mut taken(&others));
        assert_eq!(second.policies()[0].name(), format!("{}-2", "n".repeat(126)));
    }

    #[test]
    fn each_of_several_policies_is_numbered_if_its_name_is_taken() {
        let quotas = || [Quota::per_second(1), Quota::per_hour(9)];
        let several = || BoundRule::new(Rule::all_of("api", quotas()).unwrap(), |_: &Head<'_>| Key::global());
        let others = [several(), bound("api-9-per-hour-2", Quota::per_second(1))];
        let mut second = several();
        second.place_behind(&mut taken(&others));
        let names: Vec<&str> = second.policies().iter().map(Policy::name).collect();
        assert_eq!(names, ["api-1-per-second-2", "api-9-per-hour-3"]);
        assert_eq!(second.first, 3);
    }

    #[test]
    fn plans_are_numbered_alike_if_their_name_is_taken() {
        let others = [bound("api", Quota::per_second(1)), bound("api-2", Quota::per_second(1))];
        let quotas = [Quota::per_second(1), Quota::per_second(5), Quota::per_second(5)];
        let mut plans = BoundRule::new(Rule::plans("api", quotas, |_| 1).unwrap(), |_: &Head<'_>| Key::global());
        plans.place_behind(&mut taken(&others));
        let names: Vec<&str> = plans.policies().iter().map(Policy::name).collect();
        assert_eq!(names, ["api-3"; 3]);
    }

    #[test]
    fn several_predicates_must_all_hold() {
        let rule =
            Rule::from(Quota::per_second(1)).when(|parts| parts.method == "GET").when(|parts| parts.uri.path() == "/a");
        let bound = BoundRule::new(rule, |_: &Head<'_>| Key::global());
        let asks = |method: &str, path: &str| {
            let (parts, ()) = http::Request::builder().method(method).uri(path).body(()).unwrap().into_parts();
            bound.match_request(&Head::from(&parts), |_| (), |_| Some(())).applies()
        };
        assert!(asks("GET", "/a"));
        assert!(!asks("POST", "/a"));
        assert!(!asks("GET", "/b"));
    }

    #[test]
    fn ten_thousand_rules_of_one_name_are_numbered_in_order() {
        let mut taken = TakenNames::default();
        for number in 1..=10_000 {
            let mut rule =
                BoundRule::new(Rule::new("api", Quota::per_second(1)).unwrap(), |_: &Head<'_>| Key::global());
            rule.place_behind(&mut taken);
            let name = if number == 1 { "api".to_owned() } else { format!("api-{number}") };
            assert_eq!(rule.policies()[0].name(), name);
        }
        // Each looked at two numbers. From the first number on there would have been 50 million looks.
        assert_eq!((taken.looks, taken.policies()), (2 * 9_998 + 1, 10_000));
    }

    #[test]
    fn number_that_a_rule_has_by_name_is_passed_over() {
        let mut taken = TakenNames::default();
        let mut place = |name: &str| {
            let mut rule = BoundRule::new(Rule::new(name, Quota::per_second(1)).unwrap(), |_: &Head<'_>| Key::global());
            rule.place_behind(&mut taken);
            rule.policies()[0].name().to_owned()
        };
        let names = ["api", "api-3", "api", "api", "api-2", "api-2", "api"].map(&mut place);
        assert_eq!(names, ["api", "api-3", "api-2", "api-4", "api-2-2", "api-2-3", "api-5"]);
    }
}
