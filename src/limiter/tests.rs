//! The parts that all limiters share: replies that are awaited, and wrappers that forward every method.

use std::collections::BTreeSet;
use std::future::{Ready, ready};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use super::*;
use crate::clock::Clock;
use crate::key::Key;
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

/// Answers everything, and remembers which methods were called.
#[derive(Clone, Default)]
struct Probe {
    called: Arc<Mutex<BTreeSet<&'static str>>>,
    registry: Arc<PolicyRegistry>,
    lines: PlaceLines,
}

struct Silent;

impl Observer for Silent {}

type Never = std::convert::Infallible;

impl Probe {
    fn note(&self, method: &'static str) {
        self.called.lock().unwrap().insert(method);
    }

    fn decision(charges: &[Charge<'_>]) -> Decision {
        Decision::new(true, charges.iter().map(|_| ChargeDecision::allowed(1, 0)))
    }
}

#[deny(clippy::missing_trait_methods, reason = "a method without a note is not seen to be forwarded")]
impl Limiter for Probe {
    type Error = Never;
    type Future<T: Send + 'static> = Ready<Result<T, Never>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Never, Self::Future<Decision>> {
        self.note("take");
        Reply::Now(Ok(Self::decision(charges)))
    }

    fn try_take_one(&self, _: &Policy, _: &Key, _: u64) -> Option<ChargeDecision> {
        self.note("try_take_one");
        Some(ChargeDecision::allowed(1, 0))
    }

    /// Refunds one unit so, and no others.
    fn try_refund_one(&self, _: &Policy, _: &Key, receipt: Receipt) -> Result<(), Receipt> {
        self.note("try_refund_one");
        if receipt.units() == 1 { Ok(()) } else { Err(receipt) }
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Never, Self::Future<Decision>> {
        self.note("peek");
        Reply::Now(Ok(Self::decision(charges)))
    }

    fn refund(&self, _: Vec<Refund>) -> Reply<(), Never, Self::Future<()>> {
        self.note("refund");
        Reply::Now(Ok(()))
    }

    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Never, Self::Future<Decision>> {
        self.note("settle");
        Reply::Now(Ok(Self::decision(charges)))
    }

    fn reset(&self, _: &Policy, _: &Key) -> Reply<(), Never, Self::Future<()>> {
        self.note("reset");
        Reply::Later(ready(Ok(())))
    }

    fn probe(&self) -> Reply<(), Never, Self::Future<()>> {
        self.note("probe");
        Reply::Now(Ok(()))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.note("supports");
        Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, "it is a probe"))
    }

    /// It has no error. `tests/middleware/layers.rs` calls this through wrappers.
    fn is_overload(&self, never: &Never) -> bool {
        match *never {}
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self
    }
}

impl LimiterHooks for Probe {
    fn atomicity(&self) -> Atomicity {
        self.note("atomicity");
        Atomicity::Compensated
    }

    fn observe(&self, _: &Arc<dyn Observer>) {
        self.note("observe");
    }

    fn occupancy(&self) -> Option<Occupancy> {
        self.note("occupancy");
        Some(Occupancy::new(1, 2))
    }

    fn store_load(&self) -> Option<StoreLoad> {
        self.note("store_load");
        Some(StoreLoad::default())
    }

    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        self.note("registry");
        Some(&self.registry)
    }

    fn place_lines(&self) -> Option<&PlaceLines> {
        self.note("lines");
        Some(&self.lines)
    }

    fn shared_text(&self) -> Option<Arc<dyn SharedText>> {
        self.note("shared_text");
        None
    }

    fn clock(&self) -> Option<Arc<dyn Clock>> {
        self.note("clock");
        None
    }
}

/// Calls every method of a limiter once, and returns which of them reached the probe.
async fn reached(probe: &Probe, limiter: impl Limiter) -> BTreeSet<&'static str> {
    let policy = Policy::new("probed", Quota::per_minute(5)).unwrap();
    let key = Key::of("alice").unwrap();
    let charges = [Charge::new(&policy, &key)];
    let refund = Refund::new(policy.clone(), key.clone(), Receipt::new(1, 0, 0));
    assert!(limiter.take(&charges).await.unwrap().is_allowed());
    assert!(limiter.try_take_one(&policy, &key, 1).is_some());
    assert!(limiter.peek(&charges).await.unwrap().is_allowed());
    limiter.refund(vec![refund]).await.unwrap();
    limiter.try_refund_one(&policy, &key, Receipt::new(1, 0, 0)).unwrap();
    assert!(limiter.settle(&charges).await.unwrap().is_allowed());
    limiter.reset(&policy, &key).await.unwrap();
    limiter.probe().await.unwrap();
    assert_eq!(limiter.hooks().store_load(), Some(StoreLoad::default()));
    assert_eq!(limiter.supports(policy.quota()).unwrap_err().kind(), UnsupportedQuotaKind::Algorithm);
    assert_eq!(limiter.hooks().atomicity(), Atomicity::Compensated);
    assert_eq!(limiter.hooks().policy_registry().map(PolicyRegistry::id), Some(probe.registry.id()));
    assert_eq!(limiter.hooks().occupancy(), Some(Occupancy::new(1, 2)));
    let _ = limiter.hooks().place_lines();
    let _ = limiter.hooks().clock();
    let _ = limiter.hooks().shared_text();
    limiter.hooks().observe(&(Arc::new(Silent) as Arc<dyn Observer>));
    std::mem::take(&mut probe.called.lock().unwrap())
}

