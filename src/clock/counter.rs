//! Measures time with the processor's time stamp counter, between two answers of the operating
//! system.

use std::sync::atomic::{AtomicU64, Ordering};

use quanta::Clock;

use crate::base::sync::{Mutex, try_lock};

/// The time in microseconds for which the counter is trusted after an answer of the operating system.
const TRUSTED_US: u64 = 1_000;

/// While another thread asks the operating system, the time for which the counter is trusted is multiplied by this
/// factor.
const PATIENCE: u64 = 16;

/// Between two answers of the operating system, the clock is slower than the counter by one part in this many. The
/// clock is slowed by more than the error of the counter's rate. The system's next answer is therefore seldom
/// earlier than the clock.
const SLOWER: u64 = 1_000;

/// The longest time in microseconds that the operating system may take to answer. A slower answer would be older
/// than the counter's reading that is stored with it.
const ANSWER_US: u64 = 3;

/// The maximum number of times that the system is asked until an answer is quick enough.
const TRIES: usize = 16;

/// The last answer of the operating system, plus the time that the counter has counted since.
///
/// An answer is stored as two numbers: the counter's value, and the difference that is added to each reading. The
/// difference never decreases, unless the counter has jumped. So the clock does not step back, in whatever order a
/// thread reads the two numbers, and in whatever order threads store them.
#[derive(Debug)]
pub(super) struct Counter {
    clock: Clock,
    /// The microseconds in one tick, in units of 2^-64.
    per_tick: u64,
    /// The number of ticks for which the counter is trusted.
    trusted: u64,
    /// The counter's value at the last answer.
    answered: AtomicU64,
    /// The difference between the system's answer and the counter's reading, in microseconds. It wraps.
    ahead: AtomicU64,
    /// The lock of the thread that asks the system. If that thread is suspended, others ask as well.
    asking: Mutex<()>,
}

impl Counter {
    pub(super) fn new() -> Self {
        Self::with(Clock::new())
    }

    fn with(clock: Clock) -> Self {
        const TICKS: u32 = 40;
        // Measures over 2^40 ticks, so that the rounding to nanoseconds does not matter.
        let nanos = u128::from(clock.delta_as_nanos(0, 1 << TICKS)).max(1);
        let per_tick = u64::try_from((nanos << (64 - TICKS)) / 1_000).unwrap_or(u64::MAX);
        let trusted = u64::try_from((u128::from(TRUSTED_US) << 64) / u128::from(per_tick.max(1))).unwrap_or(0);
        // The initial value is 2^63 ticks away from the current ticks, so that no processor trusts a reading before the
        // system's first answer.
        let answered = AtomicU64::new(clock.raw() ^ 1 << 63);
        let per_tick = per_tick - per_tick / SLOWER;
        Self { clock, per_tick, trusted, answered, ahead: AtomicU64::new(0), asking: Mutex::new(()) }
    }

    /// Returns the time. Asks the system if the last answer is too old, or if the counter has jumped.
    #[inline]
    pub(super) fn now_us(&self, system_us: impl Fn() -> u64) -> u64 {
        let ticks = self.clock.raw();
        // `Acquire` pairs with the `Release` in `ask`, so `ahead` is at least as new as the value of `answered`.
        if ticks.wrapping_sub(self.answered.load(Ordering::Acquire)) < self.trusted {
            return self.reading(ticks).wrapping_add(self.ahead.load(Ordering::Relaxed));
        }
        self.ask(ticks, system_us)
    }

    #[inline]
    fn reading(&self, ticks: u64) -> u64 {
        ((u128::from(ticks) * u128::from(self.per_tick)) >> 64) as u64 // below 2^64
    }

    #[cold]
    #[inline(never)]
    fn ask(&self, ticks: u64, system_us: impl Fn() -> u64) -> u64 {
        let since = ticks.wrapping_sub(self.answered.load(Ordering::Acquire));
        let one = try_lock(&self.asking);
        // While another thread asks, the counter is trusted for longer, but not forever, because that thread
        // may have been suspended. If that thread has just noted an answer that is newer than `ticks`, `since`
        // is below zero and wraps. The sum is then below `trusted`.
        if one.is_none() && since.wrapping_add(self.trusted) < self.trusted.saturating_mul(PATIENCE) {
            return self.reading(ticks).wrapping_add(self.ahead.load(Ordering::Relaxed));
        }
        let (mut answer, mut ticks) = (0, 0);
        for _ in 0..TRIES {
            let before = self.clock.raw();
            (answer, ticks) = (system_us(), self.clock.raw());
            if ticks.wrapping_sub(before) <= self.trusted / TRUSTED_US * ANSWER_US {
                break;
            }
        }
        self.note(answer, ticks)
    }

