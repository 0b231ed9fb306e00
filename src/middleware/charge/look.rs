//! Looks at a request: goes through the steps of a charge, but only asks the limiter what it would
//! decide.

use std::time::Duration;

use super::access::deciding_network;
use super::bypass::Bypass;
use crate::base::head::Head;
use crate::error::WithSources;
use crate::explanation::{Explanation, NotCharged, RuleExplanation};
use crate::key::Key;
use crate::limiter::Limiter;
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::kind::OutcomeCause;
use crate::middleware::rule::{BoundRule, RuleMatch};
use crate::middleware::ticket::{Ticket, is_strike};

impl Ticket {
    /// Decides about a request as [`charge_and_store`](Self::charge_and_store) and [`answer`](Self::answer) do, but
    /// takes no units and reports nothing. Afterwards the ticket cannot be used for anything else.
    pub(crate) async fn look<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> Explanation {
        let mut rules = self.look_at_rules(layer, head);
        let mut failure = None;
        if !self.charges.is_empty() {
            if let Some(error) = self.unsupported(layer) {
                failure = Some((error.to_string(), false));
            } else {
                let reply = layer.limiter.peek(&self.asked(layer));
                match reply.await {
                    Ok(decision) => {
                        for (charged, answer) in self.charges.iter_mut().zip(decision.charges()) {
                            charged.decision = answer.clone(); // a clone has no receipt, so nothing can be refunded
                        }
                        self.judge(layer, decision.is_allowed(), |ticket, layer| {
                            ticket.look_untaken(layer, &ticket.closed());
                        });
                    }
                    Err(error) => failure = Some((WithSources(&error).to_string(), layer.limiter.is_overload(&error))),
                }
            }
            if let Some((_, is_overload)) = failure {
                self.decide(layer, OutcomeCause::LimiterFailed { is_overload });
            }
        }
        if layer.delays.as_ref().is_some_and(|delays| delays.is_full()) && self.waits() {
            self.refuse_to_wait(layer, |ticket| ticket.look_untaken(layer, &Vec::from_iter(0..ticket.charges.len())));
        }
        let line = self.line_to_join(layer, Duration::ZERO).filter(|_| layer.has_lines());
        let line_wait = line.and_then(|at| {
            let (charged, delays) = (self.charges.get(at)?, layer.delays.as_ref()?);
            let policy = charged.policy_in(layer)?;
            let has_room = delays.has_room_in_line(layer.limiter.hooks().place_lines()?, policy, &charged.key);
            has_room.then(|| policy.quota().wait_in_line())
        });
        if layer.settings.overflows && self.kind.may_overflow() {
            self.decide(layer, OutcomeCause::Overflow);
        }
        let outcome = self.outcome(layer);
        let mut statuses = outcome.policies().iter();
        for charged in &self.charges {
            let status = if self.is_answered { statuses.next() } else { None };
            let place = layer.rule_of(charged.policy);
            let is_it =
                |(at, rule): &&mut (usize, RuleExplanation)| *at == place && rule.key.as_ref() == Some(&charged.key);
            if let Some((_, rule)) = rules.iter_mut().find(is_it) {
                // The rule's own charges come before the charge of its linked policy, so the first cost is the rule's
                // own.
                rule.cost.get_or_insert(charged.cost);
                rule.statuses.extend(status.cloned());
            }
        }
        let is_listed = |(_, rule): &(usize, RuleExplanation)| rule.not_charged == Some(NotCharged::AccessList);
        let network = rules.iter().any(is_listed).then(|| deciding_network(&layer.settings.access, head)).flatten();
        let rules = rules.into_iter().map(|(_, rule)| rule).collect();
        let explanation = Explanation::new(outcome, rules, failure.map(|(error, _)| error));
        explanation.waiting_in_line(line_wait).decided_by(network)
    }

