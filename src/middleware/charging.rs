//! From a request to its charges, and from the limiter's answer to what becomes of the request.

use std::fmt::Display;
use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use http::Response;
use http::request::Parts;
use smallvec::SmallVec;

use super::body::RefusalBody;
use super::bound::{Asked, BoundRule};
use super::companions::Companions;
use super::decided::{Answer, Answered, Asking, Charges, Decided, Manner, OwnedCharge, owe};
use super::delay::Delays;
use super::headers::{Layout, Prepared, View};
use super::late::{self, Afters};
use super::layer::OnError;
use super::nested::NestedToken;
use super::overflow::store_only_if_said;
use super::refusal::{PreparedRefusals, Refusal};
use super::screen;
use super::settings::Settings;
use super::switch::Live;
use super::watch::Watch;
use crate::clock::wall_now;
use crate::decision::{self, ChargeDecision, Decision};
use crate::limiter::{Charge, Entered, Limiter, Refund, Reply, UnsupportedQuota};
use crate::mode::Mode;
use crate::outcome::{Outcome, OutcomeKind};
use crate::policy::Policy;

/// What a layer, its services and their futures share.
pub(super) struct Shared<L> {
    pub(super) limiter: L,
    pub(super) settings: Settings,
    /// Those of all rules, in their order.
    pub(super) policies: Arc<[Policy]>,
    /// The rule, if there is one, of one policy, and an allowed request needs nothing but its header fields.
    usual: Option<BoundRule>,
    headers: Prepared,
    refusals: PreparedRefusals,
    /// The fields of usual refusals.
    layout: Option<Layout>,
    /// For each policy, from how many percent on it is near its limit.
    pub(super) near: Vec<Option<u8>>,
    /// Rules may let pass what is over their quota.
    has_modes: bool,
    companions: Companions,
    /// Rules have blocks or meters.
    has_companions: bool,
    /// Where requests wait for their departure, if they do.
    pub(super) delays: Option<Arc<Delays>>,
    /// What is done after the response, if anything is.
    pub(super) afters: Option<Afters>,
    /// An allowed request needs nothing but its header fields.
    is_plain: bool,
    /// It needs nothing at all, and there are several policies, of which each stands for itself.
    pub(super) quiet: bool,
    /// Something of a request is looked at before its rules are.
    pub(super) is_screened: AtomicBool,
    pub(super) watch: Arc<Watch>,
    /// Requests need nothing of the layer before they are decided: it is enabled, and its quotas follow no switch.
    pub(super) is_direct: bool,
    /// How many configurations of the layer were there before.
    pub(super) version: u64,
    /// Where the configuration is that replaces this one, if quotas follow switches.
    pub(super) live: OnceLock<Weak<Live<L>>>,
    /// The layer's place among those that serve with its limiter, once it serves; `None` if the limiter keeps no roster.
    pub(super) entered: OnceLock<Option<Entered>>,
    /// The policies whose quotas the limiter does not support.
    pub(super) unsupported: Vec<(usize, UnsupportedQuota)>,
}

