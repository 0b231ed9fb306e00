//! The meaning of one response for the requests after it.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode};

use crate::client::{Advice, PolicyAdvice};

/// The meaning of a response for the requests after it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::client) struct Heard {
    /// The request was refused, because it was too much or the server is overloaded.
    pub(in crate::client) is_refusal: bool,
    /// The time for which no request may be sent.
    pub(in crate::client) wait: Option<Duration>,
    /// The requests that may be sent after this one.
    pub(in crate::client) left: Option<u64>,
    /// The time that spreads those requests evenly, if there are few: less than 20 % of the limit.
    pub(in crate::client) spacing: Option<Duration>,
}

impl Heard {
    /// Reads the head of a response that came at `now`.
    pub(in crate::client) fn read(status: StatusCode, headers: &HeaderMap, now: SystemTime) -> Self {
        const RESOURCE_EXHAUSTED: &[u8] = b"8";
        const UNAVAILABLE: &[u8] = b"14";
        const OK: &[u8] = b"0";
        let advice = Advice::read(headers, now);
        let grpc = headers.get("grpc-status").map(|code| code.as_bytes());
        let is_refusal = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            || matches!(grpc, Some(RESOURCE_EXHAUSTED | UNAVAILABLE));
        // Elsewhere `Retry-After` means something else: when a job is done, or when to follow a redirect.
        let is_error = status.as_u16() >= 400 || grpc.is_some_and(|code| code != OK);
        let is_wait = |wait: &Duration| !wait.is_zero();
        let told = advice.retry_after().filter(|wait| is_error && is_wait(wait));
        let exhausted = advice.policies().iter().filter(|policy| policy.is_exhausted());
        let resets = exhausted.filter_map(PolicyAdvice::until_reset).filter(is_wait);
        let requests = || advice.policies().iter().filter(|policy| policy.unit().is_none_or(|unit| unit == "requests"));
        Self {
            is_refusal,
            wait: told.or_else(|| resets.max()),
            left: requests().filter_map(PolicyAdvice::remaining).min(),
            spacing: requests().filter_map(spacing).max(),
        }
    }
}

fn spacing(policy: &PolicyAdvice) -> Option<Duration> {
    let (limit, left, reset) = (policy.limit()?, policy.remaining()?, policy.until_reset()?);
    let is_little = left > 0 && left.checked_mul(5).is_some_and(|fifths| fifths < limit);
    let nanos = u64::try_from(reset.as_nanos().div_ceil(u128::from(left.max(1)))).ok()?;
    is_little.then(|| Duration::from_nanos(nanos))
}
