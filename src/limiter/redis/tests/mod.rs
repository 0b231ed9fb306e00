//! Tests of whole limiters in several processes.

pub(super) mod processes;
pub(super) mod simulation;

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::builder::RedisLimiterBuilder;
use super::limiter::RedisLimiter;
use crate::key::Key;
use crate::limiter::{Charge, Limiter};
use crate::policy::Policy;
use crate::quota::Quota;

/// Connects, and waits until the server answers. `connect` itself does not wait for long, and a connection that is not
/// there by then is no error.
pub(super) async fn connected(builder: RedisLimiterBuilder, url: &str) -> RedisLimiter {
    let limiter = builder.connect(url).await.unwrap();
    let (policy, key) = (Policy::new("connected", Quota::per_hour(1)).unwrap(), Key::global());
    let began = Instant::now();
    while let Err(error) = limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await {
        assert!(began.elapsed() < Duration::from_secs(60), "no check succeeds: {error}");
        sleep(Duration::from_millis(5)).await;
    }
    limiter
}
