//! Whether a layer can use a quota with its limiter.

use super::contract::Limiter;
use super::support::{UnsupportedQuota, UnsupportedQuotaKind};
use crate::quota::Quota;

/// Checks whether a layer can use a quota with its limiter. An application's limiter may claim to support a wait
/// although it has no lines.
pub(crate) fn supports_in_layer(limiter: &impl Limiter, quota: &Quota) -> Result<(), UnsupportedQuota> {
    limiter.supports(quota)?;
    supports_wait(limiter, quota)
}

/// Checks whether a quota can pace bodies with a layer's limiter.
pub(crate) fn supports_pace(limiter: &impl Limiter, quota: &Quota) -> Result<(), UnsupportedQuota> {
    if quota.algorithm().is_rate() {
        return limiter.supports(quota);
    }
    let reason = "the quota is not a rate, and bodies are paced by a rate; use a rate such as Quota::per_second";
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::Algorithm, quota, reason))
}

/// Checks that a limiter has lines, if the quota lets requests wait in line.
fn supports_wait(limiter: &impl Limiter, quota: &Quota) -> Result<(), UnsupportedQuota> {
    if quota.wait_in_line().is_zero() || limiter.hooks().place_lines().is_some() {
        return Ok(());
    }
    let reason = "with this limiter, no request can wait in line for units; use MemoryLimiter, RedisLimiter or \
                  StoreLimiter, or leave the wait out";
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::Option, quota, reason))
}
