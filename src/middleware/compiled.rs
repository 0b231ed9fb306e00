//! The layer's configuration in the form that requests need, compiled once.

use std::sync::{Arc, Weak};

use super::decide::delay::Delays;
use super::diagnostics::Diagnostics;
use super::discard::Discard;
use super::latest::{Latest, Versioned};
use super::pace::accounts::Accounts;
use super::plan::{ChargePlan, Needs, PlaceHolders};
use super::rule::{BoundRule, Cached, LinkedRole, PathIndex, PolicyCache, Rule, Settlement};
use super::settings::Settings;
use super::unsettled::{Strikes, Unsettled};
use crate::base::head::Head;
use crate::base::sync::OnceLock;
use crate::clock::{Clock, default_timer};
use crate::decision::ChargeDecision;
use crate::error::WithSources;
use crate::event::LimiterEvent;
use crate::headers::{PreparedHeaders, RefusalLayout};
use crate::key::Key;
use crate::limiter::{
    Charge, Effect, Entered, Limiter, PlaceLines, Refund, Reply, UnsupportedQuota, supports_in_layer, supports_pace,
};
use crate::mode::{FollowMode, Mode, ModeSwitch};
use crate::outcome::OutcomeKind;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::refusal::PreparedRefusals;

/// The compiled configuration of a layer, which its services, futures and bodies share.
pub(super) struct Compiled<L> {
    pub(super) limiter: Arc<L>,
    pub(super) settings: Settings,
    /// The policies of all rules in their order, then the linked policies.
    pub(super) policies: Arc<[Policy]>,
    /// The rule of each policy, and the policy's role in it.
    parts: Box<[PolicyPart]>,
    /// The compiled data of each rule.
    rules: Box<[CompiledRule]>,
    /// Finds the rules of a path, if rules have path patterns.
    pub(super) paths: Option<PathIndex>,
    /// How requests are charged after the first requests, which are watched.
    plan: ChargePlan,
    /// The data that is stored for each request that passes.
    pub(super) needs: Needs,
    pub(super) holders: PlaceHolders,
    /// The maximum number of charges of a request, without the charges that a source finds.
    pub(super) most_charges: usize,
    pub(super) responses: Responses,
    /// The room in which requests wait, if the layer has a timer.
    pub(super) delays: Option<Arc<Delays>>,
    /// The accounts of keys whose bodies are paced, if rules pace bodies and there is a timer.
    pub(super) accounts: Option<Arc<Accounts>>,
    /// Whether requests may wait in line for units of a concurrency limit.
    has_lines: bool,
    /// Wakes requests, messages and bodies that wait.
    waiters: Arc<Waiters>,
    /// The policies whose quotas the limiter does not support.
    pub(super) unsupported: Vec<(usize, UnsupportedQuota)>,
    pub(super) diagnostics: Arc<Diagnostics>,
    /// The strikes of requests under way, if responses may refund strikes.
    pub(super) unsettled: Option<Arc<Unsettled>>,
    /// The number of configurations of the layer before this one.
    version: u64,
    /// Holds the latest configuration of the layer, if the configuration can change.
    pub(super) latest: OnceLock<Weak<Latest<Self>>>,
    /// The layer's entry in the limiter's registry, set when the layer begins to serve. `None` if the
    /// limiter has no registry.
    pub(super) entered: OnceLock<Option<Entered>>,
}

/// Everything that a layer needs to answer requests.
pub(super) struct Responses {
    pub(super) headers: PreparedHeaders,
    pub(super) refusals: PreparedRefusals,
    /// The headers of usual refusals.
    pub(super) layout: Option<RefusalLayout>,
    /// Reads the bodies of refused requests, or `None` if they are not read.
    pub(super) discard: Option<Arc<Discard>>,
}

/// The rule of a policy, and the policy's role in it. Settings of the rule are read from the rule
/// itself.
struct PolicyPart {
    rule: usize,
    /// The role of a linked policy.
    linked: Option<LinkedRole>,
}

/// A compiled rule.
struct CompiledRule {
    /// The index and the role of the rule's linked policy.
    linked: Option<(usize, LinkedRole)>,
    /// The policies of the quotas that requests bring to the rule, if they bring any.
    own_quotas: Option<PolicyCache>,
}

