//! Why a quota was refused.

use std::fmt;

/// Why a quota was refused when it was written: what, and how to mend it.
///
/// The type is opaque so that messages can improve; [`kind`](Self::kind) tells the cases apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaError {
    kind: QuotaErrorKind,
    message: String,
}

/// What was wrong with a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuotaErrorKind {
    /// The limit, the burst or another number of units is outside the range that is exact.
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

    /// Which case it is.
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
