//! The error of an invalid quota.

use std::fmt;

/// The error of an invalid quota. Its text says what is wrong and how to fix it;
/// [`kind`](Self::kind) distinguishes the cases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaError {
    kind: QuotaErrorKind,
    message: String,
}

/// The kind of a [`QuotaError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuotaErrorKind {
    /// The limit, the burst or another number of units is out of range.
    Units,
    /// The period is zero, longer than 366 days, or not a whole number of microseconds.
    Period,
    /// A full bucket would take longer than about 8.9 years to drain.
    TooSlow,
    /// The option has no meaning for this algorithm.
    NotAnOption,
    /// The text could not be read as a quota.
    Syntax,
}

impl QuotaError {
    pub(crate) fn new(kind: QuotaErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> QuotaErrorKind {
        self.kind
    }
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for QuotaError {}
