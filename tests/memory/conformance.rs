//! The limiters of this crate pass the conformance suite, and broken limiters fail it.
#![cfg(feature = "conformance")]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Ready;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tower_ratelimit::conformance::{FailuresKind, Subject, check};
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::{
        BoxLimiter, Charge, ChargeDecision, Decision, Effect, FallbackLimiter, Limiter, Receipt, Refund, Reply,
        UnsupportedQuota, UnsupportedQuotaKind,
    },
    quota::Algorithm,
};

use crate::support::Scripted;

struct Memory(ManualClock);

impl Subject for Memory {
    type Limiter = MemoryLimiter;

    async fn limiter(&self) -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(1_000).clock(self.0.clone()).build().expect("the setup is possible")
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

struct Boxed(Memory);

impl Subject for Boxed {
    type Limiter = BoxLimiter;

    async fn limiter(&self) -> BoxLimiter {
        BoxLimiter::new(self.0.limiter().await)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }
}

/// Fails, so that the fallback answers.
struct Fallback(Memory);

impl Subject for Fallback {
    type Limiter = FallbackLimiter<Scripted, MemoryLimiter>;

    async fn limiter(&self) -> Self::Limiter {
        let first = Scripted::new().later();
        first.fail(true);
        FallbackLimiter::new(first, self.0.limiter().await, NonZeroU32::MIN)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }
}

/// Supports no quota.
#[derive(Clone)]
struct Nothing(MemoryLimiter);

/// Reads a state in one step and writes it in another, which is a race.
#[derive(Clone)]
struct Racy(MemoryLimiter);

/// The methods that both limiters delegate.
macro_rules! pass_on {
    () => {
        type Error = Infallible;
        type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

        fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
            self.0.peek(charges)
        }

        fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
            self.0.refund(refunds)
        }

        fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
            Limiter::reset(&self.0, policy, key)
        }
    };
}

impl Limiter for Nothing {
    pass_on!();

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.0.take(charges)
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, "it has none"))
    }
}

impl Limiter for Racy {
    pass_on!();

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        let peeked = self.0.peek_now(charges);
        thread::sleep(Duration::from_micros(50));
        if !peeked.is_allowed() || charges.iter().any(|charge| charge.effect != Effect::Enforce) {
            return self.0.take(charges);
        }
        let forced: Vec<_> = charges.iter().map(|charge| charge.effect(Effect::Force)).collect();
        Reply::Now(Ok(self.0.take_now(&forced)))
    }
}

/// A broken limiter over `MemoryLimiter`, made by a function.
struct Made<L>(Memory, fn(MemoryLimiter) -> L);

impl<L: Limiter + Clone> Subject for Made<L> {
    type Limiter = L;

    async fn limiter(&self) -> L {
        self.1(self.0.limiter().await)
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by).await;
    }
}

async fn all_pass(subject: &impl Subject) {
    let report = check(subject).await.unwrap_or_else(|failures| panic!("{failures}"));
    assert!(report.skipped().is_empty(), "{report}");
    for algorithm in Algorithm::ALL {
        assert!(report.tested().iter().any(|quota| quota.algorithm() == *algorithm), "no {algorithm} in: {report}");
    }
}

#[tokio::test]
async fn fallback_limiter_keeps_every_promise() {
    all_pass(&Fallback(Memory(ManualClock::new()))).await;
}

#[tokio::test]
async fn memory_limiter_keeps_every_promise() {
    all_pass(&Memory(ManualClock::new())).await;
}

#[tokio::test]
async fn boxed_limiter_keeps_every_promise() {
    all_pass(&Boxed(Memory(ManualClock::new()))).await;
}

#[tokio::test]
async fn suite_fails_when_nothing_is_supported() {
    let failures = check(&Made(Memory(ManualClock::new()), Nothing)).await.unwrap_err();
    assert_eq!(failures.kind(), FailuresKind::NothingSupported, "{failures}");
    assert!(failures.skipped().len() >= Algorithm::ALL.len(), "{failures}");
    assert!(failures.to_string().contains("make Limiter::supports return Ok"), "{failures}");
}

