//! Names of (policy, key) pairs, valid in this process only.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;

use crate::key::Key;
use crate::limiter::Charge;
use crate::policy::Policy;

/// The name of a (policy, key) pair: a hash with a secret of the process. Policies with different
/// quotas have different tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tag(u64);

impl Tag {
    /// Returns which of `of` slots it has.
    pub(super) fn slot(self, of: usize) -> usize {
        (self.0 % of.max(1) as u64) as usize // below `of`
    }
}

/// Makes tags with one secret.
#[derive(Clone, Debug, Default)]
pub(super) struct Tags(RandomState);

impl Tags {
    pub(super) fn of(&self, policy: &Policy, key: &Key) -> Tag {
        Tag(self.0.hash_one((policy.fingerprint(), key)))
    }

    pub(super) fn charge(&self, charge: &Charge<'_>) -> Tag {
        self.of(charge.policy, charge.key)
    }
}
