//! The error of an invalid quota or rule.

use crate::error::kind_and_message;

/// The longest name of a rule or a unit, in characters.
pub(crate) const NAME_MAX: usize = 128;

kind_and_message! {
    /// The error of an invalid quota, or of a rule that cannot be made of its name and quotas. Its
    /// text says what is wrong and how to fix it; [`kind`](Self::kind) distinguishes the cases.
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule, quota::QuotaError};
    ///
    /// fn search() -> Result<Rule, QuotaError> {
    ///     Rule::new("search", Quota::per_minute(100).burst(20)?)
    /// }
    /// # assert_eq!(search().unwrap().policies()[0].quota().capacity(), 20);
    /// ```
    QuotaError, QuotaErrorKind
}

/// The kind of a [`QuotaError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuotaErrorKind {
    /// The limit, the burst or another number of units is out of range.
    Units,
    /// The period is zero, longer than 366 days, or not a whole number of microseconds.
    Period,
    /// A full bucket would take longer than about 8.9 years to drain.
    TooSlow,
    /// The option has no meaning for this algorithm.
    NotAnOption,
    /// The text could not be read as a quota.
    Syntax,
    /// The name cannot be part of a header.
    Name,
    /// The unit cannot be part of a header.
    Unit,
    /// A rule has no quota.
    NoQuota,
    /// Two quotas of a rule count alike.
    Duplicate,
    /// The quotas cannot be combined in a rule.
    Combination,
}

impl QuotaError {
    pub(crate) fn name(name: &str) -> Self {
        let best = "; letters, digits, `.`, `_` and `-` are best";
        Self::text(QuotaErrorKind::Name, "a rule's name", name, best)
    }

    pub(crate) fn unit(unit: &str) -> Self {
        Self::text(QuotaErrorKind::Unit, "a quota's unit", unit, ", such as \"content-bytes\" or \"tokens\"")
    }

    fn text(kind: QuotaErrorKind, what: &str, text: &str, advice: &str) -> Self {
        let text: String = text.chars().take(NAME_MAX).collect();
        Self::new(
            kind,
            format!(
                "{text:?} cannot be {what}: it is part of headers, so it must be 1 to {NAME_MAX} printable ASCII \
                 characters{advice}"
            ),
        )
    }

    pub(crate) fn no_quota(name: &str) -> Self {
        Self::new(QuotaErrorKind::NoQuota, format!("{name:?} has no quota: give it at least one"))
    }

    /// Makes the error of quotas that cannot be combined.
    pub(crate) fn together(name: &str, why: &str) -> Self {
        Self::new(QuotaErrorKind::Combination, format!("{name:?}: {why}"))
    }
}