impl<L: Limiter> Shared<L> {
    pub(super) fn new(limiter: L, settings: Settings) -> Self {
        let mut policies: Vec<Policy> = settings.rules.iter().flat_map(BoundRule::policies).cloned().collect();
        let headers = settings.headers.prepare(&policies);
        let refusals = settings.refusals.prepare(&policies);
        let layout = headers.lay_out_refusal(refusals.fields(), refusals.limited_status());
        let companions = Companions::of(settings.rules.iter().map(BoundRule::rule), &mut policies);
        let has_companions = companions.are_there();
        let near = settings.rules.iter().flat_map(|rule| rule.policies().iter().map(|_| rule.rule().near_percent));
        let near = near.collect();
        let has_modes = settings.mode.is_some() || settings.rules.iter().any(BoundRule::has_mode);
        let delays = settings.timer.clone().map(|timer| Arc::new(Delays::new(timer, settings.max_waiting)));
        let afters = late::afters(settings.rules.iter().map(BoundRule::rule));
        let unsupported: Vec<(usize, UnsupportedQuota)> = policies
            .iter()
            .enumerate()
            .filter_map(|(at, policy)| Some((at, limiter.supports(policy.quota()).err()?)))
            .collect();
        let is_plain = !has_modes
            && unsupported.is_empty()
            && delays.is_none()
            && settings.observer.is_none()
            && !settings.expose_outcome
            && !settings.refund_nested
            && afters.is_none();
        let usual = settings.rules.first().filter(|_| policies.len() == 1 && is_plain).cloned();
        let quiet = policies.len() > 1 && is_plain && !has_companions && headers.is_silent_if_passed();
        let watch = Arc::new(Watch::new(&settings));
        let is_direct = settings.enabled && settings.rules.iter().all(|bound| bound.rule().switch.is_none());
        let is_screened = AtomicBool::new(screen::is_screened(&settings) || watch.looks() || watch.looks_for_keys());
        Self {
            limiter,
            settings,
            policies: policies.into(),
            usual,
            headers,
            refusals,
            layout,
            near,
            has_modes,
            companions,
            has_companions,
            delays,
            afters,
            is_plain,
            quiet,
            is_screened,
            watch,
            is_direct,
            version: 0,
            live: OnceLock::new(),
            entered: OnceLock::new(),
            unsupported,
        }
    }

    /// The configuration that replaces this one, for the same layer: requests that wait, and what was noticed, are in both.
    pub(super) fn successor(&self, settings: Settings) -> Self
    where
        L: Clone,
    {
        let is_screened = AtomicBool::new(self.is_screened.load(Ordering::Relaxed));
        Self {
            delays: self.delays.clone(),
            watch: Arc::clone(&self.watch),
            is_screened,
            version: self.version + 1,
            live: self.live.clone(),
            ..Self::new(self.limiter.clone(), settings)
        }
    }
}

impl<L> Shared<L> {
    /// The only rule and its policy, which is enforced, if nothing else is looked at.
    #[inline(always)]
    pub(super) fn usual(&self) -> Option<(&BoundRule, &Policy)> {
        let usual = self.usual.as_ref().filter(|_| !self.is_screened.load(Ordering::Relaxed))?;
        Some((usual, self.policies.first()?))
    }

    /// The charges of a request.
    #[inline(never)]
    pub(super) fn ask(&self, parts: &Parts) -> Asking {
        let mut looks = false;
        if self.is_screened.load(Ordering::Relaxed) {
            if let Some(asking) = self.screen(parts) {
                return asking;
            }
            looks = self.watch.looks_for_keys();
        }
        let mut charges: SmallVec<[OwnedCharge; decision::INLINE]> = SmallVec::new();
        let mut unkeyed = None;
        for (rule, bound) in self.settings.rules.iter().enumerate() {
            let asked = bound.ask(parts);
            if looks {
                self.look_at_rule(rule, bound, &asked);
            }
            match asked {
                Asked::Nothing | Asked::Exempt => {}
                Asked::Charge { key, cost } => {
                    let Range { start, end } = bound.charged(parts);
                    let last = end.saturating_sub(1);
                    let (first, manner) = (charges.len(), Manner::of(self.mode_of(bound)));
                    for policy in start..last {
                        charges.push(OwnedCharge { policy, key: key.clone(), cost, manner });
                    }
                    charges.push(OwnedCharge { policy: last, key, cost, manner });
                    self.companions.join(rule, &mut charges, first);
                }
                Asked::Key => match (self.mode_of(bound), unkeyed) {
                    (Mode::Enforce, _) => return Asking::Unkeyed(Mode::Enforce),
                    (_, Some(Mode::Degrade)) => {}
                    (mild, _) => unkeyed = Some(mild),
                },
            }
        }
        if let Some(mode) = unkeyed {
            let is_charged = !charges.is_empty();
            return if is_charged { Asking::Charges(Charges::Unkeyed(charges, mode)) } else { Asking::Unkeyed(mode) };
        }
        if charges.len() > 1 {
            return Asking::Charges(Charges::Several(charges));
        }
        charges.pop().map_or(Asking::Exempt, |charge| Asking::Charges(Charges::One(charge)))
    }

