//! The time of decisions, which is the store's time as this process knows it.
//!
//! The process decides before it sends the swap, but learns the store's time only from the store's answers. So the
//! process keeps the difference between the store's clock and its own clock. The store read its clock at some
//! instant of the round trip, so each answer bounds the difference from below and from above. A known difference
//! outside these bounds is moved to the nearer bound, so the difference becomes more exact with each answer. If a
//! call is quick in one direction, one of the two bounds from its answer is close to the difference. After a step
//! of a clock, the next answer corrects the difference to within the duration of its round trip.

use std::sync::Arc;
use std::time::Duration;

use crate::base::sync::{Mutex, lock};
use crate::base::time::{CLOCK_US_MAX, Timestamp};
use crate::clock::Clock;

/// If the time of a decision differs from the store's time by more than this time plus the round trip, another swap
/// undoes the decision.
const AWAY: Duration = Duration::from_millis(100);

/// The time of decisions stands still if the corrected time is behind it by at most this duration. Meanwhile, the
/// waits that decisions report are too short by up to the same amount.
const STANDS: Duration = Duration::from_millis(5);

pub(super) struct StoreTime {
    /// The clock that is used instead of the store's clock.
    chosen: Option<Arc<dyn Clock>>,
    own: Arc<dyn Clock>,
    known: Mutex<KnownTime>,
}

#[derive(Default)]
struct KnownTime {
    /// The store's clock minus this process's clock, in microseconds. `None` if the store has not answered yet, and
    /// zero if the store reports no time.
    ahead_us: Option<i64>,
    /// The latest time of a decision.
    latest: Timestamp,
}

/// An answer's effect on the known time of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TimeUpdate {
    /// The answer is the first answer that reports a time.
    First,
    /// The decision was made at a time near the store's time.
    Near,
    /// The decision was made at a time too far away from the store's time.
    Away,
}

/// The instants at which a call was sent and answered, according to this process's clock.
#[derive(Clone, Copy)]
pub(super) struct Trip {
    pub(super) sent: Timestamp,
    pub(super) answered: Timestamp,
}

impl StoreTime {
    /// `chosen` is the clock that is used instead of the store's clock, if any. `own` is the clock of this
    /// process.
    pub(super) fn new(chosen: Option<Arc<dyn Clock>>, own: Arc<dyn Clock>) -> Self {
        Self { chosen, own, known: Mutex::default() }
    }

    pub(super) fn chosen(&self) -> Option<Arc<dyn Clock>> {
        self.chosen.clone()
    }

    /// Returns the time of this process's clock, for [`Trip`].
    pub(super) fn own(&self) -> Timestamp {
        self.own.now()
    }

    /// Returns the time of a decision that is made now. Returns `None` if the store has not answered yet.
    ///
    /// The time does not step back when an answer corrects the difference by at most [`STANDS`]: it stands
    /// still until the corrected time has caught up. If the store's clock itself was set back, the time of
    /// decisions steps back with it.
    pub(super) fn now(&self) -> Option<Timestamp> {
        let most = Timestamp::from_micros(CLOCK_US_MAX);
        if let Some(clock) = &self.chosen {
            return Some(clock.now().min(most));
        }
        let mut known = lock(&self.known);
        let now = self.own.now().as_micros().saturating_add_signed(known.ahead_us?);
        let now = Timestamp::from_micros(now).min(most);
        if now > known.latest || known.latest.saturating_since(now) > STANDS {
            known.latest = now;
        }
        Some(known.latest)
    }

    /// Records the time that an answer reports. `decided` is the time of the decision that the
    /// answered call wrote, if any.
    pub(super) fn record(&self, trip: Trip, now: Option<Timestamp>, decided: Option<Timestamp>) -> TimeUpdate {
        if self.chosen.is_some() {
            return TimeUpdate::Near;
        }
        let mut known = lock(&self.known);
        let Some(now) = now else {
            known.ahead_us = Some(0);
            return TimeUpdate::Near;
        };
        let [least, most] = [trip.answered, trip.sent].map(|own| ahead_us(now, own));
        let middle = least + (most - least) / 2;
        let is_first = known.ahead_us.is_none();
        known.ahead_us = Some(known.ahead_us.unwrap_or(middle).min(most).max(least));
        let away = AWAY + trip.answered.saturating_since(trip.sent);
        let is_away = |decided: Timestamp| decided.saturating_since(now).max(now.saturating_since(decided)) > away;
        match decided.is_some_and(is_away) {
            true => TimeUpdate::Away,
            false if is_first => TimeUpdate::First,
            false => TimeUpdate::Near,
        }
    }
}

