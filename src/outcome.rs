//! Outcomes: what the middleware did with a request, and the observer that sees them.

use std::fmt;
use std::time::Duration;

use ipnet::IpNet;
use smallvec::SmallVec;

use crate::base::head::Head;
use crate::base::time::Timestamp;
use crate::base::wait::Wait;
use crate::decision::ChargeDecision;
use crate::error::labelled;
use crate::event::{FleetEvent, LayerEvent, LimiterEvent, RulesEvent};
use crate::key::Key;
use crate::mode::Mode;
use crate::policy::Policy;
use crate::rules_in_force::RulesReader;
use crate::setup_warning::SetupWarning;
use crate::store_load::StoreLoadReader;

/// Describes what the middleware did with a request, and the status of each policy.
///
/// The outcome is in the extensions of
///
/// * the response of a refused request,
/// * a request that is degraded or goes to the overflow, and its response,
/// * every request that passes and its response, if the layer
///   [exposes](crate::RateLimitLayer::expose_outcome) outcomes.
///
/// Responders and an [`Observer`] also get the outcome.
#[derive(Clone, Debug)]
pub struct Outcome {
    kind: OutcomeKind,
    policies: SmallVec<[PolicyStatus; 2]>,
    /// True if the key is missing because the server does not provide the peer's address.
    lacks_peer: bool,
}

labelled! {
    /// The kind of an [`Outcome`]: what the middleware did with a request.
    OutcomeKind,
    /// Returns the label for metrics and logs.
    as_str {
        /// The request was within every quota and passed.
        Allowed = "allowed",
        /// The request waited for its departure from a queue, or in line for units of a [concurrency
        /// limit](crate::Quota::concurrent), and passed.
        Delayed = "delayed",
        /// The request was dropped before it reached a service, because the client disconnected while the limiter
        /// decided or while the request waited.
        Abandoned = "abandoned",
        /// The request was over a quota and refused.
        Limited = "limited",
        /// The request was refused because a [block](crate::Rule::block) has closed its key. A
        /// refusal that closes the key also has the kind `Blocked`.
        Blocked = "blocked",
        /// The request was over the quota of a rule with a [meter](crate::Rule::overage), was metered,
        /// and passed.
        Overage = "overage",
        /// The request was over the quota of a rule in [`Mode::Degrade`], or had no key for the
        /// rule, and passed to get a reduced response.
        Degraded = "degraded",
        /// The request was over the quota of a rule in [`Mode::Shadow`], or had no key for the
        /// rule, and passed.
        ShadowLimited = "shadow_limited",
        /// The request was over a quota and went to the [overflow](crate::RateLimitLayer::overflow)
        /// instead of the service.
        Overflowed = "overflowed",
        /// No policy applied to the request, and it passed.
        Exempt = "exempt",
        /// An access list denied the client, and the request was refused.
        Denied = "denied",
        /// The request had no key and was refused. The status is 400. The status is 500 if the rule's key is the
        /// client's address and the server does not provide that address, because no client can change that.
        KeyMissing = "key_missing",
        /// The limiter failed, and the request passed.
        FailedOpen = "failed_open",
        /// The limiter failed, and the request was refused.
        FailedClosed = "failed_closed",
    }
}

impl OutcomeKind {
    /// Returns whether the service always gets the outcome, because its response should differ from
    /// the usual one.
    #[inline]
    pub(crate) fn is_always_exposed(self) -> bool {
        matches!(self, Self::Degraded | Self::Overflowed)
    }

    /// Returns whether the request goes to the layer's overflow, if there is an overflow and it is ready.
    #[inline]
    pub(crate) fn may_overflow(self) -> bool {
        self == Self::Limited
    }

    /// Returns whether a limit has refused the request. In that case, an outer layer that refunds nested refusals
    /// refunds the request.
    pub(crate) fn is_refunded_outside(self) -> bool {
        matches!(self, Self::Limited | Self::Blocked)
    }

    /// Returns whether the request reached a service, which is the inner service or the overflow.
    #[must_use]
    pub fn passed(self) -> bool {
        match self {
            Self::Allowed | Self::Delayed | Self::Overage | Self::Degraded | Self::ShadowLimited | Self::Overflowed => {
                true
            }
            Self::Exempt | Self::FailedOpen => true,
            Self::Abandoned | Self::Limited | Self::Blocked => false,
            Self::Denied | Self::KeyMissing | Self::FailedClosed => false,
        }
    }
}

