//! Counts of the last ten to fifteen seconds, which show what happens now.

use std::time::Duration;

use super::rates::SHORT_US;

/// The number of short buckets that are read, including the bucket that is being filled.
const BUCKETS: u64 = 3;

/// The span of time that is read: ten to fifteen seconds.
pub(crate) const NEWEST: Duration = Duration::from_micros(BUCKETS * SHORT_US);

/// The increase of totals in the newest short buckets. As with [`Rates`](super::rates::Rates), events do not add to a
/// bucket. Instead, the first event in the time of a new bucket computes the increase of the totals.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewestCounts<const N: usize> {
    /// The number of the short bucket that is being filled.
    period: u64,
    /// The totals at the last update of the buckets.
    seen: [u64; N],
    buckets: [[u64; N]; BUCKETS as usize],
}

impl<const N: usize> NewestCounts<N> {
    /// Makes empty counts that begin in the short bucket `period`.
    pub(super) fn new(period: u64) -> Self {
        Self { period, seen: [0; N], buckets: [[0; N]; BUCKETS as usize] }
    }

    /// Adds the increase since the last call to the bucket that was being filled, and begins the bucket `period`. If
    /// the clock stepped back by more than a bucket, all buckets start afresh.
    pub(super) fn bring_up(&mut self, period: u64, totals: [u64; N]) {
        if period.saturating_add(1) < self.period {
            *self = Self { seen: totals, ..Self::new(period) };
            return;
        }
        let bucket = &mut self.buckets[(self.period % BUCKETS) as usize]; // below `BUCKETS`
        for ((count, now), before) in bucket.iter_mut().zip(totals).zip(self.seen) {
            *count += now.saturating_sub(before);
        }
        self.seen = totals;
        for number in self.period.max(period.saturating_sub(BUCKETS)) + 1..=period {
            self.buckets[(number % BUCKETS) as usize] = [0; N];
        }
        self.period = self.period.max(period);
    }

    /// Returns the sums of the newest buckets.
    pub(super) fn sums(&self) -> [u64; N] {
        let mut sums = [0; N];
        for bucket in &self.buckets {
            sums.iter_mut().zip(bucket).for_each(|(sum, count)| *sum += count);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_counts_are_forgotten_after_three_buckets() {
        let mut newest = NewestCounts::<2>::new(100);
        newest.bring_up(100, [7, 0]);
        newest.bring_up(100, [8, 2]);
        assert_eq!(newest.sums(), [8, 2]);
        newest.bring_up(101, [9, 2]);
        newest.bring_up(102, [12, 2]);
        assert_eq!(newest.sums(), [12, 2]);
        newest.bring_up(103, [12, 3]);
        assert_eq!(newest.sums(), [3, 1], "the bucket 100 is over");
        newest.bring_up(1_000, [20, 3]);
        assert_eq!(newest.sums(), [0, 0]);
    }

    #[test]
    fn clock_that_steps_back_begins_newest_counts_afresh() {
        let mut newest = NewestCounts::<1>::new(100);
        newest.bring_up(100, [0]);
        newest.bring_up(99, [1]);
        assert_eq!(newest.sums(), [1], "a thread may read the clock late");
        newest.bring_up(98, [2]);
        assert_eq!(newest.sums(), [0]);
        newest.bring_up(98, [4]);
        assert_eq!(newest.sums(), [2]);
    }
}
