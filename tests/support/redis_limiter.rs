//! Limiters on Redis for tests that do not measure time: a busy machine fails none of their checks.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::{Atomicity, Charge, Limiter, redis::RedisLimiterBuilder};
use tower_ratelimit::{Key, Policy, Quota, RedisLimiter};

/// The time that anything may take on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Returns a builder with a deadline that a busy machine keeps.
pub(crate) fn patient() -> RedisLimiterBuilder {
    RedisLimiter::builder().deadline(Duration::from_secs(20))
}

/// Connects, and waits until the server answers. `connect` itself does not wait for long, and a connection that is not
/// there by then is no error.
pub(crate) async fn connected(builder: RedisLimiterBuilder, url: &str) -> RedisLimiter {
    let limiter = builder.connect(url).await.expect("the server is there");
    let policy = Policy::new("connected", Quota::per_hour(1)).expect("the name is possible");
    let began = Instant::now();
    // In a cluster the keys are on all masters.
    let keys: u64 = if limiter.hooks().atomicity() == Atomicity::Compensated { 60 } else { 1 };
    for number in 0..keys {
        let key = Key::of(number).expect("a number is a key");
        while let Err(error) = limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await {
            assert!(began.elapsed() < LONG, "no check succeeds: {error}");
            sleep(Duration::from_millis(5)).await;
        }
    }
    limiter
}
