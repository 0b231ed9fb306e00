//! One limit across many processes: states in Redis, decided there by the Lua twins of the
//! [algorithms](crate::quota::Algorithm).

mod batcher;
mod builder;
mod denial_cache;
mod dispatch;
mod error;
mod keys;
mod lateness;
mod leases;
pub(crate) mod limiter;
mod queue_refunds;
#[cfg(test)]
#[path = "../../../tests/support/redis.rs"]
mod redis_server;
mod script;
mod set;
mod store;
mod tag;
#[cfg(test)]
mod tests;
mod wire;

pub use builder::RedisLimiterBuilder;
pub use error::{RedisError, RedisErrorKind};
pub use limiter::RedisFuture;
