//! The limiters of this crate pass the suite that it hands out.
#![cfg(feature = "conformance")]

mod support;

use std::num::NonZeroU32;
use std::time::Duration;

use support::Scripted;
use tower_ratelimit::conformance::{Subject, check};
use tower_ratelimit::{BoxLimiter, FallbackLimiter, ManualClock, MemoryLimiter};

struct Memory(ManualClock);

impl Subject for Memory {
    type Limiter = MemoryLimiter;

    async fn limiter(&self) -> MemoryLimiter {
        MemoryLimiter::builder().capacity(1_000).clock(self.0.clone()).build().expect("the setup is possible")
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

/// Only the second answers.
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

#[tokio::test]
async fn a_limiter_that_another_stands_in_for_keeps_every_promise() {
    check(&Fallback(Memory(ManualClock::new()))).await.unwrap_or_else(|failures| panic!("{failures}"));
}

#[tokio::test]
async fn a_limiter_in_memory_keeps_every_promise() {
    check(&Memory(ManualClock::new())).await.unwrap_or_else(|failures| panic!("{failures}"));
}

#[tokio::test]
async fn a_boxed_limiter_keeps_every_promise() {
    check(&Boxed(Memory(ManualClock::new()))).await.unwrap_or_else(|failures| panic!("{failures}"));
}
