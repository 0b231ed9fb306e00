//! leaky-bucket: one bucket without keys, so it races for one key only.

use std::net::IpAddr;
use std::time::Duration;

use leaky_bucket::RateLimiter;

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub struct LeakyBucket;

impl Contender for LeakyBucket {
    fn name(&self) -> &'static str {
        "leaky-bucket (no keys)"
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        if setup.keys > 1 {
            return None;
        }
        let (most, interval) = if setup.denied { (1, 3_600_000) } else { (PLENTY as usize, 1) };
        let mut builder = RateLimiter::builder();
        builder.max(most).initial(most).refill(most).interval(Duration::from_millis(interval));
        // It wants a runtime to be made in.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let limiter = runtime.block_on(async { builder.build() });
        check(move |_: &IpAddr| limiter.try_acquire(1))
    }
}
