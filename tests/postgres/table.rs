//! The table stays small: changes within their pages, and rows that are removed when their time is over.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::Charge;
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::limiter::store::{Change, Store, Then, Value, Version};

use super::support::postgres::Server;
use super::{LONG, daily, key, limiter, store, take};

#[tokio::test]
async fn changes_stay_within_their_page() {
    let server = Server::with(&["autovacuum=off"]);
    let limiter = limiter(&server.url()).await;
    let policy = daily(1_000_000);
    let size = "SELECT pg_table_size('ratelimit')";
    let checks = 2_000;
    for _ in 0..checks {
        take(&limiter, &policy, "a").await.unwrap();
        // A set of two keys, as well.
    }
    let small: u64 = server.query(size).await[0].parse().unwrap();
    assert!(small <= 32_768, "the table has {small} bytes");
    // Beside an open transaction each version stays, and afterwards the space is used again.
    let client = server.client().await;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM ratelimit").await.unwrap();
    for _ in 0..checks {
        limiter.take(&[Charge::new(&policy, &key("a")), Charge::new(&policy, &key("b"))]).await.unwrap();
    }
    let large: u64 = server.query(size).await[0].parse().unwrap();
    assert!(large > 2 * small && large < 4_000_000, "the table has {large} bytes");
    client.batch_execute("COMMIT").await.unwrap();
    for _ in 0..checks {
        take(&limiter, &policy, "a").await.unwrap();
    }
    let now: u64 = server.query(size).await[0].parse().unwrap();
    assert!(now < large + large / 2, "the table grew from {large} to {now} bytes");
}

/// Charges one key without a pause beside a transaction that stays open, for the seconds in
/// `POSTGRES_TRANSACTION_SECONDS`, and prints what it costs the server. `tests/campaigns.sh` takes 300.
#[tokio::test]
async fn hot_row_beside_a_long_transaction_is_served() {
    let seconds = std::env::var("POSTGRES_TRANSACTION_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let server = Server::start();
    let limiter = limiter(&server.url()).await;
    let policy = daily(1_000_000_000);
    let charge = async || assert!(take(&limiter, &policy, "a").await.unwrap().is_allowed());
    let report = async |phase: &str| {
        let (before, checks) = (server.processor_time(), 1_000);
        for _ in 0..checks {
            charge().await;
        }
        let each = (server.processor_time() - before) / checks;
        let size = server.query("SELECT pg_total_relation_size('ratelimit')").await.remove(0);
        println!("{phase}: {each:?} of the server for a check, the table and its index have {size} bytes");
    };
    charge().await;
    report("before the transaction").await;
    let client = server.client().await;
    client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM ratelimit").await.unwrap();
    let (began, mut checks) = (Instant::now(), 0_u64);
    while began.elapsed() < Duration::from_secs(seconds) {
        charge().await;
        checks += 1;
    }
    report(&format!("after {seconds} s beside it and {checks} checks")).await;
    client.batch_execute("COMMIT").await.unwrap();
    charge().await; // it meets the dead rows once more
    report("after the transaction").await;
    server.query("VACUUM ratelimit").await;
    report("after a vacuum").await;
}

#[tokio::test]
async fn rows_whose_time_is_over_are_removed_by_the_way() {
    let server = Server::start();
    let store = store(&server.url()).await;
    let lives = |number: u32| if number % 10 == 0 { Duration::from_secs(3_600) } else { Duration::ZERO };
    let mut swaps = 0_u32;
    for number in 0..1_000_u32 {
        let version = Version::from_bytes(u128::from(number).to_be_bytes());
        let then = Then::Put(Value::new(version, [0; 50]), lives(number));
        assert!(store.swap(&[Change::new(format!("{number:04}"), None, then)]).await.unwrap().is_done());
        swaps += 1;
    }
    // The times to live are rounded up to a second. Further rows make the store look at the others.
    let (count, began) = ("SELECT count(*) FROM ratelimit WHERE key LIKE '0%'", Instant::now());
    while server.query(count).await[0] != "100" {
        assert!(began.elapsed() < LONG, "{:?} rows are left", server.query(count).await);
        let version = Version::from_bytes(u128::from(swaps).to_be_bytes());
        let then = Then::Put(Value::new(version, [0; 50]), Duration::ZERO);
        store.swap(&[Change::new(format!("new{swaps}"), None, then)]).await.unwrap();
        swaps += 1;
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(server.query("SELECT min(key) FROM ratelimit").await, ["0000"], "a row whose time is not over stays");
}
