//! A rule of a layer: a policy, to which requests it applies, and what a request costs.

use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use super::after::After;
use super::companions::Companion;
use super::switch::QuotaSwitch;
use crate::mode::ModeSwitch;
use crate::policy::{CONTENT_BYTES, Policy, PolicyError};
use crate::quota::Quota;

pub(super) type Read<T> = Arc<dyn Fn(&Parts) -> T + Send + Sync>;

/// A policy as a layer applies it: to which requests, at what cost, and what becomes of a request that has no key.
///
/// Without more said, a policy applies to every request, each costs 1, and one without a key is refused. A [`Quota`] and
/// a [`Policy`] are therefore rules too, wherever a layer asks for one.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, MissingKey, Policy, Quota, RateLimitLayer, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let search = Policy::new("search", Quota::per_second(10))?
///     .when(|request| request.uri.path().starts_with("/search"))
///     .cost(|request| if request.uri.query().is_some() { 2 } else { 1 });
/// let user = Policy::new("user", Quota::per_hour(1_000))?.missing_key(MissingKey::Shared);
///
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), search, key::peer_ip()).and(user, key::bearer_token());
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Rule {
    /// At least one.
    pub(super) policies: Vec<Policy>,
    /// Which of the policies applies; without it all do.
    pub(super) choose: Option<Read<Option<usize>>>,
    pub(super) when: Option<Read<bool>>,
    pub(super) cost: Option<Read<u64>>,
    pub(super) missing_key: MissingKey,
    /// Without it the rule enforces.
    pub(super) mode: Option<ModeSwitch>,
    pub(super) near_percent: Option<u8>,
    pub(super) companion: Option<Companion>,
    /// What the quota of the only policy follows.
    pub(super) switch: Option<QuotaSwitch>,
    pub(super) after: After,
}

impl Rule {
    /// A rule that applies the policy to every request.
    #[must_use]
    pub fn new(policy: impl IntoRule) -> Self {
        policy.into_rule()
    }

    /// Applies the rule only to requests for which `predicate` holds. Called more than once, all predicates must hold.
    ///
    /// A request that no rule of a layer applies to is exempt: it passes, and gets no rate-limit header fields.
    ///
    /// Inside of axum's `nest` the path of a request lacks the prefix: test
    /// [`key::original_uri(request)`](crate::key::original_uri) there.
    #[must_use]
    pub fn when(mut self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.when = Some(match self.when.take() {
            None => Arc::new(predicate),
            Some(earlier) => Arc::new(move |parts: &Parts| earlier(parts) && predicate(parts)),
        });
        self
    }

    /// Sets what a request costs, in units. If a unit is not a request, state it by [`unit`](Self::unit).
    ///
    /// A cost of 0 passes at once and takes nothing, unless the key is [blocked](Self::block). In a rule that is
    /// [settled](Self::settle_by_bill) later, 0 reserves one unit. A cost above the quota's capacity is refused for good,
    /// with no `Retry-After`.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// States the unit of the rule's quotas: what a cost of 1 stands for. Clients are told in `RateLimit-Policy`
    /// ([`Headers::draft_11`](crate::Headers::draft_11), as `qu`) and in the details of gRPC refusals.
    ///
    /// Without it a unit is a request, so a client would take a quota of a million bytes for a million requests. The draft
    /// knows `requests`, `content-bytes` and `concurrent-requests`; a unit may also be your own, such as `tokens`. A rule
    /// that is [settled by the body](Self::settle_by_body) has `content-bytes` by itself.
    ///
    /// ```
    /// use tower_ratelimit::{Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens = Policy::new("tokens", Quota::per_hour(10_000))?.unit("tokens")?.cost(|_| 100).settle_by_bill();
    /// // RateLimit-Policy: "tokens";q=10000;qu="tokens";w=3600
    /// assert_eq!(tokens.policies()[0].quota_unit(), "tokens");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the unit is empty, longer than 128 characters, or has others than printable ASCII.
    pub fn unit(mut self, unit: impl AsRef<str>) -> Result<Self, PolicyError> {
        for policy in &mut self.policies {
            *policy = policy.in_unit(unit.as_ref())?;
        }
        Ok(self)
    }

    /// Its quotas are in bytes of bodies, unless it states another unit.
    pub(super) fn in_content_bytes(mut self) -> Self {
        for policy in self.policies.iter_mut().filter(|policy| !policy.has_unit()) {
            if let Ok(in_bytes) = policy.in_unit(CONTENT_BYTES) {
                *policy = in_bytes;
            }
        }
        self
    }

