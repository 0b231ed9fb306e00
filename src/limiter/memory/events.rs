//! Events that the observers get after all locks are released.

use crate::base::sync::contained;
use crate::base::wait::Wait;
use crate::decision::ChargeDecision;
use crate::event::LimiterEvent;

use super::states::States;

/// The wait that a denial reports if the table has no room for the key.
const FULL_RETRY_US: u64 = 1_000_000;

/// Events that are reported when this value is dropped. The value is made before any lock is taken, so it is dropped
/// after the locks are released. Therefore an observer may call the limiter or panic.
pub(super) struct PendingEvents<'a> {
    states: &'a States,
    events: Vec<LimiterEvent>,
    /// True if a panic of the observer would lose a receipt, so that units would stay held.
    pub(super) is_contained: bool,
}

impl<'a> PendingEvents<'a> {
    pub(super) fn of(states: &'a States) -> Self {
        Self { states, events: Vec::new(), is_contained: false }
    }

    /// Notes that a key was forgotten. `throttled` is true if the key was out of allowance.
    pub(super) fn evicted(&mut self, throttled: bool) {
        self.events.push(LimiterEvent::evicted(throttled));
    }

    /// Reports the events. This method is not inlined, so that its callers inline only the check for events
    /// (`benches/instructions`, "state of two words").
    #[cold]
    fn report(&self) {
        for event in &self.events {
            let report = || self.states.setup.observers.report(event);
            // If the thread is already panicking, a second panic that leaves a destructor would abort the process.
            if self.is_contained || std::thread::panicking() { contained(report) } else { report() }
        }
    }

    /// Returns the answer to a charge for which there is no room.
    pub(super) fn full(&mut self, decision: &ChargeDecision) -> ChargeDecision {
        self.events.push(LimiterEvent::Full);
        if decision.known_reset_us().is_none() {
            return ChargeDecision::denied(decision.limit(), 0, Wait::Unknown); // no time gives units back
        }
        ChargeDecision::found(decision.limit(), 0, decision.reset_us, FULL_RETRY_US, Some(FULL_RETRY_US))
    }
}

impl Drop for PendingEvents<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.events.is_empty() {
            self.report();
        }
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::Arc;

    use super::*;
    use crate::clock::ManualClock;
    use crate::limiter::memory::setup::{AnyClock, Setup};
    use crate::outcome::Observer;

    struct Panics;

    impl Observer for Panics {
        fn on_limiter_event(&self, _: &LimiterEvent) {
            resume_unwind(Box::new("the observer panics"));
        }
    }

    /// The process would end if a second panic left a destructor.
    #[test]
    fn observer_that_panics_after_the_clock_ends_no_process() {
        let setup = Setup { capacity: 1, entries: 1, ..Setup::default() };
        setup.observers.add(&(Arc::new(Panics) as Arc<dyn Observer>));
        let states = States::new(setup, AnyClock::Other(Arc::new(ManualClock::new())), [1, 2]);
        let charge = || {
            let mut events = PendingEvents::of(&states);
            events.evicted(true);
            resume_unwind(Box::new("the clock panics"));
        };
        assert!(catch_unwind(AssertUnwindSafe(charge)).is_err());
    }
}
