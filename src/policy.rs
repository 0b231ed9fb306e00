//! A named quota.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use crate::quota::Quota;

/// The longest name of a policy, and of a quota's unit, in characters.
const NAME_MAX: usize = 128;

/// The unit of a quota that states no other.
pub(crate) const REQUESTS: &str = "requests";

/// The unit of a quota that counts the bytes of bodies.
pub(crate) const CONTENT_BYTES: &str = "content-bytes";

/// A *named* quota, applied to a key. The name is on the wire, in metrics, and part of the key that a limiter stores.
///
/// Cheap to clone. A [`Quota`] alone is a policy too, named after its words: `100-per-minute`.
///
/// ```
/// use tower_ratelimit::{Policy, Quota};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let search = Policy::new("search", Quota::per_second(10))?;
/// assert_eq!(search.name(), "search");
/// assert_eq!(Policy::from(Quota::per_minute(100)).name(), "100-per-minute");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Policy(Arc<Inner>);

#[derive(Clone)]
struct Inner {
    name: Box<str>,
    quota: Quota,
    /// No part of what the policy is: what it counts is the same whatever it is called.
    unit: Option<Box<str>>,
    name_fingerprint: u64,
    /// Of the name and the quota.
    fingerprint: u64,
    /// Of the name and of what a quota's states mean.
    state_fingerprint: u64,
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only a store keeps states together"))]
    siblings: Option<Siblings>,
    origin: Origin,
}

/// Where a policy's name and quota come from.
#[derive(Clone, Copy)]
enum Origin {
    Named,
    /// The name was made from the quota's words.
    Unnamed,
    /// The quota follows a switch: which one it is.
    Switched(usize),
}

/// The quotas of one rule of several, which hold together for the same keys.
#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only a store keeps states together"))]
#[derive(Clone, Debug)]
pub(crate) struct Siblings(Arc<(Box<str>, Box<[Quota]>)>);

#[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "only a store keeps states together"))]
impl Siblings {
    /// The name that they have in common.
    pub(crate) fn name(&self) -> &str {
        &self.0.0
    }

    /// At least one, all different.
    pub(crate) fn quotas(&self) -> &[Quota] {
        &self.0.1
    }
}

impl Policy {
    /// A policy of this name.
    ///
    /// # Errors
    /// If the name is empty, longer than 128 characters, or has others than printable ASCII: it stands in header fields.
    pub fn new(name: impl Into<String>, quota: Quota) -> Result<Self, PolicyError> {
        Ok(Self::build(checked(name.into())?, quota, None))
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The quota.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.0.quota
    }

    /// The unit of the quota, as clients are told: `requests`, unless the policy's rule [states](crate::Rule::unit)
    /// another.
    #[must_use]
    pub fn quota_unit(&self) -> &str {
        self.0.unit.as_deref().unwrap_or(REQUESTS)
    }

    /// Whether it states a unit.
    pub(crate) fn has_unit(&self) -> bool {
        self.0.unit.is_some()
    }

    /// The same policy with this unit.
    pub(crate) fn in_unit(&self, unit: &str) -> Result<Self, PolicyError> {
        if !can_be_named(unit) {
            return Err(PolicyError(Fault::Unit(unit.chars().take(NAME_MAX).collect())));
        }
        Ok(Self(Arc::new(Inner { unit: Some(unit.into()), ..(*self.0).clone() })))
    }

