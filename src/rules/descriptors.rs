//! Decides about descriptors as Envoy's rate limit service does, with the limits of a file in Envoy's form.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, Weak};

use http::request::Parts;
use http::{HeaderMap, StatusCode};
use smallvec::SmallVec;

use super::store::RuleStore;
use super::tree::{Descriptor, Limit, Tree, override_policy};
use crate::base::head::Head;
use crate::base::sync::contained;
use crate::clock::Clock;
use crate::decision::{ChargeDecision, Decision};
use crate::error::WithSources;
use crate::event::{LimiterEvent, RulesEvent};
use crate::headers::{Headers, PolicyView, PreparedHeaders, keep_one_of_each};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Refund, UnsupportedQuota};
use crate::middleware::rule::Follow;
use crate::middleware::source::FOUND_MAX;
use crate::mode::Mode;
use crate::outcome::{Observed, Observer, Outcome, OutcomeKind, PolicyStatus};
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};

/// Descriptors that are decided together, like those in a request to Envoy's rate limit service.
///
/// ```
/// use tower_ratelimit::rules::{Descriptor, DescriptorRequest};
/// let client = Descriptor::new([("remote_address", "192.0.2.1")]);
/// let request = DescriptorRequest::new("edge").charge(client);
/// ```
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until it is decided"]
pub struct DescriptorRequest {
    domain: String,
    parts: Vec<DescriptorCharge>,
}

/// A descriptor of a request, and whether it is charged or refunded.
#[derive(Clone, Debug)]
struct DescriptorCharge {
    descriptor: Descriptor,
    /// The quota that the caller supplies.
    quota: Option<Box<Quota>>,
    refunds: bool,
}

impl DescriptorRequest {
    /// Makes a request without descriptors.
    pub fn new(domain: impl Into<String>) -> Self {
        Self { domain: domain.into(), parts: Vec::new() }
    }

    /// Charges a descriptor to the limit that the descriptor matches in the file. A descriptor without
    /// [hits](Descriptor::hits) charges nothing and only looks.
    pub fn charge(self, descriptor: Descriptor) -> Self {
        self.and(DescriptorCharge { descriptor, quota: None, refunds: false })
    }

    /// Charges a descriptor to a quota that the caller supplies, instead of the limit of the file.
    ///
    /// Descriptors with equal entries share a counter, which is separate from the counters of the file. If descriptors
    /// that share a counter have different quotas, the usage is converted as with [plans](crate::Rule::plans). If one
    /// request has two quotas for equal entries, the first is used.
    ///
    /// Under a [concurrency limit](Quota::concurrent) a descriptor is always over its limit, because no call
    /// reports the end of the request.
    pub fn charge_under(self, descriptor: Descriptor, quota: Quota) -> Self {
        let quota = if quota.algorithm() == Algorithm::Concurrency { Quota::concurrent(0) } else { quota };
        self.and(DescriptorCharge { descriptor, quota: Some(Box::new(quota)), refunds: false })
    }

    /// Refunds the hits of a descriptor to the limit that the descriptor matches in the file. A refund returns at
    /// most the used units. In a fixed window, the used units are the units of the window. In a sliding window or a
    /// log, only the units of the newest part count as used.
    pub fn refund(self, descriptor: Descriptor) -> Self {
        self.and(DescriptorCharge { descriptor, quota: None, refunds: true })
    }

    /// Refunds the hits of a descriptor as [`refund`](Self::refund) does, to a quota that the caller supplies.
    pub fn refund_under(self, descriptor: Descriptor, quota: Quota) -> Self {
        self.and(DescriptorCharge { descriptor, quota: Some(Box::new(quota)), refunds: true })
    }

    fn and(mut self, part: DescriptorCharge) -> Self {
        self.parts.push(part);
        self
    }
}

