//! The client libraries with which the limiter connects to Redis.

/// The client library with which a [`RedisLimiter`](crate::RedisLimiter) connects to Redis. A library has a
/// variant if its feature is enabled: `fred` or `redis-rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedisClient {
    /// The crate `fred`, with the feature `fred`. This library is the default if both features are enabled.
    #[cfg(feature = "fred")]
    Fred,
    /// The crate `redis`, which is also called redis-rs, with the feature `redis-rs`.
    #[cfg(feature = "redis-rs")]
    RedisRs,
}

impl Default for RedisClient {
    fn default() -> Self {
        #[cfg(feature = "fred")]
        let client = Self::Fred;
        #[cfg(not(feature = "fred"))]
        let client = Self::RedisRs;
        client
    }
}
