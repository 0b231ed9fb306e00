//! Waiting for what another process does by and by.

use std::time::{Duration, Instant};

use crate::http::get;
use crate::server::Server;

/// The time that anything may take on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Waits until this is so.
#[track_caller]
pub(crate) fn wait_until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG, "it is not so after {LONG:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the server is ready. It still says so for some seconds after its store has failed.
#[track_caller]
pub(crate) fn wait_until_ready(server: &Server) {
    wait_until(|| get(server.admin, "/ready", &[]).status == 200);
}
