//! What an observer is to be told, once no lock is held.

use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::outcome::LimiterEvent;

use super::large::Crowd;
use super::store::Store;
use super::worth::Worth;

/// What a denied newcomer to a full table is told to wait.
const FULL_RETRY_US: u64 = 1_000_000;

/// Events that are told when this is dropped: made before any lock is taken, it outlives them.
pub(super) struct News<'a> {
    store: &'a Store,
    events: SmallVec<[LimiterEvent; 2]>,
}

impl<'a> News<'a> {
    pub(super) fn of(store: &'a Store) -> Self {
        Self { store, events: SmallVec::new() }
    }

    pub(super) fn evicted(&mut self, worth: Worth) {
        self.events.push(LimiterEvent::Evicted { throttled: worth.is_throttled() });
    }

    pub(super) fn crowd(&mut self, crowd: &Crowd<'_>) {
        crowd.evicted.iter().for_each(|worth| self.evicted(*worth));
    }

    /// The answer to a new key for which there is no room.
    pub(super) fn full(&mut self, mut decision: ChargeDecision) -> ChargeDecision {
        self.events.push(LimiterEvent::Full);
        decision.untaken();
        ChargeDecision::found(decision.limit(), 0, decision.reset_us(), FULL_RETRY_US, Some(FULL_RETRY_US))
    }
}

impl Drop for News<'_> {
    fn drop(&mut self) {
        if let Some(observer) = &self.store.setup.observer {
            self.events.iter().for_each(|event| observer.on_event(event));
        }
    }
}
