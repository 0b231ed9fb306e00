//! Policies: named quotas.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, OnceLock};

use http::HeaderValue;

use crate::error::{ConfigError, ConfigErrorKind};
use crate::quota::error::NAME_MAX;
use crate::quota::{Algorithm, Quota};

/// The unit of a quota without a stated unit.
pub(crate) const REQUESTS: &str = "requests";

/// The unit of a concurrency limit without a stated unit.
pub(crate) const CONCURRENT_REQUESTS: &str = "concurrent-requests";

/// The text that describes quotas that requests bring.
const QUOTA_OF_REQUEST: &str = "the quota of each request";

/// The unit of a quota that counts the bytes of bodies.
pub(crate) const CONTENT_BYTES: &str = "content-bytes";

/// A rule's name and quota, as limiters, clients and operators see them: in a
/// [`Charge`](crate::limiter::Charge), in headers and in metrics.
///
/// A layer makes the policies of its rules; see [`RateLimitLayer::policies`]. Make a policy yourself only to ask a
/// [limiter](crate::limiter::Limiter) directly. Policies with equal names and quotas share their states in a limiter.
/// The exception is a quota without a name in a rule with [several quotas](crate::Rule::all_of): its states are
/// stored by the quota's place in the list. A policy is cheap to clone.
///
/// ```
/// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (limiter, jobs) = (MemoryLimiter::new(), Policy::new("jobs", Quota::per_second(10))?);
/// assert!(limiter.take_one(&jobs, &Key::of("alice").unwrap(), 1).is_allowed());
/// # Ok(()) }
/// ```
///
/// [`RateLimitLayer::policies`]: crate::RateLimitLayer::policies
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    name: Box<str>,
    quota: Quota,
    /// The unit is not part of the policy's identity, because it does not change what is counted.
    unit: Option<Box<str>>,
    /// The name that the policy's states are stored under, if it is not the policy's own name.
    stored: Option<Box<str>>,
    /// The fingerprint of the name that the policy's states are stored under.
    name_fingerprint: u64,
    /// The fingerprint of the name and the quota.
    fingerprint: u64,
    /// The fingerprint of the name and of the quota's options on which its states depend.
    state_fingerprint: u64,
    /// The policy's item in a list of quotas, after the item was first rendered.
    item: OnceLock<HeaderValue>,
    origin: Origin,
    /// The quotas for requests that bring no quota, in words, if these quotas are known.
    usual: Option<Box<str>>,
    /// The name of the plan that has the quota, if a file of rules names it.
    plan: Option<Box<str>>,
}

/// The origin of a policy's name and quota.
#[derive(Clone, Copy)]
enum Origin {
    Named,
    /// The name was made from the quota's words.
    Unnamed,
    /// The quota follows the switch with this number.
    Switched(usize),
    /// Each request has a quota of its own, and the policy's quota is only a placeholder. The number belongs to the
    /// switch that the rule follows for requests without a quota.
    OfRequests(Option<usize>),
}

impl Policy {
    /// Makes a policy with this name.
    ///
    /// # Errors
    /// Returns an error if the name is empty, longer than 128 characters, or not printable ASCII,
    /// because it is part of headers.
    pub fn new(name: impl Into<String>, quota: Quota) -> Result<Self, ConfigError> {
        Ok(Self::build(checked(name.into())?, quota, None, None, Origin::Named))
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the quota.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.0.quota
    }

    /// Returns whether each request has a [quota of its own](crate::Rule::quota_from) under this name. The policy's
    /// quota is then only a placeholder, under which a layer looks up and resets a key without a request. Only the
    /// policies of rules and layers return `true`. The policy of a charge has the request's quota, so this method
    /// returns `false` for it.
    #[must_use]
    pub fn has_quota_of_request(&self) -> bool {
        matches!(self.0.origin, Origin::OfRequests(_))
    }

    /// Returns the quota in words.
    pub(crate) fn quota_words(&self) -> String {
        match &self.0.usual {
            Some(usual) => format!("{usual}, unless overridden for a key"),
            None if self.has_quota_of_request() => QUOTA_OF_REQUEST.to_owned(),
            None => self.quota().to_string(),
        }
    }

    /// Returns the unit of the quota, which clients see. If the policy's rule
    /// [states](crate::Rule::unit) no unit, the unit is `content-bytes` for a quota that [counts
    /// bytes](Quota::in_bytes), `concurrent-requests` for a [concurrency limit](Quota::concurrent),
    /// and `requests` for any other quota.
    #[must_use]
    pub fn unit(&self) -> &str {
        let default = match self.limits_in_flight() {
            _ if self.quota().counts_bytes() => CONTENT_BYTES,
            true => CONCURRENT_REQUESTS,
            false => REQUESTS,
        };
        self.0.unit.as_deref().unwrap_or(default)
    }

