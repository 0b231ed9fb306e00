//! Charging a request: the rules say what is charged, and the limiter takes it.

use std::error::Error;

use smallvec::SmallVec;

use super::bypass;
use crate::decision::{ChargeDecision, Decision, INLINE};
use crate::head::Head;
use crate::headers::{DueHeaders, PolicyView, is_near};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Reply, UnsupportedQuota, supports_in_layer};
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::{linked, mode::kind_of_keyless};
use crate::middleware::rule::{BoundRule, Condition};
use crate::middleware::settings::OnError;
use crate::middleware::source::FOUND_MAX;
use crate::middleware::ticket::{Charged, Ticket};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// The most charges for which room is made before they are known: few of many rules apply to a request.
const RESERVED_MAX: usize = 16;

/// How far a request is decided when it was charged.
pub(crate) enum Charging<F> {
    /// It passes, and nothing reports it but headers, if it gets any. The ticket is of no use.
    Quiet(Option<DueHeaders>),
    /// The ticket says what becomes of it.
    Decided,
    /// The limiter answers later. Then [`Ticket::answer`] decides.
    Later(F),
}

impl Ticket {
    /// Charges a request that a service is behind. The charges of a [quiet](Charging::Quiet) request are not kept.
    #[inline(never)]
    pub(crate) fn charge<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> Charging<L::Future<Decision>> {
        // The one fast path: most layers have one policy that is always enforced, and only headers report an allowed
        // request. Key and decision stay where they were written, because a copy of words just written stalls on store
        // forwarding (`benches/instructions`, "layer, allowed, no header fields").
        let Some((bound, policy)) = layer.only_policy() else { return self.charge_rules(layer, head) };
        if !bound.applies(head) {
            return Charging::Decided;
        }
        self.charge_only(layer, bound, policy, None, head)
    }

    /// Charges a request to the rules of any layer.
    #[inline(never)]
    fn charge_rules<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> Charging<L::Future<Decision>> {
        if let Some(rules) = layer.plain_rules() {
            return self.charge_set(layer, rules, head);
        }
        if let Some((bound, cache)) = layer.only_cache() {
            if !bound.applies(head) {
                return Charging::Decided;
            }
            let quota = bound.quota_from().and_then(|from| (from.read)(head));
            let Some(quota) = &quota else { return Charging::Decided };
            if let Some(own) = cache.find(quota).filter(|own| !has_more_steps(own.policy())) {
                return self.charge_only(layer, bound, own.policy(), Some(own.policy()), head);
            }
        }
        let is_told = layer.prepares || layer.diagnostics.looks();
        match self.charge_and_keep(layer, head) {
            Some(answer) => Charging::Later(answer),
            None if is_told
                || (layer.brings_quotas && self.is_of_places(layer))
                || self.is_left_to_line
                || !matches!(self.kind, OutcomeKind::Allowed | OutcomeKind::Exempt) =>
            {
                Charging::Decided
            }
            None => Charging::Quiet(self.due_headers(layer)),
        }
    }

