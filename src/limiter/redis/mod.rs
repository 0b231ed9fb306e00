//! One limit across many processes: states in Redis, decided there by the Lua twins of the
//! [algorithms](crate::quota::Algorithm).

mod backend;
mod builder;
mod client;
mod dispatch;
mod error;
mod keys;
pub(crate) mod limiter;
#[cfg(test)]
#[path = "../../../tests/support/redis.rs"]
mod redis_server;
mod script;
mod store;
#[cfg(test)]
mod tests;
mod wire;

pub use builder::RedisLimiterBuilder;
pub use client::RedisClient;
pub use error::RedisError;
pub use limiter::RedisFuture;