/// Decides about descriptors with the limits of a file in Envoy's form, without an HTTP request. Use this type in a
/// server that speaks the protocol of Envoy's rate limit service. Clones share everything.
///
/// Every allowance is shared with the [layers](super::Rules::layer) that have the same rules and the same limiter.
/// Therefore a request counts whether it comes through Envoy or directly to the application. In two cases
/// `DescriptorLimits` answers like Envoy's service and unlike a layer:
///
/// * A descriptor without hits is over its limit if nothing remains.
/// * A refused charge of several hits uses up a fixed window that has some units left, but too few
///   for the charge.
///
/// ```
/// use tower_ratelimit::MemoryLimiter;
/// use tower_ratelimit::rules::{Descriptor, DescriptorRequest, Rules};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rules = Rules::from_text(
///     "domain: edge
/// descriptors:
///   - key: remote_address
///     rate_limit: {unit: minute, requests_per_unit: 1}",
/// )?;
/// let limits = rules.descriptor_limits(MemoryLimiter::new())?;
/// let client = Descriptor::new([("remote_address", "192.0.2.1")]);
/// let request = DescriptorRequest::new("edge").charge(client);
/// assert!(!limits.decide(&request).await?.is_over_limit());
/// assert!(limits.decide(&request).await?.is_over_limit());
/// # Ok(()) }
/// ```
pub struct DescriptorLimits<L>(Arc<Core<L>>);

struct Core<L> {
    store: Arc<RuleStore>,
    limiter: Arc<L>,
    observer: Option<Arc<dyn Observer>>,
}

impl<L: Limiter> DescriptorLimits<L> {
    pub(super) fn new(store: Arc<RuleStore>, limiter: L) -> Self {
        Self::of(Core { store, limiter: Arc::new(limiter), observer: None })
    }

    pub(super) fn limiter(&self) -> &L {
        &self.0.limiter
    }

    fn of(core: Core<L>) -> Self {
        let core = Arc::new(core);
        let follower: Weak<dyn Follow> = Arc::downgrade(&(Arc::clone(&core) as Arc<dyn Follow>));
        core.store.follow(follower);
        Self(core)
    }

    /// Sets the observer, which sees every outcome, every failure of the limiter and every reload. The limiter also
    /// reports its events to the observer. The request head that the observer gets has only a path, the path of the
    /// gRPC method of Envoy's service.
    ///
    /// If the limiter fails to decide a request, the outcome is [`FailedClosed`](OutcomeKind::FailedClosed), although a
    /// proxy may be configured to let the request pass. If a request is dropped while it waits, the outcome is
    /// [`Abandoned`](OutcomeKind::Abandoned).
    #[must_use]
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        let Core { store, limiter, .. } = &*self.0;
        let (store, limiter) = (Arc::clone(store), Arc::clone(limiter));
        let observer: Arc<dyn Observer> = Arc::new(observer);
        limiter.hooks().observe(&observer);
        Self::of(Core { store, limiter, observer: Some(observer) })
    }

    /// Returns the domain of the limits. Descriptors of other domains match no limit.
    #[must_use]
    pub fn domain(&self) -> String {
        self.0.store.tree().map_or_else(String::new, |tree| tree.domain.to_string())
    }

    /// Decides about all descriptors of a request together.
    ///
    /// * A request is over the limit if one of its descriptors is over its limit. No descriptor of a request over the
    ///   limit is charged, except that a fixed window with too few units left for a charge is used up, as in Envoy's
    ///   service.
    /// * A descriptor without hits only looks: it is over its limit if no unit remains.
    /// * A limit in shadow mode is counted, but no descriptor is over it.
    /// * If several descriptors are charged to one counter, their hits are added up.
    ///
    /// A request that names more than 1,000 counters is over the limit, and nothing is charged.
    ///
    /// # Errors
    /// Returns the limiter's error. After an error there is no decision, and a server should refuse the
    /// request, unless its operators chose that requests pass while the limiter fails.
    pub async fn decide(&self, request: &DescriptorRequest) -> Result<DescriptorAnswer, L::Error> {
        let core = &*self.0;
        let mut plan = Plan::new(core.store.tree().as_deref(), request);
        let mut undecided = Undecided { observer: core.observer.as_deref(), kind: OutcomeKind::Abandoned };
        if plan.counters.len() > FOUND_MAX {
            plan.is_over = true;
        } else if let Err(error) = core.carry_out(&mut plan).await {
            undecided.kind = OutcomeKind::FailedClosed;
            core.report_failure(&error);
            return Err(error);
        }
        undecided.observer = None;
        let answer = plan.answer(core.limiter.hooks().clock());
        if let Some(observer) = &core.observer {
            let head = head();
            let keys = answer.keys.iter().zip(answer.outcome.policies()).map(|(key, status)| (status.policy(), key));
            observer.on_outcome(&Observed::new(&answer.outcome, &Head::from(&head), keys));
        }
        Ok(answer)
    }
}

