//! Says in plain words why there is no connection to a store.

use std::error::Error;
use std::fmt::Display;

use crate::error::WithSources;

/// Returns why there is no connection to a store: the store refuses connections, its name does not resolve, or the
/// connection was cut. `store` names the store. `error` is the error of a client library, which remains the source of
/// the limiter's error.
///
/// The error's text is read, because client libraries pass on errors of the operating system as text.
pub(crate) fn loss(store: &impl Display, error: &(dyn Error + 'static)) -> String {
    let words = WithSources(error).to_string().to_ascii_lowercase();
    let says = |parts: &[&str]| parts.iter().any(|part| words.contains(part));
    if says(&["refused"]) {
        format!("{store} refuses connections")
    } else if says(&["lookup address", "failed to resolve", "no such host"]) {
        format!("the host name of {store} does not resolve to an address")
    } else if says(&["unreachable", "no route"]) {
        format!("no route through the network leads to {store}")
    } else if says(&["timed out", "timedout", "did not answer"]) {
        format!("{store} is silent: it does not answer a new connection")
    } else if says(&["tls", "handshake", "invalidmessage", "invalidcontenttype", "corrupt"]) {
        format!("the TLS handshake with {store} failed")
    } else if says(&["protocol error", "parse error", "parsing"]) {
        format!("{store} sends bytes that are no answer")
    } else {
        format!("the connection to {store} was cut")
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn error_of_a_client_library_becomes_a_sentence() {
        for (words, said) in [
            (
                "Os { code: 111, kind: ConnectionRefused, message: \"Connection refused\" }",
                "here:1 refuses connections",
            ),
            ("Connection refused (os error 111)", "here:1 refuses connections"),
            (
                "failed to lookup address information: Name or service not known",
                "the host name of here:1 does not resolve to an address",
            ),
            ("Os { code: 113, kind: HostUnreachable }", "no route through the network leads to here:1"),
            ("connection timed out", "here:1 is silent: it does not answer a new connection"),
            ("tls handshake eof", "the TLS handshake with here:1 failed"),
            ("Protocol Error: Unexpected frame", "here:1 sends bytes that are no answer"),
            ("Unknown Error: channel closed", "the connection to here:1 was cut"),
            ("Connection reset by peer (os error 104)", "the connection to here:1 was cut"),
            ("broken pipe", "the connection to here:1 was cut"),
        ] {
            assert_eq!(loss(&"here:1", &io::Error::other(words)), said, "{words}");
        }
    }
}
