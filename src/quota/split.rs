//! The share of a quota that one of several processes has.

use std::num::NonZeroU32;

use super::builder::Quota;

/// # Shares
impl Quota {
    /// Returns the share of each of `parts` processes that count separately. Limit, burst, debt and
    /// `delay_after` are divided by `parts` and rounded down, but limit and burst are at least 1. A
    /// quota with a limit of 0 and an unlimited quota stay unchanged.
    ///
    /// Together the processes keep the [bound](crate::guide::choosing_an_algorithm) of this quota's
    /// algorithm, but each process admits at least one unit. A burst or a debt that would take longer than
    /// 8.9 years to refill at the share's rate is cut to the units that refill in that time.
    ///
    /// ```
    /// use std::num::NonZeroU32;
    /// use tower_ratelimit::Quota;
    ///
    /// let third = Quota::per_minute(100).share(NonZeroU32::new(3).unwrap());
    /// assert_eq!(third, Quota::per_minute(33));
    /// ```
    #[must_use]
    pub fn share(&self, parts: NonZeroU32) -> Self {
        let mut spec = *self.spec();
        if spec.limit == 0 || spec.unlimited {
            return *self;
        }
        let parts = u64::from(parts.get());
        spec.limit = (spec.limit / parts).max(1);
        spec.burst = (spec.burst / parts).max(1);
        spec.debt /= parts;
        spec.delay_after /= parts;
        spec.settle();
        if spec.algorithm.is_bucket() {
            // The rate was rounded down, so the burst and the debt could take longer to drain than the longest
            // time that a quota may take.
            let most = spec.units_max();
            (spec.burst, spec.debt) = (spec.burst.min(most), spec.debt.min(most));
            spec.delay_after = spec.delay_after.min(spec.burst - 1); // at least one, see above
        }
        Self::from_spec(spec)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn parts(n: u32) -> NonZeroU32 {
        NonZeroU32::new(n).unwrap()
    }

    #[test]
    fn a_share_is_at_least_one_unit_and_a_closed_quota_stays_closed() {
        assert_eq!(Quota::per_minute(2).share(parts(10)), Quota::per_minute(1));
        assert_eq!(Quota::per_minute(7).share(parts(1)), Quota::per_minute(7));
        let closed = Quota::fixed_window(0, Duration::from_secs(1)).unwrap();
        assert_eq!(closed.share(parts(4)), closed);
    }

    #[test]
    fn the_capacity_of_a_window_is_its_limit() {
        let share = Quota::sliding_log(10, Duration::from_secs(1)).unwrap().share(parts(4));
        assert_eq!((share.limit(), share.capacity()), (2, 2));
    }

    proptest! {
        #[test]
        fn shares_together_are_within_the_quota(
            limit in 1..=999_999_999_999_999_u64,
            period_us in 1..=31_622_400_000_000_u64,
            burst in 1..=999_999_999_999_999_u64,
            n in 1..=u32::MAX,
        ) {
            let period = Duration::from_micros(period_us);
            let bucket = Quota::token_bucket(limit, period).and_then(|quota| quota.burst(burst));
            for quota in [bucket, Quota::fixed_window(limit, period)].into_iter().flatten() {
                let share = quota.share(parts(n));
                prop_assert!(share.limit() * u64::from(n) <= quota.limit().max(u64::from(n)));
                prop_assert!(share.capacity() * u64::from(n) <= quota.capacity().max(u64::from(n)));
                let again = Quota::token_bucket(share.limit(), period).and_then(|quota| quota.burst(share.capacity()));
                prop_assert!(again.is_ok() || quota.algorithm() == crate::quota::Algorithm::FixedWindow);
            }
        }
    }
}
