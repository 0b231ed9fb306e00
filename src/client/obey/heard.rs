//! The meaning of one response for the requests after it.

use http::{HeaderMap, StatusCode};

use crate::base::time::micros_ceil;
use crate::client::{Advice, PolicyAdvice};

/// The meaning of a response for the requests after it.
#[derive(Debug)]
pub(in crate::client) struct Heard {
    /// Whether the server refused the request, because of a limit or because it is overloaded.
    pub(in crate::client) is_refusal: bool,
    /// The time after the response in which no request may be sent, in microseconds.
    pub(in crate::client) wait_us: Option<u64>,
    /// The number of requests that may be sent after this response, if the response states this
    /// number.
    pub(super) left: Option<u64>,
    /// The microseconds between two requests if the remaining requests are spread evenly until the reset. Zero
    /// if nothing remains, if at least 20 % of the limit remains, or if the response leaves out the limit, the
    /// remaining units or the reset.
    pub(super) spacing_us: u64,
    /// The microseconds from sending the request to the head of the response, or `u64::MAX` if this time is
    /// not known.
    pub(super) took_us: u64,
}

impl Heard {
    /// Reads the head of a response. `advice` has the content of the response's headers.
    pub(in crate::client) fn new(status: StatusCode, headers: &HeaderMap, advice: &Advice) -> Self {
        const RESOURCE_EXHAUSTED: &[u8] = b"8";
        const UNAVAILABLE: &[u8] = b"14";
        const OK: &[u8] = b"0";
        let grpc = headers.get("grpc-status").map(|code| code.as_bytes());
        let is_refusal = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            || matches!(grpc, Some(RESOURCE_EXHAUSTED | UNAVAILABLE));
        // `Retry-After` is a wait for requests only in an error. In other responses it says when a job is
        // done, or when to follow a redirect.
        let is_error = status.as_u16() >= 400 || grpc.is_some_and(|code| code != OK);
        let wait = if is_error { advice.wait().duration() } else { advice.latest_reset() };
        let requests = || advice.policies().iter().filter(|policy| policy.unit().is_none_or(|unit| unit == "requests"));
        Self {
            is_refusal,
            wait_us: wait.map(micros_ceil),
            left: requests().filter_map(PolicyAdvice::remaining).min(),
            spacing_us: requests().filter_map(spacing_us).max().unwrap_or(0),
            took_us: u64::MAX,
        }
    }
}

/// Returns the wait after a refusal that names no time, in microseconds. The wait is a second after
/// the first such refusal, and doubles with each of the `refusals_before`, up to a minute.
pub(in crate::client) fn unnamed_wait_us(refusals_before: u32) -> u64 {
    (1_000_000 << refusals_before.min(6)).min(60_000_000)
}

fn spacing_us(policy: &PolicyAdvice) -> Option<u64> {
    let (limit, left, reset) = (policy.limit()?, policy.remaining()?, policy.until_reset()?);
    let is_little = left > 0 && left.checked_mul(5).is_some_and(|fifths| fifths < limit);
    is_little.then(|| micros_ceil(reset).div_ceil(left.max(1)))
}
