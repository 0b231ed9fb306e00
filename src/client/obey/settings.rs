//! The configuration of a layer, and the state that its services share.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

use super::line::KeyLine;
use super::table::{LineTable, SharedLine};
use crate::base::head::Head;
use crate::base::random::mixed;
use crate::base::time::{micros_ceil, micros_floor};
use crate::clock::Clock;
use crate::clock::Timer;
use crate::key::Key;
use crate::limiter::BoxLimiter;
use crate::middleware::rule::{BoundRule, RuleMatch, TakenNames};
use crate::policy::Policy;

/// Returns the key of a request.
pub(super) type KeyOf = dyn Fn(&Head<'_>) -> Option<Key> + Send + Sync;

/// A quota of the client's own: one policy, or several that are taken together.
#[derive(Clone)]
pub(super) struct OwnQuota {
    pub(super) limiter: BoxLimiter,
    pub(super) rule: BoundRule,
}

/// The charge of a request to one of the client's own quotas.
pub(super) struct Share {
    /// The index of the quota.
    pub(super) own: usize,
    pub(super) policies: SmallVec<[Policy; 1]>,
    pub(super) cost: u64,
}

impl OwnQuota {
    /// Returns what a request takes. Returns `None` if the rule does not apply to the request.
    fn share(&self, own: usize, request: &Head<'_>) -> Option<Share> {
        // The rule gets no key of its own, because the layer has one key for all its quotas.
        let RuleMatch::Charged { cost, .. } = self.rule.match_request(request, |_| (), |_| Some(())) else {
            return None;
        };
        let (all, charged) = (self.rule.policies(), self.rule.charged(request));
        let first = self.rule.end() - all.len();
        let policies = all.iter().enumerate().filter(|(at, _)| charged.contains(&(first + at)));
        Some(Share { own, policies: policies.map(|(_, policy)| policy.clone()).collect(), cost })
    }
}

#[derive(Clone)]
pub(super) struct ObeySettings {
    pub(super) timer: Arc<dyn Timer>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) key: Arc<KeyOf>,
    pub(super) own: Vec<OwnQuota>,
    /// The names of their policies.
    pub(super) names: TakenNames,
    pub(super) max_wait: Duration,
    pub(super) max_waiting: usize,
    pub(super) max_keys: usize,
    pub(super) paces: bool,
    pub(super) adapts: bool,
    pub(super) jitter: Arc<WaitJitter>,
    pub(super) table: Arc<LineTable>,
}

impl ObeySettings {
    /// Returns the timer's time in microseconds. Returns `u64::MAX` if the timer cannot sleep.
    pub(super) fn now_us(&self) -> u64 {
        micros_floor(self.timer.now())
    }

    /// Returns the units that a request takes from each of the client's own quotas that applies to the
    /// request.
    pub(super) fn shares(&self, request: &Head<'_>) -> Vec<Share> {
        self.own.iter().enumerate().filter_map(|(at, own)| own.share(at, request)).collect()
    }

    pub(super) fn max_wait_us(&self) -> u64 {
        micros_ceil(self.max_wait)
    }

    /// Returns the line of a key. Returns `None` if there are too many keys.
    pub(super) fn line(&self, key: &Key, now_us: u64) -> Option<SharedLine> {
        let bound_us = now_us.saturating_add(self.max_wait_us());
        let make = || KeyLine::new(!self.own.is_empty(), self.adapts);
        self.table.line(key, now_us, bound_us, self.max_keys, make)
    }
}

impl fmt::Debug for ObeySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("own_quotas", &self.own.iter().map(|own| &own.rule).collect::<Vec<_>>())
            .field("max_wait", &self.max_wait)
            .field("max_waiting", &self.max_waiting)
            .field("max_keys", &self.max_keys)
            .field("paces", &self.paces)
            .field("adapts", &self.adapts)
            .finish_non_exhaustive()
    }
}

/// Lengthens waits by 0 to 10 percent at random, so that clients that got equal waits do not all return
/// at one instant.
pub(in crate::client) struct WaitJitter(AtomicU64);

impl WaitJitter {
    pub(in crate::client) fn seeded(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    pub(in crate::client) fn random() -> Self {
        Self::seeded(RandomState::new().hash_one(0))
    }

    pub(in crate::client) fn lengthen(&self, wait_us: u64) -> u64 {
        let drawn = mixed(self.0.fetch_add(1, Ordering::Relaxed));
        let added = (u128::from(wait_us / 10) * u128::from(drawn)) >> 64;
        wait_us.saturating_add(u64::try_from(added).unwrap_or(0)) // below 2^64
    }
}
