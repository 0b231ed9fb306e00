//! Builders for a rule's linked policy: a block after its refusals, or a meter for units beyond its
//! quota.

use super::definition::{LinkedPolicy, LinkedRole, Rule};
use crate::error::ConfigError;
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};

impl Rule {
    /// Closes a key that the rule refuses too often. The quota is a [block](crate::Quota::block) with
    /// a name of its own. Each refusal by one of the rule's own quotas is a strike, counted in the
    /// same step.
    ///
    /// The request whose strike closes the key, and every request until the key opens, is refused with the outcome
    /// [`Blocked`](crate::observe::OutcomeKind::Blocked). The `Retry-After` of such a refusal says when the key
    /// opens, but at most [one day](crate::Headers::max_reported_wait). Nothing is charged during that time. Headers do
    /// not list the block; the rule's quotas report that no units remain until the key opens. In
    /// [`Mode::Degrade`](crate::Mode::Degrade) and [`Mode::Shadow`](crate::Mode::Shadow) the block does not refuse
    /// either.
    ///
    /// [`Blocks`](crate::limiter::Blocks) closes and opens keys by hand, with the same name, quota
    /// and limiter.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    /// let login = Rule::new("login", Quota::per_minute(5))?
    ///     .block("login-block", Quota::block(3, 10 * minute, hour)?)?;
    ///
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), login, key::peer_ip());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the name is invalid (see [`new`](Self::new)) or is the name of the rule
    /// itself. Also returns an error if the quota is not a block, if the rule has a block or a
    /// meter already, or if it has more than 255 [quotas](Self::all_of).
    pub fn block(self, name: impl Into<String>, quota: Quota) -> Result<Self, ConfigError> {
        self.linked_to(Policy::new(name, quota)?, LinkedRole::Block)
    }

    /// Admits requests beyond the rule's quota, and counts their units. The quota is a
    /// [meter](crate::Quota::meter) with a name of its own; its limit is the maximum number of
    /// units that may pass in this way.
    ///
    /// * A request's cost is taken from the quota. If the quota has too little left, the whole cost
    ///   is counted by the meter instead, in the same step. The outcome is then
    ///   [`Overage`](crate::observe::OutcomeKind::Overage).
    /// * A request for which the meter has no room is refused. The `Retry-After` of the refusal
    ///   says when the quota will have room. A request that costs more than the quota's capacity
    ///   has no `Retry-After`, because it can pass only after the meter is settled or forgotten.
    /// * If a request was counted by the meter, [refunds](Rule::refund_when) and
    ///   [settlements](Rule::settle_by_usage) of the rule change the meter.
    /// * In [`Mode::Degrade`](crate::Mode::Degrade) and [`Mode::Shadow`](crate::Mode::Shadow)
    ///   nothing is metered.
    ///
    /// [`Meters`](crate::limiter::Meters) reads and settles the meter, with the same name, quota and
    /// limiter. A meter in memory is exact until the process ends, and is part of
    /// [snapshots](crate::MemoryLimiter::snapshot). If you bill according to a meter, keep it in
    /// Redis, with a retention longer than the time between two readings.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let meter = Quota::meter(1_000_000, Duration::from_secs(92 * 86_400))?;
    /// let api = Rule::new("api", Quota::per_day(10_000))?.overage("api-over", meter)?;
    ///
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), api, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the name is invalid (see [`new`](Self::new)) or is the name of the rule
    /// itself. Also returns an error if the quota is not a meter, if the rule has a block or a
    /// meter already, or if it has [several quotas](Self::all_of). With several quotas, a request
    /// within one and beyond another would be counted twice: by the quota that has room, and by the
    /// meter.
    pub fn overage(self, name: impl Into<String>, quota: Quota) -> Result<Self, ConfigError> {
        let meter = Policy::new(name, quota)?;
        if self.policies.len() > 1 && self.choose.is_none() {
            return Err(ConfigError::together(
                meter.name(),
                "a rule of several quotas cannot have a meter, because one quota may have units left when another has \
                 none; put the other quotas into a rule of their own",
            ));
        }
        self.linked_to(meter, LinkedRole::Meter)
    }

    /// Links a policy to the rule.
    pub(crate) fn linked_to(self, policy: Policy, role: LinkedRole) -> Result<Self, ConfigError> {
        let algorithm = match role {
            LinkedRole::Block => Algorithm::Block,
            LinkedRole::Meter => Algorithm::Meter,
        };
        if policy.quota().algorithm() != algorithm {
            return Err(ConfigError::together(
                policy.name(),
                &format!("\"{}\" is no {algorithm}: take Quota::{algorithm}", policy.quota()),
            ));
        }
        if self.policies.iter().any(|own| own.name() == policy.name()) {
            return Err(ConfigError::together(policy.name(), "the rule itself has this name: choose another"));
        }
        if self.linked.is_some() {
            return Err(ConfigError::together(
                policy.name(),
                "a rule has either a block or a meter: a block counts requests beyond the quota that are refused, and \
                 a meter counts requests beyond the quota that pass; use two rules",
            ));
        }
        if self.choose.is_none() && self.policies.len() > usize::from(u8::MAX) {
            return Err(ConfigError::together(
                policy.name(),
                &format!(
                    "the rule has {} quotas, and a block counts the refusals of at most {} quotas: give the other \
                     quotas a rule and a block of their own",
                    self.policies.len(),
                    u8::MAX
                ),
            ));
        }
        Ok(Self { linked: Some(LinkedPolicy { policy, role }), ..self })
    }
}
