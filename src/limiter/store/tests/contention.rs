//! Processes that charge the same key at the same time.

use std::sync::Arc;
use std::time::Duration;

use super::lab::{Fate, Lab};
use super::{RESTED, StoreLimiterBuilder, hourly, key, left, patient, take};
use crate::base::sync::Mutex;
use crate::event::StoreErrorKind;
use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped};
use crate::limiter::{Charge, Limiter};
use crate::policy::Policy;
use crate::quota::Quota;

const MS: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn key_that_others_always_change_is_contended() {
    // One call after the other, so the time of a round trip bounds how many there are.
    let (lab, policy) = (Lab::with(|lab| lab.trip = Duration::from_millis(1)), hourly(10));
    let limiter = StoreLimiterBuilder::new().build(lab.clone()).unwrap();
    take(&limiter, &policy, "a").await;
    lab.next(&[Fate::Overtaken; 100]);
    let error = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Contended, "{error}");
    let calls = lab.calls().1;
    assert!((2..=51).contains(&calls), "{calls} swaps in 50 ms");
    lab.next(&[]);
    assert_eq!(left(&limiter, &policy, "a").await, 9);
}

/// Says of each swap, at once, that another process was first.
struct Stubborn;

impl Store for Stubborn {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        Ok(Loaded::new(vec![None; keys.len()]))
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        Ok(Swapped::conflict(vec![None; changes.len()]))
    }
}

#[tokio::test]
async fn store_that_answers_at_once_does_not_keep_the_thread() {
    let limiter = StoreLimiterBuilder::new().build(Stubborn).unwrap();
    let others = tokio::spawn(async {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    });
    let error = limiter.take(&[Charge::new(&hourly(10), &key("a"))]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Contended, "{error}");
    assert!(others.is_finished(), "tasks of the same thread went on meanwhile");
}

#[tokio::test(start_paused = true)]
async fn conflict_is_decided_again_at_once() {
    let (lab, policy) = (Lab::with(|lab| lab.trip = MS), hourly(10));
    let limiter = StoreLimiterBuilder::new().build(lab.clone()).unwrap();
    take(&limiter, &policy, "a").await;
    tokio::time::sleep(RESTED).await;
    lab.calls();
    lab.next(&[Fate::Overtaken; 5]);
    let began = tokio::time::Instant::now();
    take(&limiter, &policy, "a").await;
    // After a pause the values would be older, and another conflict more likely.
    assert_eq!((lab.calls(), began.elapsed()), ((0, 6), 6 * MS));
}

#[tokio::test(start_paused = true)]
async fn process_that_won_a_contended_key_lets_others_go_first() {
    let (lab, policy) = (Lab::with(|lab| lab.trip = MS), hourly(1_000));
    let limiter = StoreLimiterBuilder::new().build(lab.clone()).unwrap();
    let timed = async |name: &str| {
        let began = tokio::time::Instant::now();
        take(&limiter, &policy, name).await;
        began.elapsed()
    };
    take(&limiter, &policy, "a").await;
    take(&limiter, &policy, "b").await;
    let (mut waited, mut rests) = (Duration::ZERO, 0);
    for _ in 0..100 {
        tokio::time::sleep(RESTED).await;
        lab.next(&[Fate::Overtaken; 5]);
        take(&limiter, &policy, "a").await;
        let other = timed("b").await;
        assert_eq!(other, MS, "another key does not wait");
        waited += timed("a").await;
        // After a flight without a conflict it rests for the time of one swap, or not at all.
        let next = timed("a").await;
        assert!(next == MS || next == 2 * MS, "{next:?}");
        rests += u32::from(next > MS);
    }
    // At random between nothing and 6.25 ms, an eighth of the deadline, of which the check of the other key is one.
    assert!((150 * MS..500 * MS).contains(&waited), "{waited:?} in 100 checks");
    assert!((1..40).contains(&rests), "it rests after one of eight flights, and not after {rests} of 100");
    // A value that was old is no contention.
    tokio::time::sleep(RESTED).await;
    lab.next(&[Fate::Overtaken]);
    take(&limiter, &policy, "a").await;
    assert_eq!(timed("a").await, MS);
}

