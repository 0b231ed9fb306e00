//! The keys that an operator looks at, and may act on.

use std::collections::HashSet;
use std::sync::Arc;

use http::StatusCode;

use super::action::Act;
use super::request::{Wrong, wrong};
use super::source::ErasedLayer;
use crate::decision::ChargeDecision;
use crate::explanation::Explanation;
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Algorithm;
use crate::stats::{Stats, StatsSnapshot};

/// The maximum number of pairs of a policy and a key that are looked at together in one layer.
const HELD_MAX: usize = 100;

/// The keys of one layer, with the policies that hold their states.
#[derive(Clone)]
pub(super) struct LayerKeys {
    pub(super) title: Arc<str>,
    pub(super) source: Arc<dyn ErasedLayer>,
    pub(super) held: Vec<Held>,
}

/// A key, and a policy that holds a state of this key.
#[derive(Clone)]
pub(super) struct Held {
    pub(super) policy: Policy,
    pub(super) key: Arc<Key>,
    pub(super) fingerprint: u64,
    pub(super) shown: ShownKey,
}

/// The data about a key that the page shows.
#[derive(Clone)]
pub(super) struct ShownKey {
    pub(super) fingerprint: String,
    pub(super) name: Option<Box<str>>,
}

/// A key that the page lists.
pub(super) struct ListedKey {
    key: Arc<Key>,
    /// The names of the policies for which the key is listed.
    policies: HashSet<String>,
}

/// The states of keys now.
pub(super) struct KeyStates {
    pub(super) states: Vec<KeyState>,
    /// The limiter's error, if the limiter failed. The states after the error are missing.
    pub(super) failure: Option<String>,
}

/// The state of a key under a policy.
pub(super) struct KeyState {
    pub(super) policy: Policy,
    pub(super) shown: ShownKey,
    pub(super) decision: ChargeDecision,
}

/// An entry of the lists of keys: the fingerprint, the stored key with its full fingerprint, and the policy.
type ListEntry<'a> = (String, Option<(u64, &'a Arc<Key>)>, Option<&'a str>);

impl ListedKey {
    /// Iterates over the keys that the page lists.
    fn all(stats: &StatsSnapshot) -> impl Iterator<Item = ListEntry<'_>> {
        let used = stats.policies().iter().flat_map(|policy| policy.most_used());
        let top = stats.most_limited().iter().chain(stats.most_held()).chain(used);
        let top = top.map(|key| (key.fingerprint(), key.kept(), Some(key.policy())));
        let recent = stats.recent_refusals().iter().map(|refusal| {
            let policy = refusal.status().map(|status| status.policy().name());
            (refusal.fingerprint().unwrap_or_default(), refusal.kept(), policy)
        });
        top.chain(recent)
    }

    /// Returns whether the page lists a key with this fingerprint.
    #[cfg(feature = "fleet")]
    pub(super) fn is_listed(stats: &StatsSnapshot, fingerprint: &str) -> bool {
        Self::all(stats).any(|(listed, ..)| listed == fingerprint)
    }

    /// Finds a listed key by its fingerprint.
    pub(super) fn find(stats: &StatsSnapshot, fingerprint: &str) -> Result<Self, Wrong> {
        let mut found: Option<(u64, Self)> = None;
        for (_, kept, policy) in Self::all(stats).filter(|(own, ..)| own == fingerprint) {
            let Some((whole, key)) = kept else { continue };
            let (known, listed) =
                found.get_or_insert_with(|| (whole, Self { key: Arc::clone(key), policies: HashSet::new() }));
            if *known != whole {
                let message = format!("`{fingerprint}` stands for two listed keys: explain a request of the customer");
                return Err((StatusCode::CONFLICT, super::request::printable(&message).into()));
            }
            listed.policies.extend(policy.map(str::to_owned));
        }
        let Some((_, listed)) = found else {
            let message = format!(
                "no key with the fingerprint `{fingerprint}` is listed now, or the key is longer than 512 bytes: \
                 explain a request of the customer"
            );
            return Err((StatusCode::NOT_FOUND, super::request::printable(&message).into()));
        };
        Ok(listed)
    }

    pub(super) fn shown(&self, stats: &Stats) -> ShownKey {
        ShownKey::of(stats, &self.key)
    }
}

impl ShownKey {
    fn of(stats: &Stats, key: &Key) -> Self {
        let (fingerprint, name) = stats.shown(key);
        Self { fingerprint, name }
    }
}

impl LayerKeys {
    fn new(title: &str, source: &Arc<dyn ErasedLayer>) -> Self {
        Self { title: title.into(), source: Arc::clone(source), held: Vec::new() }
    }

