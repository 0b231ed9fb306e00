//! Requests in flight that a store counts.

use std::time::Duration;

use proptest::prelude::*;
use tokio::time::{Instant, sleep};

use super::lab::{Fate, Lab};
use super::{LONG, hourly, key, left, patient, take};
use crate::base::sync::lock;
use crate::clock::ManualClock;
use crate::limiter::store::{StoreLimiter, StoreLimiterBuilder};
use crate::limiter::tests::hold_in_line;
use crate::limiter::{Charge, Effect, Limiter, Place, Refund};
use crate::policy::Policy;
use crate::quota::Quota;

/// The time after which places lapse. It is longer than a busy machine stops a process.
const LAPSE: Duration = Duration::from_secs(30);

fn lasting() -> StoreLimiterBuilder {
    patient().max_denials(0).places_lapse_after(LAPSE)
}

fn places(limit: u64) -> Policy {
    Policy::new("places", Quota::concurrent(limit)).unwrap()
}

async fn hold(limiter: &StoreLimiter<Lab>, policy: &Policy, name: &str) -> Option<Place> {
    Place::take(limiter, policy, &key(name), 1).await.expect("the store answers").ok()
}

async fn eventually_free(limiter: &StoreLimiter<Lab>, policy: &Policy, name: &str, units: u64) {
    let began = Instant::now();
    while left(limiter, policy, name).await != units {
        assert!(began.elapsed() < LONG, "{} are free, not {units}", left(limiter, policy, name).await);
        sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn places_are_shared_by_processes_and_return_when_dropped() {
    let lab = Lab::default();
    let [one, other] = [(); 2].map(|()| lasting().build(lab.clone()).unwrap());
    let policy = places(3);
    let mut held =
        vec![hold(&one, &policy, "a").await, hold(&other, &policy, "a").await, hold(&one, &policy, "a").await];
    assert!(held.iter().all(Option::is_some) && hold(&other, &policy, "a").await.is_none());
    assert!(hold(&other, &policy, "b").await.is_some(), "another key");
    held.pop();
    eventually_free(&other, &policy, "a", 1).await;
    drop(held);
    eventually_free(&one, &policy, "a", 3).await;
    eventually_free(&one, &policy, "b", 3).await;
    assert!(lock(&lab.0.values).is_empty(), "nothing is held, and nothing stays");
}

#[tokio::test]
async fn places_and_rates_are_all_or_nothing() {
    let lab = Lab::default();
    let limiter = lasting().build(lab.clone()).unwrap();
    let (few, rate) = (places(1), hourly(3));
    let key = key("a");
    let both = [Charge::new(&few, &key), Charge::new(&rate, &key)];
    let mut taken = limiter.take(&both).await.unwrap();
    assert!(taken.is_allowed());
    assert!(!limiter.take(&both).await.unwrap().is_allowed());
    assert_eq!(left(&limiter, &rate, "a").await, 2, "the denied set took nothing of the rate");
    let receipt = taken.take_receipts().remove(0).unwrap();
    limiter.refund(vec![Refund::new(few.clone(), key.clone(), receipt)]).await.unwrap();
    assert!(limiter.take(&[Charge::new(&rate, &key).cost(2)]).await.unwrap().is_allowed());
    assert!(!limiter.take(&both).await.unwrap().is_allowed());
    assert_eq!(left(&limiter, &few, "a").await, 1, "the denied set took no place");
}

/// Tokio's time is paused, so the process that ended renews nothing.
#[tokio::test(start_paused = true)]
async fn place_of_a_process_that_ended_is_free_after_its_lapse() {
    let (lab, clock) = (Lab::default(), ManualClock::new());
    let process = || lasting().clock(clock.clone()).build(lab.clone()).unwrap();
    let (killed, other, policy) = (process(), process(), places(1));
    std::mem::forget(hold(&killed, &policy, "a").await);
    clock.advance(LAPSE - Duration::from_millis(1));
    assert!(hold(&other, &policy, "a").await.is_none());
    clock.advance(Duration::from_millis(1));
    assert!(hold(&other, &policy, "a").await.is_some());
}

#[tokio::test]
async fn reset_frees_places_and_late_returns_free_nothing() {
    let lab = Lab::default();
    let (limiter, policy) = (lasting().build(lab).unwrap(), places(2));
    let old = [hold(&limiter, &policy, "a").await, hold(&limiter, &policy, "a").await];
    limiter.reset(&policy, &key("a")).await.unwrap();
    let new = hold(&limiter, &policy, "a").await;
    assert!(new.is_some());
    drop(old);
    sleep(Duration::from_millis(20)).await;
    assert_eq!(left(&limiter, &policy, "a").await, 1);
    drop(new);
    eventually_free(&limiter, &policy, "a", 2).await;
}

/// Each of the keys was reset, and an answer names one of them.
#[tokio::test]
async fn keys_that_were_reset_together_are_free_at_once() {
    for count in [1, 2, 3, 7] {
        let lab = Lab::default();
        let [limiter, other] = [(); 2].map(|()| lasting().build(lab.clone()).unwrap());
        let policy = |at| Policy::new(format!("places-{at}"), Quota::concurrent(1)).unwrap();
        let (policies, key): (Vec<Policy>, _) = ((0..count).map(policy).collect(), key("a"));
        let charges: Vec<Charge<'_>> = policies.iter().map(|policy| Charge::new(policy, &key)).collect();
        for resets in [&other, &limiter, &other] {
            assert!(limiter.take(&charges).await.unwrap().is_allowed(), "{count}");
            assert!(!limiter.take(&charges).await.unwrap().is_allowed(), "{count}");
            for policy in &policies {
                resets.reset(policy, &key).await.unwrap();
            }
        }
        assert!(
            limiter.take(&charges).await.unwrap().is_allowed() && !other.take(&charges).await.unwrap().is_allowed()
        );
    }
}

/// The first call of a process that held something is refused, because it does not know of the reset.
#[tokio::test]
async fn charge_is_settled_although_its_key_was_reset() {
    let lab = Lab::default();
    let [limiter, other] = [(); 2].map(|()| lasting().build(lab.clone()).unwrap());
    let (policy, rate, key) = (places(3), hourly(3), key("a"));
    let _held = hold(&limiter, &policy, "a").await;
    other.reset(&policy, &key).await.unwrap();
    let forced = [&policy, &rate].map(|policy| Charge::new(policy, &key).cost(2).effect(Effect::Force));
    assert!(limiter.settle(&forced).await.unwrap().is_allowed());
    assert_eq!((left(&other, &policy, "a").await, left(&other, &rate, "a").await), (1, 1));
    // The caller of this charge has gone, so its place is returned.
    other.reset(&policy, &key).await.unwrap();
    drop(limiter.settle(&forced[..1]));
    eventually_free(&other, &policy, "a", 3).await;
}

#[tokio::test]
async fn closed_limiter_returns_its_places() {
    let lab = Lab::default();
    let [closed, other] = [(); 2].map(|()| lasting().build(lab.clone()).unwrap());
    let policy = places(1);
    let place = hold(&closed, &policy, "a").await;
    assert!(place.is_some());
    closed.close();
    eventually_free(&other, &policy, "a", 1).await;
    assert!(Place::take(&closed, &policy, &key("a"), 1).await.is_err());
}

#[tokio::test]
async fn place_of_another_process_is_waited_for_in_order() {
    let lab = Lab::default();
    let [one, other] = [(); 2].map(|()| lasting().build(lab.clone()).unwrap());
    let policy = Policy::new("places", Quota::concurrent(1).max_wait(LONG).unwrap()).unwrap();
    let place = hold(&one, &policy, "a").await;
    let wait = |limiter: &StoreLimiter<Lab>| {
        let (limiter, policy) = (limiter.clone(), policy.clone());
        tokio::spawn(async move { hold_in_line(&limiter, &policy, &key("a"), 1).await.unwrap().unwrap() })
    };
    let first = wait(&other);
    // It is in the line of the store once it has asked.
    let in_line = async || take(&one, &policy, "a").await.charges()[0].remaining() == 0;
    sleep(Duration::from_millis(50)).await;
    let second = wait(&one);
    sleep(Duration::from_millis(50)).await;
    drop(place);
    let place = first.await.unwrap();
    assert!(!second.is_finished() && in_line().await);
    drop(place);
    drop(second.await.unwrap());
    eventually_free(&one, &policy, "a", 1).await;
}

/// The caller has gone when the request is the next one, and two flights that it was joined to are under way.
#[tokio::test(start_paused = true)]
async fn call_that_was_never_sent_leaves_no_doubt() {
    let lab = Lab::with(|lab| lab.trip = Duration::from_millis(20));
    let (limiter, policy) = (lasting().build(lab.clone()).unwrap(), places(3));
    let [one, other] = ["one", "other"].map(|name| Policy::new(name, *hourly(100).quota()).unwrap());
    take(&limiter, &one, "warm").await;
    let asks = |policies: Vec<Policy>| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let key = key("a");
            let charges: Vec<_> = policies.iter().map(|policy| Charge::new(policy, &key)).collect();
            limiter.take(&charges).await.unwrap()
        })
    };
    let mut calls = vec![asks(vec![one.clone()])];
    sleep(Duration::from_millis(10)).await;
    calls.push(asks(vec![other.clone()]));
    sleep(Duration::from_millis(1)).await;
    let gone = asks(vec![policy.clone(), one.clone()]);
    sleep(Duration::from_millis(1)).await;
    calls.push(asks(vec![one, other]));
    sleep(Duration::from_millis(1)).await;
    gone.abort();
    for call in calls {
        assert!(call.await.unwrap().is_allowed());
    }
    drop(hold(&limiter, &policy, "a").await.unwrap());
    eventually_free(&limiter, &policy, "a", 3).await;
    let rows = lock(&lab.0.values).keys().filter(|key| key.ends_with(":p6:places")).count();
    assert_eq!(rows, 0, "nothing is held, and nothing stays");
}

