//! The [`Limiter`] trait and its contract, and the limiters of this crate.
//!
//! * [`MemoryLimiter`](crate::MemoryLimiter) keeps the states in this process; see [`memory`].
//! * `RedisLimiter` keeps the states in Redis, for many processes; see the module `redis`.
//! * `StoreLimiter` keeps the states in any store that can compare and swap, such as PostgreSQL; see the module
//!   `store`.
//! * [`FallbackLimiter`] asks a second limiter while the first one fails.
//! * [`BoxLimiter`] hides the type of a limiter, so that it can be chosen at run time.
//! * [`Ready`] lets callers wait until a limiter admits them.
//! * [`Blocks`] closes and opens keys by hand. [`Meters`] reads and settles the units of keys.
//!
//! The guide has pages on [Redis and failures](crate::guide::redis_and_failures) and on
//! [writing a limiter of your own](crate::guide::writing_a_backend).

mod admin;
mod ask_lines;
mod boxed;
mod charge;
mod contract;
mod departures;
mod effect;
mod fallback;
mod layer_support;
mod line_turn;
#[cfg(all(test, ratelimit_loom))]
mod loom_tests;
pub mod memory;
mod observers;
mod occupancy;
mod pair_hash;
mod place;
mod place_lines;
mod policy_registry;
mod queue_refunds;
mod ready;
#[cfg(any(feature = "fred", feature = "redis-rs"))]
pub mod redis;
#[cfg(all(test, any(feature = "_redis", feature = "postgres")))]
#[path = "../../tests/support/redis.rs"]
mod redis_server;
#[cfg(any(feature = "_redis", feature = "store"))]
#[cfg_attr(
    not(all(feature = "_redis", feature = "store")),
    allow(dead_code, unused_imports, reason = "each of the two features uses a part of this module")
)]
mod remote;
mod reply;
mod shared_text;
#[cfg(all(test, ratelimit_shuttle))]
mod shuttle_tests;
#[cfg(feature = "store")]
pub mod store;
mod support;
#[cfg(all(test, any(feature = "_redis", feature = "postgres")))]
#[path = "../../tests/support/proxy.rs"]
mod tcp_proxy;

pub use crate::decision::{ChargeDecision, Decision, Receipt};
pub use crate::event::StoreErrorKind;
pub use crate::store_load::{StoreLoad, StoreLoadReader};
pub use admin::{Blocks, Meters};
pub(crate) use ask_lines::{AskLines, AskTurn};
pub use boxed::{BoxLimiter, LimiterError};
pub(crate) use charge::Arrival;
pub use charge::{Charge, Refund};
pub use contract::{Atomicity, Limiter, LimiterHooks};
pub(crate) use departures::{DepartureKey, DepartureLines, DepartureTurns};
pub use effect::Effect;
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) use effect::Effective;
pub(crate) use effect::{binds, how, outlives_refusal, stands};
pub use fallback::FallbackLimiter;
pub(crate) use layer_support::{supports_in_layer, supports_pace};
pub(crate) use line_turn::LineTurn;
pub use occupancy::Occupancy;
pub(crate) use pair_hash::PairHash;
pub use place::Place;
pub(crate) use place::{AnyPlaces, HeldCharge, HeldPlaces, shared_place};
pub use place_lines::PlaceLines;
pub(crate) use place_lines::{BoundedTurn, LineStep};
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) use place_lines::{FirstInLine, LeftLine, Standing};
pub use policy_registry::PolicyRegistry;
pub(crate) use policy_registry::{Contradiction, Entered};
pub use ready::{NotReady, NotReadyKind, Ready};
pub(crate) use reply::BoxFuture;
pub use reply::{Reply, ReplyFuture};
pub use shared_text::{REPORT_MAX, REPORTS_MAX, SharedText, TextRead, VersionedText};
pub use support::{UnsupportedQuota, UnsupportedQuotaKind};

#[cfg(test)]
mod tests;