    /// Collects the keys that a layer would charge a described request to.
    pub(super) fn of_explanation(
        title: &str,
        source: &Arc<dyn ErasedLayer>,
        explanation: &Explanation,
        stats: &Stats,
    ) -> Self {
        let mut target = Self::new(title, source);
        let in_force = source.rules();
        for rule in explanation.rules().iter().filter(|rule| rule.not_charged().is_none()) {
            let (Some(key), Some(first)) = (rule.key(), rule.policies().first()) else { continue };
            let group = in_force.iter().map(|(policies, _)| policies);
            let of_rule = |policies: &&Vec<Policy>| policies.iter().any(|policy| policy.name() == first.name());
            let policies = group.filter(of_rule).flatten();
            // If the rule has plans, the policy of the request's own plan comes first, because it
            // says what is left.
            let asked = || rule.statuses().iter().map(|status| status.policy());
            let unasked = policies.filter(|policy| asked().all(|asked| asked.name() != policy.name()));
            target.hold(&Arc::new(key.clone()), stats, asked().chain(unasked).cloned().collect());
        }
        target
    }

    /// Collects the policies of the rules for which a key is listed.
    pub(super) fn of_key(title: &str, source: &Arc<dyn ErasedLayer>, listed: &ListedKey, stats: &Stats) -> Self {
        let mut target = Self::new(title, source);
        for (policies, _) in source.rules() {
            if policies.iter().any(|policy| listed.policies.contains(policy.name())) {
                target.hold(&listed.key, stats, policies);
            }
        }
        target
    }

    /// Collects the policies of a layer under which a typed key may have a state: those with this name, or all of them.
    #[cfg(feature = "fleet")]
    pub(super) fn of_typed(source: &Arc<dyn ErasedLayer>, key: &Key, policy: Option<&str>, stats: &Stats) -> Self {
        let mut target = Self::new("", source);
        let policies = source.rules().into_iter().flat_map(|(policies, _)| policies);
        let policies = policies.filter(|own| policy.is_none_or(|policy| own.name() == policy));
        target.hold(&Arc::new(key.clone()), stats, policies.collect());
        target
    }

    fn hold(&mut self, key: &Arc<Key>, stats: &Stats, policies: Vec<Policy>) {
        let (fingerprint, shown) = (stats.fingerprint(key), ShownKey::of(stats, key));
        for policy in policies {
            let is_own = |held: &Held| held.fingerprint == fingerprint && held.policy == policy;
            if self.held.len() < HELD_MAX && !self.held.iter().any(is_own) {
                self.held.push(Held { policy, key: Arc::clone(key), fingerprint, shown: shown.clone() });
            }
        }
    }

    /// Returns about how many bytes of memory the keys need.
    pub(super) fn bytes(&self) -> usize {
        let bytes = |held: &Held| size_of::<Held>() + held.key.as_bytes().len() + 200; // the texts
        self.held.iter().map(bytes).sum()
    }

    /// Returns whether there is no key on which operators may act.
    pub(super) fn is_empty(&self) -> bool {
        !self.held.iter().any(|held| can_reset(&held.policy))
    }

    /// Keeps only the keys and policies that an action changes. If there are `names`, the action changes only keys
    /// under the policies with these names. `own` has the names of the policies for which the program added the action.
    /// If an error is returned, nothing was removed.
    pub(super) fn narrow(&mut self, act: &Act, own: &[&str], names: &[String]) -> Result<(), Wrong> {
        for name in names {
            if !self.held.iter().any(|held| held.policy.name() == name && can_reset(&held.policy)) {
                let known: Vec<String> = self.names().iter().map(|name| format!("`{name}`")).collect();
                return Err(wrong(&format!("no policy `{name}` was explained: take {}", known.join(", "))));
            }
        }
        let is_meant = |held: &Held| {
            let is_named = names.is_empty() || names.iter().any(|name| name == held.policy.name());
            is_named
                && match act {
                    Act::Unblock => is_block(&held.policy),
                    Act::Reset => can_reset(&held.policy),
                    Act::Own(_) => own.contains(&held.policy.name()),
                }
        };
        if !self.held.iter().any(is_meant) {
            return Err(match act {
                Act::Own(name) => wrong(&format!(
                    "`{name}` acts only on keys of {}: choose one of these policies, or explain one of their keys",
                    own.join(", ")
                )),
                _ => wrong("no block is among these policies: `reset` forgets what the key has used"),
            });
        }
        let mut seen = HashSet::new();
        // All plans of a rule have the same name. For each key, the plans of rates share one state, and the plans of
        // requests in flight share another.
        self.held.retain(|held| {
            let counts_apart = *act == Act::Reset && is_concurrent(&held.policy);
            is_meant(held) && seen.insert((held.fingerprint, held.policy.name().to_owned(), counts_apart))
        });
        Ok(())
    }

