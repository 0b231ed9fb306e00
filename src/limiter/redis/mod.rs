//! One limit across many processes: states in Redis, decided there by the Lua twins of the
//! [algorithms](crate::quota::Algorithm).

mod backend;
mod builder;
mod client;
mod connection;
mod credentials;
mod dispatch;
mod error;
mod keys;
pub(crate) mod limiter;
mod script;
#[cfg(test)]
mod tests;
mod wire;

#[cfg(test)]
use super::redis_server;

pub use builder::RedisLimiterBuilder;
pub use client::RedisClient;
pub use credentials::RedisCredentials;
pub use error::RedisError;
pub use limiter::RedisFuture;
