//! The error for quotas that a limiter does not support.

use std::fmt;

use crate::error::debug_as_text;
use crate::quota::{Algorithm, Quota};

/// The error of a quota that a limiter does not [support](crate::limiter::Limiter::supports).
#[derive(Clone, PartialEq, Eq)]
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
    /// The limiter has the algorithm, but does not support one of the quota's options.
    Option,
    /// The limiter has no room for the state of one key.
    TooLarge,
}

/// Checks whether a limiter that counts no requests in flight can keep the states of a quota.
pub(crate) fn supports_rates(quota: &Quota) -> Result<(), UnsupportedQuota> {
    if quota.algorithm() != Algorithm::Concurrency {
        return Ok(());
    }
    let reason = "this limiter does not count requests in flight; use MemoryLimiter in one process, or RedisLimiter or \
                  StoreLimiter in many";
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, reason))
}

impl UnsupportedQuota {
    /// Makes the error for `quota`. `reason` completes the text "this limiter does not support the
    /// quota: ", and says what to use instead.
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

debug_as_text!(UnsupportedQuota);

impl fmt::Display for UnsupportedQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "this limiter does not support the quota \"{}\": {}", self.quota, self.reason)
    }
}

impl std::error::Error for UnsupportedQuota {}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use super::*;
    use crate::MemoryLimiter;
    use crate::limiter::{FallbackLimiter, Limiter};

    #[test]
    fn limiter_without_lines_supports_no_wait_and_says_what_does() {
        let memory = MemoryLimiter::new();
        let fallback = FallbackLimiter::new(memory.clone(), memory.clone(), NonZeroU32::MIN);
        let at_once = Quota::concurrent(3);
        let in_line = at_once.max_wait(Duration::from_secs(10)).unwrap();
        assert_eq!((memory.supports(&in_line), fallback.supports(&at_once)), (Ok(()), Ok(())));
        let error = fallback.supports(&in_line).unwrap_err();
        assert_eq!(error.kind(), UnsupportedQuotaKind::Option);
        assert!(error.to_string().contains("leave the wait out, or use MemoryLimiter or RedisLimiter"), "{error}");
    }
}
