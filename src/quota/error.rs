//! The error of an invalid quota.

use crate::error::kind_and_message;

kind_and_message! {
    /// The error of an invalid quota. Its text says what is wrong and how to fix it;
    /// [`kind`](Self::kind) distinguishes the cases.
    QuotaError, QuotaErrorKind
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
