//! From a request to its charges, and from the limiter's answer to what becomes of the request.

use std::hash::BuildHasher;
use std::sync::Arc;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Response, header};
use smallvec::SmallVec;

use super::headers::{Headers, Prepared, View};
use super::layer::OnError;
use super::refusal::{PreparedRefusals, Refusal, Refusals};
use super::rule::{Asked, BoundRule};
use crate::clock::wall_now;
use crate::decision::{ChargeDecision, Decision};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Refund, Reply};
use crate::outcome::{LimiterEvent, Observer, Outcome, OutcomeKind, Standing};
use crate::policy::Policy;

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
    pub(super) enabled: bool,
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
            enabled: true,
        }
    }
}

/// What a layer, its services and their futures share.
pub(super) struct Shared<L> {
    pub(super) limiter: L,
    pub(super) settings: Settings,
    headers: Prepared,
    refusals: PreparedRefusals,
}

/// A charge that owns its key; its policy is the rule's.
pub(super) struct OwnedCharge {
    rule: usize,
    key: Key,
    cost: u64,
}

/// What a request is charged. No two charges are for the same policy and key: the policies of a layer differ by name.
pub(super) type Charges = SmallVec<[OwnedCharge; 2]>;

/// What a request's head says.
pub(super) enum Asking {
    Exempt,
    KeyMissing,
    Charges(Charges),
}

/// What was decided about a request.
pub(super) struct Decided {
    kind: OutcomeKind,
    charges: Charges,
    /// The limiter's answer to the charges, if it was asked and gave one.
    decision: Option<Decision>,
}

impl Decided {
    pub(super) fn without_charges(kind: OutcomeKind) -> Self {
        Self { kind, charges: Charges::new(), decision: None }
    }

    pub(super) fn passes(&self) -> bool {
        self.kind.passed()
    }
}

impl<L> Shared<L> {
    pub(super) fn new(limiter: L, settings: Settings) -> Self {
        let policies: Vec<Policy> = settings.rules.iter().map(|rule| rule.policy().clone()).collect();
        let headers = settings.headers.prepare(&policies);
        let refusals = settings.refusals.prepare(&policies);
        Self { limiter, settings, headers, refusals }
    }

    /// The charges of a request.
    #[inline(always)]
    pub(super) fn ask(&self, parts: &Parts) -> Asking {
        if self.settings.exempt_preflight && is_preflight(parts) {
            return Asking::Exempt;
        }
        let mut charges = Charges::new();
        for (rule, bound) in self.settings.rules.iter().enumerate() {
            match bound.ask(parts) {
                Asked::Nothing => {}
                Asked::Charge { key, cost } => charges.push(OwnedCharge { rule, key, cost }),
                Asked::Key => return Asking::KeyMissing,
            }
        }
        if charges.is_empty() { Asking::Exempt } else { Asking::Charges(charges) }
    }

    /// Tells the observer, and returns the outcome if the request is to carry it on.
    #[inline(always)]
    pub(super) fn tell(&self, decided: &Decided) -> Option<Outcome> {
        if self.settings.observer.is_none() && !self.settings.expose_outcome {
            return None;
        }
        let outcome = self.outcome(decided);
        if let Some(observer) = &self.settings.observer {
            observer.on_outcome(&outcome);
        }
        self.settings.expose_outcome.then_some(outcome)
    }

    /// The response to a request that does not pass.
    #[cold]
    pub(super) fn refuse(&self, parts: &Parts, decided: &Decided) -> Response<Bytes> {
        let outcome = self.outcome(decided);
        if let Some(observer) = &self.settings.observer {
            observer.on_outcome(&outcome);
        }
        let seed = seed(&decided.charges);
        let wait = self.headers.told_wait(&outcome, seed);
        let mut response = self.refusals.respond(&Refusal::new(parts, &outcome, wait));
        self.write_headers(&mut response, decided, Some(seed));
        response.extensions_mut().insert(outcome);
        response
    }

    /// Writes the fields of a response to a request that passed.
    pub(super) fn finish<B>(&self, response: &mut Response<B>, decided: &Decided) {
        self.write_headers(response, decided, None);
        if self.settings.expose_outcome {
            let refused = response.extensions().get().is_some_and(|inner: &Outcome| !inner.kind().passed());
            if !refused {
                response.extensions_mut().insert(self.outcome(decided));
            }
        }
    }

