//! `RedisLimiter` passes the conformance suite.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tower_ratelimit::conformance::{Subject, Task, check};
use tower_ratelimit::{
    RedisLimiter,
    clock::{ManualClock, Timestamp},
};

use crate::support::redis_server::Server;

struct OnRedis {
    server: Server,
    clock: ManualClock,
    readable: bool,
    made: AtomicU32,
}

impl OnRedis {
    fn new(readable: bool) -> Self {
        let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
        Self { server: Server::start(), clock, readable, made: AtomicU32::new(0) }
    }
}

impl Subject for OnRedis {
    type Limiter = RedisLimiter;

    async fn limiter(&self) -> RedisLimiter {
        // Denials are not cached here, because their clock is not the advanced one.
        let builder = super::patient().clock(self.clock.clone()).max_denials(0);
        // The clock is advanced by hours, and no process renews its places meanwhile.
        let builder = builder.places_lapse_after(Duration::from_secs(24 * 3_600));
        let builder = builder.prefix(format!("ratelimit:suite-{}", self.made.fetch_add(1, Ordering::Relaxed)));
        let builder = builder.readable_keys(self.readable);
        super::connected(builder, &self.server.url()).await
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    /// The limiter's futures need the runtime.
    fn spawn(&self, task: Task) {
        tokio::spawn(task);
    }
}

/// Every key that a script has written has an expiry.
fn audit(server: &Server) {
    let mut connection = server.connection();
    let keys = super::keys(server);
    assert!(keys.len() > 50, "the suite left {} keys", keys.len());
    for key in keys {
        let left_ms: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
        // -2: it has ended since. -1: it has no end.
        assert!(left_ms >= 0 || left_ms == -2, "{} ends in {left_ms} ms", String::from_utf8_lossy(&key));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limiter_keeps_every_promise_and_every_key_ends() {
    let subject = OnRedis::new(false);
    let report = check(&subject).await.unwrap_or_else(|failures| panic!("{failures}"));
    assert!(report.skipped().is_empty(), "{report}");
    audit(&subject.server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limiter_with_readable_keys_keeps_every_promise() {
    let subject = OnRedis::new(true);
    let report = check(&subject).await.unwrap_or_else(|failures| panic!("{failures}"));
    assert!(report.skipped().is_empty(), "{report}");
    audit(&subject.server);
}
