//! The error of an invalid policy.

use crate::error::kind_and_message;

use super::builder::Quota;
use super::error::QuotaError;

/// The longest name of a policy or a unit, in characters.
pub(crate) const NAME_MAX: usize = 128;

kind_and_message! {
    /// The error of an invalid policy: its name or unit cannot be part of a header, its quotas
    /// cannot be combined, or a quota is invalid.
    ///
    /// A [`QuotaError`] becomes a `PolicyError`, so one `?` serves both:
    ///
    /// ```
    /// use tower_ratelimit::{Policy, Quota, quota::PolicyError};
    ///
    /// fn search() -> Result<Policy, PolicyError> {
    ///     Policy::new("search", Quota::per_minute(100).burst(20)?)
    /// }
    /// # assert_eq!(search().unwrap().quota().capacity(), 20);
    /// ```
    PolicyError, PolicyErrorKind
}

/// The kind of a [`PolicyError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyErrorKind {
    /// The name cannot be part of a header.
    Name,
    /// The unit cannot be part of a header.
    Unit,
    /// There is no quota.
    NoQuota,
    /// Two quotas count alike.
    Duplicate,
    /// The policies cannot be combined.
    Combination,
    /// A quota is invalid: its [`QuotaError`] became this error.
    Quota,
}

impl From<QuotaError> for PolicyError {
    /// Keeps the text. The [kind](QuotaError::kind) of the quota's error is lost.
    fn from(error: QuotaError) -> Self {
        Self::new(PolicyErrorKind::Quota, error.to_string())
    }
}

impl PolicyError {
    pub(crate) fn name(name: &str) -> Self {
        let best = "; letters, digits, `.`, `_` and `-` are best";
        Self::text(PolicyErrorKind::Name, "a policy's name", name, best)
    }

    pub(crate) fn unit(unit: &str) -> Self {
        Self::text(PolicyErrorKind::Unit, "a quota's unit", unit, ", such as \"content-bytes\" or \"tokens\"")
    }

    fn text(kind: PolicyErrorKind, what: &str, text: &str, advice: &str) -> Self {
        let text: String = text.chars().take(NAME_MAX).collect();
        Self::new(
            kind,
            format!(
                "{text:?} cannot be {what}: it stands in header fields, so it must be 1 to {NAME_MAX} printable ASCII \
                 characters{advice}"
            ),
        )
    }

    pub(crate) fn no_quota(name: &str) -> Self {
        Self::new(PolicyErrorKind::NoQuota, format!("{name:?} has no quota: give it at least one"))
    }

    /// Makes the error of two quotas that count alike.
    pub(crate) fn twice(name: &str, quota: &Quota, other: &Quota) -> Self {
        let why = if quota == other {
            format!("{name:?} has the quota \"{quota}\" twice, which would charge each request twice for one limit")
        } else {
            format!(
                "{name:?} has the quotas \"{other}\" and \"{quota}\", which count alike and would charge each request \
                 twice for one limit: keep the one that is meant"
            )
        };
        Self::new(PolicyErrorKind::Duplicate, why)
    }

    /// Makes the error of policies that cannot be combined.
    pub(crate) fn together(name: &str, why: &str) -> Self {
        Self::new(PolicyErrorKind::Combination, format!("{name:?}: {why}"))
    }
}