/// The requests, messages and bodies that wait for units of these policies.
struct Waiters {
    policies: Arc<[Policy]>,
    place_lines: Option<PlaceLines>,
    delays: Option<Arc<Delays>>,
    accounts: Option<Arc<Accounts>>,
}

impl Waiters {
    /// Returns the waiters of a layer, which its mode switches wake.
    fn of<L: Limiter>(
        limiter: &L,
        settings: &Settings,
        policies: &Arc<[Policy]>,
        delays: Option<Arc<Delays>>,
        accounts: Option<Arc<Accounts>>,
    ) -> Arc<Self> {
        let place_lines = limiter.hooks().place_lines().cloned();
        let waiters = Arc::new(Self { policies: Arc::clone(policies), place_lines, delays, accounts });
        let of_rules = settings.rules.iter().filter_map(|bound| bound.rule().mode.as_ref());
        let switches = of_rules.chain(&settings.mode);
        switches.for_each(|switch| switch.enter(Arc::downgrade(&waiters) as Weak<dyn FollowMode>));
        waiters
    }

    /// Wakes the waiters, because a mode may be milder or a quota larger than before.
    fn wake(&self) {
        if let Some(lines) = &self.place_lines {
            self.policies.iter().filter(|policy| policy.limits_in_flight()).for_each(|policy| lines.wake_all(policy));
        }
        if let Some(delays) = &self.delays {
            self.policies.iter().for_each(|policy| delays.let_each_first_ask(policy));
        }
        if let Some(accounts) = &self.accounts {
            accounts.let_ask(|_| true);
        }
    }
}

impl FollowMode for Waiters {
    fn mode_has_changed(&self) {
        self.wake();
    }
}

impl<L> Versioned for Compiled<L> {
    fn version(&self) -> u64 {
        self.version
    }
}

impl<L: Limiter> Compiled<L> {
    pub(super) fn new(limiter: Arc<L>, settings: Settings) -> Self {
        let bound = || settings.rules.iter().map(BoundRule::rule).enumerate();
        let mut policies: Vec<Policy> = settings.rules.iter().flat_map(BoundRule::policies).cloned().collect();
        let responses = Responses::new(&settings, &policies, limiter.hooks().clock());
        let own =
            bound().flat_map(|(rule, found)| found.policies.iter().map(move |_| PolicyPart { rule, linked: None }));
        let mut parts: Vec<PolicyPart> = own.collect();
        let rules: Box<[CompiledRule]> = bound()
            .map(|(rule, found)| {
                let linked = found.linked.as_ref().map(|linked| {
                    policies.push(linked.policy.clone());
                    parts.push(PolicyPart { rule, linked: Some(linked.role) });
                    (policies.len() - 1, linked.role)
                });
                let of_requests = found.policies.first().filter(|_| found.quota_from.is_some());
                CompiledRule { linked, own_quotas: of_requests.cloned().map(PolicyCache::new) }
            })
            .collect();
        let brings_quotas = rules.iter().any(|rule| rule.own_quotas.is_some());
        let holders = match policies.iter().any(Policy::limits_in_flight) {
            true => PlaceHolders::All,
            false if brings_quotas => PlaceHolders::WithOwnQuota,
            false => PlaceHolders::None,
        };
        let settlements =
            || parts.iter().zip(&policies).filter_map(|(part, policy)| part.settlement(&settings, policy));
        let needs = if settlements().any(|settlement| settlement.by_usage) {
            Needs::Usage
        } else if settlements().any(|settlement| !settlement.is_none()) {
            Needs::Settlement
        } else if settings.expose_outcome || settings.refund_nested || bound().any(|(_, rule)| rule.pace.is_some()) {
            Needs::Ticket
        } else if holders == PlaceHolders::All {
            Needs::Charges
        } else if settings.observer.is_some() {
            Needs::Report
        } else {
            Needs::Nothing
        };
        let returns_strikes = parts.iter().zip(&policies).any(|(part, policy)| {
            part.settlement(&settings, policy).is_some_and(|settlement| Unsettled::concerns(policy, settlement))
        });
        let is_paced =
            |part: &PolicyPart| settings.rules.get(part.rule).is_some_and(|bound| bound.rule().pace.is_some());
        let supports = |(at, (part, policy)): (usize, (&PolicyPart, &Policy))| {
            let supported = match is_paced(part) {
                true => supports_pace(&*limiter, policy.quota()),
                false => supports_in_layer(&*limiter, policy.quota()),
            };
            Some((at, supported.err()?))
        };
        let unsupported: Vec<(usize, UnsupportedQuota)> =
            parts.iter().zip(&policies).enumerate().filter_map(supports).collect();
        let plan = ChargePlan::of(&settings, &policies, unsupported.is_empty(), needs);
        let delays = settings.timer.clone().map(|timer| Arc::new(Delays::new(timer, settings.wait_bounds())));
        let timer = || settings.timer.clone().or_else(default_timer);
        let paces = bound().any(|(_, rule)| rule.pace.is_some());
        let accounts = if paces { timer().map(Accounts::new) } else { None };
        let has_lines =
            delays.is_some() && (brings_quotas || policies.iter().any(|own| !own.quota().wait_in_line().is_zero()));
        let policies: Arc<[Policy]> = policies.into();
        let found = settings.finder().map_or(0, |(_, rules)| rules);
        let charges = |rule: &Rule| {
            usize::from(rule.linked.is_some()) + if rule.choose.is_some() { 1 } else { rule.policies.len() }
        };
        Self {
            paths: PathIndex::new(bound().map(|(_, rule)| &rule.paths[..])),
            most_charges: bound().skip(found).map(|(_, rule)| charges(rule)).sum(),
            diagnostics: Arc::new(Diagnostics::new(&settings)),
            unsettled: returns_strikes.then(Arc::default),
            version: 0,
            latest: OnceLock::new(),
            entered: OnceLock::new(),
            has_lines: has_lines && limiter.hooks().place_lines().is_some(),
            waiters: Waiters::of(&*limiter, &settings, &policies, delays.clone(), accounts.clone()),
            policies,
            parts: parts.into(),
            rules,
            plan,
            needs,
            holders,
            responses,
            delays,
            accounts,
            unsupported,
            limiter,
            settings,
        }
    }