    /// One policy for each quota, named after the name and the quota's words: `api-60-per-minute`.
    pub(crate) fn each(name: &str, quotas: impl IntoIterator<Item = Quota>) -> Result<Vec<Self>, PolicyError> {
        let quotas: Box<[Quota]> = quotas.into_iter().collect();
        for (at, quota) in quotas.iter().enumerate() {
            if let Some(other) = quotas[..at].iter().find(|other| other.counts_alike(quota)) {
                let [quota, other] = [quota, other].map(Quota::to_string);
                return Err(PolicyError(Fault::Twice { name: name.to_owned(), quota, other }));
            }
        }
        let siblings = Siblings(Arc::new((name.into(), quotas.clone())));
        let each = quotas.iter().map(|quota| {
            let room = NAME_MAX.saturating_sub(name.len() + 1);
            let name = checked(format!("{name}-{}", shortened(words(quota), room)))?;
            Ok(Self::build(name, *quota, Some(siblings.clone())))
        });
        let policies = each.collect::<Result<Vec<Self>, PolicyError>>()?;
        if policies.is_empty() { Err(PolicyError::no_quota(name)) } else { Ok(policies) }
    }

    /// One policy of this name for each quota. Each can hold what was used under any other, so that a key which changes
    /// from one to another and back has used as much as before.
    pub(crate) fn plans(name: &str, quotas: impl IntoIterator<Item = Quota>) -> Result<Vec<Self>, PolicyError> {
        let quotas: Vec<Quota> = quotas.into_iter().collect();
        let largest = quotas.iter().map(Quota::capacity).max().unwrap_or(0);
        let plans: Vec<Self> =
            quotas.into_iter().map(|quota| Self::new(name, quota.holding(largest))).collect::<Result<_, _>>()?;
        if plans.is_empty() { Err(PolicyError::no_quota(name)) } else { Ok(plans) }
    }

    /// The same, where each holds the share that was used of any other.
    pub(crate) fn plans_in_proportion(
        name: &str,
        quotas: impl IntoIterator<Item = Quota>,
    ) -> Result<Vec<Self>, PolicyError> {
        let kept = |quota: Quota| {
            quota.in_proportion().map_err(|_| {
                let why = format!(
                    "the quota \"{quota}\" cannot be met in proportion: its units are refusals, or are to be settled; use \
                     Policy::choose"
                );
                PolicyError::together(name, &why)
            })
        };
        let quotas = quotas.into_iter().map(kept).collect::<Result<Vec<Quota>, _>>()?;
        // The largest debt in proportion to its capacity, as a fraction.
        let owed = |quota: &Quota| (u128::from(quota.spec().debt), u128::from(quota.capacity().max(1)));
        let (debt, of) = quotas.iter().map(owed).max_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1))).unwrap_or((0, 1));
        let plans = quotas.into_iter().map(|quota| {
            let debt = (debt * u128::from(quota.capacity())).div_ceil(of);
            Self::new(name, quota.owing(u64::try_from(debt).unwrap_or(u64::MAX)))
        });
        let plans = plans.collect::<Result<Vec<Self>, PolicyError>>()?;
        if plans.is_empty() { Err(PolicyError::no_quota(name)) } else { Ok(plans) }
    }

    /// Another name for the same quota and unit.
    pub(crate) fn with_name(&self, name: String) -> Option<Self> {
        let siblings = None; // they have another name
        let named = Self::build_as(checked(name).ok()?, self.0.quota, siblings, self.0.origin);
        if self.has_unit() { named.in_unit(self.quota_unit()).ok() } else { Some(named) }
    }

    /// For an unnamed quota, which one it is: different for each that exists, the same for its clones.
    pub(crate) fn unnamed(&self) -> Option<usize> {
        matches!(self.0.origin, Origin::Unnamed).then(|| Arc::as_ptr(&self.0).addr())
    }

    /// For a policy whose quota follows a switch, which switch it is.
    pub(crate) fn switch(&self) -> Option<usize> {
        if let Origin::Switched(switch) = self.0.origin { Some(switch) } else { None }
    }

    /// The same name and unit with the quota that a switch has.
    pub(crate) fn following(&self, quota: Quota, switch: usize) -> Self {
        let followed = Self::build_as(self.name().to_owned(), quota, None, Origin::Switched(switch));
        if self.has_unit() { followed.in_unit(self.quota_unit()).unwrap_or(followed) } else { followed }
    }

    /// The same name with another quota.
    pub(crate) fn with_quota(&self, quota: Quota) -> Self {
        Self::build(self.name().to_owned(), quota, None)
    }

    /// The quotas that this one is one of, if it is of a rule of several.
    #[cfg(feature = "redis")]
    pub(crate) fn siblings(&self) -> Option<&Siblings> {
        self.0.siblings.as_ref()
    }

    /// Of the name alone: what a state belongs to, whatever its quota. Good within one process only.
    pub(crate) fn name_fingerprint(&self) -> u64 {
        self.0.name_fingerprint
    }

    /// Of the name and the quota. Good within one process only.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.fingerprint
    }

    /// Of the name and of what the quota's states mean: policies that agree in it read each other's states as their own.
    /// Good within one process only.
    pub(crate) fn state_fingerprint(&self) -> u64 {
        self.0.state_fingerprint
    }

    fn build(name: String, quota: Quota, siblings: Option<Siblings>) -> Self {
        Self::build_as(name, quota, siblings, Origin::Named)
    }

    fn build_as(name: String, quota: Quota, siblings: Option<Siblings>, origin: Origin) -> Self {
        let hash = foldhash::quality::FixedState::default();
        let name_fingerprint = hash.hash_one(&name);
        let fingerprint = hash.hash_one((name_fingerprint, quota.fingerprint()));
        let state_fingerprint = hash.hash_one((name_fingerprint, quota.of_states().fingerprint()));
        let name = name.into_boxed_str();
        Self(Arc::new(Inner {
            name,
            quota,
            unit: None,
            name_fingerprint,
            fingerprint,
            state_fingerprint,
            siblings,
            origin,
        }))
    }
}

