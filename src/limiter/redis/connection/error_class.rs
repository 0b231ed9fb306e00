//! Classifies the server's errors, by their text, and lost connections.

use std::error::Error;

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

/// Classifies the text of an error that `server` returned, to a command or within a script.
pub(super) fn answer(text: &str, server: &Address) -> CallFailure {
    let text = text.trim_start_matches('-');
    let mut words = text.split_whitespace();
    let word = words.next().unwrap_or("");
    // `MOVED 3999 127.0.0.1:6381`
    let target = words.nth(1).and_then(|target| Address::parse(target, server));
    // Redis 6.2 wraps the errors within a script: `ERR Error running script ... @user_script:1: OOM
    // command not allowed ...`
    let has =
        |code: &&str| word == *code || [" ", " -"].iter().any(|before| text.contains(&format!("{before}{code} ")));
    let (cause, (kind, said)) = match (word, target) {
        ("NOSCRIPT", _) => (Cause::NoScript, (StoreErrorKind::Unavailable, "does not know the script")),
        ("MOVED", Some(target)) => (Cause::Moved(target), (StoreErrorKind::Unavailable, "does not have the slot")),
        ("ASK", Some(target)) => (Cause::Ask(target), (StoreErrorKind::Unavailable, "is giving the slot away")),
        ("TRYAGAIN", _) => (Cause::TryAgain, (StoreErrorKind::Unavailable, "is giving the slot away")),
        _ if DEMOTED.iter().any(has) => (Cause::Demoted, (StoreErrorKind::Unavailable, "cannot write now")),
        _ => (Cause::Answer, meaning(text, has)),
    };
    CallFailure { cause, error: RedisError::new(kind, format!("Redis at {server} {said}: {text}")) }
}

/// Returns the kind of an error that changes no state of the limiter, and a description of the server's behaviour.
/// `has` says whether the text has a code.
fn meaning(text: &str, has: impl Fn(&&str) -> bool) -> (StoreErrorKind, &'static str) {
    let is_code = |words: &str| words.bytes().all(|byte| byte.is_ascii_uppercase());
    let says = |words: &&str| if is_code(words) { has(words) } else { text.contains(words) };
    let known = MEANINGS.iter().find(|(words, ..)| words.iter().any(says));
    // An error that is not in `MEANINGS` may be temporary: too many clients, a proxy without a server, or an error of
    // a later version.
    known.map_or((StoreErrorKind::Unavailable, "cannot serve now"), |(_, kind, said)| (*kind, said))
}

/// Codes of a server that is no longer a master, or may no longer be the master. A master that was cut off sees
/// too few replicas, and a replaced master loads the data of the new master.
const DEMOTED: [&str; 5] = ["READONLY", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "LOADING"];

/// Codes or other words of errors, with their meanings. The first entry that fits counts.
const MEANINGS: [(&[&str], StoreErrorKind, &str); 8] = [
    (&["NOAUTH", "WRONGPASS"], StoreErrorKind::Misconfigured, "wants another user or password"),
    // Valkey and Redis 7.2 or later send the second text, and earlier versions of Redis send the third.
    (
        &["NOPERM", "ACL failure in script", "user executing the script can't"],
        StoreErrorKind::Misconfigured,
        "gives its user too few rights; grant them with ACL SETUSER <user> +eval +evalsha +time +get +set +psetex \
         +del +lrange +lindex +llen +lset +ltrim +rpush +rpop +pexpire ~<prefix>:* and, in a cluster, +cluster|slots \
         +asking",
    ),
    (&["BUSY", "OOM", "MISCONF", "UNKILLABLE"], StoreErrorKind::Unavailable, "cannot serve now"),
    (&["WRONGTYPE"], StoreErrorKind::Foreign, "has a value of another type under a key"),
    (
        &["unknown command", "Unknown Redis command", "Error compiling script"],
        StoreErrorKind::Misconfigured,
        "does not know a command or cannot compile the script; Redis 6.2 or later is needed, a proxy must forward \
         EVALSHA and EVAL, and if this is a sentinel, use a URL that begins with redis-sentinel://",
    ),
    (
        &["cluster support disabled"],
        StoreErrorKind::Misconfigured,
        "is not a cluster: use a URL that begins with redis:// or rediss://",
    ),
    (
        &["Error running script", "user_script"],
        StoreErrorKind::Foreign,
        "has a stored value that the script cannot read",
    ),
    // These errors stay until the configuration is fixed: keys of several slots, a password for a server that has
    // none, a database that does not exist, a server in protected mode, or a server that does not know the subcommand
    // or wants another number of arguments.
    (
        &[
            "CROSSSLOT",
            "without any password configured",
            "no password is set",
            "DB index",
            "SELECT is not allowed in cluster mode",
            "protected mode",
            "wrong number of arguments",
            "unknown subcommand",
        ],
        StoreErrorKind::Misconfigured,
        "cannot be used with these settings",
    ),
];

