//! Rules: their names and quotas, the requests that they apply to, and the costs of these requests.

use std::fmt;
use std::sync::Arc;

use crate::base::head::Head;
use crate::error::{ConfigError, labelled};
use crate::explanation::NotCharged;
use crate::mode::ModeSwitch;
use crate::policy::{CONTENT_BYTES, Part, Policy};
use crate::quota::Quota;

use super::paced_bodies::PacedBodies;
use super::path::PathPattern;
use super::settlement::Settlement;
use super::switch::QuotaSwitch;

/// A closure of the application over a request's head.
pub(crate) type Read<T> = Arc<dyn Fn(&Head<'_>) -> T + Send + Sync>;

/// A *named* quota with its options: the requests that it applies to, their costs, and the
/// treatment of a request without a key.
///
/// By default a rule applies to every request, each request costs 1, and a request without a key is
/// refused. The name appears in headers and metrics, and is part of the stored state.
///
/// A layer accepts a [`Quota`] in place of a rule. The quota becomes a rule that is named after the
/// quota's words: `100-per-minute`.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, MissingKey, Quota, RateLimitLayer, Rule, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let search = Rule::new("search", Quota::per_second(10))?
///     .when(|request| request.uri.path().starts_with("/search"))
///     .cost(|request| if request.uri.query().is_some() { 2 } else { 1 });
/// let user = Rule::new("user", Quota::per_hour(1_000))?.missing_key(MissingKey::Shared);
///
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), search, key::peer_ip())
///     .and(user, key::bearer_token());
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a rule does nothing until a layer has it"]
pub struct Rule {
    /// At least one.
    pub(crate) policies: Vec<Policy>,
    /// Chooses the policy that applies. Without this closure, all policies apply.
    pub(crate) choose: Option<Read<Option<usize>>>,
    /// The conditions, all of which a request must meet.
    pub(crate) conditions: Vec<Condition>,
    /// The path patterns of the rule, if it has any. The layer finds its rules with an index of these
    /// patterns.
    pub(crate) paths: Vec<PathPattern>,
    pub(crate) cost: Option<Read<u64>>,
    pub(crate) missing_key: MissingKey,
    /// The rule's mode. Without a mode, the rule enforces.
    pub(crate) mode: Option<ModeSwitch>,
    pub(crate) warn_at_percent: Option<u8>,
    pub(crate) linked: Option<LinkedPolicy>,
    /// The switch that the quota of the only policy follows, if any.
    pub(crate) switch: Option<QuotaSwitch>,
    /// Reads the quota of each request, if requests bring their quotas. The only policy is then a
    /// placeholder.
    pub(crate) quota_from: Option<QuotaFrom>,
    pub(crate) settlement: Settlement,
    /// True if the held units of a concurrency limit are returned when the response's head is sent.
    pub(crate) until_head: bool,
    /// The bodies that the rule paces. A rule with a pace charges no request.
    pub(crate) pace: Option<PacedBodies>,
    /// The bytes of each body that do not wait for its pace.
    pub(crate) pace_after: u64,
}

/// A condition of a rule.
#[derive(Clone)]
pub(crate) struct Condition {
    /// The reason why the rule does not charge a request that does not meet this condition.
    pub(crate) of: NotCharged,
    /// Returns the words of the condition, if it has any. These words may say when the condition
    /// changes.
    pub(crate) expected: Option<Words>,
    pub(crate) holds: Read<bool>,
}

/// A closure that returns words.
pub(crate) type Words = Arc<dyn Fn() -> Box<str> + Send + Sync>;

/// Reads the quota of a request.
#[derive(Clone)]
pub(crate) struct QuotaFrom {
    pub(crate) read: Read<Option<Quota>>,
    /// The condition that a request without a quota does not meet.
    pub(crate) absent: Condition,
}

impl QuotaFrom {
    pub(crate) fn new<F, Q>(quota: F) -> Self
    where
        F: Fn(&Head<'_>) -> Q + Send + Sync + 'static,
        Q: IntoQuota,
    {
        let read: Read<Option<Quota>> = Arc::new(move |head| quota(head).into());
        Self { read, absent: Condition { of: NotCharged::NoQuota, expected: None, holds: Arc::new(|_| false) } }
    }
}

/// A policy that is charged together with a rule's own policies.
#[derive(Clone, Debug)]
pub(crate) struct LinkedPolicy {
    pub(crate) policy: Policy,
    pub(crate) role: LinkedRole,
}

/// The role of a linked policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkedRole {
    /// The policy counts refusals by the rule's own policies.
    Block,
    /// The policy counts units beyond the rule's own quota.
    Meter,
}