#[tokio::test]
async fn more_processes_than_rows_are_denied() {
    let lab = Lab::default();
    let policy = places(1_000);
    let mut held = Vec::new();
    for number in 0..crate::limiter::remote::HOLDERS_MAX + 1 {
        let limiter = lasting().build(lab.clone()).unwrap();
        let place = hold(&limiter, &policy, "a").await;
        assert_eq!(place.is_some(), number < crate::limiter::remote::HOLDERS_MAX, "{number}");
        held.push((limiter, place));
    }
    let (limiter, _) = held.last().unwrap();
    let key = key("a");
    let forced = limiter.take(&[Charge::new(&policy, &key).effect(Effect::Force)]).await.unwrap();
    assert!(forced.is_allowed(), "a forced charge passes, and takes nothing");
    drop(held.remove(0));
    eventually_free(&held[0].0, &policy, "a", 1_000 - crate::limiter::remote::HOLDERS_MAX as u64 + 1).await;
}

/// Answers are lost, swaps come late, and others write at the same time.
#[tokio::test]
async fn lost_and_late_answers_lose_no_place() {
    const LIMIT: u64 = 4;
    let mut fates = vec![Fate::Answered; 6];
    fates.extend([Fate::AnswerLost, Fate::NotSent, Fate::Overtaken, Fate::LostThenOverwritten(2)]);
    fates.extend([Fate::LostThenOverwritten(9), Fate::Late(Duration::from_millis(1))]);
    let lab = Lab::with(|lab| lab.random = crate::base::sync::Mutex::new(fates));
    let policy = places(LIMIT);
    let held = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let callers = (0..6_u64).map(|number| {
        let (limiter, policy, held) = (lasting().build(lab.clone()).unwrap(), policy.clone(), held.clone());
        tokio::spawn(async move {
            for round in 0..200_u64 {
                let Ok(Ok(place)) = Place::take(&limiter, &policy, &key("a"), 1).await else { continue };
                let now = held.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
                assert!(now <= LIMIT, "{now} of {LIMIT} are held");
                if (round + number) % 3 == 0 {
                    tokio::task::yield_now().await;
                }
                held.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                drop(place);
            }
            limiter
        })
    });
    let mut limiters = Vec::new();
    for caller in callers.collect::<Vec<_>>() {
        limiters.push(caller.await.unwrap());
    }
    lock(&lab.0.random).clear();
    eventually_free(&limiters[0], &policy, "a", LIMIT).await;
}

proptest! {
    #![proptest_config(crate::base::sampling::config(200))]

    /// A value whose rows were damaged is foreign, or has rows that could be. It panics in no case.
    #[test]
    fn damaged_rows_are_read_or_refused(at in 0..400_usize, byte: u8, cut in 0..400_usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let lab = Lab::default();
            let policy = places(3);
            let [one, other] = [(); 2].map(|()| lasting().build(lab.clone()).unwrap());
            let _held = (hold(&one, &policy, "a").await, hold(&other, &policy, "a").await);
            for value in lock(&lab.0.values).values_mut() {
                let mut bytes = value.bytes.to_vec();
                let length = bytes.len();
                bytes[at % length] = byte;
                bytes.truncate(length - cut % length * usize::from(byte % 2 == 0));
                value.bytes = bytes.into();
            }
            let third = lasting().build(lab.clone()).unwrap();
            let _ = Place::take(&third, &policy, &key("a"), 1).await;
            third.reset(&policy, &key("a")).await.unwrap();
            assert!(Place::take(&third, &policy, &key("a"), 1).await.unwrap().is_ok(), "a reset key has room");
        });
    }
}
