//! Requests in flight in PostgreSQL: many processes hold at most the limit together, and nothing stays taken.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::Place;
use tower_ratelimit::{Policy, Quota};

use super::support::hold_in_line;
use super::support::postgres::Server;
use super::{LONG, PostgresLimiter, key, left, patient, store};

/// The time after which places lapse. A process renews its places after a third of this time, so it keeps them even if it
/// stands still for the other two thirds on a busy machine.
const LAPSE: Duration = Duration::from_secs(9);

const LIMIT: u64 = 4;

/// The variable with the URL of the server.
const URL: &str = "RATELIMIT_TEST_POSTGRES_PLACES";

fn places() -> Policy {
    let quota = Quota::concurrent(LIMIT).max_wait(LONG).expect("the wait is possible");
    Policy::new("places", quota).expect("the name is possible")
}

async fn limiter(url: &str) -> PostgresLimiter {
    patient().places_lapse_after(LAPSE).build(store(url).await).expect("there is a runtime")
}

async fn hold(limiter: &PostgresLimiter) -> Place {
    let held = hold_in_line(limiter, &places(), &key("a"), 1).await;
    held.expect("the server is there").expect("a place comes free")
}

async fn eventually_free(limiter: &PostgresLimiter) {
    let began = Instant::now();
    while left(limiter, &places(), "a").await != LIMIT {
        assert!(began.elapsed() < LONG, "{} of {LIMIT} are free", left(limiter, &places(), "a").await);
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_are_within_the_limit_while_connections_are_cut() {
    let server = Server::start();
    let reader = limiter(&server.url()).await;
    let held = Arc::new(AtomicU64::new(0));
    let mut callers = Vec::new();
    for _ in 0..4 {
        let limiter = limiter(&server.url()).await;
        callers.extend((0..3).map(|_| {
            let (limiter, held) = (limiter.clone(), Arc::clone(&held));
            tokio::spawn(async move {
                for _ in 0..super::support::cases(10) {
                    let Ok(Ok(place)) = hold_in_line(&limiter, &places(), &key("a"), 1).await else {
                        continue; // its connection was cut too often
                    };
                    let now = held.fetch_add(1, Ordering::SeqCst) + 1;
                    assert!(now <= LIMIT, "{now} of {LIMIT} are held");
                    sleep(Duration::from_millis(2)).await;
                    held.fetch_sub(1, Ordering::SeqCst);
                    drop(place);
                }
            })
        }));
    }
    let client = server.client().await;
    let cutter = tokio::spawn(async move {
        let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tower-ratelimit'";
        for number in 0.. {
            client.simple_query(cut).await.unwrap();
            sleep(Duration::from_millis(20 + number % 17)).await; // at another phase each time
        }
    });
    for caller in callers {
        caller.await.unwrap();
    }
    cutter.abort();
    let _ = cutter.await;
    eventually_free(&reader).await;
}

/// Runs as the process that is killed. It does nothing in the parent.
#[tokio::test]
async fn process_that_is_killed() {
    let Ok(url) = std::env::var(URL) else { return };
    let limiter = limiter(&url).await;
    let _held = [hold(&limiter).await, hold(&limiter).await];
    println!("it holds two");
    std::future::pending().await
}

#[tokio::test]
async fn places_of_a_killed_process_lapse_and_those_of_others_do_not() {
    let server = Server::start();
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "places::process_that_is_killed", "--nocapture"];
    let mut process =
        Command::new(program).args(arguments).env(URL, server.url()).stdout(Stdio::piped()).spawn().unwrap();
    let other = limiter(&server.url()).await;
    let began = Instant::now();
    while left(&other, &places(), "a").await != LIMIT - 2 {
        assert!(began.elapsed() < LONG, "the process takes its places");
        sleep(Duration::from_millis(20)).await;
    }
    let own = hold(&other).await;
    process.kill().unwrap();
    process.wait().unwrap();
    let killed = Instant::now();
    while left(&other, &places(), "a").await != LIMIT - 1 {
        assert!(killed.elapsed() < LONG, "its places lapse");
        sleep(Duration::from_millis(20)).await;
    }
    // The other process has its own place for twice the time after which places lapse, so it has renewed the place.
    sleep(LAPSE).await;
    assert_eq!(left(&other, &places(), "a").await, LIMIT - 1);
    drop(own);
    eventually_free(&other).await;
}
