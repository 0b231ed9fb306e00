//! The layer's configuration as requests need it, compiled once. Data, and access to it.

use std::sync::{Arc, Weak};

use super::decide::delay::Delays;
use super::diagnostics::Diagnostics;
use super::discard::Discard;
use super::rule::{BoundRule, Cached, LinkedRole, PathIndex, PolicyCache, Rule, Settlement};
use super::settings::Settings;
use super::unsettled::{Strikes, Unsettled};
use crate::clock::default_timer;
use crate::decision::ChargeDecision;
use crate::error::WithSources;
use crate::event::LimiterEvent;
use crate::headers::{PreparedHeaders, RefusalLayout};
use crate::key::Key;
use crate::limiter::{
    Charge, Effect, Entered, Limiter, PlaceLines, Refund, Reply, UnsupportedQuota, supports_in_layer,
};
use crate::mode::{FollowMode, Mode, ModeSwitch};
use crate::outcome::OutcomeKind;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::refusal::PreparedRefusals;
use crate::sync::{AtomicU64, Mutex, OnceLock, lock};

/// The compiled configuration of a layer, which its services, futures and bodies share.
pub(super) struct Compiled<L> {
    pub(super) limiter: Arc<L>,
    pub(super) settings: Settings,
    /// The policies of all rules in their order, then the linked ones.
    pub(super) policies: Arc<[Policy]>,
    /// For each policy, the rule it belongs to and what is done after the response.
    terms: Box<[Terms]>,
    /// For each rule, the place of its linked policy.
    links: Box<[Option<(usize, LinkedRole)>]>,
    /// For each rule, the policies of its requests' own quotas, if they bring some.
    caches: Box<[Option<PolicyCache>]>,
    pub(super) headers: PreparedHeaders,
    pub(super) refusals: PreparedRefusals,
    /// The headers of usual refusals.
    pub(super) layout: Option<RefusalLayout>,
    /// The room in which requests wait, if the layer has a timer.
    pub(super) delays: Option<Arc<Delays>>,
    /// Reads the bodies of refused requests, if they are read.
    pub(super) discard: Option<Arc<Discard>>,
    /// Whether every request is charged to one policy, which is always enforced and never makes a request wait. The
    /// quota is the layer's.
    is_plain: bool,
    /// Whether every request is charged so to the quota that it brings.
    is_plain_but_for_quota: bool,
    /// Whether every request is charged to several policies in that way, and only headers report a request that passes.
    is_plain_set: bool,
    /// Whether anything is done with each request before the service is called.
    pub(super) prepares: bool,
    /// Whether the ticket of each request is needed when its response has come.
    pub(super) keeps_tickets: bool,
    /// Whether the charges of each request are needed when it passes: its ticket is kept, or it may hold places.
    pub(super) keeps_charges: bool,
    /// The most charges that a request can have, beside those that a source finds.
    pub(super) most_charges: usize,
    /// Finds the rules of a path, if rules have path patterns.
    pub(super) paths: Option<PathIndex>,
    /// Whether any rule settles charges after the response.
    pub(super) settles: bool,
    /// Whether a request may be charged to a concurrency limit.
    pub(super) has_places: bool,
    /// Whether a policy of the layer is a concurrency limit.
    pub(super) has_fixed_places: bool,
    /// Whether requests may wait in line for units of a concurrency limit.
    pub(super) has_lines: bool,
    /// Wakes those requests when a mode is switched, if there may be any.
    _line_waker: Option<Arc<LineWaker>>,
    /// Whether requests bring quotas of their own.
    pub(super) brings_quotas: bool,
    /// Whether any rule is settled by a `Usage`.
    pub(super) expects_usage: bool,
    /// The policies whose quotas the limiter does not support.
    pub(super) unsupported: Vec<(usize, UnsupportedQuota)>,
    pub(super) diagnostics: Arc<Diagnostics>,
    /// The strikes of requests under way, if responses may return strikes.
    pub(super) unsettled: Option<Arc<Unsettled>>,
    /// The number of configurations of the layer before this one.
    pub(super) version: u64,
    /// Holds the configuration that replaces this one, if quotas follow switches.
    pub(super) live: OnceLock<Weak<Live<L>>>,
    /// The layer's place among those that serve with its limiter, once it serves; `None` if the limiter keeps no
    /// registry.
    pub(super) entered: OnceLock<Option<Entered>>,
}

