//! Rates of the last five minutes and of the last hour.
//!
//! No request adds to a bucket. The first request in each span of five seconds compares the policy's totals with the
//! totals at the last comparison, and adds the difference to the bucket that has ended.

use std::time::Duration;

use super::cells::Totals;
use super::state::PolicyState;
use crate::base::time::Timestamp;

/// The length of the short buckets, 5 s.
pub(super) const SHORT_US: u64 = 5_000_000;

/// The number of short buckets in a long bucket of 60 s.
const SHORT_IN_LONG: u64 = 12;

/// The number of short buckets and of long buckets, which cover five minutes and one hour.
const BUCKETS: u64 = 60;

#[derive(Clone, Copy, Default)]
struct Counts {
    allowed: u64,
    near: u64,
    over: u64,
    refused: u64,
}

impl Counts {
    fn of(totals: &Totals) -> Self {
        let near = totals.in_state(PolicyState::Near);
        Self {
            allowed: totals.in_state(PolicyState::Within).wrapping_add(near),
            near,
            over: totals.in_state(PolicyState::Over),
            refused: totals.refused,
        }
    }

    /// Adds the difference between two totals. A counter that is read late may seem to decrease, which counts as no
    /// difference.
    fn add_difference(&mut self, now: &Self, before: &Self) {
        self.allowed += now.allowed.saturating_sub(before.allowed);
        self.near += now.near.saturating_sub(before.near);
        self.over += now.over.saturating_sub(before.over);
        self.refused += now.refused.saturating_sub(before.refused);
    }
}

/// The buckets of one policy, about 4 KiB.
#[derive(Clone)]
pub(super) struct Rates {
    /// The number of the short bucket that is being filled.
    period: u64,
    /// The totals at the last update of the buckets.
    seen: Counts,
    short: Ring,
    long: Ring,
}

#[derive(Clone)]
struct Ring([Counts; BUCKETS as usize]);

impl Ring {
    fn bucket(&mut self, number: u64) -> &mut Counts {
        &mut self.0[(number % BUCKETS) as usize] // below 60
    }

    /// Empties the buckets that begin after `from`, up to `to`.
    fn empty(&mut self, from: u64, to: u64) {
        for number in from.max(to.saturating_sub(BUCKETS)) + 1..=to {
            *self.bucket(number) = Counts::default();
        }
    }

    /// Returns the buckets, the oldest first. `last` is the number of the newest bucket.
    fn read(&self, last: u64, length_us: u64) -> Vec<RateBucket> {
        let first = last.saturating_sub(BUCKETS - 1);
        let bucket = |number: u64| RateBucket {
            starts_at: Timestamp::from_micros(number.saturating_mul(length_us)),
            length: Duration::from_micros(length_us),
            counts: self.0[(number % BUCKETS) as usize], // below 60
        };
        (first..=last).map(bucket).collect()
    }
}

impl Rates {
    pub(super) fn new(period: u64) -> Self {
        let empty = || Ring([Counts::default(); BUCKETS as usize]);
        Self { period, seen: Counts::default(), short: empty(), long: empty() }
    }

    /// Adds the requests since the last call to the bucket that was being filled, and begins the bucket `period`. If
    /// the clock stepped back by more than a bucket, all buckets start afresh.
    pub(super) fn bring_up(&mut self, period: u64, totals: &Totals) {
        let now = Counts::of(totals);
        if period.saturating_add(1) < self.period {
            *self = Self { seen: now, ..Self::new(period) };
            return;
        }
        self.short.bucket(self.period).add_difference(&now, &self.seen);
        self.long.bucket(self.period / SHORT_IN_LONG).add_difference(&now, &self.seen);
        self.seen = now;
        if period > self.period {
            self.short.empty(self.period, period);
            self.long.empty(self.period / SHORT_IN_LONG, period / SHORT_IN_LONG);
            self.period = period;
        }
    }

    /// Returns the short buckets of the last five minutes, the oldest first.
    pub(super) fn short(&self) -> Vec<RateBucket> {
        self.short.read(self.period, SHORT_US)
    }

