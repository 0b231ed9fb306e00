//! The error for quotas that a limiter does not support.

use std::fmt;

use super::Limiter;
use crate::quota::{Algorithm, Quota};

/// The error of a quota that a limiter does not [support](crate::limiter::Limiter::supports).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedQuota {
    kind: UnsupportedQuotaKind,
    quota: Box<str>,
    reason: Box<str>,
}

/// The kind of an [`UnsupportedQuota`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnsupportedQuotaKind {
    /// The limiter does not have the algorithm.
    Algorithm,
    /// The limiter has the algorithm, but not with one of the quota's options.
    Option,
    /// The limiter has no room for what one key needs.
    TooLarge,
}

/// Checks whether a layer can use a quota with its limiter: the limiter supports it, and has lines if requests are to
/// wait in line.
pub(crate) fn supports_in_layer(limiter: &impl Limiter, quota: &Quota) -> Result<(), UnsupportedQuota> {
    limiter.supports(quota)?;
    if quota.wait_in_line().is_zero() || limiter.place_lines().is_some() {
        return Ok(());
    }
    let reason = "no request can wait in line for its units; MemoryLimiter has lines, or leave the wait out";
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::Option, quota, reason))
}

/// Checks whether a limiter that counts no requests in flight can keep the states of a quota.
pub(crate) fn supports_rates(quota: &Quota) -> Result<(), UnsupportedQuota> {
    if quota.algorithm() != Algorithm::Concurrency {
        return Ok(());
    }
    let reason = "it does not count requests in flight; MemoryLimiter does in one process, and RedisLimiter in many";
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, reason))
}

impl UnsupportedQuota {
    /// Makes the error for `quota`. The reason completes "this limiter does not support the quota:
    /// ", and says what to use instead.
    #[must_use]
    pub fn new(kind: UnsupportedQuotaKind, quota: &Quota, reason: impl Into<String>) -> Self {
        Self { kind, quota: quota.to_string().into(), reason: reason.into().into() }
    }

    /// Returns the kind of the error.
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
