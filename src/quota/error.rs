//! The errors of invalid quotas and rules.

use crate::error::{ConfigError, ConfigErrorKind};

/// The longest name of a rule or a unit, in characters.
pub(crate) const NAME_MAX: usize = 128;

impl ConfigError {
    pub(crate) fn name(name: &str) -> Self {
        let best = "; letters, digits, `.`, `_` and `-` are best";
        Self::text("a rule's name", name, best)
    }

    pub(crate) fn unit(unit: &str) -> Self {
        Self::text("a quota's unit", unit, ", such as \"content-bytes\" or \"tokens\"")
    }

    fn text(what: &str, text: &str, advice: &str) -> Self {
        let text: String = text.chars().take(NAME_MAX).collect();
        Self::new(
            ConfigErrorKind::Name,
            format!(
                "{text:?} cannot be {what}: it is part of headers, so it must be 1 to {NAME_MAX} printable ASCII \
                 characters{advice}"
            ),
        )
    }

    pub(crate) fn no_quota(name: &str) -> Self {
        Self::new(ConfigErrorKind::Missing, format!("{name:?} has no quota: give it at least one"))
    }

    /// Makes the error for quotas that cannot be combined.
    pub(crate) fn together(name: &str, why: &str) -> Self {
        Self::new(ConfigErrorKind::Combination, format!("{name:?}: {why}"))
    }
}
