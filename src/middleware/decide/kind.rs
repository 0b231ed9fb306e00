//! The kind of the outcome of a layer's request. No other file of the middleware decides the kind.

use crate::limiter::Effect;
use crate::middleware::compiled::Compiled;
use crate::middleware::settings::OnError;
use crate::middleware::ticket::{Charged, Ticket, is_strike};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;

/// A cause that decides the kind of a request's outcome. A later cause replaces an earlier one.
#[derive(Clone, Copy)]
pub(crate) enum OutcomeCause {
    /// An access list, or a setting for preflight requests, exempts the request from every rule.
    Exempted,
    /// An access list denies the client.
    Denied,
    /// No rule charges the request.
    NotCharged,
    /// The request has no key for a rule in this mode, and no other rule charges it.
    KeyMissing(Mode),
    /// The request has too many charges, and at least one of the rules that charge it enforces.
    TooManyCharges,
    /// The limiter has answered: it allows the request, because no enforced charge refuses it.
    AllowedByLimiter,
    /// The limiter has answered: it denies an enforced charge.
    DeniedByLimiter,
    /// The limiter has failed, because the process is overloaded or for another reason.
    LimiterFailed { is_overload: bool },
    /// The request would have to wait, but the maximum number of requests wait already.
    NoRoomToWait,
    /// The request has waited in line.
    WaitedInLine,
    /// The request goes to the overflow.
    Overflow,
    /// The request was dropped before it went to the service.
    Dropped,
}

impl Ticket {
    /// Decides the kind of the request's outcome.
    ///
    /// This method is inlined, so that each caller has only the code of its own cause (`benches/instructions`, "layer
    /// of a concurrency limit, no header fields").
    #[inline(always)]
    pub(crate) fn decide<L>(&mut self, layer: &Compiled<L>, cause: OutcomeCause) {
        self.kind = match cause {
            OutcomeCause::Exempted => OutcomeKind::Exempt,
            OutcomeCause::Denied => OutcomeKind::Denied,
            OutcomeCause::NotCharged => self.keyless.map_or(OutcomeKind::Exempt, kind_of_keyless),
            OutcomeCause::KeyMissing(mode) => kind_of_keyless(mode),
            OutcomeCause::TooManyCharges | OutcomeCause::NoRoomToWait => OutcomeKind::Limited,
            OutcomeCause::AllowedByLimiter if self.is_within_all() => self.kind_of_within(layer),
            OutcomeCause::AllowedByLimiter => self.kind_of_over(layer),
            OutcomeCause::DeniedByLimiter if self.is_refused_by(|charged| is_strike(layer, charged)) => {
                OutcomeKind::Blocked
            }
            OutcomeCause::DeniedByLimiter => OutcomeKind::Limited,
            OutcomeCause::LimiterFailed { is_overload } => self.kind_of_failure(layer, is_overload),
            OutcomeCause::WaitedInLine if self.kind == OutcomeKind::Allowed => OutcomeKind::Delayed,
            OutcomeCause::WaitedInLine => self.kind,
            OutcomeCause::Overflow => OutcomeKind::Overflowed,
            OutcomeCause::Dropped => OutcomeKind::Abandoned,
        };
    }

    /// Returns whether every rule that applies to the request allows it, whatever the rule's mode
    /// is.
    #[inline]
    fn is_within_all(&self) -> bool {
        self.keyless.is_none() && self.charges.iter().all(|charged| charged.decision.is_allowed())
    }

    #[inline]
    fn kind_of_within<L>(&self, layer: &Compiled<L>) -> OutcomeKind {
        let waits = layer.delays.is_some() && self.charges.iter().any(makes_wait);
        if waits { OutcomeKind::Delayed } else { OutcomeKind::Allowed }
    }

    /// Returns the kind of a request that passes although a rule does not allow it. A rule that degrades takes
    /// precedence over a rule in shadow mode, because the service has to know that the request is degraded.
    #[inline(never)]
    fn kind_of_over<L>(&self, layer: &Compiled<L>) -> OutcomeKind {
        let is_over = |mode| {
            let is_over = |charged: &Charged| charged.mode == mode && !charged.decision.is_allowed();
            self.keyless == Some(mode) || self.charges.iter().any(is_over)
        };
        if is_over(Mode::Degrade) {
            OutcomeKind::Degraded
        } else if self.is_refused_by(|charged| charged.effect == Effect::Observe) {
            OutcomeKind::Overage // its meter was charged instead
        } else if is_over(Mode::Shadow) {
            OutcomeKind::ShadowLimited
        } else {
            self.kind_of_within(layer) // only the charge of a linked policy was not taken
        }
    }

    /// Returns the kind of a request after the limiter failed. The request is refused only if one
    /// of its rules enforces.
    fn kind_of_failure<L>(&self, layer: &Compiled<L>, is_overload: bool) -> OutcomeKind {
        let may_refuse = self.charges.iter().any(|charged| charged.mode == Mode::Enforce);
        let denies = match layer.settings.on_error {
            OnError::Deny => true,
            OnError::Allow => is_overload,
            OnError::AllowAlways => false,
        };
        if denies && may_refuse {
            OutcomeKind::FailedClosed
        } else if self.keyless == Some(Mode::Degrade) {
            // A request without a key stays degraded, because this kind does not depend on the limiter's answer.
            OutcomeKind::Degraded
        } else {
            OutcomeKind::FailedOpen
        }
    }

    /// Returns whether a charge that `is_it` accepts was refused.
    fn is_refused_by(&self, is_it: impl Fn(&Charged) -> bool) -> bool {
        self.charges.iter().any(|charged| charged.is_refused() && is_it(charged))
    }
}

fn kind_of_keyless(mode: Mode) -> OutcomeKind {
    match mode {
        Mode::Enforce => OutcomeKind::KeyMissing,
        Mode::Degrade => OutcomeKind::Degraded,
        Mode::Shadow => OutcomeKind::ShadowLimited,
    }
}

/// Returns whether a taken charge makes its request wait. The request waits if the charge has a slot in an enforced
/// queue.
pub(crate) fn makes_wait(charged: &Charged) -> bool {
    charged.mode == Mode::Enforce && charged.cost > 0 && charged.decision.has_delay()
}
