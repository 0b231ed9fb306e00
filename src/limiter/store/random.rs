//! Random numbers that differ between processes: versions of values, and pauses.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Version;
use crate::base::random;

/// Random numbers that differ between processes: hashes with keys that the operating system makes.
pub(super) struct Random {
    hashers: [RandomState; 2],
    /// The seed of the pauses.
    seed: u64,
    count: AtomicU64,
}

impl Random {
    pub(super) fn new() -> Self {
        Self { hashers: [RandomState::new(), RandomState::new()], seed: random::secret(), count: AtomicU64::new(0) }
    }

    pub(super) fn next(&self) -> u64 {
        random::mixed(self.seed.wrapping_add(self.count.fetch_add(1, Ordering::Relaxed)))
    }

    pub(super) fn version(&self) -> Version {
        let count = (std::process::id(), self.count.fetch_add(1, Ordering::Relaxed));
        let mut bytes = [0; 16];
        for (half, hasher) in bytes.chunks_exact_mut(8).zip(&self.hashers) {
            half.copy_from_slice(&hasher.hash_one(count).to_le_bytes());
        }
        Version::from_bytes(bytes)
    }
}
