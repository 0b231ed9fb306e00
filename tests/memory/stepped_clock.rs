//! The limiter in memory with its usual clock, in a process whose calendar steps.

use std::thread;
use std::time::Duration;

use tower_ratelimit::quota::Calendar;
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};

use crate::support::stepped_clock::{BEFORE_FEBRUARY_S, DAY_S, SteppedClock};

/// How often a test looks whether the clock has followed a step: for a minute, although the clock does ten times in a
/// second.
const LOOKS: usize = 12_000;

struct Plan {
    limiter: MemoryLimiter,
    policy: Policy,
    key: Key,
}

impl Plan {
    fn new(limiter: &MemoryLimiter, calendar: Calendar) -> Self {
        let quota = Quota::calendar(5, calendar).expect("it is possible");
        Self { limiter: limiter.clone(), policy: Policy::from(quota), key: Key::global() }
    }

    /// Takes a unit if it can. Returns whether it did, and the seconds until the window ends.
    fn take(&self) -> (bool, u64) {
        let decision = self.limiter.take_one(&self.policy, &self.key, 1);
        (decision.is_allowed(), decision.reset_after().map_or(0, |reset| reset.as_secs()))
    }

    /// Takes five units. Another one is denied.
    fn drain(&self) {
        assert_eq!((0..8).filter(|_| self.take().0).count(), 5, "{:?}", self.policy);
    }

    /// Waits until the clock shows this, which it does soon.
    fn expect(&self, what: &str, is_it: impl Fn((bool, u64)) -> bool) {
        for _ in 0..LOOKS {
            if is_it(self.take()) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("{what} is not there: {:?}", self.take());
    }

    /// Waits until the window of keys that were never used is as it should be.
    fn expect_of_others(&self, what: &str, is_it: impl Fn(u64) -> bool) {
        for number in 0..LOOKS {
            let other = Key::of(number as u64).expect("it is short");
            let decision = self.limiter.take_one(&self.policy, &other, 1);
            if is_it(decision.reset_after().map_or(0, |reset| reset.as_secs())) {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("{what} is not there");
    }
}

#[test]
fn calendar_that_steps_is_followed() {
    let Some(clock) = SteppedClock::of_test("stepped_clock::calendar_that_steps_is_followed") else { return };

    // A device begins in 1970, and asks for the time after its first requests.
    clock.set(5);
    let limiter = MemoryLimiter::builder().max_keys(1_000).build().expect("a thousand keys are possible");
    let [monthly, daily] = [Calendar::month(), Calendar::day()].map(|calendar| Plan::new(&limiter, calendar));
    monthly.drain();
    assert!(monthly.take().1 > 30 * DAY_S && !monthly.take().0, "it is January 1970");
    clock.set(BEFORE_FEBRUARY_S);
    monthly.expect("the correction", |(is_taken, reset_s)| is_taken && reset_s <= 60);
    assert_eq!((0..8).filter(|_| monthly.take().0).count(), 4, "one of five was taken");

    // Over the edge of the month. The clock steps forward by two minutes.
    clock.step(120);
    monthly.expect("February", |(is_taken, reset_s)| is_taken && reset_s > 27 * DAY_S);
    assert_eq!((0..8).filter(|_| monthly.take().0).count(), 4, "one of five was taken");

    // Back to January: what was used in February stays used, and January is not given again.
    clock.step(-120);
    daily.expect_of_others("January", |reset_s| reset_s <= 60);
    assert!((0..8).all(|_| !monthly.take().0 && monthly.take().1 <= 29 * DAY_S), "{:?}", monthly.take());
    clock.step(120);
    daily.expect_of_others("February", |reset_s| reset_s > 60);
    assert!(!monthly.take().0 && monthly.take().1 > 27 * DAY_S);

    // The machine is suspended at 20:00, and wakes at 4:00 on the next day.
    clock.set(BEFORE_FEBRUARY_S + 60 + 20 * 3_600);
    daily.expect_of_others("the evening", |reset_s| reset_s <= 4 * 3_600);
    daily.drain();
    clock.step(8 * 3_600);
    daily.expect("the next day", |(is_taken, reset_s)| is_taken && reset_s > 19 * 3_600);
    assert_eq!((0..8).filter(|_| daily.take().0).count(), 4, "one of five was taken");
}