    /// Keeps only the key under the policy with this name. If an error is returned, nothing was removed.
    #[cfg(feature = "fleet")]
    pub(super) fn narrow_to(&mut self, policy: &str) -> Result<(), Wrong> {
        let Some(held) = self.held.iter().find(|held| held.policy.name() == policy).cloned() else {
            let known: Vec<String> = self.names().iter().map(|name| format!("`{name}`")).collect();
            return Err(wrong(&format!(
                "no policy `{policy}` was explained: send one as `policy`: {}",
                known.join(", ")
            )));
        };
        self.held = vec![held];
        Ok(())
    }

    /// Returns the names of the policies that can be reset.
    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.held.iter().map(|held| &held.policy).filter(|policy| can_reset(policy)).map(Policy::name).collect();
        names.dedup();
        names
    }

    /// Asks the layer's limiter for the states of all keys.
    pub(super) async fn look(&self) -> KeyStates {
        let mut states = Vec::with_capacity(self.held.len());
        for Held { policy, key, shown, .. } in &self.held {
            match look_at(&*self.source, policy, key).await {
                Ok(decision) => states.push(KeyState { policy: policy.clone(), shown: shown.clone(), decision }),
                Err(error) => return KeyStates { states, failure: Some(error) },
            }
        }
        KeyStates { states, failure: None }
    }
}

/// Returns the remaining units of a key under a policy. If no units remain, also returns the wait of a request that
/// costs 1.
async fn look_at(source: &dyn ErasedLayer, policy: &Policy, key: &Key) -> Result<ChargeDecision, String> {
    let decision = source.peek(policy, key, 0).await?;
    if decision.remaining() > 0 || is_block(policy) || is_meter(policy) {
        return Ok(decision);
    }
    source.peek(policy, key, 1).await
}

pub(super) fn is_block(policy: &Policy) -> bool {
    policy.quota().algorithm() == Algorithm::Block
}

pub(super) fn is_meter(policy: &Policy) -> bool {
    policy.quota().algorithm() == Algorithm::Meter
}

fn is_concurrent(policy: &Policy) -> bool {
    policy.quota().algorithm() == Algorithm::Concurrency
}

/// Returns whether the page may reset states of a policy. The page does not reset meters, because customers are billed
/// by them.
pub(super) fn can_reset(policy: &Policy) -> bool {
    !is_meter(policy)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::outcome::Observer;
    use crate::quota::Quota;

    #[test]
    fn fingerprint_of_two_listed_keys_is_refused() {
        let stats = Stats::builder().count_use(true).build();
        stats.keep_keys();
        // Eight digits of a fingerprint collide among some 100,000 keys.
        let mut seen = HashMap::new();
        let pair = (0_u64..).find_map(|n| {
            let own = Key::of(n)?;
            let before = seen.insert(stats.shown(&own).0, own.clone())?;
            Some([before, own])
        });
        let [first, second] = pair.unwrap();
        let (a, b) = (Policy::new("a", Quota::per_hour(5)).unwrap(), Policy::new("b", Quota::per_hour(5)).unwrap());
        let list = |policy: &Policy, key: &Key| (0..2).for_each(|_| assert!(stats.on_allowed(policy, key, 1, false)));
        let fingerprint = stats.shown(&first).0;
        let find = || ListedKey::find(&stats.snapshot(), &fingerprint);
        assert_eq!(find().err().unwrap().0, StatusCode::NOT_FOUND);
        list(&a, &first);
        assert!(find().is_ok_and(|listed| *listed.key == first));
        list(&b, &second);
        assert_eq!(find().err().unwrap().0, StatusCode::CONFLICT);
    }

    #[test]
    fn key_that_is_too_long_is_not_kept() {
        let stats = Stats::builder().count_use(true).build();
        stats.keep_keys();
        let (policy, key) = (Policy::new("a", Quota::per_hour(5)).unwrap(), Key::of("a".repeat(600)).unwrap());
        (0..2).for_each(|_| assert!(stats.on_allowed(&policy, &key, 1, false)));
        assert_eq!(stats.snapshot().policies()[0].most_used().len(), 1);
        assert!(ListedKey::find(&stats.snapshot(), &stats.shown(&key).0).is_err());
    }
}
