//! The errors of the limiter.

use crate::error::kind_and_message;

kind_and_message! {
    /// Why Redis did not decide. [`kind`](Self::kind) says what to do about it.
    RedisError, RedisErrorKind
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
    /// This process asks for more than it can carry, and Redis is not to blame. Too many checks wait
    /// already, earlier checks took the whole deadline, or the process was too busy to read the
    /// answer. Except in the last case the check was not sent.
    Overloaded,
    /// A person has to fix it: a wrong password, a missing right, a URL that is not valid, a server
    /// that is too old, or a set of charges that Redis cannot decide.
    Misconfigured,
    /// The stored value is not one of this crate's, or the reply is not one of its scripts'.
    Foreign,
}

impl RedisErrorKind {
    /// Returns the label for metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Overloaded => "overloaded",
            Self::Misconfigured => "misconfigured",
            Self::Foreign => "foreign",
        }
    }
}
