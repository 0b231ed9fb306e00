//! Finds out which part of a call's time the limiters of a store cause together, and which part other clients cause.
//!
//! A process sees no difference between a server on which other clients run long scripts and a server that
//! twenty processes of this crate fill. If other clients make the calls long, this process may send more without
//! slowing them down. If processes of this crate made the calls long and then sent even more, nearly every answer
//! would come too late. So while calls take long, all limiters of a store halve their windows at the same times: in
//! every second [`HalvingPhase`] of the store's clock, which the store's answers report. In such a phase, the part of
//! a call's time that limiters cause is halved, and the part that other clients cause is not. The two measured times
//! give the time of a call while no limiter sends anything.

use std::time::Duration;

use tokio::time::Instant;

use crate::base::time::Timestamp;

/// The shortest phase, in microseconds. A phase lasts at least four deadlines. So limiters with deadlines up to 130
/// ms have the shortest phase, and halve at the same times.
const PHASE_US_MIN: u64 = 1 << 19;

/// The least number of calls that each kind of phase must have for a finding.
const PHASE_CALLS_MIN: u64 = 3;

/// A phase of the time on a store's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HalvingPhase {
    /// The number of a pair of phases: a phase with whole windows, and the next phase with halved windows.
    pub(super) pair: u64,
    /// True if windows are halved.
    pub(super) is_halved: bool,
    /// True if the calls of the previous phase have most likely been answered.
    is_settled: bool,
}

/// The store's clock, as the last answer stated it.
#[derive(Clone, Copy)]
pub(super) struct StoreClock {
    stated: Timestamp,
    sent: Instant,
    answered: Instant,
}

impl StoreClock {
    /// Makes the clock from an answer that states this time. The call was sent and answered at these
    /// instants.
    pub(super) fn new(stated: Timestamp, sent: Instant, answered: Instant) -> Self {
        Self { stated, sent, answered }
    }

    /// Returns the time that the clock will show when a call that is sent now reaches the store. Assumes that this
    /// call takes as long to arrive as the last call.
    pub(super) fn at_arrival(self, now: Instant) -> Timestamp {
        self.stated.saturating_add(now.saturating_duration_since(self.sent))
    }

    /// Returns the phase at this instant, for limiters with this deadline.
    pub(super) fn phase(self, now: Instant, deadline: Duration) -> HalvingPhase {
        let deadline = u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX);
        let length = deadline.saturating_mul(4).checked_next_power_of_two().unwrap_or(1 << 63).max(PHASE_US_MIN);
        let micros = self.stated.saturating_add(now.saturating_duration_since(self.answered)).as_micros();
        let number = micros / length;
        HalvingPhase { pair: number / 2, is_halved: number % 2 == 1, is_settled: micros % length >= deadline }
    }
}

/// The sums over the calls that were sent in one phase.
#[derive(Clone, Copy, Debug, Default)]
struct CallSums {
    calls: u64,
    /// Nanoseconds.
    took: u64,
    in_flight: u64,
    /// The number of requests that were answered within the deadline.
    timely: u64,
}

impl CallSums {
    fn add(&mut self, took: u64, in_flight: u64, timely: u64) {
        self.calls += 1;
        self.timely = self.timely.saturating_add(timely);
        self.took = self.took.saturating_add(took);
        self.in_flight = self.in_flight.saturating_add(in_flight);
    }
}

/// The calls of a pair of phases, or of several pairs if each has few calls.
#[derive(Debug, Default)]
pub(super) struct Halving {
    pair: u64,
    whole: CallSums,
    halved: CallSums,
}

/// The finding from a pair of phases. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The time of a call with whole windows, and with halved ones.
    pub(super) whole: u64,
    pub(super) halved: u64,
    /// The time that a call would take if no limiter sent anything else.
    pub(super) alone: u64,
    /// The number of requests that were answered within the deadline, with whole windows and with halved ones.
    pub(super) timely: u64,
    pub(super) timely_halved: u64,
}

impl Halving {
    /// Records a call, of which `timely` requests were answered within the deadline. Returns the finding of the last
    /// pair of phases if this call belongs to another pair. There is a finding only if this limiter had more than 1.3
    /// times as many requests in flight while its window was whole as while it was halved. Halving a window that is not
    /// full changes nothing. A pair with too few calls for a finding is continued by the next pair: if two requests are
    /// in flight and each takes longer than the deadline, a phase may have two calls.
    pub(super) fn record(&mut self, phase: HalvingPhase, took: u64, in_flight: u64, timely: u64) -> Option<Finding> {
        let finding = if phase.pair == self.pair { None } else { self.finding() };
        if phase.pair != self.pair {
            let continues = self.has_few_calls() && phase.pair.wrapping_sub(self.pair) == 1;
            *self = if continues { Self { pair: phase.pair, ..*self } } else { Self::of(phase.pair) };
        }
        if phase.is_settled {
            if phase.is_halved { &mut self.halved } else { &mut self.whole }.add(took, in_flight, timely);
        }
        finding
    }

    fn of(pair: u64) -> Self {
        Self { pair, ..Self::default() }
    }

    fn has_few_calls(&self) -> bool {
        self.whole.calls.min(self.halved.calls) < PHASE_CALLS_MIN
    }

