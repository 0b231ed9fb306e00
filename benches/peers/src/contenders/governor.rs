//! governor's keyed limiter.

use std::hash::Hash;
use std::net::IpAddr;
use std::num::NonZeroU32;

use governor::state::keyed::DashMapStateStore;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub fn quota(denied: bool) -> Quota {
    let limit = |limit| NonZeroU32::new(limit).expect("not zero");
    if denied { Quota::per_hour(limit(1)) } else { Quota::per_second(limit(PLENTY)) }
}

/// As it comes: DashMap, SipHash, and the clock of quanta.
pub struct Governor;

impl Governor {
    fn keyed<K: Hash + Eq + Clone + Send + Sync + 'static>(setup: &Setup) -> Option<Check<K>> {
        let limiter: DefaultKeyedRateLimiter<K> = RateLimiter::keyed(quota(setup.denied));
        check(move |key| limiter.check_key(key).is_ok())
    }
}

impl Contender for Governor {
    fn name(&self) -> &'static str {
        "governor"
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        Self::keyed(setup)
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        Self::keyed(setup)
    }
}

/// Tuned by hand, with a quicker hash.
pub struct WithFoldhash;

impl WithFoldhash {
    fn keyed<K: Hash + Eq + Clone + Send + Sync + 'static>(setup: &Setup) -> Option<Check<K>> {
        let hash = foldhash::fast::RandomState::default();
        let limiter: RateLimiter<K, DashMapStateStore<K, _>, _> =
            RateLimiter::dashmap_with_hasher(quota(setup.denied), hash);
        check(move |key| limiter.check_key(key).is_ok())
    }
}

impl Contender for WithFoldhash {
    fn name(&self) -> &'static str {
        "governor with foldhash"
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        Self::keyed(setup)
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        Self::keyed(setup)
    }
}
