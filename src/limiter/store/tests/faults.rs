//! Stores that lose answers, answer late, are overtaken, stand still or step their clocks.

use std::sync::Arc;
use std::time::Duration;

use super::lab::{Fate, Lab};
use super::{RESTED, StoreLimiterBuilder, hourly, key, left, patient, take};
use crate::base::sync::{Mutex, lock};
use crate::base::time::Timestamp;
use crate::clock::{Clock, ManualClock};
use crate::event::{LimiterEvent, StoreErrorKind};
use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped};
use crate::limiter::{Charge, Effect, Limiter, Refund};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

const MS: Duration = Duration::from_millis(1);

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<LimiterEvent>>>);

impl Observer for Seen {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        lock(&self.0).push(event.clone());
    }
}

#[tokio::test]
async fn check_is_one_round_trip_when_the_guess_is_right() {
    let (lab, policy) = (Lab::default(), hourly(10));
    let (one, other) = (patient().build(lab.clone()).unwrap(), patient().build(lab.clone()).unwrap());
    take(&one, &policy, "warm").await; // the first answer says whether the store reports its time
    take(&other, &policy, "warm").await;
    lab.calls();
    for _ in 0..3 {
        take(&one, &policy, "a").await;
        assert_eq!(lab.calls(), (0, 1));
    }
    take(&other, &policy, "a").await;
    assert_eq!(lab.calls(), (0, 2), "another process was there first");
    assert_eq!(left(&one, &policy, "a").await, 6);
    assert_eq!(lab.calls(), (1, 0), "a look is a load");
}

#[tokio::test]
async fn charge_whose_answer_was_lost_is_taken_once() {
    for fates in [
        &[Fate::AnswerLost][..],
        &[Fate::NotSent],
        &[Fate::NotSent, Fate::NotSent],
        &[Fate::AnswerLost, Fate::AnswerLost],
        &[Fate::LostThenOverwritten(1)],
        &[Fate::LostThenOverwritten(4)],
        &[Fate::NotSent, Fate::Overtaken],
        &[Fate::NotSent, Fate::LostThenOverwritten(2)],
        &[Fate::Late(Duration::ZERO)],
    ] {
        for before in [0, 1, 3] {
            let (lab, policy) = (Lab::default(), hourly(10));
            let limiter = patient().build(lab.clone()).unwrap();
            take(&limiter, &policy, "warm").await;
            for _ in 0..before {
                take(&limiter, &policy, "a").await;
            }
            lab.next(fates);
            assert!(take(&limiter, &policy, "a").await.is_allowed());
            lab.next(&[]);
            assert_eq!(left(&limiter, &policy, "a").await, 9 - before, "{fates:?} after {before}");
        }
    }
}

#[tokio::test]
async fn lost_answer_that_nothing_explains_is_a_timeout() {
    let (lab, policy) = (Lab::default(), hourly(10));
    let limiter = patient().build(lab.clone()).unwrap();
    take(&limiter, &policy, "a").await;
    lab.next(&[Fate::LostThenOverwritten(6)]);
    let error = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error}");
    assert_eq!(left(&limiter, &policy, "a").await, 8, "nothing is refunded that may not have been taken");
}

#[tokio::test]
async fn removal_whose_answer_was_lost_takes_nothing_from_others() {
    let policy = Policy::new("window", Quota::fixed_window(10, Duration::from_secs(86_400)).unwrap()).unwrap();
    let key = key("a");
    for is_refund in [true, false] {
        for fates in [&[Fate::LostThenWrittenAnew][..], &[Fate::NotSent, Fate::LostThenWrittenAnew]] {
            let lab = Lab::default();
            let limiter = patient().build(lab.clone()).unwrap();
            let mut decision = take(&limiter, &policy, "a").await;
            let receipt = decision.take_receipts().remove(0).unwrap();
            lab.next(fates);
            if is_refund {
                limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await.unwrap();
            } else {
                limiter.reset(&policy, &key).await.unwrap();
            }
            assert_eq!(left(&limiter, &policy, "a").await, 9, "another process has taken a unit since");
        }
    }
}

