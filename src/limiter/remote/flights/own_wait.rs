//! Finds out whether a lane's requests wait for each other.
//!
//! A call with many requests costs less than many small calls. So a lane should have few calls in flight if requests
//! wait for each other, because the server, or a way that lets few bytes pass, handles one call after the other. A lane
//! should have many calls in flight if requests do not wait for each other, because the store is far away, or because
//! other clients use it in turns.
//!
//! The duration of a call does not show its cause, but the differences between calls do. If requests wait for each
//! other, a call that was sent while more was in flight takes longer. A call to a far store does not. A call to a store
//! that works in turns even takes less time, because it was sent later in the turn than the calls before it.

/// The number of calls that the averages remember.
const MEMORY: i64 = 64;

/// The number of parts of one request.
const PART: i64 = 1 << 10;

/// A call costs about as much as so many of its requests, in bytes and in the server's time.
const CALL: u64 = 2;

/// The largest work and the longest duration that count. So no product overflows.
const WORK_MAX: u64 = 1 << 16;
const NANOS_MAX: u64 = 1 << 37;

/// The averages of a lane's calls. Work is what was in flight when a call was sent, counted in requests.
#[derive(Default)]
pub(super) struct OwnWait {
    /// The work and the duration of the last call.
    last: Option<(i64, i64)>,
    /// The smoothed product of two differences between a call and the last one: that of the work, in parts, and that of
    /// the durations, in nanoseconds.
    together: i64,
    /// The smoothed square of the difference of the work, in parts.
    apart: i64,
    /// The smoothed work, in parts.
    work: i64,
    /// The smoothed duration, in nanoseconds.
    took: i64,
}

impl OwnWait {
    /// Records how many nanoseconds a call took, and how many requests and calls were in flight when it was sent.
    pub(super) fn record(&mut self, requests: u64, calls: usize, took: u64) {
        let work = requests.saturating_add(CALL * calls as u64).min(WORK_MAX) as i64;
        let took = took.min(NANOS_MAX) as i64;
        let (more, longer) = self.last.map_or((0, 0), |last| (work - last.0, took - last.1));
        self.last = Some((work, took));
        let smooth = |from: &mut i64, to: i64| *from += to.saturating_sub(*from) / MEMORY;
        smooth(&mut self.together, (PART * more).saturating_mul(longer));
        smooth(&mut self.apart, PART * more * more);
        smooth(&mut self.work, PART * work);
        smooth(&mut self.took, took);
    }

    /// Returns whether the wait for other requests of the lane is more than half of a call's duration. `together`
    /// divided by `apart` is the time that each request in flight adds. If the work never differs, nothing is known,
    /// and the result is `false`.
    pub(super) fn is_half(&self) -> bool {
        let wait = i128::from(self.together) * i128::from(self.work) / i128::from(PART);
        2 * wait > i128::from(self.apart) * i128::from(self.took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Plays calls with one to eight requests in flight, each in a call of its own.
    fn play(calls: u64, took: impl Fn(u64) -> u64) -> OwnWait {
        let mut wait = OwnWait::default();
        for number in 0..calls {
            let in_flight = 1 + number * 5 % 8;
            wait.record(in_flight, in_flight as usize, took(in_flight));
        }
        wait
    }

    #[test]
    fn requests_wait_for_each_other_if_each_makes_calls_longer() {
        assert!(play(20, |in_flight| in_flight * MS).is_half());
        // Requests wait for 4.5 ms on average.
        assert!(play(1_000, |in_flight| (4 + in_flight) * MS).is_half());
        assert!(!play(1_000, |in_flight| (5 + in_flight) * MS).is_half());
    }

    #[test]
    fn far_stores_and_turns_make_no_requests_wait_for_each_other() {
        assert!(!play(1_000, |_| 30 * MS).is_half());
        assert!(!play(1_000, |in_flight| (60 - 6 * in_flight) * MS).is_half());
    }

    /// The calls before had no others beside them, and were short.
    #[test]
    fn turns_that_begin_are_known_after_few_calls() {
        let mut wait = OwnWait::default();
        let mut call = |in_flight: u64, took| {
            wait.record(in_flight, in_flight as usize, took);
            wait.is_half()
        };
        assert!((0..100).all(|_| !call(1, MS / 10)));
        let half = (0..24).filter(|number| call(1 + number % 4, (30 - 7 * (number % 4)) * MS)).count();
        assert!(half <= 4, "{half} of 24 calls");
    }

    #[test]
    fn nothing_is_known_of_equal_loads() {
        let mut wait = OwnWait::default();
        for number in 0..100 {
            wait.record(4, 4, number * MS);
            assert!(!wait.is_half());
        }
    }
}
