//! A second limiter answers while the first cannot.

mod support;

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use support::Scripted;
use tower_ratelimit::{
    Charge, FallbackLimiter, Key, Limiter, LimiterEvent, MemoryLimiter, Observer, Policy, Quota, Refund,
};

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<LimiterEvent>>>);

impl Observer for Seen {
    fn on_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().push(event.clone());
    }
}

fn processes(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn policy(limit: u32) -> Policy {
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
async fn the_second_is_not_asked_while_the_first_answers() {
    for first in [Scripted::new(), Scripted::new().later()] {
        let (second, seen) = (Scripted::new(), Seen::default());
        let limiter = FallbackLimiter::new(first.clone(), second.clone(), processes(4)).observer(seen.clone());
        assert_eq!(admits(&limiter, &policy(10)).await, 10);
        assert_eq!((first.used(), second.takes().len()), (10, 0));
        assert!(seen.0.lock().unwrap().is_empty());
    }
}

#[tokio::test]
async fn while_the_first_fails_the_second_admits_its_share_and_each_use_is_seen() {
    for first in [Scripted::new(), Scripted::new().later()] {
        first.fail(true);
        for second_is_later in [false, true] {
            let second = if second_is_later { Scripted::new().later() } else { Scripted::new() };
            let seen = Seen::default();
            let limiter = FallbackLimiter::new(first.clone(), second.clone(), processes(4)).observer(seen.clone());
            assert_eq!(admits(&limiter, &policy(10)).await, 2);
            assert_eq!(admits(&limiter, &Policy::new("one", Quota::per_day(1)).unwrap()).await, 1, "at least one");
            let seen = seen.0.lock().unwrap();
            assert_eq!(seen.len(), 5, "three that passed, two that did not");
            assert_eq!(seen[0], LimiterEvent::FellBack { error: "the store is away".to_owned() });
        }
    }
}

#[tokio::test]
async fn receipts_go_back_to_the_limiter_they_came_from() {
    let (inner_first, first, second) = (Scripted::new(), Scripted::new(), Scripted::new());
    // One within another: each notes its own.
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
async fn an_answer_of_the_second_can_be_given_back_to_it() {
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