#[tokio::test]
async fn set_is_decided_by_all_of_its_keys_at_once() {
    let (lab, first, second) = (Lab::default(), hourly(10), Policy::new("second", Quota::per_hour(2)).unwrap());
    let limiter = patient().build(lab.clone()).unwrap();
    let key = key("a");
    let set = [Charge::new(&first, &key), Charge::new(&second, &key)];
    for fates in [&[Fate::Overtaken][..], &[Fate::AnswerLost]] {
        lab.next(fates);
        assert!(limiter.take(&set).await.unwrap().is_allowed());
    }
    lab.next(&[Fate::Overtaken, Fate::Overtaken]);
    assert!(!limiter.take(&set).await.unwrap().is_allowed());
    assert_eq!(left(&limiter, &first, "a").await, 8);
    lab.calls();
    assert!(!limiter.take(&set).await.unwrap().is_allowed());
    assert_eq!(lab.calls(), (0, 0), "the denial is remembered");
}

/// A set that passes because a block is open must not pass once another process has closed it.
#[tokio::test]
async fn block_that_closes_meanwhile_refuses_the_set() {
    let (lab, policy) = (Lab::default(), hourly(10));
    let block = Policy::new("block", Quota::block(1, super::LONG, Duration::from_secs(3_600)).unwrap()).unwrap();
    let [one, other] = [1, 2].map(|_| patient().max_denials(0).build(lab.clone()).unwrap());
    let key = key("a");
    let set = [Charge::new(&policy, &key), Charge::new(&block, &key).effect(Effect::OnRefusal { of: 1 })];
    assert!(one.take(&set).await.unwrap().is_allowed());
    // The other process knows an open block. A strike closes it.
    assert!(other.take(&set).await.unwrap().is_allowed());
    for _ in 0..2 {
        one.settle(&[Charge::new(&block, &key).effect(Effect::Force)]).await.unwrap();
    }
    assert!(!other.take(&set).await.unwrap().is_allowed());
    assert_eq!(left(&other, &policy, "a").await, 8);
}

#[tokio::test(start_paused = true)]
async fn stalled_key_delays_no_other_key() {
    let (lab, policy) = (Lab::with(|lab| lab.trip = MS), hourly(10));
    let limiter = StoreLimiterBuilder::new().build(lab.clone()).unwrap();
    take(&limiter, &policy, "warm").await;
    lab.next(&[Fate::Silent]);
    let stalled = tokio::spawn({
        let (limiter, policy) = (limiter.clone(), policy.clone());
        async move { limiter.take(&[Charge::new(&policy, &key("stalled"))]).await }
    });
    tokio::time::sleep(MS).await;
    lab.next(&[]);
    let began = tokio::time::Instant::now();
    take(&limiter, &policy, "other").await;
    assert!(began.elapsed() <= 2 * MS);
    assert_eq!(stalled.await.unwrap().unwrap_err().kind(), StoreErrorKind::Timeout);
    assert!(began.elapsed() <= 60 * MS, "its next check does not wait longer");
    assert!(take(&limiter, &policy, "stalled").await.is_allowed());
    // The last one was a conflict with the stalled one.
    assert_eq!(lab.calls(), (1, 5), "nothing is sent again because time passes");
}