/// The status of one policy after a decision.
#[derive(Clone, Debug)]
pub struct PolicyStatus {
    pub(crate) policy: Policy,
    pub(crate) cost: u64,
    pub(crate) mode: Mode,
    pub(crate) refuses: bool,
    pub(crate) near: bool,
    pub(crate) taken: u64,
    pub(crate) decision: ChargeDecision,
}

impl Outcome {
    pub(crate) fn new(kind: OutcomeKind, policies: SmallVec<[PolicyStatus; 2]>) -> Self {
        Self { kind, policies, lacks_peer: false }
    }

    /// Notes whether the key is missing because the peer's address is missing.
    pub(crate) fn lacking_peer(self, lacks_peer: bool) -> Self {
        Self { lacks_peer, ..self }
    }

    pub(crate) fn lacks_peer(&self) -> bool {
        self.lacks_peer
    }

    /// Returns what the middleware did with the request.
    #[must_use]
    pub fn kind(&self) -> OutcomeKind {
        self.kind
    }

    /// Returns the status of each policy that applied.
    #[must_use]
    pub fn policies(&self) -> &[PolicyStatus] {
        &self.policies
    }

    /// Iterates over the policies that refused the request.
    pub fn violated(&self) -> impl Iterator<Item = &PolicyStatus> {
        self.policies.iter().filter(|status| status.refuses())
    }

    /// Iterates over the policies that refused the request. Yields each policy once, even if descriptors charged it
    /// under several keys.
    pub(crate) fn violated_once(&self) -> impl Iterator<Item = &PolicyStatus> {
        let mut names: SmallVec<[&str; 4]> = SmallVec::new();
        self.violated().filter(move |status| {
            let is_new = !names.contains(&status.policy.name());
            if is_new {
                names.push(status.policy.name());
            }
            is_new
        })
    }

    /// Iterates over the policies whose quotas the request exceeded. Some of these policies refused
    /// the request, and the [`Mode`] of the other policies let the request pass.
    pub fn exceeded(&self) -> impl Iterator<Item = &PolicyStatus> {
        self.policies.iter().filter(|status| status.is_exceeded())
    }

    /// Returns whether a policy is [near](PolicyStatus::is_near) its limit.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.policies.iter().any(PolicyStatus::is_near)
    }

    /// Returns the policy that binds: the refusing policy with the longest wait, or, if no policy refused, the
    /// policy with the fewest remaining units. If several policies are equal, returns the first of them. A policy in
    /// shadow mode never binds.
    #[must_use]
    pub fn binding(&self) -> Option<&PolicyStatus> {
        let seen = self.policies.iter().filter(|status| status.refuses || status.mode != Mode::Shadow);
        seen.min_by_key(|status| status.decision.binding_rank(status.refuses))
    }

    /// Returns the wait until the same request would pass if no other request came: the greatest
    /// [wait](ChargeDecision::wait) of the policies that refused, or [`Wait::None`] if none refused.
    #[must_use]
    pub fn wait(&self) -> Wait {
        self.violated().map(|status| status.decision.wait()).max().unwrap_or_default()
    }

    /// Returns the wait until the request's departure, as this wait was set when the request was
    /// admitted: the longest wait of the enforced queues. The actual wait is shorter if the request
    /// moved up in its queue, and zero in a layer without a [timer](crate::RateLimitLayer::timer).
    /// Returns zero if the request was not admitted.
    #[must_use]
    pub fn delay(&self) -> Duration {
        if self.violated().next().is_some() {
            return Duration::ZERO;
        }
        let waited = |status: &&PolicyStatus| status.mode == Mode::Enforce && status.cost > 0;
        self.policies.iter().filter(waited).map(|status| status.decision.delay()).max().unwrap_or_default()
    }
}

impl PolicyStatus {
    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the cost of the request under this policy, even if the request was not charged.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the units that the request took when it was decided. These units may be refunded or settled later.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Returns the decision of the policy's own quota.
    #[must_use]
    pub fn decision(&self) -> &ChargeDecision {
        &self.decision
    }

    /// Returns the mode that the policy's rule was in.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns whether this policy refused the request.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.refuses
    }

    /// Returns whether the request exceeded this policy's quota, whatever the policy's mode.
    #[must_use]
    pub fn is_exceeded(&self) -> bool {
        !self.decision.is_allowed()
    }

    /// Returns whether the remaining units are at most the percentage set by
    /// [`Rule::warn_at_percent`](crate::Rule::warn_at_percent). Returns `false` without that
    /// setting.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.near
    }
}

