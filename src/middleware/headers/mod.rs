//! Stand-in: the fields of draft 11 and `Retry-After`, without merging.

use http::{HeaderMap, HeaderValue, StatusCode};

use crate::decision::ChargeDecision;
use crate::policy::Policy;
use crate::time::Timestamp;

/// Which header fields are sent.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Headers {}

pub(crate) struct Prepared {}

/// One policy's standing, borrowed.
pub(crate) struct View<'a> {
    pub(crate) policy: &'a Policy,
    pub(crate) decision: &'a ChargeDecision,
    pub(crate) refuses: bool,
}

impl Headers {
    pub(crate) fn prepare(&self, _policies: &[Policy]) -> Prepared {
        Prepared {}
    }
}

impl Prepared {
    pub(crate) fn told_wait(&self, outcome: &crate::Outcome, _seed: u64) -> Option<std::time::Duration> {
        outcome.retry_after()
    }

    pub(crate) fn write(
        &self,
        headers: &mut HeaderMap,
        views: &[View<'_>],
        _status: StatusCode,
        refused: bool,
        _seed: u64,
        _wall_now: &dyn Fn() -> Timestamp,
    ) {
        for view in views {
            let item = format!("\"{}\";r={}", view.policy.name(), view.decision.remaining());
            if let Ok(value) = HeaderValue::try_from(item) {
                headers.append("ratelimit", value);
            }
        }
        let wait = views.iter().filter(|view| view.refuses).filter_map(|view| view.decision.retry_after()).max();
        if let (true, Some(wait)) = (refused, wait) {
            headers.insert("retry-after", HeaderValue::from(wait.as_micros().div_ceil(1_000_000) as u64));
        }
    }
}