    /// Compiles the configuration that replaces this one in the same layer. Both configurations share the requests
    /// that wait, the accounts of paced bodies, and the warnings that were reported.
    pub(super) fn successor(&self, settings: Settings, has_new_rules: bool) -> Self {
        let next = Self::new(Arc::clone(&self.limiter), settings);
        // Only new rules get new diagnostics. While diagnostics watch rules or lists, requests take the
        // general plan, which is slower.
        let diagnostics = if has_new_rules { &next.diagnostics } else { &self.diagnostics };
        // Bodies under way stay in their accounts, and new bodies join the same accounts.
        let (delays, accounts) = (self.delays.clone(), self.accounts.clone().or_else(|| next.accounts.clone()));
        Self {
            waiters: Waiters::of(&*next.limiter, &next.settings, &next.policies, delays.clone(), accounts.clone()),
            delays,
            accounts,
            diagnostics: Arc::clone(diagnostics),
            unsettled: self.unsettled.clone().filter(|_| next.unsettled.is_some()).or_else(|| next.unsettled.clone()),
            version: self.version + 1,
            latest: self.latest.clone(),
            ..next
        }
    }

    /// Wakes requests and bodies that wait for units of this configuration's policies, because a quota may have been
    /// raised.
    pub(super) fn wake_lines(&self) {
        self.waiters.wake();
    }

    /// Returns the reason if a policy cannot pace bodies.
    pub(super) fn unpaceable(&self, policy: &Policy) -> Option<UnsupportedQuota> {
        supports_pace(&*self.limiter, policy.quota()).err()
    }

    /// Refunds charges, and reports a failure that the limiter returns at once. The first message that waits for the
    /// units asks the limiter after that.
    pub(super) fn refund(&self, refunds: Vec<Refund>) {
        // Copies the policies and keys even if no message waits now, because a message may join a line before the
        // limiter has the units.
        let delays = self.delays.as_ref().filter(|_| !self.settings.max_message_wait.is_zero());
        let of = |refund: &Refund| (refund.policy.clone(), refund.key.clone());
        let refunded: Vec<(Policy, Key)> = delays.iter().flat_map(|_| refunds.iter().map(of)).collect();
        let reply = self.limiter.refund(refunds);
        if let Some(delays) = delays {
            refunded.iter().for_each(|(policy, key)| delays.let_first_ask(policy, key));
        }
        if let Reply::Now(Err(error)) = reply {
            self.report_failure(&error);
        }
    }

