//! What of a key's use is kept when its quota changes.

use super::{Algorithm, Quota, QuotaError};

impl Quota {
    /// Keeps the share that is used, and not the amount, where a key's state was written under another quota of the same
    /// policy name: of one that had used 60 of 100, 600 of 1,000 are used. See [`Policy::choose_in_proportion`].
    ///
    /// The share is of the capacity, and a debt is part of it. It is rounded up to what this quota can tell apart, by less
    /// than a unit. In a window or a log it counts as used in one piece when it is met, as an amount does.
    ///
    /// [`Policy::choose_in_proportion`]: crate::Policy::choose_in_proportion
    ///
    /// # Errors
    /// Of a block, whose strikes are refusals that have happened, and of a meter, whose units are to be settled: a share of
    /// these means nothing.
    pub fn in_proportion(self) -> Result<Self, QuotaError> {
        use Algorithm::{
            FixedWindow, Gcra, LeakyBucket, LeakyQueue, SlidingLog, SlidingWindow, StepBucket, TokenBucket,
        };
        self.only(
            "in_proportion",
            &[TokenBucket, StepBucket, Gcra, LeakyBucket, LeakyQueue, FixedWindow, SlidingWindow, SlidingLog],
        )?;
        self.with(|spec| spec.proportional = true)
    }

    /// The same quota, whose states can have as many units in use as a quota of this capacity: or as many as come back in
    /// 8.9 years.
    pub(crate) fn holding(self, capacity: u64) -> Self {
        self.owing(capacity.saturating_sub(self.capacity()))
    }

    /// The same quota, which may owe at least so much: or as much as comes back in 8.9 years.
    pub(crate) fn owing(self, missing: u64) -> Self {
        if missing <= self.spec.debt {
            return self;
        }
        if let Ok(holding) = self.max_debt(missing) {
            return holding;
        }
        let (mut most, mut too_much) = (self, missing);
        while too_much - most.spec.debt > 1 {
            let between = most.spec.debt.midpoint(too_much);
            match self.max_debt(between) {
                Ok(holding) if holding.spec.debt == between => most = holding,
                _ => too_much = between,
            }
        }
        most
    }
}
