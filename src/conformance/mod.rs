//! The suite that every [`Limiter`] has to pass. Run it against your own.
//!
//! It checks the contract of [`Limiter`] and the [laws of the
//! algorithms](crate::quota#guarantees), through the public interface only,
//! with at least one quota of every algorithm. It skips quotas that the limiter does not
//! [support](Limiter::supports), and lists them in its [`Report`]. A limiter that supports none of
//! them fails. The suite may become stricter in any release; it is outside of the promise of
//! semantic versioning.
//!
//! `examples/custom_limiter.rs` has one algorithm and passes. The
//! [guide](crate::guide::writing_a_backend) explains how to write a limiter.
//!
//! ```
//! use std::time::Duration;
//! use tower_ratelimit::conformance::{self, Subject};
//! use tower_ratelimit::{MemoryLimiter, clock::ManualClock};
//!
//! struct Mine(ManualClock);
//!
//! impl Subject for Mine {
//!     type Limiter = MemoryLimiter;
//!
//!     async fn limiter(&self) -> MemoryLimiter {
//!         MemoryLimiter::builder().max_keys(1_000).clock(self.0.clone()).build().unwrap()
//!     }
//!
//!     async fn advance(&self, by: Duration) {
//!         self.0.advance(by);
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let report = conformance::check(&Mine(ManualClock::new()))
//!     .await
//!     .unwrap_or_else(|failures| panic!("{failures}"));
//! assert!(report.skipped().is_empty(), "{report}");
//! # }
//! ```

mod cases;
mod report;
#[cfg(feature = "store")]
mod store;
mod subject;
mod threads;

use std::time::Duration;

use crate::error::ConfigError;
use crate::limiter::Limiter;
use crate::quota::{Algorithm, Anchor, Calendar, Oldest, Quota};

pub use report::{Failure, Failures, FailuresKind, Report};
#[cfg(feature = "store")]
pub use store::{StoreFailures, check_store};
pub use subject::{Subject, Task};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

/// The capacity of every quota of the suite.
const CAPACITY: u64 = 5;

/// Runs every case with every quota of the suite that the limiter supports.
///
/// # Errors
/// Returns the failed cases. Also fails if the limiter supports no quota of the suite.
pub async fn check<S: Subject>(subject: &S) -> Result<Report, Failures> {
    let mut report = Report { tested: Vec::new(), skipped: Vec::new() };
    let mut failures = Vec::new();
    let limiter = subject.limiter().await;
    for quota in quotas().flatten() {
        match limiter.supports(&quota) {
            Ok(()) => {
                cases::run(subject, quota, &mut failures).await;
                if quota.algorithm() == Algorithm::Concurrency {
                    cases::run_held(subject, quota, &mut failures).await;
                } else {
                    cases::run_timed(subject, quota, &mut failures).await;
                }
                report.tested.push(quota);
            }
            Err(unsupported) => {
                cases::run_unsupported(subject, quota, &mut failures).await;
                report.skipped.push(unsupported);
            }
        }
    }
    // Blocks are tested together with every other quota.
    match block().map(|block| (block, limiter.supports(&block))) {
        Ok((block, Ok(()))) => report.tested.push(block),
        Ok((_, Err(unsupported))) => report.skipped.push(unsupported),
        Err(_) => {}
    }
    let kind = match (failures.is_empty(), report.tested.is_empty()) {
        (true, false) => return Ok(report),
        (true, true) => FailuresKind::NothingSupported,
        (false, _) => FailuresKind::BrokenPromises,
    };
    Err(Failures { kind, failures, skipped: report.skipped })
}

/// Returns at least one quota of each algorithm except the block, all of the same capacity.
fn quotas() -> impl Iterator<Item = Result<Quota, ConfigError>> {
    Algorithm::ALL.iter().flat_map(|algorithm| quotas_of(*algorithm))
}

/// Returns those [`quotas`] whose units come back with time.
fn timed_quotas() -> impl Iterator<Item = Result<Quota, ConfigError>> {
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

/// Returns a block: two refusals within an hour close a key for an hour, the second time for two
/// hours.
fn block() -> Result<Quota, ConfigError> {
    Quota::block(2, HOUR, HOUR).and_then(|block| block.growing(2, 2 * HOUR, MINUTE))
}

/// Returns a meter for units beyond a quota.
fn meter() -> Result<Quota, ConfigError> {
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
