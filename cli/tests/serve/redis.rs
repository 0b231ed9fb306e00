//! A Redis as a process.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::http::get;
use crate::server::{Folder, Server, free_port};

/// The time that anything may take on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A server that is killed at the end.
pub(crate) struct Redis {
    child: Child,
    port: u16,
    _folder: Folder,
}

impl Redis {
    pub(crate) fn start() -> Self {
        Self::start_at(free_port())
    }

    pub(crate) fn start_at(port: u16) -> Self {
        let folder = Folder::new();
        let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let mut command = Command::new(program);
        command.args(["--port", &port.to_string(), "--save", "", "--dir"]).arg(folder.path()).stdout(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| {
            panic!("{error}\nRedis is missing. Install it, on Debian with: apt-get install redis-server")
        });
        Self { child, port, _folder: folder }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until this is so.
pub(crate) fn wait_until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG);
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn wait_until_ready(server: &Server) {
    wait_until(|| get(server.admin, "/ready", &[]).status == 200);
}