    /// Returns whether the quota is a concurrency limit, whose units are held until requests end.
    pub(crate) fn limits_in_flight(&self) -> bool {
        self.quota().algorithm() == Algorithm::Concurrency
    }

    /// Returns whether the policy states a unit.
    pub(crate) fn has_unit(&self) -> bool {
        self.0.unit.is_some()
    }

    /// Returns the policy with this unit.
    pub(crate) fn in_unit(&self, unit: &str) -> Result<Self, ConfigError> {
        if !can_be_named(unit) {
            return Err(ConfigError::unit(unit));
        }
        if self.quota().counts_bytes() && unit != CONTENT_BYTES {
            let (name, quota) = (self.name(), self.quota());
            let why = format!(
                "the quota \"{quota}\" of {name:?} counts bytes, so its unit is `{CONTENT_BYTES}` and cannot be {unit:?}: \
                 leave the unit out, or write the quota without bytes"
            );
            return Err(ConfigError::new(ConfigErrorKind::Name, why));
        }
        Ok(Self(Arc::new(Inner { unit: Some(unit.into()), item: OnceLock::new(), ..(*self.0).clone() })))
    }

    /// Makes one policy for each part of a rule.
    ///
    /// In a rule `api`, a part with the name `burst` is `api-burst` in headers and in the store. In headers, a part
    /// without a name is named after its quota, such as `api-60-per-minute`. In the store, a part without a name is
    /// named after its place in the list: `api`, then `api-quota-2`. Therefore a part keeps its usage when its quota
    /// changes.
    pub(crate) fn each<P: Into<Part>>(
        name: &str,
        parts: impl IntoIterator<Item = P>,
    ) -> Result<Vec<Self>, ConfigError> {
        let parts: Vec<Part> = parts.into_iter().map(Into::into).collect();
        let quotas: Vec<Quota> = parts.iter().map(|part| part.quota).collect();
        one_unit(name, &quotas)?;
        for (at, quota) in quotas.iter().enumerate() {
            if let Some(other) = quotas[..at].iter().find(|other| other.counts_alike(quota)) {
                return Err(twice(name, quota, other));
            }
        }
        let mut each: Vec<Self> = Vec::with_capacity(parts.len());
        for (at, part) in parts.iter().enumerate() {
            let policy = match &part.name {
                Some(own) => Self::new(format!("{name}-{own}"), part.quota)?,
                None => {
                    let room = NAME_MAX.saturating_sub(name.len() + 1);
                    let listed = Self::new(format!("{name}-{}", shortened(words(&part.quota), room)), part.quota)?;
                    listed.stored_as(&if at == 0 { name.to_owned() } else { format!("{name}-quota-{}", at + 1) })?
                }
            };
            let is_taken = |other: &Self| other.name() == policy.name() || other.stored_name() == policy.stored_name();
            if each.iter().any(is_taken) {
                return Err(ConfigError::new(
                    ConfigErrorKind::Combination,
                    format!(
                        "{name:?} has two quotas with the name {:?}: give each quota a name of its own",
                        policy.name()
                    ),
                ));
            }
            each.push(policy);
        }
        if each.is_empty() { Err(ConfigError::no_quota(name)) } else { Ok(each) }
    }

    /// Makes one policy of this name for each quota. Each policy has room for the usage under any other of the quotas,
    /// so a key that changes its plan and then changes back loses no usage.
    pub(crate) fn named_plans(name: &str, quotas: impl IntoIterator<Item = Quota>) -> Result<Vec<Self>, ConfigError> {
        let quotas: Vec<Quota> = quotas.into_iter().collect();
        one_unit(name, &quotas)?;
        let largest = quotas.iter().map(Quota::capacity_to_hold).max().unwrap_or(0);
        at_least_one(name, quotas.into_iter().map(|quota| Self::new(name, quota.holding(largest))))
    }

