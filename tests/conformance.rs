//! The limiters of this crate pass the suite that it hands out.
#![cfg(feature = "conformance")]

use std::time::Duration;

use tower_ratelimit::conformance::{Subject, check};
use tower_ratelimit::{BoxLimiter, ManualClock, MemoryLimiter};

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

#[tokio::test]
async fn a_limiter_in_memory_keeps_every_promise() {
    check(&Memory(ManualClock::new())).await.unwrap_or_else(|failures| panic!("{failures}"));
}

#[tokio::test]
async fn a_boxed_limiter_keeps_every_promise() {
    check(&Boxed(Memory(ManualClock::new()))).await.unwrap_or_else(|failures| panic!("{failures}"));
}
