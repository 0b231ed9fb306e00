//! The policies that layers use with a limiter, to detect layers that contradict each other.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use crate::base::number_map::NumberMap;
use crate::base::order::sort_indices;
use crate::base::sync::{Mutex, lock};
use crate::policy::Policy;

/// Holds the policies of the layers that use a limiter. The clones of a limiter share one registry.
///
/// A layer adds its policies when it is made, and removes them when it is dropped. A limiter without a
/// registry works, but some [setup warnings](crate::setup_warning::SetupWarningKind) are not detected without
/// one.
#[derive(Default)]
pub struct PolicyRegistry(Arc<Mutex<SetupsByName>>);

/// The users of each policy name, keyed by the name's fingerprint and by the fingerprint of their setup. A name has one
/// setup unless layers contradict each other.
type SetupsByName = HashMap<u64, NumberMap<Users>>;

/// A layer's setup of one policy name. Two layers agree about a name if their setups are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PolicySetup {
    /// The fingerprints of the policies of this name. Plans have several.
    quotas: Vec<u64>,
    /// The identity of an unnamed quota. Only clones of the quota share this identity.
    unnamed: Option<usize>,
}

/// The layers with one setup of a name.
struct Users {
    setup: PolicySetup,
    count: usize,
    policies: Vec<Policy>,
}

/// A layer's entry in a registry. Dropping the entry removes the layer from the registry.
pub(crate) struct Entered {
    registry: Arc<Mutex<SetupsByName>>,
    /// The fingerprints of each name and of its setup.
    setups: Vec<(u64, u64)>,
}

/// Two layers with different setups of one name.
#[derive(Debug, PartialEq)]
pub(crate) struct Contradiction {
    /// The policy of the layer that enters the registry.
    pub(crate) own: Policy,
    /// The policy of the other layer.
    pub(crate) other: Policy,
    /// True if the quotas are equal and the policy's name was made from an unnamed quota.
    pub(crate) unnamed: bool,
}

impl PolicyRegistry {
    /// Makes an empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a number that differs between all registries in use.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Enters the policies of a layer.
    pub(crate) fn enter(&self, policies: &[Policy]) -> Entered {
        let name = |at: usize| policies.get(at).map(Policy::name_fingerprint);
        let mut order: Vec<usize> = (0..policies.len()).collect();
        sort_indices(&mut order, &|one, other| (name(one), one).cmp(&(name(other), other)));
        let own: Vec<Policy> = order.into_iter().filter_map(|at| policies.get(at).cloned()).collect();
        let mut names = lock(&self.0);
        let mut setups = Vec::new();
        for policies in own.chunk_by(|one, next| one.name_fingerprint() == next.name_fingerprint()) {
            let Some(name) = policies.first().map(Policy::name_fingerprint) else { continue };
            let setup = PolicySetup::of(policies);
            let fingerprint = foldhash::quality::FixedState::default().hash_one(&setup);
            let users = names.entry(name).or_default();
            let count = users.get(fingerprint).map_or(0, |users| users.count) + 1;
            // The latest quota counts, if the policy follows a switch.
            users.insert(fingerprint, Users { setup, count, policies: policies.to_vec() });
            setups.push((name, fingerprint));
        }
        Entered { registry: Arc::clone(&self.0), setups }
    }
}

impl PolicySetup {
    fn of(policies: &[Policy]) -> Self {
        // Layers that share a switch do not contradict each other, even while only some of the layers use the switch's
        // new quota.
        let one = |policy: &Policy| policy.switch().map_or(policy.fingerprint(), |switch| switch as u64);
        let mut quotas: Vec<u64> = Vec::with_capacity(policies.len());
        for quota in policies.iter().map(one) {
            if let Err(at) = quotas.binary_search(&quota) {
                quotas.insert(at, quota);
            }
        }
        Self { quotas, unnamed: policies.iter().find_map(Policy::unnamed) }
    }
}

