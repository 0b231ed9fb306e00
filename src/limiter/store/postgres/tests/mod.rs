//! Each algorithm on a real server, beside the limiter in memory. Other tests with servers are in `tests/postgres/`.

#[path = "../../../../../tests/support/postgres.rs"]
mod postgres;

use std::time::Duration;

use postgres::Server;
use tokio::time::{Instant, sleep};

use super::{Durability, PostgresStore, PostgresStoreBuilder};
use crate::algorithm::properties::for_each_algorithm;
use crate::limiter::redis_server;
use crate::limiter::store::Store;
use crate::limiter::store::tests::parity::play;
use crate::limiter::tcp_proxy::{Fault, Proxy};
use crate::quota::{Algorithm, Anchor};

/// Steps of each algorithm. They are few, since a step takes a millisecond. `POSTGRES_PARITY_STEPS` asks for more.
const STEPS: u32 = 500;

macro_rules! parity {
    ($($name:ident: $algorithm:ident, $anchor:ident;)*) => {$(
        #[tokio::test]
        async fn $name() {
            let steps = match std::env::var("POSTGRES_PARITY_STEPS") {
                Ok(steps) => steps.parse().unwrap(),
                Err(_) => crate::base::sampling::cases(STEPS),
            };
            let server = Server::start();
            let store = connected(PostgresStore::builder().create_table(Durability::Unlogged), &server.url()).await;
            play(Algorithm::$algorithm, Anchor::$anchor, steps, || store.clone()).await;
        }
    )*};
}

for_each_algorithm!(parity);

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Connects to a server that is there. A busy one may not answer in the time that `connect` waits.
async fn connected(builder: PostgresStoreBuilder, url: &str) -> PostgresStore {
    let began = Instant::now();
    loop {
        match builder.clone().connect(url).await {
            Ok(store) => return store,
            Err(error) => assert!(began.elapsed() < LONG, "the server is there: {error}"),
        }
    }
}

#[tokio::test]
async fn idle_connection_that_fell_silent_costs_no_check() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let url = proxy.url().replace("redis://", "postgres://postgres@") + "/postgres";
    // A check that comes while a ping is under way would open a second connection.
    let builder = PostgresStore::builder().create_table(Durability::Unlogged).max_connections(1);
    let store = connected(builder.ping_after(Duration::from_millis(100)), &url).await;
    let connections = "SELECT pid FROM pg_stat_activity WHERE application_name = 'tower-ratelimit'";
    let other_than = async |before: &[String], what: &str| {
        let began = Instant::now();
        loop {
            let now = server.query(connections).await;
            if now.len() == 1 && now != before {
                return now;
            }
            assert!(began.elapsed() < LONG, "{what}: no other connection is opened: {now:?}");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let mut before = other_than(&[], "connect").await;
    let began = Instant::now();
    loop {
        // The answer to a ping is lost, and then its connection.
        for fault in [Fault::Lose, Fault::HalfClose] {
            proxy.fault(fault.clone());
            before = other_than(&before, &format!("{fault:?}")).await;
        }
        // A silent connection gives no answer, and is closed in the end.
        store.load(&["key".into()]).await.unwrap();
        let now = server.query(connections).await;
        if now == before {
            break;
        }
        // A busy machine may answer a ping later than after two seconds, and then another connection is opened.
        assert!(began.elapsed() < LONG, "the new connection was used: {now:?}, {before:?}");
        before = now;
    }
}