    fn finding(&self) -> Option<Finding> {
        let (whole, halved) = (self.whole, self.halved);
        if self.has_few_calls() {
            return None;
        }
        let (took, took_halved) = (whole.took / whole.calls, halved.took / halved.calls);
        // In 1,024ths of a request.
        let (full, half) = ((whole.in_flight << 10) / whole.calls, (halved.in_flight << 10) / halved.calls);
        if full * 10 <= half * 13 {
            return None;
        }
        // The time that the limiters' requests cause while windows are halved: the difference of the two times is
        // that of `full - half` requests.
        let caused = u128::from(took.saturating_sub(took_halved)) * u128::from(half) / u128::from(full - half);
        let alone = took_halved.min(took).saturating_sub(u64::try_from(caused).unwrap_or(u64::MAX));
        let (timely, timely_halved) = (whole.timely, halved.timely);
        Some(Finding { whole: took, halved: took_halved, alone: alone.max(1), timely, timely_halved })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(50);

    /// Plays two pairs of phases. A call takes `base` and `each` for each request in flight.
    fn finding(base: u64, each: u64, window: u64) -> Option<(u64, u64)> {
        let (mut halving, began) = (Halving::default(), Instant::now());
        let clock = StoreClock::new(Timestamp::from_micros(1_700_000_000_000_000), began, began);
        let calls = (0..300).map(|number| clock.phase(began + number * Duration::from_millis(10), DEADLINE));
        let mut findings = calls.filter_map(|phase| {
            let in_flight = if phase.is_halved { window / 2 } else { window };
            halving.record(phase, base + each * in_flight, in_flight, 1)
        });
        findings.nth(1).map(|finding| (finding.whole, finding.alone))
    }

    #[test]
    fn time_that_others_cause_is_told_from_our_own() {
        for (base, each, alone) in [(40_000, 0, 40_000), (0, 400, 1), (20_000, 200, 20_000)] {
            let whole = base + each * 100;
            assert_eq!(finding(base, each, 100), Some((whole, alone)), "{base} and {each}");
        }
    }

    #[test]
    fn window_that_is_not_used_says_nothing() {
        assert_eq!(finding(40_000, 0, 0), None);
        assert_eq!(finding(40_000, 0, 1), Some((40_000, 40_000)));
    }

    #[test]
    fn pair_of_phases_with_few_calls_says_nothing() {
        for (whole, halved, finds) in [(3, 3, true), (3, 2, false), (2, 3, false)] {
            let mut halving = Halving::default();
            for (calls, is_halved) in [(whole, false), (halved, true)] {
                for _ in 0..calls {
                    let in_flight = if is_halved { 10 } else { 20 };
                    halving.record(HalvingPhase { pair: 1, is_halved, is_settled: true }, 1_000, in_flight, 1);
                }
            }
            let next = HalvingPhase { pair: 2, is_halved: false, is_settled: true };
            assert_eq!(halving.record(next, 1_000, 20, 1).is_some(), finds, "{whole} and {halved} calls");
        }
    }

    #[test]
    fn pairs_with_few_calls_count_together_if_they_are_neighbours() {
        for (second, finds) in [(2, true), (3, false)] {
            let mut halving = Halving::default();
            for (pair, is_halved) in [(1, false), (1, true), (second, false), (second, true)] {
                for _ in 0..2 {
                    let in_flight = if is_halved { 1 } else { 2 };
                    halving.record(HalvingPhase { pair, is_halved, is_settled: true }, 1_000, in_flight, 1);
                }
            }
            let next = HalvingPhase { pair: second + 1, is_halved: false, is_settled: true };
            assert_eq!(halving.record(next, 1_000, 2, 1).is_some(), finds, "pair {second}");
        }
    }

    #[test]
    fn limiters_halve_at_the_same_times() {
        let now = Instant::now();
        let stated = Timestamp::from_micros(1_700_000_000_000_000);
        let clock = StoreClock::new(stated, now, now);
        let later = StoreClock::new(stated.saturating_add(DEADLINE), now, now + DEADLINE);
        for step in 0..300 {
            let at = now + DEADLINE + step * Duration::from_millis(9);
            let phase = clock.phase(at, DEADLINE);
            assert_eq!(phase, later.phase(at, DEADLINE));
            assert_eq!(phase.is_halved, clock.phase(at, Duration::from_millis(120)).is_halved);
        }
    }

    #[test]
    fn phases_of_a_pair_follow_each_other() {
        let now = Instant::now();
        let clock = StoreClock::new(Timestamp::from_micros(1 << 50), now, now);
        let phase = |number: u32| clock.phase(now + Duration::from_micros(PHASE_US_MIN) * number, DEADLINE);
        for number in 0..10 {
            let HalvingPhase { pair, is_halved, .. } = phase(number);
            assert_eq!((pair - phase(0).pair, is_halved), (u64::from(number / 2), number % 2 == 1));
        }
    }

    #[test]
    fn extreme_clocks_and_deadlines_overflow_nothing() {
        let now = Instant::now();
        for stated in [0, u64::MAX] {
            for deadline in [Duration::ZERO, Duration::MAX] {
                let mut halving = Halving::default();
                for number in 0..20 {
                    let phase = StoreClock::new(Timestamp::from_micros(stated), now, now).phase(now, deadline);
                    halving.record(phase, u64::MAX, u64::from(number % 2 == 0) << 16, u64::MAX);
                }
            }
        }
    }
}
