//! Warnings about the setup of a layer: by its configuration, by other layers, and by its first requests.

use std::sync::Arc;

use http::Extensions;

use super::compiled::Compiled;
use super::rule::{BoundRule, LinkedRole};
use super::ticket::{Charged, Ticket};
use crate::key::Key;
use crate::limiter::{Contradiction, Entered, Limiter, UnsupportedQuota, supports_in_layer};
use crate::policy::Policy;
use crate::quota::Algorithm;
use crate::setup_warning::SetupWarningKind;

/// The charges of outer layers, in the extensions of one of their first requests.
#[derive(Clone)]
struct Earlier(Arc<Vec<ChargedTo>>);

/// A limiter, the name of a policy, and a key.
#[derive(Clone, PartialEq)]
struct ChargedTo {
    limiter: usize,
    policy: u64,
    key: Key,
}

impl<L: Limiter> Compiled<L> {
    /// Warns about what the setup alone shows.
    pub(super) fn look_at_setup(&self) {
        for bound in self.settings.rules.iter().filter(|bound| bound.rule().settlement.replaces_cost()) {
            // Blocks and meters count what is forced, and have no debt. Without a limit nothing is owed.
            let forgets = |policy: &&Policy| {
                let quota = policy.quota();
                quota.spec().debt == 0 && quota.algorithm().is_rate() && !quota.is_unlimited()
            };
            if let Some(policy) = bound.policies().iter().find(forgets) {
                self.diagnostics.notice(SetupWarningKind::NoDebt, || {
                    format!(
                        "the policy {:?} settles what a request cost above its reservation, and its quota ({}) remembers \
                         no debt: give it one by Quota::max_debt",
                        policy.name(),
                        policy.quota()
                    )
                });
            }
        }
        self.look_for_no_cost();
        self.look_for_no_effect();
        if let Some((policy, error)) = self.unsupported.first().and_then(|(at, error)| Some((self.policy(*at)?, error)))
        {
            self.quota_is_not_supported(policy, error);
        }
        self.look_for_timer();
        let own = self.settings.rules.iter().flat_map(BoundRule::policies).cloned();
        if let Some(text) = self.settings.headers.unsent(&own.collect::<Vec<Policy>>()) {
            self.diagnostics.notice(SetupWarningKind::HeadersUnsent, || text);
        }
        self.look_for_contradiction();
    }

    /// Warns about quotas of bytes whose requests cost one byte each.
    fn look_for_no_cost(&self) {
        for rule in self.settings.rules.iter().map(BoundRule::rule) {
            let in_bytes = rule.policies.iter().find(|policy| policy.quota().counts_bytes());
            let has_cost = rule.cost.is_some() || rule.settlement.replaces_cost();
            if let Some(policy) = in_bytes.filter(|_| !has_cost) {
                self.diagnostics.notice(SetupWarningKind::NoCost, || {
                    format!(
                        "the quota of the policy {:?} ({}) counts bytes, and each request costs one: say what it costs by \
                         Rule::cost or Rule::settle_by_body",
                        policy.name(),
                        policy.quota()
                    )
                });
            }
        }
    }

    fn quota_is_not_supported(&self, policy: &Policy, error: &UnsupportedQuota) {
        self.diagnostics.notice(SetupWarningKind::UnsupportedQuota, || {
            format!("the policy {:?}: {error}; its requests are decided as if the limiter had failed", policy.name())
        });
    }

