//! The quotas of the suite.

use std::time::Duration;

use crate::error::ConfigError;
use crate::quota::{Algorithm, Anchor, Calendar, Oldest, Quota};

pub(super) const MINUTE: Duration = Duration::from_secs(60);
pub(super) const HOUR: Duration = Duration::from_secs(3_600);

/// The capacity of every quota of the suite.
pub(super) const CAPACITY: u64 = 5;

/// Returns at least one quota of each algorithm except the block. All have the same capacity.
pub(super) fn quotas() -> impl Iterator<Item = Result<Quota, ConfigError>> {
    Algorithm::ALL.iter().flat_map(|algorithm| quotas_of(*algorithm))
}

/// Returns the [`quotas`] whose units are freed with time.
pub(super) fn timed_quotas() -> impl Iterator<Item = Result<Quota, ConfigError>> {
    Algorithm::timed().flat_map(quotas_of)
}

fn quotas_of(algorithm: Algorithm) -> Vec<Result<Quota, ConfigError>> {
    match algorithm {
        Algorithm::TokenBucket => vec![
            Quota::token_bucket(CAPACITY, MINUTE),
            Quota::token_bucket(99_999, Duration::from_secs(1_000_000)).and_then(|quota| quota.burst(CAPACITY)),
        ],
        Algorithm::StepBucket => {
            vec![Quota::step_bucket(CAPACITY, MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest))]
        }
        Algorithm::Gcra => vec![Quota::gcra(CAPACITY, MINUTE).and_then(|quota| quota.burst(CAPACITY))],
        Algorithm::LeakyBucket => vec![Quota::leaky_bucket(CAPACITY, MINUTE)],
        Algorithm::LeakyQueue => vec![Quota::leaky_queue(CAPACITY, MINUTE).and_then(|quota| quota.queue(CAPACITY - 1))],
        Algorithm::FixedWindow => vec![
            Quota::fixed_window(CAPACITY, MINUTE),
            Quota::fixed_window(CAPACITY, MINUTE / 2),
            Quota::fixed_window(CAPACITY, MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)),
            Quota::calendar(CAPACITY, Calendar::day()),
            Calendar::month().from_day(31).and_then(|month| Quota::calendar(CAPACITY, month)),
        ],
        Algorithm::SlidingWindow => vec![
            Quota::sliding_window(CAPACITY, MINUTE),
            Quota::sliding_window(CAPACITY, MINUTE)
                .and_then(|quota| quota.buckets(6))
                .and_then(|quota| quota.oldest(Oldest::Counted)),
            Quota::sliding_window(CAPACITY, MINUTE)
                .and_then(|quota| quota.buckets(60))
                .and_then(|quota| quota.oldest(Oldest::Dropped)),
        ],
        Algorithm::SlidingLog => vec![Quota::sliding_log(CAPACITY, MINUTE)],
        Algorithm::Block => Vec::new(), // beside each other quota
        Algorithm::Meter => vec![Quota::meter(CAPACITY, MINUTE)],
        Algorithm::Concurrency => vec![Ok(Quota::concurrent(CAPACITY))],
    }
}

/// Returns a block: two refusals within an hour close a key for an hour, and the next block lasts two
/// hours.
pub(super) fn block() -> Result<Quota, ConfigError> {
    Quota::block(2, HOUR, HOUR).and_then(|block| block.growing(2, 2 * HOUR, MINUTE))
}

/// Returns a meter for units beyond a quota.
pub(super) fn meter() -> Result<Quota, ConfigError> {
    Quota::meter(10, HOUR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suite_has_a_quota_of_every_algorithm_and_of_one_capacity() {
        let quotas: Vec<Quota> = quotas().collect::<Result<_, _>>().unwrap();
        assert!(quotas.iter().all(|quota| quota.capacity() == CAPACITY));
        let tested: Vec<Quota> = quotas.into_iter().chain([block().unwrap(), meter().unwrap()]).collect();
        for algorithm in Algorithm::ALL {
            assert!(tested.iter().any(|quota| quota.algorithm() == *algorithm), "{algorithm} is not tested");
        }
    }
}
