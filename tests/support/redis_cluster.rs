//! A cluster of Redis servers for tests: three masters, each with a replica.
#![allow(dead_code, reason = "each test file uses its part")]

use std::time::Duration;

use tokio::time::Instant;

use super::redis_server::Server;

/// The number of slots of a cluster.
const SLOTS: u16 = 16_384;

/// The time that the servers may take to agree.
const AGREE: Duration = Duration::from_secs(120);

/// The masters come first, then the replica of each.
pub(crate) struct Cluster {
    pub(crate) servers: Vec<Server>,
    ids: Vec<String>,
}

impl Cluster {
    pub(crate) const MASTERS: usize = 3;

    /// Starts a cluster. A master that does not answer is replaced only after [`replace_soon`](Self::replace_soon),
    /// since a busy machine stops each of them now and then. The others serve meanwhile.
    pub(crate) fn start() -> Self {
        let options = [
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            "2000",
            "--cluster-require-full-coverage",
            "no",
            "--cluster-replica-validity-factor",
            "0",
            "--repl-diskless-sync-delay",
            "0",
        ];
        let servers: Vec<_> = (0..2 * Self::MASTERS).map(|_| Server::with(&options)).collect();
        let ids = servers.iter().map(|server| ask(server, &["MYID"])).collect();
        let cluster = Self { servers, ids };
        for master in 0..Self::MASTERS {
            let (first, last) = Self::slots(master);
            // Redis 6.2 has no ranges.
            let slots: Vec<String> = (first..=last).map(|slot| slot.to_string()).collect();
            let slots: Vec<&str> = slots.iter().map(String::as_str).collect();
            cluster.tell(master, &[&["ADDSLOTS"], &slots[..]].concat());
        }
        for (at, server) in cluster.servers.iter().enumerate() {
            cluster.tell(at, &["SET-CONFIG-EPOCH", &(at + 1).to_string()]);
            if at > 0 {
                cluster.tell(0, &["MEET", "127.0.0.1", &server.port().to_string()]);
            }
        }
        let all = format!("cluster_known_nodes:{}", cluster.servers.len());
        cluster.wait("knows of all", |server| ask(server, &["INFO"]).contains(&all));
        for master in 0..Self::MASTERS {
            cluster.tell(Self::MASTERS + master, &["REPLICATE", &cluster.ids[master]]);
        }
        cluster.wait("is ok, with a replica for each master", |server| {
            let rows: Vec<(u16, u16, redis::Value, Option<redis::Value>)> =
                redis::cmd("CLUSTER").arg("SLOTS").query(&mut server.connection()).unwrap_or_default();
            ask(server, &["INFO"]).contains("cluster_state:ok")
                && rows.len() == Self::MASTERS
                && rows.iter().all(|row| row.3.is_some())
        });
        for master in 0..Self::MASTERS {
            let began = Instant::now();
            let info = |at: usize| -> String {
                redis::cmd("INFO").arg("replication").query(&mut cluster.servers[at].connection()).unwrap()
            };
            while !info(Self::MASTERS + master).contains("master_link_status:up") {
                assert!(began.elapsed() < AGREE, "replica {master} does not reach its master");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        cluster.replace_after(Duration::from_secs(600));
        cluster
    }

    /// From now on a master that does not answer is replaced after 2 s.
    pub(crate) fn replace_soon(&self) {
        self.replace_after(Duration::from_secs(2));
    }

    fn replace_after(&self, time: Duration) {
        for server in &self.servers {
            let mut command = redis::cmd("CONFIG");
            command.arg(&["SET", "cluster-node-timeout", &time.as_millis().to_string()]);
            command.exec(&mut server.connection()).unwrap();
        }
    }

    /// Returns the first and the last slot of a master.
    pub(crate) fn slots(master: usize) -> (u16, u16) {
        let each = SLOTS / Self::MASTERS as u16;
        let last = if master + 1 == Self::MASTERS { SLOTS - 1 } else { each * (master as u16 + 1) - 1 };
        (each * master as u16, last)
    }

    /// Returns a URL, which names only one of the servers.
    pub(crate) fn url(&self) -> String {
        format!("redis-cluster://127.0.0.1:{}", self.servers[0].port())
    }

    /// Sends `CLUSTER …` to a server.
    pub(crate) fn tell(&self, at: usize, command: &[&str]) {
        let _: redis::Value = redis::cmd("CLUSTER").arg(command).query(&mut self.servers[at].connection()).unwrap();
    }

    /// Begins to move a slot.
    pub(crate) fn begin_to_move(&self, slot: u16, from: usize, to: usize) {
        self.tell(to, &["SETSLOT", &slot.to_string(), "IMPORTING", &self.ids[from]]);
        self.tell(from, &["SETSLOT", &slot.to_string(), "MIGRATING", &self.ids[to]]);
    }

    /// Returns the keys of a slot that a server has.
    pub(crate) fn keys(&self, slot: u16, at: usize) -> Vec<String> {
        let mut command = redis::cmd("CLUSTER");
        command.arg("GETKEYSINSLOT").arg(slot).arg(10_000).query(&mut self.servers[at].connection()).unwrap()
    }

    /// Moves a key to the slot's new server.
    pub(crate) fn carry(&self, key: &str, from: usize, to: usize) {
        let port = self.servers[to].port().to_string();
        let _: redis::Value = redis::cmd("MIGRATE")
            .arg(&["127.0.0.1", &port, key, "0", "5000"])
            .query(&mut self.servers[from].connection())
            .unwrap();
    }

    /// Ends the move of a slot.
    pub(crate) fn end_to_move(&self, slot: u16, from: usize, to: usize) {
        for at in [to, from, Self::MASTERS - from - to] {
            self.assign(at, slot, to);
        }
    }

    /// Informs one server where a slot is.
    pub(crate) fn assign(&self, at: usize, slot: u16, to: usize) {
        self.tell(at, &["SETSLOT", &slot.to_string(), "NODE", &self.ids[to]]);
    }

    /// Returns whether a server is a master now.
    pub(crate) fn is_master(&self, at: usize) -> bool {
        let role: String = redis::cmd("INFO").arg("replication").query(&mut self.servers[at].connection()).unwrap();
        role.contains("role:master")
    }

    fn wait(&self, what: &str, is: impl Fn(&Server) -> bool) {
        let began = Instant::now();
        while !self.servers.iter().all(&is) {
            assert!(began.elapsed() < AGREE, "not every server of the cluster {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn ask(server: &Server, command: &[&str]) -> String {
    redis::cmd("CLUSTER").arg(command).query(&mut server.connection()).unwrap()
}
