//! Helpers of several tests.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

mod algorithms;
#[cfg(target_os = "linux")]
pub(crate) mod calendar_edge;
mod events;
#[cfg(feature = "fleet")]
pub(crate) mod fleet;
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
#[cfg(target_os = "linux")]
pub(crate) mod stepped_clock;
pub(crate) mod waiting;

use tower_ratelimit::clock::{ManualClock, Timer, TokioTimer};
use tower_ratelimit::limiter::{ChargeDecision, Limiter, NotReady, NotReadyKind, Place, Ready};
use tower_ratelimit::{Key, MemoryLimiter, Policy};

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

/// Takes units and holds them, and waits for as long as the quota says. The inner error is the last
/// decision.
pub(crate) async fn hold_in_line<L: Limiter + Clone>(
    limiter: &L,
    policy: &Policy,
    key: &Key,
    cost: u64,
) -> Result<Result<Place, ChargeDecision>, NotReady> {
    hold_by(limiter, policy, key, cost, TokioTimer::new()).await
}

/// Does what [`hold_in_line`] does, with a timer of the test.
pub(crate) async fn hold_by<L: Limiter + Clone>(
    limiter: &L,
    policy: &Policy,
    key: &Key,
    cost: u64,
    timer: impl Timer + 'static,
) -> Result<Result<Place, ChargeDecision>, NotReady> {
    let ready = Ready::new(limiter.clone()).timer(timer).max_wait(policy.quota().wait_in_line());
    match ready.hold(policy, key, cost).await {
        Ok(place) => Ok(Ok(place)),
        Err(error) => match error.decision() {
            Some(denied) if error.kind() != NotReadyKind::Limiter => Ok(Err(denied.clone())),
            _ => Err(error),
        },
    }
}

/// Returns the resident memory of this process in bytes, on Linux, without the pages of files such as its code.
pub(crate) fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1_024)
}