/// It is sent once, and what it charged comes back. The store is there, so it is not believed dead.
#[tokio::test(start_paused = true)]
async fn check_whose_answer_is_late_fails_and_is_refunded() {
    let (lab, policy, seen) = (Lab::default(), hourly(100), Seen::default());
    let limiter = StoreLimiterBuilder::new().max_denials(0).observer(seen.clone()).build(lab.clone()).unwrap();
    take(&limiter, &policy, "a").await;
    lab.calls();
    for number in 1..=20 {
        lab.next(&[Fate::Slow(120 * MS)]);
        let began = tokio::time::Instant::now();
        let error = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
        assert!(error.kind() == StoreErrorKind::Timeout && began.elapsed() <= 60 * MS, "{error}");
        assert_eq!(lab.calls(), (0, 1), "number {number}");
        tokio::time::sleep(100 * MS).await;
        assert_eq!((left(&limiter, &policy, "a").await, limiter.waiting()), (99, 0), "number {number}");
        lab.calls();
    }
    assert!(!lock(&seen.0).iter().any(|event| matches!(event, LimiterEvent::StoreDown { .. })));
}

/// Not one call is in time. The limiter says so each time, and sends each check once.
#[tokio::test(start_paused = true)]
async fn store_that_is_always_late_is_not_believed_dead() {
    for late in [60 * MS, 400 * MS, 2_000 * MS] {
        let (lab, policy, seen) = (Lab::default(), hourly(1_000), Seen::default());
        let limiter = StoreLimiterBuilder::new().observer(seen.clone()).build(lab.clone()).unwrap();
        take(&limiter, &policy, "warm").await;
        lab.next(&[Fate::Slow(late)]);
        limiter.take(&[Charge::new(&policy, &key("first"))]).await.unwrap_err();
        tokio::time::sleep(late).await;
        *lock(&lab.0.random) = vec![Fate::Slow(late)];
        let calls = (0..200).map(|number| {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            tokio::spawn(async move {
                tokio::time::sleep(11 * MS * number).await;
                limiter.take(&[Charge::new(&policy, &key(&number.to_string()))]).await.map(drop)
            })
        });
        for call in calls.collect::<Vec<_>>() {
            let kind = call.await.unwrap().unwrap_err().kind();
            assert!(matches!(kind, StoreErrorKind::Timeout | StoreErrorKind::Overloaded), "{kind}");
        }
        assert!(!lock(&seen.0).iter().any(|event| matches!(event, LimiterEvent::StoreDown { .. })), "{late:?}");
    }
}

/// Each of the later requests joins the group to a flight that began after the first one came.
#[tokio::test(start_paused = true)]
async fn request_waits_for_no_flight_with_other_keys_that_began_later() {
    let (own, global) = (hourly(500), Policy::new("global", *hourly(500).quota()).unwrap());
    let limiter = patient().build(Lab::with(|lab| lab.trip = 10 * MS)).unwrap();
    take(&limiter, &own, "warm").await;
    let asks = |policies: Vec<Policy>, name: String| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let keys = [key("all"), key(&name)];
            let key = |policy: &Policy| &keys[usize::from(policy.name() != "global")];
            let charges: Vec<_> = policies.iter().map(|policy| Charge::new(policy, key(policy))).collect();
            let began = tokio::time::Instant::now();
            assert!(limiter.take(&charges).await.unwrap().is_allowed());
            began.elapsed()
        })
    };
    let flies = asks(vec![global.clone()], "none".to_owned());
    tokio::time::sleep(MS).await;
    let waits = asks(vec![global.clone()], "none".to_owned());
    let mut joint = Vec::new();
    for number in 0..100 {
        tokio::time::sleep(MS).await;
        joint.push(asks(vec![own.clone()], number.to_string()));
        tokio::time::sleep(MS).await;
        joint.push(asks(vec![own.clone(), global.clone()], number.to_string()));
        tokio::time::sleep(6 * MS).await;
        let keys = limiter.0.backend().keys_under_way();
        assert!(keys < 10, "{keys} keys are remembered after {number} requests");
    }
    flies.await.unwrap();
    let waited = waits.await.unwrap();
    // A key rests for one trip after some flights.
    assert!(waited <= 31 * MS, "{waited:?}");
    for call in joint {
        let waited = call.await.unwrap();
        assert!(waited <= 61 * MS, "{waited:?}");
    }
    tokio::time::sleep(RESTED).await;
    assert_eq!(limiter.0.backend().keys_under_way(), 0);
}

