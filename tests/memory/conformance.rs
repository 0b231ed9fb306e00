//! The limiters of this crate pass the conformance suite, and broken limiters fail it.
#![cfg(feature = "conformance")]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::Ready;
use std::num::NonZeroU32;
use std::thread;
use std::time::Duration;

use tower_ratelimit::conformance::{FailuresKind, Subject, check};
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::{
        BoxLimiter, Charge, Decision, Effect, FallbackLimiter, Limiter, Refund, Reply, UnsupportedQuota,
        UnsupportedQuotaKind,
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
    assert!(failures.to_string().contains("let Limiter::supports return Ok"), "{failures}");
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
    for part in
        ["5 per minute", "promise: As many concurrent takes", "found:", "cases.rs:", "fix:     decide and write"]
    {
        assert!(text.contains(part), "{part:?} is missing from:\n{text}");
    }
}