/// Tasks that take turns on one thread would not show the race.
#[tokio::test]
async fn suite_sees_a_race_between_two_threads() {
    let failures = check(&Made(Memory(ManualClock::new()), Racy)).await.unwrap_err();
    assert_eq!(failures.kind(), FailuresKind::BrokenPromises);
    let broken: BTreeSet<_> = failures.iter().map(|failure| failure.case()).collect();
    assert!(broken.contains("concurrent_takes_are_counted_exactly"), "{failures}");
    assert!(broken.iter().all(|case| case.starts_with("concurrent")), "{failures}");
    let text = failures.to_string();
    for part in [
        "5 per minute",
        "promise: If several threads take units concurrently",
        "found:",
        "cases.rs:",
        "fix:     decide and write",
    ] {
        assert!(text.contains(part), "{part:?} is missing from:\n{text}");
    }
}

/// A mistake of a limiter.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    /// Units come back ten times as fast, and the waits say so.
    FastRefill,
    NoDelays,
    WrongLimit,
    /// The receipt of a forced charge holds what it asked for.
    ReceiptOfTheCost,
    ObservedAreNotTaken,
    /// Even if the set is refused.
    ForcedAreTaken,
    FirstRefundOnly,
    /// The refund of one unit of a charge returns all of them.
    WholeRefund,
    ResetOfAll,
    /// The name and the text of the key are put together.
    OneText,
    LowerCase,
}

/// Makes one mistake.
#[derive(Clone)]
struct Mistaken {
    memory: Arc<Mutex<MemoryLimiter>>,
    clock: ManualClock,
    mistake: Mistake,
}

impl Mistaken {
    fn fresh(clock: &ManualClock) -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().expect("the setup is possible")
    }

    fn memory(&self) -> MemoryLimiter {
        self.memory.lock().expect("no thread panics").clone()
    }

    fn policy(&self, policy: &Policy) -> Policy {
        let quota = policy.quota();
        let (name, quota) = match self.mistake {
            Mistake::FastRefill if quota.algorithm() == Algorithm::TokenBucket => {
                let fast = Quota::token_bucket(10 * quota.limit(), quota.period());
                (policy.name(), fast.and_then(|fast| fast.burst(quota.capacity())).expect("the quota is possible"))
            }
            Mistake::OneText => ("all", *quota),
            _ => (policy.name(), *quota),
        };
        Policy::new(name, quota).expect("it is a name")
    }

    fn key(&self, policy: &Policy, key: &Key) -> Key {
        let text = match self.mistake {
            Mistake::OneText => format!("{}{}", policy.name(), key.display()),
            Mistake::LowerCase => key.display().to_string().to_lowercase(),
            _ => return key.clone(),
        };
        Key::of(text).expect("it is a key")
    }

    fn ask(
        &self,
        charges: &[Charge<'_>],
        ask: fn(&MemoryLimiter, &[Charge<'_>]) -> Decision,
    ) -> Reply<Decision, Infallible, Ready<Result<Decision, Infallible>>> {
        let stored: Vec<(Policy, Key)> =
            charges.iter().map(|charge| (self.policy(charge.policy), self.key(charge.policy, charge.key))).collect();
        let asked = charges
            .iter()
            .zip(&stored)
            .map(|(charge, (policy, key))| Charge::new(policy, key).cost(charge.cost).effect(charge.effect));
        let asked: Vec<Charge<'_>> = asked.collect();
        let mut decision = ask(&self.memory(), &asked);
        if self.mistake == Mistake::ForcedAreTaken && !decision.is_allowed() {
            let forced = asked.iter().filter(|charge| charge.effect == Effect::Force);
            forced.for_each(|charge| drop(ask(&self.memory(), &[*charge])));
        }
        let answers = charges.iter().enumerate().map(|(at, charge)| {
            let answer = decision.charge_mut(at).expect("each charge has an answer");
            self.answer(charge, std::mem::replace(answer, ChargeDecision::unasked(0)))
        });
        let answers: Vec<ChargeDecision> = answers.collect();
        Reply::Now(Ok(Decision::new(decision.is_allowed(), answers)))
    }

    fn answer(&self, charge: &Charge<'_>, mut answer: ChargeDecision) -> ChargeDecision {
        let receipt = answer.take_receipt();
        let with_receipt = |answer: ChargeDecision, receipt: Option<Receipt>| match receipt {
            Some(receipt) => answer.with_receipt(receipt),
            None => answer,
        };
        match self.mistake {
            Mistake::NoDelays => with_receipt(answer.with_delay(Duration::ZERO, 0), receipt),
            Mistake::WrongLimit => {
                let (limit, remaining) = (answer.limit() + 1, answer.remaining());
                let wrong = match answer.is_allowed() {
                    true => ChargeDecision::allowed(limit, remaining),
                    false => ChargeDecision::denied(limit, remaining, answer.wait()),
                };
                with_receipt(wrong.with_reset_after(answer.reset_after().unwrap_or_default()), receipt)
            }
            Mistake::ReceiptOfTheCost if charge.effect == Effect::Force => {
                let of_cost = |taken: Receipt| Receipt::new(charge.cost, taken.at_us(), taken.part());
                with_receipt(answer, receipt.map(of_cost))
            }
            Mistake::ObservedAreNotTaken if charge.effect == Effect::Observe => {
                receipt.into_iter().for_each(|taken| self.memory().refund_one(charge.policy, charge.key, taken));
                answer
            }
            _ => with_receipt(answer, receipt),
        }
    }
}

impl Limiter for Mistaken {
    type Error = Infallible;
    type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.ask(charges, MemoryLimiter::take_now)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.ask(charges, MemoryLimiter::peek_now)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
        let count = if self.mistake == Mistake::FirstRefundOnly { 1 } else { refunds.len() };
        for refund in refunds.into_iter().take(count) {
            let receipt = match refund.receipt {
                one if self.mistake == Mistake::WholeRefund && one.units() == 1 => {
                    Receipt::new(u64::MAX, one.at_us(), one.part())
                }
                receipt => receipt,
            };
            self.memory().refund_one(&self.policy(&refund.policy), &self.key(&refund.policy, &refund.key), receipt);
        }
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
        if self.mistake == Mistake::ResetOfAll {
            *self.memory.lock().expect("no thread panics") = Self::fresh(&self.clock);
        }
        self.memory().reset_now(&self.policy(policy), &self.key(policy, key));
        Reply::Now(Ok(()))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        let supported = if self.mistake == Mistake::NoDelays { Algorithm::LeakyQueue } else { Algorithm::TokenBucket };
        match quota.algorithm() == supported {
            true => Ok(()),
            false => Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, "it is left out")),
        }
    }
}

