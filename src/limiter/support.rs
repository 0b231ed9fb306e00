//! Which quotas a limiter supports.

use std::fmt;

use crate::quota::Quota;

/// A limiter does not support a quota: see [`Limiter::supports`](crate::Limiter::supports).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedQuota {
    kind: UnsupportedQuotaKind,
    quota: Box<str>,
    reason: Box<str>,
}

/// Why a limiter does not support a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnsupportedQuotaKind {
    /// The limiter does not have its algorithm.
    Algorithm,
    /// The limiter has its algorithm, but not with one of its options.
    Option,
    /// The limiter has no room for what one key needs.
    TooLarge,
}

impl UnsupportedQuota {
    /// For a limiter that does not support `quota`. The reason completes "this limiter does not support the quota: ", and
    /// says what to use instead.
    #[must_use]
    pub fn new(kind: UnsupportedQuotaKind, quota: &Quota, reason: impl Into<String>) -> Self {
        Self { kind, quota: quota.to_string().into(), reason: reason.into().into() }
    }

    /// Why the quota is not supported.
    #[must_use]
    pub fn kind(&self) -> UnsupportedQuotaKind {
        self.kind
    }
}

impl fmt::Display for UnsupportedQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this limiter does not support the quota \"{}\": {}", self.quota, self.reason)
    }
}

impl std::error::Error for UnsupportedQuota {}
