//! Replays the vectors with their states in Redis.

use std::cell::RefCell;

use tokio::runtime::{Builder, Runtime};
use tower_ratelimit::{clock::ManualClock, limiter::BoxLimiter};

use crate::replay::{Backend, Pending, replay_on};
use crate::support::redis_limiter::{connected, patient};
use crate::support::redis_server::Server;
use crate::{id, replayed};

thread_local! {
    static RUNTIME: RefCell<Runtime> =
        RefCell::new(Builder::new_current_thread().enable_all().build().expect("a runtime"));
}

fn wait(answer: Pending<'_>) {
    RUNTIME.with_borrow(|runtime| runtime.block_on(answer));
}

#[test]
fn replayed_vectors_give_every_stated_answer_on_redis() {
    let server = Server::start();
    let failures: Vec<String> = replayed()
        .iter()
        .filter_map(|vector| {
            let clock = ManualClock::new();
            let mut limiter = None;
            wait(std::pin::pin!(async {
                let builder = patient().prefix(id(vector)).max_denials(0).clock(clock.clone());
                limiter = Some(connected(builder, &server.url()).await);
            }));
            let limiter = BoxLimiter::new(limiter?);
            let failure = replay_on(vector, Backend { limiter, clock, wait }).err()?;
            Some(format!("{}: {failure}", id(vector)))
        })
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}