#[tokio::test]
async fn wrappers_forward_every_method() {
    let probe = Probe::default();
    let mut all = reached(&probe, probe.clone()).await;
    assert_eq!(reached(&probe, Arc::new(probe.clone())).await, all, "Arc");
    assert_eq!(reached(&probe, BoxLimiter::new(probe.clone())).await, all, "BoxLimiter");
    // No request waits in line there: units come free in both of its limiters.
    assert!(all.remove("lines"));
    let fallback = FallbackLimiter::new(probe.clone(), crate::MemoryLimiter::new(), NonZeroU32::MIN);
    assert_eq!(reached(&probe, fallback).await, all, "FallbackLimiter");
}

#[tokio::test]
async fn fallback_supports_what_both_of_its_limiters_do() {
    let (probe, memory) = (Probe::default(), crate::MemoryLimiter::new());
    let quota = Quota::per_minute(5);
    assert!(FallbackLimiter::new(memory.clone(), probe, NonZeroU32::MIN).supports(&quota).is_err());
    assert!(FallbackLimiter::new(memory.clone(), memory, NonZeroU32::MIN).supports(&quota).is_ok());
}

#[tokio::test]
async fn fallback_returns_receipts_of_the_shortcut_to_the_first() {
    let (first, second) = (crate::MemoryLimiter::new(), crate::MemoryLimiter::new());
    let limiter = FallbackLimiter::new(first.clone(), second, NonZeroU32::MIN);
    let (policy, key) = (Policy::new("short", Quota::per_day(5)).unwrap(), Key::of("alice").unwrap());
    let left = || first.peek_now(&[Charge::new(&policy, &key).cost(0)]).charges()[0].remaining();
    let receipt = limiter.try_take_one(&policy, &key, 3).and_then(|mut answer| answer.take_receipt()).unwrap();
    assert_eq!(left(), 2);
    limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await.unwrap();
    assert_eq!(left(), 5);
}

#[tokio::test]
async fn fallback_refunds_by_the_shortcut_of_its_own_limiters() {
    let (first, second) = (crate::MemoryLimiter::new(), Probe::default());
    let limiter = FallbackLimiter::new(first.clone(), second.clone(), NonZeroU32::MIN);
    let (policy, key) = (Policy::new("short", Quota::per_day(5)).unwrap(), Key::of("alice").unwrap());
    let receipt = limiter.try_take_one(&policy, &key, 3).and_then(|mut answer| answer.take_receipt()).unwrap();
    limiter.try_refund_one(&policy, &key, receipt).unwrap();
    assert_eq!(first.peek_one(&policy, &key, 0).remaining(), 5);
    assert!(second.called.lock().unwrap().is_empty());
    limiter.try_refund_one(&policy, &key, Receipt::new(1, 0, 0).noted(true)).unwrap();
    assert_eq!(*second.called.lock().unwrap(), BTreeSet::from(["try_refund_one"]));
    let receipt = || Receipt::new(2, 0, 0).noted(true);
    assert_eq!(limiter.try_refund_one(&policy, &key, receipt()), Err(receipt()), "its note is not lost");
}

#[tokio::test]
async fn reply_is_awaited_now_or_later() {
    for answer in [Ok(5), Err("away")] {
        assert_eq!(Reply::<_, _, Ready<_>>::Now(answer).await, answer);
        assert_eq!(Reply::Later(ready(answer)).await, answer);
    }
}

#[test]
fn unsupported_quota_says_which_and_why() {
    let quota: Quota = "5 per minute, sliding log".parse().unwrap();
    let error = UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, &quota, "it has room for 3: raise its capacity");
    assert_eq!(error.kind(), UnsupportedQuotaKind::TooLarge);
    assert_eq!(
        error.to_string(),
        "this limiter does not support the quota \"5 per minute, sliding log\": it has room for 3: raise its capacity"
    );
}

/// Takes units and holds them. Waits in line for as long as the quota says. The inner error is the
/// last decision.
#[cfg(all(any(feature = "_redis", feature = "store"), feature = "tokio"))]
pub(in crate::limiter) async fn hold_in_line<L>(
    limiter: &L,
    policy: &Policy,
    key: &Key,
    cost: u64,
) -> Result<Result<Place, ChargeDecision>, L::Error>
where
    L: Limiter + Clone,
    L::Error: Clone,
{
    if policy.quota().wait_in_line().is_zero() {
        return Place::take(limiter, policy, key, cost).await;
    }
    let ready = super::Ready::new(limiter.clone()).max_wait(policy.quota().wait_in_line());
    match ready.hold(policy, key, cost).await {
        Ok(place) => Ok(Ok(place)),
        Err(error) => match std::error::Error::source(&error).and_then(|source| source.downcast_ref::<L::Error>()) {
            Some(error) => Err(error.clone()),
            None => Ok(Err(error.decision().expect("the limiter was asked").clone())),
        },
    }
}