/// The settings of a policy's rule.
struct Terms {
    rule: usize,
    warn_at_percent: Option<u8>,
    settlement: Settlement,
    until_head: bool,
}

/// The configuration of a layer whose quotas follow switches: the one that new requests are decided under.
pub(super) struct Live<L> {
    pub(super) current: Mutex<Arc<Compiled<L>>>,
    pub(super) version: AtomicU64,
}

impl<L> Live<L> {
    pub(super) fn current(&self) -> Arc<Compiled<L>> {
        Arc::clone(&lock(&self.current))
    }
}

/// Wakes the requests that wait in line for units of these policies.
struct LineWaker {
    lines: PlaceLines,
    policies: Vec<Policy>,
}

impl FollowMode for LineWaker {
    fn mode_has_changed(&self) {
        self.policies.iter().filter(|policy| policy.limits_in_flight()).for_each(|policy| self.lines.wake_all(policy));
    }
}

impl<L: Limiter> Compiled<L> {
    pub(super) fn new(limiter: Arc<L>, settings: Settings) -> Self {
        let rules = || settings.rules.iter().map(BoundRule::rule).enumerate();
        let mut policies: Vec<Policy> = settings.rules.iter().flat_map(BoundRule::policies).cloned().collect();
        let headers = PreparedHeaders::new(&settings.headers, &policies);
        let refusals = PreparedRefusals::new(settings.refusals.clone(), &policies);
        let layout = headers.lay_out_refusal(refusals.headers(), refusals.limited_status());
        let mut terms: Vec<Terms> = rules()
            .flat_map(|(at, rule)| {
                rule.policies.iter().map(move |policy| Terms {
                    rule: at,
                    warn_at_percent: rule.warn_at_percent,
                    // A concurrency limit gets its units back when the request ends, after any response.
                    settlement: if policy.limits_in_flight() { Settlement::default() } else { rule.settlement.clone() },
                    until_head: rule.until_head,
                })
            })
            .collect();
        let links = rules().map(|(at, rule)| {
            let linked = rule.linked.as_ref()?;
            policies.push(linked.policy.clone());
            // A meter counts what its rule charges. A block counts refusals, and no refusal is undone.
            let settlement = match linked.role {
                LinkedRole::Meter => rule.settlement.clone(),
                LinkedRole::Block => Settlement::default(),
            };
            terms.push(Terms { rule: at, warn_at_percent: None, settlement, until_head: false });
            Some((policies.len() - 1, linked.role))
        });
        let links = links.collect();
        let delays = settings.timer.clone().map(|timer| Arc::new(Delays::new(timer, settings.wait_bounds())));
        let discard = settings
            .timer
            .clone()
            .or_else(default_timer)
            .and_then(|timer| Discard::new(settings.discard.unwrap_or_default(), timer));
        let caches: Box<[Option<PolicyCache>]> = rules()
            .map(|(_, rule)| {
                let of_requests = rule.policies.first().filter(|_| rule.quota_from.is_some())?;
                Some(PolicyCache::new(of_requests.clone()))
            })
            .collect();
        let brings_quotas = caches.iter().any(Option::is_some);
        let has_fixed_places = policies.iter().any(Policy::limits_in_flight);
        let has_places = has_fixed_places || brings_quotas;
        let settles = terms.iter().any(|terms| !terms.settlement.is_none());
        let keeps_tickets = settings.expose_outcome || settings.refund_nested || settles;
        let unsupported: Vec<(usize, UnsupportedQuota)> = policies
            .iter()
            .enumerate()
            .filter_map(|(at, policy)| Some((at, supports_in_layer(&*limiter, policy.quota()).err()?)))
            .collect();
        let paths = PathIndex::new(rules().map(|(_, rule)| &rule.paths[..]));
        let found = settings.finder().map_or(0, |(_, rules)| rules);
        let is_plain = paths.is_none()
            && settings.mode.is_none()
            && rules().all(|(_, rule)| rule.mode.is_none())
            && delays.is_none()
            && settings.access.is_empty()
            && !settings.exempt_preflight
            && settings.finder().is_none()
            && unsupported.is_empty();
        let charges = |rule: &Rule| {
            usize::from(rule.linked.is_some()) + if rule.choose.is_some() { 1 } else { rule.policies.len() }
        };
        let is_alone = policies.len() == 1;
        let prepares = settings.observer.is_some() || keeps_tickets || has_fixed_places;
        let has_lines = delays.is_some()
            && limiter.place_lines().is_some()
            && (brings_quotas || policies.iter().any(|policy| !policy.quota().wait_in_line().is_zero()));
        let line_waker = limiter.place_lines().filter(|_| has_lines).map(|lines| {
            let waker = Arc::new(LineWaker { lines: lines.clone(), policies: policies.clone() });
            let switches = rules().filter_map(|(_, rule)| rule.mode.as_ref()).chain(&settings.mode);
            switches.for_each(|switch| switch.enter(Arc::downgrade(&waker) as Weak<dyn FollowMode>));
            waker
        });
        let has_fixed_quotas = !brings_quotas && !policies.iter().any(|policy| policy.quota().is_unlimited());
        Self {
            is_plain: is_plain && is_alone && has_fixed_quotas,
            is_plain_but_for_quota: is_plain && is_alone && brings_quotas,
            is_plain_set: is_plain
                && !is_alone
                && has_fixed_quotas
                && !prepares
                && rules().all(|(_, rule)| rule.linked.is_none()),
            prepares,
            has_places,
            has_fixed_places,
            brings_quotas,
            has_lines,
            _line_waker: line_waker,
            keeps_tickets,
            keeps_charges: keeps_tickets || has_fixed_places,
            most_charges: rules().skip(found).map(|(_, rule)| charges(rule)).sum(),
            headers,
            refusals,
            layout,
            links,
            caches,
            delays,
            discard,
            settles,
            expects_usage: terms.iter().any(|terms| terms.settlement.by_usage),
            paths,
            unsupported,
            diagnostics: Arc::new(Diagnostics::new(&settings)),
            unsettled: policies
                .iter()
                .zip(&terms)
                .any(|(policy, terms)| Unsettled::concerns(policy, &terms.settlement))
                .then(Arc::default),
            version: 0,
            live: OnceLock::new(),
            entered: OnceLock::new(),
            policies: policies.into(),
            terms: terms.into(),
            limiter,
            settings,
        }
    }

