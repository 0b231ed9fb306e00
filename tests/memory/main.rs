//! Tests of `MemoryLimiter` through its public API.

mod bound;
mod conformance;
mod fallback;
mod floods;
mod growth;
mod idle;
mod limiter;
mod linearizable;
mod model;
mod on_refusal;
mod places;
mod plans;
mod random_clocks;
mod ready;
mod stale_clock;
#[cfg(target_os = "linux")]
mod stepped_clock;
mod stopped_clock;
mod stress;
mod versions;
mod whole_quota;

#[path = "../support/histories.rs"]
mod histories;

#[path = "../support/mod.rs"]
mod support;