impl Rule {
    /// Makes a rule of this name, which applies the quota to every request.
    ///
    /// # Errors
    /// Returns an error if the name is empty, longer than 128 characters, or not printable ASCII,
    /// because it is part of headers.
    pub fn new(name: impl Into<String>, quota: Quota) -> Result<Self, ConfigError> {
        Policy::new(name, quota).map(Self::from)
    }

    /// Makes a rule of several quotas that a request must all meet, such as 60 per minute, 1,000
    /// per hour and 10,000 per day.
    ///
    /// The quotas share the key, the cost, the condition and the other settings of the rule. A request
    /// is charged to all of the quotas or to none. Each quota is a policy of its own, so that headers,
    /// refusals and metrics distinguish them.
    ///
    /// In a rule `client`, the policy of a quota with the name `burst` is called `client-burst`. The
    /// policy of a quota without a name is called after the quota's words, `client-10-per-second`.
    /// Give the quotas names if clients, dashboards or alerts depend on them, because the words change
    /// with the quota.
    ///
    /// When a quota changes, its usage is kept. A quota with a name is recognised by its name, and a
    /// quota without a name by its place in the list. So append to a list without names, or give names
    /// before you change the order. The first quota without a name keeps the usage of a
    /// [`Rule::new`](Self::new) with the name of this rule.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quotas = [("burst", Quota::per_second(10)), ("month", "10000 per 30 days".parse()?)];
    /// let client = Rule::all_of("client", quotas)?;
    /// assert_eq!(client.policies()[1].name(), "client-month");
    ///
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no quota, if two quotas count alike or have the same name, or if a
    /// policy's name would be invalid; see [`new`](Self::new). The words of a usual quota add about 15
    /// characters to the name.
    pub fn all_of<P: Into<Part>>(
        name: impl AsRef<str>,
        quotas: impl IntoIterator<Item = P>,
    ) -> Result<Self, ConfigError> {
        Policy::each(name.as_ref(), quotas).map(Self::of)
    }

