//! How waits are told: with jitter, and not longer than the longest.

use std::time::Duration;

use crate::time::micros_ceil;

const SECOND_US: u64 = 1_000_000;

/// The longest wait that is told, unless another is chosen: one day.
const MAX_WAIT_US: u64 = 86_400 * SECOND_US;

/// Spreads the return of many refused clients: each is told a wait that is longer by a part of its own.
///
/// Only ever added, and only on refusals. How much a client gets depends on its key alone, so that asking again does not
/// roll a better number. Worth having for windows that end for everyone at the same moment; buckets spread clients by
/// themselves.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Headers, Jitter};
///
/// let headers = Headers::default().jitter(Jitter::percent(10).at_most(Duration::from_secs(30)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jitter {
    percent: u8,
    most_us: u64,
}

impl Jitter {
    /// Adds from nothing up to so many percent of the wait.
    #[must_use]
    pub fn percent(percent: u8) -> Self {
        Self { percent, most_us: u64::MAX }
    }

    /// Never adds more than this.
    #[must_use]
    pub fn at_most(mut self, most: Duration) -> Self {
        self.most_us = micros_ceil(most);
        self
    }

    fn added_us(self, wait_us: u64, seed: u64) -> u64 {
        let span = u128::from(wait_us) * u128::from(self.percent) / 100;
        let span = span.min(u128::from(self.most_us));
        // `span` is below 2^64, and so is the product's upper half.
        u64::try_from((span * u128::from(mixed(seed))) >> 64).unwrap_or(u64::MAX)
    }
}

/// How waits are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waits {
    max_us: u64,
    jitter: Option<Jitter>,
}

impl Waits {
    pub(super) fn limit_to(&mut self, max: Duration) {
        self.max_us = micros_ceil(max);
    }

    pub(super) fn add(&mut self, jitter: Jitter) {
        self.jitter = Some(jitter);
    }

    /// These, and where they say nothing the other's; the shorter of the two longest waits.
    pub(super) fn and(self, other: Self) -> Self {
        Self { max_us: self.max_us.min(other.max_us), jitter: self.jitter.or(other.jitter) }
    }

    pub(super) fn is_jittered(self) -> bool {
        self.jitter.is_some()
    }

    /// The wait with its jitter.
    pub(crate) fn jittered_us(self, wait_us: u64, seed: u64) -> u64 {
        let added = self.jitter.map_or(0, |jitter| jitter.added_us(wait_us, seed));
        wait_us.saturating_add(added)
    }

    /// The wait of a refused request as it is told: with its jitter, capped, and never nothing.
    pub(crate) fn told_us(self, wait_us: u64, seed: u64) -> u64 {
        self.capped_us(self.jittered_us(wait_us, seed)).max(1)
    }

    pub(crate) fn capped_us(self, wait_us: u64) -> u64 {
        wait_us.min(self.max_us)
    }
}

impl Default for Waits {
    fn default() -> Self {
        Self { max_us: MAX_WAIT_US, jitter: None }
    }
}

/// Whole seconds, rounded up: a client that waits a part less would be refused again.
pub(crate) fn seconds_ceil(us: u64) -> u64 {
    us.div_ceil(SECOND_US)
}

/// The finalizer of SplitMix64: seeds that differ in few bits give numbers that differ in half of theirs.
fn mixed(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_only_adds_and_stays_within_its_bounds() {
        let mut waits = Waits::default();
        waits.add(Jitter::percent(10).at_most(Duration::from_secs(2)));
        let mut different = std::collections::BTreeSet::new();
        for seed in 0..1_000 {
            let told = waits.told_us(10_000_000, seed);
            assert!((10_000_000..=11_000_000).contains(&told), "{told}");
            assert_eq!(told, waits.told_us(10_000_000, seed), "asking again rolls no other number");
            assert!((3_600_000_000..=3_602_000_000).contains(&waits.told_us(3_600_000_000, seed)));
            different.insert(told);
        }
        assert!(different.len() > 900, "clients are spread");
    }

    #[test]
    fn a_told_wait_is_at_most_the_longest_and_never_nothing() {
        let mut waits = Waits::default();
        waits.add(Jitter::percent(255));
        assert_eq!(waits.told_us(u64::MAX, u64::MAX), MAX_WAIT_US);
        assert_eq!(waits.told_us(0, 7), 1);
        waits.limit_to(Duration::ZERO);
        assert_eq!(waits.told_us(5, 7), 1);
    }
}
