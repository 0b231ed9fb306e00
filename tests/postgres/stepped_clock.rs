//! A limiter on a PostgreSQL whose calendar steps, in a process whose calendar steps with it.

use std::time::Duration;

use tower_ratelimit::limiter::store::StoreLimiterBuilder;

use crate::store;
use crate::support::postgres::Server;
use crate::support::stepped_clock::{BEFORE_FEBRUARY_S, SteppedClock, step_beside};

#[tokio::test]
async fn calendar_of_postgres_that_steps_is_followed() {
    let name = "stepped_clock::calendar_of_postgres_that_steps_is_followed";
    let Some(clock) = SteppedClock::of_test(name) else { return };
    clock.set(BEFORE_FEBRUARY_S);
    let server = Server::start();
    let limiter = StoreLimiterBuilder::new().deadline(Duration::from_secs(20)).build(store(&server.url()).await);
    step_beside(&clock, &limiter.expect("there is a runtime")).await;
}
