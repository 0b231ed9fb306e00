//! Estimates the rate that a server admits, if the server's responses do not report it. The estimate
//! uses additive increase and multiplicative decrease.
//!
//! The rate is stored as the interval between two requests, in microseconds.

/// The slowest rate is one request per minute.
const SLOWEST_US: u64 = 60 * SECOND_US;

const SECOND_US: u64 = 1_000_000;

#[derive(Debug, Default)]
pub(super) struct Rate {
    /// The interval between two requests. Zero before the first refusal, because no rate is known yet.
    interval_us: u64,
    /// The instant at which the interval was last changed.
    changed_us: u64,
    /// The beginning of the current second, the number of successes in it, and the number in the
    /// second before.
    second_us: u64,
    successes: u64,
    before: u64,
}

impl Rate {
    /// Returns the time between two requests, or zero if no rate is known.
    pub(super) fn interval_us(&self) -> u64 {
        self.interval_us
    }

    /// Halves the rate after a refusal. The first refusal sets the rate to half of the successes in the
    /// current or the previous second, whichever are more.
    pub(super) fn halve(&mut self, now_us: u64) {
        let known_us = if self.interval_us > 0 {
            self.interval_us
        } else {
            self.count(now_us, 0);
            SECOND_US.div_ceil(self.successes.max(self.before).max(1))
        };
        (self.interval_us, self.changed_us) = ((known_us * 2).min(SLOWEST_US), now_us);
    }

    /// Increases the rate after a success, by one request per second for each second since the last
    /// change of the rate. The rate at most doubles, because one more request per second would
    /// multiply a rate of one per minute by 61.
    pub(super) fn grow(&mut self, now_us: u64) {
        self.count(now_us, 1);
        if self.interval_us == 0 {
            return;
        }
        let (interval_us, square) = (u128::from(self.interval_us), u128::from(SECOND_US) * u128::from(SECOND_US));
        let passed_us = u128::from(now_us.saturating_sub(self.changed_us));
        // Computes 1 / (1 / interval + passed), in microseconds and rounded up. The products are below 2^26 * 2^40
        // and 2^26 * 2^64, which fit into a `u128`.
        let faster_us = (square * interval_us).div_ceil(square + interval_us * passed_us);
        let faster_us = faster_us.max(interval_us.div_ceil(2));
        // If rounding hides the effect of the elapsed time, the rate stays as it was.
        if faster_us < interval_us {
            (self.interval_us, self.changed_us) = (u64::try_from(faster_us).unwrap_or(SLOWEST_US), now_us);
        }
    }

    fn count(&mut self, now_us: u64, successes: u64) {
        let passed_us = now_us.saturating_sub(self.second_us);
        if passed_us >= SECOND_US {
            self.before = if passed_us < 2 * SECOND_US { self.successes } else { 0 };
            (self.second_us, self.successes) = (now_us, 0);
        }
        self.successes = self.successes.saturating_add(successes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_halves_down_to_one_per_minute() {
        let mut rate = Rate::default();
        (0..100).for_each(|nth| rate.grow(nth * 1_000));
        assert_eq!(rate.interval_us(), 0);
        rate.halve(100_000);
        assert_eq!(rate.interval_us(), SECOND_US / 50);
        (0..20).for_each(|_| rate.halve(200_000));
        assert_eq!(rate.interval_us(), SLOWEST_US);
    }

    #[test]
    fn rate_grows_by_one_per_second_and_at_most_doubles() {
        let mut rate = Rate::default();
        rate.halve(0);
        assert_eq!(rate.interval_us(), 2 * SECOND_US);
        rate.grow(SECOND_US);
        assert_eq!(rate.interval_us(), SECOND_US, "doubled");
        rate.grow(2 * SECOND_US);
        rate.grow(3 * SECOND_US);
        assert_eq!(rate.interval_us(), SECOND_US.div_ceil(3));
        for nth in 1..=100 {
            rate.grow(3 * SECOND_US + nth * SECOND_US / 100);
        }
        // Each step rounds up by less than a microsecond.
        assert!((250_000..250_100).contains(&rate.interval_us()), "{}", rate.interval_us());
        rate.grow(u64::MAX);
        (0..100).for_each(|_| rate.grow(u64::MAX));
        assert!(rate.interval_us() >= 1);
    }
}
