//! Swaps of different keys that go to the store in one call.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::lab::{Fate, Lab};
use super::{RESTED, hourly, key, left, patient, take};
use crate::base::sync::lock;
use crate::event::StoreErrorKind;
use crate::limiter::store::{StoreError, StoreLimiter};
use crate::limiter::{Charge, Limiter};
use crate::policy::Policy;

const MS: Duration = Duration::from_millis(1);

/// The time of a round trip.
const TRIP: Duration = Duration::from_millis(10);

fn lab() -> Lab {
    Lab::with(|lab| (lab.trip, lab.joint) = (TRIP, Some(64)))
}

fn asks(limiter: &StoreLimiter<Lab>, policies: &[&Policy], name: &str) -> JoinHandle<Result<bool, StoreError>> {
    let (limiter, key) = (limiter.clone(), key(name));
    let policies: Vec<Policy> = policies.iter().map(|policy| (*policy).clone()).collect();
    tokio::spawn(async move {
        let charges: Vec<_> = policies.iter().map(|policy| Charge::new(policy, &key)).collect();
        limiter.take(&charges).await.map(|decision| decision.is_allowed())
    })
}

/// Takes a unit of each of these keys, all in one call, and returns the numbers of loads, swaps, and calls of several.
async fn take_together(limiter: &StoreLimiter<Lab>, lab: &Lab, policy: &Policy, names: &[&str]) -> (u64, u64, u64) {
    tokio::time::sleep(RESTED).await;
    // While the first one is under way, the others collect.
    let first = asks(limiter, &[policy], "first");
    tokio::time::sleep(MS).await;
    lab.calls();
    lab.0.joint_calls.store(0, Ordering::Relaxed);
    let others: Vec<_> = names.iter().map(|name| asks(limiter, &[policy], name)).collect();
    assert!(first.await.unwrap().unwrap());
    for other in others {
        assert!(other.await.unwrap().unwrap());
    }
    let (loads, swaps) = lab.calls();
    (loads, swaps, lab.0.joint_calls.load(Ordering::Relaxed))
}

#[tokio::test(start_paused = true)]
async fn swaps_of_different_keys_go_in_one_call() {
    let (lab, policy) = (lab(), hourly(10));
    let limiter = patient().build(lab.clone()).unwrap();
    take(&limiter, &policy, "first").await;
    let names = ["1", "2", "3", "4", "5", "2"];
    // No one knows the keys. A load costs less than a call of many swaps that are guesses.
    assert_eq!(take_together(&limiter, &lab, &policy, &names).await, (1, 5, 1));
    assert_eq!(take_together(&limiter, &lab, &policy, &names).await, (0, 5, 1), "now they are known");
    assert_eq!((left(&limiter, &policy, "1").await, left(&limiter, &policy, "2").await), (8, 6));
}

