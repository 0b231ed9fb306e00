//! A rule of a layer: a policy, to which requests it applies, and what a request costs.

use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use crate::key::{IntoKey, Key};
use crate::policy::Policy;
use crate::quota::Quota;

type Read<T> = Arc<dyn Fn(&Parts) -> T + Send + Sync>;

/// A policy as a layer applies it: to which requests, at what cost, and what becomes of a request that has no key.
///
/// Without more said, a policy applies to every request, each costs 1, and one without a key is refused. A [`Quota`] and
/// a [`Policy`] are therefore rules too, wherever a layer asks for one.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, MissingKey, Policy, Quota, RateLimitLayer, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let search = Policy::new("search", Quota::per_second(10))?
///     .when(|request| request.uri.path().starts_with("/search"))
///     .cost(|request| if request.uri.query().is_some() { 2 } else { 1 });
/// let user = Policy::new("user", Quota::per_hour(1_000))?.missing_key(MissingKey::Shared);
///
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), search, key::peer_ip()).and(user, key::bearer_token());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Rule {
    policy: Policy,
    when: Option<Read<bool>>,
    cost: Option<Read<u64>>,
    missing_key: MissingKey,
}

impl Rule {
    /// A rule that applies the policy to every request.
    #[must_use]
    pub fn new(policy: impl IntoRule) -> Self {
        policy.into_rule()
    }

    /// Applies the rule only to requests for which `predicate` holds. Called more than once, all predicates must hold.
    ///
    /// A request that no rule of a layer applies to is exempt: it passes, and gets no rate-limit header fields.
    #[must_use]
    pub fn when(mut self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.when = Some(match self.when.take() {
            None => Arc::new(predicate),
            Some(earlier) => Arc::new(move |parts: &Parts| earlier(parts) && predicate(parts)),
        });
        self
    }

    /// Sets what a request costs, in units.
    ///
    /// A cost of 0 passes and takes nothing; one above the quota's capacity is refused for good, with no `Retry-After`.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Sets what becomes of a request that has no key.
    #[must_use]
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule")
            .field("policy", &self.policy)
            .field("conditional", &self.when.is_some())
            .field("costed", &self.cost.is_some())
            .field("missing_key", &self.missing_key)
            .finish()
    }
}

/// What becomes of a request whose key is missing: its extractor found none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingKey {
    /// It is refused: `400 Bad Request`, or the gRPC equal of it, and nothing is taken from any policy of the layer.
    ///
    /// The default, since both other choices can be used to pass a limit by leaving the key out.
    #[default]
    Reject,
    /// All requests without a key share one allowance of this policy. It is nobody else's: no key that an extractor
    /// returns is equal to it.
    Shared,
    /// This rule does not apply to it.
    Exempt,
}

/// What can stand where a layer asks for a rule: a [`Quota`], a [`Policy`], or a [`Rule`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a quota, a policy or a rule",
    note = "`Policy::new` returns a `Result`: is a `?` missing?"
)]
pub trait IntoRule {
    /// The rule.
    fn into_rule(self) -> Rule;
}

impl IntoRule for Rule {
    fn into_rule(self) -> Rule {
        self
    }
}

impl IntoRule for Policy {
    fn into_rule(self) -> Rule {
        Rule { policy: self, when: None, cost: None, missing_key: MissingKey::default() }
    }
}

impl IntoRule for &Policy {
    fn into_rule(self) -> Rule {
        self.clone().into_rule()
    }
}

impl IntoRule for Quota {
    fn into_rule(self) -> Rule {
        Policy::from(self).into_rule()
    }
}

