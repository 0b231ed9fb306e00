//! The errors of the limiter.

use std::fmt;

/// Why Redis did not decide. [`kind`](Self::kind) says what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisError {
    kind: RedisErrorKind,
    message: Box<str>,
}

/// The kinds of [`RedisError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedisErrorKind {
    /// Redis cannot serve now: no connection, loading, failing over, read-only, out of memory. It
    /// passes by itself.
    Unavailable,
    /// No answer came within the deadline. The charge may have been taken.
    Timeout,
    /// Too many checks wait already; this one was not sent.
    Overloaded,
    /// A person has to fix it: a wrong password, a missing right, a URL that is not valid, a server
    /// that is too old, or a set of charges that Redis cannot decide.
    Misconfigured,
    /// The stored value is not one of this crate's, or the reply is not one of its scripts'.
    Foreign,
}

impl RedisError {
    pub(crate) fn new(kind: RedisErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into().into_boxed_str() }
    }

    /// Returns what kind of error it is.
    #[must_use]
    pub fn kind(&self) -> RedisErrorKind {
        self.kind
    }
}

impl fmt::Display for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for RedisError {}
