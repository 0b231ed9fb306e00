//! The status of a policy, borrowed from the request's charges.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::policy::Policy;

/// The borrowed form of a [`PolicyStatus`](crate::outcome::PolicyStatus), with the request's key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PolicyView<'a> {
    /// Its place among the layer's policies.
    pub(crate) place: usize,
    pub(crate) policy: &'a Policy,
    pub(crate) key: &'a Key,
    pub(crate) decision: &'a ChargeDecision,
    /// Whether this policy refused the request.
    pub(crate) refuses: bool,
}

impl PolicyView<'_> {
    /// Returns the units that clients learn to remain: 0 after a refusal, because the rest is not
    /// enough for the request.
    pub(super) fn remaining(&self) -> u64 {
        if self.refuses { 0 } else { self.decision.remaining() }
    }

    /// Returns whether this one [binds](binding) if there is no third.
    fn binds_before(&self, other: &Self) -> bool {
        match (self.refuses, other.refuses) {
            (true, true) => self.decision.retry_us > other.decision.retry_us,
            (false, false) => self.decision.remaining() < other.decision.remaining(),
            (refuses, _) => refuses,
        }
    }

    /// Returns the wait after a refusal, or `None` if no wait helps.
    pub(super) fn retry_us(&self) -> Option<u64> {
        (!self.decision.is_never()).then_some(self.decision.retry_us)
    }
}

/// Returns the policy that binds: the refusing one with the longest wait, or if none refused, the
/// one with the least remaining.
pub(super) fn binding<'a>(views: &'a [PolicyView<'a>]) -> Option<&'a PolicyView<'a>> {
    let refusing = views.iter().filter(|view| view.refuses).max_by_key(|view| view.decision.retry_us);
    refusing.or_else(|| views.iter().min_by_key(|view| view.decision.remaining()))
}

/// Keeps one view of each policy, the one that binds. Descriptors can charge a policy under several keys, and a list
/// has one item for each policy.
pub(crate) fn keep_one_of_each<'a>(views: &mut SmallVec<[PolicyView<'a>; 4]>) {
    let mut places: HashMap<u64, usize> = HashMap::new();
    let mut kept: SmallVec<[PolicyView<'a>; 4]> = SmallVec::new();
    for view in views.drain(..) {
        match places.entry(view.policy.name_fingerprint()) {
            Entry::Vacant(vacant) => {
                vacant.insert(kept.len());
                kept.push(view);
            }
            Entry::Occupied(place) => {
                if let Some(other) = kept.get_mut(*place.get()).filter(|other| view.binds_before(other)) {
                    *other = view;
                }
            }
        }
    }
    *views = kept;
}

/// Returns the longest wait of the policies that refused. Returns `None` if no policy refused, or
/// if no wait helps.
pub(super) fn longest_wait_us(views: &[PolicyView<'_>]) -> Option<u64> {
    let mut waits = views.iter().filter(|view| view.refuses).map(PolicyView::retry_us);
    waits.next()?.and_then(|first| waits.try_fold(first, |longest, wait| Some(longest.max(wait?))))
}

/// Returns whether at most this percentage of the capacity remains.
pub(crate) fn is_near(decision: &ChargeDecision, percent: u8) -> bool {
    u128::from(decision.remaining()) * 100 <= u128::from(decision.limit()) * u128::from(percent)
}