    /// The mode that a rule is in.
    #[inline(always)]
    fn mode_of(&self, bound: &BoundRule) -> Mode {
        if self.has_modes { self.mode_now(bound) } else { Mode::Enforce }
    }

    /// Whether nobody sees what becomes of a request other than by the response.
    #[inline(always)]
    pub(super) fn is_unobserved(&self) -> bool {
        self.settings.observer.is_none() && !self.settings.expose_outcome
    }

    /// The response to a request that does not pass.
    #[cold]
    pub(super) fn refuse(&self, parts: &mut Parts, decided: &Decided) -> Response<RefusalBody> {
        NestedToken::spend(&mut parts.extensions, decided.kind());
        let outcome = self.outcome(decided);
        self.observe(parts, decided, &outcome);
        if outcome.is_never() {
            self.look_for_never(&outcome);
        }
        let mut response = self.respond(parts, decided, &outcome);
        if response.extensions().is_empty() {
            // The request's have their memory already.
            parts.extensions.clear();
            *response.extensions_mut() = std::mem::take(&mut parts.extensions);
        }
        response.extensions_mut().insert(outcome);
        response
    }

    fn respond(&self, parts: &Parts, decided: &Decided, outcome: &Outcome) -> Response<RefusalBody> {
        let seed = self.seed(decided);
        let fields = || {
            let layout = self.layout.as_ref()?;
            self.with_views(decided, true, |views| self.headers.fill(layout, views, seed, &wall_now))?
        };
        if let Some(response) = self.refusals.usual(parts, outcome, fields) {
            return response;
        }
        let wait = self.headers.told_wait(outcome, seed);
        let mut response = self.refusals.respond(&Refusal::new(parts, outcome, wait));
        self.write_headers(&mut response, decided, Some(seed));
        response
    }

    /// Writes the fields of a response to a request that passed.
    pub(super) fn finish<B>(&self, response: &mut Response<B>, decided: &Decided) {
        self.write_headers(response, decided, None);
        if decided.kind == OutcomeKind::Degraded {
            store_only_if_said(response.headers_mut());
        }
        if !self.is_plain && (self.settings.expose_outcome || decided.is_told()) && self.settings.enabled {
            let inner = response.extensions().get().map(Outcome::kind);
            let refused = inner.is_some_and(|inner| !inner.passed());
            let told = inner.is_some_and(OutcomeKind::is_told) && !decided.is_told();
            if !refused && !told {
                response.extensions_mut().insert(self.outcome(decided));
            }
        }
    }

    pub(super) fn write_refusals_headers<B>(&self, response: &mut Response<B>, decided: &Decided) {
        self.write_headers(response, decided, Some(self.seed(decided)));
    }

    /// The seed is that of a refusal's jitter; nothing else is jittered.
    fn write_headers<B>(&self, response: &mut Response<B>, decided: &Decided, seed: Option<u64>) {
        let refused = seed.is_some();
        if !refused && self.headers.is_silent_if_passed() {
            return;
        }
        let status = response.status();
        let headers = response.headers_mut();
        self.with_views(decided, refused, |views| {
            self.headers.write(headers, views, status, refused, seed.unwrap_or(0), &wall_now);
        });
    }

    /// How the policies stand, as clients are told; nothing if the limiter was not asked, or did not answer.
    #[inline]
    fn with_views<R>(&self, decided: &Decided, refused: bool, then: impl FnOnce(&[View<'_>]) -> R) -> Option<R> {
        let (charges, decisions) = decided.answers();
        if decisions.is_empty() {
            return None;
        }
        // The usual layer has one rule.
        if let ([charge], [decision]) = (charges, decisions) {
            return self.view(charge, decision, refused).map(|view| then(&[view]));
        }
        let views: SmallVec<[View<'_>; 4]> = if self.has_companions {
            (0..charges.len()).filter_map(|at| self.view_with_companion(charges, decisions, at, refused)).collect()
        } else {
            let answers = charges.iter().zip(decisions);
            answers.filter_map(|(charge, decision)| self.view(charge, decision, refused)).collect()
        };
        Some(then(&views))
    }

    pub(super) fn view<'a>(
        &'a self,
        charge: &'a OwnedCharge,
        decision: &'a ChargeDecision,
        refused: bool,
    ) -> Option<View<'a>> {
        if !decision.is_known() || charge.mode() == Mode::Shadow {
            return None;
        }
        Some(View {
            policy: self.policy(charge.policy)?,
            key: &charge.key,
            decision,
            refuses: refused && charge.mode() == Mode::Enforce && !decision.is_allowed(),
        })
    }

