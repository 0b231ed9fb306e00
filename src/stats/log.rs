//! Refusals as events of `tracing`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::names::short_fingerprint;
use crate::base::time::micros_ceil;
use crate::outcome::Outcome;

/// The time that a summary covers, in microseconds.
pub(super) const SUMMARY_US: u64 = 10_000_000;

const WORDS: usize = 64;

/// The refusals by a policy since its last summary.
pub(super) struct RefusalLog {
    refused: AtomicU64,
    /// A set of bits. The fingerprint of a refused key selects the key's bit. Several keys may share a bit.
    keys: [AtomicU64; WORDS],
}

/// A summary that is due.
pub(super) struct Summary<'a> {
    pub(super) policy: &'a str,
    refused: u64,
    keys: u32,
}

impl Default for RefusalLog {
    fn default() -> Self {
        Self { refused: AtomicU64::new(0), keys: [const { AtomicU64::new(0) }; WORDS] }
    }
}

impl RefusalLog {
    pub(super) fn note(&self, fingerprint: u64) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let (word, bit) = (fingerprint as usize % WORDS, fingerprint >> 6 & 63); // any bits do
        self.keys[word].fetch_or(1 << bit, Ordering::Relaxed);
    }

    /// Returns a summary if requests were refused, and begins the next summary.
    pub(super) fn take<'a>(&self, policy: &'a str) -> Option<Summary<'a>> {
        let refused = self.refused.swap(0, Ordering::Relaxed);
        if refused == 0 {
            return None;
        }
        let keys = self.keys.iter().map(|word| word.swap(0, Ordering::Relaxed).count_ones()).sum();
        Some(Summary { policy, refused, keys })
    }
}

impl Summary<'_> {
    pub(super) fn write(&self) {
        let Self { policy, refused, keys } = self;
        tracing::warn!(target: "tower_ratelimit", policy, refused, keys, "{policy}: {refused} refused for at least {keys} keys");
    }
}

/// Writes one refusal.
pub(super) fn write(outcome: &Outcome, fingerprint: u64) {
    let Some(status) = outcome.binding() else { return };
    tracing::debug!(
        target: "tower_ratelimit",
        policy = status.policy().name(),
        outcome = outcome.kind().as_str(),
        retry_after_ms = outcome.wait().duration().map(|wait| micros_ceil(wait).div_ceil(1_000)),
        key = %short_fingerprint(fingerprint),
        "refused"
    );
}