    /// Compiles the configuration that replaces this one in the same layer. Both share the requests that wait, and the
    /// warnings that were reported.
    pub(super) fn successor(&self, settings: Settings, has_new_rules: bool) -> Self {
        let next = Self::new(Arc::clone(&self.limiter), settings);
        // The watch over rules and lists is for these.
        let diagnostics = if has_new_rules { &next.diagnostics } else { &self.diagnostics };
        Self {
            delays: self.delays.clone(),
            diagnostics: Arc::clone(diagnostics),
            unsettled: self.unsettled.clone().filter(|_| next.unsettled.is_some()).or_else(|| next.unsettled.clone()),
            version: self.version + 1,
            live: self.live.clone(),
            ..next
        }
    }

    /// Wakes requests that wait in line for units of this configuration's policies: a quota may have been raised.
    pub(super) fn wake_lines(&self) {
        if let Some(lines) = self.limiter.place_lines() {
            self.policies.iter().filter(|policy| policy.limits_in_flight()).for_each(|policy| lines.wake_all(policy));
        }
    }

    /// Refunds, and reports a failure that is known at once.
    pub(super) fn refund(&self, refunds: Vec<Refund>) {
        if let Reply::Now(Err(error)) = self.limiter.refund(refunds) {
            self.report_failure(&error);
        }
    }

