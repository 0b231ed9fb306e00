//! What may be wrong with a store.

use std::fmt;

/// Redis could not answer. Opaque: [`kind`](Self::kind) says what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisError {
    kind: RedisErrorKind,
    message: Box<str>,
}

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedisErrorKind {
    /// The store is away or cannot serve: no connection, loading, failing over, read-only, out of memory. It passes by itself.
    Unavailable,
    /// No answer came within the deadline. The charge may have been taken.
    Timeout,
    /// Too many checks wait already; this one was not sent.
    Overloaded,
    /// Somebody has to mend it: a wrong password, a missing right, a URL that means nothing, a server that is too old.
    Misconfigured,
    /// The stored value is not one of this crate's.
    Foreign,
}

impl RedisError {
    pub(crate) fn new(kind: RedisErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into().into_boxed_str() }
    }

    /// What is wrong.
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