    /// Makes one policy of this name for each quota. Each policy has room for the used share of any other of the
    /// quotas.
    pub(crate) fn named_plans_in_proportion(
        name: &str,
        quotas: impl IntoIterator<Item = Quota>,
    ) -> Result<Vec<Self>, ConfigError> {
        let kept = |quota: Quota| {
            quota.in_proportion().map_err(|_| {
                let why = format!(
                    "the quota \"{quota}\" cannot keep the share that is used: it is unlimited, a block, a meter or a \
                     concurrency limit; use Rule::plans"
                );
                ConfigError::together(name, &why)
            })
        };
        let quotas = quotas.into_iter().map(kept).collect::<Result<Vec<Quota>, _>>()?;
        one_unit(name, &quotas)?;
        // `debt / of` is the largest ratio of a plan's debt to the plan's capacity.
        let owed = |quota: &Quota| (u128::from(quota.spec().debt), u128::from(quota.capacity().max(1)));
        let (debt, of) = quotas.iter().map(owed).max_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1))).unwrap_or((0, 1));
        let plans = quotas.into_iter().map(|quota| {
            let debt = (debt * u128::from(quota.capacity())).div_ceil(of);
            Self::new(name, quota.owing(u64::try_from(debt).unwrap_or(u64::MAX)))
        });
        at_least_one(name, plans)
    }

    /// Returns the policy under another name, in headers and in the store.
    pub(crate) fn with_names(&self, name: String, stored: Option<String>) -> Option<Self> {
        let stored = stored.map(checked).transpose().ok()?.map(String::into_boxed_str);
        let Self(built) = Self::build(checked(name).ok()?, self.0.quota, self.0.unit.clone(), stored, self.0.origin);
        Some(Self(Arc::new(Inner { plan: self.0.plan.clone(), ..(*built).clone() })))
    }

    /// Returns the policy of the plan with this name.
    #[cfg(feature = "rules")]
    pub(crate) fn of_plan(&self, name: &str) -> Self {
        Self(Arc::new(Inner { plan: Some(name.into()), ..(*self.0).clone() }))
    }

    /// Returns the name of the plan that has the quota, if a file of rules names it.
    #[cfg(feature = "status")]
    pub(crate) fn plan(&self) -> Option<&str> {
        self.0.plan.as_deref()
    }

    /// Returns the name that the policy's states are stored under, if it is not the policy's own name.
    pub(crate) fn stored_apart(&self) -> Option<&str> {
        self.0.stored.as_deref()
    }

    /// Returns the identity of an unnamed quota, which is equal only for clones of that quota.
    /// Returns `None` for a named policy.
    pub(crate) fn unnamed(&self) -> Option<usize> {
        matches!(self.0.origin, Origin::Unnamed).then(|| Arc::as_ptr(&self.0).addr())
    }

    /// Returns the number of the switch that the quota follows, if it follows a switch.
    pub(crate) fn switch(&self) -> Option<usize> {
        match self.0.origin {
            Origin::Switched(switch) => Some(switch),
            Origin::OfRequests(switch) => switch,
            Origin::Named | Origin::Unnamed => None,
        }
    }

    /// Returns the policy with the current quota of a switch.
    pub(crate) fn following(&self, quota: Quota, switch: usize) -> Self {
        self.rebuilt(self.name().to_owned(), quota, Origin::Switched(switch))
    }

    /// Makes the placeholder for the policies of requests that bring quotas.
    pub(crate) fn of_requests(name: impl Into<String>) -> Result<Self, ConfigError> {
        Ok(Self::build(checked(name.into())?, Quota::unlimited(), None, None, Origin::OfRequests(None)))
    }

    /// Returns a placeholder with the name, unit and stored states of this policy, for a rule to which only some
    /// requests bring quotas. The other requests have one of the `usual` quotas.
    #[cfg(all(feature = "rules", feature = "fleet"))]
    pub(crate) fn of_each_request(&self, usual: &[Quota]) -> Self {
        let Inner { name, unit, stored, .. } = &*self.0;
        let origin = Origin::OfRequests(self.switch());
        let Self(built) = Self::build(name.to_string(), Quota::unlimited(), unit.clone(), stored.clone(), origin);
        let words: Vec<String> = usual.iter().map(Quota::to_string).collect();
        Self(Arc::new(Inner { usual: Some(words.join(" or ").into()), ..(*built).clone() }))
    }

    /// Returns a policy of the same name with another quota.
    pub(crate) fn with_quota(&self, quota: Quota) -> Self {
        self.rebuilt(self.name().to_owned(), quota, Origin::Named)
    }

    /// Returns the policy with its states stored under another name.
    ///
    /// # Errors
    /// Returns an error if the name is invalid; see [`Policy::new`].
    pub(crate) fn stored_as(&self, name: &str) -> Result<Self, ConfigError> {
        let stored = Some(checked(name.to_owned())?.into_boxed_str());
        let Inner { name, quota, unit, origin, .. } = &*self.0;
        Ok(Self::build(name.to_string(), *quota, unit.clone(), stored, *origin))
    }

    /// Returns the name that the policy's states are stored under.
    pub(crate) fn stored_name(&self) -> &str {
        self.0.stored.as_deref().unwrap_or(&self.0.name)
    }

    /// Returns the fingerprint of the stored name. The quota is not part of the fingerprint,
    /// because a policy keeps its states when its quota changes. Valid in this process only.
    pub(crate) fn name_fingerprint(&self) -> u64 {
        self.0.name_fingerprint
    }

    /// Returns the fingerprint of the name and the quota. Valid in this process only.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.fingerprint
    }

    /// Returns the fingerprint of the name and of the quota's options on which its states depend.
    /// Policies with the same state fingerprint read each other's states as their own. Valid in
    /// this process only.
    pub(crate) fn state_fingerprint(&self) -> u64 {
        self.0.state_fingerprint
    }

    /// Returns the policy's item in a list of quotas. The item is rendered once.
    pub(crate) fn item(&self, render: impl FnOnce() -> Option<HeaderValue>) -> Option<HeaderValue> {
        if let Some(item) = self.0.item.get() {
            return Some(item.clone());
        }
        let item = render()?;
        Some(self.0.item.get_or_init(|| item).clone())
    }

    /// Returns another policy with the unit and the stored name of this policy.
    fn rebuilt(&self, name: String, quota: Quota, origin: Origin) -> Self {
        Self::build(name, quota, self.0.unit.clone(), self.0.stored.clone(), origin)
    }

    fn build(name: String, quota: Quota, unit: Option<Box<str>>, stored: Option<Box<str>>, origin: Origin) -> Self {
        let hash = foldhash::quality::FixedState::default();
        let name_fingerprint = hash.hash_one(stored.as_deref().unwrap_or(&name));
        let fingerprint = hash.hash_one((name_fingerprint, quota.fingerprint()));
        // The fingerprint is never 0, because 0 stands for no policy in tables of fingerprints.
        let state_fingerprint = hash.hash_one((name_fingerprint, quota.of_states().fingerprint())) | 1 << 63;
        let name = name.into_boxed_str();
        let item = OnceLock::new();
        Self(Arc::new(Inner {
            name,
            quota,
            unit,
            stored,
            name_fingerprint,
            fingerprint,
            state_fingerprint,
            item,
            origin,
            usual: None,
            plan: None,
        }))
    }
}