/// A decided request as an [`Observer`] sees it: its outcome, its head, and the keys that were
/// charged.
///
/// ```
/// use tower_ratelimit::observe::{Observed, Observer};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn on_outcome(&self, observed: &Observed<'_>) {
///         let (outcome, head) = (observed.outcome(), observed.head());
///         let policies: Vec<&str> =
///             outcome.violated().map(|status| status.policy().name()).collect();
///         println!("{} {} {policies:?}", outcome.kind(), head.uri.path());
///     }
/// }
/// ```
pub struct Observed<'a> {
    outcome: &'a Outcome,
    request: &'a Head<'a>,
    /// The policies that applied, each with its key. If the outcome has policies, these are in the same order.
    keys: SmallVec<[(&'a Policy, &'a Key); 4]>,
    #[cfg_attr(not(feature = "stats"), expect(dead_code, reason = "only statistics keep it"))]
    denied_network: Option<IpNet>,
}

impl<'a> Observed<'a> {
    pub(crate) fn new(
        outcome: &'a Outcome,
        request: &'a Head<'a>,
        keys: impl Iterator<Item = (&'a Policy, &'a Key)>,
    ) -> Self {
        Self { outcome, request, keys: keys.collect(), denied_network: None }
    }

    /// Adds the network that an access list denies, if the list decided.
    pub(crate) fn with_denied_network(self, network: Option<IpNet>) -> Self {
        Self { denied_network: network, ..self }
    }

    /// Returns the network that an access list denies, if that is why the request was refused.
    #[cfg(feature = "stats")]
    pub(crate) fn denied_network(&self) -> Option<IpNet> {
        self.denied_network
    }

    /// Returns what the middleware did with the request, and the status of each policy.
    #[must_use]
    pub fn outcome(&self) -> &'a Outcome {
        self.outcome
    }

    /// Returns the request's head as the layer got it. Its headers may carry secrets.
    #[must_use]
    pub fn head(&self) -> &'a Head<'a> {
        self.request
    }

    /// Returns the key that was charged under the policy of this name, or `None` if the policy did
    /// not apply to the request. If descriptors charged the policy under several keys, returns the
    /// first key that was refused. If no key was refused, returns the first key that was charged.
    ///
    /// A key may be a secret or personal data, such as a token or an address. Do not write keys to
    /// logs or metrics unchanged.
    #[must_use]
    pub fn key(&self, policy: &str) -> Option<&'a Key> {
        let is_it = |at: &usize| self.keys.get(*at).is_some_and(|(of, _)| of.name() == policy);
        let refuses = |at: &usize| self.outcome.policies.get(*at).is_some_and(PolicyStatus::refuses);
        let mut places = (0..self.keys.len()).filter(is_it);
        let first = places.next()?;
        let refused = if refuses(&first) { None } else { places.find(refuses) };
        self.key_of_status(refused.unwrap_or(first))
    }

    /// Returns the key of a status, by its index among the outcome's policies.
    pub(crate) fn key_of_status(&self, at: usize) -> Option<&'a Key> {
        self.keys.get(at).map(|(_, key)| *key)
    }
}

impl fmt::Debug for Observed<'_> {
    /// Leaves out the headers and the keys, because they may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observed")
            .field("outcome", &self.outcome)
            .field("method", &self.request.method)
            .field("path", &self.request.uri.path())
            .finish_non_exhaustive()
    }
}

