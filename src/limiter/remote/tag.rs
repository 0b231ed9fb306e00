//! Names of (policy, key) pairs, valid in this process only.

use std::hash::BuildHasher;

use crate::base::random::{self, Hasher};
use crate::key::Key;
use crate::limiter::Charge;
use crate::policy::Policy;

/// The name of a (policy, key) pair: a hash with a secret of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tag(u64);

impl Tag {
    /// Returns the slot of this tag among `of` slots.
    pub(crate) fn slot(self, of: usize) -> usize {
        (self.0 % of.max(1) as u64) as usize // below `of`
    }
}

/// Makes tags with one secret.
#[derive(Clone, Debug)]
pub(crate) struct Tags(Hasher);

impl Default for Tags {
    fn default() -> Self {
        Self(random::hasher())
    }
}

impl Tags {
    /// Returns the tag of a key under a policy and its quota.
    pub(crate) fn of(&self, policy: &Policy, key: &Key) -> Tag {
        Tag(self.0.hash_one((policy.fingerprint(), key)))
    }

    /// Returns the tag of a key under a policy's name, for all quotas of that name.
    pub(crate) fn named(&self, policy: &Policy, key: &Key) -> Tag {
        Tag(self.0.hash_one((policy.name_fingerprint(), key)))
    }

    pub(crate) fn charge(&self, charge: &Charge<'_>) -> Tag {
        self.of(charge.policy, charge.key)
    }
}
