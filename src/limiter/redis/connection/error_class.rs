//! Classifies the server's errors, by their text.

use super::address::Address;
use super::failure::{CallFailure, Cause};
use crate::event::StoreErrorKind;
use crate::limiter::redis::error::RedisError;

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
