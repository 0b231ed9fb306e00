//! Why a call to a server failed, and what the error says.

use std::error::Error;
use std::time::Duration;

use super::address::Address;
use crate::event::StoreErrorKind;
use crate::limiter::redis::error::RedisError;
use crate::limiter::remote::loss;

/// A failed call: its cause, and the error.
#[derive(Clone, Debug)]
pub(super) struct CallFailure {
    pub(super) cause: Cause,
    pub(super) error: RedisError,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// The connection ended before the answer came, or could not be made. A call that was sent may have run.
    Lost,
    /// There is no connection, so the call was not sent.
    NotConnected,
    /// While the call waited, the server was silent for too long, so the server is believed dead. The call may
    /// have run.
    Silent,
    /// This process had no time to send the call, or to read the answer. Nothing is known about the
    /// server.
    NoTime,
    /// The script did not run, because the server does not know it.
    NoScript,
    /// The script did not run, because another server has the slot.
    Moved(Address),
    /// The slot is being moved to another server, which has these keys already. The script did not run.
    Ask(Address),
    /// The script did not run, because the keys are on two servers.
    TryAgain,
    /// The server is not a master any more, loads its data, or sees too few other servers. Another server may have
    /// the same address by now.
    Demoted,
    /// Any other answer.
    Answer,
}

impl Cause {
    /// Returns `true` if the script did not run. It is then sent again, to this server or another.
    pub(super) fn is_sent_again(&self) -> bool {
        matches!(self, Self::NoScript | Self::Moved(_) | Self::Ask(_) | Self::TryAgain)
    }

    /// Returns `true` if the server did not answer.
    pub(super) fn is_unanswered(&self) -> bool {
        matches!(self, Self::Lost | Self::NotConnected | Self::Silent | Self::NoTime)
    }
}

impl CallFailure {
    pub(super) fn lost(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { cause: Cause::Lost, error: RedisError::new(kind, message) }
    }

    pub(super) fn timeout(message: impl Into<String>) -> Self {
        Self::lost(StoreErrorKind::Timeout, message)
    }

    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self { cause: Cause::Answer, error: RedisError::new(StoreErrorKind::Unavailable, message) }
    }

    /// The failure of a call after the limiter has closed the link.
    pub(super) fn closed() -> Self {
        Self::unavailable("this store was closed")
    }

    /// The failure of a call to a server that is believed dead for no known reason.
    pub(super) fn dead(server: &Address) -> Self {
        Self::unavailable(format!("Redis at {server} does not answer"))
    }

    /// The failure of a call for which no time was left.
    pub(super) fn no_time(server: &Address) -> Self {
        let message = format!("no time was left for a call to Redis at {server}");
        Self { cause: Cause::NoTime, ..Self::timeout(message) }
    }

    /// The failure of a call whose answer this process had no time to read.
    pub(super) fn unread(server: &Address) -> Self {
        let error = RedisError::too_busy(&format!("no answer from Redis at {server} was read in time"));
        Self { cause: Cause::NoTime, error }
    }

    /// The failure of a call that was not answered within this time.
    pub(super) fn silent_or_slow(server: &Address, waited: Duration) -> Self {
        let waited = rounded(waited);
        Self::timeout(format!("no answer from Redis at {server} within {waited:?}: it is silent or slow"))
    }

    /// The failure of a call that waited while the server was silent for this time.
    pub(super) fn silent(server: &Address, silence: Duration) -> Self {
        let message = format!("Redis at {server} is silent: nothing has come from it for {silence:?}");
        Self { cause: Cause::Silent, ..Self::timeout(message) }
    }

    /// The failure of a call whose answer is lost, because the server answered later calls.
    pub(super) fn passed_over(server: &Address) -> Self {
        let message = format!("Redis at {server} answered later calls, but not this call");
        Self { cause: Cause::NoTime, ..Self::timeout(message) }
    }

    /// The failure of a call while the connection is being made. The attempt to connect has lasted for this time.
    pub(super) fn connecting(server: &Address, waited: Duration, uses_tls: bool) -> Self {
        let (waited, hint) = (rounded(waited), tls_hint(uses_tls));
        let message = format!(
            "there is no connection to Redis at {server} yet: it has not answered a new one for {waited:?}{hint}"
        );
        Self::lost(StoreErrorKind::Unavailable, message)
    }

    /// The failure of an attempt to connect that the server did not answer within this time.
    pub(super) fn unanswered_attempt(server: &Address, time: Duration, uses_tls: bool) -> Self {
        let hint = tls_hint(uses_tls);
        let message = format!("Redis at {server} is silent: no answer to a new connection within {time:?}{hint}");
        Self::lost(StoreErrorKind::Unavailable, message)
    }

    /// The failure of a call that was not sent, because there is no connection.
    pub(super) fn not_connected(server: &Address) -> Self {
        let message = format!("there is no connection to Redis at {server} yet");
        Self { cause: Cause::NotConnected, error: RedisError::new(StoreErrorKind::Unavailable, message) }
    }

    /// The failure of a call or a connection that ended because of an error.
    pub(super) fn disconnected(server: &Address, because: impl Error + Send + Sync + 'static) -> Self {
        let lost = loss(&format_args!("Redis at {server}"), &because);
        Self::lost(StoreErrorKind::Unavailable, lost).caused_by(because)
    }

    /// The failure of a connection whose server did not answer in time.
    pub(super) fn unanswered(server: &Address) -> Self {
        Self::timeout(format!("Redis at {server} is silent: no answer came in time"))
    }

    /// The failure of a connection to the master `name`, because these sentinels do not know it.
    pub(super) fn unknown_master(name: &str, sentinels: &str) -> Self {
        let message = format!(
            "the sentinels ({sentinels}) know no master of the name `{name}`: correct sentinelServiceName in the URL, or \
             wait until the sentinels watch it"
        );
        Self::lost(StoreErrorKind::Unavailable, message)
    }

    /// The failure of a connection to the master `name`, because sentinels do not tell its address for this reason.
    pub(super) fn without_sentinel(name: &str, reason: &str) -> Self {
        let message = format!("{reason}, so the address of master `{name}` is not known");
        Self::lost(StoreErrorKind::Unavailable, message)
    }

    pub(super) fn caused_by(self, because: impl Error + Send + Sync + 'static) -> Self {
        Self { cause: self.cause, error: self.error.caused_by(because) }
    }

    /// The failure of a connection for which the application had no credentials, with the reason.
    pub(super) fn without_credentials(server: &Address, why: &str) -> Self {
        Self::lost(StoreErrorKind::Unavailable, format!("no credentials for Redis at {server}: {why}"))
    }

    /// The failure of a client library that refused the settings, with the library's error.
    #[cfg(feature = "redis-rs")]
    pub(super) fn refused(error: RedisError) -> Self {
        Self { cause: Cause::Answer, error }
    }

    /// The failure of a client library that refused the settings, with the library's words.
    pub(super) fn unusable(server: &Address, words: &str) -> Self {
        Self {
            cause: Cause::Answer,
            error: misconfigured(format!("Redis at {server} cannot be used with these settings: {words}")),
        }
    }

    /// The failure of a connection for which the client library refused the server's certificate, with the
    /// library's words.
    pub(super) fn untrusted(server: &Address, words: &str) -> Self {
        Self {
            cause: Cause::Answer,
            error: misconfigured(format!(
                "the certificate of Redis at {server} is not trusted; name its authority's certificate with \
                 tls_authorities(…) or, with TLS by rustls, in SSL_CERT_FILE: {words}"
            )),
        }
    }

    /// The failure of a connection whose server refused the client's certificate, or requires one, with the client
    /// library's words.
    pub(super) fn unidentified(server: &Address, words: &str) -> Self {
        Self {
            cause: Cause::Answer,
            error: misconfigured(format!(
                "Redis at {server} wants another certificate of its client: set it with tls_identity(…): {words}"
            )),
        }
    }

    /// The failure of a connection because of TLS, if the words of its error are about a certificate.
    pub(super) fn of_certificates(server: &Address, words: &str) -> Option<Self> {
        let lower = words.to_ascii_lowercase();
        // `received fatal alert: CertificateRequired`, `AlertReceived(UnknownCA)`
        if lower.contains("alert") && (lower.contains("certificate") || lower.contains("unknownca")) {
            return Some(Self::unidentified(server, words));
        }
        lower.contains("certificate").then(|| Self::untrusted(server, words))
    }
}