    /// Sets what becomes of a request that has no key.
    #[must_use]
    pub fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// Sets what the rule does with a request that is over its quota: a [`Mode`](crate::Mode), or a [`ModeSwitch`] by which
    /// it can be changed while requests come.
    ///
    /// It is asked for each request that the rule applies to, which costs one load.
    #[must_use]
    pub fn mode(mut self, mode: impl Into<ModeSwitch>) -> Self {
        self.mode = Some(mode.into());
        self
    }

    /// Says when a warning is due: the outcome [is near](crate::Standing::is_near) when no more remains than so many percent
    /// of the quota's capacity, compared exactly, without rounding. Above 100 is as 100: always.
    ///
    /// The outcome reaches an [`Observer`](crate::Observer), and the service if it is
    /// [exposed](crate::RateLimitLayer::expose_outcome).
    #[must_use]
    pub fn near_percent(mut self, percent: u8) -> Self {
        self.near_percent = Some(percent);
        self
    }

    /// The policies: one, unless the rule is of [several quotas](Policy::several) or [plans](Policy::choose).
    #[must_use]
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    fn of(policies: Vec<Policy>) -> Self {
        Self {
            policies,
            choose: None,
            when: None,
            cost: None,
            missing_key: MissingKey::default(),
            mode: None,
            near_percent: None,
            companion: None,
            switch: None,
            after: After::default(),
        }
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule")
            .field("policies", &self.policies)
            .field("chosen", &self.choose.is_some())
            .field("conditional", &self.when.is_some())
            .field("costed", &self.cost.is_some())
            .field("missing_key", &self.missing_key)
            .field("mode", &self.mode)
            .field("near_percent", &self.near_percent)
            .field("companion", &self.companion)
            .field("switch", &self.switch)
            .field("after", &self.after)
            .finish()
    }
}

/// What becomes of a request whose key is missing: its extractor found none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingKey {
    /// It is refused: `400 Bad Request`, or the gRPC equal of it, and nothing is taken from any policy of the layer.
    ///
    /// The default, since both other choices can be used to pass a limit by leaving the key out.
    #[default]
    Reject,
    /// All requests without a key share one allowance of this policy. It is nobody else's: no key that an extractor
    /// returns is equal to it.
    Shared,
    /// This rule does not apply to it.
    Exempt,
}

/// What can stand where a layer asks for a rule: a [`Quota`], a [`Policy`], or a [`Rule`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a quota, a policy or a rule",
    note = "`Policy::new` returns a `Result`: is a `?` missing?"
)]
pub trait IntoRule {
    /// The rule.
    fn into_rule(self) -> Rule;
}

impl IntoRule for Rule {
    fn into_rule(self) -> Rule {
        self
    }
}

impl IntoRule for Policy {
    fn into_rule(self) -> Rule {
        Rule::of(vec![self])
    }
}

impl IntoRule for &Policy {
    fn into_rule(self) -> Rule {
        self.clone().into_rule()
    }
}

impl IntoRule for Quota {
    fn into_rule(self) -> Rule {
        Policy::from(self).into_rule()
    }
}

impl Policy {
    /// A rule of several quotas that a request must all meet: 60 per minute, and 1,000 per hour, and 10,000 per day.
    ///
    /// They have the key, the cost, the condition and the answer to a missing key in common; the key is extracted once. As
    /// with everything in a layer, a request takes from all of them or from none. Each is a policy of its own, named after
    /// `name` and its words, so that header fields, refusals and metrics tell them apart.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quotas = [Quota::per_minute(60), Quota::per_hour(1_000), Quota::per_day(10_000)];
    /// let client = Policy::several("client", quotas)?;
    /// assert_eq!(client.policies()[1].name(), "client-1000-per-hour");
    ///
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If there is no quota, if two count alike, or if a policy's name would not be as [`Policy::new`] wants it: the
    /// words of a quota count too, about 15 characters for a usual one.
    pub fn several(name: impl AsRef<str>, quotas: impl IntoIterator<Item = Quota>) -> Result<Rule, PolicyError> {
        Self::each(name.as_ref(), quotas).map(Rule::of)
    }

