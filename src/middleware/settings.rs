//! The settings of a layer. Data.

use std::sync::Arc;

use super::charge::access::BoundList;
use super::decide::delay::{MOST_WAITING, Timer};
use super::respond::headers::Headers;
use super::respond::refusal::Refusals;
use super::rule::BoundRule;
use crate::mode::ModeSwitch;
use crate::outcome::Observer;

/// The settings of a layer.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) rules: Vec<BoundRule>,
    pub(super) headers: Headers,
    pub(super) refusals: Refusals,
    pub(super) on_error: OnError,
    pub(super) observer: Option<Arc<dyn Observer>>,
    pub(super) expose_outcome: bool,
    pub(super) exempt_preflight: bool,
    pub(super) refund_nested: bool,
    pub(super) access: Vec<BoundList>,
    pub(super) mode: Option<ModeSwitch>,
    pub(super) timer: Option<Arc<dyn Timer>>,
    pub(super) max_waiting: usize,
}

impl Settings {
    pub(super) fn new(rule: BoundRule) -> Self {
        Self {
            rules: vec![rule],
            headers: Headers::default(),
            refusals: Refusals::default(),
            on_error: OnError::default(),
            observer: None,
            expose_outcome: false,
            exempt_preflight: false,
            refund_nested: false,
            access: Vec::new(),
            mode: None,
            timer: None,
            max_waiting: MOST_WAITING,
        }
    }
}

/// The fate of a request when the limiter fails to decide.
///
/// A third way is to let another limiter decide meanwhile: [`FallbackLimiter`](crate::limiter::FallbackLimiter).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnError {
    /// Refuses the request with `503 Service Unavailable`, or `UNAVAILABLE` over gRPC. This is the default, because a limit
    /// must not stop silently.
    #[default]
    Deny,
    /// Lets the request pass, without rate-limit headers.
    Allow,
}
