//! Histograms of durations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::base::time::micros_ceil;

/// The upper bounds of the buckets, in microseconds and as Prometheus writes them in seconds. Each bound is ten times
/// the bound two buckets earlier.
pub(super) const BOUNDS: [(u64, &str); 15] = [
    (100, "0.0001"),
    (300, "0.0003"),
    (1_000, "0.001"),
    (3_000, "0.003"),
    (10_000, "0.01"),
    (30_000, "0.03"),
    (100_000, "0.1"),
    (300_000, "0.3"),
    (1_000_000, "1"),
    (3_000_000, "3"),
    (10_000_000, "10"),
    (30_000_000, "30"),
    (100_000_000, "100"),
    (300_000_000, "300"),
    (1_000_000_000, "1000"),
];

const BUCKETS: usize = BOUNDS.len() + 1;

/// Durations by bucket. The last bucket has the durations above all bounds.
#[derive(Default)]
pub(super) struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

impl Histogram {
    pub(super) fn record(&self, duration: Duration) {
        let us = micros_ceil(duration);
        let bucket = BOUNDS.iter().position(|(bound, _)| us <= *bound).unwrap_or(BOUNDS.len());
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let sum = |sum: u64| Some(sum.saturating_add(us));
        let _ = self.sum_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
    }

    pub(super) fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            buckets: self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed)),
            sum_us: self.sum_us.load(Ordering::Relaxed),
        }
    }
}

/// A histogram of durations, in microseconds rounded up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    buckets: [u64; BUCKETS],
    sum_us: u64,
}

impl HistogramSnapshot {
    /// Returns the number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the sum of all durations. Saturates after 584,000 years.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_us)
    }

    /// Iterates over the buckets. For each bucket, yields its upper bound, and the number of durations up to that
    /// bound. The bounds are 0.1 ms, 0.3 ms, 1 ms and so on up to 1,000 s. Longer durations are only in
    /// [`count`](Self::count).
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        self.cumulative().map(|((bound, _), count)| (Duration::from_micros(*bound), count))
    }

    /// Returns the upper bound of the bucket that holds the given percentile, from 0 to 100: at least `percent` percent
    /// of the durations are at or below this bound. Returns `None` if there are no durations, or if the percentile is
    /// above 1,000 s.
    #[must_use]
    pub fn percentile(&self, percent: u8) -> Option<Duration> {
        let wanted = u128::from(self.count()) * u128::from(percent.min(100));
        let found = self.cumulative().find(|(_, count)| *count > 0 && u128::from(*count) * 100 >= wanted);
        found.map(|((bound, _), _)| Duration::from_micros(*bound))
    }

    /// Iterates over the buckets that got durations since an earlier snapshot. For each bucket, yields its bound and
    /// the number of these durations. The last bucket has the bound of the bucket before it.
    #[cfg(feature = "metrics")]
    pub(super) fn since(&self, earlier: &Self) -> impl Iterator<Item = (Duration, u64)> {
        let last = BOUNDS.last().map_or(0, |(bound, _)| *bound);
        let bounds = BOUNDS.iter().map(|(bound, _)| *bound).chain([last]);
        let counts = self.buckets.into_iter().zip(earlier.buckets).map(|(now, before)| now.saturating_sub(before));
        let all = bounds.zip(counts).map(|(bound, count)| (Duration::from_micros(bound), count));
        all.filter(|(_, count)| *count > 0)
    }

    /// Iterates over the bounds, each with the number of durations up to that bound.
    pub(super) fn cumulative(&self) -> impl Iterator<Item = (&'static (u64, &'static str), u64)> {
        let mut count = 0;
        BOUNDS.iter().zip(self.buckets).map(move |(bound, bucket)| {
            count += bucket;
            (bound, count)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_counts_a_duration_in_the_bucket_of_its_bound() {
        let histogram = Histogram::default();
        for us in [0, 100, 101, 10_000_000, 10_000_001] {
            histogram.record(Duration::from_micros(us));
        }
        histogram.record(Duration::from_nanos(100_001)); // rounded up
        let counts: Vec<u64> = histogram.snapshot().buckets().map(|(_, count)| count).collect();
        assert_eq!(counts, [2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5, 6, 6, 6, 6]);
        assert_eq!(histogram.snapshot().count(), 6);
        assert_eq!(histogram.snapshot().sum(), Duration::from_micros(20_000_303));
    }

    #[test]
    fn bounds_are_those_that_recorders_are_given() {
        let bounds = BOUNDS.map(|(us, text)| (us as f64 / 1e6, text.parse::<f64>().unwrap()));
        assert_eq!(bounds, crate::stats::Stats::BUCKET_SECONDS.map(|bound| (bound, bound)));
    }

    #[test]
    fn percentile_is_the_bound_of_its_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.snapshot().percentile(50), None);
        (0..99).for_each(|_| histogram.record(Duration::from_micros(250)));
        histogram.record(Duration::from_secs(3_600));
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.percentile(99), Some(Duration::from_micros(300)));
        assert_eq!(snapshot.percentile(100), None);
        assert_eq!(snapshot.percentile(0), Some(Duration::from_micros(300)));
    }

    #[test]
    fn sum_of_endless_durations_saturates() {
        let histogram = Histogram::default();
        (0..2).for_each(|_| histogram.record(Duration::MAX));
        assert_eq!(histogram.snapshot().sum(), Duration::from_micros(u64::MAX));
    }
}
