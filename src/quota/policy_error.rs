//! The error of an invalid policy.

use std::fmt;

/// The longest name of a policy or a unit, in characters.
pub(crate) const NAME_MAX: usize = 128;

/// The error of an invalid policy: its name or unit cannot be part of a header, or its quotas
/// cannot be combined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError(Fault);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Name(String),
    Unit(String),
    NoQuota { name: String },
    Twice { name: String, quota: String, other: String },
    Together { name: String, why: String },
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
}

impl PolicyError {
    pub(crate) fn new(fault: Fault) -> Self {
        Self(fault)
    }

    /// Returns the kind of the error.
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

    pub(crate) fn name(name: &str) -> Self {
        Self(Fault::Name(name.chars().take(NAME_MAX).collect()))
    }

    /// Makes the error of policies that cannot be combined.
    pub(crate) fn together(name: &str, why: &str) -> Self {
        Self(Fault::Together { name: name.to_owned(), why: why.to_owned() })
    }

    pub(crate) fn no_quota(name: &str) -> Self {
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