struct WithMistake(ManualClock, Mistake);

impl Subject for WithMistake {
    type Limiter = Mistaken;

    async fn limiter(&self) -> Mistaken {
        let memory = Arc::new(Mutex::new(Mistaken::fresh(&self.0)));
        Mistaken { memory, clock: self.0.clone(), mistake: self.1 }
    }

    async fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

#[tokio::test]
async fn suite_sees_each_mistake_of_a_limiter() {
    for (mistake, case) in [
        (Mistake::FastRefill, "units_come_back_at_the_rate_of_the_quota"),
        (Mistake::NoDelays, "queue_spaces_its_departures"),
        (Mistake::WrongLimit, "capacity_passes_from_rest"),
        (Mistake::ReceiptOfTheCost, "refund_of_a_forced_charge_returns_what_it_took"),
        (Mistake::ObservedAreNotTaken, "effects_do_what_they_say"),
        (Mistake::ForcedAreTaken, "effects_do_what_they_say"),
        (Mistake::FirstRefundOnly, "refunds_of_one_call_are_all_made"),
        (Mistake::WholeRefund, "part_of_a_receipt_returns_a_part"),
        (Mistake::ResetOfAll, "reset_returns_the_whole_quota"),
        (Mistake::OneText, "names_and_keys_that_look_alike_are_apart"),
        (Mistake::LowerCase, "names_and_keys_that_look_alike_are_apart"),
    ] {
        let failures = check(&WithMistake(ManualClock::new(), mistake)).await.expect_err("it makes a mistake");
        let broken: BTreeSet<_> = failures.iter().map(|failure| failure.case()).collect();
        assert_eq!(broken, BTreeSet::from([case]), "{mistake:?}: {failures}");
    }
}
