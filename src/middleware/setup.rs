//! Warnings about the setup of a layer, found in its configuration, in other layers, and in its first requests.

use std::collections::HashSet;
use std::sync::Arc;

use http::Extensions;

use super::compiled::Compiled;
use super::rule::{BoundRule, LinkedRole, Rule};
use super::ticket::{Charged, Ticket};
use crate::key::Key;
use crate::limiter::{Contradiction, Entered, Limiter, UnsupportedQuota, supports_in_layer};
use crate::policy::Policy;
use crate::quota::Algorithm;
use crate::setup_warning::SetupWarningKind;

/// The charges that outer layers made for a request. Only the first requests of the outer layers
/// have this extension.
#[derive(Clone)]
struct Earlier(Arc<HashSet<ChargedTo>>);

/// The target of a charge: a limiter, the name of a policy, and a key.
#[derive(Clone, PartialEq, Eq, Hash)]
struct ChargedTo {
    limiter: usize,
    policy: u64,
    key: Key,
}

impl<L: Limiter> Compiled<L> {
    /// Warns about misconfigurations that the settings alone show.
    pub(super) fn look_at_setup(&self) {
        for bound in &self.settings.rules {
            bound.policies().iter().for_each(|policy| self.look_for_debt(bound.rule(), policy));
        }
        for bound in &self.settings.rules {
            bound.policies().iter().for_each(|policy| self.look_for_cost(bound.rule(), policy));
        }
        self.policies.iter().for_each(|policy| self.look_for_calendar(policy));
        for bound in self.settings.rules.iter().filter(|bound| bound.rule().pace.is_some()) {
            bound.policies().iter().for_each(|policy| self.look_for_slow_pace(policy));
        }
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
        self.look_for_long_headers();
        self.look_for_contradiction();
        self.look_for_taken_name();
    }

    /// Warns if the headers report so many policies that many clients and proxies refuse to read them.
    fn look_for_long_headers(&self) {
        /// The maximum size of all headers together, in bytes, that common servers such as nginx and older Node.js
        /// accept.
        const USUAL_MAX: usize = 8_192;
        let mut indices = Vec::new();
        for bound in &self.settings.rules {
            let rule = bound.rule();
            if rule.pace.is_some() {
                continue; // no header reports it
            }
            // Counts only the rules that apply to every request, because a request usually meets few of the others. A
            // rule with plans counts as one policy, because a request meets only one of its plans.
            if rule.conditions.is_empty() && rule.paths.is_empty() && !rule.is_disabled() {
                let count = if rule.choose.is_some() { 1 } else { bound.policies().len() };
                let first = bound.end() - bound.policies().len();
                indices.extend(first..first + count);
            }
        }
        let bytes = self.responses.headers.bytes_of_lists(&indices);
        if bytes > USUAL_MAX {
            self.diagnostics.notice(SetupWarningKind::HeadersLong, || {
                format!(
                    "{} policies apply to each request, and the headers that report them have about {bytes} bytes; many \
                     proxies and clients accept no more than {USUAL_MAX} for all headers together: report some policies \
                     only (Headers::for_policy, Headers::for_unit), or send the headers on refusals only (Headers::send)",
                    indices.len()
                )
            });
        }
    }

    /// Warns about a quota that a request brought to a rule, as the layer warns about a rule's own quota. Some
    /// corrections after the response cause no warning here, because they may be meant for rates that other requests
    /// bring.
    pub(super) fn look_at_own_quota(&self, rule: usize, own: &Policy) {
        let Some(rule) = self.settings.rules.get(rule).map(BoundRule::rule) else { return };
        self.look_for_debt(rule, own);
        self.look_for_cost(rule, own);
        self.look_for_calendar(own);
        if own.limits_in_flight() && rule.settlement.replaces_cost() {
            self.correction_has_no_effect(own);
        }
        if meters_waits(rule, own) {
            self.wait_is_metered(own);
        }
        if rule.pace.is_some() {
            self.look_for_slow_pace(own);
            if let Some(error) = self.unpaceable(own) {
                self.quota_is_not_supported(own, &error);
            }
            return;
        }
        if let Err(error) = supports_in_layer(&*self.limiter, own.quota()) {
            self.quota_is_not_supported(own, &error);
        }
        if self.delays.is_none() && own.quota().algorithm() == Algorithm::LeakyQueue {
            self.timer_is_missing(own);
        }
        if self.delays.is_none() && !own.quota().wait_in_line().is_zero() {
            self.timer_of_line_is_missing(own);
        }
    }

