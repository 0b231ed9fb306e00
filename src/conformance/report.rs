//! The results of the suite.

use std::fmt;

use crate::error::debug_as_text;
use crate::limiter::UnsupportedQuota;
use crate::quota::Quota;

/// The result of a limiter that passed: the quotas that were tested and those that were skipped.
#[derive(Clone, Debug)]
#[must_use = "the report names the quotas that were not tested"]
pub struct Report {
    pub(super) tested: Vec<Quota>,
    pub(super) skipped: Vec<UnsupportedQuota>,
}

impl Report {
    /// Returns the quotas with which the limiter was tested.
    #[must_use]
    pub fn tested(&self) -> &[Quota] {
        &self.tested
    }

    /// Returns the quotas that the limiter does not [support](crate::limiter::Limiter::supports), with
    /// the limiter's reasons.
    #[must_use]
    pub fn skipped(&self) -> &[UnsupportedQuota] {
        &self.skipped
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} quotas tested, {} skipped", self.tested.len(), self.skipped.len())?;
        self.tested.iter().try_for_each(|quota| writeln!(f, "  tested:  \"{quota}\""))?;
        self.skipped.iter().try_for_each(|skipped| writeln!(f, "  skipped: {skipped}"))
    }
}

/// The result of a limiter that did not pass the suite.
#[derive(Clone)]
pub struct Failures {
    pub(super) kind: FailuresKind,
    pub(super) failures: Vec<Failure>,
    pub(super) skipped: Vec<UnsupportedQuota>,
}

/// The kind of [`Failures`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailuresKind {
    /// The limiter broke the contract.
    BrokenPromises,
    /// The limiter supports none of the suite's quotas, so nothing was tested.
    NothingSupported,
}

impl Failures {
    /// Returns the kind of the failures.
    #[must_use]
    pub fn kind(&self) -> FailuresKind {
        self.kind
    }

    /// Iterates over the failures: one for each failed case and quota.
    pub fn iter(&self) -> impl Iterator<Item = &Failure> {
        self.failures.iter()
    }

    /// Returns the quotas that the limiter does not [support](crate::limiter::Limiter::supports), with
    /// the limiter's reasons.
    #[must_use]
    pub fn skipped(&self) -> &[UnsupportedQuota] {
        &self.skipped
    }
}

debug_as_text!(Failures);

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            FailuresKind::BrokenPromises => {
                writeln!(f, "{} promises of tower_ratelimit::limiter::Limiter were not kept:", self.failures.len())?;
                self.failures.iter().try_for_each(|failure| writeln!(f, "\n{failure}"))
            }
            FailuresKind::NothingSupported => {
                writeln!(
                    f,
                    "the limiter supports none of the suite's quotas, so nothing was tested: make Limiter::supports \
                     return Ok for at least one of the quotas"
                )?;
                self.skipped.iter().try_for_each(|skipped| writeln!(f, "  skipped: {skipped}"))
            }
        }
    }
}

impl std::error::Error for Failures {}

/// A case that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    pub(super) case: &'static str,
    pub(super) promise: &'static str,
    pub(super) fix: &'static str,
    pub(super) quota: Quota,
    pub(super) found: String,
}

impl Failure {
    /// Returns the name of the case.
    #[must_use]
    pub fn case(&self) -> &'static str {
        self.case
    }

    /// Returns the quota of the case.
    #[must_use]
    pub fn quota(&self) -> &Quota {
        &self.quota
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} with the quota \"{}\"", self.case, self.quota)?;
        writeln!(f, "  promise: {}", self.promise.trim())?;
        writeln!(f, "  found:   {}", self.found)?;
        write!(f, "  fix:     {}", self.fix)
    }
}
