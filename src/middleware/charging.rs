//! From a request to its charges, and from the limiter's answer to what becomes of the request.

use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http::Response;
use http::request::Parts;
use smallvec::SmallVec;

use super::access::BoundList;
use super::bound::{Asked, BoundRule};
use super::composed::Passage;
use super::headers::{Headers, Prepared, View};
use super::late::{self, Afters, Record};
use super::layer::OnError;
use super::refusal::{PreparedRefusals, Refusal, Refusals};
use super::screen;
use super::watch::Watch;
use crate::clock::wall_now;
use crate::decision::{self, ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Refund, Reply};
use crate::outcome::{Observer, Outcome, OutcomeKind, Standing};
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
    pub(super) access: Vec<BoundList>,
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
            access: Vec::new(),
            enabled: true,
        }
    }
}

/// What a layer, its services and their futures share.
pub(super) struct Shared<L> {
    pub(super) limiter: L,
    pub(super) settings: Settings,
    /// Those of all rules, in their order.
    pub(super) policies: Arc<[Policy]>,
    /// The rule, if there is one, of one policy.
    only_rule: Option<BoundRule>,
    headers: Prepared,
    refusals: PreparedRefusals,
    /// What is done after the response, if anything is.
    pub(super) afters: Option<Afters>,
    /// Nobody sees what becomes of a request but by the response, and nothing is done after that.
    is_plain: bool,
    /// Something of a request is looked at before its rules are.
    pub(super) is_screened: AtomicBool,
    pub(super) watch: Watch,
    /// Other layers were noticed within this one.
    pub(super) has_inner: AtomicBool,
}

/// A charge that owns its key; its policy is one of the layer's.
pub(super) struct OwnedCharge {
    pub(super) policy: usize,
    pub(super) key: Key,
    pub(super) cost: u64,
}

/// What a request is charged. No two charges are for the same policy and key: the policies of a layer differ by name.
///
/// One charge, the usual case, is apart from several here and below, so that it is not moved as if there were several.
pub(super) enum Charges {
    One(OwnedCharge),
    Several(SmallVec<[OwnedCharge; decision::INLINE]>),
}