    /// Warns about a quota without debt. Such a quota forgets the units that a request costs beyond
    /// its reservation.
    fn look_for_debt(&self, rule: &Rule, policy: &Policy) {
        // Blocks and meters count forced charges, and have no debt. An unlimited quota needs no debt, and a limit of
        // 0 switches a quota off.
        let quota = policy.quota();
        let has_limit = quota.limit() > 0 && !quota.is_unlimited();
        let forgets = quota.spec().debt == 0 && quota.algorithm().is_rate() && has_limit;
        if forgets && rule.settlement.replaces_cost() {
            self.diagnostics.notice(SetupWarningKind::NoDebt, || {
                format!(
                    "a request may cost more than the policy {:?} reserves for it, and the quota ({quota}) remembers \
                     no debt: give the quota a debt by Quota::max_debt",
                    policy.name()
                )
            });
        }
    }

    /// Warns about a quota that counts bytes if its rule has no cost, because each request then
    /// costs one byte.
    fn look_for_cost(&self, rule: &Rule, policy: &Policy) {
        let has_cost = rule.cost.is_some() || rule.settlement.replaces_cost() || rule.pace.is_some();
        if policy.quota().counts_bytes() && !has_cost {
            self.diagnostics.notice(SetupWarningKind::NoCost, || {
                format!(
                    "the quota of the policy {:?} ({}) counts bytes, and each request costs one byte: set its cost by \
                     Rule::cost or Rule::settle_by_body",
                    policy.name(),
                    policy.quota()
                )
            });
        }
    }

    /// Warns if the windows of a quota end at a date, but the limiter's clock does not follow the calendar.
    fn look_for_calendar(&self, policy: &Policy) {
        if !policy.quota().has_windows_of_dates() {
            return;
        }
        if self.limiter.hooks().clock().is_some_and(|clock| !clock.follows_calendar()) {
            self.diagnostics.notice(SetupWarningKind::CalendarNotFollowed, || {
                format!(
                    "the windows of the policy {:?} ({}) are to end with a date, and the limiter's clock does not \
                     follow the calendar after a suspension or a correction of the system's time: use \
                     clock::SystemClock, or if your own clock follows the calendar, return true from \
                     Clock::follows_calendar",
                    policy.name(),
                    policy.quota()
                )
            });
        }
    }

    /// Warns if a quota's capacity is smaller than the number of units that its rate allows in 10
    /// ms, because paced bodies are then slower than the rate.
    fn look_for_slow_pace(&self, policy: &Policy) {
        let quota = policy.quota();
        let passes = u128::from(quota.limit()) * 10_000 / u128::from(quota.spec().period_us.max(1));
        if quota.algorithm().is_rate() && quota.limit() > 0 && u128::from(quota.capacity()) < passes {
            self.diagnostics.notice(SetupWarningKind::SlowPace, || {
                format!(
                    "the policy {:?} paces bodies, and its quota ({quota}) has room for {} bytes at an instant, so \
                     bodies are slower than the quota allows: give the quota a burst of at least {passes}",
                    policy.name(),
                    quota.capacity()
                )
            });
        }
    }

    fn quota_is_not_supported(&self, policy: &Policy, error: &UnsupportedQuota) {
        self.diagnostics.notice(SetupWarningKind::UnsupportedQuota, || {
            format!("the policy {:?}: {error}; its requests are decided as if the limiter had failed", policy.name())
        });
    }