/// Returns how far the store's clock is ahead of this process's clock.
fn ahead_us(store: Timestamp, own: Timestamp) -> i64 {
    let [store, own] = [store, own].map(|instant| instant.as_micros().min(CLOCK_US_MAX) as i64); // below 2^53
    store - own
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

    /// Records an answer to a decision at the store's own time.
    fn record(time: &StoreTime, trip: Trip, now: u64) -> Option<i64> {
        let now = Some(Timestamp::from_micros(now));
        assert_ne!(time.record(trip, now, now), TimeUpdate::Away);
        lock(&time.known).ahead_us
    }

    #[test]
    fn difference_comes_closer_with_each_answer() {
        let time = own();
        assert_eq!(time.now(), None, "nothing is known before the first answer");
        // The store is 20 s ahead. The first trip takes 9 ms there and 1 ms back.
        assert_eq!(record(&time, trip(10_000_000, 10_010_000), 30_009_000), Some(20_004_000));
        assert_eq!(record(&time, trip(11_000_000, 11_006_000), 31_003_000), Some(20_003_000));
        assert_eq!(record(&time, trip(12_000_000, 12_900_000), 32_000_100), Some(20_000_100), "a short way there");
        assert_eq!(record(&time, trip(13_000_000, 13_900_000), 33_899_900), Some(20_000_100), "a short way back");
        assert_eq!(record(&time, trip(99_000_000, 99_002_000), 118_990_000), Some(19_990_000), "the clocks drift");
    }

    #[test]
    fn clock_that_steps_is_followed_at_once() {
        let time = own();
        record(&time, trip(10_000_000, 10_000_100), 30_000_000);
        for (at, ahead_us) in [(11_000_000, 84_000_000), (12_000_000, 8_000_000), (13_000_000, 8_050_000)] {
            let ahead = record(&time, trip(at, at + 3_000), at + ahead_us + 1_000).unwrap();
            assert!(ahead.abs_diff(ahead_us as i64) <= 3_000, "{ahead} and not {ahead_us}");
        }
    }

    /// Of 60 fresh processes on a busy machine, 15 reported a wrong time to wait.
    #[test]
    fn time_of_decisions_stands_still_while_it_is_corrected() {
        let own = crate::clock::ManualClock::at(Timestamp::from_micros(10_080_000));
        let time = StoreTime::new(None, Arc::new(own.clone()));
        // The first trip took 80 ms, nearly all of them on the way back.
        assert_eq!(record(&time, trip(10_000_000, 10_080_000), 30_001_000), Some(19_961_000));
        let before = time.now().unwrap();
        assert_eq!(before, Timestamp::from_micros(30_041_000));
        // This one says that the difference is 20 s, and the next one that it is 2.5 ms less.
        record(&time, trip(10_080_000, 10_081_000), 30_081_000);
        assert_eq!(time.now(), Some(Timestamp::from_micros(30_080_000)));
        record(&time, trip(10_080_000, 10_081_000), 30_077_500);
        for (own_us, expected) in [(10_081_000, 30_080_000), (10_082_000, 30_080_000), (10_090_000, 30_087_500)] {
            own.set(Timestamp::from_micros(own_us));
            assert_eq!(time.now(), Some(Timestamp::from_micros(expected)), "at {own_us}");
        }
        // A clock that was set back by more is followed.
        record(&time, trip(10_140_000, 10_141_000), 23_000_000);
        assert!(time.now().unwrap().as_micros() < 23_001_000);
    }

    #[test]
    fn decision_far_away_from_the_time_of_the_store_is_noticed() {
        let time = own();
        let now = Timestamp::from_micros(30_000_000);
        for (away_us, is_away) in [(103_000, false), (103_001, true)] {
            for decided in [now.as_micros() - away_us, now.as_micros() + away_us].map(Timestamp::from_micros) {
                let recorded = time.record(trip(10_000_000, 10_003_000), Some(now), Some(decided));
                assert_eq!(recorded == TimeUpdate::Away, is_away);
            }
        }
    }

    #[test]
    fn time_of_a_store_is_any_number() {
        let time = own();
        for now in [0, u64::MAX, 0] {
            time.record(trip(0, u64::MAX), Some(Timestamp::from_micros(now)), None);
            time.record(trip(5, 0), Some(Timestamp::from_micros(now)), None);
            assert!(time.now().unwrap().as_micros() <= CLOCK_US_MAX);
        }
    }

    #[test]
    fn store_without_a_clock_leaves_the_time_to_the_process() {
        let time = own();
        assert_eq!(time.record(trip(0, 0), None, None), TimeUpdate::Near);
        let now = time.now().unwrap();
        assert!(now.saturating_since(time.own()) < AWAY && time.own().saturating_since(now) < 100 * AWAY);
    }
}
