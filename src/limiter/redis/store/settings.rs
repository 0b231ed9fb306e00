//! The settings of a store.

use std::sync::Arc;
use std::time::Duration;

use super::tls::Pem;
use crate::limiter::redis::client::RedisClient;
use crate::limiter::redis::credentials::CredentialSource;
use crate::outcome::Observer;

/// The time that a connection may take, and again its greeting.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// The interval at which a server that is believed dead is probed, unless the deadline is long.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// The settings of a store.
#[derive(Clone)]
pub(in crate::limiter::redis) struct Settings {
    pub(in crate::limiter::redis) client: RedisClient,
    /// Asked for the user and the password of each connection, unless the URL has them.
    pub(in crate::limiter::redis) credentials: Option<CredentialSource>,
    /// The certificates for TLS.
    pub(in crate::limiter::redis) pem: Pem,
    /// The time that a call may take: from 2 ms, because timers are no finer, to a minute.
    pub(in crate::limiter::redis) deadline: Duration,
    /// The number of calls in a row without an answer after which a server is believed dead.
    pub(in crate::limiter::redis) failures: u32,
    /// The observers, which get the events of servers.
    pub(in crate::limiter::redis) observers: Vec<Arc<dyn Observer>>,
}

impl Default for Settings {
    fn default() -> Self {
        let deadline = Duration::from_millis(50);
        let (client, observers) = (RedisClient::default(), Vec::new());
        Self { client, credentials: None, pem: Pem::default(), deadline, failures: 5, observers }
    }
}

impl Settings {
    /// Moves the deadline into its range.
    pub(super) fn bounded(mut self) -> Self {
        self.deadline = self.deadline.clamp(Duration::from_millis(2), Duration::from_secs(60));
        self
    }

    /// The time for which a connection may owe an answer before it is closed.
    pub(super) fn patience(&self) -> Duration {
        (self.deadline * 3).max(Duration::from_millis(150))
    }

    /// Returns the time between two probes. A client may begin its patience anew with each
    /// write, so probes come less often than that.
    pub(super) fn probe_every(&self) -> Duration {
        PROBE_EVERY.max(self.patience() + Duration::from_millis(50))
    }
}