#[tokio::test(start_paused = true)]
async fn silent_store_fails_within_the_deadline_and_then_at_once() {
    let (lab, policy, seen) = (Lab::default(), hourly(10), Seen::default());
    let limiter = StoreLimiterBuilder::new().observer(seen.clone()).build(lab.clone()).unwrap();
    *lock(&lab.0.random) = vec![Fate::Silent];
    for _ in 0..5 {
        let began = tokio::time::Instant::now();
        let error = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
        let kinds = [StoreErrorKind::Timeout, StoreErrorKind::Unavailable];
        assert!(kinds.contains(&error.kind()) && began.elapsed() <= 70 * MS, "{error}");
    }
    let began = tokio::time::Instant::now();
    let error = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
    assert_eq!((error.kind(), began.elapsed()), (StoreErrorKind::Unavailable, Duration::ZERO));
    let is_down = |event: &LimiterEvent| matches!(event, LimiterEvent::StoreDown { server, .. } if server == "the lab");
    assert_eq!(lock(&seen.0).iter().filter(|event| is_down(event)).count(), 1);
    lock(&lab.0.random).clear();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(take(&limiter, &policy, "b").await.is_allowed());
    assert!(lock(&seen.0).iter().any(|event| matches!(event, LimiterEvent::StoreUp { .. })));
}

