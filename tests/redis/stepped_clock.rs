//! A limiter on a Redis whose calendar steps, in a process whose calendar steps with it.

use std::time::Duration;

use tower_ratelimit::RedisLimiter;

use crate::support::redis_limiter::connected;
use crate::support::redis_server::Server;
use crate::support::stepped_clock::{BEFORE_FEBRUARY_S, SteppedClock, step_beside};

#[tokio::test]
async fn calendar_of_redis_that_steps_is_followed() {
    let Some(clock) = SteppedClock::of_test("stepped_clock::calendar_of_redis_that_steps_is_followed") else { return };
    clock.set(BEFORE_FEBRUARY_S);
    let server = Server::start();
    let limiter = connected(RedisLimiter::builder().deadline(Duration::from_secs(20)), &server.url()).await;
    step_beside(&clock, &limiter).await;
}