    /// A rule of several plans, of which each request is under one: free, pro and enterprise customers have quotas of their
    /// own under one name. `choose` returns the plan's place in `quotas`, from 0; it may return an `Option`.
    ///
    /// The first quota is for whoever has no known plan: it applies where `choose` returns `None` or a place that is not
    /// there, so that nobody is unlimited by mistake. Put the strictest first. To exempt requests, see [`Rule::when`].
    ///
    /// When the plan of a key changes, the amount that it has used is kept: who has used 80 of 100 and upgrades to 1,000
    /// has 920 left. Who goes back with more used than the smaller plan has in all waits until enough of it is over, at
    /// the smaller plan's pace. To this end each quota is given the [debt](Quota::max_debt) that the largest one needs, as
    /// far as one may go. Each change may round the used amount up by as much as a unit, never down, so changing back and
    /// forth gains nothing; but all requests of one key should be of one plan. A quota of 0 remembers nothing.
    ///
    /// To keep the share instead of the amount there is [`choose_in_proportion`](Self::choose_in_proportion).
    ///
    /// Where each plan is to begin afresh instead, make the plan a part of the key: `Key::of((customer, plan))`. Then each
    /// plan of a key has a state of its own, on every limiter, and who comes back to a plan finds what it had used of it.
    /// For single keys with a plan of their own, changed while the service runs, there are
    /// [`PlanOverrides`](super::PlanOverrides).
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
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
    /// let customer = Policy::choose("customer", quotas, |request| {
    ///     request.extensions.get::<Plan>().map(|plan| *plan as usize) // no plan: as `Free`
    /// })?;
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If there is no quota, or if the name is not as [`Policy::new`] wants it.
    pub fn choose<F, P>(
        name: impl AsRef<str>,
        quotas: impl IntoIterator<Item = Quota>,
        choose: F,
    ) -> Result<Rule, PolicyError>
    where
        F: Fn(&Parts) -> P + Send + Sync + 'static,
        P: Into<Option<usize>>,
    {
        let choose: Read<Option<usize>> = Arc::new(move |parts| choose(parts).into());
        Ok(Rule { choose: Some(choose), ..Rule::of(Self::plans(name.as_ref(), quotas)?) })
    }

    /// A rule of several plans as [`choose`](Self::choose) makes it, where the share that a key has used is kept when its
    /// plan changes, and not the amount: who has used 60 of 100 and upgrades to 1,000 has 400 left, and who then goes back
    /// has 40.
    ///
    /// The share is of each plan's capacity, and rounded up, by less than a unit of the plan that is changed to: who takes
    /// 1 of 1,000 and changes to a plan of 10 in a fixed window has 9 left. So whatever a key changes to and back, the shares
    /// that it takes at one instant make no more than one whole: it never gets more than one plan alone would give it. All
    /// requests of one key should be of one plan, or each change may cost a unit.
    ///
    /// Debts are shares, too, so each plan may owe as large a part of its capacity as any other may. In windows and logs, what
    /// comes from another plan counts as used when it is met. A quota of 0 remembers nothing.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quotas = [Quota::per_hour(100), Quota::per_hour(1_000)];
    /// let customer = Policy::choose_in_proportion("customer", quotas, |request| {
    ///     usize::from(request.headers.contains_key("x-paid"))
    /// })?;
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If there is no quota, if the name is not as [`Policy::new`] wants it, or if a quota is a block or a meter, of whose
    /// units a share means nothing: see [`Quota::in_proportion`].
    pub fn choose_in_proportion<F, P>(
        name: impl AsRef<str>,
        quotas: impl IntoIterator<Item = Quota>,
        choose: F,
    ) -> Result<Rule, PolicyError>
    where
        F: Fn(&Parts) -> P + Send + Sync + 'static,
        P: Into<Option<usize>>,
    {
        let choose: Read<Option<usize>> = Arc::new(move |parts| choose(parts).into());
        Ok(Rule { choose: Some(choose), ..Rule::of(Self::plans_in_proportion(name.as_ref(), quotas)?) })
    }

    /// A rule that applies this policy only to requests for which `predicate` holds; see [`Rule::when`].
    #[must_use]
    pub fn when(self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Rule {
        self.into_rule().when(predicate)
    }

    /// A rule in which a request costs this many units; see [`Rule::cost`].
    #[must_use]
    pub fn cost(self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Rule {
        self.into_rule().cost(cost)
    }

    /// Returns a rule whose quota has this unit; see [`Rule::unit`].
    ///
    /// # Errors
    /// As those of [`Rule::unit`].
    pub fn unit(self, unit: impl AsRef<str>) -> Result<Rule, PolicyError> {
        self.into_rule().unit(unit)
    }

    /// A rule in this mode; see [`Rule::mode`].
    #[must_use]
    pub fn mode(self, mode: impl Into<ModeSwitch>) -> Rule {
        self.into_rule().mode(mode)
    }

    /// A rule that warns when so little remains; see [`Rule::near_percent`].
    #[must_use]
    pub fn near_percent(self, percent: u8) -> Rule {
        self.into_rule().near_percent(percent)
    }

    /// A rule with this answer to a missing key; see [`Rule::missing_key`].
    #[must_use]
    pub fn missing_key(self, missing_key: MissingKey) -> Rule {
        self.into_rule().missing_key(missing_key)
    }
}