    /// Takes units into debt, whatever is left.
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

    /// Returns the policy of a quota that a request brought to a rule.
    pub(super) fn policy_from(&self, rule: usize, quota: &Quota) -> Option<Policy> {
        let cache = self.caches.get(rule)?.as_ref()?;
        Some(cache.find(quota).map_or_else(|| self.compile(rule, cache, quota), Cached::into_policy))
    }

    /// Compiles the policy of a quota that a request brought, and keeps it if the limiter supports the quota. A request
    /// with a quota that is kept is not looked at again.
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
    /// Returns the policy at a place. The places of a layer's tickets are those of its own rules, whatever the request
    /// is.
    pub(super) fn policy(&self, at: usize) -> Option<&Policy> {
        debug_assert!(at < self.policies.len(), "a charge is for a policy that its layer does not have");
        self.policies.get(at)
    }

    fn terms(&self, policy: usize) -> Option<&Terms> {
        debug_assert!(policy < self.terms.len(), "a charge is for a policy that its layer does not have");
        self.terms.get(policy)
    }

    /// Returns the policy for settling what was charged. That is the one that was charged, unless its quota was
    /// replaced by a larger one: if the smaller one has no room for what was used since, nothing is charged to it.
    pub(super) fn policy_now(&self, at: usize) -> Option<Policy> {
        self.largest_now(at, |_| true)
    }

    /// Returns the policy for refunding what was charged. As [`policy_now`](Self::policy_now), but only a quota to
    /// which the receipt means the same can replace the one that was charged: a window does not know the instant of a
    /// bucket.
    pub(super) fn policy_of_refunds(&self, at: usize) -> Option<Policy> {
        let own = self.policy(at)?.quota();
        self.largest_now(at, |now| now.reads_receipts_of(own))
    }

    /// Returns the policy for asking again for what a request waits for in line: with the quota that is in force now,
    /// if the policy is a concurrency limit whose quota was replaced. It is found by its name, because new rules may
    /// stand before its own. Plans have one name in common, and keep their order.
    pub(super) fn policy_in_line(&self, at: usize) -> Option<Policy> {
        let own = self.policy(at)?;
        let live = self.live.get().and_then(Weak::upgrade).map(|live| live.current());
        let live = live.filter(|live| own.limits_in_flight() && live.version != self.version);
        let is_it = |policy: &&Policy| policy.name_fingerprint() == own.name_fingerprint();
        let plans_before = self.policies.iter().take(at).filter(is_it).count();
        let now = live.as_ref().and_then(|live| live.policies.iter().filter(is_it).nth(plans_before));
        Some(now.filter(|now| now.limits_in_flight()).unwrap_or(own).clone())
    }

    /// Returns the mode in which a request that waits in line is charged to a policy now: that of the policy's rule, or
    /// of the rule that replaced it. It is found like [`policy_in_line`](Self::policy_in_line).
    pub(super) fn mode_in_line(&self, at: usize) -> Option<Mode> {
        let mode_in = |layer: &Self, at| Some(layer.mode_of(layer.settings.rules.get(layer.rule_of(at))?));
        let own = self.policy(at)?;
        let live = self.live.get().and_then(Weak::upgrade).map(|live| live.current());
        let Some(live) = live.filter(|live| live.version != self.version) else { return mode_in(self, at) };
        let is_it = |policy: &Policy| policy.name_fingerprint() == own.name_fingerprint();
        let plans_before = self.policies.iter().take(at).filter(|policy| is_it(policy)).count();
        let now = live.policies.iter().enumerate().filter(|(_, policy)| is_it(policy)).nth(plans_before);
        now.and_then(|(at, _)| mode_in(&live, at)).or_else(|| mode_in(self, at))
    }

