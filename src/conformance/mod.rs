//! The suite that every [`Limiter`] has to pass. Run it against your own limiter.
//!
//! The suite checks the contract of [`Limiter`] and the [laws of the
//! algorithms](crate::quota#guarantees) through the public interface only. The suite uses at least one
//! quota of every algorithm. The suite skips quotas that the limiter does not
//! [support](Limiter::supports), and lists them in its [`Report`]. A limiter that supports no quota of
//! the suite fails. The suite may become stricter in any release, because semantic versioning does not
//! cover it.
//!
//! `examples/custom_limiter.rs` is a limiter with one algorithm that passes the suite. The
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
//!
//! # A limiter over a store
//!
//! The suite lets time pass, sends many checks at once, and makes many limiters. So the limiter of this
//! example, which is over a store, has six settings that a service does not need. Each has a comment:
//!
//! ```no_run
//! # use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use std::time::Duration;
//! use tower_ratelimit::StoreLimiter;
//! use tower_ratelimit::clock::ManualClock;
//! use tower_ratelimit::conformance::{self, Subject, Task};
//! use tower_ratelimit::limiter::store::StoreLimiterBuilder;
//! # use tower_ratelimit::limiter::store::{Change, Loaded, Store, StoreError, Swapped};
//! # #[derive(Clone)]
//! # struct MyStore;
//! # impl Store for MyStore {
//! #     async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
//! #         Ok(Loaded::new(vec![None; keys.len()]))
//! #     }
//! #     async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
//! #         Ok(Swapped::done())
//! #     }
//! # }
//!
//! struct Mine {
//!     store: MyStore,
//!     clock: ManualClock,
//!     made: AtomicU32,
//! }
//!
//! impl Subject for Mine {
//!     type Limiter = StoreLimiter<MyStore>;
//!
//!     async fn limiter(&self) -> StoreLimiter<MyStore> {
//!         let builder = StoreLimiterBuilder::new()
//!             // No limiter finds the states of another.
//!             .prefix(self.made.fetch_add(1, Ordering::Relaxed).to_string())
//!             .deadline(Duration::from_secs(20)) // a busy machine fails no check
//!             .clock(self.clock.clone()) // instead of the store's
//!             .max_denials(0) // denials are remembered by the real time
//!             // No process renews its places while hours pass.
//!             .places_lapse_after(Duration::from_secs(86_400));
//!         builder.build(self.store.clone()).unwrap()
//!     }
//!
//!     async fn advance(&self, by: Duration) {
//!         self.clock.advance(by);
//!     }
//!
//!     fn spawn(&self, task: Task) {
//!         // The limiter needs a runtime, and the test one of several threads.
//!         tokio::spawn(task);
//!     }
//! }
//!
//! #[tokio::main]
//! async fn main() {
//!     conformance::check_store(&MyStore)
//!         .await
//!         .unwrap_or_else(|failures| panic!("{failures}"));
//!     let mine =
//!         Mine { store: MyStore, clock: ManualClock::new(), made: AtomicU32::new(0) };
//!     conformance::check(&mine).await.unwrap_or_else(|failures| panic!("{failures}"));
//! }
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
/// Returns the failed cases. Also returns an error if the limiter supports no quota of the suite.
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
