//! The client libraries by which Redis is reached.

/// The client library by which a [`RedisLimiter`](crate::RedisLimiter) reaches Redis. There is a variant for each
/// library whose feature is enabled: `redis` and `redis-rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedisClient {
    /// The crate `fred`, with the feature `fred`. It is the default if both are enabled.
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