pub(super) fn misconfigured(message: impl Into<String>) -> RedisError {
    RedisError::new(StoreErrorKind::Misconfigured, message)
}

/// The error of a server that answers no probe within this time. The connection was made in the time `connecting`.
pub(super) fn unanswered_probe(server: &Address, waited: Duration, connecting: Duration) -> RedisError {
    let (waited, connecting) = (rounded(waited), rounded(connecting));
    let message = format!(
        "Redis at {server} is silent: it answers no script within {waited:?}, over a connection that was made in \
         {connecting:?}; the server is busy or suspended, or the network is slow"
    );
    RedisError::new(StoreErrorKind::Unavailable, message)
}

/// The error of a call whose caller stops waiting, while the answers to other calls came too late. The last of them
/// took the time `took` after it was sent. Its caller may have waited before that.
pub(super) fn late_answers(server: &Address, took: Duration, deadline: Duration) -> RedisError {
    let waited = if took < deadline { " after a wait in this process" } else { "" };
    let message = format!(
        "answers of Redis at {server} come too late: the last late one took {took:.0?}{waited}, and the deadline is \
         {deadline:?}"
    );
    RedisError::new(StoreErrorKind::Timeout, message)
}

/// The error of a call whose caller stops waiting. `silence` is the time since something last came from the server.
pub(super) fn no_answer(server: &Address, deadline: Duration, silence: Duration) -> RedisError {
    let silence = rounded(silence);
    let found = if silence < deadline {
        "something came from it meanwhile, so it is slow or has just fallen silent".to_owned()
    } else {
        format!("nothing has come from it for {silence:?}")
    };
    RedisError::new(StoreErrorKind::Timeout, format!("no answer from Redis at {server} within {deadline:?}: {found}"))
}

/// Returns a hint for a server that does not answer although its URL asks for TLS. A server that does not speak TLS
/// waits for more bytes.
fn tls_hint(uses_tls: bool) -> &'static str {
    if uses_tls { "; if that port does not speak TLS, use a URL that begins with redis://" } else { "" }
}

/// Returns a time in whole milliseconds.
fn rounded(time: Duration) -> Duration {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_below_the_deadline_is_no_reason_for_a_failure() {
        let (server, ms) = (Address::new("cache", 6379), Duration::from_millis);
        for (error, said) in [
            (late_answers(&server, ms(41), ms(50)), "took 41ms after a wait in this process, and the deadline is 50ms"),
            (late_answers(&server, ms(67), ms(50)), "took 67ms, and the deadline is 50ms"),
            (
                no_answer(&server, ms(50), ms(4)),
                "something came from it meanwhile, so it is slow or has just fallen silent",
            ),
            (no_answer(&server, ms(50), ms(74)), "nothing has come from it for 74ms"),
        ] {
            assert!(error.to_string().ends_with(said), "{error}");
        }
    }
}
