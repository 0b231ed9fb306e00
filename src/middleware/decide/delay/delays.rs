//! The waiting room of a layer, in which `wait.rs` and `in_line.rs` let requests wait.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::clock::{Timer, time_of};
use crate::key::Key;
use crate::limiter::{AskLines, DepartureLines, PlaceLines};
use crate::policy::Policy;

/// The waiting room of a layer: its timer, and the lines of waiting requests.
pub(crate) struct Delays {
    pub(super) timer: Arc<dyn Timer>,
    pub(super) lines: DepartureLines,
    /// The lines of messages that wait for units that become free with time.
    pub(super) asks: Arc<AskLines>,
    waiting: AtomicUsize,
    bounds: WaitBounds,
}

/// The maximum numbers of requests that wait at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitBounds {
    /// The maximum number in the layer, in queues and in lines together.
    pub(crate) in_all: usize,
    /// The maximum number in line for the units of one key.
    pub(crate) in_line: usize,
}

/// The default maximum number of requests that wait in a layer.
const WAITING: usize = 1_000;

/// The default maximum number of requests that wait in line for one key. Over HTTP/1 a server often does not notice
/// that a client has gone, so a client can leave many requests in line. So the requests that wait for one key take
/// at most a tenth of the layer's maximum.
const IN_LINE: usize = 100;

impl Default for WaitBounds {
    fn default() -> Self {
        Self { in_all: WAITING, in_line: IN_LINE }
    }
}

/// Counts one request as waiting, until this value is dropped.
pub(crate) struct Counted(pub(super) Arc<Delays>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Delays {
    pub(crate) fn new(timer: Arc<dyn Timer>, bounds: WaitBounds) -> Self {
        Self { timer, lines: DepartureLines::default(), asks: Arc::default(), waiting: AtomicUsize::new(0), bounds }
    }

    /// Counts one more request as waiting. Returns `None` if the maximum number of requests wait already.
    pub(super) fn count(self: &Arc<Self>) -> Option<Counted> {
        let one_more = |waiting: usize| (waiting < self.bounds.in_all).then_some(waiting + 1);
        let counted = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.is_ok().then(|| Counted(Arc::clone(self)))
    }

    /// Returns whether the maximum number of requests wait already.
    pub(crate) fn is_full(&self) -> bool {
        self.waiting() >= self.bounds.in_all
    }

    /// Returns whether a request that does not wait yet may join the line for units of a key.
    pub(crate) fn has_room_in_line(&self, lines: &PlaceLines, policy: &Policy, key: &Key) -> bool {
        !self.is_full() && lines.waiting(policy, key) < self.bounds.in_line
    }

    /// Returns whether a message that does not wait yet may join the line of a key.
    pub(super) fn has_room_to_ask(&self, policy: &Policy, key: &Key) -> bool {
        !self.is_full() && self.asks.waiting(policy, key) < self.bounds.in_line
    }

    /// Allows the first message that waits for a key to ask the limiter now, because units have come
    /// back.
    pub(crate) fn let_first_ask(&self, policy: &Policy, key: &Key) {
        self.asks.let_first_ask(policy, key, &*self.timer);
    }

    /// Allows the first message of each key to ask the limiter now, because a mode or a quota has
    /// changed.
    pub(crate) fn let_each_first_ask(&self, policy: &Policy) {
        self.asks.let_each_first_ask(policy, &*self.timer);
    }

    /// Returns the number of requests that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(super) fn now(&self) -> Duration {
        self.timer.now()
    }

    /// Returns the timer's time in microseconds, or 0 if the timer cannot sleep.
    pub(super) fn now_us(&self) -> u64 {
        time_of(&*self.timer).unwrap_or(0)
    }

    /// Returns whether the timer can sleep.
    pub(crate) fn can_sleep(&self) -> bool {
        time_of(&*self.timer).is_some()
    }
}

impl fmt::Debug for Delays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delays").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}
