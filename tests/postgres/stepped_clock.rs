//! A limiter on a PostgreSQL whose calendar steps, in a process whose calendar steps with it.

use std::time::Duration;

use tower_ratelimit::limiter::store::StoreLimiterBuilder;

use crate::store;
use crate::support::calendar_edge::take_over_an_edge;
use crate::support::postgres::Server;
use crate::support::proxy::Proxy;
use crate::support::stepped_clock::{BEFORE_FEBRUARY_S, FILE, SteppedClock, step_beside};

#[tokio::test]
async fn calendar_of_postgres_that_steps_is_followed() {
    let name = "stepped_clock::calendar_of_postgres_that_steps_is_followed";
    let Some(clock) = SteppedClock::of_test(name) else { return };
    clock.set(BEFORE_FEBRUARY_S);
    let server = Server::start();
    let limiter = StoreLimiterBuilder::new().deadline(Duration::from_secs(20)).build(store(&server.url()).await);
    step_beside(&clock, &limiter.expect("there is a runtime")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn troubled_postgres_gives_no_month_more_than_its_limit() {
    let name = "stepped_clock::troubled_postgres_gives_no_month_more_than_its_limit";
    let Some(own) = SteppedClock::of_test(name) else { return };
    let start = async |name: &str| {
        let clock = SteppedClock::of_server(name);
        clock.set(BEFORE_FEBRUARY_S);
        let server = Server::with_variable(FILE, clock.path());
        store(&server.url()).await; // it has the table
        let port = server.port();
        (server, port, clock)
    };
    let process = async |deadline, proxy: &Proxy| {
        let url = proxy.url().replace("redis://", "postgres://postgres@") + "/postgres";
        StoreLimiterBuilder::new().deadline(deadline).build(store(&url).await).expect("there is a runtime")
    };
    // A decision is kept if its time is from the server's by no more than this and a trip.
    take_over_an_edge(&own, start, process, Duration::from_millis(100)).await;
}