/// A store that fails, and then panics, as long as it is asked to.
#[derive(Clone, Default)]
struct Broken(Arc<Mutex<Option<&'static str>>>);

impl Broken {
    fn fail(&self) -> Result<(), StoreError> {
        match *lock(&self.0) {
            None => Ok(()),
            Some("panic") => panic!("the store has a defect"),
            Some(message) => Err(StoreError::new(StoreErrorKind::Unavailable, message)),
        }
    }
}

impl Store for Broken {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        self.fail()?;
        Ok(Loaded::new(vec![None; keys.len()]))
    }

    async fn swap(&self, _changes: &[Change]) -> Result<Swapped, StoreError> {
        self.fail()?;
        Ok(Swapped::done())
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_panics_fails_the_check_and_is_asked_again() {
    let (store, policy, key) = (Broken::default(), hourly(10), key("a"));
    let limiter = StoreLimiterBuilder::new().build(store.clone()).unwrap();
    let charge = [Charge::new(&policy, &key)];
    *lock(&store.0) = Some("panic");
    for _ in 0..3 {
        assert!(limiter.take(&charge).await.is_err());
        assert_eq!(limiter.waiting(), 0);
    }
    *lock(&store.0) = Some("it is away");
    for _ in 0..5 {
        assert!(limiter.take(&charge).await.is_err());
    }
    // Now it is asked whether it is back.
    *lock(&store.0) = Some("panic");
    tokio::time::sleep(Duration::from_secs(3)).await;
    *lock(&store.0) = None;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(limiter.take(&charge).await.unwrap().is_allowed());
}

#[tokio::test]
async fn charge_that_nobody_waits_for_is_refunded() {
    let (lab, policy) = (Lab::with(|lab| lab.trip = MS), hourly(10));
    let limiter = patient().build(lab).unwrap();
    take(&limiter, &policy, "a").await;
    let (owned, charged) = (limiter.clone(), policy.clone());
    let call = tokio::spawn(async move { owned.take(&[Charge::new(&charged, &key("a"))]).await });
    while limiter.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    while limiter.waiting() > 0 {
        tokio::time::sleep(MS).await;
    }
    assert_eq!(left(&limiter, &policy, "a").await, 9);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_callers_of_one_key_go_together() {
    // A busy machine takes longer than a millisecond to begin all of them.
    let (lab, policy) = (Lab::with(|lab| lab.trip = 10 * MS), hourly(1_000));
    let limiter = patient().max_in_flight(20_000).max_denials(0).build(lab.clone()).unwrap();
    take(&limiter, &policy, "warm").await;
    lab.calls();
    let calls: Vec<_> = (0..10_000)
        .map(|_| {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            tokio::spawn(async move { take(&limiter, &policy, "hot").await.is_allowed() })
        })
        .collect();
    let mut admitted = 0;
    for call in calls {
        admitted += u64::from(call.await.unwrap());
    }
    let (loads, swaps) = lab.calls();
    assert_eq!(admitted, 1_000);
    assert!(loads + swaps < 1_000, "{loads} loads and {swaps} swaps");
    assert_eq!(limiter.waiting(), 0);
}

#[tokio::test]
async fn store_whose_clock_steps_is_followed() {
    let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
    let lab = Lab::with(|lab| lab.clock = Some(clock.clone()));
    let limiter = patient().build(lab.clone()).unwrap();
    let policy = Policy::new("window", Quota::fixed_window(3, Duration::from_secs(60)).unwrap()).unwrap();
    for _ in 0..3 {
        assert!(take(&limiter, &policy, "a").await.is_allowed());
    }
    clock.advance(Duration::from_secs(60));
    lab.calls();
    assert!(limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap().is_allowed());
    assert!(lab.calls().1 <= 3, "made, undone, and made again");
    assert_eq!(left(&limiter, &policy, "a").await, 2, "charged once, in the new window");
    // Two hours back: the window is moved back, and nothing is forgotten.
    clock.set(Timestamp::from_micros(clock.now().as_micros() - 7_200_000_000));
    assert!(take(&limiter, &policy, "a").await.is_allowed());
    assert_eq!(left(&limiter, &policy, "a").await, 1);
}

/// Its clock is followed to its own resolution, and each check is made again at most once.
#[tokio::test]
async fn store_that_reports_whole_seconds_admits_the_quota() {
    const SECOND: u64 = 1_000_000;
    let (reported, own) = (ManualClock::new(), ManualClock::new());
    let (lab, policy) = (Lab::with(|lab| lab.clock = Some(reported.clone())), hourly(20));
    let limiter = patient().max_denials(0).own_clock(own.clone()).build(lab.clone()).unwrap();
    let mut admitted = 0;
    for step in 0..40 {
        let us = 1_800_000_000 * SECOND + step * 370_000;
        own.set(Timestamp::from_micros(us));
        reported.set(Timestamp::from_micros(us / SECOND * SECOND));
        lab.calls();
        admitted += u64::from(take(&limiter, &policy, "a").await.is_allowed());
        let (loads, swaps) = lab.calls();
        assert!(loads <= 1 && swaps <= 3, "{loads} loads and {swaps} swaps");
    }
    assert_eq!(admitted, 20);
}

#[tokio::test(start_paused = true)]
async fn round_trip_of_a_third_of_the_deadline_is_in_time() {
    let (lab, policy) = (Lab::with(|lab| lab.trip = 16 * MS), hourly(10));
    let limiter = StoreLimiterBuilder::new().deadline(50 * MS).build(lab.clone()).unwrap();
    for taken in 1..=3 {
        // At first its time is not known, and later another process was first.
        lab.next(if taken == 1 { &[] } else { &[Fate::Overtaken] });
        tokio::time::sleep(RESTED).await;
        let began = tokio::time::Instant::now();
        assert!(take(&limiter, &policy, "a").await.is_allowed());
        assert_eq!(began.elapsed(), 32 * MS);
    }
}

/// Simulated seed 3614: the units were free again, and the request was admitted.
#[tokio::test]
async fn charge_whose_undoing_has_no_answer_is_made_again_or_fails() {
    // The state before is written again, or removed if the key had none.
    for (name, fate, is_known) in
        [("a", Fate::AnswerLost, true), ("b", Fate::AnswerLost, true), ("a", Fate::LostThenOverwritten(5), false)]
    {
        let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
        let lab = Lab::with(|lab| lab.clock = Some(clock.clone()));
        let limiter = patient().build(lab.clone()).unwrap();
        let policy = Policy::new("window", Quota::fixed_window(3, Duration::from_secs(60)).unwrap()).unwrap();
        take(&limiter, &policy, "a").await;
        clock.advance(Duration::from_secs(60));
        lab.next(&[Fate::Answered, fate]);
        let taken = limiter.take(&[Charge::new(&policy, &key(name))]).await;
        assert_eq!(taken.is_ok_and(|decision| decision.is_allowed()), is_known);
        if is_known {
            assert_eq!(left(&limiter, &policy, name).await, 2, "it is charged");
        }
    }
}

/// A return that removes the value, whose answer is lost, goes together with a charge that it makes room for.
#[tokio::test(start_paused = true)]
async fn lost_removal_is_not_made_twice_with_a_charge() {
    let window = Policy::new("window", Quota::fixed_window(1, Duration::from_secs(3_600)).unwrap()).unwrap();
    for policy in [window, Policy::new("places", Quota::concurrent(1)).unwrap()] {
        let lab = Lab::with(|lab| lab.trip = Duration::from_millis(20));
        let limiter = patient().max_denials(0).build(lab.clone()).unwrap();
        let receipt = take(&limiter, &policy, "a").await.charge_mut(0).unwrap().take_receipt().unwrap();
        lab.next(&[Fate::Answered, Fate::AnswerLost]);
        let charge = || {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            tokio::spawn(async move { take(&limiter, &policy, "a").await.is_allowed() })
        };
        let flies = charge();
        tokio::time::sleep(Duration::from_millis(5)).await;
        let waits = charge();
        tokio::task::yield_now().await;
        let refund = limiter.refund(vec![Refund::new(policy.clone(), key("a"), receipt)]);
        assert!(!flies.await.unwrap());
        refund.await.unwrap();
        let held = u64::from(waits.await.unwrap());
        assert_eq!(left(&limiter, &policy, "a").await, 1 - held, "{}", policy.name());
    }
}

/// Simulated seed 151131: the unit was returned twice, and a caller was told to have it.
#[tokio::test(start_paused = true)]
async fn lost_return_is_not_made_twice_if_others_write_the_key_anew() {
    let window = Policy::new("window", Quota::fixed_window(2, Duration::from_secs(3_600)).unwrap()).unwrap();
    for policy in [window, Policy::new("places", Quota::concurrent(2)).unwrap()] {
        let lab = Lab::with(|lab| lab.trip = Duration::from_millis(20));
        let [limiter, other] = [(); 2].map(|()| patient().max_denials(0).build(lab.clone()).unwrap());
        let receipt = take(&limiter, &policy, "a").await.charge_mut(0).unwrap().take_receipt().unwrap();
        take(&other, &policy, "a").await;
        let charge = || {
            let (limiter, policy) = (limiter.clone(), policy.clone());
            tokio::spawn(async move { limiter.take(&[Charge::new(&policy, &key("a"))]).await })
        };
        lab.next(&[Fate::Answered, Fate::LostThenWrittenAnew]);
        let flies = charge();
        tokio::time::sleep(Duration::from_millis(5)).await;
        let waits = charge();
        tokio::task::yield_now().await;
        let refund = limiter.refund(vec![Refund::new(policy.clone(), key("a"), receipt)]);
        assert!(!flies.await.unwrap().unwrap().is_allowed());
        let held = u64::from(waits.await.unwrap().is_ok_and(|decision| decision.is_allowed()));
        drop(refund.await); // whether it was made is not known
        assert_eq!(left(&limiter, &policy, "a").await, 1 - held, "{}", policy.name());
    }
}

/// A refund that removes its value goes together with a charge that an old value refuses. Whether the swap was made
/// cannot be found out.
#[tokio::test(start_paused = true)]
async fn denial_by_an_old_value_is_no_answer_after_a_lost_one() {
    let window =
        |name, units| Policy::new(name, Quota::fixed_window(units, Duration::from_secs(86_400)).unwrap()).unwrap();
    let (own, shared) = (window("own", 10), window("shared", 2));
    let lab = Lab::with(|lab| lab.trip = Duration::from_millis(20));
    let [limiter, other] = [(); 2].map(|()| patient().max_denials(0).build(lab.clone()).unwrap());
    let receipt =
        async |policy: &Policy| take(&limiter, policy, "a").await.charge_mut(0).unwrap().take_receipt().unwrap();
    let (refunded, returned) = (receipt(&own).await, receipt(&shared).await);
    take(&limiter, &shared, "a").await;
    other.refund(vec![Refund::new(shared.clone(), key("a"), returned)]).await.unwrap();
    lab.next(&[Fate::Answered, Fate::LostThenWrittenAnew]);
    let charge = |policies: Vec<Policy>, cost| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let key = key("a");
            let charges: Vec<_> = policies.iter().map(|policy| Charge::new(policy, &key).cost(cost)).collect();
            limiter.take(&charges).await
        })
    };
    let flies = charge(vec![own.clone()], 11);
    tokio::time::sleep(Duration::from_millis(5)).await;
    let waits = charge(vec![own.clone(), shared.clone()], 1);
    tokio::task::yield_now().await;
    let refund = limiter.refund(vec![Refund::new(own, key("a"), refunded)]);
    assert!(!flies.await.unwrap().unwrap().is_allowed());
    let denied = waits.await.unwrap().is_ok_and(|decision| !decision.is_allowed());
    assert!(!denied, "the shared window has a unit left");
    assert_eq!(refund.await.unwrap_err().kind(), StoreErrorKind::Timeout);
}