    /// Stores an answer of the system and the counter's value at that time. Returns the time.
    fn note(&self, answer: u64, ticks: u64) -> u64 {
        // Subtracts 1, because two rounded-down readings may differ by one microsecond more than the counter counted.
        let ahead = answer.wrapping_sub(self.reading(ticks)).wrapping_sub(1);
        // A thread that was suspended before it came here has an old answer, which does not count.
        let is_old = self.answered.load(Ordering::Acquire).wrapping_sub(ticks) < 1 << 62;
        let falls = |noted: u64| noted.wrapping_sub(ahead) < if is_old { 1 << 63 } else { TRUSTED_US };
        let raise = |noted| (!falls(noted)).then_some(ahead);
        let ahead = match self.ahead.fetch_update(Ordering::Relaxed, Ordering::Relaxed, raise) {
            Ok(_) => ahead,
            Err(noted) => noted,
        };
        self.answered.store(ticks, Ordering::Release); // after `ahead`
        self.reading(ticks).wrapping_add(ahead)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;

    fn counter() -> (Counter, Arc<quanta::Mock>) {
        let (clock, ticks) = Clock::mock();
        (Counter::with(clock), ticks)
    }

    #[test]
    fn system_is_asked_once_in_a_millisecond() {
        let (counter, ticks) = counter();
        let asked = Cell::new(0);
        for _ in 0..10_000 {
            ticks.increment(std::time::Duration::from_micros(1));
            counter.now_us(|| {
                asked.set(asked.get() + 1);
                0
            });
        }
        assert_eq!(asked.get(), 10);
    }

    #[test]
    fn time_runs_on_between_answers_and_never_steps_back() {
        let (counter, ticks) = counter();
        let mut last = 0;
        for us in 1..100_000_u64 {
            ticks.increment(std::time::Duration::from_micros(1));
            let now = counter.now_us(|| 5_000_000 + us);
            assert!(now >= last, "{now} after {last}");
            assert!(now <= 5_000_000 + us && now + 3 >= 5_000_000 + us, "{now} at {us}");
            last = now;
        }
    }

    #[test]
    fn late_answer_does_not_step_the_clock_back() {
        let (counter, ticks) = counter();
        let forward = |us| ticks.increment(std::time::Duration::from_micros(us));
        let before = counter.now_us(|| 1_000_000);
        forward(1_500);
        // The counter goes on while the system answers.
        let late = counter.now_us(|| {
            forward(700);
            1_001_500
        });
        assert!(late > before);
        forward(1);
        assert!(counter.now_us(|| unreachable!("the answer is new")) >= late);
    }

    #[test]
    fn counter_is_not_read_before_the_first_answer() {
        for behind in [0, 1, 1_000_000] {
            let (clock, ticks) = Clock::mock();
            ticks.increment(7_000_000_u64);
            let counter = Counter::with(clock);
            ticks.decrement(behind); // another processor's
            let held = counter.asking.lock();
            assert_eq!(counter.now_us(|| 5_000_000), 4_999_999, "another thread asks");
            drop(held);
            assert_eq!(counter.now_us(|| 5_000_000), 4_999_999);
        }
    }

    #[test]
    fn thread_that_is_stopped_while_it_asks_stops_no_other() {
        let (counter, ticks) = counter();
        ticks.increment(std::time::Duration::from_secs(1));
        let mut last = counter.now_us(|| 5_000_000);
        let held = counter.asking.lock();
        ticks.decrement(std::time::Duration::from_micros(2));
        assert!(counter.now_us(|| 4_999_998) >= last - 2, "of a reading before the answer");
        ticks.increment(std::time::Duration::from_micros(2));
        for us in 1..100_000_u64 {
            ticks.increment(std::time::Duration::from_micros(1));
            let now = counter.now_us(|| 5_000_000 + us);
            assert!(now >= last && now <= 5_000_000 + us && now + 20 >= 5_000_000 + us, "{now} after {last}");
            last = now;
        }
        drop(held);
        assert!(counter.now_us(|| 5_100_000) >= last);
    }

    #[test]
    fn answer_that_is_noted_late_steps_no_clock_back() {
        for late_ms in [1, 10, 15, 2_000] {
            let (counter, ticks) = counter();
            let forward = |ms| ticks.increment(std::time::Duration::from_millis(ms));
            forward(1_000);
            counter.now_us(|| 5_000_000);
            let held = counter.asking.lock();
            forward(16);
            let old = counter.clock.raw();
            forward(late_ms);
            let asked = counter.now_us(|| 5_016_000 + 1_000 * late_ms);
            // The thread with the lock goes on, and is suspended again before it gives the lock back.
            let ahead = counter.ahead.load(Ordering::Relaxed);
            counter.note(5_016_000, old);
            assert_eq!(counter.ahead.load(Ordering::Relaxed), ahead, "an old answer lowers nothing");
            let after = counter.now_us(|| 5_016_000 + 1_000 * late_ms);
            assert!(after >= asked, "{after} after {asked}, {late_ms} ms late");
            drop(held);
        }
    }

    #[test]
    fn counter_that_jumps_is_not_believed() {
        let (counter, ticks) = counter();
        for jump in [1_000_000_000_u64, 3_600_000_000_000, 10_000_000] {
            ticks.increment(std::time::Duration::from_nanos(jump));
            assert_eq!(counter.now_us(|| 17), 16, "forward");
            ticks.decrement(std::time::Duration::from_nanos(jump));
            assert_eq!(counter.now_us(|| 18), 17, "back");
            assert_eq!(counter.now_us(|| 19), 17, "it is believed from the last answer on");
        }
    }

    #[test]
    fn real_counter_agrees_with_the_system() {
        let time = super::super::ElapsedTime::begin();
        for _ in 0..1_000_000 {
            let before = time.passed_us();
            let now = time.now_us(|| time.passed_us());
            let after = time.passed_us();
            assert!(now + 10 >= before && now <= after, "{before} {now} {after}");
        }
    }
}