/// The method of Envoy's rate limit service.
const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Returns the head that an observer sees of each request.
fn head() -> Parts {
    let (mut head, ()) = http::Request::new(()).into_parts();
    head.uri = http::Uri::from_static(METHOD);
    head
}

/// A request without a decision. When the value is dropped, the observer sees the request's outcome.
struct Undecided<'a> {
    observer: Option<&'a dyn Observer>,
    kind: OutcomeKind,
}

impl Drop for Undecided<'_> {
    fn drop(&mut self) {
        let Some(observer) = self.observer else { return };
        let outcome = Outcome::new(self.kind, SmallVec::new());
        contained(|| observer.on_outcome(&Observed::new(&outcome, &Head::from(&head()), std::iter::empty())));
    }
}

impl<L: Limiter> Core<L> {
    async fn carry_out(&self, plan: &mut Plan) -> Result<(), L::Error> {
        self.refund(plan).await?;
        let of = |looks: bool, plan: &Plan| -> Vec<usize> {
            (0..plan.counters.len())
                .filter(|at| plan.counters.get(*at).is_some_and(|one| one.looks() == looks))
                .collect()
        };
        let (looks, charges) = (of(true, plan), of(false, plan));
        if !looks.is_empty() {
            let reply = self.limiter.peek(&plan.charges(&looks, Some(0)));
            plan.put(&looks, reply.await?);
            let is_over = |at: &usize| plan.counters.get(*at).is_some_and(DescriptorCounter::has_nothing_left);
            let over: Vec<usize> = looks.into_iter().filter(is_over).collect();
            if !over.is_empty() {
                let reply = self.limiter.peek(&plan.charges(&over, Some(1)));
                plan.put(&over, reply.await?);
                plan.is_over = true;
            }
        }
        if charges.is_empty() {
            return Ok(());
        }
        let reply = if plan.is_over {
            self.limiter.peek(&plan.charges(&charges, Some(0)))
        } else {
            self.limiter.take(&plan.charges(&charges, None))
        };
        let decision = reply.await?;
        plan.is_over |= !decision.is_allowed();
        plan.put(&charges, decision);
        self.use_up(plan, &charges).await
    }

    /// Uses up the windows that have fewer units left than a refused charge needed. Envoy reports tokens after they
    /// were spent. If a window has too few units left for the spent tokens, the window loses its last units. So the
    /// next request that looks at the window's counter finds it over the limit.
    ///
    /// The charge is made by a second call to the limiter, and a window may have ended since the first call. If a
    /// window has ended, the charge is refunded to the new window.
    async fn use_up(&self, plan: &mut Plan, charges: &[usize]) -> Result<(), L::Error> {
        let falls_short = |at: &&usize| plan.counters.get(**at).is_some_and(DescriptorCounter::falls_short);
        let short: Vec<usize> = charges.iter().filter(falls_short).copied().collect();
        if short.is_empty() {
            return Ok(());
        }
        let reply = {
            let counters = short.iter().filter_map(|at| plan.counters.get(*at));
            let charges: Vec<Charge<'_>> = counters.map(DescriptorCounter::rest).collect();
            self.limiter.settle(&charges)
        };
        let mut settled = reply.await?;
        let mut too_late = Vec::new();
        for (at, rest) in short.into_iter().zip(settled.charges_mut()) {
            debug_assert!(at < plan.counters.len(), "each charge belongs to a counter of the plan");
            let Some(counter) = plan.counters.get_mut(at) else { continue };
            if counter.window_ended_before(rest) {
                let (policy, key) = (counter.policy.clone(), counter.key.clone());
                too_late.extend(rest.take_receipt().map(|receipt| Refund::new(policy, key, receipt)));
            } else {
                counter.decision = counter.decision.with_cost_changed(0, counter.decision.remaining());
            }
        }
        self.limiter.refund(too_late).await
    }

