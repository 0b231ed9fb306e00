//! Limiters of one server that use the same keys at once answer as some order of their calls would. A script decides a
//! set at one instant, whether it is admitted or not.

use crate::histories::{Apart, CALLERS, check_limiters};
use crate::support::cases;
use crate::support::redis_limiter::{connected, patient};
use crate::support::redis_server::Server;

/// A denial that one process repeats until the server would admit is not one of another process that has refunded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_several_limiters_are_those_of_some_order() {
    let server = Server::start();
    let url = server.url();
    let mut limiters = Vec::new();
    for _ in 0..CALLERS {
        limiters.push(connected(patient().max_denials(0), &url).await);
    }
    let Ok(limiters) = limiters.try_into() else { panic!("there is one for each caller") };
    check_limiters(limiters, Apart::None, cases(40).into()).await;
}
