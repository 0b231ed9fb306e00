//! A limiter on a Redis whose calendar steps, in a process whose calendar steps with it.

use std::time::Duration;

use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::{Key, Policy, Quota, RedisLimiter};

use super::calls;
use crate::support::calendar_edge::{EDGE_S, take_over_an_edge};
use crate::support::proxy::Proxy;
use crate::support::redis_limiter::connected;
use crate::support::redis_server::Server;
use crate::support::stepped_clock::{BEFORE_FEBRUARY_S, FILE, SteppedClock, step_beside};

const MS: Duration = Duration::from_millis(1);

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

/// A call names the window in which the server will be. At an edge the guess may be wrong, which costs a call.
#[tokio::test]
async fn edge_costs_a_far_redis_at_most_one_more_trip() {
    let name = "stepped_clock::edge_costs_a_far_redis_at_most_one_more_trip";
    let Some(own) = SteppedClock::of_test(name) else { return };
    let (server, clock) = server("server");
    let proxy = Proxy::start(server.port());
    proxy.delay(80 * MS);
    // The process begins in another month, and knows the server's time from its first answer.
    own.set(BEFORE_FEBRUARY_S - 40 * 86_400);
    let limiter = connected(RedisLimiter::builder().deadline(20_000 * MS), &proxy.url()).await;
    let policy = Policy::new("monthly", Quota::per_calendar_month(1_000)).unwrap();
    clock.set(EDGE_S - 1);
    let (before, mut takes, mut of_february) = (calls(&server), 0, 0);
    while of_february < 3 {
        let decision = limiter.take(&[Charge::new(&policy, &Key::global())]).await.unwrap();
        let reset = decision.charges()[0].reset_after().unwrap();
        takes += 1;
        of_february += u32::from(reset > 60_000 * MS);
        assert!(takes < 1_000, "the edge has come");
    }
    let calls = calls(&server) - before;
    assert!((takes..=takes + 1).contains(&calls), "{calls} calls of {takes} checks");
}