    /// Makes a rule of several plans, of which each request has one: free, pro and enterprise
    /// customers have different quotas under one name. `choose` returns the plan's index in
    /// `quotas`. It may return an `Option`.
    ///
    /// The first quota applies if `choose` returns `None` or an index that does not exist, so no
    /// request is unlimited by mistake. Put the strictest quota first. To exempt requests, see
    /// [`when`](Self::when).
    ///
    /// When the plan of a key changes, its usage is kept:
    ///
    /// * A client that has used 80 of 100 and upgrades to 1,000 has 920 left.
    /// * A client that downgrades with more usage than the smaller plan allows must wait until enough of
    ///   its usage has expired. Until a request is admitted under the smaller plan, usage expires at the
    ///   larger plan's pace. The reported wait counts with the smaller plan's pace, so it can be far
    ///   longer than needed; see [the rules](crate::quota#when-a-quota-changes).
    /// * Each quota gets the [debt](Quota::max_debt) that it needs to keep the usage of the largest
    ///   quota, up to the maximum debt.
    /// * Each change may round the used amount up by less than a unit, never down. So changing back
    ///   and forth gains nothing. All requests of one key should have the same plan.
    /// * A quota of 0 remembers nothing.
    ///
    /// Alternatives:
    ///
    /// * [`plans_in_proportion`](Self::plans_in_proportion) keeps the used share instead of the
    ///   amount.
    /// * If each plan should start with a fresh allowance, make the plan a part of the key:
    ///   `Key::of((customer, plan))`.
    /// * [`Overrides`](crate::middleware::Overrides) gives single keys another plan while the service
    ///   runs.
    /// * [`quota_from`](Self::quota_from) takes quotas that are not a fixed list.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    ///
    /// #[derive(Clone, Copy)]
    /// enum Plan {
    ///     Free,
    ///     Pro,
    ///     Enterprise,
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quotas = [Quota::per_minute(10), Quota::per_minute(300), Quota::per_minute(5_000)];
    /// let customer = Rule::plans("customer", quotas, |request| {
    ///     request.extensions.get::<Plan>().map(|plan| *plan as usize) // no plan: as `Free`
    /// })?;
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// An enum is not an index. Without `as usize` the rule does not compile, and the compiler's message says so:
    ///
    /// ```compile_fail,E0277
    /// # use tower_ratelimit::{Quota, Rule};
    /// # #[derive(Clone, Copy)]
    /// # enum Plan { Free }
    /// # let quotas = [Quota::per_minute(10), Quota::per_minute(300)];
    /// let customer = Rule::plans("customer", quotas, |request| request.extensions.get::<Plan>().copied());
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no quota, or if the name is invalid; see [`new`](Self::new).
    #[doc(alias = "overrides")]
    pub fn plans<F, P>(
        name: impl AsRef<str>,
        quotas: impl IntoIterator<Item = Quota>,
        choose: F,
    ) -> Result<Self, ConfigError>
    where
        F: Fn(&Head<'_>) -> P + Send + Sync + 'static,
        P: IntoPlan,
    {
        let choose: Read<Option<usize>> = Arc::new(move |parts| choose(parts).into());
        Ok(Self { choose: Some(choose), ..Self::of(Policy::named_plans(name.as_ref(), quotas)?) })
    }

    /// Makes a rule of several plans like [`plans`](Self::plans), but keeps the used share instead
    /// of the used amount when a key's plan changes. A client that has used 60 of 100 and upgrades
    /// to 1,000 has 400 left. If the client then downgrades, it has 40 left.
    ///
    /// * The share is the used amount divided by the old plan's capacity. The new plan then counts
    ///   the same share of its own capacity as used, rounded up by less than a unit. A client that
    ///   takes 1 of 1,000 and changes to a plan of 10 in a fixed window has 9 left.
    /// * The shares that a key takes at one instant, from all its plans together, add up to at most
    ///   one whole. So a key that changes its plan never gets more than its largest plan alone
    ///   would give. All requests of one key should have the same plan, because each change may
    ///   cost a unit.
    /// * Debts are kept as shares as well. So under each plan, a key may owe the same share of the capacity.
    /// * A change converts the units that are in use at that instant. Units that an ending
    ///   sub-window no longer counts are forgotten.
    /// * A quota of 0 remembers nothing.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quotas = [Quota::per_hour(100), Quota::per_hour(1_000)];
    /// let customer = Rule::plans_in_proportion("customer", quotas, |request| {
    ///     usize::from(request.headers.contains_key("x-paid"))
    /// })?;
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if there is no quota, if the name is invalid (see [`new`](Self::new)), or if a
    /// quota is a block or a meter (see [`Quota::in_proportion`]).
    pub fn plans_in_proportion<F, P>(
        name: impl AsRef<str>,
        quotas: impl IntoIterator<Item = Quota>,
        choose: F,
    ) -> Result<Self, ConfigError>
    where
        F: Fn(&Head<'_>) -> P + Send + Sync + 'static,
        P: IntoPlan,
    {
        let choose: Read<Option<usize>> = Arc::new(move |parts| choose(parts).into());
        Ok(Self { choose: Some(choose), ..Self::of(Policy::named_plans_in_proportion(name.as_ref(), quotas)?) })
    }

    /// Makes a rule whose quota each request brings. For example, one customer has 7,300 requests a
    /// minute, and another customer has a quota from the database. `quota` reads the quota from the
    /// request's head, for example from the [extensions](field@Head::extensions) into which an outer
    /// layer put the customer. `quota` may return a `Quota` or an `Option`. The rule does not apply
    /// to a request for which `quota` returns `None`.
    ///
    /// When the quota of a key changes, its usage is kept, as with [plans](Self::plans):
    ///
    /// * A client that has used 80 of 100 and is given 1,000 has 920 left.
    /// * A client that has used more than its new quota allows must wait until enough of its usage
    ///   has expired. Until a request is admitted under the new quota, usage expires at the old
    ///   quota's pace. The reported wait counts with the new quota's pace, so it can be far longer or
    ///   shorter than needed; see [the rules](crate::quota#when-a-quota-changes).
    /// * A quota can keep usage up to the sum of its capacity and its [debt](Quota::max_debt). By
    ///   default, the debt is as large as the capacity. While more than this sum is in use, a refund or
    ///   a settlement has no effect. The rule does not know the other quotas, so it cannot choose a
    ///   larger debt. You can choose one with [`Quota::max_debt`].
    /// * A request is settled and refunded under the quota to which it was charged. If the key got
    ///   a larger quota meanwhile, this smaller quota may have no room for the units that were used
    ///   since the change. The settled units are then forgotten.
    /// * Usage is kept between quotas of rates. A rate and a [concurrency limit](Quota::concurrent)
    ///   count different things, and do not share their usage.
    ///
    /// [`Overrides`](crate::middleware::Overrides) gives single keys another quota for a time, and
    /// [`Quota::unlimited`] counts and never refuses.
    ///
    /// A quota is compiled when a request first brings it. A layer keeps about 2,000 compiled quotas of
    /// each rule. Beyond this number, each request compiles its own quota, which takes about a
    /// microsecond; nothing else changes.
    ///
    /// When a request brings a quota for the first time, the layer checks the quota as it checks the
    /// quotas of other rules. For example, it checks that the quota remembers a debt if the rule is
    /// settled by usage. The layer's observer gets at most one [warning](crate::observe::SetupWarning) of
    /// each kind, and [`check`](crate::RateLimitLayer::check) returns the first warning. A request with a
    /// quota that the limiter does not [support](crate::limiter::Limiter::supports) is decided as if the
    /// limiter had failed.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    ///
    /// #[derive(Clone)]
    /// struct Customer {
    ///     quota: Quota, // read from the database, and checked there
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let customer = Rule::quota_from("customer", |request| {
    ///     let known = request.extensions.get::<Customer>();
    ///     known.map_or(Quota::per_minute(60), |customer| customer.quota) // never unlimited
    /// })?;
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the name is invalid; see [`new`](Self::new).
    #[doc(alias = "overrides")]
    pub fn quota_from<F, Q>(name: impl Into<String>, quota: F) -> Result<Self, ConfigError>
    where
        F: Fn(&Head<'_>) -> Q + Send + Sync + 'static,
        Q: IntoQuota,
    {
        let policy = Policy::of_requests(name)?;
        Ok(Self { quota_from: Some(QuotaFrom::new(quota)), ..Self::from(policy) })
    }

    /// Makes a rule whose quota follows a [`QuotaSwitch`].
    ///
    /// # Errors
    /// Returns an error if the name is invalid; see [`new`](Self::new).
    pub fn switched(name: impl Into<String>, quota: &QuotaSwitch) -> Result<Self, ConfigError> {
        let policy = Policy::new(name, quota.compiled())?.following(quota.compiled(), quota.id());
        Ok(Self { switch: Some(quota.clone()), ..Self::from(policy) })
    }

    /// Applies the rule only to requests for which `predicate` holds. If this method is called
    /// several times, all predicates must hold.
    ///
    /// A request to which no rule of a layer applies is exempt: it passes and gets no rate limit
    /// headers.
    ///
    /// Inside axum's `nest` the path of a request lacks the prefix. Test
    /// [`key::original_uri(request)`](crate::key::original_uri) there.
    pub fn when(mut self, predicate: impl Fn(&Head<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.conditions.push(Condition { of: NotCharged::Condition, expected: None, holds: Arc::new(predicate) });
        self
    }

    /// Sets the cost of a request, in units. If a unit is not a request, state the unit with
    /// [`unit`](Self::unit).
    ///
    /// * A request with a cost of 0 only peeks: it passes and takes nothing, unless its key is
    ///   [blocked](Self::block). A rule that is [settled](Self::settle_by_usage) later reserves one
    ///   unit for such a request.
    /// * A request with a cost above the quota's capacity is refused for good, without
    ///   `Retry-After`.
    ///
    /// ```
    /// use tower_ratelimit::{Head, Quota, Rule};
    ///
    /// /// Returns the tokens that the client asks for.
    /// fn tokens(request: &Head<'_>) -> u64 {
    ///     let asked = request
    ///         .headers
    ///         .get("x-max-tokens")
    ///         .and_then(|tokens| tokens.to_str().ok()?.parse().ok());
    ///     asked.unwrap_or(1_000)
    /// }
    ///
    /// let rule = Rule::new("tokens", Quota::per_minute(30_000))?.unit("tokens")?.cost(tokens);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn cost(mut self, cost: impl Fn(&Head<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// States the unit of the rule's quotas, which is the meaning of a cost of 1. Clients see the unit in
    /// `RateLimit-Policy`, as `qu` of [`Headers::draft_11`](crate::Headers::draft_11), and in the details of gRPC
    /// refusals. The unit also chooses the headers of the policy in [`Headers::openai`](crate::Headers::openai),
    /// [`Headers::anthropic`](crate::Headers::anthropic) and [`Headers::for_unit`](crate::Headers::for_unit).
    ///
    /// Without this setting, a unit is a request, so a client would read a quota of a million bytes
    /// as a million requests. The draft defines `requests`, `content-bytes` and
    /// `concurrent-requests`. You can also use other units, such as `tokens`. The default of a rule
    /// that is [settled by the body](Self::settle_by_body) is `content-bytes`.
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens = Rule::new("tokens", Quota::per_hour(10_000))?
    ///     .unit("tokens")?
    ///     .cost(|_| 100)
    ///     .settle_by_usage();
    /// // RateLimit-Policy: "tokens";q=10000;qu="tokens";w=3600
    /// assert_eq!(tokens.policies()[0].unit(), "tokens");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the unit is empty, longer than 128 characters, or not printable ASCII.
    pub fn unit(mut self, unit: impl AsRef<str>) -> Result<Self, ConfigError> {
        for policy in &mut self.policies {
            *policy = policy.in_unit(unit.as_ref())?;
        }
        Ok(self)
    }

    /// States `content-bytes` as the unit, unless the rule states another unit.
    pub(crate) fn in_content_bytes(mut self) -> Self {
        for policy in self.policies.iter_mut().filter(|policy| !policy.has_unit()) {
            if let Ok(in_bytes) = policy.in_unit(CONTENT_BYTES) {
                *policy = in_bytes;
            }
        }
        self
    }

    /// Sets what happens to a request without a key.
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// Sets what the rule does with a request that is over its quota: a
    /// [`Mode`](crate::mode::Mode), or a [`ModeSwitch`] that changes the mode while requests are
    /// served.
    pub fn mode(mut self, mode: impl Into<ModeSwitch>) -> Self {
        self.mode = Some(mode.into());
        self
    }

    /// Warns when at most this percentage of the quota's capacity remains:
    /// [`is_near`](crate::outcome::PolicyStatus::is_near) is then true. The comparison is exact.
    /// Values above 100 count as 100: the rule always warns.
    ///
    /// An [`Observer`](crate::outcome::Observer) sees the outcome, and so does the service if the
    /// outcome is [exposed](crate::RateLimitLayer::expose_outcome).
    pub fn warn_at_percent(mut self, percent: u8) -> Self {
        self.warn_at_percent = Some(percent);
        self
    }

    /// Returns the policies: one, unless the rule has [several quotas](Self::all_of) or
    /// [plans](Self::plans). If each request [has its own quota](Self::quota_from), the only policy
    /// is [a placeholder](Policy::has_quota_of_request).
    #[must_use]
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// Returns an option of the rule that a client's own quota cannot have, if the rule has such an
    /// option.
    #[cfg(feature = "client")]
    pub(crate) fn option_of_servers(&self) -> Option<&'static str> {
        let options = [
            (self.mode.is_some(), "a mode"),
            (self.linked.is_some(), "a block or a meter"),
            (self.switch.is_some(), "a quota switch"),
            (
                self.quota_from.is_some() || self.policies.iter().any(Policy::has_quota_of_request),
                "a quota from each request (Rule::quota_from)",
            ),
            (!self.settlement.is_none(), "a settlement"),
            (self.warn_at_percent.is_some(), "a warning (warn_at_percent)"),
            (self.missing_key != MissingKey::default(), "an answer to missing keys"),
            (!self.paths.is_empty(), "path patterns"),
            (self.until_head, "a limit of requests in flight until the head (until_head)"),
            (self.pace.is_some(), "a pace of bodies (pace_responses or pace_requests)"),
        ];
        options.into_iter().find_map(|(is_set, option)| is_set.then_some(option))
    }

    /// Makes the rule apply to no request.
    #[cfg(feature = "rules")]
    pub(crate) fn disabled(mut self) -> Self {
        self.conditions = vec![Condition { of: NotCharged::Disabled, expected: None, holds: Arc::new(|_| false) }];
        self
    }

    /// Returns whether the rule applies to no request.
    pub(crate) fn is_disabled(&self) -> bool {
        self.conditions.first().is_some_and(|condition| condition.of == NotCharged::Disabled)
    }

    /// Replaces the rule's quota with the quota that its switch has now.
    pub(crate) fn follow_switch(&mut self) {
        if let (Some(switch), Some(policy)) = (&self.switch, self.policies.first_mut()) {
            *policy = policy.following(switch.compiled(), switch.id());
        }
    }

    fn of(policies: Vec<Policy>) -> Self {
        Self {
            policies,
            choose: None,
            conditions: Vec::new(),
            paths: Vec::new(),
            cost: None,
            missing_key: MissingKey::default(),
            mode: None,
            warn_at_percent: None,
            linked: None,
            switch: None,
            quota_from: None,
            settlement: Settlement::default(),
            until_head: false,
            pace: None,
            pace_after: 0,
        }
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule")
            .field("policies", &self.policies)
            .field("linked", &self.linked)
            .field("missing_key", &self.missing_key)
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

labelled! {
    /// Says what a rule does with a request whose extractor found no key.
    #[derive(Default)]
    MissingKey,
    /// Returns the label for files.
    as_str {
        /// The request is refused with 400, or `INVALID_ARGUMENT` over gRPC, and no policy of the layer is charged. If
        /// the key is the peer's address and the server does not provide it, the status is 500, or `INTERNAL`.
        ///
        /// This is the default, because with both other choices a client can evade a limit by leaving
        /// its key out.
        #[default]
        Reject = "reject",
        /// All requests without a key share one allowance of this rule. No key that an extractor
        /// returns is equal to the key of these requests.
        Shared = "shared",
        /// The rule does not apply to the request.
        Exempt = "exempt",
    }
}

/// A value that a layer accepts as a rule: a [`Quota`] or a [`Rule`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a quota or a rule",
    note = "`Rule::new` and the options of a `Quota` return a `Result`: is a `?` missing?",
    note = "for text, use `text.parse::<Quota>()?`, and for a number, a constructor such as `Quota::per_minute(100)`"
)]
pub trait IntoRule {
    /// Returns the rule.
    fn into_rule(self) -> Rule;
}

impl IntoRule for Rule {
    fn into_rule(self) -> Rule {
        self
    }
}

impl IntoRule for Quota {
    fn into_rule(self) -> Rule {
        self.into()
    }
}

/// A value that a rule of [plans](Rule::plans) accepts as the index of a plan: a `usize` or an `Option<usize>`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the index of a plan",
    note = "return the index of the plan's quota, a `usize` or an `Option<usize>`; for an enum in the order of the \
            quotas, return `plan as usize`"
)]
pub trait IntoPlan: Into<Option<usize>> {}

// Without this attribute, the compiler would report a missing `Into`, and would not list the values to return.
#[diagnostic::do_not_recommend]
impl<P: Into<Option<usize>>> IntoPlan for P {}

/// A value that a rule of [quotas that requests bring](Rule::quota_from) accepts: a [`Quota`] or an `Option<Quota>`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a quota",
    note = "return a `Quota` or an `Option<Quota>`; the rule does not apply to a request with `None`",
    note = "the options of a `Quota` return a `Result`: in the closure, turn an error into a quota, for example with \
            `unwrap_or`"
)]
pub trait IntoQuota: Into<Option<Quota>> {}

// Without this attribute, the compiler would report a missing `Into`, and would not list the values to return.
#[diagnostic::do_not_recommend]
impl<Q: Into<Option<Quota>>> IntoQuota for Q {}

impl From<Quota> for Rule {
    /// Returns a rule that is named after the quota's words; see [`Policy::from`](Policy#impl-From<Quota>-for-Policy).
    fn from(quota: Quota) -> Self {
        Policy::from(quota).into()
    }
}

impl From<Policy> for Rule {
    /// Returns a rule with this policy. Use such a rule if you also ask the limiter about the
    /// policy.
    fn from(policy: Policy) -> Self {
        Self::of(vec![policy])
    }
}