    /// The seed is that of a refusal's jitter; nothing else is jittered.
    fn write_headers<B>(&self, response: &mut Response<B>, decided: &Decided, seed: Option<u64>) {
        let Some(decision) = &decided.decision else { return };
        let refused = seed.is_some();
        if !refused && self.headers.is_silent_if_passed() {
            return;
        }
        // The usual layer has one rule.
        if let ([charge], [decision]) = (decided.charges.as_slice(), decision.charges()) {
            if let Some(view) = self.view(charge, decision, refused) {
                self.write_views(response, &[view], seed);
            }
            return;
        }
        let answers = decided.charges.iter().zip(decision.charges());
        let views: SmallVec<[View<'_>; 4]> =
            answers.filter_map(|(charge, decision)| self.view(charge, decision, refused)).collect();
        self.write_views(response, &views, seed);
    }

    fn view<'a>(&'a self, charge: &OwnedCharge, decision: &'a ChargeDecision, refused: bool) -> Option<View<'a>> {
        if !decision.is_known() {
            return None;
        }
        Some(View { policy: self.policy(charge)?, decision, refuses: refused && !decision.is_allowed() })
    }

    #[inline]
    fn write_views<B>(&self, response: &mut Response<B>, views: &[View<'_>], seed: Option<u64>) {
        let status = response.status();
        self.headers.write(response.headers_mut(), views, status, seed.is_some(), seed.unwrap_or(0), &wall_now);
    }

    fn outcome(&self, decided: &Decided) -> Outcome {
        let mut standings = SmallVec::new();
        if let Some(decision) = &decided.decision {
            for (charge, decision) in decided.charges.iter().zip(decision.charges()) {
                if let Some(policy) = self.policy(charge) {
                    standings.push(Standing {
                        policy: policy.clone(),
                        cost: charge.cost,
                        effect: Effect::Enforce,
                        decision: decision.clone(),
                    });
                }
            }
        }
        Outcome::new(decided.kind, standings)
    }

    fn policy(&self, charge: &OwnedCharge) -> Option<&Policy> {
        self.settings.rules.get(charge.rule).map(BoundRule::policy)
    }
}

impl<L: Limiter> Shared<L> {
    #[inline(always)]
    pub(super) fn take(&self, charges: &Charges) -> Reply<Decision, L::Error, L::Future<Decision>> {
        // The usual layer has one rule.
        if let [charge] = charges.as_slice() {
            if let Some(policy) = self.policy(charge) {
                return self.limiter.take(&[Charge::new(policy, &charge.key).cost(charge.cost)]);
            }
        }
        let borrowed: SmallVec<[Charge<'_>; 4]> = charges
            .iter()
            .filter_map(|charge| Some(Charge::new(self.policy(charge)?, &charge.key).cost(charge.cost)))
            .collect();
        self.limiter.take(&borrowed)
    }

    /// What the limiter's answer means for the request.
    #[inline(always)]
    pub(super) fn decide(&self, charges: Charges, answer: Result<Decision, L::Error>) -> Decided {
        match answer {
            Ok(decision) => {
                let kind = if decision.is_allowed() { OutcomeKind::Allowed } else { OutcomeKind::Limited };
                Decided { kind, charges, decision: Some(decision) }
            }
            Err(error) => self.failed(charges, &error),
        }
    }

    #[cold]
    fn failed(&self, charges: Charges, error: &L::Error) -> Decided {
        if let Some(observer) = &self.settings.observer {
            observer.on_event(&LimiterEvent::Failed { error: error.to_string() });
        }
        let kind = match self.settings.on_error {
            OnError::Deny => OutcomeKind::FailedClosed,
            OnError::Allow => OutcomeKind::FailedOpen,
        };
        Decided { kind, charges, decision: None }
    }

    /// Gives back what a request took that never reached the service.
    #[cold]
    pub(super) fn give_back(&self, decided: Decided) {
        let Some(mut decision) = decided.decision else { return };
        let refunds: Vec<Refund> = decided
            .charges
            .into_iter()
            .zip(decision.take_receipts())
            .filter_map(|(charge, receipt)| {
                let policy = self.policy(&charge)?.clone();
                Some(Refund::new(policy, charge.key, receipt?))
            })
            .collect();
        if refunds.is_empty() {
            return;
        }
        if let Reply::Now(Err(error)) = self.limiter.refund(refunds) {
            if let Some(observer) = &self.settings.observer {
                observer.on_event(&LimiterEvent::Failed { error: error.to_string() });
            }
        }
    }
}

/// A CORS preflight request, as the Fetch standard (section 3.2.2) has browsers send it.
fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && parts.headers.contains_key(header::ORIGIN)
        && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The same for every refusal of one client, so that a client cannot draw its jitter again.
fn seed(charges: &Charges) -> u64 {
    let hash = foldhash::fast::FixedState::default();
    charges.first().map_or(0, |charge| hash.hash_one(&charge.key))
}
