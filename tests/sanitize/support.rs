//! The helpers of these tests, without those that need a server.
#![allow(dead_code, unexpected_cfgs, reason = "other tests use the rest")]

#[path = "../support/algorithms.rs"]
mod algorithms;
#[path = "../support/events.rs"]
mod events;
#[path = "../../src/base/sampling.rs"]
mod sampling;

pub(crate) use algorithms::of_each_algorithm_but;
pub(crate) use events::Events;
pub(crate) use sampling::cases;
