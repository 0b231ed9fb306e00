//! The server: what it decides by, and where it is on its way to its end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tower_ratelimit::observe::{Stats, StatusPage};

use super::held::Held;
use super::limits::Limits;
use super::log::Log;
use super::operators::Operators;
use super::uri::Paths;

/// Everything that answers requests.
pub(crate) struct Server {
    pub(crate) limits: Limits,
    pub(crate) paths: Paths,
    pub(crate) held: Held,
    pub(crate) log: Log,
    pub(crate) stats: Stats,
    pub(crate) page: StatusPage,
    pub(crate) operators: Option<Operators>,
    pub(crate) phase: watch::Receiver<Phase>,
    /// When the server began, and the millisecond of the last line about something that any peer can cause.
    pub(crate) started: Instant,
    pub(crate) noted: AtomicU64,
}

/// The time between two lines of the log about something that any peer can cause.
const NOTE_EVERY: Duration = Duration::from_secs(10);

/// The longest time for asking the store whether it decides.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// The role of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Proxies and applications ask here.
    Asked,
    /// Operators come here.
    Admin,
}

/// Where the server is on its way to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// It is not ready any more, and still answers.
    Draining,
    /// It accepts no connections, and answers what is under way.
    Ending,
}

impl Server {
    /// Returns why the server should get no requests, if so.
    pub(crate) async fn readiness(&self) -> Result<(), String> {
        if *self.phase.borrow() != Phase::Serving {
            return Err("the server ends".to_owned());
        }
        let probe = tokio::time::timeout(PROBE_TIME, self.limits.probe()).await;
        probe.unwrap_or_else(|_| Err("the store does not answer".to_owned()))
    }

    /// Writes a line about something that any peer can cause, at most once in ten seconds.
    pub(crate) fn log_sometimes(&self, event: &str, message: &str) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        let last = self.noted.load(Ordering::Relaxed);
        let is_due = last == 0 || u128::from(now.saturating_sub(last)) >= NOTE_EVERY.as_millis();
        if is_due && self.noted.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            self.log.warn(event, message);
        }
    }
}