    /// Takes units even if not enough remain, which puts the key into debt.
    pub(super) fn force(&self, policy: &Policy, key: &Key, units: u64) {
        let charge = Charge::new(policy, key).cost(units).effect(Effect::Force);
        if let Reply::Now(Err(error)) = self.limiter.settle(&[charge]) {
            self.report_failure(&error);
        }
    }

    /// Returns the state of a key, if the limiter answers at once.
    pub(super) fn peek_now(&self, policy: &Policy, key: &Key) -> Option<ChargeDecision> {
        match self.limiter.peek(&[Charge::new(policy, key).cost(0)]) {
            Reply::Now(Ok(decision)) => decision.charges().first().cloned(),
            _ => None,
        }
    }

    /// Returns the policy of a quota that a request brings to a rule.
    #[inline]
    pub(super) fn own_policy(&self, rule: usize, quota: &Quota) -> Option<Cached<'_>> {
        let cache = self.rules.get(rule)?.own_quotas.as_ref()?;
        Some(cache.find(quota).unwrap_or_else(|| Cached::Other(self.compile(rule, cache, quota))))
    }

    /// Returns the policy to which a request would be charged now, instead of the policy with the index `at`. Returns
    /// `None` if the latest rules have no such policy, or no quota for the request.
    pub(super) fn policy_in_force(&self, at: usize, head: &Head<'_>) -> Option<Policy> {
        let (newer, at) = self.latest_index(at)?;
        let layer = newer.as_deref().unwrap_or(self);
        let rule = layer.rule_of(at);
        match layer.own_rule(at).and_then(|own| own.quota_from.as_ref()) {
            Some(from) => Some(layer.own_policy(rule, &(from.read)(head)?)?.into_policy()),
            None => layer.policy(at).cloned(),
        }
    }

    /// Compiles the policy of a quota that a request brought, and keeps the policy if the limiter supports the
    /// quota. Later requests with a kept quota are not checked again.
    #[cold]
    fn compile(&self, rule: usize, cache: &PolicyCache, quota: &Quota) -> Policy {
        let policy = cache.compile(*quota);
        self.look_at_own_quota(rule, &policy);
        if supports_in_layer(&*self.limiter, quota).is_ok() {
            cache.keep(&policy);
        }
        policy
    }
}

impl<L> Compiled<L> {
    /// Returns the policy with this index. A ticket of this layer has only indices of the layer's policies,
    /// also for a request that brings its quota.
    pub(super) fn policy(&self, at: usize) -> Option<&Policy> {
        debug_assert!(at < self.policies.len(), "a charge is for a policy that its layer does not have");
        self.policies.get(at)
    }

    /// Returns the rule of a policy, and the policy's role in it.
    fn part(&self, policy: usize) -> Option<&PolicyPart> {
        debug_assert!(policy < self.parts.len(), "a charge is for a policy that its layer does not have");
        self.parts.get(policy)
    }

    /// Returns the rule that a policy belongs to, unless the policy is linked to the rule.
    fn own_rule(&self, policy: usize) -> Option<&Rule> {
        let part = self.part(policy).filter(|part| part.linked.is_none())?;
        Some(self.settings.rules.get(part.rule)?.rule())
    }

    /// Returns the configuration that has replaced this one. Returns `None` if nothing has changed, which is usual.
    fn newer(&self) -> Option<Arc<Self>> {
        let latest = self.latest.get().and_then(Weak::upgrade)?.get();
        (latest.version != self.version).then_some(latest)
    }

    /// Returns the policy for settling the charges of `charged`: this policy itself, or the policy with a larger
    /// quota that has replaced it. The smaller quota may have no room for the units that were used since, and
    /// would then take no charge.
    pub(super) fn policy_now(&self, charged: &Policy) -> Policy {
        self.largest_now(charged, |_| true)
    }

    /// Returns the policy for refunding the charges of `charged`. Chooses as [`policy_now`](Self::policy_now)
    /// does, but only among quotas that can read the receipt. For example, a window cannot use the instant of a
    /// bucket.
    pub(super) fn policy_of_refunds(&self, charged: &Policy) -> Policy {
        self.largest_now(charged, |now| now.reads_receipts_of(charged.quota()))
    }

