//! The error of a limiter that could not be built.

use crate::error::kind_and_message;

kind_and_message! {
    /// Why a limiter could not be built.
    MemoryLimiterError, MemoryLimiterErrorKind
}

/// The kind of an error in a limiter's setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryLimiterErrorKind {
    /// [`max_keys`](super::MemoryLimiterBuilder::max_keys) is out of range.
    MaxKeys,
    /// The bytes are no snapshot, or one of another version of this crate, or a damaged one.
    Snapshot,
}