    /// Refunds hits that have no receipts. One forced unit is taken to get a receipt, and this unit and the hits are
    /// then refunded with the receipt.
    async fn refund(&self, plan: &Plan) -> Result<(), L::Error> {
        let refunded: Vec<&DescriptorCounter> = plan.counters.iter().filter(|counter| counter.refunded > 0).collect();
        if refunded.is_empty() {
            return Ok(());
        }
        let forced = |counter: &&DescriptorCounter| -> (Policy, Key) { (counter.policy.clone(), counter.key.clone()) };
        let owned: Vec<(Policy, Key)> = refunded.iter().map(forced).collect();
        let units: Vec<u64> = refunded.iter().map(|counter| counter.refunded).collect();
        let reply = {
            let charges: Vec<Charge<'_>> =
                owned.iter().map(|(policy, key)| Charge::new(policy, key).effect(Effect::Force)).collect();
            self.limiter.take(&charges)
        };
        let receipts = reply.await?.take_receipts();
        let refunds = owned.into_iter().zip(receipts).zip(units).filter_map(|(((policy, key), receipt), units)| {
            let receipt = receipt?;
            let all = receipt.units().saturating_add(units);
            Some(Refund::new(policy, key, receipt.of_units(all)))
        });
        self.limiter.refund(refunds.collect()).await
    }

    fn report_failure(&self, error: &(dyn std::error::Error + 'static)) {
        if let Some(observer) = &self.observer {
            observer.on_limiter_event(&LimiterEvent::failed(WithSources(error).to_string()));
        }
    }
}

impl<L: Limiter> Follow for Core<L> {
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.limiter.supports(quota)
    }

    fn own_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Does nothing, because each request uses the rules that are in force.
    fn follow(&self) {}

    /// Descriptors name no client.
    #[cfg(feature = "fleet")]
    fn checks_access(&self) -> bool {
        false
    }

    fn report(&self, event: &RulesEvent) {
        match &self.observer {
            Some(observer) => observer.on_rules_event(event),
            None => event.report(),
        }
    }
}

/// A counter that descriptors of a request are charged to.
struct DescriptorCounter {
    policy: Policy,
    key: Key,
    mode: Mode,
    hits: u64,
    refunded: u64,
    decision: ChargeDecision,
}

impl DescriptorCounter {
    fn charge(&self, cost: u64) -> Charge<'_> {
        let effect = if self.mode == Mode::Enforce { Effect::Enforce } else { Effect::Observe };
        Charge::new(&self.policy, &self.key).cost(cost).effect(effect)
    }

    /// Whether nothing is charged.
    fn looks(&self) -> bool {
        self.hits == 0
    }

    fn has_nothing_left(&self) -> bool {
        self.mode == Mode::Enforce && self.refunded == 0 && self.decision.remaining() == 0
    }

    /// Returns whether a window denies a charge although it has some units left, because they are
    /// too few.
    fn falls_short(&self) -> bool {
        let is_window = self.policy.quota().algorithm() == Algorithm::FixedWindow;
        is_window && !self.decision.is_allowed() && self.decision.remaining() > 0
    }

    /// Returns a charge of the remaining units.
    fn rest(&self) -> Charge<'_> {
        Charge::new(&self.policy, &self.key).cost(self.decision.remaining()).effect(Effect::Force)
    }

    /// Returns whether the window ended between this counter's first charge, which was denied, and its second charge,
    /// which was taken. The time until the end of a window only gets shorter, so a longer time belongs to another
    /// window.
    fn window_ended_before(&self, later: &ChargeDecision) -> bool {
        // Two readings of the clock may differ a little, but by less than half a window.
        let ends_in = |decision: &ChargeDecision| decision.effective_window().unwrap_or_default();
        ends_in(later) > ends_in(&self.decision) + self.policy.quota().period() / 2
    }

    fn refuses(&self) -> bool {
        self.mode == Mode::Enforce && !self.decision.is_allowed()
    }
}

/// The result of looking up the limit of a descriptor.
enum LimitLookup {
    NoLimit,
    Unlimited(Option<Box<str>>),
    Limit { counter: usize, name: Option<Box<str>> },
}

/// The counters of a request, and the lookup results of its descriptors.
struct Plan {
    /// No two counters have the same policy and key.
    counters: Vec<DescriptorCounter>,
    /// The lookup result of each descriptor.
    slots: Vec<LimitLookup>,
    is_over: bool,
}

