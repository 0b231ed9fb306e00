//! A limiter on a Redis whose calendar steps, in a process whose calendar steps with it.

use std::time::Duration;

use tower_ratelimit::RedisLimiter;

use crate::support::calendar_edge::take_over_an_edge;
use crate::support::proxy::Proxy;
use crate::support::redis_limiter::connected;
use crate::support::redis_server::Server;
use crate::support::stepped_clock::{BEFORE_FEBRUARY_S, FILE, SteppedClock, step_beside};

/// Starts a server with a clock of its own.
fn server(name: &str) -> (Server, SteppedClock) {
    let clock = SteppedClock::of_server(name);
    clock.set(BEFORE_FEBRUARY_S);
    (Server::with_variable(FILE, clock.path()), clock)
}

#[tokio::test]
async fn calendar_of_redis_that_steps_is_followed() {
    let Some(clock) = SteppedClock::of_test("stepped_clock::calendar_of_redis_that_steps_is_followed") else { return };
    clock.set(BEFORE_FEBRUARY_S);
    let server = Server::start();
    let limiter = connected(RedisLimiter::builder().deadline(Duration::from_secs(20)), &server.url()).await;
    step_beside(&clock, &limiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn troubled_redis_gives_no_month_more_than_its_limit() {
    let name = "stepped_clock::troubled_redis_gives_no_month_more_than_its_limit";
    let Some(own) = SteppedClock::of_test(name) else { return };
    let start = async |name: &str| {
        let (server, clock) = server(name);
        let port = server.port();
        (server, port, clock)
    };
    let process =
        async |deadline, proxy: &Proxy| connected(RedisLimiter::builder().deadline(deadline), &proxy.url()).await;
    take_over_an_edge(&own, start, process, Duration::ZERO).await;
}
