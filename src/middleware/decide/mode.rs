//! The outcome of a request by the modes of its rules.

use std::time::Duration;

use crate::middleware::compiled::Compiled;
use crate::middleware::ticket::{Charged, Ticket};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;

/// Returns what becomes of a request that has no key for a rule in this mode.
pub(crate) fn kind_of_keyless(mode: Mode) -> OutcomeKind {
    match mode {
        Mode::Enforce => OutcomeKind::KeyMissing,
        Mode::Degrade => OutcomeKind::Degraded,
        Mode::Shadow => OutcomeKind::ShadowLimited,
    }
}

/// Returns whether a charge that was taken makes its request wait: it has a place in an enforced queue.
pub(crate) fn makes_wait(charged: &Charged) -> bool {
    charged.mode == Mode::Enforce && charged.cost > 0 && charged.decision.delay() > Duration::ZERO
}

impl Ticket {
    /// Returns what becomes of a request that is taken. A rule that degrades comes before one in shadow, since the
    /// service has to know of it.
    pub(crate) fn kind_of_taken<L>(&self, layer: &Compiled<L>) -> OutcomeKind {
        let over = |mode| {
            let is_over = |charged: &Charged| charged.mode == mode && !charged.decision.is_allowed();
            self.keyless == Some(mode) || self.charges.iter().any(is_over)
        };
        if over(Mode::Degrade) {
            OutcomeKind::Degraded
        } else if over(Mode::Shadow) {
            OutcomeKind::ShadowLimited
        } else if layer.delays.is_some() && self.charges.iter().any(makes_wait) {
            OutcomeKind::Delayed
        } else {
            OutcomeKind::Allowed
        }
    }
}