impl Plan {
    fn new(tree: Option<&Tree>, request: &DescriptorRequest) -> Self {
        let mut plan = Self { counters: Vec::new(), slots: Vec::with_capacity(request.parts.len()), is_over: false };
        let Some(tree) = tree.filter(|tree| *tree.domain == *request.domain) else {
            plan.slots.resize_with(request.parts.len(), || LimitLookup::NoLimit);
            return plan;
        };
        let of_file = request.parts.iter().map(|part| Some(&part.descriptor).filter(|_| part.quota.is_none()));
        let mut places = HashMap::new();
        for (matched, part) in tree.limits(of_file).into_iter().zip(&request.parts) {
            let slot = match (&part.quota, matched) {
                (Some(quota), _) => {
                    match override_policy(&tree.domain, **quota).zip(key_of(&part.descriptor)) {
                        Some((policy, key)) => {
                            let counter = plan.counter(&mut places, &policy, key, Mode::Enforce, part);
                            LimitLookup::Limit { counter, name: None }
                        }
                        None => LimitLookup::NoLimit, // a descriptor without entries
                    }
                }
                (None, None) => LimitLookup::NoLimit,
                (None, Some((Limit { quota: None, name, .. }, _))) => LimitLookup::Unlimited(name.clone()),
                (None, Some((Limit { quota: Some(quota), name, .. }, key))) => {
                    let counter = plan.counter(&mut places, &quota.policy, key, quota.mode, part);
                    LimitLookup::Limit { counter, name: name.clone() }
                }
            };
            plan.slots.push(slot);
        }
        plan
    }

    /// Returns the index of a counter, and adds the charge or refund to it.
    fn counter(
        &mut self,
        places: &mut HashMap<(u64, Key), usize>,
        policy: &Policy,
        key: Key,
        mode: Mode,
        part: &DescriptorCharge,
    ) -> usize {
        let counters = &mut self.counters;
        let at = *places.entry((policy.name_fingerprint(), key.clone())).or_insert_with(|| {
            let decision = ChargeDecision::unasked(policy.quota().capacity());
            counters.push(DescriptorCounter { policy: policy.clone(), key, mode, hits: 0, refunded: 0, decision });
            counters.len() - 1
        });
        if let Some(counter) = self.counters.get_mut(at) {
            let sum = if part.refunds { &mut counter.refunded } else { &mut counter.hits };
            *sum = sum.saturating_add(part.descriptor.hits);
        }
        at
    }

    /// Returns the charges of some counters. The cost of each charge is `cost`, or the hits of the counter if `cost` is
    /// `None`.
    fn charges(&self, places: &[usize], cost: Option<u64>) -> Vec<Charge<'_>> {
        let counters = places.iter().filter_map(|at| self.counters.get(*at));
        counters.map(|counter| counter.charge(cost.unwrap_or(counter.hits))).collect()
    }

    /// Stores the limiter's decisions about some counters.
    fn put(&mut self, places: &[usize], mut decision: Decision) {
        for (at, answer) in places.iter().zip(decision.charges_mut()) {
            if let Some(counter) = self.counters.get_mut(*at) {
                counter.decision = answer.take();
            }
        }
    }

    fn answer(self, limiter_clock: Option<Arc<dyn Clock>>) -> DescriptorAnswer {
        let is_shadowed = self.counters.iter().any(|counter| !counter.decision.is_allowed());
        let kind = match (self.is_over, self.counters.is_empty(), is_shadowed) {
            (true, ..) => OutcomeKind::Limited,
            (_, true, _) => OutcomeKind::Exempt,
            (.., true) => OutcomeKind::ShadowLimited,
            _ => OutcomeKind::Allowed,
        };
        let status = |counter: &DescriptorCounter| PolicyStatus {
            policy: counter.policy.clone(),
            cost: counter.hits,
            mode: counter.mode,
            refuses: counter.refuses(),
            near: false,
            taken: counter.decision.taken(),
            decision: counter.decision.clone(),
        };
        let policies: SmallVec<[PolicyStatus; 2]> = self.counters.iter().map(status).collect();
        let statuses = self.slots.into_iter().map(|slot| match slot {
            LimitLookup::NoLimit => DescriptorStatus { limit: None, is_unlimited: false, name: None },
            LimitLookup::Unlimited(name) => DescriptorStatus { limit: None, is_unlimited: true, name },
            LimitLookup::Limit { counter, name } => {
                DescriptorStatus { limit: policies.get(counter).cloned(), is_unlimited: false, name }
            }
        });
        DescriptorAnswer {
            is_over: self.is_over,
            statuses: statuses.collect(),
            keys: self.counters.into_iter().map(|counter| counter.key).collect(),
            outcome: Outcome::new(kind, policies),
            limiter_clock,
        }
    }
}