/// Sees what the middleware does and what happens to a limiter. Implement this trait for metrics and logs.
///
/// The methods run while a request is served, so they should be quick and must not block. An `Arc`
/// of an observer is an observer, so several layers can share one observer.
/// [`Stats`](crate::guide::observing) is an observer that counts.
///
/// | method | what it reports | who reports it | which observer gets it |
/// |---|---|---|---|
/// | [`on_outcome`](Self::on_outcome), [`on_allowed`](Self::on_allowed) | decided requests | a layer | [its own](crate::RateLimitLayer::observer) |
/// | [`on_setup_warning`](Self::on_setup_warning) | likely misconfigurations | a layer | its own |
/// | [`on_layer_event`](Self::on_layer_event) | requests that wait | a layer | its own |
/// | [`on_place_taken`](Self::on_place_taken), [`on_place_returned`](Self::on_place_returned) | places of requests in flight | a layer | its own |
/// | [`on_limiter_event`](Self::on_limiter_event) | what happens to a limiter and its store | the limiter | those of its builder and of the layers over it, each once |
/// | [`on_store`](Self::on_store) | a store whose load can be read | the limiter | the same |
/// | | a limiter's errors, as [`Failed`](LimiterEvent::Failed) | a layer | its own |
/// | [`on_rules`](Self::on_rules) | rules of a file that a layer follows | a layer | its own |
/// | [`on_rules_event`](Self::on_rules_event) | rules of a file that are loaded, refused or unused | the rules | those of the layers that use the rules |
/// | [`on_fleet_event`](Self::on_fleet_event) | the operators' settings for all processes | the fleet | those of `Fleet::observe` |
///
/// A layer passes its observer to its limiter when the layer is first used.
///
/// # Counts beside an observer of your own
///
/// A layer has one observer. If you also need counts, keep a [`Stats`](crate::guide::observing) in your observer and
/// call its methods:
///
/// ```
/// # #[cfg(feature = "stats")] {
/// use tower_ratelimit::clock::Timestamp;
/// use tower_ratelimit::limiter::StoreLoadReader;
/// use tower_ratelimit::observe::{
///     FleetEvent, LayerEvent, LimiterEvent, Observed, Observer, RulesEvent, RulesReader,
///     SetupWarning, Stats,
/// };
/// use tower_ratelimit::{Key, Policy};
///
/// struct Own(Stats);
///
/// impl Observer for Own {
///     fn on_outcome(&self, observed: &Observed<'_>) {
///         self.0.on_outcome(observed);
///         // Your own work.
///     }
///
///     fn on_layer_event(&self, event: &LayerEvent) {
///         self.0.on_layer_event(event);
///     }
///
///     fn on_place_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
///         self.0.on_place_taken(policy, key, units)
///     }
///
///     fn on_place_returned(
///         &self,
///         policy: &Policy,
///         key: &Key,
///         units: u64,
///         taken_at: Timestamp,
///     ) {
///         self.0.on_place_returned(policy, key, units, taken_at);
///     }
///
///     fn on_limiter_event(&self, event: &LimiterEvent) {
///         self.0.on_limiter_event(event);
///     }
///
///     fn on_store(&self, load: &StoreLoadReader) {
///         self.0.on_store(load);
///     }
///
///     fn on_rules(&self, rules: &RulesReader) {
///         self.0.on_rules(rules);
///     }
///
///     fn on_rules_event(&self, event: &RulesEvent) {
///         self.0.on_rules_event(event);
///     }
///
///     fn on_fleet_event(&self, event: &FleetEvent) {
///         self.0.on_fleet_event(event);
///     }
///
///     fn on_setup_warning(&self, setup_warning: &SetupWarning) {
///         self.0.on_setup_warning(setup_warning);
///     }
/// }
/// # }
/// ```
///
/// `Stats` does not count calls that you do not forward. The changelog says when a version adds a
/// method to `Observer`. Forward such a method, too.
///
/// Put an observer of your own into an `Arc` to set it on several layers. An `Arc` and its clones
/// count as one observer. Without the `Arc` each layer has an observer of its own, and a limiter
/// that the layers share reports each event to each of these observers.
///
/// Two of the methods are called often: `on_limiter_event` with a
/// [`StoreChecked`](crate::observe::LimiterEvent::StoreChecked) for each check of Redis or another
/// store, and `on_layer_event` twice for each request that waits. Do not print every event.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an observer",
    note = "use `observe::Stats` (feature `stats`), or implement `Observer` for a type of your own",
    note = "a closure is not an observer, because an observer has several methods, such as `on_outcome`"
)]
pub trait Observer: Send + Sync {
    /// Called when a request was decided.
    fn on_outcome(&self, observed: &Observed<'_>) {
        let _ = observed;
    }

    /// Called before [`on_outcome`](Self::on_outcome) if the layer has only one policy, which is always enforced, and
    /// this policy allows the request. `key` is the key that was charged, `taken` are the units that the request
    /// took, and `is_near` is the value of [`PolicyStatus::is_near`].
    ///
    /// Return `true` if the observer does not need the [`Outcome`]. After `true`, the layer neither makes the
    /// outcome nor calls `on_outcome`. Making the outcome would take longer than the usual decision. The default
    /// returns `false`.
    ///
    /// A layer may skip `on_allowed` and call only `on_outcome`.
    fn on_allowed(&self, policy: &Policy, key: &Key, taken: u64, is_near: bool) -> bool {
        let _ = (policy, key, taken, is_near);
        false
    }

