//! Which policies are in use with a limiter, so that layers which contradict each other are noticed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::policy::Policy;

/// What a limiter knows of the layers that use it; the clones of a limiter have one in common.
///
/// Layers enter their policies by themselves, and are forgotten when they are dropped. A limiter of one's own that has
/// none works as well; then some [misuse](crate::MisuseKind) goes unnoticed.
pub struct Roster {
    number: u64,
    layers: Mutex<Vec<Weak<[Policy]>>>,
}

impl Roster {
    /// A roster of nobody.
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { number: NEXT.fetch_add(1, Ordering::Relaxed), layers: Mutex::default() }
    }

    /// Different for each roster of this process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Enters a layer's policies. Returns one of which another layer has other quotas, and such a one of those.
    pub(crate) fn enter(&self, policies: &Arc<[Policy]>) -> Option<(Policy, Policy)> {
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        layers.retain(|layer| layer.strong_count() > 0);
        let mut contradiction = None;
        let mut is_new = true;
        for other in layers.iter().filter_map(Weak::upgrade) {
            if Arc::ptr_eq(&other, policies) {
                is_new = false;
            } else if contradiction.is_none() {
                contradiction = contradicting(policies, &other).or_else(|| {
                    let (theirs, own) = contradicting(&other, policies)?;
                    Some((own, theirs))
                });
            }
        }
        if is_new {
            layers.push(Arc::downgrade(policies));
        }
        contradiction
    }
}

/// A policy whose name the others have, but with other quotas only.
fn contradicting(own: &[Policy], others: &[Policy]) -> Option<(Policy, Policy)> {
    own.iter().find_map(|policy| {
        let namesake = others.iter().find(|other| other.name() == policy.name())?;
        (!others.contains(policy)).then(|| (policy.clone(), namesake.clone()))
    })
}

impl Default for Roster {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Roster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Roster").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn layer(policies: &[(&str, u32)]) -> Arc<[Policy]> {
        policies.iter().map(|(name, limit)| Policy::new(*name, Quota::per_second(*limit)).unwrap()).collect()
    }

    #[test]
    fn a_name_with_other_quotas_is_noticed_until_its_layer_is_gone() {
        let roster = Roster::new();
        let [api, same, other] = [layer(&[("api", 5)]), layer(&[("x", 1), ("api", 5)]), layer(&[("api", 6)])];
        assert_eq!(roster.enter(&api), None);
        assert_eq!(roster.enter(&api), None);
        assert_eq!(roster.enter(&same), None);
        assert_eq!(roster.enter(&other), Some((other[0].clone(), api[0].clone())));
        drop((api, same));
        assert_eq!(roster.enter(&other), None);
        assert_eq!(roster.layers.lock().unwrap().len(), 1);
    }

    #[test]
    fn the_same_plans_agree_and_others_do_not() {
        let roster = Roster::new();
        let [plans, again, fewer] = [&[5, 50][..], &[50, 5], &[5]]
            .map(|limits| layer(&limits.iter().map(|limit| ("plan", *limit)).collect::<Vec<_>>()));
        assert_eq!(roster.enter(&plans), None);
        assert_eq!(roster.enter(&again), None);
        assert!(roster.enter(&fewer).is_some(), "one plan alone is another setup");
    }
}
