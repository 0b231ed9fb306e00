//! Servers of stores, as the tests of the library start them.
#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "../../../tests/support/postgres.rs"]
pub(crate) mod postgres;
#[path = "../../../tests/support/proxy.rs"]
pub(crate) mod proxy;
#[path = "../../../tests/support/redis_sentinel.rs"]
pub(crate) mod redis_sentinel;
#[path = "../../../tests/support/redis.rs"]
pub(crate) mod redis_server;