    /// Warns about settings of a rule that have no effect with its quotas.
    fn look_for_no_effect(&self) {
        for bound in &self.settings.rules {
            let (rule, policies) = (bound.rule(), bound.policies());
            let name = policies.first().map_or("", Policy::name);
            let holds = policies.iter().any(Policy::limits_in_flight);
            // If the rule also has rates, the correction may be meant for the rates, and causes no warning. But a cost
            // that is replaced after the response concerns all policies of the rule.
            let has_rates = !policies.iter().all(Policy::limits_in_flight);
            if let Some(policy) = policies
                .first()
                .filter(|_| holds && (rule.settlement.replaces_cost() || !rule.settlement.is_none() && !has_rates))
            {
                self.correction_has_no_effect(policy);
            }
            if let Some(policy) = policies.iter().find(|policy| meters_waits(rule, policy)) {
                self.wait_is_metered(policy);
            }
            if let Some(policy) = policies.iter().find(|own| own.has_quota_of_request() && rule.quota_from.is_none()) {
                self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                    format!(
                        "the policy {:?} is made for quotas that requests bring, but its rule reads no quota from \
                         requests, so the policy limits no request: make the rule by Rule::quota_from, or give the \
                         policy a quota",
                        policy.name()
                    )
                });
            }
            self.look_for_effect_of_pace(rule, name);
            if rule.until_head && !holds && rule.quota_from.is_none() {
                self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                    format!(
                        "the rule of the policy {name:?} has until_head, which has no effect: only units of a \
                         Quota::concurrent are held; leave it out"
                    )
                });
            }
        }
    }

    /// Warns about settings for requests in a rule that paces bodies, about `pace_after` in a rule that paces no
    /// bodies, and about a pace without a timer.
    fn look_for_effect_of_pace(&self, rule: &Rule, name: &str) {
        if rule.pace.is_none() {
            if rule.pace_after > 0 {
                self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                    format!(
                        "the rule of the policy {name:?} has pace_after, which has no effect, because the rule paces \
                         no bodies; add pace_responses or pace_requests, or leave it out"
                    )
                });
            }
            return;
        }
        let of_requests = [
            (rule.cost.is_some(), "cost"),
            (!rule.settlement.is_none(), "charge_when, refund_when, settle_by_… or on_aborted"),
            (rule.linked.is_some(), "block or overage"),
            (rule.warn_at_percent.is_some(), "warn_at_percent"),
            (rule.until_head, "until_head"),
        ];
        for (_, option) in of_requests.iter().filter(|(is_set, _)| *is_set) {
            self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                format!(
                    "the rule of the policy {name:?} paces bodies and charges no request, so {option} has no effect: leave it \
                     out, or put it into a rule of its own"
                )
            });
        }
        if self.accounts.is_none() {
            self.diagnostics.notice(SetupWarningKind::NoTimer, || {
                format!(
                    "the policy {name:?} paces bodies, but the layer has no timer, so no body waits: enable the feature \
                     `tokio`, or set a timer by RateLimitLayer::timer"
                )
            });
        }
    }

    fn correction_has_no_effect(&self, policy: &Policy) {
        self.diagnostics.notice(SetupWarningKind::NoEffect, || {
            format!(
                "the policy {:?} limits requests in flight, and its rule corrects the charge after the response \
                 (charge_when, refund_when, settle_by_… or on_aborted), which has no effect, because the units come \
                 back when the request ends; leave the correction out, or put the limit into a rule of its own",
                policy.name()
            )
        });
    }

    fn wait_is_metered(&self, policy: &Policy) {
        self.diagnostics.notice(SetupWarningKind::NoEffect, || {
            format!(
                "the policy {:?} has a wait (Quota::max_wait) and a meter (Rule::overage), so its requests are metered and \
                 never wait: leave one of the two out",
                policy.name()
            )
        });
    }

    /// Compares the layer's policies with the policies of other layers that use its limiter.
    fn look_for_contradiction(&self) {
        let entered = self.entered.get_or_init(|| Some(self.limiter.hooks().policy_registry()?.enter(&self.policies)));
        let Some(Contradiction { own, other, unnamed }) = entered.as_ref().and_then(Entered::contradiction) else {
            return;
        };
        if unnamed {
            self.diagnostics.notice(SetupWarningKind::UnnamedQuota, || {
                format!(
                    "this layer and another layer over the same limiter have the unnamed quota \"{}\" ({:?} in headers \
                     and stored keys), and both count in the same states: name each rule by Rule::new; if the layers \
                     are to share an allowance, make both from clones of one layer or policy",
                    own.quota(),
                    own.name()
                )
            });
        } else {
            self.diagnostics.notice(SetupWarningKind::TwoQuotas, || {
                format!(
                    "the policy {:?} is \"{}\" in this layer and \"{}\" in another layer over the same limiter, and \
                     both count in the same states: give one of them another name, or make them plans by Rule::plans",
                    own.name(),
                    own.quota_words(),
                    other.quota_words()
                )
            });
        }
    }

    /// Warns about a name that two rules of the layer have.
    fn look_for_taken_name(&self) {
        let Some([name, now]) = self.settings.rules.iter().find_map(BoundRule::numbered) else { return };
        self.diagnostics.notice(SetupWarningKind::NameTaken, || {
            format!(
                "two rules of this layer are named {name:?}, so the second rule is {now:?} in headers, metrics and \
                 stored keys, and if their order changed, each would take over the usage of the other: give each rule \
                 a name of its own"
            )
        });
    }

    /// Warns about quotas that let requests wait in a layer without a timer, and about a timer in a layer without such
    /// quotas.
    fn look_for_timer(&self) {
        let charges = |at: &usize| self.pacing_rule(*at).is_none();
        let charged = || self.policies.iter().enumerate().filter(|(at, _)| charges(at)).map(|(_, policy)| policy);
        let queue = charged().find(|policy| policy.quota().algorithm() == Algorithm::LeakyQueue);
        let line = self.policies.iter().find(|policy| !policy.quota().wait_in_line().is_zero());
        let brings_quotas = self.settings.rules.iter().any(|bound| bound.rule().quota_from.is_some());
        // The timer may have another use. It bounds how long bodies of refused requests are read, and lets bodies
        // and messages wait. A new version of the file of rules may also bring a queue that needs the timer.
        let has_other_use = self.settings.discard.is_some()
            || self.accounts.is_some()
            || !self.settings.max_message_wait.is_zero()
            || self.settings.source.is_some();
        if queue.or(line).is_none() && self.delays.is_some() && !brings_quotas && !has_other_use {
            self.diagnostics.notice(SetupWarningKind::NoQueue, || {
                "the layer has a timer (RateLimitLayer::timer), but no quota lets requests wait, so requests over a quota \
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
        if !self.settings.max_message_wait.is_zero() && self.delays.is_none() {
            self.diagnostics.notice(SetupWarningKind::NoTimer, || {
                "messages may wait (RateLimitLayer::max_message_wait), but the layer has no timer, so messages over a quota are \
                 refused at once: set a timer by RateLimitLayer::timer, or leave the wait out"
                    .to_owned()
            });
        }
        let bounds = [("max_waiting", self.settings.max_waiting), ("max_in_line", self.settings.max_in_line)];
        for (name, _) in bounds.iter().filter(|(_, bound)| bound.is_some() && self.delays.is_none()) {
            self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                format!(
                    "the layer has {name} and no timer, so no request waits: set a timer by RateLimitLayer::timer, or leave \
                     {name} out"
                )
            });
        }
        if self.settings.discard.is_some_and(|bounds| !bounds.is_off()) && self.responses.discard.is_none() {
            self.diagnostics.notice(SetupWarningKind::NoEffect, || {
                "the layer has discard_body and no timer, so no body is read: enable the feature `tokio`, set a timer by \
                 RateLimitLayer::timer, or leave discard_body out"
                    .to_owned()
            });
        }
    }

    fn timer_of_line_is_missing(&self, policy: &Policy) {
        self.diagnostics.notice(SetupWarningKind::NoTimer, || {
            format!(
                "the policy {:?} ({}) lets requests wait, but the layer has no timer, so requests over the quota are \
                 refused at once: set a timer by RateLimitLayer::timer, or leave the wait out",
                policy.name(),
                policy.quota()
            )
        });
    }

    fn timer_is_missing(&self, policy: &Policy) {
        self.diagnostics.notice(SetupWarningKind::NoTimer, || {
            format!(
                "the policy {:?} ({}) is a leaky queue, but the layer has no timer, so queued requests go on at once: set \
                 a timer by RateLimitLayer::timer, or use Quota::leaky_bucket",
                policy.name(),
                policy.quota()
            )
        });
    }
}

