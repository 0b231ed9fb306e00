//! The settings of a store.

use std::ops::RangeInclusive;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::tls::Pem;
use crate::limiter::redis::client::RedisClient;
use crate::limiter::redis::credentials::CredentialSource;
use crate::limiter::redis::script::{Call, Script};
use crate::limiter::remote::DEADLINE;
use crate::outcome::Observer;

/// The bounds of the time that it may take to make a connection. The greeting on the connection may take the
/// same time again.
const CONNECT: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(15);

/// The time beyond the deadline for which a server may be silent.
const SILENCE_MIN: Duration = Duration::from_millis(200);
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// The least time that must be left for a call to be sent, unless the deadline is very short.
const LEAST_TIME: Duration = Duration::from_millis(1);

/// The number of consecutive failed attempts to connect after which a server is believed dead, if it was connected
/// before.
const FAILURES: u32 = 3;

/// The time without traffic after which the system probes whether a connection is alive. The same time passes
/// between two such probes. This process probes connections more often, but only the system's probes go on
/// while the process is suspended.
pub(super) const KEEPALIVE: Duration = Duration::from_secs(30);

/// The settings of a store.
#[derive(Clone)]
pub(in crate::limiter::redis) struct ConnectionSettings {
    pub(in crate::limiter::redis) client: RedisClient,
    /// The closure that returns the user and the password of each connection, unless the URL has them.
    pub(in crate::limiter::redis) credentials: Option<CredentialSource>,
    /// The certificates for TLS.
    pub(in crate::limiter::redis) pem: Pem,
    /// The call by which servers are probed. By default its script does nothing.
    pub(in crate::limiter::redis) probe: Call,
    /// The time that a call may take: from 1 ms to a minute.
    pub(in crate::limiter::redis) deadline: Duration,
    /// The number of consecutive failed attempts to connect after which a server is believed dead. For a connection
    /// of the application, this is the number of failed calls instead.
    pub(in crate::limiter::redis) failures: u32,
    /// The observers, which get the events of servers.
    pub(in crate::limiter::redis) observers: Vec<Arc<dyn Observer>>,
}

impl Default for ConnectionSettings {
    fn default() -> Self {
        static NOTHING: LazyLock<Script> = LazyLock::new(|| Script::new("return 1"));
        let (client, observers) = (RedisClient::default(), Vec::new());
        let probe = Call { script: &NOTHING, keys: Vec::new(), args: Vec::new() };
        Self {
            client,
            credentials: None,
            pem: Pem::default(),
            probe,
            deadline: DEADLINE,
            failures: FAILURES,
            observers,
        }
    }
}

impl ConnectionSettings {
    /// Moves the deadline into its range.
    pub(super) fn bounded(mut self) -> Self {
        self.deadline = self.deadline.clamp(Duration::from_millis(1), Duration::from_secs(60));
        self
    }

    /// Returns the least time that must be left for a call to be sent. It is a part of the deadline, because a check
    /// that is about to be sent has always used some of its time.
    pub(super) fn least_time(&self) -> Duration {
        LEAST_TIME.min(self.deadline / 4)
    }

    /// Returns the time for which a server may be silent while calls wait, before it is believed dead. The link waits
    /// for an answer during this time, although the caller stops waiting at the deadline. A late answer shows that
    /// the server is alive, and the charge of that answer is refunded.
    pub(super) fn silence(&self) -> Duration {
        self.deadline + self.deadline.clamp(SILENCE_MIN, SILENCE_MAX)
    }

    /// Returns the time that it may take to make a connection. The greeting on the connection, of up to five
    /// round trips, may take the same time again. A round trip may take up to the deadline.
    pub(super) fn connect_timeout(&self) -> Duration {
        (5 * self.deadline).clamp(*CONNECT.start(), *CONNECT.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn each_deadline_leaves_time_for_a_call() {
        for (deadline, least) in
            [(Duration::ZERO, MS / 4), (MS, MS / 4), (2 * MS, MS / 2), (4 * MS, MS), (DEADLINE, MS)]
        {
            let settings = ConnectionSettings { deadline, ..ConnectionSettings::default() }.bounded();
            assert_eq!(settings.least_time(), least, "of {deadline:?}");
        }
    }
}
