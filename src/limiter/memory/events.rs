//! Events for the observer, which it gets once no lock is held.

use crate::decision::ChargeDecision;
use crate::event::LimiterEvent;

use super::store::Store;

/// The wait that is reported for a key that found no room.
const FULL_RETRY_US: u64 = 1_000_000;

/// Events that are reported when this is dropped. It is made before any lock is taken, so it outlives them: an observer
/// may ask the limiter or panic.
pub(super) struct Events<'a> {
    store: &'a Store,
    events: Vec<LimiterEvent>,
}

impl<'a> Events<'a> {
    pub(super) fn of(store: &'a Store) -> Self {
        Self { store, events: Vec::new() }
    }

    /// Notes that a key was forgotten; `throttled` if it was out of allowance.
    pub(super) fn evicted(&mut self, throttled: bool) {
        self.events.push(LimiterEvent::evicted(throttled));
    }

    /// Reports the events. Out of line, so that dropping none of them stays in place (`benches/instructions.rs`, "state
    /// of two words").
    #[cold]
    fn report(&self) {
        self.events.iter().for_each(|event| self.store.setup.observers.report(event));
    }

    /// Returns the answer to a charge for which there is no room.
    pub(super) fn full(&mut self, decision: &ChargeDecision) -> ChargeDecision {
        self.events.push(LimiterEvent::Full);
        ChargeDecision::found(decision.limit(), 0, decision.reset_us, FULL_RETRY_US, Some(FULL_RETRY_US))
    }
}

impl Drop for Events<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.events.is_empty() {
            self.report();
        }
    }
}
