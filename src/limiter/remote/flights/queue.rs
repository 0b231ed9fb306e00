//! The queue of a lane in which any requests share a flight.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::batch::{Batch, LaneQueue, QueuedRequest, RemoteStore, SHARE};

/// Requests that may all share a flight, in the order in which they came.
pub(crate) struct Queue<F: RemoteStore> {
    checks: VecDeque<QueuedRequest<F>>,
    corrections: VecDeque<QueuedRequest<F>>,
    /// The number of checks that were taken since the last correction.
    checks_since: usize,
}

/// The maximum number of requests of each kind for which a queue without flights keeps memory.
pub(super) const SPARE: usize = 16;

impl<F: RemoteStore> Default for Queue<F> {
    fn default() -> Self {
        Self { checks: VecDeque::new(), corrections: VecDeque::new(), checks_since: SHARE }
    }
}

#[cfg(test)]
impl<F: RemoteStore> Queue<F> {
    pub(super) fn capacity(&self) -> usize {
        self.checks.capacity() + self.corrections.capacity()
    }
}

impl<F: RemoteStore<Queue = Self>> LaneQueue<F> for Queue<F> {
    type Held = ();

    fn push(&mut self, waiting: QueuedRequest<F>) {
        match waiting.until {
            Some(_) => self.checks.push_back(waiting),
            None => self.corrections.push_back(waiting),
        }
    }

    fn ready(&self) -> usize {
        self.checks.len() + self.corrections.len()
    }

    fn before_a_check(&self) -> usize {
        let checks = self.checks.len();
        // One of `SHARE` requests is a correction, as long as checks wait.
        checks + self.corrections.len().min(checks / (SHARE - 1) + 1)
    }

    fn take_batch(&mut self, room: usize, batch: &mut Batch<F>) -> Option<((), usize)> {
        batch.callers.reserve_exact(room.min(self.ready()));
        // A flight with less room has one correction if `SHARE - 1` checks were taken since the last one.
        let least = usize::from(self.checks_since >= SHARE - 1);
        let mut share = room.saturating_sub(self.checks.len()).max(room / SHARE).max(least);
        while batch.callers.len() < room {
            let corrects = match (self.checks.front(), self.corrections.front()) {
                (Some(check), Some(correction)) => share > 0 && correction.number < check.number,
                (None, Some(_)) => true,
                (Some(_), None) => false,
                (None, None) => break,
            };
            let next = if corrects { &mut self.corrections } else { &mut self.checks };
            let Some(next) = next.pop_front() else { break };
            if corrects {
                (share, self.checks_since) = (share.saturating_sub(1), 0);
            } else {
                self.checks_since = self.checks_since.saturating_add(1);
            }
            batch.add(next, self.checks.is_empty());
        }
        let units = batch.callers.len();
        (units > 0).then_some(((), units))
    }

    fn release(&mut self, _held: (), _gone: &mut Vec<QueuedRequest<F>>) {}

    fn take_all(&mut self) -> Vec<QueuedRequest<F>> {
        let mut all: Vec<_> = self.checks.drain(..).chain(self.corrections.drain(..)).collect();
        all.sort_unstable_by_key(|waiting| waiting.number);
        all
    }

    fn has(&self, number: u64) -> bool {
        let has =
            |queue: &VecDeque<QueuedRequest<F>>| queue.binary_search_by_key(&number, |waiting| waiting.number).is_ok();
        has(&self.checks) || has(&self.corrections)
    }

    fn has_checks(&self) -> bool {
        !self.checks.is_empty()
    }

    fn oldest(&self) -> Option<Instant> {
        self.checks.front().map(|waiting| waiting.since)
    }

    fn shrink(&mut self) {
        for queue in [&mut self.checks, &mut self.corrections] {
            if queue.capacity() > SPARE {
                queue.shrink_to(SPARE);
            }
        }
    }
}