/// Returns whether a rule meters the requests that a quota would let wait in line.
fn meters_waits(rule: &Rule, policy: &Policy) -> bool {
    let meters = rule.linked.as_ref().is_some_and(|linked| linked.role == LinkedRole::Meter);
    meters && !policy.quota().wait_in_line().is_zero()
}

impl Ticket {
    /// Notes, for each rule that applies to a request, whether the rule can ever let this request
    /// pass.
    #[cold]
    pub(super) fn look_for_never<L: Limiter>(&self, layer: &Compiled<L>) {
        for charged in self.answered() {
            let rule = layer.rule_of(charged.policy);
            let Some(policy) = charged.policy_in(layer) else { continue };
            let link = layer.link(rule);
            // A quota of 0 refuses all requests on purpose.
            if link.is_some_and(|(linked, _)| linked == charged.policy) || policy.quota().limit() == 0 {
                continue;
            }
            // A cost above the quota may be meant for the rule's meter.
            let meter = link.filter(|(_, role)| *role == LinkedRole::Meter).and_then(|(meter, _)| layer.policy(meter));
            let most = policy.quota().capacity().max(meter.map_or(0, |meter| meter.quota().capacity()));
            if charged.cost <= most {
                layer.diagnostics.can_pass(rule);
            } else if charged.is_refused() {
                layer.diagnostics.cannot_pass(rule, policy, charged.cost);
            }
        }
    }

    /// Compares the charges of this layer with the charges of outer layers, and stores both in the extensions for inner
    /// layers.
    #[cold]
    pub(super) fn look_for_double_charge<L: Limiter>(&self, layer: &Compiled<L>, extensions: &mut Extensions) {
        let Some(limiter) = layer.limiter.hooks().policy_registry().map(|registry| registry.id()) else { return };
        let mut all = extensions.get().map_or_else(HashSet::new, |Earlier(outer)| HashSet::clone(outer));
        for Charged { policy, key, .. } in &self.charges {
            let Some(policy) = layer.policy(*policy) else { continue };
            let own = ChargedTo { limiter, policy: policy.name_fingerprint(), key: key.clone() };
            if !all.insert(own) {
                layer.diagnostics.notice(SetupWarningKind::ChargedTwice, || {
                    format!(
                        "a request was charged for the policy {:?} and the same key by this layer and by an outer \
                         layer, over the same limiter: leave one of the two policies out, or give the policies \
                         different names",
                        policy.name()
                    )
                });
            }
        }
        extensions.insert(Earlier(Arc::new(all)));
    }
}
