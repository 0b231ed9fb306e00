//! The error of a limiter that could not be built.

use std::fmt;

/// Why a limiter could not be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimiterError {
    kind: MemoryLimiterErrorKind,
    message: String,
}

/// What was wrong with a limiter's setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryLimiterErrorKind {
    /// The capacity is out of range.
    Capacity,
    /// The snapshot is not one, is of another version of this crate, or is damaged.
    Snapshot,
}

impl MemoryLimiterError {
    pub(super) fn new(kind: MemoryLimiterErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Which case it is.
    #[must_use]
    pub fn kind(&self) -> MemoryLimiterErrorKind {
        self.kind
    }
}

impl fmt::Display for MemoryLimiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for MemoryLimiterError {}