#[tokio::test(start_paused = true)]
async fn conflict_of_one_key_repeats_no_other_one() {
    let (lab, policy) = (lab(), hourly(10));
    let [limiter, other] = [(); 2].map(|()| patient().build(lab.clone()).unwrap());
    for name in ["first", "1", "2", "3"] {
        take(&limiter, &policy, name).await;
    }
    take(&other, &policy, "2").await;
    assert_eq!(take_together(&limiter, &lab, &policy, &["1", "2", "3"]).await, (0, 4, 1));
    for (name, expected) in [("1", 8), ("2", 7), ("3", 8)] {
        assert_eq!(left(&limiter, &policy, name).await, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn swap_that_was_skipped_is_sent_alone() {
    let (lab, policy) = (lab(), hourly(10));
    let limiter = patient().build(lab.clone()).unwrap();
    for name in ["first", "1", "2", "3"] {
        take(&limiter, &policy, name).await;
    }
    *lock(&lab.0.skipped) = lock(&lab.0.values).keys().filter(|key| !key.contains("first")).cloned().collect();
    assert_eq!(take_together(&limiter, &lab, &policy, &["1", "2", "3"]).await, (0, 3, 1));
    for name in ["1", "2", "3"] {
        assert_eq!(left(&limiter, &policy, name).await, 8);
    }
}

/// Its key has more earlier versions than a value names, so an answer that was lost could not be told from it.
#[tokio::test(start_paused = true)]
async fn swap_that_was_skipped_has_lost_no_answer() {
    let (lab, policy) = (lab(), hourly(100));
    let [limiter, other] = [(); 2].map(|()| patient().build(lab.clone()).unwrap());
    for name in ["first", "1", "2", "3"] {
        take(&limiter, &policy, name).await;
    }
    for _ in 0..6 {
        take(&other, &policy, "2").await;
    }
    *lock(&lab.0.skipped) = lock(&lab.0.values).keys().filter(|key| !key.contains("first")).cloned().collect();
    take_together(&limiter, &lab, &policy, &["1", "2", "3"]).await;
    for (name, expected) in [("1", 98), ("2", 92), ("3", 98)] {
        assert_eq!(left(&limiter, &policy, name).await, expected);
    }
}

/// Each swap is found out about by itself.
#[tokio::test(start_paused = true)]
async fn joint_call_that_was_cut_charges_each_key_once() {
    let (lab, policy) = (lab(), hourly(100));
    let limiter = patient().build(lab.clone()).unwrap();
    let names = ["1", "2", "3", "4"];
    for name in ["first"].iter().chain(&names) {
        take(&limiter, &policy, name).await;
    }
    let fates = [Fate::NotSent, Fate::AnswerLost, Fate::LostThenOverwritten(2), Fate::Answered];
    for round in 0..4 {
        let first = asks(&limiter, &[&policy], "first");
        tokio::time::sleep(MS).await;
        let mut fates = fates;
        fates.rotate_left(round);
        lab.next(&fates);
        let others: Vec<_> = names.iter().map(|name| asks(&limiter, &[&policy], name)).collect();
        assert!(first.await.unwrap().unwrap());
        for other in others {
            assert!(other.await.unwrap().unwrap());
        }
        for name in names {
            assert_eq!(left(&limiter, &policy, name).await, 98 - round as u64, "{name} in round {round}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn joint_call_that_fails_is_one_failure_of_the_store() {
    let (lab, policy) = (lab(), hourly(100));
    let limiter = patient().build(lab.clone()).unwrap();
    let names: Vec<String> = (0..20).map(|number| number.to_string()).collect();
    for name in std::iter::once("first").chain(names.iter().map(String::as_str)) {
        take(&limiter, &policy, name).await;
    }
    let first = asks(&limiter, &[&policy], "first");
    tokio::time::sleep(MS).await;
    lab.next(&[Fate::NotSent; 80]); // each swap as often as it is sent
    let others: Vec<_> = names.iter().map(|name| asks(&limiter, &[&policy], name)).collect();
    assert!(first.await.unwrap().unwrap());
    for other in others {
        assert_eq!(other.await.unwrap().unwrap_err().kind(), StoreErrorKind::Unavailable);
    }
    assert!(take(&limiter, &policy, "1").await.is_allowed(), "the store is not believed dead");
}

/// Requests that share keys are one swap, and are decided in their order.
#[tokio::test(start_paused = true)]
async fn requests_that_are_joined_by_keys_are_one_swap_of_the_call() {
    let (lab, own) = (lab(), hourly(2));
    let shared = Policy::new("shared", *hourly(3).quota()).unwrap();
    let limiter = patient().max_denials(0).build(lab.clone()).unwrap();
    take(&limiter, &own, "first").await;
    let first = asks(&limiter, &[&own], "first");
    tokio::time::sleep(MS).await;
    let mut others = Vec::new();
    for name in ["1", "2", "1", "3", "1", "2"] {
        let policies = [&own, &shared];
        others.push(asks(&limiter, if name == "3" { &policies[..1] } else { &policies }, name));
        tokio::task::yield_now().await;
    }
    assert!(first.await.unwrap().unwrap());
    let mut allowed = Vec::new();
    for other in others {
        allowed.push(other.await.unwrap().unwrap());
    }
    assert_eq!(allowed, [true, true, true, true, false, true]);
    assert_eq!(left(&limiter, &shared, "2").await, 1);
    let keys: Vec<Arc<str>> = lock(&lab.0.values).keys().cloned().collect();
    assert_eq!(keys.len(), 6, "{keys:?}");
}
