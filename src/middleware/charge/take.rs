//! Charging a request: the rules say what is charged, and the limiter takes it.

use std::fmt::Display;

use http::request::Parts;
use smallvec::SmallVec;

use super::bypass;
use crate::decision::Decision;
use crate::limiter::{Charge, Effect, Limiter, Reply};
use crate::middleware::decide::{linked, mode::kind_of_keyless};
use crate::middleware::rule::RuleMatch;
use crate::middleware::settings::OnError;
use crate::middleware::ticket::{Charged, Ticket};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;

impl<L: Limiter> Ticket<L> {
    /// Charges the request and decides what becomes of it. Returns the limiter's future if the limiter answers later:
    /// then [`answer`](Self::answer) decides.
    #[inline]
    pub(crate) fn charge(&mut self, parts: &Parts) -> Option<L::Future<Decision>> {
        if let Some(kind) = bypass::kind(&self.layer, parts) {
            self.kind = kind;
            return None;
        }
        // The one fast path: most layers have one policy that is always enforced. It saves a seventh of the layer's
        // instructions (`benches/instructions.rs`, "layer, allowed, no header fields").
        if let Some((bound, policy)) = self.layer.only_policy() {
            return match bound.matches(parts) {
                RuleMatch::Charge { key, cost } => match self.layer.limiter.try_take_one(policy, &key, cost) {
                    Some(decision) => {
                        self.kind = if decision.is_allowed() { OutcomeKind::Allowed } else { OutcomeKind::Limited };
                        self.is_answered = true;
                        self.charges.push(Charged { decision, ..Charged::new(0, key, cost, Mode::Enforce) });
                        None
                    }
                    None => {
                        self.charges.push(Charged::new(0, key, cost, Mode::Enforce));
                        self.take()
                    }
                },
                RuleMatch::KeyMissing => {
                    self.kind = OutcomeKind::KeyMissing;
                    None
                }
                RuleMatch::None | RuleMatch::Exempt => None,
            };
        }
        match self.plan(parts) {
            Some(kind) => {
                self.kind = kind;
                None
            }
            None => self.take(),
        }
    }

    /// Collects what the rules charge the request. Returns what becomes of a request that is not charged.
    #[inline(never)]
    fn plan(&mut self, parts: &Parts) -> Option<OutcomeKind> {
        let layer = &*self.layer;
        self.charges.reserve_exact(layer.most_charges);
        let looks = layer.diagnostics.looks_for_keys();
        for (rule, bound) in layer.settings.rules.iter().enumerate() {
            let matched = bound.matches(parts);
            if looks {
                layer.diagnostics.look_at_rule(rule, bound, &matched);
            }
            let mode = match matched {
                RuleMatch::None | RuleMatch::Exempt => continue,
                RuleMatch::Charge { .. } | RuleMatch::KeyMissing => layer.mode_of(bound),
            };
            match matched {
                RuleMatch::Charge { key, cost } => {
                    let first = self.charges.len();
                    let policies = bound.charged(parts);
                    let last = policies.end.saturating_sub(1);
                    for policy in policies.start..last {
                        self.charges.push(Charged::new(policy, key.clone(), cost, mode));
                    }
                    self.charges.push(Charged::new(last, key, cost, mode));
                    if let Some(linked) = layer.link(rule) {
                        linked::link(linked, &mut self.charges, first);
                    }
                }
                _ if mode == Mode::Enforce => {
                    self.charges.clear();
                    return Some(OutcomeKind::KeyMissing);
                }
                _ if self.keyless != Mode::Degrade => self.keyless = mode,
                _ => {}
            }
        }
        match self.keyless {
            _ if !self.charges.is_empty() => None,
            Mode::Enforce => Some(OutcomeKind::Exempt),
            mode => Some(kind_of_keyless(mode)),
        }
    }

    /// Asks the limiter for all charges together.
    #[inline(never)]
    fn take(&mut self) -> Option<L::Future<Decision>> {
        let layer = &*self.layer;
        let is_charged = |policy| self.charges.iter().any(|charged| charged.policy == policy);
        if let Some(at) = layer.unsupported.iter().position(|(policy, _)| is_charged(*policy)) {
            let layer = std::sync::Arc::clone(&self.layer);
            if let Some((_, error)) = layer.unsupported.get(at) {
                self.fail(error);
            }
            return None;
        }
        let mut charges: SmallVec<[Charge<'_>; 4]> = SmallVec::new();
        for charged in &self.charges {
            charges.extend(layer.policy(charged.policy).map(|policy| charged.charge(policy)));
        }
        match layer.limiter.take(&charges) {
            Reply::Now(answer) => {
                drop(charges);
                self.answer(answer);
                None
            }
            Reply::Later(answer) => Some(answer),
        }
    }

    /// Decides what becomes of the request by the limiter's answer.
    pub(crate) fn answer(&mut self, answer: Result<Decision, L::Error>) {
        match answer {
            Ok(mut decision) => {
                for (charged, answer) in self.charges.iter_mut().zip(decision.charges_mut()) {
                    std::mem::swap(&mut charged.decision, answer);
                }
                self.decide(decision.is_allowed());
            }
            Err(error) => self.fail(&error),
        }
    }

    #[inline]
    fn decide(&mut self, is_allowed: bool) {
        self.is_answered = true;
        self.kind = if is_allowed { self.kind_of_taken() } else { OutcomeKind::Limited };
        if self.charges.len() > 1
            && self.charges.iter().any(|charged| matches!(charged.effect, Effect::OnRefusal { .. }))
        {
            if is_allowed {
                self.take_nothing_while_closed();
            }
            self.kind = linked::kind(&self.layer, self.kind, &self.charges);
        }
    }

    /// Decides about a request without an answer of the limiter. It is refused only if a rule could have refused it.
    #[cold]
    fn fail(&mut self, error: &dyn Display) {
        self.layer.report_failure(error);
        let may_refuse = self.charges.iter().any(|charged| charged.mode == Mode::Enforce);
        self.kind = match self.layer.settings.on_error {
            OnError::Deny if may_refuse => OutcomeKind::FailedClosed,
            // A request without a key stays degraded: that needs no answer of the limiter.
            _ if self.keyless == Mode::Degrade => OutcomeKind::Degraded,
            _ => OutcomeKind::FailedOpen,
        };
    }
}