    /// Collects the charges, and returns each rule's index with its explanation. If a rule is charged under
    /// several keys, it is listed once for each key.
    fn look_at_rules<L: Limiter>(&mut self, layer: &Compiled<L>, head: &Head<'_>) -> Vec<(usize, RuleExplanation)> {
        let bypass = Bypass::of(&layer.settings, head, |_, _, _| ());
        let unasked = match &bypass {
            Some(Bypass::Allowed(_) | Bypass::Denied) => NotCharged::AccessList,
            Some(Bypass::Preflight) => NotCharged::Preflight,
            None => NotCharged::Path,
        };
        let found = layer.settings.finder().map_or(0, |(_, rules)| rules);
        let unasked_of = |at| if at < found && unasked == NotCharged::Path { NotCharged::Descriptor } else { unasked };
        let bound = layer.settings.rules.iter().enumerate();
        let mut rules: Vec<(usize, RuleExplanation)> =
            bound.map(|(at, bound)| (at, explained(layer, bound, unasked_of(at)))).collect();
        let count = rules.len();
        if let Some(bypass) = bypass {
            self.decide(layer, bypass.cause());
            return rules;
        }
        let mut last = None;
        let uncharged = self.collect(layer, head, |at, _, matched| {
            last = Some(at);
            debug_assert!(at < count, "a rule that was asked is a rule of the layer");
            let Some((_, rule)) = rules.get_mut(at) else { return };
            let key = if let RuleMatch::Charged { key, .. } = matched { Some(key) } else { None };
            if key.is_some() && rule.key.is_some() && rule.key.as_ref() != key {
                let mut again = rule.clone();
                set_key(&mut again, key);
                rules.push((at, again));
                return;
            }
            (rule.not_charged, rule.expected) = match matched {
                RuleMatch::Charged { .. } => (None, None),
                RuleMatch::Exempt(Some(unmet)) => (Some(unmet.of), unmet.expected.as_ref().map(|words| words())),
                RuleMatch::Exempt(None) => (Some(NotCharged::KeyExempt), None),
                RuleMatch::KeyMissing => (Some(NotCharged::KeyMissing), None),
            };
            set_key(rule, key);
        });
        if let Some(OutcomeCause::KeyMissing(_)) = &uncharged {
            // The last rule that was asked refuses the request, so later rules were not asked.
            let after = last.map_or(0, |last| last + 1);
            for (_, rule) in rules.iter_mut().take(count).skip(after) {
                (rule.not_charged, rule.expected) = (Some(NotCharged::NotAsked), None);
            }
        }
        if let Some(cause) = uncharged {
            self.decide(layer, cause);
        }
        rules.sort_by_key(|(at, _)| *at);
        rules
    }

    /// Reports the charges at these indices as if no units were taken.
    fn look_untaken<L: Limiter>(&mut self, layer: &Compiled<L>, places: &[usize]) {
        for at in places {
            let Some(charged) = self.charges.get(*at) else { continue };
            if charged.decision.is_allowed() && !is_strike(layer, charged) {
                self.update(layer, *at, charged.cost, 0);
            }
        }
    }
}

fn set_key(rule: &mut RuleExplanation, key: Option<&Key>) {
    rule.key = key.cloned();
    rule.key_text = key.map(|key| key.display().to_string());
}

/// Explains a rule that is not asked. `reason` says why it is not asked.
fn explained<L: Limiter>(layer: &Compiled<L>, bound: &BoundRule, reason: NotCharged) -> RuleExplanation {
    let rule = bound.rule();
    let reason = if reason == NotCharged::Path && rule.is_disabled() { NotCharged::Disabled } else { reason };
    let patterns = || rule.paths.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
    let expected = (reason == NotCharged::Path).then(patterns);
    RuleExplanation {
        policies: bound.policies().into(),
        mode: layer.mode_of(bound),
        not_charged: Some(reason),
        expected: expected.map(Into::into),
        key: None,
        key_text: None,
        cost: None,
        settles: rule.settlement.reads_response(),
        paces: rule.pace.is_some(),
        statuses: Vec::new(),
    }
}
