//! The credentials of one server's connection, and when they are renewed.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::settings::ConnectionSettings;
use crate::limiter::redis::credentials::{CredentialSource, RedisCredentials};

/// The time after which the application is asked again for credentials, if the application had none or the server
/// refused them.
pub(super) const RETRY: Duration = Duration::from_secs(5);

/// Asks for a server's credentials.
pub(super) struct Renewal {
    source: CredentialSource,
    /// The instant at which the connection needs newer credentials, or `None` if it never does.
    due: watch::Sender<Option<Instant>>,
}

impl Renewal {
    /// Returns `None` if the credentials are those of the URL.
    pub(super) fn new(settings: &ConnectionSettings) -> Option<Self> {
        let source = settings.credentials.clone()?;
        Some(Self { source, due: watch::Sender::new(None) })
    }

    /// Asks the application for credentials: for a connection that is being made, or to renew the credentials
    /// of a connection.
    ///
    /// # Errors
    /// Returns the reason why there are no credentials, as text.
    pub(super) async fn ask(&self) -> Result<RedisCredentials, String> {
        let answer = self.source.ask().await;
        match &answer {
            Ok(credentials) => self.set_due(credentials.time_to_renew()),
            Err(_) => self.set_due(Some(RETRY)),
        }
        answer
    }

    /// Asks again soon, because the server refused the credentials.
    pub(super) fn retry(&self) {
        self.set_due(Some(RETRY));
    }

    fn set_due(&self, after: Option<Duration>) {
        // If the sum overflows, no renewal is due.
        self.due.send_replace(after.and_then(|time| Instant::now().checked_add(time)));
    }

    /// Waits until the connection needs newer credentials.
    pub(super) async fn wait_until_due(&self) {
        let mut due = self.due.subscribe();
        loop {
            let at = *due.borrow_and_update();
            let wait = async {
                match at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => return,
                _ = due.changed() => {}
            }
        }
    }
}