impl From<Quota> for Policy {
    /// Returns a policy named after the quota's words: `100-per-minute`, `5-per-10-seconds-sliding-log`. If these are longer
    /// than a name's 128 characters, the end of the name is a hash of all of them.
    ///
    /// Two layers over one limiter that have the same unnamed quota count in the same states. Unless they have it from one
    /// value, this is [misuse](crate::MisuseKind::UnnamedQuota): name the policies by [`Policy::new`].
    fn from(quota: Quota) -> Self {
        Self::build_as(shortened(words(&quota), NAME_MAX), quota, None, Origin::Unnamed)
    }
}

/// The name, if it can be one.
fn checked(name: String) -> Result<String, PolicyError> {
    if can_be_named(&name) { Ok(name) } else { Err(PolicyError::name(&name)) }
}

/// Whether a policy or a unit can be called so: it stands in header fields.
fn can_be_named(name: &str) -> bool {
    !name.is_empty() && name.len() <= NAME_MAX && name.bytes().all(|byte| (0x20..0x7f).contains(&byte))
}

/// The quota's words as a name.
fn words(quota: &Quota) -> String {
    let words = quota.to_string();
    let words = words.strip_suffix(", token bucket").unwrap_or(&words);
    let mut name = String::with_capacity(words.len());
    for part in words.split([' ', ',']).filter(|part| !part.is_empty()) {
        if !name.is_empty() {
            name.push('-');
        }
        name.push_str(part);
    }
    name
}

/// The words, or if they are longer than `room`, as many of them as fit in front of their hash.
fn shortened(words: String, room: usize) -> String {
    const HASH: usize = 17; // with its dash
    if words.len() <= room || room <= HASH {
        return words;
    }
    // FNV-1a: the name is part of stored keys, so every process and every version has to find the same one.
    let hash = words
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let begin: String = words.chars().take(room - HASH).collect();
    format!("{begin}-{hash:016x}")
}

impl PartialEq for Policy {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.name() == other.name() && self.quota() == other.quota())
    }
}

impl Eq for Policy {}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Policy({:?}, {})", self.name(), self.quota())
    }
}

