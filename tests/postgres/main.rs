//! Tests of `PostgresStore` on real servers, through its public API.
#![cfg(feature = "postgres")]

#[cfg(feature = "conformance")]
mod contract;
mod faults;
#[cfg(feature = "fleet")]
mod fleet;
mod linearizable;
mod places;
mod processes;
mod setup;
#[cfg(target_os = "linux")]
mod stepped_clock;
mod table;

#[path = "../support/histories.rs"]
mod histories;
#[path = "../support/mod.rs"]
mod support;

use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore, PostgresStoreBuilder};
use tower_ratelimit::limiter::store::{StoreError, StoreLimiterBuilder};
use tower_ratelimit::limiter::{Charge, Decision, Limiter, StoreErrorKind};
use tower_ratelimit::quota::Anchor;
use tower_ratelimit::{Key, Policy, Quota, StoreLimiter};

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

type PostgresLimiter = StoreLimiter<PostgresStore>;

/// Returns a builder whose statements a busy machine does not stop, and which creates the table.
fn creating(durability: Durability) -> PostgresStoreBuilder {
    PostgresStore::builder().create_table(durability).max_lock_wait(LONG)
}

/// Connects to a server that is there. A busy one may not answer in the time that `connect` waits.
async fn connected(builder: PostgresStoreBuilder, url: &str) -> PostgresStore {
    let began = Instant::now();
    loop {
        match builder.clone().connect(url).await {
            Ok(store) => return store,
            Err(error) => {
                let is_late = matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Unavailable);
                assert!(is_late && began.elapsed() < LONG, "the server is there: {error}");
            }
        }
    }
}

async fn store(url: &str) -> PostgresStore {
    connected(creating(Durability::Logged), url).await
}

/// Returns a limiter with a deadline that a busy machine keeps.
async fn limiter(url: &str) -> PostgresLimiter {
    patient().build(store(url).await).expect("there is a runtime")
}

fn patient() -> StoreLimiterBuilder {
    StoreLimiterBuilder::new().deadline(Duration::from_secs(20)).max_denials(0)
}

/// Returns a policy of which nothing comes back during a test.
fn daily(units: u64) -> Policy {
    let quota = Quota::fixed_window(units, Duration::from_secs(86_400)).expect("it is possible");
    Policy::new("daily", quota.anchor(Anchor::FirstRequest).expect("a window has one")).expect("the name is possible")
}

fn key(name: &str) -> Key {
    Key::of(name).expect("a text is a key")
}

async fn take(limiter: &PostgresLimiter, policy: &Policy, name: &str) -> Result<Decision, StoreError> {
    limiter.take(&[Charge::new(policy, &key(name))]).await
}

async fn left(limiter: &PostgresLimiter, policy: &Policy, name: &str) -> u64 {
    let decision = limiter.peek(&[Charge::new(policy, &key(name)).cost(0)]).await.expect("the server is there");
    decision.charges()[0].remaining()
}
