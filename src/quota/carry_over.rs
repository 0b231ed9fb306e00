//! Options that say how much of a key's usage is kept when its quota changes.

use super::builder::Quota;
use super::error::QuotaError;
use super::spec::{Algorithm, UNITS_MAX};

impl Quota {
    /// Keeps the used share instead of the used amount when a key's state was written under another
    /// quota of this policy name: 60 of 100 becomes 600 of 1,000. See
    /// [`Policy::plans_in_proportion`].
    ///
    /// The share is relative to the capacity and includes debt. It is rounded up, by less than a
    /// unit. In a window or a log it counts as used at one instant, the instant of the conversion.
    ///
    /// [`Policy::plans_in_proportion`]: crate::policy::Policy::plans_in_proportion
    ///
    /// # Errors
    /// Returns an error for a block and for a meter. A share of strikes, or of units to be settled,
    /// means nothing.
    pub fn in_proportion(self) -> Result<Self, QuotaError> {
        self.only("in_proportion", Algorithm::limits())?;
        self.with(|spec| spec.proportional = true)
    }

    /// Returns the quota with room in its states for the usage of a quota of this capacity, but at
    /// most for what refills in 8.9 years.
    pub(crate) fn holding(self, capacity: u64) -> Self {
        self.owing(capacity.saturating_sub(self.capacity()))
    }

    /// Returns the quota with at least this debt, but at most with what refills in 8.9 years.
    pub(crate) fn owing(self, debt: u64) -> Self {
        let debt = debt.min(self.spec.units_max()).min(UNITS_MAX);
        if debt <= self.spec.debt { self } else { self.max_debt(debt).unwrap_or(self) }
    }
}
