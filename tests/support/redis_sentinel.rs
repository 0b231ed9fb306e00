//! A master, its replica, and a sentinel that watches them, for tests.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use tokio::time::Instant;

use super::redis_server::Server;

/// The master comes first, then its replica.
pub(crate) struct Sentinel {
    pub(crate) servers: [Server; 2],
    sentinel: Server,
}

impl Sentinel {
    /// A master that does not answer for half a second is replaced.
    pub(crate) fn start() -> Self {
        let master = Server::start();
        let replica = Server::with(&["--replicaof", "127.0.0.1", &master.port().to_string()]);
        let sentinel = Server::sentinel(&[
            format!("sentinel monitor tested 127.0.0.1 {} 1", master.port()),
            "sentinel down-after-milliseconds tested 500".to_owned(),
            "sentinel failover-timeout tested 3000".to_owned(),
        ]);
        let all = Self { servers: [master, replica], sentinel };
        all.wait("sees the replica", "num-slaves", "1");
        all
    }

    pub(crate) fn url(&self) -> String {
        format!("redis-sentinel://127.0.0.1:{}?sentinelServiceName=tested", self.sentinel.port())
    }

    /// Waits until the sentinel names the replica as master.
    pub(crate) fn wait_for_replacement(&self) {
        self.wait("names another master", "port", &self.servers[1].port().to_string());
    }

    fn wait(&self, what: &str, field: &str, value: &str) {
        let mut connection = self.sentinel.connection();
        let began = Instant::now();
        loop {
            let fields: Vec<String> =
                redis::cmd("SENTINEL").arg(&["MASTER", "tested"]).query(&mut connection).unwrap_or_default();
            if fields.chunks(2).any(|pair| pair == [field, value]) {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(120), "the sentinel never {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