    /// Returns the long buckets of the last hour, the oldest first.
    pub(super) fn long(&self) -> Vec<RateBucket> {
        self.long.read(self.period / SHORT_IN_LONG, SHORT_US * SHORT_IN_LONG)
    }
}

/// The decisions of a policy in one span of time.
#[derive(Clone, Copy)]
pub struct RateBucket {
    starts_at: Timestamp,
    length: Duration,
    counts: Counts,
}

impl RateBucket {
    /// Returns the time at which the span begins, on the clock of the statistics.
    #[must_use]
    pub fn starts_at(&self) -> Timestamp {
        self.starts_at
    }

    /// Returns how long the span is. The newest span has not ended yet.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Returns the number of requests for which the policy had room.
    #[must_use]
    pub fn allowed(&self) -> u64 {
        self.counts.allowed
    }

    /// Returns the number of [allowed](Self::allowed) requests after which the policy was
    /// [near](crate::observe::PolicyStatus::is_near) its limit.
    #[must_use]
    pub fn near(&self) -> u64 {
        self.counts.near
    }

    /// Returns the number of requests for which the policy had no room, in any [mode](crate::Mode).
    #[must_use]
    pub fn over(&self) -> u64 {
        self.counts.over
    }

    /// Returns the number of requests that the policy refused. A policy refuses a request [over](Self::over) its
    /// limit unless its mode lets the request pass. A block refuses the requests of a closed key.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.counts.refused
    }
}

impl std::fmt::Debug for RateBucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RateBucket")
            .field("starts_at", &self.starts_at)
            .field("allowed", &self.allowed())
            .field("near", &self.near())
            .field("over", &self.over())
            .field("refused", &self.refused())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(refused: u64) -> Totals {
        Totals { refused, ..Totals::default() }
    }

    fn refused(buckets: &[RateBucket]) -> Vec<u64> {
        buckets.iter().map(RateBucket::refused).collect()
    }

    #[test]
    fn buckets_hold_what_was_counted_in_their_time() {
        let mut rates = Rates::new(6_000);
        rates.bring_up(6_001, &totals(3)); // counted in 6,000
        rates.bring_up(6_001, &totals(4));
        rates.bring_up(6_004, &totals(9));
        let short = rates.short();
        assert_eq!(short.len(), 60);
        assert_eq!(refused(&short[55..]), [3, 6, 0, 0, 0]);
        assert_eq!(short[59].starts_at(), Timestamp::from_micros(6_004 * SHORT_US));
        assert_eq!(refused(&rates.long()[59..]), [9]);
    }

    #[test]
    fn buckets_older_than_their_ring_are_gone() {
        let mut rates = Rates::new(600);
        rates.bring_up(659, &totals(3));
        assert_eq!(refused(&rates.short()).iter().sum::<u64>(), 3);
        rates.bring_up(660, &totals(3));
        assert_eq!(refused(&rates.short()).iter().sum::<u64>(), 0);
        assert_eq!(refused(&rates.long()).iter().sum::<u64>(), 3);
        rates.bring_up(600 + 60 * 12, &totals(3));
        assert_eq!(refused(&rates.long()).iter().sum::<u64>(), 0);
        // After years the rings are emptied once, not bucket by bucket.
        rates.bring_up(u64::MAX / SHORT_US, &totals(5));
        rates.bring_up(u64::MAX / SHORT_US, &totals(6));
        assert_eq!(refused(&rates.short()).iter().sum::<u64>(), 1);
    }

    #[test]
    fn clock_that_steps_back_empties_the_buckets() {
        let mut rates = Rates::new(600);
        rates.bring_up(601, &totals(3));
        rates.bring_up(600, &totals(4)); // a thread that read the clock late
        assert_eq!(refused(&rates.short()[58..]), [3, 1]);
        rates.bring_up(10, &totals(9));
        assert_eq!(refused(&rates.short()).iter().sum::<u64>(), 0);
        rates.bring_up(11, &totals(11));
        assert_eq!(refused(&rates.short()).iter().sum::<u64>(), 2);
        // If the clock started at zero 11 buckets ago, there are no buckets before the start.
        assert_eq!(rates.short().len(), 12);
    }
}
