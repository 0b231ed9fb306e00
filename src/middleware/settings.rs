//! What a layer is told.

use std::sync::Arc;

use super::access::BoundList;
use super::bound::BoundRule;
use super::delay::{MOST_WAITING, Timer};
use super::headers::Headers;
use super::layer::OnError;
use super::refusal::Refusals;
use crate::mode::ModeSwitch;
use crate::outcome::Observer;

/// What a layer is told.
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
    pub(super) enabled: bool,
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
            enabled: true,
            mode: None,
            timer: None,
            max_waiting: MOST_WAITING,
        }
    }
}