impl Policy {
    /// A rule that applies this policy only to requests for which `predicate` holds; see [`Rule::when`].
    #[must_use]
    pub fn when(self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Rule {
        self.into_rule().when(predicate)
    }

    /// A rule in which a request costs this many units; see [`Rule::cost`].
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Rule {
        self.into_rule().cost(cost)
    }

    /// A rule with this answer to a missing key; see [`Rule::missing_key`].
    #[must_use]
    pub fn missing_key(self, missing_key: MissingKey) -> Rule {
        self.into_rule().missing_key(missing_key)
    }
}

/// A rule with the extractor of its key.
#[derive(Clone)]
pub(super) struct BoundRule {
    rule: Rule,
    extract: Read<Option<Key>>,
}

/// What a rule asks of a request.
pub(super) enum Asked {
    Nothing,
    Charge {
        key: Key,
        cost: u64,
    },
    /// A key, and there is none.
    Key,
}

impl BoundRule {
    pub(super) fn new<E, K>(rule: Rule, extract: E) -> Self
    where
        E: Fn(&Parts) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        Self { rule, extract: Arc::new(move |parts| extract(parts).into_key()) }
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.rule.policy
    }

    /// Gives the policy a name that none of `others` has: `api` becomes `api-2`, `api-3` and so on.
    pub(super) fn rename_beside(&mut self, others: &[Self]) {
        /// The longest name of a policy.
        const NAME_MAX: usize = 128;
        let taken = |name: &str| others.iter().any(|other| other.policy().name() == name);
        if !taken(self.policy().name()) {
            return;
        }
        // One of these is free, since there are more of them than others.
        for number in 2..=others.len() + 1 {
            let suffix = format!("-{number}");
            // A name is ASCII, so every index is a boundary.
            let kept = self.policy().name().len().min(NAME_MAX - suffix.len());
            let name = format!("{}{suffix}", self.policy().name().get(..kept).unwrap_or_default());
            if !taken(&name) {
                if let Ok(policy) = Policy::new(name, *self.policy().quota()) {
                    self.rule.policy = policy;
                }
                return;
            }
        }
    }

    #[inline]
    pub(super) fn ask(&self, parts: &Parts) -> Asked {
        if self.rule.when.as_ref().is_some_and(|applies| !applies(parts)) {
            return Asked::Nothing;
        }
        let key = match ((self.extract)(parts), self.rule.missing_key) {
            (Some(key), _) => key,
            (None, MissingKey::Reject) => return Asked::Key,
            (None, MissingKey::Shared) => Key::keyless(),
            (None, MissingKey::Exempt) => return Asked::Nothing,
        };
        Asked::Charge { key, cost: self.rule.cost.as_ref().map_or(1, |cost| cost(parts)) }
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
        BoundRule::new(Policy::new(name, quota).unwrap().into_rule(), |_: &Parts| ())
    }

    #[test]
    fn a_name_that_is_taken_is_numbered() {
        let others = [bound("api", Quota::per_second(1)), bound("api-2", Quota::per_second(1))];
        let mut third = bound("api", Quota::per_second(9));
        third.rename_beside(&others);
        assert_eq!(third.policy().name(), "api-3");
        assert_eq!(third.policy().quota().limit(), 9);
    }

    #[test]
    fn the_longest_name_can_be_numbered_too() {
        let long = "n".repeat(128);
        let others = [bound(&long, Quota::per_second(1))];
        let mut second = bound(&long, Quota::per_second(1));
        second.rename_beside(&others);
        assert_eq!(second.policy().name(), format!("{}-2", "n".repeat(126)));
    }

    #[test]
    fn several_predicates_must_all_hold() {
        let rule =
            Rule::new(Quota::per_second(1)).when(|parts| parts.method == "GET").when(|parts| parts.uri.path() == "/a");
        let bound = BoundRule::new(rule, |_: &Parts| ());
        let asks = |method: &str, path: &str| {
            let (parts, ()) = http::Request::builder().method(method).uri(path).body(()).unwrap().into_parts();
            matches!(bound.ask(&parts), Asked::Charge { .. })
        };
        assert!(asks("GET", "/a"));
        assert!(!asks("POST", "/a"));
        assert!(!asks("GET", "/b"));
    }
}
