//! The hash of a policy's name and a key.

use std::hash::{Hash, Hasher};

use foldhash::SharedSeed;

use crate::key::Key;

/// Hashes pairs of a policy's name and a key. If the seeds are secret, no client can find pairs with equal hashes.
#[derive(Clone)]
pub(crate) struct PairHash {
    seed: u64,
    shared_seed: SharedSeed,
}

impl PairHash {
    pub(crate) fn new([seed, shared_seed]: [u64; 2]) -> Self {
        Self { seed, shared_seed: SharedSeed::from_u64(shared_seed) }
    }

    /// Returns the hash of a pair. `policy` is the [fingerprint](crate::Policy::name_fingerprint) of the policy's name.
    #[inline(always)]
    pub(crate) fn of(&self, policy: u64, key: &Key) -> u64 {
        let mut hasher = foldhash::quality::FoldHasher::with_seed(self.seed ^ policy, &self.shared_seed);
        key.hash(&mut hasher);
        hasher.finish()
    }
}