#[tokio::test]
async fn charge_that_others_removed_with_its_key_is_taken_again() {
    for policy in [hourly(10), Policy::new("places", Quota::concurrent(10)).unwrap()] {
        let lab = Lab::default();
        let limiter = patient().build(lab.clone()).unwrap();
        take(&limiter, &policy, "warm").await;
        lab.next(&[Fate::LostThenWrittenAnew]);
        assert!(take(&limiter, &policy, "a").await.is_allowed());
        assert_eq!(left(&limiter, &policy, "a").await, 8, "{}: others have taken one", policy.name());
    }
}

#[tokio::test(start_paused = true)]
async fn waker_that_panics_keeps_no_answer_from_others() {
    let (lab, policy) = (Lab::with(|lab| lab.trip = MS), hourly(10));
    let limiter = patient().build(lab).unwrap();
    take(&limiter, &policy, "warm").await;
    let waker = crate::base::sync::panicking_waker();
    let a = key("a");
    let charges = [Charge::new(&policy, &a)];
    let mut odd = [(); 3].map(|()| Box::pin(limiter.take(&charges).into_future()));
    for odd in &mut odd {
        assert!(odd.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    }
    assert_eq!(take(&limiter, &policy, "a").await.charges()[0].remaining(), 6);
    assert_eq!(limiter.waiting(), 0);
}

#[tokio::test]
async fn refunds_to_a_queue_are_made_in_any_order() {
    let limiter = patient().build(Lab::default()).unwrap();
    let quota = Quota::leaky_queue(10, Duration::from_secs(3_600)).unwrap().queue(9).unwrap();
    let policy = Policy::new("queue", quota).unwrap();
    let mut refunds = Vec::new();
    for _ in 0..4 {
        let receipt = take(&limiter, &policy, "a").await.charge_mut(0).unwrap().take_receipt().unwrap();
        refunds.push(Refund::new(policy.clone(), key("a"), receipt));
    }
    for refund in refunds {
        limiter.refund(vec![refund]).await.unwrap();
    }
    assert_eq!(left(&limiter, &policy, "a").await, 10);
}
