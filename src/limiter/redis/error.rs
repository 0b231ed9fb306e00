//! The errors of the limiter.

use crate::error::kind_and_message;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{Events, RemoteError, Unanswered, while_down};

kind_and_message! {
    /// The reason why Redis did not decide. [`kind`](Self::kind) says what to do about the error. The text says whether
    /// Redis refuses connections, its name does not resolve, the connection was cut, Redis is silent, or answers come
    /// too late. If a connection was lost, the [source](std::error::Error::source) has the client library's words.
    RedisError, StoreErrorKind
}

impl RedisError {
    /// Returns the error of a check for which this process had no time.
    pub(super) fn too_busy(what: &str) -> Self {
        Self::new(StoreErrorKind::Overloaded, format!("{what}: this process is too busy"))
    }

    /// Returns the error of a check that is not sent because the server is down for the reason in this error.
    pub(super) fn while_down(&self) -> Self {
        let message = while_down(&self.message).into();
        Self { kind: StoreErrorKind::Unavailable, message, source: self.source.clone() }
    }

    /// Returns the error of a check that was under way when the limiter ended the connection for the reason in this
    /// error.
    pub(super) fn after_restart(&self) -> Self {
        let message = format!("{}; the limiter has ended this connection", self.message).into();
        Self { kind: StoreErrorKind::Unavailable, message, source: self.source.clone() }
    }

    /// Reports the error to observers, as the failure of a check.
    pub(super) fn report_to(&self, events: &Events) {
        events.report_failure(self.kind, self);
    }
}

impl From<Unanswered> for RedisError {
    fn from(why: Unanswered) -> Self {
        let (kind, message) = why.kind_and_message();
        Self::new(kind, message)
    }
}

impl RemoteError for RedisError {
    fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn unanswered_check_is_the_servers_failure_only_if_it_was_sent() {
        let time = Duration::from_millis(50);
        for (why, kind) in [
            (Unanswered::NoRuntime, StoreErrorKind::Misconfigured),
            (Unanswered::TooMany(5), StoreErrorKind::Overloaded),
            (Unanswered::NotSent(time), StoreErrorKind::Overloaded),
            (Unanswered::TooBusy(time), StoreErrorKind::Overloaded),
            (Unanswered::TimedOut { deadline: time, quickest: None }, StoreErrorKind::Timeout),
            (Unanswered::RuntimeEnded, StoreErrorKind::Unavailable),
            (Unanswered::LeftOut, StoreErrorKind::Foreign),
        ] {
            assert_eq!(RedisError::from(why).kind(), kind, "{why:?}");
        }
    }
}
