//! Rules that let pass what is over their quota: which do for a request, and what its outcome is.

use std::time::Duration;

use super::bound::BoundRule;
use super::charging::Shared;
use super::decided::{Charges, OwnedCharge};
use crate::decision::{ChargeDecision, Decision};
use crate::limiter::Limiter;
use crate::mode::{Mode, ModeSwitch};
use crate::outcome::OutcomeKind;

/// What becomes of a request that has no key for a rule in this mode.
pub(super) fn kind_of_unkeyed(mode: Mode) -> OutcomeKind {
    match mode {
        Mode::Enforce => OutcomeKind::KeyMissing,
        Mode::Degrade => OutcomeKind::Degraded,
        Mode::Shadow => OutcomeKind::ShadowLimited,
    }
}

/// Whether a charge that was taken keeps its request waiting: only that of an enforced queue does, and only if it takes a
/// place there.
pub(super) fn makes_wait(charge: &OwnedCharge, answer: &ChargeDecision) -> bool {
    charge.mode() == Mode::Enforce && charge.cost > 0 && answer.delay() > Duration::ZERO
}

impl BoundRule {
    /// Whether requests over a quota may pass.
    pub(super) fn has_mode(&self) -> bool {
        self.rule().mode.is_some()
    }
}

impl<L> Shared<L> {
    /// The mode that a rule is in: of its own and the layer's the milder.
    #[inline(never)]
    pub(super) fn mode_now(&self, bound: &BoundRule) -> Mode {
        let now = |switch: Option<&ModeSwitch>| switch.map_or(Mode::Enforce, ModeSwitch::get);
        now(bound.rule().mode.as_ref()).milder(now(self.settings.mode.as_ref()))
    }

    /// What becomes of a request that is taken: a rule that degrades tells the service, so it comes before one that only
    /// looks.
    pub(super) fn kind_of_taken(&self, charges: &Charges, decision: &Decision) -> OutcomeKind {
        let over = |(charge, answer): (&OwnedCharge, &ChargeDecision)| {
            if answer.is_allowed() { Mode::Enforce } else { charge.mode() }
        };
        let answers = charges.as_slice().iter().zip(decision.charges());
        let delayed = self.delays.is_some() && answers.clone().any(|(charge, answer)| makes_wait(charge, answer));
        let modes = || answers.clone().map(over).chain([charges.unkeyed()]);
        match (modes().any(|mode| mode == Mode::Degrade), modes().any(|mode| mode == Mode::Shadow)) {
            (true, _) => OutcomeKind::Degraded,
            (false, true) => OutcomeKind::ShadowLimited,
            (false, false) if delayed => OutcomeKind::Delayed,
            (false, false) => OutcomeKind::Allowed,
        }
    }
}

impl<L: Limiter> Shared<L> {
    /// Whether the limiter's failure is a reason to refuse: only where a rule could have refused.
    pub(super) fn may_refuse(&self, charges: &Charges) -> bool {
        charges.as_slice().iter().any(|charge| charge.mode() == Mode::Enforce)
    }
}
