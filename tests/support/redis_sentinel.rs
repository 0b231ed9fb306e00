//! A master, its replica, and a sentinel that watches them, for tests.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use tokio::time::Instant;

use super::redis_server::Server;

/// The time that the servers may take to agree.
const AGREE: Duration = Duration::from_secs(120);

/// The master comes first, then its replica.
pub(crate) struct Sentinel {
    pub(crate) servers: [Server; 2],
    sentinel: Server,
}

impl Sentinel {
    /// Starts them. The master is replaced by [`replace_master`](Self::replace_master) only, since a busy machine
    /// stops each of them now and then.
    pub(crate) fn start() -> Self {
        let master = Server::with(&["--repl-diskless-sync-delay", "0"]);
        let replica = Server::with(&["--replicaof", "127.0.0.1", &master.port().to_string()]);
        wait_for_replica(&replica, |says| says.contains("master_link_status:up"));
        let sentinel = Server::sentinel(&[
            format!("sentinel monitor tested 127.0.0.1 {} 1", master.port()),
            "sentinel down-after-milliseconds tested 600000".to_owned(),
            "sentinel failover-timeout tested 3000".to_owned(),
        ]);
        let all = Self { servers: [master, replica], sentinel };
        all.wait("sees the replica", "num-slaves", "1");
        all
    }

    pub(crate) fn url(&self) -> String {
        format!("redis-sentinel://127.0.0.1:{}?sentinelServiceName=tested", self.sentinel.port())
    }

    /// Kills the master, and waits until the sentinel names the replica as master. The replica has what was written
    /// before.
    pub(crate) fn replace_master(&mut self) {
        let written = offset(&replication(&self.servers[0]), "master_repl_offset:");
        wait_for_replica(&self.servers[1], |says| offset(says, "slave_repl_offset:") >= written);
        self.servers[0].kill();
        self.replace_after("500");
        self.wait("names another master", "port", &self.servers[1].port().to_string());
        self.replace_after("600000");
    }

    fn replace_after(&self, milliseconds: &str) {
        let mut command = redis::cmd("SENTINEL");
        command.arg(&["SET", "tested", "down-after-milliseconds", milliseconds]);
        command.exec(&mut self.sentinel.connection()).unwrap();
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
            assert!(began.elapsed() < AGREE, "the sentinel never {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn wait_for_replica(replica: &Server, is_so: impl Fn(&str) -> bool) {
    let began = Instant::now();
    while !is_so(&replication(replica)) {
        assert!(began.elapsed() < AGREE, "the replica does not follow its master");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns what a server says about its replication.
fn replication(server: &Server) -> String {
    redis::cmd("INFO").arg("replication").query(&mut server.connection()).unwrap()
}

/// Returns how far the writes have come that a server has made or taken over.
fn offset(replication: &str, field: &str) -> u64 {
    let line = replication.lines().find_map(|line| line.strip_prefix(field));
    line.expect("the server says it").trim().parse().unwrap()
}