impl Entered {
    /// Returns a name for which another layer has a different setup, if there is such a name. Each setup is
    /// compared with only one other setup of its name.
    pub(crate) fn contradiction(&self) -> Option<Contradiction> {
        let names = lock(&self.registry);
        self.setups.iter().find_map(|(name, setup)| {
            let setups = names.get(name)?;
            let Users { setup, policies: own, .. } = setups.get(*setup)?;
            let others = setups.foremost(2).find(|other| other.setup != *setup)?;
            let lacking = |of: &[Policy], others: &[Policy]| of.iter().find(|policy| !others.contains(policy)).cloned();
            let other = lacking(&others.policies, own).or_else(|| others.policies.first().cloned())?;
            let own = lacking(own, &others.policies).or_else(|| own.first().cloned())?;
            Some(Contradiction { own, other, unnamed: others.setup.quotas == setup.quotas })
        })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut names = lock(&self.registry);
        for (name, setup) in &self.setups {
            let Entry::Occupied(mut setups) = names.entry(*name) else { continue };
            if let Some(users) = setups.get_mut().get_mut(*setup) {
                users.count -= 1;
                if users.count == 0 {
                    setups.get_mut().remove(*setup);
                }
            }
            if setups.get().is_empty() {
                setups.remove();
            }
        }
    }
}

impl fmt::Debug for PolicyRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyRegistry").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn layer(policies: &[(&str, u64)]) -> Vec<Policy> {
        policies.iter().map(|(name, limit)| Policy::new(*name, Quota::per_second(*limit)).unwrap()).collect()
    }

    fn names(registry: &PolicyRegistry) -> usize {
        lock(&registry.0).len()
    }

    #[test]
    fn registry_reports_other_quotas_until_their_layer_is_gone() {
        let registry = PolicyRegistry::new();
        let [api, same, other] = [layer(&[("api", 5)]), layer(&[("x", 1), ("api", 5)]), layer(&[("api", 6)])];
        let entered = [registry.enter(&api), registry.enter(&api), registry.enter(&same)];
        assert!(entered.iter().all(|entered| entered.contradiction().is_none()));
        let contradicting = registry.enter(&other);
        let expected = |own: &[Policy], other: &[Policy]| {
            Some(Contradiction { own: own[0].clone(), other: other[0].clone(), unnamed: false })
        };
        assert_eq!(contradicting.contradiction(), expected(&other, &api));
        assert_eq!(entered[0].contradiction(), expected(&api, &other));
        drop(entered);
        assert_eq!(contradicting.contradiction(), None);
        assert_eq!(names(&registry), 1);
        drop(contradicting);
        assert_eq!(names(&registry), 0);
    }

    #[test]
    fn registry_lets_the_same_plans_agree_and_others_not() {
        let registry = PolicyRegistry::new();
        let [plans, again, fewer] = [&[5, 50][..], &[50, 5], &[5]]
            .map(|limits| layer(&limits.iter().map(|limit| ("plan", *limit)).collect::<Vec<_>>()));
        let plans = registry.enter(&plans);
        let _again = registry.enter(&again);
        assert_eq!(plans.contradiction(), None);
        let fewer = registry.enter(&fewer);
        let contradiction = fewer.contradiction().unwrap();
        assert_eq!([contradiction.own.quota().limit(), contradiction.other.quota().limit()], [5, 50]);
    }

    #[test]
    fn registry_lets_only_clones_of_an_unnamed_quota_agree() {
        let unnamed = || vec![Policy::from(Quota::per_minute(2))];
        let registry = PolicyRegistry::new();
        let first = unnamed();
        let [one, clone] = [registry.enter(&first), registry.enter(&first.clone())];
        assert_eq!((one.contradiction(), clone.contradiction()), (None, None));
        for other in [unnamed(), vec![Policy::new("2-per-minute", Quota::per_minute(2)).unwrap()]] {
            let other = registry.enter(&other);
            assert!(other.contradiction().unwrap().unnamed);
            assert!(one.contradiction().unwrap().unnamed);
        }
        drop((one, clone));
        assert_eq!(registry.enter(&unnamed()).contradiction(), None);
    }

    /// Comparing each pair of layers would take seconds for a tenth of these.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "the time that it takes is what is tested")]
    fn registry_takes_no_longer_for_each_layer_when_there_are_many() {
        let registry = PolicyRegistry::new();
        let started = std::time::Instant::now();
        let mut entered = Vec::new();
        for number in 0..40_000 {
            let policies = match number % 3 {
                0 => layer(&[("api", 5)]),
                1 => vec![Policy::from(Quota::per_second(5))],
                _ => layer(&[(&format!("api-{number}"), 5)]),
            };
            let layer = registry.enter(&policies);
            assert_eq!(layer.contradiction().is_some(), number % 3 == 1 && number > 1, "{number}");
            entered.push(layer);
        }
        drop(entered);
        assert_eq!(names(&registry), 0);
        assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
    }
}
