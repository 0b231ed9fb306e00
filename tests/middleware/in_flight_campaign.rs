//! Places of requests over TCP that end in every way, counted in memory.

use std::time::Duration;

use tower_ratelimit::MemoryLimiter;

use crate::in_flight_over_tcp::{Campaign, requests};

/// `IN_FLIGHT_REQUESTS` says how many requests are sent.
#[test]
fn requests_that_end_in_every_way_leave_no_place_taken() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let limiter = MemoryLimiter::builder().max_keys(1_000).build().expect("the setup is possible");
    let campaign = Campaign {
        limiters: [limiter.clone(), limiter],
        requests: requests(3_200),
        wait: Duration::from_millis(5),
        takes: Duration::ZERO,
        soon: Duration::from_millis(1),
    };
    runtime.block_on(campaign.run(async || 0));
}
