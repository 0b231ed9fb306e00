//! What a (policy, key) is known by within this process.

use std::hash::BuildHasher;

use foldhash::quality::RandomState;

use crate::key::Key;
use crate::limiter::Charge;
use crate::policy::Policy;

/// A hash with a secret of the process. A policy with another quota is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag(u64);

impl Tag {
    /// Which of so many slots it has; there is at least one.
    pub(super) fn slot(self, of: usize) -> usize {
        (self.0 % of.max(1) as u64) as usize // below `of`
    }
}

/// Makes tags.
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