    /// Called when a layer detects a likely misconfiguration: once for each layer and kind.
    ///
    /// By default the warning is reported as if there were no observer; see [`SetupWarning`].
    fn on_setup_warning(&self, setup_warning: &SetupWarning) {
        setup_warning.report();
    }

    /// Called when something other than an outcome happened in a layer. A layer with a timer calls this method twice
    /// for each request that waits and for each body that has a pace.
    fn on_layer_event(&self, event: &LayerEvent) {
        let _ = event;
    }

    /// Called when a request has taken units of a [concurrency limit](crate::Quota::concurrent). Return the current
    /// time of your own clock. [`on_place_returned`](Self::on_place_returned) gets the returned time when the units are
    /// returned. The default returns zero.
    ///
    /// Places that are held without a layer, for example by [`MemoryLimiter::hold`](crate::MemoryLimiter::hold), are
    /// not reported.
    fn on_place_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
        let _ = (policy, key, units);
        Timestamp::from_micros(0)
    }

    /// Called once for each [`on_place_taken`](Self::on_place_taken), when the units are returned. `taken_at` is the
    /// instant that `on_place_taken` returned.
    fn on_place_returned(&self, policy: &Policy, key: &Key, units: u64, taken_at: Timestamp) {
        let _ = (policy, key, units, taken_at);
    }

    /// Called when something happened to a limiter.
    ///
    /// A limiter on Redis reports an event for each check, so print only the events that you need.
    fn on_limiter_event(&self, event: &LimiterEvent) {
        let _ = event;
    }

    /// Called once when a limiter with a store, such as Redis, begins to report to this observer. The load of the store
    /// has no events: read it from `load` at any time.
    fn on_store(&self, load: &StoreLoadReader) {
        let _ = load;
    }

    /// Called when a layer with rules of a file begins to report to this observer. `rules` returns at any time which
    /// rules are in force. Layers with the same rules pass the same reader.
    fn on_rules(&self, rules: &RulesReader) {
        let _ = rules;
    }

    /// Called when rules of a file came into force, or were refused.
    ///
    /// By default, the error of refused rules is reported as if there were no observer; see [`RulesEvent`].
    fn on_rules_event(&self, event: &RulesEvent) {
        event.report();
    }

    /// Called when the operators' settings for all processes came into force, or could not be read.
    fn on_fleet_event(&self, event: &FleetEvent) {
        let _ = event;
    }

    /// Returns a number that identifies this observer: by default the memory address of this value.
    ///
    /// A limiter reports each event once to observers with the same number, so that several layers can pass one
    /// observer to one limiter. If the clones of an observer share their state, return the memory address of that
    /// state, so that all clones have the same number. [`Stats`](crate::guide::observing) does so. An `Arc` of an
    /// observer returns the number of the observer in it.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).cast::<()>().addr()
    }
}

#[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
impl<O: Observer + ?Sized> Observer for std::sync::Arc<O> {
    fn on_outcome(&self, observed: &Observed<'_>) {
        (**self).on_outcome(observed);
    }

    fn on_allowed(&self, policy: &Policy, key: &Key, taken: u64, is_near: bool) -> bool {
        (**self).on_allowed(policy, key, taken, is_near)
    }

    fn on_setup_warning(&self, setup_warning: &SetupWarning) {
        (**self).on_setup_warning(setup_warning);
    }

    fn on_layer_event(&self, event: &LayerEvent) {
        (**self).on_layer_event(event);
    }

    fn on_place_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
        (**self).on_place_taken(policy, key, units)
    }

    fn on_place_returned(&self, policy: &Policy, key: &Key, units: u64, taken_at: Timestamp) {
        (**self).on_place_returned(policy, key, units, taken_at);
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        (**self).on_limiter_event(event);
    }

    fn on_store(&self, load: &StoreLoadReader) {
        (**self).on_store(load);
    }

    fn on_rules(&self, rules: &RulesReader) {
        (**self).on_rules(rules);
    }

    fn on_rules_event(&self, event: &RulesEvent) {
        (**self).on_rules_event(event);
    }

    fn on_fleet_event(&self, event: &FleetEvent) {
        (**self).on_fleet_event(event);
    }

    fn identity(&self) -> usize {
        (**self).identity()
    }
}
