//! Limiters over one database that use the same keys at once answer as some order of their calls would. A swap admits a
//! set at one instant. What takes nothing may be read at an instant of its own: the charges of a refused set, and a
//! charge of cost 0 for a key without a state, because PostgreSQL cannot lock a row that is missing.

use super::limiter;
use crate::histories::{Apart, CALLERS, check_limiters};
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
    check_limiters(limiters, Apart::RefusedOrMissing, cases(10).into()).await;
}
