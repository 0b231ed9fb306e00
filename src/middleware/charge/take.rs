//! Charges a request: the rules say what is charged, and the limiter takes the units.

use std::error::Error;
use std::mem;

use smallvec::SmallVec;

use super::bypass;
use crate::base::head::Head;
use crate::decision::{ChargeDecision, Decision, INLINE};
use crate::headers::{PolicyView, is_near};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Reply, UnsupportedQuota, supports_in_layer};
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::kind::OutcomeCause;
use crate::middleware::decide::linked;
use crate::middleware::decide::step::NextStep;
use crate::middleware::plan::{ChargePlan, Needs, PlaceHolders};
use crate::middleware::rule::{BoundRule, Cached, RuleMatch};
use crate::middleware::source::FOUND_MAX;
use crate::middleware::ticket::{Charged, PacedBy, Ticket};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// The maximum number of charges for which memory is allocated before the charges are known. If a layer has
/// many rules, usually only few apply to a request.
const RESERVED_MAX: usize = 16;

/// The next step of a request, with the limiter's type of future.
type StepOf<L> = NextStep<<L as Limiter>::Future<Decision>>;

impl Ticket {
    /// Charges a request to a service, according to the plan of its layer.
    #[inline(never)]
    pub(crate) fn charge<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        match layer.plan() {
            ChargePlan::OnePolicy => self.charge_policy(layer, head),
            ChargePlan::OwnQuota => self.charge_own_quota(layer, head),
            ChargePlan::SeveralPolicies => self.charge_policies(layer, head),
            ChargePlan::General => self.charge_any(layer, head),
        }
    }

    /// Charges a request to the layer's only policy.
    #[inline(always)]
    fn charge_policy<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        let Some((bound, policy)) = layer.first() else { return self.next_step(layer) };
        if bound.unmet(head, |_| ()).is_some() {
            return self.next_step(layer);
        }
        let mut key = bound.key(head);
        match bound.match_key(head, key.as_mut()) {
            RuleMatch::Charged { key, cost } => self.take_one(layer, policy, None, key, cost),
            RuleMatch::Exempt(_) => self.next_step(layer),
            RuleMatch::KeyMissing => self.refuse_keyless(layer, bound),
        }
    }

    /// Charges a request to the quota that it brings.
    #[inline(never)]
    fn charge_own_quota<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        let Some((bound, _)) = layer.first() else { return self.next_step(layer) };
        let mut own = None;
        if bound.unmet(head, |quota| own = layer.own_policy(0, quota)).is_some() {
            return self.next_step(layer);
        }
        let own = own.as_ref().map(Cached::policy);
        let mut key = bound.key(head);
        match bound.match_key(head, key.as_mut()) {
            RuleMatch::Charged { key, cost } => match own {
                Some(policy) if !has_more_steps(policy) => self.take_one(layer, policy, own, key, cost),
                _ => self.store_one(layer, own, key, cost, None),
            },
            RuleMatch::Exempt(_) => self.next_step(layer),
            RuleMatch::KeyMissing => self.refuse_keyless(layer, bound),
        }
    }

    /// Takes the only charge, which is always enforced. `own` is the charge's policy if the request
    /// brought the quota.
    #[inline(always)]
    fn take_one<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        policy: &Policy,
        own: Option<&Policy>,
        key: &mut Key,
        cost: u64,
    ) -> StepOf<L> {
        // Calls the method of `L` itself, because the call through the `Arc` would not be inlined in both callers of
        // this function.
        let decision = L::try_take_one(&layer.limiter, policy, key, cost);
        match &decision {
            Some(decision)
                if decision.is_allowed()
                    && layer.needs < Needs::Charges
                    && is_seen_at_once(layer, policy, key, decision) =>
            {
                if layer.responses.headers.is_silent_if_passed {
                    return NextStep::PassWithoutTicket(None); // before anything is made for headers
                }
                let view = PolicyView { index: 0, policy, key: Some(key), decision, refuses: false };
                NextStep::PassWithoutTicket(layer.responses.headers.due(&[view]))
            }
            _ => self.store_one(layer, own, key, cost, decision),
        }
    }

    /// Stores the only charge in the ticket, with the limiter's answer if there is an answer. Otherwise asks the
    /// limiter.
    #[inline(never)]
    fn store_one<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        own: Option<&Policy>,
        key: &mut Key,
        cost: u64,
        decision: Option<ChargeDecision>,
    ) -> StepOf<L> {
        let is_allowed = decision.as_ref().map(ChargeDecision::is_allowed);
        self.charges.push(Charged {
            own: own.cloned(),
            decision: decision.unwrap_or_else(|| ChargeDecision::unasked(0)),
            ..Charged::new(0, mem::replace(key, Key::global()), cost, Mode::Enforce)
        });
        let Some(is_allowed) = is_allowed else { return self.ask(layer) };
        // Holds the places before anything that may panic.
        if layer.holders != PlaceHolders::None {
            self.hold_places(layer);
        }
        self.is_answered = true;
        if is_allowed {
            self.decide(layer, OutcomeCause::AllowedByLimiter);
        } else {
            self.decide(layer, OutcomeCause::DeniedByLimiter);
        }
        self.next_step(layer)
    }

    /// Charges a request to several policies that are always enforced. If the request passes, only its headers are
    /// stored (`benches/instructions`, "layer of three policies, no header fields").
    #[inline(never)]
    fn charge_policies<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        // Rules with the same extractor share a key.
        let mut keys: SmallVec<[Key; INLINE]> = SmallVec::new();
        let mut known: Option<&BoundRule> = None;
        // Each element has the index of a policy, the index of its key, and the cost.
        let mut found: SmallVec<[(usize, usize, u64); INLINE]> = SmallVec::new();
        for bound in &layer.settings.rules {
            let is_shared = known.is_some_and(|other| bound.has_key_of(other));
            let find_key = |bound: &BoundRule| {
                if !is_shared {
                    keys.push(bound.key(head)?);
                }
                keys.len().checked_sub(1)
            };
            match bound.match_request(head, |_| (), find_key) {
                RuleMatch::Charged { key, cost } => {
                    known = Some(bound);
                    bound.charged(head).for_each(|policy| found.push((policy, key, cost)));
                }
                RuleMatch::Exempt(_) => {}
                RuleMatch::KeyMissing => return self.refuse_keyless(layer, bound),
            }
        }
        if found.is_empty() {
            return NextStep::PassWithoutTicket(None); // every rule exempts it
        }
        let each =
            || found.iter().filter_map(|(at, key, cost)| Some((*at, layer.policy(*at)?, keys.get(*key)?, *cost)));
        let mut charges: SmallVec<[Charge<'_>; INLINE]> = SmallVec::new();
        each().for_each(|(_, policy, key, cost)| charges.push(Charge::new(policy, key).cost(cost)));
        let reply = layer.limiter.take(&charges);
        if let Reply::Now(Ok(decision)) = &reply {
            if decision.is_allowed() {
                if layer.responses.headers.is_silent_if_passed {
                    return NextStep::PassWithoutTicket(None);
                }
                let view = |((index, policy, key, _), decision)| PolicyView {
                    index,
                    policy,
                    key: Some(key),
                    decision,
                    refuses: false,
                };
                let views: SmallVec<[PolicyView<'_>; INLINE]> = each().zip(decision.charges()).map(view).collect();
                return NextStep::PassWithoutTicket(layer.responses.headers.due(&views));
            }
        }
        let charged =
            |(at, _, key, cost): (usize, &Policy, &Key, u64)| Charged::new(at, key.clone(), cost, Mode::Enforce);
        self.charges.extend(each().map(charged));
        self.see_reply(layer, reply)
    }

    /// Refuses a request that has no key for this enforcing rule.
    #[cold]
    fn refuse_keyless<L: Limiter>(&mut self, layer: &Compiled<L>, bound: &BoundRule) -> StepOf<L> {
        self.lacks_peer = bound.needs_peer();
        self.decide(layer, OutcomeCause::KeyMissing(Mode::Enforce));
        self.next_step(layer)
    }

    /// Charges a request to the rules of any layer.
    #[inline(never)]
    fn charge_any<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        let is_reported = layer.needs > Needs::Nothing || layer.diagnostics.looks();
        match self.charge_and_store(layer, head) {
            NextStep::Pass
                if !is_reported
                    && !self.may_hold(layer)
                    && matches!(self.kind, OutcomeKind::Allowed | OutcomeKind::Exempt) =>
            {
                NextStep::PassWithoutTicket(self.due_headers(layer))
            }
            step => step,
        }
    }

    /// Charges a request to the rules of any layer, and stores the charges in the ticket, whatever the request's
    /// next step is.
    pub(crate) fn charge_and_store<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        match self.collect_and_look(layer, head) {
            Some(cause) => {
                self.decide(layer, cause);
                self.next_step(layer)
            }
            None => self.ask(layer),
        }
    }

    /// Charges a message that may wait if it is refused, as [`charge_and_store`](Self::charge_and_store) charges a
    /// request. If a charge counts refusals, or other messages wait, the limiter is asked only when the message is
    /// in line.
    pub(crate) fn charge_to_wait<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> StepOf<L> {
        let uncharged = self.collect_and_look(layer, head);
        let is_of_line = self.refusal_counts(layer) || self.line_ahead(layer, None).is_some();
        if uncharged.is_none() && is_of_line && self.unsupported(layer).is_none() {
            self.is_left_to_line = true;
            return NextStep::WaitInLine;
        }
        match uncharged {
            Some(cause) => {
                self.decide(layer, cause);
                self.next_step(layer)
            }
            None => self.ask(layer),
        }
    }

    /// Collects the charges of the request according to the rules, and looks for misconfigurations. Returns the
    /// reason if the request is not charged.
    fn collect_and_look<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> Option<OutcomeCause> {
        bypass::cause(layer, head).or_else(|| {
            let looks = layer.diagnostics.looks_for_keys();
            self.collect(layer, head, |at, bound, matched| {
                if looks {
                    layer.diagnostics.look_at_rule(at, bound, matched, head);
                }
            })
        })
    }

    /// Collects the charges of the request according to the rules. Returns the reason if the
    /// request is not charged.
    ///
    /// `seen` gets the index of each rule that is asked, and how it matches the request.
    #[inline(never)]
    pub(super) fn collect<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        head: &Head<'_>,
        mut seen: impl FnMut(usize, &BoundRule, RuleMatch<'_, &Key>),
    ) -> Option<OutcomeCause> {
        let found = layer.paths.as_ref().map(|paths| paths.rules(head));
        if found.is_none() {
            self.charges.reserve_exact(layer.most_charges.min(RESERVED_MAX));
        }
        let rules = &layer.settings.rules;
        // `known` is the last rule that charged the request, and the index of its charge. Other rules may have the
        // same key.
        let mut known: Option<(&BoundRule, usize)> = None;
        let Some(first) = self.find(layer, head, &mut seen) else { return Some(OutcomeCause::TooManyCharges) };
        for at in first..found.as_ref().map_or(rules.len(), |found| found.len()) {
            let rule = found.as_ref().map_or(Some(at), |found| found.get(at).copied());
            debug_assert!(rule.is_some_and(|rule| rule < rules.len()), "each path belongs to a rule of the layer");
            let Some((rule, bound)) = rule.and_then(|rule| Some((rule, rules.get(rule)?))) else { continue };
            let mut own = None;
            let find_key = |bound: &BoundRule| match known.filter(|(other, _)| bound.has_key_of(other)) {
                Some((_, charge)) => self.charges.get(charge).map(|charged| charged.key.clone()),
                None => bound.key(head),
            };
            let matched = bound.match_request(head, |quota| own = layer.own_policy(rule, quota), find_key);
            seen(rule, bound, matched.as_ref());
            let mode = layer.mode_of(bound);
            match matched {
                RuleMatch::Charged { key, .. } if bound.rule().pace.is_some() => {
                    let own = own.map(Cached::into_policy);
                    let paced =
                        bound.charged(head).map(|policy| PacedBy { policy, own: own.clone(), key: key.clone() });
                    self.paced.add(paced);
                }
                RuleMatch::Charged { key, cost } => {
                    let first = self.charges.len();
                    known = Some((bound, first));
                    let own = own.map(Cached::into_policy);
                    let policies = bound.charged(head);
                    let last = policies.end.saturating_sub(1);
                    for policy in policies.start..last {
                        self.charges.push(Charged::new(policy, key.clone(), cost, mode));
                    }
                    self.charges.push(Charged { own, ..Charged::new(last, key, cost, mode) });
                    if let Some(linked) = layer.link(rule) {
                        linked::link(linked, &mut self.charges, first);
                    }
                }
                RuleMatch::Exempt(_) => {}
                RuleMatch::KeyMissing if mode == Mode::Enforce => {
                    self.charges.clear();
                    self.lacks_peer = bound.needs_peer();
                    return Some(OutcomeCause::KeyMissing(mode));
                }
                RuleMatch::KeyMissing if self.keyless != Some(Mode::Degrade) => self.keyless = Some(mode),
                RuleMatch::KeyMissing => {}
            }
        }
        self.charges.is_empty().then_some(OutcomeCause::NotCharged)
    }

    /// Collects the charges of the rules that a source finds. Returns the number of rules that the source chooses from.
    /// If the request has too many charges, drops all of them. Then returns `None` if one of the found rules
    /// enforces, and the request is refused.
    #[inline]
    fn find<L>(
        &mut self,
        layer: &Compiled<L>,
        head: &Head<'_>,
        seen: &mut impl FnMut(usize, &BoundRule, RuleMatch<'_, &Key>),
    ) -> Option<usize> {
        let Some((finder, count)) = layer.settings.finder() else { return Some(0) };
        let most = FOUND_MAX.saturating_sub(layer.most_charges);
        let mut strictest = Mode::Shadow;
        finder.find(head, &mut |rule, key, cost| {
            debug_assert!(rule < count, "the source finds only rules of its own version");
            let Some(bound) = layer.settings.rules.get(rule) else { return };
            let (policy, mode) = (bound.end() - 1, layer.mode_of(bound));
            strictest = strictest.stricter(mode);
            if self.charges.len() > most {
                return;
            }
            seen(rule, bound, RuleMatch::Charged { key: &key, cost });
            match self.charges.iter_mut().find(|other| other.policy == policy && other.key == key) {
                Some(same) => same.cost = same.cost.saturating_add(cost),
                None => self.charges.push(Charged::new(policy, key, cost, mode)),
            }
        });
        if self.charges.len() > most {
            self.charges.clear();
            if strictest == Mode::Enforce {
                return None;
            }
            self.keyless = Some(strictest);
        }
        Some(count)
    }

    /// Asks the limiter for all charges together.
    #[inline(never)]
    fn ask<L: Limiter>(&mut self, layer: &Compiled<L>) -> StepOf<L> {
        if let Some(error) = self.unsupported(layer) {
            self.fail(layer, &error, false);
        } else if self.has_to_be_tried(layer) {
            self.is_left_to_line = true;
        } else {
            let charges = self.asked(layer);
            let reply = layer.limiter.take(&charges);
            drop(charges);
            return self.see_reply(layer, reply);
        }
        self.next_step(layer)
    }

    #[inline]
    fn see_reply<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        reply: Reply<Decision, L::Error, L::Future<Decision>>,
    ) -> StepOf<L> {
        match reply {
            Reply::Now(mut answer) => {
                self.answer(layer, &mut answer);
                self.next_step(layer)
            }
            Reply::Later(answer) => NextStep::AwaitAnswer(answer),
        }
    }

    /// Returns the error if the limiter cannot decide about one of the charges.
    pub(super) fn unsupported<L: Limiter>(&self, layer: &Compiled<L>) -> Option<UnsupportedQuota> {
        let is_charged = |policy| self.charges.iter().any(|charged| charged.policy == policy);
        let fixed = layer.unsupported.iter().find(|(policy, _)| is_charged(*policy)).map(|(_, error)| error.clone());
        let own = || self.charges.iter().filter_map(|charged| charged.own.as_ref());
        fixed.or_else(|| own().find_map(|own| supports_in_layer(&*layer.limiter, own.quota()).err()))
    }

    /// Returns the charges in the form that the limiter gets.
    #[inline]
    pub(super) fn asked<'a, L>(&'a self, layer: &'a Compiled<L>) -> SmallVec<[Charge<'a>; 4]> {
        let mut charges: SmallVec<[Charge<'_>; 4]> = SmallVec::new();
        for charged in &self.charges {
            if let Some(policy) = charged.policy_in(layer) {
                charges.push(charged.charge(policy));
            }
        }
        charges
    }

    /// Decides about the request according to the limiter's answer, and takes the receipts out of
    /// the answer.
    pub(crate) fn answer<L: Limiter>(&mut self, layer: &Compiled<L>, answer: &mut Result<Decision, L::Error>) {
        match answer {
            Ok(decision) => {
                for (charged, answer) in self.charges.iter_mut().zip(decision.charges_mut()) {
                    charged.decision = answer.take();
                }
                // Holds the places before anything that may panic.
                if layer.holders != PlaceHolders::None {
                    self.hold_places(layer);
                }
                self.judge(layer, decision.is_allowed(), Self::take_nothing_while_closed);
            }
            Err(error) => {
                let is_overload = layer.limiter.is_overload(error);
                self.fail(layer, error, is_overload);
            }
        }
    }

    /// Decides about the request according to the decisions of its charges. A block that does not enforce may
    /// be closed although the limiter allows the request. Then `take_nothing` makes the charges of the block's
    /// rule count as not taken.
    #[inline]
    pub(super) fn judge<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        is_allowed: bool,
        take_nothing: impl FnOnce(&mut Self, &Compiled<L>),
    ) {
        self.is_answered = true;
        if is_allowed {
            self.decide(layer, OutcomeCause::AllowedByLimiter);
            let is_linked = |charged: &Charged| matches!(charged.effect, Effect::OnRefusal { .. });
            if self.charges.len() > 1 && self.charges.iter().any(is_linked) {
                take_nothing(self, layer);
            }
        } else {
            self.decide(layer, OutcomeCause::DeniedByLimiter);
            self.doubt_waits(layer);
        }
    }

    /// Makes the waits of closed blocks unknown, if strikes of requests under way helped to close them. If the
    /// responses to these requests refund the strikes, the next request passes at once.
    fn doubt_waits<L>(&mut self, layer: &Compiled<L>) {
        let Some(unsettled) = &layer.unsettled else { return };
        for charged in self.charges.iter_mut().filter(|charged| !charged.decision.is_allowed()) {
            let strikes = layer.strikes_to_settle(charged.policy, &charged.key);
            if strikes.is_some_and(|strikes| unsettled.has(&strikes)) {
                charged.decision.forget_wait();
            }
        }
    }

    /// Decides about a request without an answer of the limiter.
    #[cold]
    fn fail<L: Limiter>(&mut self, layer: &Compiled<L>, error: &(dyn Error + 'static), is_overload: bool) {
        layer.report_failure(error);
        self.decide(layer, OutcomeCause::LimiterFailed { is_overload });
    }
}

/// Returns whether a request with its own quota needs more than a decision and headers. More is needed if the
/// quota's units are held, if requests may wait for them, or if no header reports the quota.
#[inline]
fn has_more_steps(policy: &Policy) -> bool {
    let quota = policy.quota();
    matches!(quota.algorithm(), Algorithm::Concurrency | Algorithm::LeakyQueue) || quota.is_unlimited()
}

/// Reports an allowed charge of the layer's only policy to the observer, if there is one. Returns whether the observer
/// needs nothing else of the request. Making the outcome takes longer than the decision (`benches/stats.rs`).
#[inline(always)]
fn is_seen_at_once<L>(layer: &Compiled<L>, policy: &Policy, key: &Key, decision: &ChargeDecision) -> bool {
    let Some(observer) = &layer.settings.observer else { return true };
    let warn_at = layer.warn_at_percent(0);
    let is_near = warn_at.is_some_and(|percent| is_near(decision, percent));
    observer.on_allowed(policy, key, decision.taken(), is_near)
}
