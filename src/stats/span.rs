//! The fields of a request's span.

use std::time::Duration;

use tracing::Span;

use crate::event::{LayerEvent, LimiterEvent};
use crate::outcome::Outcome;
use crate::policy::Policy;

const OUTCOME: &str = "ratelimit.outcome";
const POLICY: &str = "ratelimit.policy";
const WAIT_MS: &str = "ratelimit.wait_ms";
const STORE_MS: &str = "ratelimit.store_ms";

/// Records an outcome, and the name of the policy that [binds](Outcome::binding).
pub(super) fn record_outcome(outcome: &Outcome) {
    let span = Span::current();
    span.record(OUTCOME, outcome.kind().as_str());
    if let Some(status) = outcome.binding() {
        span.record(POLICY, status.policy().name());
    }
}

/// Records that a request with only one policy was allowed.
pub(super) fn record_allowed(policy: &Policy) {
    Span::current().record(OUTCOME, crate::outcome::OutcomeKind::Allowed.as_str()).record(POLICY, policy.name());
}

/// Records how long the request waited, if the event is the end of a wait.
pub(super) fn record_wait(event: &LayerEvent) {
    if let LayerEvent::WaitEnded { waited, .. } = event {
        Span::current().record(WAIT_MS, millis(*waited));
    }
}

/// Records how long the check of a store took, if the event reports a check. The limiter reports the event while the
/// request is served, so the current span is that of the request.
pub(super) fn record_check(event: &LimiterEvent) {
    if let LimiterEvent::StoreChecked { duration, .. } = event {
        Span::current().record(STORE_MS, millis(*duration));
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}
