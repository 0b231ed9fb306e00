//! One limit across many processes: states in Redis, decided there by the Lua twins of the [algorithms](crate::algorithm).

mod denials;
mod error;
mod leases;
mod queue;
mod store;
mod value;

pub use error::{RedisError, RedisErrorKind};
