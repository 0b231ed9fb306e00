//! `FallbackLimiter` asks its second limiter while the first one fails.

use std::num::NonZeroU32;

use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    limiter::{Charge, FallbackLimiter, Limiter, Refund},
    observe::LimiterEvent,
};

use crate::support::{Events, Scripted};

fn processes(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn policy(limit: u64) -> Policy {
    Policy::new("test", Quota::per_day(limit)).unwrap()
}

async fn passes(limiter: &impl Limiter, policy: &Policy, cost: u64) -> bool {
    let key = Key::of("alice").unwrap();
    limiter.take(&[Charge::new(policy, &key).cost(cost)]).await.unwrap().is_allowed()
}

async fn admits(limiter: &impl Limiter, policy: &Policy) -> u64 {
    let mut admitted = 0;
    while passes(limiter, policy, 1).await {
        admitted += 1;
    }
    admitted
}

#[tokio::test]
async fn fallback_is_not_asked_while_the_first_limiter_answers() {
    for first in [Scripted::new(), Scripted::new().later()] {
        let (second, seen) = (Scripted::new(), Events::default());
        let limiter = FallbackLimiter::new(first.clone(), second.clone(), processes(4)).observer(seen.clone());
        assert_eq!(admits(&limiter, &policy(10)).await, 10);
        assert_eq!((first.used(), second.takes().len()), (10, 0));
        assert!(seen.lock().is_empty());
    }
}

#[tokio::test]
async fn fallback_admits_its_share_and_reports_each_use() {
    for first in [Scripted::new(), Scripted::new().later()] {
        first.fail(true);
        for second_is_later in [false, true] {
            let second = if second_is_later { Scripted::new().later() } else { Scripted::new() };
            let seen = Events::default();
            let limiter = FallbackLimiter::new(first.clone(), second.clone(), processes(4)).observer(seen.clone());
            assert_eq!(admits(&limiter, &policy(10)).await, 2);
            assert_eq!(admits(&limiter, &Policy::new("one", Quota::per_day(1)).unwrap()).await, 1, "at least one");
            let seen = seen.lock();
            assert_eq!(seen.len(), 5, "three that passed, two that did not");
            assert_eq!(seen[0], LimiterEvent::fell_back("the store is away: the cable is cut"));
        }
    }
}

#[tokio::test]
async fn receipts_go_back_to_the_limiter_they_came_from() {
    let (inner_first, first, second) = (Scripted::new(), Scripted::new(), Scripted::new());
    // A fallback inside a fallback: each reports its own failures.
    let inner = FallbackLimiter::new(inner_first.clone(), first.clone(), processes(1));
    inner_first.fail(true);
    let limiter = FallbackLimiter::new(inner, second.clone(), processes(2));
    let (policy, key) = (policy(10), Key::of("alice").unwrap());
    let mut refunds = Vec::new();
    for (failing, cost) in [(false, 3), (true, 2)] {
        inner_first.fail(!failing);
        first.fail(failing);
        let mut decision = limiter.take(&[Charge::new(&policy, &key).cost(cost)]).await.unwrap();
        let receipt = decision.take_receipts().pop().flatten().unwrap();
        assert_eq!(receipt.units(), cost);
        refunds.push(Refund::new(policy.clone(), key.clone(), receipt));
    }
    assert_eq!((inner_first.used(), first.used(), second.used()), (2, 3, 0));
    limiter.refund(refunds).await.unwrap();
    assert_eq!((inner_first.used(), first.used(), second.used()), (0, 0, 0));
    assert_eq!((inner_first.refunds().len(), first.refunds().len(), second.refunds().len()), (1, 1, 0));
}

#[tokio::test]
async fn fallback_refunds_what_it_charged() {
    let (first, second) = (Scripted::new(), MemoryLimiter::new());
    first.fail(true);
    let limiter = FallbackLimiter::new(first, second, processes(1));
    let (policy, key) = (policy(10), Key::of("alice").unwrap());
    let mut decision = limiter.take(&[Charge::new(&policy, &key).cost(10)]).await.unwrap();
    assert!(!passes(&limiter, &policy, 1).await);
    let receipt = decision.take_receipts().pop().flatten().unwrap();
    limiter.refund(vec![Refund::new(policy.clone(), key, receipt)]).await.unwrap();
    assert_eq!(admits(&limiter, &policy).await, 10);
}