    /// What refusals are jittered by: the same for every one of a client, so that it cannot draw its jitter again.
    fn seed(&self, decided: &Decided) -> u64 {
        if !self.headers.is_jittered() {
            return 0;
        }
        let hash = foldhash::fast::FixedState::default();
        decided.answers().0.first().map_or(0, |charge| hash.hash_one(&charge.key))
    }

    pub(super) fn policy(&self, at: usize) -> Option<&Policy> {
        self.policies.get(at)
    }
}

impl<L: Limiter> Shared<L> {
    #[inline(never)]
    pub(super) fn take(&self, charges: &Charges) -> Reply<Decision, L::Error, L::Future<Decision>> {
        let mut borrowed: SmallVec<[Charge<'_>; decision::INLINE]> = SmallVec::new();
        for charge in charges.as_slice() {
            borrowed.extend(self.policy(charge.policy).map(|policy| charge.of(policy)));
        }
        self.limiter.take(&borrowed)
    }

    /// What the limiter's answer means for the request. By reference, and moved out where they have to be: charges and
    /// answers have room for several, and so are large.
    #[inline(never)]
    pub(super) fn decide(&self, charges: &mut Charges, answer: &mut Result<Decision, L::Error>) -> Decided {
        let decision = match answer {
            Ok(decision) => decision,
            Err(error) => return self.fail(error, charges),
        };
        let kind = match decision.is_allowed() {
            true if self.has_modes || self.delays.is_some() => self.kind_of_taken(charges, decision),
            true => OutcomeKind::Allowed,
            false => OutcomeKind::Limited,
        };
        let kind = if self.has_companions {
            self.take_nothing_while_closed(charges, decision);
            self.kind_with_companions(kind, charges, decision)
        } else {
            kind
        };
        let answer = if kind == OutcomeKind::Allowed && self.is_plain && self.headers.is_silent_if_passed() {
            let mut owed = SmallVec::new();
            owe(&mut owed, charges, decision);
            Answer::Owed(owed)
        } else {
            match (charges.take(), decision.take().into_one()) {
                (Charges::One(charge), Ok((_, decision))) => Answer::One { charge, decision },
                (charges, Ok((allowed, one))) => Answered::boxed(charges, Some(Decision::one(allowed, one))),
                (charges, Err(several)) => Answered::boxed(charges, Some(several)),
            }
        };
        Decided { kind, answer }
    }

    /// Decides about a request whose charges the limiter does not support, if it is one.
    pub(super) fn decide_unsupported(&self, charges: &mut Charges) -> Option<Decided> {
        let is_charged = |policy| charges.as_slice().iter().any(|charge| charge.policy == policy);
        let (_, error) = self.unsupported.iter().find(|(policy, _)| is_charged(*policy))?;
        Some(self.fail(error, charges))
    }

    #[cold]
    fn fail(&self, error: &dyn Display, charges: &mut Charges) -> Decided {
        self.tell_failure(error);
        let kind = match self.settings.on_error {
            OnError::Deny if self.may_refuse(charges) => OutcomeKind::FailedClosed,
            _ => OutcomeKind::FailedOpen,
        };
        Decided { kind, answer: Answered::boxed(charges.take(), None) }
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
            .filter_map(|owed| Some(Refund::new(self.policy_now(owed.policy)?, owed.key, owed.receipt)))
            .collect();
        if !refunds.is_empty() {
            self.refund_all(refunds);
        }
    }
}
