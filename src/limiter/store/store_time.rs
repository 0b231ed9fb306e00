//! The time of decisions: the store's, as far as this process knows it.
//!
//! A decision needs the time before the swap, and the store reports its time with each answer. So the process keeps the
//! difference between the store's clock and its own. The store read its clock at some instant of the round trip, so the
//! answer with the shortest round trip of the last ten seconds says most exactly what the difference is.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::sync::{Mutex, lock};
use crate::time::{CLOCK_US_MAX, Timestamp};

/// The answers of two spans of this length are looked at.
const SPAN_US: u64 = 5_000_000;

/// A decision whose time was further away from the store's than this is not kept.
const AWAY: Duration = Duration::from_millis(100);

pub(super) struct StoreTime {
    /// The clock that decides instead of the store's.
    chosen: Option<Arc<dyn Clock>>,
    own: Arc<dyn Clock>,
    samples: Mutex<Samples>,
}

#[derive(Default)]
struct Samples {
    /// The best of this span and of the one before.
    best: [Option<Sample>; 2],
    span: u64,
    /// Whether the store reports no time.
    is_own: bool,
}

#[derive(Clone, Copy)]
struct Sample {
    trip_us: u64,
    /// The store's clock minus the own one.
    ahead_us: i64,
}

/// When a call was sent and answered, by the own clock.
#[derive(Clone, Copy)]
pub(super) struct Trip {
    pub(super) sent: Timestamp,
    pub(super) answered: Timestamp,
}

impl StoreTime {
    /// Begins with the clock that decides instead of the store's, if there is one, and the clock of this process.
    pub(super) fn new(chosen: Option<Arc<dyn Clock>>, own: Arc<dyn Clock>) -> Self {
        Self { chosen, own, samples: Mutex::default() }
    }

    /// Returns the own time, for [`Trip`].
    pub(super) fn own(&self) -> Timestamp {
        self.own.now()
    }

    /// Returns the time of a decision that is made now. Returns `None` if the store has not answered yet.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let now = match &self.chosen {
            Some(clock) => clock.now(),
            None => {
                let ahead_us = {
                    let samples = lock(&self.samples);
                    if samples.is_own { 0 } else { samples.best()?.ahead_us }
                };
                Timestamp::from_micros(self.own.now().as_micros().saturating_add_signed(ahead_us))
            }
        };
        Some(now.min(Timestamp::from_micros(CLOCK_US_MAX)))
    }

    /// Records the time that an answer reports. Returns whether a decision that was made at `decided` is too far away
    /// from it.
    pub(super) fn record(&self, trip: Trip, now: Option<Timestamp>, decided: Option<Timestamp>) -> bool {
        if self.chosen.is_some() {
            return false;
        }
        let mut samples = lock(&self.samples);
        let Some(now) = now else {
            samples.is_own = true;
            return false;
        };
        samples.is_own = false;
        let trip_us = trip.answered.as_micros().saturating_sub(trip.sent.as_micros());
        let middle = trip.sent.as_micros() + trip_us / 2;
        let ahead_us = i64::try_from(i128::from(now.as_micros()) - i128::from(middle)).unwrap_or(i64::MAX);
        samples.add(Sample { trip_us, ahead_us }, trip.answered);
        let away_us = AWAY.as_micros() as u64 + trip_us;
        decided.is_some_and(|decided| decided.as_micros().abs_diff(now.as_micros()) > away_us)
    }
}

impl Samples {
    fn best(&self) -> Option<Sample> {
        self.best.iter().flatten().min_by_key(|sample| sample.trip_us).copied()
    }

    fn add(&mut self, new: Sample, at: Timestamp) {
        let span = at.as_micros() / SPAN_US;
        let is_step = |best: Sample| {
            best.ahead_us.abs_diff(new.ahead_us) > AWAY.as_micros() as u64 + best.trip_us.max(new.trip_us)
        };
        match span.saturating_sub(self.span) {
            _ if self.best().is_some_and(is_step) => self.best = [None, None], // one of the clocks stepped
            0 => {}
            1 => self.best = [None, self.best[0]],
            _ => self.best = [None, None],
        }
        self.span = span;
        if self.best[0].is_none_or(|best| new.trip_us <= best.trip_us) {
            self.best[0] = Some(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MonotonicClock;

    fn own() -> StoreTime {
        StoreTime::new(None, Arc::new(MonotonicClock::new()))
    }

    fn trip(sent: u64, answered: u64) -> Trip {
        Trip { sent: Timestamp::from_micros(sent), answered: Timestamp::from_micros(answered) }
    }

    fn ahead(time: &StoreTime) -> Option<i64> {
        lock(&time.samples).best().map(|best| best.ahead_us)
    }

    fn record(time: &StoreTime, trip: Trip, now: u64) -> bool {
        let now = Timestamp::from_micros(now);
        time.record(trip, Some(now), Some(now))
    }

    #[test]
    fn offset_is_that_of_the_shortest_trip_of_ten_seconds() {
        let time = own();
        assert_eq!(time.now(), None, "nothing is known before the first answer");
        assert!(!record(&time, trip(10_000_000, 10_010_000), 30_000_000));
        assert_eq!(ahead(&time), Some(30_000_000 - 10_005_000));
        record(&time, trip(11_000_000, 11_000_200), 31_000_000);
        assert_eq!(ahead(&time), Some(31_000_000 - 11_000_100));
        record(&time, trip(12_000_000, 12_002_000), 32_000_000);
        assert_eq!(ahead(&time), Some(31_000_000 - 11_000_100), "a longer trip says less");
        record(&time, trip(15_000_000, 15_002_000), 35_001_000);
        assert_eq!(ahead(&time), Some(31_000_000 - 11_000_100));
        record(&time, trip(21_000_000, 21_002_000), 41_001_000);
        assert_eq!(ahead(&time), Some(41_001_000 - 21_001_000), "ten seconds are over");
    }

    #[test]
    fn clock_that_steps_is_followed_at_once() {
        let time = own();
        record(&time, trip(10_000_000, 10_000_100), 30_000_000);
        let decided = Some(Timestamp::from_micros(31_000_000));
        let stepped = Some(Timestamp::from_micros(95_000_000));
        assert!(time.record(trip(11_000_000, 11_003_000), stepped, decided), "the decision was made too early");
        assert_eq!(ahead(&time), Some(95_000_000 - 11_001_500));
        let back = Some(Timestamp::from_micros(20_000_000));
        assert!(time.record(trip(12_000_000, 12_003_000), back, stepped));
        assert_eq!(ahead(&time), Some(20_000_000 - 12_001_500));
    }

    #[test]
    fn store_without_a_clock_leaves_the_time_to_the_process() {
        let time = own();
        assert!(!time.record(trip(0, 0), None, None));
        let now = time.now().unwrap();
        assert!(now.saturating_since(time.own()) < AWAY && time.own().saturating_since(now) < 100 * AWAY);
    }
}
