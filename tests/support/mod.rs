//! Helpers of several tests.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

mod algorithms;
mod events;
pub(crate) mod nginx;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod proxy;
pub(crate) mod redis_cluster;
#[cfg(feature = "_redis")]
pub(crate) mod redis_limiter;
#[cfg(feature = "_redis")]
pub(crate) mod redis_sentinel;
#[path = "redis.rs"]
pub(crate) mod redis_server;
#[path = "../../src/base/sampling.rs"]
mod sampling;
mod scripted;
mod setup;
pub(crate) mod shop;
pub(crate) mod waiting;

use tower_ratelimit::MemoryLimiter;
use tower_ratelimit::clock::ManualClock;

pub(crate) use algorithms::of_each_algorithm_but;
pub(crate) use events::Events;
pub(crate) use sampling::{cases, config, stride};
pub(crate) use scripted::{Broken, Scripted, Trouble};
pub(crate) use setup::{every_algorithm, name_outcome, refuses_dear};

/// A limiter in memory that reads this clock. It has room for a thousand keys: to make one for a
/// million, as is the default, takes longer than most tests.
pub(crate) fn memory(clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().expect("a thousand keys are possible")
}

/// Returns the resident memory of this process in bytes, on Linux, without the pages of files such as its code.
pub(crate) fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1_024)
}