/// A swap that arrives a trip after the last one finds the value of the process that wrote meanwhile. Without rests, one
/// process decided all checks, and each check of the others failed.
#[tokio::test(start_paused = true)]
async fn each_process_gets_a_key_that_all_want_always() {
    for (trip_ms, deadline_ms, processes) in [(1, 50, 2), (16, 200, 2), (80, 2_000, 2), (80, 2_000, 4)] {
        let lab = Lab::with(|lab| lab.trip = trip_ms * MS);
        let policy = Policy::new("hourly", Quota::per_hour(1_000_000)).unwrap();
        let end = tokio::time::Instant::now() + 20_000 * MS;
        let mut callers = Vec::new();
        for process in 0..processes {
            let limiter = StoreLimiterBuilder::new().deadline(deadline_ms * MS).build(lab.clone()).unwrap();
            for _ in 0..4 {
                let (limiter, policy) = (limiter.clone(), policy.clone());
                callers.push(tokio::spawn(async move {
                    let (mut decided, mut failed) = (0, 0);
                    while tokio::time::Instant::now() < end {
                        match limiter.take(&[Charge::new(&policy, &key("a"))]).await {
                            Ok(_) => decided += 1,
                            Err(_) => failed += 1,
                        }
                        tokio::time::sleep(MS).await;
                    }
                    (process, decided, failed)
                }));
            }
        }
        let (mut decided_by, mut failed) = (vec![0; processes], 0);
        for caller in callers {
            let (process, its_decided, its_failed) = caller.await.unwrap();
            decided_by[process] += its_decided;
            failed += its_failed;
        }
        let decided: usize = decided_by.iter().sum();
        let what = format!("trips of {trip_ms} ms: {decided_by:?} checks were decided, and {failed} failed");
        assert!(decided_by.iter().all(|own| own * processes * 3 > decided), "a process was left behind: {what}");
        assert!(failed * 10 < decided, "{what}");
    }
}

/// Eight processes, each of which sends what its callers ask together.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rival_limiters_admit_exactly_the_quota() {
    let mut random = vec![Fate::Answered; 12];
    random.extend([Fate::AnswerLost, Fate::NotSent, Fate::LostThenOverwritten(1)]);
    let lab = Lab::with(|lab| lab.random = Mutex::new(random));
    let policy = hourly(300);
    let shared = Policy::new("shared", Quota::per_hour(300)).unwrap();
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let limiter = patient().max_denials(0).build(lab.clone()).unwrap();
        for number in 0..100 {
            let (limiter, policy, shared) = (limiter.clone(), policy.clone(), shared.clone());
            tasks.push(tokio::spawn(async move {
                let (own, all) = (key(&format!("key{}", number % 3)), key("all"));
                match limiter.take(&[Charge::new(&policy, &own), Charge::new(&shared, &all)]).await {
                    Ok(decision) => (u64::from(decision.is_allowed()), 0),
                    // Others wrote more often than a value remembers before the swap was sent again.
                    Err(error) => {
                        let kinds = [StoreErrorKind::Timeout, StoreErrorKind::Unavailable];
                        assert!(kinds.contains(&error.kind()), "{error}");
                        (0, 1)
                    }
                }
            }));
        }
    }
    let (mut admitted, mut unknown) = (0, 0);
    for task in tasks {
        let (allowed, failed) = task.await.unwrap();
        admitted += allowed;
        unknown += failed;
    }
    assert!(admitted <= 300 && admitted + unknown >= 300, "{admitted} admitted, and {unknown} unknown");
    let limiter = patient().build(lab).unwrap();
    let mut taken = 0;
    for number in 0..3 {
        taken += 300 - left(&limiter, &policy, &format!("key{number}")).await;
    }
    assert_eq!(taken, 300, "refused sets have taken nothing");
}
