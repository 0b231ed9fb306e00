//! Readiness: whether a limiter can decide now.

use std::num::NonZeroU32;

use super::lab::Fate;
use super::*;
use crate::MemoryLimiter;
use crate::base::sync::lock;
use crate::event::StoreErrorKind;
use crate::limiter::{BoxLimiter, FallbackLimiter};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn probe_recovers_without_requests() {
    let (lab, own) = (Lab::default(), ManualClock::new());
    let limiter = StoreLimiterBuilder::new().own_clock(own.clone()).build(lab.clone()).unwrap();
    limiter.probe().await.unwrap();
    *lock(&lab.0.random) = vec![Fate::Silent];
    // Until the store is believed dead, and after that.
    for _ in 0..8 {
        own.advance(SECOND);
        let kind = limiter.probe().await.unwrap_err().kind();
        assert!([StoreErrorKind::Timeout, StoreErrorKind::Unavailable].contains(&kind), "{kind}");
    }
    let boxed = BoxLimiter::new(limiter.clone());
    assert!(boxed.probe().await.is_err());
    let fallback = FallbackLimiter::new(limiter.clone(), MemoryLimiter::new(), NonZeroU32::MIN);
    fallback.probe().await.unwrap();
    let both = FallbackLimiter::new(limiter.clone(), limiter.clone(), NonZeroU32::MIN);
    assert!(both.probe().await.is_err());

    lock(&lab.0.random).clear();
    tokio::time::sleep(3 * SECOND).await;
    own.advance(SECOND);
    limiter.probe().await.unwrap();
    boxed.probe().await.unwrap();
    limiter.close();
    own.advance(SECOND);
    assert!(limiter.probe().await.is_err(), "a process that drains is not ready");
}

/// The probe cannot be sent, because the process has too many checks in flight. That is no sign that the store answers.
#[tokio::test(start_paused = true)]
async fn overload_does_not_end_a_failed_probe() {
    let (lab, own) = (Lab::default(), ManualClock::new());
    let builder = StoreLimiterBuilder::new().own_clock(own.clone()).max_in_flight(1);
    let limiter = builder.build(lab.clone()).unwrap();
    let busy = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.take(&[Charge::new(&hourly(9), &key("a"))]).await.map(drop) })
    };
    *lock(&lab.0.random) = vec![Fate::Silent];
    assert_eq!(limiter.probe().await.unwrap_err().kind(), StoreErrorKind::Timeout);
    own.advance(SECOND);
    let check = busy();
    tokio::task::yield_now().await;
    assert_eq!(limiter.probe().await.unwrap_err().kind(), StoreErrorKind::Timeout, "the answer of the last probe");
    check.await.unwrap().unwrap_err();
    lock(&lab.0.random).clear();
    own.advance(SECOND);
    limiter.probe().await.unwrap();
    *lock(&lab.0.random) = vec![Fate::Silent];
    own.advance(SECOND);
    let check = busy();
    tokio::task::yield_now().await;
    limiter.probe().await.expect("the overload of a process alone does not make it unready");
    check.await.unwrap().unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn probe_asks_the_store_once_a_second() {
    let (lab, own) = (Lab::default(), ManualClock::new());
    let limiter = patient().own_clock(own.clone()).build(lab.clone()).unwrap();
    limiter.probe().await.unwrap();
    lab.calls();
    for _ in 0..10 {
        limiter.probe().await.unwrap();
    }
    assert_eq!(lab.calls(), (0, 0));
    own.advance(SECOND);
    for _ in 0..10 {
        limiter.probe().await.unwrap();
    }
    assert_eq!(lab.calls(), (0, 1), "a probe writes, because a read-only store answers reads");
}

/// The first caller of each second goes away before the answer: its client gave up.
#[tokio::test(start_paused = true)]
async fn probe_after_one_that_was_given_up_has_a_new_answer() {
    let (lab, own) = (Lab::default(), ManualClock::new());
    let limiter = StoreLimiterBuilder::new().own_clock(own.clone()).build(lab.clone()).unwrap();
    limiter.probe().await.unwrap();
    *lock(&lab.0.random) = vec![Fate::Silent];
    for _ in 0..3 {
        own.advance(SECOND);
        lab.calls();
        assert!(tokio::time::timeout(Duration::from_millis(1), limiter.probe()).await.is_err(), "the store is silent");
        for _ in 0..10 {
            limiter.probe().await.expect_err("the store decides nothing any more");
        }
        let (loads, swaps) = lab.calls();
        assert!(loads + swaps <= 1, "the probes of a second share one check");
    }
    lock(&lab.0.random).clear();
    tokio::time::sleep(3 * SECOND).await;
    own.advance(SECOND);
    drop(limiter.probe());
    limiter.probe().await.expect("the store decides again");
}
