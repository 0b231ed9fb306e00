//! The contracts of stores and of limiters, kept by PostgreSQL, directly and behind a PgBouncer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::conformance::{self, Subject, Task};
use tower_ratelimit::limiter::store::postgres::Durability;

use super::support::postgres::{PgBouncer, Server};
use super::{PostgresLimiter, connected, creating, patient, store};

/// Limiters over one server, each with a prefix of its own.
struct Limiters {
    url: String,
    clock: ManualClock,
    made: AtomicU32,
}

impl Limiters {
    fn at(url: String) -> Self {
        Self { url, clock: ManualClock::new(), made: AtomicU32::new(0) }
    }
}

impl Subject for Limiters {
    type Limiter = PostgresLimiter;

    async fn limiter(&self) -> PostgresLimiter {
        let prefix = self.made.fetch_add(1, Ordering::Relaxed).to_string();
        // The clock is advanced by hours, and no process renews its places meanwhile.
        let builder =
            patient().prefix(prefix).clock(self.clock.clone()).places_lapse_after(Duration::from_secs(86_400));
        builder.build(store(&self.url).await).expect("there is a runtime")
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    fn spawn(&self, task: Task) {
        tokio::spawn(task);
    }
}

async fn passes(url: String) {
    let report = conformance::check(&Limiters::at(url)).await.unwrap_or_else(|failures| panic!("{failures}"));
    assert!(report.skipped().is_empty(), "{report}");
}

#[tokio::test]
async fn store_keeps_the_contract_of_stores() {
    let server = Server::start();
    for durability in [Durability::Logged, Durability::Unlogged] {
        let builder = creating(durability).table(format!("t_{durability}"));
        let store = connected(builder, &server.url()).await;
        conformance::check_store(&store).await.unwrap_or_else(|failures| panic!("{failures}"));
    }
}

#[tokio::test]
async fn store_behind_pgbouncer_keeps_the_contract_of_stores() {
    let server = Server::start();
    let bouncer = PgBouncer::before(&server);
    let store = store(&bouncer.url()).await;
    conformance::check_store(&store).await.unwrap_or_else(|failures| panic!("{failures}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn limiter_passes_the_suite() {
    let server = Server::start();
    passes(server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn limiter_behind_pgbouncer_passes_the_suite() {
    let server = Server::start();
    let bouncer = PgBouncer::before(&server);
    passes(bouncer.url()).await;
}