    /// Warns about settings of a rule that do nothing with its quotas.
    fn look_for_no_effect(&self) {
        for bound in &self.settings.rules {
            let (rule, policies) = (bound.rule(), bound.policies());
            let name = policies.first().map_or("", Policy::name);
            let holds = policies.iter().any(Policy::limits_in_flight);
            // If the rule has rates as well, a correction may be meant for them. A replaced cost is meant for all its
            // policies.
            let has_rates = !policies.iter().all(Policy::limits_in_flight);
            if holds && (rule.settlement.replaces_cost() || !rule.settlement.is_none() && !has_rates) {
                self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                    format!(
                        "the policy {name:?} limits requests in flight, and its rule corrects the charge after the response \
                         (charge_when, refund_when or settle_by_…), which has no effect: its units come back when the \
                         request ends; leave the correction out, or put the limit into a rule of its own"
                    )
                });
            }
            let meters = rule.linked.as_ref().is_some_and(|linked| linked.role == LinkedRole::Meter);
            if meters && policies.iter().any(|policy| !policy.quota().wait_in_line().is_zero()) {
                self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                    format!(
                        "the policy {name:?} has a wait (Quota::max_wait) and a meter (Rule::overage), so its requests are \
                         metered and never wait: leave one of the two out"
                    )
                });
            }
            if rule.until_head && !holds && rule.quota_from.is_none() {
                self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                    format!(
                        "the rule of the policy {name:?} has until_head, which has no effect: only what a \
                         Quota::concurrent gives is held; leave it out"
                    )
                });
            }
        }
    }

    /// Compares the layer's policies with those of the other layers over its limiter.
    fn look_for_contradiction(&self) {
        let entered = self.entered.get_or_init(|| Some(self.limiter.policy_registry()?.enter(&self.policies)));
        let Some(Contradiction { own, other, unnamed }) = entered.as_ref().and_then(Entered::contradiction) else {
            return;
        };
        if unnamed {
            self.diagnostics.notice(SetupWarningKind::UnnamedQuota, || {
                format!(
                    "this layer and another one over the same limiter have the unnamed quota \"{}\" ({:?} in headers and \
                     stored keys), and both count in the same states: name each rule by Rule::new; if the layers are to \
                     share an allowance, make both from clones of one layer or policy",
                    own.quota(),
                    own.name()
                )
            });
        } else {
            self.diagnostics.notice(SetupWarningKind::TwoQuotas, || {
                format!(
                    "the policy {:?} is \"{}\" in this layer and \"{}\" in another one over the same limiter, and both \
                     count in the same states: give one of them another name, or make them plans by Rule::plans",
                    own.name(),
                    own.quota_words(),
                    other.quota_words()
                )
            });
        }
    }

    /// Warns about waits without a timer, and about a timer without a wait.
    fn look_for_timer(&self) {
        let queue = self.policies.iter().find(|policy| policy.quota().algorithm() == Algorithm::LeakyQueue);
        let line = self.policies.iter().find(|policy| !policy.quota().wait_in_line().is_zero());
        let brings_quotas = self.settings.rules.iter().any(|bound| bound.quota_from().is_some());
        if queue.or(line).is_none() && self.delays.is_some() && !brings_quotas {
            self.diagnostics.notice(SetupWarningKind::NoQueue, || {
                "the layer has a timer (RateLimitLayer::delay), but no quota lets requests wait, so requests over a quota \
                 are refused at once: give a rule a Quota::leaky_queue or a Quota::concurrent with max_wait, or leave the \
                 timer out"
                    .to_owned()
            });
        }
        if let Some(policy) = line.filter(|_| self.delays.is_none()) {
            self.timer_of_line_is_missing(policy);
        }
        if let Some(policy) = queue.filter(|_| self.delays.is_none()) {
            self.timer_is_missing(policy);
        }
    }

    fn timer_of_line_is_missing(&self, policy: &Policy) {
        self.diagnostics.notice(SetupWarningKind::NoTimer, || {
            format!(
                "the policy {:?} ({}) lets requests wait, but the layer has no timer, so requests over it are refused at \
                 once: set a timer by RateLimitLayer::delay, or leave the wait out",
                policy.name(),
                policy.quota()
            )
        });
    }

    fn timer_is_missing(&self, policy: &Policy) {
        self.diagnostics.notice(SetupWarningKind::NoTimer, || {
            format!(
                "the policy {:?} ({}) is a leaky queue, but the layer has no timer, so queued requests go on at once: set \
                 a timer by RateLimitLayer::delay, or take Quota::leaky_bucket",
                policy.name(),
                policy.quota()
            )
        });
    }
}

impl Ticket {
    /// Warns about quotas that the request brought.
    pub(super) fn look_at_quotas<L: Limiter>(&self, layer: &Compiled<L>) {
        for own in self.charges.iter().filter_map(|charged| charged.own.as_ref()) {
            if let Err(error) = supports_in_layer(&*layer.limiter, own.quota()) {
                layer.quota_is_not_supported(own, &error);
            }
            if own.quota().algorithm() == Algorithm::LeakyQueue && layer.delays.is_none() {
                layer.timer_is_missing(own);
            }
            if !own.quota().wait_in_line().is_zero() && layer.delays.is_none() {
                layer.timer_of_line_is_missing(own);
            }
        }
    }

    /// Watches whether the rules that apply to a request can ever let it pass.
    #[cold]
    pub(super) fn look_for_never<L: Limiter>(&self, layer: &Compiled<L>) {
        for charged in self.answered() {
            let rule = layer.rule_of(charged.policy);
            let Some(policy) = charged.policy_in(layer) else { continue };
            let link = layer.link(rule);
            // A quota of 0 is a switch.
            if link.is_some_and(|(linked, _)| linked == charged.policy) || policy.quota().limit() == 0 {
                continue;
            }
            // A cost above the quota may be meant for its meter.
            let meter = link.filter(|(_, role)| *role == LinkedRole::Meter).and_then(|(meter, _)| layer.policy(meter));
            let most = policy.quota().capacity().max(meter.map_or(0, |meter| meter.quota().capacity()));
            if charged.cost <= most {
                layer.diagnostics.can_pass(rule);
            } else if charged.is_refused() {
                layer.diagnostics.cannot_pass(rule, policy, charged.cost);
            }
        }
    }

    /// Compares the charges of this layer with those of outer layers, and leaves them for inner ones.
    #[cold]
    pub(super) fn look_for_double_charge<L: Limiter>(&self, layer: &Compiled<L>, extensions: &mut Extensions) {
        let Some(limiter) = layer.limiter.policy_registry().map(|registry| registry.id()) else { return };
        let mut all = extensions.get().map_or_else(Vec::new, |Earlier(outer)| Vec::clone(outer));
        for Charged { policy, key, .. } in &self.charges {
            let Some(policy) = layer.policy(*policy) else { continue };
            let own = ChargedTo { limiter, policy: policy.name_fingerprint(), key: key.clone() };
            if all.contains(&own) {
                layer.diagnostics.notice(SetupWarningKind::ChargedTwice, || {
                    format!(
                        "a request was charged for the policy {:?} and the same key by this layer and by an outer one, over \
                         the same limiter: leave one of them out, or give the policies different names",
                        policy.name()
                    )
                });
            }
            all.push(own);
        }
        extensions.insert(Earlier(Arc::new(all)));
    }
}
