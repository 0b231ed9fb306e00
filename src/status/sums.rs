//! Sums of requests.

use crate::stats::RateBucket;

/// The numbers of requests of a policy in a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) allowed: u64,
    pub(super) near: u64,
    pub(super) over: u64,
    pub(super) refused: u64,
}

impl Sums {
    pub(super) fn of(buckets: &[RateBucket]) -> Self {
        buckets.iter().fold(Self::default(), |sums, bucket| Self {
            allowed: sums.allowed + bucket.allowed(),
            near: sums.near + bucket.near(),
            over: sums.over + bucket.over(),
            refused: sums.refused + bucket.refused(),
        })
    }

    pub(super) fn all(self) -> u64 {
        self.allowed.saturating_add(self.over)
    }

    /// Returns the sums with their names.
    pub(super) fn fields(self) -> [(&'static str, u64); 4] {
        [("allowed", self.allowed), ("near", self.near), ("over", self.over), ("refused", self.refused)]
    }

    #[cfg(feature = "fleet")]
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            allowed: self.allowed.saturating_add(other.allowed),
            near: self.near.saturating_add(other.near),
            over: self.over.saturating_add(other.over),
            refused: self.refused.saturating_add(other.refused),
        }
    }

    /// Returns the share of `part` in all requests in tenths of a percent, rounded to the nearest.
    /// Returns `None` if there were no requests.
    pub(super) fn per_mille(self, part: u64) -> Option<u64> {
        let all = u128::from(self.all());
        let rounded = (u128::from(part) * 2_000 + all).checked_div(2 * all)?;
        u64::try_from(rounded).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_to_the_nearest_tenth() {
        let sums = Sums { allowed: 1_999, over: 1, ..Sums::default() };
        assert_eq!(
            (sums.per_mille(sums.over), sums.per_mille(0), sums.per_mille(2_000)),
            (Some(1), Some(0), Some(1_000))
        );
        assert_eq!(Sums::default().per_mille(0), None);
        let most = Sums { allowed: u64::MAX, ..Sums::default() };
        assert_eq!(most.per_mille(u64::MAX), Some(1_000));
    }
}