impl Charges {
    pub(super) fn as_slice(&self) -> &[OwnedCharge] {
        match self {
            Self::One(charge) => std::slice::from_ref(charge),
            Self::Several(charges) => charges,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [OwnedCharge] {
        match self {
            Self::One(charge) => std::slice::from_mut(charge),
            Self::Several(charges) => charges,
        }
    }
}

/// What a request's head says.
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is made")]
pub(super) enum Asking {
    Exempt,
    Denied,
    KeyMissing,
    Charges(Charges),
}

/// What was decided about a request.
pub(super) struct Decided {
    kind: OutcomeKind,
    pub(super) answer: Answer,
}

/// What the limiter answered, and to what.
pub(super) enum Answer {
    /// It was not asked.
    Nothing,
    One {
        charge: OwnedCharge,
        decision: ChargeDecision,
    },
    /// Of several charges only what may have to be given back: nothing else will be asked for.
    Owed(SmallVec<[Owed; decision::INLINE]>),
    Several(Box<Record>),
}

/// Charges, and the answer if there was one.
pub(super) struct Answered {
    pub(super) charges: Charges,
    pub(super) decision: Option<Decision>,
}

impl Answered {
    pub(super) fn of_one(charge: OwnedCharge, decision: ChargeDecision) -> Self {
        Self { charges: Charges::One(charge), decision: Some(Decision::one(true, decision)) }
    }

    fn boxed(charges: Charges, decision: Option<Decision>) -> Answer {
        Answer::Several(Box::new(Record::Known(Self { charges, decision })))
    }

    /// Moves over what the charges took.
    fn owe(&mut self, owed: &mut SmallVec<[Owed; decision::INLINE]>) {
        if let Some(decision) = &mut self.decision {
            owe(owed, &mut self.charges, decision);
        }
    }
}

/// What a charge took.
pub(super) struct Owed {
    policy: usize,
    key: Key,
    receipt: Receipt,
}

impl Decided {
    pub(super) fn without_charges(kind: OutcomeKind) -> Self {
        Self { kind, answer: Answer::Nothing }
    }

    /// Where nothing was decided, or nothing is left to be done.
    pub(super) fn nothing() -> Self {
        Self::without_charges(OutcomeKind::Exempt)
    }

    /// One charge that was allowed.
    #[inline(always)]
    pub(super) fn allowed(charge: OwnedCharge, decision: ChargeDecision) -> Self {
        Self { kind: OutcomeKind::Allowed, answer: Answer::One { charge, decision } }
    }

    pub(super) fn kind(&self) -> OutcomeKind {
        self.kind
    }

    pub(super) fn passes(&self) -> bool {
        self.kind.passed()
    }

    /// Something of it is settled after the response.
    #[inline]
    pub(super) fn is_late(&self) -> bool {
        matches!(&self.answer, Answer::Several(record) if matches!(**record, Record::Late(_)))
    }

    /// What was charged: the policies and the keys.
    pub(super) fn charges(&self) -> impl Iterator<Item = (usize, &Key)> {
        let owed = if let Answer::Owed(owed) = &self.answer { owed.as_slice() } else { &[] };
        let answered = self.answers().0.iter().map(|charge| (charge.policy, &charge.key));
        answered.chain(owed.iter().map(|owed| (owed.policy, &owed.key)))
    }

    /// The charges, and how many of them were answered: all or none.
    fn answers(&self) -> (&[OwnedCharge], &[ChargeDecision]) {
        let answered = match &self.answer {
            Answer::Nothing | Answer::Owed(_) => return (&[], &[]),
            Answer::One { charge, decision } => return (std::slice::from_ref(charge), std::slice::from_ref(decision)),
            Answer::Several(record) => record.answered(),
        };
        (answered.charges.as_slice(), answered.decision.as_ref().map_or(&[], Decision::charges))
    }
}

impl<L> Shared<L> {
    pub(super) fn new(limiter: L, settings: Settings) -> Self {
        let policies: Arc<[Policy]> = settings.rules.iter().flat_map(BoundRule::policies).cloned().collect();
        let headers = settings.headers.prepare(&policies);
        let refusals = settings.refusals.prepare(&policies);
        let only_rule = settings.rules.first().filter(|_| policies.len() == 1).cloned();
        let afters = late::afters(settings.rules.iter().map(|rule| (rule.policies().len(), rule.after())));
        let is_plain = settings.observer.is_none() && !settings.expose_outcome && afters.is_none();
        let watch = Watch::new(&settings.rules);
        let is_screened = AtomicBool::new(screen::is_screened(&settings) || watch.looks());
        let has_inner = AtomicBool::new(false);
        Self {
            limiter,
            settings,
            policies,
            only_rule,
            headers,
            refusals,
            afters,
            is_plain,
            is_screened,
            watch,
            has_inner,
        }
    }

    /// The charges of a request.
    #[inline(always)]
    pub(super) fn ask(&self, parts: &Parts) -> Asking {
        if self.is_screened.load(Ordering::Relaxed) {
            if let Some(asking) = self.screen(parts) {
                return asking;
            }
        }
        // The usual layer has one policy.
        let Some(bound) = &self.only_rule else { return self.ask_all(parts) };
        match bound.ask(parts) {
            Asked::Nothing => Asking::Exempt,
            Asked::Charge { key, cost } => Asking::Charges(Charges::One(OwnedCharge { policy: 0, key, cost })),
            Asked::Key => Asking::KeyMissing,
        }
    }

    #[inline(never)]
    fn ask_all(&self, parts: &Parts) -> Asking {
        let mut charges: SmallVec<[OwnedCharge; decision::INLINE]> = SmallVec::new();
        for bound in &self.settings.rules {
            match bound.ask(parts) {
                Asked::Nothing => {}
                Asked::Charge { key, cost } => {
                    let Range { start, end } = bound.charged(parts);
                    let last = end.saturating_sub(1);
                    for policy in start..last {
                        charges.push(OwnedCharge { policy, key: key.clone(), cost });
                    }
                    charges.push(OwnedCharge { policy: last, key, cost });
                }
                Asked::Key => return Asking::KeyMissing,
            }
        }
        if charges.len() > 1 {
            return Asking::Charges(Charges::Several(charges));
        }
        charges.pop().map_or(Asking::Exempt, |charge| Asking::Charges(Charges::One(charge)))
    }

    /// Whether nobody sees what becomes of a request other than by the response.
    #[inline(always)]
    pub(super) fn is_unobserved(&self) -> bool {
        self.settings.observer.is_none() && !self.settings.expose_outcome
    }

    /// Tells the observer, and returns the outcome if the request is to carry it on.
    #[inline(always)]
    pub(super) fn tell(&self, decided: &Decided) -> Option<Outcome> {
        if self.is_unobserved() {
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
        if let Some(around) = Passage::around(&parts.extensions) {
            around.refuse();
        }
        let outcome = self.outcome(decided);
        if let Some(observer) = &self.settings.observer {
            observer.on_outcome(&outcome);
        }
        if outcome.is_never() {
            self.look_for_never(&outcome);
        }
        let seed = seed(decided.answers().0);
        let wait = self.headers.told_wait(&outcome, seed);
        let mut response = self.refusals.respond(&Refusal::new(parts, &outcome, wait));
        self.write_headers(&mut response, decided, Some(seed));
        response.extensions_mut().insert(outcome);
        response
    }

    /// Writes the fields of a response to a request that passed.
    pub(super) fn finish<B>(&self, response: &mut Response<B>, decided: &Decided) {
        self.write_headers(response, decided, None);
        if self.settings.expose_outcome && self.settings.enabled {
            let refused = response.extensions().get().is_some_and(|inner: &Outcome| !inner.kind().passed());
            if !refused {
                response.extensions_mut().insert(self.outcome(decided));
            }
        }
    }

    /// The seed is that of a refusal's jitter; nothing else is jittered.
    fn write_headers<B>(&self, response: &mut Response<B>, decided: &Decided, seed: Option<u64>) {
        let refused = seed.is_some();
        if !refused && self.headers.is_silent_if_passed() {
            return;
        }
        let (charges, decisions) = decided.answers();
        if decisions.is_empty() {
            return;
        }
        // The usual layer has one rule.
        if let ([charge], [decision]) = (charges, decisions) {
            if let Some(view) = self.view(charge, decision, refused) {
                self.write_views(response, &[view], seed);
            }
            return;
        }
        let answers = charges.iter().zip(decisions);
        let views: SmallVec<[View<'_>; 4]> =
            answers.filter_map(|(charge, decision)| self.view(charge, decision, refused)).collect();
        self.write_views(response, &views, seed);
    }

    fn view<'a>(&'a self, charge: &OwnedCharge, decision: &'a ChargeDecision, refused: bool) -> Option<View<'a>> {
        if !decision.is_known() {
            return None;
        }
        Some(View { policy: self.policy(charge.policy)?, decision, refuses: refused && !decision.is_allowed() })
    }

    #[inline]
    fn write_views<B>(&self, response: &mut Response<B>, views: &[View<'_>], seed: Option<u64>) {
        let status = response.status();
        self.headers.write(response.headers_mut(), views, status, seed.is_some(), seed.unwrap_or(0), &wall_now);
    }

    fn outcome(&self, decided: &Decided) -> Outcome {
        let mut standings = SmallVec::new();
        let (charges, decisions) = decided.answers();
        for (charge, decision) in charges.iter().zip(decisions) {
            if let Some(policy) = self.policy(charge.policy) {
                standings.push(Standing {
                    policy: policy.clone(),
                    cost: charge.cost,
                    effect: Effect::Enforce,
                    decision: decision.clone(),
                });
            }
        }
        Outcome::new(decided.kind, standings)
    }

    pub(super) fn policy(&self, at: usize) -> Option<&Policy> {
        self.policies.get(at)
    }
}

impl<L: Limiter> Shared<L> {
    #[inline(always)]
    pub(super) fn take(&self, charges: &Charges) -> Reply<Decision, L::Error, L::Future<Decision>> {
        match charges {
            Charges::One(charge) => match self.policy(charge.policy) {
                Some(policy) => self.limiter.take(&[Charge::new(policy, &charge.key).cost(charge.cost)]),
                None => self.limiter.take(&[]), // there is one
            },
            Charges::Several(charges) => self.take_all(charges),
        }
    }

    #[inline(never)]
    fn take_all(&self, charges: &[OwnedCharge]) -> Reply<Decision, L::Error, L::Future<Decision>> {
        let borrowed: SmallVec<[Charge<'_>; decision::INLINE]> = charges
            .iter()
            .filter_map(|charge| Some(Charge::new(self.policy(charge.policy)?, &charge.key).cost(charge.cost)))
            .collect();
        self.limiter.take(&borrowed)
    }

    /// One charge that is allowed, if nobody else looks at that; else what it means for the request.
    #[inline(always)]
    #[expect(clippy::result_large_err, reason = "no error, but the other case; both are taken apart by the caller")]
    pub(super) fn quickly(
        &self,
        charges: Charges,
        answer: Result<Decision, L::Error>,
    ) -> Result<(OwnedCharge, ChargeDecision), Decided> {
        match (charges, answer) {
            (Charges::One(charge), Ok(decision)) if self.is_plain => match decision.into_one() {
                Ok((true, decision)) => Ok((charge, decision)),
                Ok((false, decision)) => {
                    Err(Decided { kind: OutcomeKind::Limited, answer: Answer::One { charge, decision } })
                }
                Err(decision) => Err(self.decide(Charges::One(charge), Ok(decision))),
            },
            (charges, answer) => Err(self.decide(charges, answer)),
        }
    }

    /// What the limiter's answer means for the request.
    #[inline(never)]
    pub(super) fn decide(&self, mut charges: Charges, mut answer: Result<Decision, L::Error>) -> Decided {
        // By reference as far as possible: an answer has room for several charges, and so is large.
        let decision = match &mut answer {
            Ok(decision) => decision,
            Err(error) => return self.failed(error, charges),
        };
        let kind = if decision.is_allowed() { OutcomeKind::Allowed } else { OutcomeKind::Limited };
        let mut decided = Decided { kind, answer: Answer::Owed(SmallVec::new()) };
        if kind == OutcomeKind::Allowed && self.is_plain && self.headers.is_silent_if_passed() {
            if let Answer::Owed(owed) = &mut decided.answer {
                owe(owed, &mut charges, decision);
            }
        } else if let Ok(decision) = answer {
            decided.answer = match (charges, decision.into_one()) {
                (Charges::One(charge), Ok((_, decision))) => Answer::One { charge, decision },
                (charges, Ok((allowed, one))) => Answered::boxed(charges, Some(Decision::one(allowed, one))),
                (charges, Err(several)) => Answered::boxed(charges, Some(several)),
            };
        }
        decided
    }

    #[cold]
    fn failed(&self, error: &L::Error, charges: Charges) -> Decided {
        self.tell_failure(error);
        let kind = match self.settings.on_error {
            OnError::Deny => OutcomeKind::FailedClosed,
            OnError::Allow => OutcomeKind::FailedOpen,
        };
        Decided { kind, answer: Answered::boxed(charges, None) }
    }

    /// Gives back what a request took that never reached the service, or was refused on its way.
    #[cold]
    pub(super) fn give_back(&self, decided: Decided) {
        let mut owed = SmallVec::new();
        match decided.answer {
            Answer::Nothing => {}
            Answer::One { charge, decision } => {
                owe(&mut owed, &mut Charges::One(charge), &mut Decision::one(true, decision));
            }
            Answer::Owed(all) => owed = all,
            Answer::Several(mut record) => record.dismiss().owe(&mut owed),
        }
        let refunds: Vec<Refund> = owed
            .into_iter()
            .filter_map(|owed| Some(Refund::new(self.policy(owed.policy)?.clone(), owed.key, owed.receipt)))
            .collect();
        if !refunds.is_empty() {
            self.refund_all(refunds);
        }
    }
}

/// Moves over what charges took.
fn owe(owed: &mut SmallVec<[Owed; decision::INLINE]>, charges: &mut Charges, decision: &mut Decision) {
    for (at, OwnedCharge { policy, key, .. }) in charges.as_mut_slice().iter_mut().enumerate() {
        if let Some(receipt) = decision.charge_mut(at).and_then(ChargeDecision::take_receipt) {
            owed.push(Owed { policy: *policy, key: std::mem::replace(key, Key::global()), receipt });
        }
    }
}

/// The same for every refusal of one client, so that a client cannot draw its jitter again.
fn seed(charges: &[OwnedCharge]) -> u64 {
    let hash = foldhash::fast::FixedState::default();
    charges.first().map_or(0, |charge| hash.hash_one(&charge.key))
}
