//! Limiters over one database that use the same keys at once answer as some order of their calls would. A swap admits a
//! set at one instant. A refused set takes nothing, so it reads each of its states at an instant of its own.

use super::limiter;
use crate::histories::{CALLERS, Refused, check_limiters};
use crate::support::cases;
use crate::support::postgres::Server;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_several_limiters_are_those_of_some_order() {
    let server = Server::start();
    let mut limiters = Vec::new();
    for _ in 0..CALLERS {
        limiters.push(limiter(&server.url()).await);
    }
    let Ok(limiters) = limiters.try_into() else { panic!("there is one for each caller") };
    check_limiters(limiters, Refused::EachByItself, cases(10).into()).await;
}
