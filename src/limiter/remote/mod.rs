//! The parts of a limiter with a remote store that are the same for every store. A limiter for another store
//! can use these parts as they are.

mod backend;
mod breaker;
mod checks;
mod deadline;
mod denial_cache;
mod events;
mod flights;
mod holdings;
mod leases;
#[cfg(any(feature = "_redis", feature = "postgres"))]
mod loss;
mod options;
mod permits;
mod rows;
mod set;
#[cfg(all(test, ratelimit_shuttle))]
mod shuttle_tests;
mod tag;
mod unanswered;

pub(super) use backend::{Answer, Backend, Intent, ROW_MISSING, RemoteError};
pub(super) use breaker::Breaker;
pub(super) use checks::{CHARGES_MAX, Checks};
pub(super) use deadline::Deadline;
#[cfg(all(test, feature = "_redis"))]
pub(super) use denial_cache::LONGEST;
pub(super) use events::Events;
#[cfg(feature = "_redis")]
pub(super) use flights::Queue;
pub(super) use flights::{CallLimits, CallResult, Caller, Calls, Flights, Receiver, RemoteStore, hand_out};
#[cfg(feature = "store")]
pub(super) use flights::{Groups, Keyed};
pub(super) use holdings::{Claim, CurrentRow, HeldKey, Return};
#[cfg(test)]
pub(super) use leases::HELD;
#[cfg(any(feature = "_redis", feature = "postgres"))]
pub(super) use loss::loss;
#[cfg(feature = "_redis")]
pub(super) use options::DEADLINE;
pub(super) use options::{Options, shared_options};
pub(super) use rows::{HOLDERS_MAX, HeldRow, HolderInLine, KeyRows, LINE_MAX};
pub(super) use unanswered::{Unanswered, while_down};