    /// Charges a request to several policies that are always enforced. If it passes, nothing is kept of it but headers
    /// (`benches/instructions`, "layer of three policies, no header fields").
    fn charge_set<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        rules: &[BoundRule],
        head: &Head<'_>,
    ) -> Charging<L::Future<Decision>> {
        // Rules with one extractor share a key.
        let mut keys: SmallVec<[Key; INLINE]> = SmallVec::new();
        let mut known: Option<&BoundRule> = None;
        // The place of each policy, that of its key, and the cost.
        let mut found: SmallVec<[(usize, usize, u64); INLINE]> = SmallVec::new();
        for bound in rules.iter().filter(|bound| bound.applies(head)) {
            if known.is_none_or(|other| !bound.has_key_of(other)) {
                match bound.key(head) {
                    Some(key) => keys.push(key),
                    None if bound.exempts_keyless() => continue,
                    None => {
                        (self.kind, self.lacks_peer) = (OutcomeKind::KeyMissing, bound.needs_peer());
                        return Charging::Decided;
                    }
                }
                known = Some(bound);
            }
            let (key, cost) = (keys.len() - 1, bound.cost(head)); // it has one by now
            for policy in bound.charged(head) {
                found.push((policy, key, cost));
            }
        }
        if found.is_empty() {
            return Charging::Quiet(None); // every rule exempts it
        }
        let each =
            || found.iter().filter_map(|(at, key, cost)| Some((*at, layer.policy(*at)?, keys.get(*key)?, *cost)));
        let mut charges: SmallVec<[Charge<'_>; INLINE]> = SmallVec::new();
        each().for_each(|(_, policy, key, cost)| charges.push(Charge::new(policy, key).cost(cost)));
        let mut reply = layer.limiter.take(&charges);
        if let Reply::Now(Ok(decision)) = &reply {
            if decision.is_allowed() {
                if layer.headers.is_silent_if_passed {
                    return Charging::Quiet(None);
                }
                let view = |((place, policy, key, _), decision)| PolicyView {
                    place,
                    policy,
                    key: Some(key),
                    decision,
                    refuses: false,
                };
                let views: SmallVec<[PolicyView<'_>; INLINE]> = each().zip(decision.charges()).map(view).collect();
                return Charging::Quiet(layer.headers.due(&views));
            }
        }
        let charged =
            |(at, _, key, cost): (usize, &Policy, &Key, u64)| Charged::new(at, key.clone(), cost, Mode::Enforce);
        self.charges.extend(each().map(charged));
        if let Reply::Now(answer) = &mut reply {
            self.answer(layer, answer);
        }
        match reply {
            Reply::Now(_) => Charging::Decided,
            Reply::Later(answer) => Charging::Later(answer),
        }
    }

    /// Charges a request to one policy that is always enforced: `own` if it is that of the request's own quota.
    #[inline(always)]
    fn charge_only<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        bound: &BoundRule,
        policy: &Policy,
        own: Option<&Policy>,
        head: &Head<'_>,
    ) -> Charging<L::Future<Decision>> {
        let found = bound.key(head);
        let Some(key) = &found else {
            if !bound.exempts_keyless() {
                (self.kind, self.lacks_peer) = (OutcomeKind::KeyMissing, bound.needs_peer());
            }
            return Charging::Decided;
        };
        let cost = bound.cost(head);
        // Not by the `Arc`, whose call is not inlined in both callers of this.
        let decision = L::try_take_one(&layer.limiter, policy, key, cost);
        match &decision {
            Some(decision)
                if decision.is_allowed() && !layer.keeps_charges && is_seen_at_once(layer, policy, key, decision) =>
            {
                if layer.headers.is_silent_if_passed {
                    return Charging::Quiet(None); // before anything is made for headers
                }
                let view = PolicyView { place: 0, policy, key: Some(key), decision, refuses: false };
                Charging::Quiet(layer.headers.due(&[view]))
            }
            _ => match found.and_then(|key| self.charge_one(layer, own, key, cost, decision)) {
                Some(answer) => Charging::Later(answer),
                None => Charging::Decided,
            },
        }
    }

    /// Charges a request, and keeps the charges whatever becomes of it. Returns the limiter's future if the limiter
    /// answers later: then [`answer`](Self::answer) decides.
    pub(crate) fn charge_and_keep<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        head: &Head<'_>,
    ) -> Option<L::Future<Decision>> {
        let planned = bypass::kind(layer, head).or_else(|| {
            let looks = layer.diagnostics.looks_for_keys();
            self.plan(layer, head, |at, bound, unmet, key| {
                if looks {
                    layer.diagnostics.look_at_rule(at, bound, unmet.is_none(), key, head);
                }
            })
        });
        let Some(kind) = planned else { return self.ask(layer) };
        self.kind = kind;
        None
    }

    /// Keeps the only charge, with the limiter's answer if there is one.
    #[inline(never)]
    fn charge_one<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        own: Option<&Policy>,
        key: Key,
        cost: u64,
        decision: Option<ChargeDecision>,
    ) -> Option<L::Future<Decision>> {
        self.charges.push(Charged { own: own.cloned(), ..Charged::new(0, key, cost, Mode::Enforce) });
        let (Some(decision), Some(charged)) = (decision, self.charges.last_mut()) else { return self.ask(layer) };
        self.kind = if decision.is_allowed() { OutcomeKind::Allowed } else { OutcomeKind::Limited };
        self.is_answered = true;
        charged.decision = decision;
        // Before anything that may panic.
        if layer.has_places {
            self.hold_places(layer);
        }
        None
    }

    /// Collects what the rules charge the request. Returns what becomes of a request that is not charged.
    ///
    /// `seen` gets each rule that is asked: its index, the condition that the request does not meet, and the key.
    #[inline(never)]
    pub(super) fn plan<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        head: &Head<'_>,
        mut seen: impl FnMut(usize, &BoundRule, Option<&Condition>, Option<&Key>),
    ) -> Option<OutcomeKind> {
        let found = layer.paths.as_ref().map(|paths| paths.rules(head));
        if found.is_none() {
            self.charges.reserve_exact(layer.most_charges.min(RESERVED_MAX));
        }
        let rules = &layer.settings.rules;
        // A rule that has charged the request, and the place of the charge, whose key other rules may have too.
        let mut known: Option<(&BoundRule, usize)> = None;
        let Some(first) = self.find(layer, head, &mut seen) else { return Some(OutcomeKind::Limited) };
        for at in first..found.as_ref().map_or(rules.len(), |found| found.len()) {
            let rule = found.as_ref().map_or(Some(at), |found| found.get(at).copied());
            debug_assert!(rule.is_some_and(|rule| rule < rules.len()), "the paths are those of the layer's own rules");
            let Some((rule, bound)) = rule.and_then(|rule| Some((rule, rules.get(rule)?))) else { continue };
            let mut unmet = bound.unmet(head);
            let mut own = None;
            if let (None, Some(from)) = (unmet, bound.quota_from()) {
                match (from.read)(head) {
                    Some(quota) => own = layer.policy_from(rule, &quota),
                    None => unmet = Some(&from.absent),
                }
            }
            let key = match known.filter(|(other, _)| bound.has_key_of(other)) {
                _ if unmet.is_some() => None,
                Some((_, charge)) => self.charges.get(charge).map(|charged| charged.key.clone()),
                None => bound.key(head),
            };
            seen(rule, bound, unmet, key.as_ref());
            if unmet.is_some() || key.is_none() && bound.exempts_keyless() {
                continue;
            }
            let mode = layer.mode_of(bound);
            match key {
                Some(key) => {
                    let (cost, first) = (bound.cost(head), self.charges.len());
                    known = Some((bound, first));
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
                None if mode == Mode::Enforce => {
                    self.charges.clear();
                    self.lacks_peer = bound.needs_peer();
                    return Some(OutcomeKind::KeyMissing);
                }
                None if self.keyless != Some(Mode::Degrade) => self.keyless = Some(mode),
                None => {}
            }
        }
        match self.keyless {
            _ if !self.charges.is_empty() => None,
            None => Some(OutcomeKind::Exempt),
            Some(mode) => Some(kind_of_keyless(mode)),
        }
    }

    /// Collects what the rules charge that a source finds. Returns how many rules it finds among, or `None` if the
    /// request is refused because it has too many charges. If no rule that was found enforces, such a request is not
    /// charged to them.
    #[inline]
    fn find<L>(
        &mut self,
        layer: &Compiled<L>,
        head: &Head<'_>,
        seen: &mut impl FnMut(usize, &BoundRule, Option<&Condition>, Option<&Key>),
    ) -> Option<usize> {
        let Some((finder, count)) = layer.settings.finder() else { return Some(0) };
        let most = FOUND_MAX.saturating_sub(layer.most_charges);
        let mut strictest = Mode::Shadow;
        finder.find(head, &mut |rule, key, cost| {
            debug_assert!(rule < count, "the source finds rules of its own version");
            let Some(bound) = layer.settings.rules.get(rule) else { return };
            let (policy, mode) = (bound.end() - 1, layer.mode_of(bound));
            strictest = strictest.stricter(mode);
            if self.charges.len() > most {
                return;
            }
            seen(rule, bound, None, Some(&key));
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
    fn ask<L: Limiter>(&mut self, layer: &Compiled<L>) -> Option<L::Future<Decision>> {
        if let Some(error) = self.unsupported(layer) {
            self.fail(layer, &error, false);
            return None;
        }
        if self.has_to_be_tried(layer) {
            self.is_left_to_line = true;
            return None;
        }
        let charges = self.asked(layer);
        let mut reply = layer.limiter.take(&charges);
        drop(charges);
        if let Reply::Now(answer) = &mut reply {
            self.answer(layer, answer);
        }
        match reply {
            Reply::Now(_) => None,
            Reply::Later(answer) => Some(answer),
        }
    }

    /// Returns why the limiter cannot decide about one of the charges.
    pub(super) fn unsupported<L: Limiter>(&self, layer: &Compiled<L>) -> Option<UnsupportedQuota> {
        let is_charged = |policy| self.charges.iter().any(|charged| charged.policy == policy);
        let fixed = layer.unsupported.iter().find(|(policy, _)| is_charged(*policy)).map(|(_, error)| error.clone());
        if !layer.brings_quotas {
            return fixed;
        }
        let own = || self.charges.iter().filter_map(|charged| charged.own.as_ref());
        fixed.or_else(|| own().find_map(|own| supports_in_layer(&*layer.limiter, own.quota()).err()))
    }

    /// Returns the charges as the limiter is asked for them.
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

    /// Decides what becomes of the request by the limiter's answer, and takes the receipts out of that.
    pub(crate) fn answer<L: Limiter>(&mut self, layer: &Compiled<L>, answer: &mut Result<Decision, L::Error>) {
        match answer {
            Ok(decision) => {
                for (charged, answer) in self.charges.iter_mut().zip(decision.charges_mut()) {
                    charged.decision = answer.take();
                }
                // Before anything that may panic.
                if layer.has_places {
                    self.hold_places(layer);
                }
                self.decide(layer, decision.is_allowed(), Self::take_nothing_while_closed);
            }
            Err(error) => {
                let is_overload = layer.limiter.is_overload(error);
                self.fail(layer, error, is_overload);
            }
        }
    }

    /// Decides what becomes of the request. `take_nothing` reports the charges of rules whose block is closed but does
    /// not enforce as not taken.
    #[inline]
    pub(super) fn decide<L: Limiter>(
        &mut self,
        layer: &Compiled<L>,
        is_allowed: bool,
        take_nothing: impl FnOnce(&mut Self, &Compiled<L>),
    ) {
        self.is_answered = true;
        self.kind = if is_allowed { self.kind_of_taken(layer) } else { OutcomeKind::Limited };
        if !is_allowed && layer.unsettled.is_some() {
            self.doubt_waits(layer);
        }
        if self.charges.len() > 1
            && self.charges.iter().any(|charged| matches!(charged.effect, Effect::OnRefusal { .. }))
        {
            if is_allowed {
                take_nothing(self, layer);
            }
            self.kind = linked::kind(layer, self.kind, &self.charges);
        }
    }

    /// Forgets the waits of blocks that are closed by strikes of requests under way, among others: if these end well,
    /// the next request passes at once.
    #[cold]
    pub(super) fn doubt_waits<L>(&mut self, layer: &Compiled<L>) {
        let Some(unsettled) = &layer.unsettled else { return };
        for charged in self.charges.iter_mut().filter(|charged| !charged.decision.is_allowed()) {
            let strikes = layer.strikes_to_settle(charged.policy, &charged.key);
            if strikes.is_some_and(|strikes| unsettled.has(&strikes)) {
                charged.decision.forget_wait();
            }
        }
    }

    /// Decides about a request without an answer of the limiter. It is refused only if a rule could have refused it.
    #[cold]
    fn fail<L: Limiter>(&mut self, layer: &Compiled<L>, error: &(dyn Error + 'static), is_overload: bool) {
        layer.report_failure(error);
        self.kind = self.kind_of_failure(layer, is_overload);
    }

    /// Returns what becomes of a request that the limiter does not answer.
    pub(super) fn kind_of_failure<L>(&self, layer: &Compiled<L>, is_overload: bool) -> OutcomeKind {
        let may_refuse = self.charges.iter().any(|charged| charged.mode == Mode::Enforce);
        let denies = match layer.settings.on_error {
            OnError::Deny => true,
            OnError::Allow => is_overload,
            OnError::AllowAlways => false,
        };
        if denies && may_refuse {
            OutcomeKind::FailedClosed
        } else if self.keyless == Some(Mode::Degrade) {
            // A request without a key stays degraded: that needs no answer of the limiter.
            OutcomeKind::Degraded
        } else {
            OutcomeKind::FailedOpen
        }
    }
}

/// Returns whether a request's own quota needs more than a decision and headers: it is held, may wait, or is reported
/// by no header.
#[inline]
fn has_more_steps(policy: &Policy) -> bool {
    let quota = policy.quota();
    matches!(quota.algorithm(), Algorithm::Concurrency | Algorithm::LeakyQueue) || quota.is_unlimited()
}

/// Returns whether an allowed charge of a layer's only policy is all that the observer sees of its request, if there is
/// an observer. To make the outcome takes longer than the decision (`benches/stats.rs`).
#[inline(always)]
fn is_seen_at_once<L>(layer: &Compiled<L>, policy: &Policy, key: &Key, decision: &ChargeDecision) -> bool {
    let Some(observer) = &layer.settings.observer else { return true };
    let warn_at = layer.warn_at_percent(0);
    let is_near = warn_at.is_some_and(|percent| is_near(decision, percent));
    observer.on_allowed(policy, key, decision.taken(), is_near)
}
