//! Writes the state of the limits into an answer.

use std::time::Duration;

use http::HeaderMap;
use tower_ratelimit::Quota;
use tower_ratelimit::limiter::ChargeDecision;
use tower_ratelimit::observe::PolicyStatus;
use tower_ratelimit::rules::DescriptorStatus;

use super::messages;

const OK: i32 = 1;
const OVER_LIMIT: i32 = 2;

/// The units of the protocol, and their seconds.
pub(super) const UNITS: [(i32, u64); 7] = [
    (1, 1),
    (2, 60),
    (3, 3_600),
    (4, 86_400),
    (5, 30 * 86_400),  // a month
    (6, 365 * 86_400), // a year
    (7, 7 * 86_400),   // a week
];

pub(super) fn code(is_over: bool) -> i32 {
    if is_over { OVER_LIMIT } else { OK }
}

pub(super) fn headers(headers: &HeaderMap) -> Vec<messages::HeaderValue> {
    let header = |(name, value): (&http::HeaderName, &http::HeaderValue)| messages::HeaderValue {
        key: name.to_string(),
        value: value.to_str().unwrap_or_default().to_owned(),
    };
    headers.iter().map(header).collect()
}

pub(super) fn descriptor_status(status: &DescriptorStatus) -> messages::DescriptorStatus {
    match status.limit() {
        Some(limit) => policy_status(limit, status.is_over_limit(), status.name()),
        None => {
            let limit_remaining = if status.is_unlimited() { u32::MAX } else { 0 };
            messages::DescriptorStatus { code: OK, limit_remaining, ..Default::default() }
        }
    }
}

pub(super) fn policy_status(status: &PolicyStatus, is_over: bool, name: Option<&str>) -> messages::DescriptorStatus {
    let (quota, decision): (&Quota, &ChargeDecision) = (status.policy().quota(), status.decision());
    let unit = UNITS.iter().find(|(_, seconds)| Duration::from_secs(*seconds) == quota.period());
    let wait = if is_over { decision.wait().duration() } else { None }.or(decision.reset_after());
    let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    messages::DescriptorStatus {
        code: code(is_over),
        current_limit: Some(messages::RateLimit {
            requests_per_unit: u32::try_from(quota.limit()).unwrap_or(u32::MAX),
            unit: unit.map_or(0, |(unit, _)| *unit),
            name: name.unwrap_or_default().to_owned(),
        }),
        limit_remaining: u32::try_from(decision.remaining()).unwrap_or(u32::MAX),
        duration_until_reset: wait
            .map(|wait| messages::Duration { seconds: i64::try_from(seconds(wait)).unwrap_or(i64::MAX) }),
    }
}