    /// Returns the policy with which a request in line for units of a concurrency limit asks again. The policy has
    /// the limit that is in force now.
    pub(super) fn policy_in_line(&self, at: usize) -> Option<Policy> {
        let own = self.policy(at)?;
        let latest = self.latest_index(at);
        let now = latest.as_ref().and_then(|(newer, at)| newer.as_ref()?.policy(*at));
        let now = now.filter(|now| own.limits_in_flight() && now.limits_in_flight());
        Some(now.unwrap_or(own).clone())
    }

    /// Returns the latest configuration, and the index of a policy in it. The configuration is `None` if this one is
    /// the latest. Returns `None` if the latest configuration has no such policy.
    pub(super) fn latest_index(&self, at: usize) -> Option<(Option<Arc<Self>>, usize)> {
        let Some(newer) = self.newer() else { return Some((None, at)) };
        let at = self.index_in(&newer, at)?;
        Some((Some(newer), at))
    }

    /// Returns the present mode of a policy's rule, or of the rule that has replaced this rule.
    pub(super) fn mode_now(&self, at: usize) -> Option<Mode> {
        let mode_in = |layer: &Self, at| Some(layer.mode_of(layer.settings.rules.get(layer.rule_of(at))?));
        let newer = self.newer();
        let now = newer.as_ref().and_then(|newer| mode_in(newer, self.index_in(newer, at)?));
        now.or_else(|| mode_in(self, at))
    }

    /// Returns the index of a policy in a newer configuration. The policy is found by its name, because new rules
    /// may stand before its rule. Plans share one name, and keep their order.
    fn index_in(&self, newer: &Self, at: usize) -> Option<usize> {
        let own = self.policy(at)?;
        let is_it = |policy: &Policy| policy.name_fingerprint() == own.name_fingerprint();
        let mut alike = newer.policies.iter().enumerate().filter(|(_, policy)| is_it(policy));
        alike.nth(self.plan_of(at)).map(|(at, _)| at)
    }

    /// Returns the number of a policy among the policies with its name, which are the plans of one
    /// rule.
    pub(super) fn plan_of(&self, at: usize) -> usize {
        let Some(own) = self.policy(at) else { return 0 };
        let is_it = |policy: &&Policy| policy.name_fingerprint() == own.name_fingerprint();
        self.policies.iter().take(at).filter(is_it).count()
    }

    /// Returns the rule of a policy, if the rule paces bodies.
    pub(super) fn pacing_rule(&self, policy: usize) -> Option<&Rule> {
        self.own_rule(policy).filter(|rule| rule.pace.is_some())
    }

    /// Returns the policies of a policy's rule, if a request is charged to all of them.
    pub(super) fn policies_together(&self, policy: usize) -> &[Policy] {
        self.own_rule(policy).filter(|rule| rule.choose.is_none()).map_or(&[], |rule| &rule.policies)
    }

    /// Returns the policy in force that has the name of `own` and the largest capacity, if this capacity is above the
    /// capacity and the debt of `own` together. Otherwise returns `own`. Ignores quotas that keep the used share,
    /// because such a quota has room for the usage under every other plan, and its units differ from those of `own`.
    fn largest_now(&self, own: &Policy, is_fit: impl Fn(&Quota) -> bool) -> Policy {
        let room = own.quota().capacity().saturating_add(own.quota().spec().debt);
        let newer = self.newer();
        let larger = |now: &&Policy| {
            let quota = now.quota();
            quota.capacity() > room && !quota.spec().proportional && is_fit(quota)
        };
        let now = newer.iter().flat_map(|newer| newer.policies.iter());
        let is_it = |now: &&Policy| now.name_fingerprint() == own.name_fingerprint() && !now.has_quota_of_request();
        let largest = now.filter(is_it).filter(larger).max_by_key(|now| now.quota().capacity());
        largest.unwrap_or(own).clone()
    }

    /// Returns how a request is charged now. The first requests are watched, so they skip no step.
    #[inline]
    pub(super) fn plan(&self) -> ChargePlan {
        if self.diagnostics.is_watching() { ChargePlan::General } else { self.plan }
    }