/// Returns the key for a quota that the caller supplies. The key has all entries of the descriptor.
fn key_of(descriptor: &Descriptor) -> Option<Key> {
    let texts = descriptor.entries.iter().flat_map(|(key, value)| [key.as_str(), value.as_str()]);
    (!descriptor.entries.is_empty()).then(|| Key::joined(texts.filter_map(Key::of)))
}

/// The answer to a [`DescriptorRequest`].
#[derive(Clone, Debug)]
pub struct DescriptorAnswer {
    is_over: bool,
    statuses: Vec<DescriptorStatus>,
    /// The keys of the outcome's policies, in the order of these policies.
    keys: Vec<Key>,
    outcome: Outcome,
    /// The limiter's clock, or `None` if the clock is not in this process.
    limiter_clock: Option<Arc<dyn Clock>>,
}

impl DescriptorAnswer {
    /// Returns whether at least one descriptor is over its limit, so that the request should be refused.
    #[must_use]
    pub fn is_over_limit(&self) -> bool {
        self.is_over
    }

    /// Returns the status of each descriptor, in the order of the request.
    #[must_use]
    pub fn statuses(&self) -> &[DescriptorStatus] {
        &self.statuses
    }

    /// Returns the outcome as an observer of a layer would see it. The outcome has each counter once.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Returns the headers that report the limits to the client, except limits in shadow mode.
    #[must_use]
    pub fn headers(&self, headers: &Headers) -> HeaderMap {
        let is_visible = |status: &PolicyStatus| status.mode != Mode::Shadow && status.decision.is_known();
        let visible = self.outcome.policies().iter().zip(&self.keys).filter(|(status, _)| is_visible(status));
        let mut views: SmallVec<[PolicyView<'_>; 4]> = visible
            .map(|(PolicyStatus { policy, decision, refuses, .. }, key)| PolicyView {
                index: 0,
                policy,
                key: Some(key),
                decision,
                refuses: *refuses,
            })
            .collect();
        keep_one_of_each(&mut views);
        views.iter_mut().enumerate().for_each(|(index, view)| view.index = index);
        let policies: Vec<Policy> = views.iter().map(|view| view.policy.clone()).collect();
        let seed = self.keys.first().map_or(0, |key| foldhash::fast::FixedState::default().hash_one(key));
        let prepared = PreparedHeaders::new(headers, &policies, self.limiter_clock.clone());
        let mut map = HeaderMap::new();
        if let Some(mut rendered) = prepared.render(&views, self.is_over.then_some(seed)) {
            let status = if self.is_over { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
            prepared.add(&mut rendered, &mut map, status);
        }
        map
    }
}

/// The status of a descriptor.
#[derive(Clone, Debug)]
pub struct DescriptorStatus {
    limit: Option<PolicyStatus>,
    is_unlimited: bool,
    name: Option<Box<str>>,
}

impl DescriptorStatus {
    /// Returns whether the descriptor is over its limit. A request can be refused because of another descriptor,
    /// although this descriptor is not over its limit.
    #[must_use]
    pub fn is_over_limit(&self) -> bool {
        self.limit.as_ref().is_some_and(PolicyStatus::refuses)
    }

    /// Returns whether the file says that the descriptor has no limit.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.is_unlimited
    }

    /// Returns the limit and its remaining units. Returns `None` if the descriptor is unlimited, if it matches no
    /// limit, or if another limit replaces its own limit.
    #[must_use]
    pub fn limit(&self) -> Option<&PolicyStatus> {
        self.limit.as_ref()
    }

    /// Returns the name of the limit in the file, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

impl<L> Clone for DescriptorLimits<L> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<L> fmt::Debug for DescriptorLimits<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DescriptorLimits").finish_non_exhaustive()
    }
}