    /// Returns the largest quota of a policy's name that is in force, if it has more room than the policy's own.
    /// Otherwise returns the policy. A quota that keeps the used share has room for what was used, and counts other
    /// units.
    fn largest_now(&self, at: usize, is_fit: impl Fn(&Quota) -> bool) -> Option<Policy> {
        let own = self.policy(at)?;
        let room = own.quota().capacity().saturating_add(own.quota().spec().debt);
        let live = self.live.get().and_then(Weak::upgrade).map(|live| live.current());
        let live = live.filter(|live| live.version != self.version); // usually nothing has changed
        let larger = |now: &&Policy| {
            let quota = now.quota();
            quota.capacity() > room && !quota.spec().proportional && is_fit(quota)
        };
        let now = live.iter().flat_map(|live| live.policies.iter());
        let now = now.filter(|now| now.name_fingerprint() == own.name_fingerprint());
        let largest = now.filter(larger).max_by_key(|now| now.quota().capacity());
        Some(largest.unwrap_or(own).clone())
    }

    /// Returns the only policy and its rule, if the layer is plain and its first requests are over.
    #[inline]
    pub(super) fn only_policy(&self) -> Option<(&BoundRule, &Policy)> {
        if !self.is_plain || self.diagnostics.is_watching() {
            return None;
        }
        Some((self.settings.rules.first()?, self.policies.first()?))
    }

    /// Returns the rules, if the layer has several policies and is plain, and its first requests are over.
    #[inline]
    pub(super) fn plain_rules(&self) -> Option<&[BoundRule]> {
        if self.is_plain_set && !self.diagnostics.is_watching() { Some(&self.settings.rules) } else { None }
    }

    /// Returns the only rule and the policies of its requests' own quotas, if the layer is plain but for these.
    #[inline]
    pub(super) fn only_cache(&self) -> Option<(&BoundRule, &PolicyCache)> {
        if !self.is_plain_but_for_quota || self.diagnostics.is_watching() {
            return None;
        }
        Some((self.settings.rules.first()?, self.caches.first()?.as_ref()?))
    }

    /// Returns whether a request's ticket is needed when its response has come: the response carries the outcome, or
    /// charges depend on it.
    pub(super) fn needs_response(&self, kind: OutcomeKind) -> bool {
        self.keeps_tickets || kind.is_always_exposed()
    }

    /// Returns the number of the rule that a policy belongs to.
    pub(super) fn rule_of(&self, policy: usize) -> usize {
        self.terms(policy).map_or(usize::MAX, |terms| terms.rule)
    }

    /// Returns what is done with a policy's charges after the response.
    pub(super) fn settlement(&self, policy: usize) -> Option<&Settlement> {
        self.terms(policy).map(|terms| &terms.settlement)
    }

    /// Returns whether what is held of a policy is returned when the response's head is sent.
    pub(super) fn is_held_until_head(&self, policy: usize) -> bool {
        self.terms(policy).is_some_and(|terms| terms.until_head)
    }

    /// Returns the percentage of a policy's capacity from which on a warning is due.
    pub(super) fn warn_at_percent(&self, policy: usize) -> Option<u8> {
        self.terms(policy)?.warn_at_percent
    }

    /// Returns the place and the role of a rule's linked policy.
    pub(super) fn link(&self, rule: usize) -> Option<(usize, LinkedRole)> {
        debug_assert!(rule < self.links.len(), "a charge is of a rule that its layer does not have");
        self.links.get(rule).copied().flatten()
    }

    /// Returns the strikes of a charge that its request's response may return.
    pub(super) fn strikes_to_settle(&self, policy: usize, key: &Key) -> Option<Strikes> {
        let found = self.policy(policy)?;
        let concerns = Unsettled::concerns(found, self.settlement(policy)?);
        concerns.then(|| (found.name_fingerprint(), key.clone()))
    }

    /// Returns the mode of a rule now: the milder of its own and the layer's.
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