/// A quota of a [rule with several quotas](crate::Rule::all_of), either alone or in a pair with a name.
///
/// ```
/// use tower_ratelimit::{Quota, Rule};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let unnamed = Rule::all_of("api", [Quota::per_second(10), Quota::per_day(10_000)])?;
/// let named = Rule::all_of(
///     "api",
///     [("burst", Quota::per_second(10)), ("day", Quota::per_day(10_000))],
/// )?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    name: Option<Box<str>>,
    quota: Quota,
}

impl From<Quota> for Part {
    fn from(quota: Quota) -> Self {
        Self { name: None, quota }
    }
}

impl From<(&str, Quota)> for Part {
    fn from((name, quota): (&str, Quota)) -> Self {
        Self { name: Some(name.into()), quota }
    }
}

impl From<(String, Quota)> for Part {
    fn from((name, quota): (String, Quota)) -> Self {
        Self { name: Some(name.into()), quota }
    }
}

impl From<Quota> for Policy {
    /// Returns a policy named after the quota's words: `100-per-minute`,
    /// `5-per-10-seconds-sliding-log`. If the words are longer than 128 characters, the name ends
    /// with their hash.
    ///
    /// Two layers that share a limiter and have the same unnamed quota share its allowance. The
    /// layers [warn](crate::setup_warning::SetupWarningKind::UnnamedQuota) unless both have clones
    /// of one quota. To avoid sharing, name the rules with [`Rule::new`](crate::Rule::new).
    fn from(quota: Quota) -> Self {
        Self::build(shortened(words(&quota), NAME_MAX), quota, None, None, Origin::Unnamed)
    }
}

/// Returns the policies, or an error if there are none.
fn at_least_one(
    name: &str,
    policies: impl Iterator<Item = Result<Policy, ConfigError>>,
) -> Result<Vec<Policy>, ConfigError> {
    let policies = policies.collect::<Result<Vec<Policy>, ConfigError>>()?;
    if policies.is_empty() { Err(ConfigError::no_quota(name)) } else { Ok(policies) }
}

