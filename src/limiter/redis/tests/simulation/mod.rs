//! The limiter on Redis in a simulation: processes with the real code, one server or a cluster of two with the real
//! scripts, and a network with every fault that a seed chooses, in simulated time.
//!
//! `SIMULATION_SEED=123` plays one seed, and prints its course. `SIMULATION_SEEDS=10000` plays as many, from
//! `SIMULATION_FROM` on.

mod caller;
mod chance;
pub(in crate::limiter::redis) mod cluster;
mod ending;
#[cfg(feature = "fleet")]
mod fleet;
mod ledger;
mod load;
pub(in crate::limiter::redis) mod network;
mod plan;
pub(in crate::limiter::redis) mod server;
mod story;
mod subject;
#[cfg(feature = "store")]
mod table;
mod waiters;

pub(in crate::limiter::redis) use network::Wire;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use tokio::time::Instant;

use super::super::wire::WireRequest;
use crate::base::sampling::cases;
use crate::clock::MonotonicClock;
use crate::key::Key;
use crate::limiter::redis::limiter::RedisLimiter;
use crate::limiter::{Charge, Limiter};
use crate::policy::Policy;
use crate::quota::Quota;

/// In one of this many stories of load, fewer checks may be decided than usual.
const STORIES_FOR_A_SHORTFALL: u64 = 100;

/// Seeds that are played by `tests/all.sh`.
const SEEDS: u32 = 300;

/// Notes the requests of a call that is sent, if it is one of a simulation.
pub(in crate::limiter::redis) fn note(number: u64, requests: &[&WireRequest]) {
    ledger::note(number, requests);
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|number| number.parse().expect("it is a number"))
}

/// The server answers quickly, so most checks are decided even within the shortest deadline.
#[tokio::test]
async fn deadline_of_1_ms_leaves_time_for_a_check() {
    let network = network::Network::new(1, 1, chance::Chance::new(1), network::Faults::default());
    let wire = Wire { network, process: 0, server: 0 };
    let builder = RedisLimiter::builder().deadline(Duration::from_millis(1)).max_denials(0);
    let limiter = builder.simulated(wire, MonotonicClock::new(), 0).unwrap();
    let (policy, key, began) = (Policy::new("short", Quota::per_hour(9)).unwrap(), Key::global(), Instant::now());
    while let Err(error) = limiter.take(&[Charge::new(&policy, &key)]).await {
        assert!(began.elapsed() < Duration::from_secs(10), "no check is decided: {error}");
        tokio::task::yield_now().await;
    }
}

/// Plays seeds, and prints for each that breaks a law how to play it alone.
fn play(test: &str, play: impl Fn(u64) -> story::Ended) {
    if let Some(seed) = number("SIMULATION_SEED") {
        let ended = play(seed);
        println!("{}", ended.trace);
        assert!(ended.problems.is_empty(), "{:#?}", ended.problems);
        return;
    }
    let first = number("SIMULATION_FROM").unwrap_or(0);
    let seeds = number("SIMULATION_SEEDS").unwrap_or_else(|| cases(SEEDS).into());
    let (mut failed, mut short, mut checks) = (Vec::new(), Vec::new(), 0);
    for seed in first..first + seeds {
        let ended = catch_unwind(AssertUnwindSafe(|| play(seed))).unwrap_or_else(|_| story::Ended::panicked());
        checks += ended.checks;
        if let Some(problem) = ended.problems.first() {
            println!("SIMULATION_SEED={seed} cargo test --lib simulation::{test} -- --nocapture  # {problem}");
            failed.push(seed);
        } else if let Some(why) = ended.shortfall {
            println!("seed {seed} of {test}: {why}");
            short.push(seed);
        }
        if failed.len() == 10 {
            break;
        }
        let played = seed + 1 - first;
        if played % 10_000 == 0 {
            println!("{test}: {played} of {seeds} seeds, {checks} checks, {} failed", failed.len());
        }
    }
    assert!(failed.is_empty(), "seeds {failed:?} of {seeds} break a law");
    let most = (seeds / STORIES_FOR_A_SHORTFALL).max(1) as usize;
    assert!(short.len() <= most, "{} of {seeds} stories fall short, and {most} may: {short:?}", short.len());
    println!("{test}: {seeds} seeds, {checks} checks");
}

#[test]
fn redis_keeps_the_laws() {
    play("redis", story::play);
}

#[test]
fn fallback_keeps_the_laws() {
    play("fallback", story::play_fallback);
}

#[cfg(feature = "store")]
#[test]
fn store_keeps_the_laws() {
    play("store", story::play_store);
}

#[test]
fn cluster_keeps_the_laws() {
    play("cluster", story::play_cluster);
}

#[test]
fn strike_of_a_split_set_closes_its_block() {
    let ended = story::play_split_strike(0);
    assert!(ended.problems.is_empty(), "{:#?}\n{}", ended.problems, ended.trace);
    assert_eq!(ended.trace.matches("TRYAGAIN").count(), 2, "{}", ended.trace);
}

/// A call names the day in which the server's clock will be. A wrong day costs one more call, and not two.
#[test]
fn edge_costs_a_far_server_one_more_call() {
    let ended = story::play_edge(0);
    assert!(ended.problems.is_empty(), "{:#?}\n{}", ended.problems, ended.trace);
    let edge = ended.trace.split("the faults are over").next().expect("it begins");
    // The first check learns the server's time from its first answer, which costs a call, too.
    assert_eq!(edge.matches(": Take 1 of").count(), 2 + 1 + 2 + 1, "{edge}");
}

/// A place that is taken over the first connection after a failover counts, although an earlier place was lost.
#[test]
fn place_taken_after_a_failover_counts() {
    let ended = story::play_failover(0);
    assert!(ended.problems.is_empty(), "{:#?}\n{}", ended.problems, ended.trace);
    let mut rest = ended.trace.as_str();
    let steps = ["caller 0 of 1 has a place", "failover", "caller 0 leaves", "process 0 is connected"];
    for words in steps.into_iter().chain(["caller 1 of 1 has a place", "caller 2 of 2 has no place"]) {
        rest = rest.split_once(words).unwrap_or_else(|| panic!("{words}:\n{}", ended.trace)).1;
    }
}

#[test]
fn load_on_redis_keeps_the_law() {
    play("load_on_redis", story::play_load);
}

#[cfg(feature = "store")]
#[test]
fn load_on_a_store_keeps_the_law() {
    play("load_on_a_store", story::play_store_load);
}

#[cfg(feature = "fleet")]
#[test]
fn fleet_on_redis_agrees() {
    play("fleet_on_redis", fleet::play);
}

#[cfg(all(feature = "store", feature = "fleet"))]
#[test]
fn fleet_on_a_store_agrees() {
    play("fleet_on_a_store", fleet::play_store);
}

#[test]
fn waiters_on_redis_keep_the_laws() {
    play("waiters_on_redis", story::play_waiters);
}

#[cfg(feature = "store")]
#[test]
fn waiters_on_a_store_keep_the_laws() {
    play("waiters_on_a_store", story::play_store_waiters);
}

#[test]
fn seed_is_played_the_same_way_each_time() {
    for seed in 0..u64::from(cases(40)) {
        let (first, second) = (story::play(seed), story::play(seed));
        assert_eq!(first.trace, second.trace, "seed {seed}");
    }
}
