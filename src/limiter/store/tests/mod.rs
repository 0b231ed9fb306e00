//! Limiters over a store in memory that fails as tests ask for.

mod contention;
mod faults;
mod joint;
pub(super) mod lab;
pub(super) mod parity;
mod places;
mod probe;
mod values;

use std::time::Duration;

use lab::Lab;

use super::{StoreLimiter, StoreLimiterBuilder};
use crate::clock::ManualClock;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::{Charge, Limiter};
use crate::policy::Policy;
use crate::quota::Quota;

/// A deadline that a busy machine keeps.
const LONG: Duration = Duration::from_secs(20);

/// After this time no key rests for the sake of other processes, if a trip takes at most 16 ms.
const RESTED: Duration = Duration::from_millis(20);

fn patient() -> StoreLimiterBuilder {
    StoreLimiterBuilder::new().deadline(LONG)
}

fn hourly(units: u64) -> Policy {
    Policy::new("hourly", Quota::sliding_log(units, Duration::from_secs(3_600)).unwrap()).unwrap()
}

fn key(name: &str) -> Key {
    Key::of(name).unwrap()
}

async fn take(limiter: &StoreLimiter<Lab>, policy: &Policy, name: &str) -> Decision {
    limiter.take(&[Charge::new(policy, &key(name))]).await.unwrap()
}

async fn left(limiter: &StoreLimiter<Lab>, policy: &Policy, name: &str) -> u64 {
    let key = key(name);
    limiter.peek(&[Charge::new(policy, &key).cost(0)]).await.unwrap().charges()[0].remaining()
}

#[cfg(feature = "conformance")]
mod conformance {
    use std::sync::Arc;

    use super::lab::Fate;
    use super::*;
    use crate::conformance::{Subject, Task, check, check_store};
    use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped};

    /// Limiters over new stores of one clock.
    struct Stores {
        clock: ManualClock,
        random: Vec<Fate>,
    }

    impl Subject for Stores {
        type Limiter = StoreLimiter<Lab>;

        async fn limiter(&self) -> StoreLimiter<Lab> {
            let lab = Lab::with(|lab| {
                lab.random = crate::base::sync::Mutex::new(self.random.clone());
            });
            // Denials are remembered by another clock.
            // The clock is advanced by hours, and no process renews its places meanwhile.
            let builder = patient().max_denials(0).places_lapse_after(Duration::from_secs(86_400));
            builder.clock(self.clock.clone()).build(lab).unwrap()
        }

        async fn advance(&self, by: Duration) {
            self.clock.advance(by);
        }

        fn spawn(&self, task: Task) {
            tokio::spawn(task);
        }
    }

    #[tokio::test]
    async fn store_in_memory_keeps_the_contract_of_stores() {
        check_store(&Lab::default()).await.unwrap_or_else(|failures| panic!("{failures}"));
    }

    #[tokio::test]
    async fn broken_stores_are_found() {
        for fate in [Fate::AnswerLost, Fate::Old] {
            let lab = Lab::with(|lab| lab.random = crate::base::sync::Mutex::new(vec![fate]));
            let failures = check_store(&lab).await.unwrap_err().to_string();
            assert!(failures.contains("conflicts") && failures.contains("all_or_nothing"), "{failures}");
        }
    }

    /// A store that holds a lock while it talks to its server.
    #[derive(Default)]
    struct Locked(tokio::sync::Mutex<Lab>);

    impl Store for Locked {
        async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
            let lab = self.0.lock().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            lab.load(keys).await
        }

        async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
            let lab = self.0.lock().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            lab.swap(changes).await
        }
    }

    /// A store that compares keys as a database with the wrong collation.
    #[derive(Default)]
    struct OneCase(Lab);

    impl Store for OneCase {
        async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
            let keys: Vec<Arc<str>> = keys.iter().map(|key| key.to_lowercase().into()).collect();
            self.0.load(&keys).await
        }

        async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
            let lower = |change: &Change| Change::new(change.key.to_lowercase(), change.expect, change.then.clone());
            self.0.swap(&changes.iter().map(lower).collect::<Vec<_>>()).await
        }
    }

    #[tokio::test]
    async fn store_that_takes_different_keys_for_one_is_found() {
        let failures = check_store(&OneCase::default()).await.unwrap_err().to_string();
        assert!(failures.starts_with("1 promises") && failures.contains("differ only in case"), "{failures}");
    }

    #[tokio::test(start_paused = true)]
    async fn store_whose_calls_wait_for_each_other_is_found() {
        let failures = check_store(&Locked::default()).await.unwrap_err().to_string();
        assert!(failures.starts_with("1 promises") && failures.contains("hold no lock"), "{failures}");
    }

    async fn passes(subject: Stores) {
        let report = check(&subject).await.unwrap_or_else(|failures| panic!("{failures}"));
        assert!(report.skipped().is_empty(), "{report}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn limiter_over_a_store_passes_the_suite() {
        passes(Stores { clock: ManualClock::new(), random: Vec::new() }).await;
    }

    /// No other process writes. A value keeps four versions. If others write more of them after a change whose answer
    /// is lost, the limiter cannot know whether the change was made: `lost_answer_that_nothing_explains_is_a_timeout`.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn limiter_over_a_store_that_loses_answers_passes_the_suite() {
        let mut random = vec![Fate::Answered; 8];
        random.extend([Fate::AnswerLost, Fate::AnswerLost, Fate::NotSent]);
        passes(Stores { clock: ManualClock::new(), random }).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn limiter_over_a_store_that_others_write_passes_the_suite() {
        let mut random = vec![Fate::Answered; 8];
        random.extend([Fate::Overtaken, Fate::Overtaken, Fate::NotSent]);
        passes(Stores { clock: ManualClock::new(), random }).await;
    }
}