/// Returns an error if some of a rule's quotas count bytes and others do not, because a request has one cost for all of
/// them.
fn one_unit(name: &str, quotas: &[Quota]) -> Result<(), ConfigError> {
    let find = |in_bytes| quotas.iter().find(|quota| quota.counts_bytes() == in_bytes);
    let (Some(bytes), Some(others)) = (find(true), find(false)) else { return Ok(()) };
    let why = format!(
        "the quota \"{bytes}\" counts bytes and \"{others}\" does not, but a request has one cost for both: make two rules"
    );
    Err(ConfigError::together(name, &why))
}

/// Makes the error for two quotas that count in the same way.
fn twice(name: &str, quota: &Quota, other: &Quota) -> ConfigError {
    let why = if quota == other {
        format!("{name:?} has the quota \"{quota}\" twice, which would charge each request twice for one limit")
    } else {
        format!(
            "{name:?} has the quotas \"{other}\" and \"{quota}\", which count alike and would charge each request \
             twice for one limit: keep only the quota that you mean"
        )
    };
    ConfigError::new(ConfigErrorKind::Combination, why)
}

fn checked(name: String) -> Result<String, ConfigError> {
    if can_be_named(&name) { Ok(name) } else { Err(ConfigError::name(&name)) }
}

/// Returns whether a policy or a unit can have this name, which is part of headers.
fn can_be_named(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_MAX && name.bytes().all(|byte| (0x20..0x7f).contains(&byte))
}

/// Returns the quota's words as a name.
fn words(quota: &Quota) -> String {
    let words = quota.to_string();
    let words = words.strip_suffix(", token bucket").unwrap_or(&words);
    let parts: Vec<&str> = words.split([' ', ',']).filter(|part| !part.is_empty()).collect();
    parts.join("-")
}

/// Returns the words, which are ASCII. If the words are longer than `room`, returns their beginning and their hash.
pub(crate) fn shortened(words: String, room: usize) -> String {
    const HASH: usize = 17; // with its dash
    if words.len() <= room || room <= HASH {
        return words;
    }
    // The hash is FNV-1a, because the name is part of stored keys, so every process and every version must compute
    // the same name.
    let hash = words
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let begin: String = words.chars().take(room - HASH).collect();
    format!("{begin}-{hash:016x}")
}

impl PartialEq for Policy {
    fn eq(&self, other: &Self) -> bool {
        let is_same = |a: &Inner, b: &Inner| (&a.name, &a.stored, a.quota) == (&b.name, &b.stored, b.quota);
        Arc::ptr_eq(&self.0, &other.0) || is_same(&self.0, &other.0)
    }
}

impl Eq for Policy {}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Policy({:?}, {})", self.name(), self.quota_words())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn quota_of_bytes_has_the_unit_of_bytes() {
        let (bytes, requests) = (Quota::per_hour(1_000).in_bytes().unwrap(), Quota::per_hour(5));
        let policy = Policy::new("upload", bytes).unwrap();
        assert_eq!(policy.unit(), CONTENT_BYTES);
        assert!(policy.in_unit(CONTENT_BYTES).is_ok());
        let error = policy.in_unit("tokens").unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::Name);
        assert!(error.to_string().ends_with("leave the unit out, or write the quota without bytes"), "{error}");
        for mixed in [Policy::each("a", [bytes, requests]), Policy::named_plans("a", [requests, bytes])] {
            let error = mixed.unwrap_err();
            assert_eq!(error.kind(), ConfigErrorKind::Combination);
            assert!(error.to_string().contains("make two rules"), "{error}");
        }
    }

    #[test]
    fn names_of_long_quotas_fit_and_differ() {
        let long = |burst| {
            Quota::step_bucket(999_999_999_999_999, Duration::from_micros(31_622_399_999_999))
                .and_then(|quota| quota.burst(burst))
                .and_then(|quota| quota.max_debt(burst - 2))
                .and_then(|quota| quota.anchor(crate::quota::Anchor::FirstRequest))
                .and_then(crate::quota::Quota::in_proportion)
                .unwrap()
        };
        let [one, other] = [999_999_999_999_998, 999_999_999_999_997].map(long);
        assert!(words(&one).len() > NAME_MAX, "{}", words(&one));
        let names = [one, other].map(|quota| Policy::from(quota).name().to_owned());
        assert!(names.iter().all(|name| Policy::new(name.as_str(), one).is_ok()), "{names:?}");
        assert_ne!(names[0], names[1]);
        // The hash is part of stored keys. Another hash would start every count afresh.
        assert!(names[0].ends_with("-8f0867e4890305f2"), "{names:?}");
        assert!(Policy::each("client", [one, other]).is_ok_and(|each| each[0].name().len() == NAME_MAX));
    }
}
