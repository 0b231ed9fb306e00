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
mod quotas;
mod report;
#[cfg(feature = "store")]
mod store;
mod subject;
mod threads;

use crate::limiter::Limiter;
use crate::quota::Algorithm;

use quotas::{block, quotas};

pub use report::{Failure, Failures, FailuresKind, Report};
#[cfg(feature = "store")]
pub use store::{StoreFailures, check_store};
pub use subject::{Subject, Task};

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
