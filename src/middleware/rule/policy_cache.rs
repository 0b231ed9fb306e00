//! The compiled policies of quotas that requests bring.

use std::sync::OnceLock;

use crate::base::sync::{Mutex, try_lock};
use crate::policy::Policy;
use crate::quota::Quota;

/// The number of entries of a cache. Each entry has room for two compiled policies.
const PLACES: usize = 1_024;

/// The compiled policies of a rule whose requests bring their quotas. Equal quotas share a policy, as long as there is
/// room.
///
/// The quota determines the entry. The first policy of an entry stays, and is found without a lock. Later policies
/// of an entry replace each other. No request waits for the lock of a later policy: if the lock is held, the
/// request compiles its policy anew.
pub(crate) struct PolicyCache {
    /// The policy that stands in for all policies of the cache.
    of_requests: Policy,
    places: Box<[CacheEntry]>,
}

#[derive(Default)]
struct CacheEntry {
    first: OnceLock<Policy>,
    latest: Mutex<Option<Policy>>,
}

/// A policy of a cache.
pub(crate) enum Cached<'a> {
    First(&'a Policy),
    Other(Policy),
}

impl Cached<'_> {
    #[inline]
    pub(crate) fn policy(&self) -> &Policy {
        match self {
            Self::First(policy) => policy,
            Self::Other(policy) => policy,
        }
    }

    pub(crate) fn into_policy(self) -> Policy {
        match self {
            Self::First(policy) => policy.clone(),
            Self::Other(policy) => policy,
        }
    }
}

impl PolicyCache {
    pub(crate) fn new(of_requests: Policy) -> Self {
        Self { of_requests, places: (0..PLACES).map(|_| CacheEntry::default()).collect() }
    }

    /// Returns the policy of a quota, if the cache keeps that policy.
    #[inline]
    pub(crate) fn find(&self, quota: &Quota) -> Option<Cached<'_>> {
        let place = self.place(quota)?;
        match place.first.get() {
            Some(first) if is_of(first, quota) => Some(Cached::First(first)),
            Some(_) => place.find_latest(quota).map(Cached::Other),
            None => None,
        }
    }

    /// Compiles the policy of a quota.
    pub(crate) fn compile(&self, quota: Quota) -> Policy {
        self.of_requests.with_quota(quota)
    }

    /// Keeps a policy, for requests with an equal quota.
    pub(crate) fn keep(&self, policy: &Policy) {
        let Some(place) = self.place(policy.quota()) else { return };
        if place.first.set(policy.clone()).is_err() {
            if let Some(mut latest) = try_lock(&place.latest) {
                *latest = Some(policy.clone());
            }
        }
    }

    #[inline]
    fn place(&self, quota: &Quota) -> Option<&CacheEntry> {
        self.places.get(quota.fingerprint() as usize % PLACES) // any of its bits
    }
}

impl CacheEntry {
    #[inline(never)]
    fn find_latest(&self, quota: &Quota) -> Option<Policy> {
        try_lock(&self.latest)?.as_ref().filter(|latest| is_of(latest, quota)).cloned()
    }
}

/// Returns whether a policy has this quota. Equal fingerprints mean equal quotas, as in the limiter.
#[inline]
fn is_of(policy: &Policy, quota: &Quota) -> bool {
    policy.quota().fingerprint() == quota.fingerprint()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_keeps_two_policies_of_a_place_whatever_quotas_appear() {
        let cache = PolicyCache::new(Policy::of_requests("customer").unwrap());
        let quotas = (1..100_000).map(Quota::per_hour);
        let at = |quota: &Quota| quota.fingerprint() as usize % PLACES;
        let same: Vec<Quota> = quotas.clone().filter(|quota| at(quota) == 7).take(3).collect();
        for quota in &same {
            assert!(cache.find(quota).is_none());
            cache.keep(&cache.compile(*quota));
            assert_eq!(cache.find(quota).map(Cached::into_policy), Some(cache.compile(*quota)));
        }
        let kept = |cache: &PolicyCache| quotas.clone().filter(|quota| cache.find(quota).is_some()).count();
        assert!(matches!(cache.find(&same[0]), Some(Cached::First(_))));
        assert!(cache.find(&same[1]).is_none(), "the third one took its room");
        assert_eq!(kept(&cache), 2);
        quotas.clone().for_each(|quota| cache.keep(&cache.compile(quota)));
        assert_eq!(kept(&cache), 2 * PLACES);
    }

    #[test]
    fn cache_never_waits_for_its_lock() {
        let cache = PolicyCache::new(Policy::of_requests("customer").unwrap());
        let at = |quota: &Quota| quota.fingerprint() as usize % PLACES;
        let same: Vec<Quota> = (1..100_000).map(Quota::per_hour).filter(|quota| at(quota) == 7).take(2).collect();
        cache.keep(&cache.compile(same[0]));
        let held = try_lock(&cache.places[7].latest);
        cache.keep(&cache.compile(same[1]));
        assert!(cache.find(&same[1]).is_none());
        drop(held);
        cache.keep(&cache.compile(same[1]));
        assert!(cache.find(&same[1]).is_some());
    }
}