pub(super) fn misconfigured(message: impl Into<String>) -> RedisError {
    RedisError::new(StoreErrorKind::Misconfigured, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind_of(text: &str) -> (StoreErrorKind, Cause) {
        let failure = answer(text, &Address::new("here", 1));
        (failure.error.kind(), failure.cause)
    }

    #[test]
    fn server_error_is_not_held_against_the_server() {
        use StoreErrorKind::{Foreign, Misconfigured, Unavailable};
        for (text, kind) in [
            ("LOADING Redis is loading the dataset in memory", Unavailable),
            ("BUSY Redis is busy running a script.", Unavailable),
            ("MASTERDOWN Link with MASTER is down", Unavailable),
            ("CLUSTERDOWN Hash slot not served", Unavailable),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Unavailable),
            ("READONLY You can't write against a read only replica.", Unavailable),
            ("OOM command not allowed when used memory > 'maxmemory'.", Unavailable),
            ("MISCONF Redis is configured to save RDB snapshots", Unavailable),
            ("ERR Error running script (call to f_1): @user_script:1: OOM command not allowed when", Unavailable),
            (
                "ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY You can't",
                Unavailable,
            ),
            ("ERR Error running script (call to f_1): @user_script:1: WRONGTYPE Operation against", Foreign),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Foreign),
            ("ERR user_script:1: attempt to perform arithmetic on a nil value script: ab, on @user_script:1.", Foreign),
            ("NOAUTH Authentication required.", Misconfigured),
            ("WRONGPASS invalid username-password pair", Misconfigured),
            ("NOPERM User x has no permissions to run the 'evalsha' command", Misconfigured),
            ("ERR ACL failure in script: User x has no permissions to run the 'get' command", Misconfigured),
            (
                "ERR The user executing the script can't run this command or subcommand script: 8c, on @user",
                Misconfigured,
            ),
            ("ERR ACL failure in script: No permissions to access a key", Misconfigured),
            ("ERR max number of clients reached", Unavailable),
            ("ERR max number of clients + cluster connections reached", Unavailable),
            ("ERR something that no version says yet", Unavailable),
            ("ERR DB index is out of range", Misconfigured),
            ("CROSSSLOT Keys in request don't hash to the same slot", Misconfigured),
            ("ERR unknown command 'EVALSHA', with args beginning with:", Misconfigured),
            ("ERR Error compiling script (new function): user_script:1: '=' expected near", Misconfigured),
        ] {
            let (is, cause) = kind_of(text);
            assert_eq!(is, kind, "{text}");
            assert_ne!(cause, Cause::Lost, "{text}");
        }
    }

    #[test]
    fn server_that_may_have_been_replaced_is_told_from_others() {
        for (text, is_demoted) in [
            ("READONLY You can't write against a read only replica.", true),
            ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", true),
            ("CLUSTERDOWN Hash slot not served", true),
            ("NOREPLICAS Not enough good replicas to write.", true),
            ("LOADING Redis is loading the dataset in memory", true),
            ("ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY You can't", true),
            ("BUSY Redis is busy running a script.", false),
            ("OOM command not allowed when used memory > 'maxmemory'.", false),
            ("MISCONF Redis is configured to save RDB snapshots", false),
        ] {
            assert_eq!(kind_of(text).1 == Cause::Demoted, is_demoted, "{text}");
        }
    }

    #[test]
    fn words_met_within_a_script_mean_the_same() {
        use StoreErrorKind::{Misconfigured, Unavailable};
        for (text, kind) in [
            ("@user_script: 1: The user executing the script can't run this command or subcommand", Misconfigured),
            ("=[C]: -1: The user executing the script can't access at least one of the keys mentioned", Misconfigured),
            ("ERR The user executing the script can't run this command or subcommand", Misconfigured),
            ("ERR ACL failure in script: User x has no permissions to run the 'get' command", Misconfigured),
            ("-OOM command not allowed when used memory > 'maxmemory'.", Unavailable),
            ("=[C]: -1: -OOM command not allowed when used memory > 'maxmemory'.", Unavailable),
            ("READONLY You can't write against a read only replica.", Unavailable),
        ] {
            assert_eq!(answer(text, &Address::new("here", 1)).error.kind(), kind, "{text}");
        }
    }

    #[test]
    fn a_redirection_names_the_other_server() {
        let moved = |text| kind_of(text).1;
        assert_eq!(moved("MOVED 3999 10.0.0.1:6381"), Cause::Moved(Address::new("10.0.0.1", 6381)));
        assert_eq!(moved("MOVED 3999 :6381"), Cause::Moved(Address::new("here", 6381)));
        assert_eq!(moved("ASK 3999 ::1:6381"), Cause::Ask(Address::new("::1", 6381)));
        assert_eq!(moved("MOVED 3999 nonsense"), Cause::Answer);
        assert_eq!(moved("MOVED"), Cause::Answer);
    }

    #[test]
    fn missing_right_is_reported_with_the_line_that_grants_it() {
        let words = "NOPERM User x has no permissions to run the 'evalsha' command";
        let text = answer(words, &Address::new("here", 1)).error.to_string();
        assert!(text.contains("ACL SETUSER") && text.contains("+evalsha") && text.contains("here:1"), "{text}");
    }
}