/// A policy was refused: its name or its unit cannot stand in header fields, or its quotas make no sense together, or
/// beside others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError(Fault);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Fault {
    Name(String),
    Unit(String),
    NoQuota { name: String },
    Twice { name: String, quota: String, other: String },
    Together { name: String, why: String },
}

/// Why a policy was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyErrorKind {
    /// The name cannot stand in a header.
    Name,
    /// The unit cannot stand in a header.
    Unit,
    /// There is no quota.
    NoQuota,
    /// Two quotas count alike.
    Duplicate,
    /// The policy cannot be combined with what it was combined with.
    Combination,
}

impl PolicyError {
    /// Why the policy was refused.
    #[must_use]
    pub fn kind(&self) -> PolicyErrorKind {
        match self.0 {
            Fault::Name(_) => PolicyErrorKind::Name,
            Fault::Unit(_) => PolicyErrorKind::Unit,
            Fault::NoQuota { .. } => PolicyErrorKind::NoQuota,
            Fault::Twice { .. } => PolicyErrorKind::Duplicate,
            Fault::Together { .. } => PolicyErrorKind::Combination,
        }
    }

    fn name(name: &str) -> Self {
        Self(Fault::Name(name.chars().take(NAME_MAX).collect()))
    }

    /// It makes no sense with what it was to go with.
    pub(crate) fn together(name: &str, why: &str) -> Self {
        Self(Fault::Together { name: name.to_owned(), why: why.to_owned() })
    }

    fn no_quota(name: &str) -> Self {
        Self(Fault::NoQuota { name: name.to_owned() })
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Fault::Name(name) => write!(
                f,
                "{name:?} cannot be a policy's name: it stands in header fields, so it must be 1 to {NAME_MAX} printable \
                 ASCII characters; letters, digits, `.`, `_` and `-` are best"
            ),
            Fault::Unit(unit) => write!(
                f,
                "{unit:?} cannot be a quota's unit: it stands in header fields, so it must be 1 to {NAME_MAX} printable \
                 ASCII characters, such as \"content-bytes\" or \"tokens\""
            ),
            Fault::Together { name, why } => write!(f, "{name:?}: {why}"),
            Fault::NoQuota { name } => write!(f, "{name:?} has no quota: give it at least one"),
            Fault::Twice { name, quota, other } if quota == other => {
                write!(
                    f,
                    "{name:?} has the quota \"{quota}\" twice, which would charge each request twice for one limit"
                )
            }
            Fault::Twice { name, quota, other } => write!(
                f,
                "{name:?} has the quotas \"{other}\" and \"{quota}\", which count alike and would charge each request twice \
                 for one limit: keep the one that is meant"
            ),
        }
    }
}

impl std::error::Error for PolicyError {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn names_of_long_quotas_fit_and_differ() {
        let long = |burst| {
            Quota::step_bucket(999_999_999_999_999, Duration::from_micros(31_622_399_999_999))
                .and_then(|quota| quota.burst(burst))
                .and_then(|quota| quota.max_debt(burst - 2))
                .and_then(|quota| quota.anchor(crate::quota::Anchor::FirstRequest))
                .and_then(crate::Quota::in_proportion)
                .unwrap()
        };
        let [one, other] = [999_999_999_999_998, 999_999_999_999_997].map(long);
        assert!(words(&one).len() > NAME_MAX, "{}", words(&one));
        let names = [one, other].map(|quota| Policy::from(quota).name().to_owned());
        assert!(names.iter().all(|name| Policy::new(name.as_str(), one).is_ok()), "{names:?}");
        assert_ne!(names[0], names[1]);
        // It is part of stored keys: another hash would begin every count anew.
        assert!(names[0].ends_with("-289ebd42b7145be6"), "{names:?}");
        assert!(Policy::each("client", [one, other]).is_ok_and(|each| each[0].name().len() == NAME_MAX));
    }
}