    /// Returns the first rule and its first policy. Under some of the [charge plans](ChargePlan),
    /// there is no other rule or policy.
    #[inline]
    pub(super) fn first(&self) -> Option<(&BoundRule, &Policy)> {
        Some((self.settings.rules.first()?, self.policies.first()?))
    }

    /// Returns whether requests may wait in line for units of a concurrency limit.
    #[inline]
    pub(super) fn has_lines(&self) -> bool {
        self.has_lines
    }

    /// Returns whether a request's ticket is needed when its response has come. It is needed if the response
    /// carries the outcome, or if charges depend on the response.
    pub(super) fn needs_response(&self, kind: OutcomeKind) -> bool {
        self.needs >= Needs::Ticket || kind.is_always_exposed()
    }

    /// Returns the number of the rule that a policy belongs to.
    pub(super) fn rule_of(&self, policy: usize) -> usize {
        self.part(policy).map_or(usize::MAX, |part| part.rule)
    }

    /// Returns the corrections of a policy's charges after the response, if there are any.
    pub(super) fn settlement(&self, policy: usize) -> Option<&Settlement> {
        self.part(policy)?.settlement(&self.settings, self.policy(policy)?)
    }

    /// Returns whether the held units of a policy are refunded when the response's head is sent.
    pub(super) fn is_held_until_head(&self, policy: usize) -> bool {
        self.own_rule(policy).is_some_and(|rule| rule.until_head)
    }

    /// Returns the percentage of a policy's capacity at or below which a warning is due.
    pub(super) fn warn_at_percent(&self, policy: usize) -> Option<u8> {
        self.own_rule(policy)?.warn_at_percent
    }

    /// Returns the index and the role of a rule's linked policy.
    pub(super) fn link(&self, rule: usize) -> Option<(usize, LinkedRole)> {
        debug_assert!(rule < self.rules.len(), "a charge belongs to a rule that its layer does not have");
        self.rules.get(rule)?.linked
    }

    /// Returns the strikes of a charge that the response may refund.
    pub(super) fn strikes_to_settle(&self, policy: usize, key: &Key) -> Option<Strikes> {
        let found = self.policy(policy)?;
        let concerns = Unsettled::concerns(found, self.settlement(policy)?);
        concerns.then(|| (found.name_fingerprint(), key.clone()))
    }

    /// Returns the mode of a rule now: the milder of the rule's own mode and the layer's mode.
    #[inline]
    pub(super) fn mode_of(&self, bound: &BoundRule) -> Mode {
        let now = |switch: Option<&ModeSwitch>| switch.map_or(Mode::Enforce, ModeSwitch::get);
        now(bound.rule().mode.as_ref()).milder(now(self.settings.mode.as_ref()))
    }

