//! The server: what it decides by, and where it is on its way to its end.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::observe::{Stats, StatusPage};

use super::health::Health;
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
    pub(crate) operators: Option<Arc<Operators>>,
    /// The names under which browsers reach the operators' address.
    pub(crate) admin_hosts: Vec<String>,
    pub(crate) health: Health,
    /// The number of requests with a wrong name or token of an operator.
    pub(crate) unauthorized: AtomicU64,
    /// When the log last had a line of these kinds, which any peer can cause.
    pub(crate) noted: Mutex<BTreeMap<&'static str, Instant>>,
}

/// The time between two lines of the log about something that any peer can cause.
const NOTE_EVERY: Duration = Duration::from_secs(10);

/// The role of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Proxies and applications ask here.
    Asked,
    /// Operators come here.
    Admin,
}

impl Server {
    /// Writes a line about something that any peer can cause, at most one of each kind in ten seconds.
    pub(crate) fn log_sometimes(&self, event: &'static str, message: &str) {
        let now = Instant::now();
        let is_due = {
            let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
            let is_due = noted.get(event).is_none_or(|last| now.duration_since(*last) >= NOTE_EVERY);
            if is_due {
                noted.insert(event, now);
            }
            is_due
        };
        if is_due {
            self.log.warn(event, message);
        }
    }
}
