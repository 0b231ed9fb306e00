//! The parts of a limiter whose store is reached over a network, where the store makes no difference. A limiter for
//! another store can use them as they are.

mod batcher;
mod breaker;
mod caller_hash;
mod denial_cache;
mod due;
mod events;
mod holdings;
mod leases;
mod permits;
mod set;
mod tag;
mod unanswered;

pub(super) use batcher::ride::{Driven, Ride};
pub(super) use batcher::{Batcher, Dispatch, GRACE, Receiver, Then};
pub(super) use breaker::Breaker;
pub(super) use caller_hash::{CallerHash, Hash};
pub(super) use denial_cache::{DENIALS_MAX, DenialCache};
pub(super) use due::Due;
pub(super) use events::Events;
pub(super) use holdings::{Bid, Claim, HeldKey, Holdings, Landed, Return, Returned, Row};
pub(super) use leases::{HELD, Leases, Wanted};
pub(super) use permits::{Permit, Permits};
pub(super) use set::{Pending, Places, Set, decide, fill, undo};
pub(super) use tag::{Tag, Tags};
pub(super) use unanswered::Unanswered;