    /// Reports to the observer that the limiter failed.
    #[cold]
    pub(super) fn report_failure(&self, error: &(dyn std::error::Error + 'static)) {
        if let Some(observer) = &self.settings.observer {
            observer.on_limiter_event(&LimiterEvent::failed(WithSources(error).to_string()));
        }
    }
}

impl Responses {
    fn new(settings: &Settings, policies: &[Policy], clock: Option<Arc<dyn Clock>>) -> Self {
        let headers = PreparedHeaders::new(&settings.headers, policies, clock);
        let refusals = PreparedRefusals::new(settings.refusals.clone(), policies);
        let timer = settings.timer.clone().or_else(default_timer);
        Self {
            layout: headers.lay_out_refusal(refusals.headers(), refusals.limited_status()),
            discard: timer.and_then(|timer| Discard::new(settings.discard.unwrap_or_default(), timer)),
            headers,
            refusals,
        }
    }
}

impl PolicyPart {
    /// Returns how the rule corrects charges of this policy after the response.
    fn settlement<'a>(&self, settings: &'a Settings, policy: &Policy) -> Option<&'a Settlement> {
        let rule = settings.rules.get(self.rule)?.rule();
        match self.linked {
            // A concurrency limit gets its units back when the request ends, after any response.
            None if policy.limits_in_flight() => None,
            // A block counts refusals, and no response undoes a refusal.
            Some(LinkedRole::Block) => None,
            // A meter counts the cost that its rule charges, so the rule's settlement also applies to the meter.
            None | Some(LinkedRole::Meter) => Some(&rule.settlement),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use crate::clock::StoppedTimer;
    use crate::key;
    use crate::limiter::memory::limiter::MemoryLimiter;
    use crate::middleware::charge::access::AccessList;
    use crate::middleware::layer::RateLimitLayer;
    use crate::outcome::Observer;

    struct Blind;

    impl Observer for Blind {}

    fn rule(quota: Quota) -> Rule {
        Rule::new("rule", quota).unwrap()
    }

    fn layer(rule: Rule) -> RateLimitLayer<MemoryLimiter> {
        RateLimitLayer::new(MemoryLimiter::new(), rule, key::global())
    }

    #[test]
    fn plan_is_general_where_a_shortcut_would_differ() {
        let quota = || Quota::per_second(9);
        let one = || layer(rule(quota()));
        let several = || one().and(quota(), key::global());
        let own = || layer(Rule::quota_from("own", |_| Some(Quota::per_second(9))).unwrap());
        let concurrent = || rule(Quota::concurrent(9));
        let plans = [
            ("one rule", one(), ChargePlan::OnePolicy),
            ("a condition and a cost", layer(rule(quota()).when(|_| true).cost(|_| 2)), ChargePlan::OnePolicy),
            ("an observer", one().observer(Blind), ChargePlan::OnePolicy),
            ("a concurrency limit", layer(concurrent()), ChargePlan::OnePolicy),
            ("quotas of requests", own(), ChargePlan::OwnQuota),
            ("several rules", several(), ChargePlan::SeveralPolicies),
            (
                "several quotas",
                layer(Rule::all_of("all", [quota(), Quota::per_hour(9)]).unwrap()),
                ChargePlan::SeveralPolicies,
            ),
            ("no limit", layer(rule(Quota::unlimited())), ChargePlan::General),
            ("a mode of the rule", layer(rule(quota()).mode(Mode::Shadow)), ChargePlan::General),
            ("a mode of the layer", one().mode(Mode::Enforce), ChargePlan::General),
            ("a timer", one().timer(StoppedTimer), ChargePlan::General),
            ("a pace of bodies", layer(rule(quota()).pace_responses()), ChargePlan::General),
            ("an access list", one().access(&AccessList::new(), key::global()), ChargePlan::General),
            ("preflight requests", one().exempt_preflight(true), ChargePlan::General),
            (
                "a block",
                layer(
                    rule(quota())
                        .block("block", Quota::block(3, Duration::from_secs(9), Duration::from_secs(9)).unwrap())
                        .unwrap(),
                ),
                ChargePlan::General,
            ),
            ("several rules and an observer", several().observer(Blind), ChargePlan::General),
            ("several rules and a refund", several().refund_nested(true), ChargePlan::General),
            ("several rules, one in flight", several().and(concurrent(), key::global()), ChargePlan::General),
            ("a rule beside quotas of requests", own().and(quota(), key::global()), ChargePlan::General),
        ];
        for (setting, layer, plan) in plans {
            let compiled = layer.compiled();
            assert_eq!(compiled.plan, plan, "{setting}");
            assert_eq!(compiled.plan(), ChargePlan::General, "{setting}: the first requests are watched");
        }
    }

    #[test]
    fn needs_of_a_request_include_smaller_ones() {
        let quota = || Quota::per_second(9);
        let one = || layer(rule(quota()));
        let needs = [
            (one(), Needs::Nothing),
            (one().observer(Blind), Needs::Report),
            (layer(rule(Quota::concurrent(9))).observer(Blind), Needs::Charges),
            (layer(rule(Quota::concurrent(9)).charge_when(|_| true)), Needs::Charges), // it has no effect
            (one().expose_outcome(true).observer(Blind), Needs::Ticket),
            (one().refund_nested(true), Needs::Ticket),
            (layer(rule(quota()).pace_requests()), Needs::Ticket),
            (layer(rule(quota()).charge_when(|_| true)).expose_outcome(true), Needs::Settlement),
            (layer(rule(quota()).settle_by_usage()).observer(Blind), Needs::Usage),
        ];
        for (at, (layer, needs)) in needs.into_iter().enumerate() {
            assert_eq!(layer.compiled().needs, needs, "case {at}");
        }
    }
}
