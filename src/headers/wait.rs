//! The waits of refusals, with a cap and jitter.

use std::time::Duration;

use crate::base::random::mixed;
use crate::base::time::micros_ceil;

pub(super) const SECOND_US: u64 = 1_000_000;

/// The default of the longest wait that is reported: one day.
const MAX_WAIT_US: u64 = 86_400 * SECOND_US;

/// The shortest and the longest wait after a failure of the limiter. The client's key chooses a wait between
/// the two. If the waits did not differ, all clients would return at once.
const FAILURE_US: (u64, u64) = (SECOND_US, 5 * SECOND_US);

/// Spreads the return of many refused clients: it lengthens the wait of each client by a different
/// part.
///
/// Jitter lengthens the waits of refusals, and shortens none. Jitter depends only on the client's key, so repeating a
/// request does not give a shorter wait. Use jitter for windows that end for all clients at the same time. Buckets
/// spread clients without jitter.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Headers, middleware::Jitter};
///
/// let headers =
///     Headers::default().jitter(Jitter::percent(10).at_most(Duration::from_secs(30)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Jitter {
    percent: u8,
    most_us: u64,
}

impl Jitter {
    /// Adds between 0 and `percent` percent of the wait.
    #[must_use]
    pub fn percent(percent: u8) -> Self {
        Self { percent, most_us: u64::MAX }
    }

    /// Sets the longest time that is added to a wait.
    #[must_use]
    pub fn at_most(mut self, most: Duration) -> Self {
        self.most_us = micros_ceil(most);
        self
    }

    fn added_us(self, wait_us: u64, seed: u64) -> u64 {
        let span = u128::from(wait_us) * u128::from(self.percent) / 100;
        let span = span.min(u128::from(self.most_us));
        // `span` is below 2^64, so the upper half of the product is below 2^64, too.
        u64::try_from((span * u128::from(mixed(seed))) >> 64).unwrap_or(u64::MAX)
    }
}

/// The settings with which waits are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waits {
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

    /// Combines two settings: takes the shorter of the two longest waits, and the jitter of `other`
    /// only if `self` has no jitter.
    pub(super) fn and(self, other: Self) -> Self {
        Self { max_us: self.max_us.min(other.max_us), jitter: self.jitter.or(other.jitter) }
    }

    pub(super) fn is_jittered(self) -> bool {
        self.jitter.is_some()
    }

    pub(super) fn jittered_us(self, wait_us: u64, seed: u64) -> u64 {
        let added = self.jitter.map_or(0, |jitter| jitter.added_us(wait_us, seed));
        wait_us.saturating_add(added)
    }

    pub(super) fn capped_us(self, wait_us: u64) -> u64 {
        wait_us.min(self.max_us)
    }

    /// Returns the wait that is reported after a refusal: with jitter, capped, and above 0.
    pub(super) fn reported_us(self, wait_us: u64, seed: u64) -> u64 {
        self.capped_us(self.jittered_us(wait_us, seed)).max(1)
    }

    /// Returns the wait after a failure of the limiter, capped, and above 0.
    pub(super) fn after_failure_us(self, seed: u64) -> u64 {
        let (least, most) = FAILURE_US;
        let added = (u128::from(most - least) * u128::from(mixed(seed))) >> 64;
        self.capped_us(least + u64::try_from(added).unwrap_or(0)).max(1)
    }

    /// Returns [`reported_us`](Self::reported_us) in seconds, which is at least 1.
    pub(super) fn reported_seconds(self, wait_us: u64, seed: u64) -> u64 {
        seconds_ceil(self.reported_us(wait_us, seed))
    }
}

impl Default for Waits {
    fn default() -> Self {
        Self { max_us: MAX_WAIT_US, jitter: None }
    }
}

/// Returns whole seconds, rounded up, because a client that waits a fraction less would be refused again.
pub(super) fn seconds_ceil(us: u64) -> u64 {
    us.div_ceil(SECOND_US)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_adds_to_a_wait_within_its_bounds() {
        let mut waits = Waits::default();
        waits.add(Jitter::percent(10).at_most(Duration::from_secs(2)));
        let mut different = std::collections::BTreeSet::new();
        for seed in 0..1_000 {
            let reported = waits.reported_us(10_000_000, seed);
            assert!((10_000_000..=11_000_000).contains(&reported), "{reported}");
            assert_eq!(reported, waits.reported_us(10_000_000, seed), "a retry gets the same jitter");
            assert!((3_600_000_000..=3_602_000_000).contains(&waits.reported_us(3_600_000_000, seed)));
            different.insert(reported);
        }
        assert!(different.len() > 900, "clients are spread");
    }

    #[test]
    fn wait_after_a_failure_is_spread_and_capped() {
        let mut waits = Waits::default();
        let different: std::collections::BTreeSet<u64> = (0..1_000).map(|seed| waits.after_failure_us(seed)).collect();
        assert!(different.len() > 900 && different.iter().all(|us| (1_000_000..=5_000_000).contains(us)));
        assert_eq!(waits.after_failure_us(7), waits.after_failure_us(7), "a retry gets the same wait");
        waits.limit_to(Duration::from_secs(2));
        assert!((0..1_000).all(|seed| waits.after_failure_us(seed) <= 2_000_000));
    }

    #[test]
    fn reported_wait_is_capped_and_above_zero() {
        let mut waits = Waits::default();
        waits.add(Jitter::percent(255));
        assert_eq!(waits.reported_us(u64::MAX, u64::MAX), MAX_WAIT_US);
        assert_eq!(waits.reported_us(0, 7), 1);
        waits.limit_to(Duration::ZERO);
        assert_eq!(waits.reported_us(5, 7), 1);
    }
}
