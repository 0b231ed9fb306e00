//! The load of a limiter's store, for operators.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The current load of a limiter's store, such as Redis, as this process sees it; see
/// [`LimiterHooks::store_load`](crate::limiter::LimiterHooks::store_load).
///
/// The load shows that a store is slow before checks fail: [`oldest_wait`](Self::oldest_wait) and
/// [`call_time`](Self::call_time) come near to the [`deadline`](Self::deadline).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreLoad {
    /// The number of checks and corrections that have no answer yet, whether they were sent or not.
    pub waiting: usize,
    /// The age of the oldest check that was not sent yet, or zero if no check waits to be sent.
    pub oldest_wait: Duration,
    /// The number of calls that were sent and have no answer yet. One call can carry many checks.
    pub calls_in_flight: usize,
    /// The smoothed duration of a call to the store, or `None` if no call has ended in the last ten seconds. In a
    /// cluster, this is the slowest server's duration.
    pub call_time: Option<Duration>,
    /// The duration of the quickest call of the last five to ten seconds, including late answers, or `None` if no call
    /// was answered. If the quickest call is nearly as long as [`call_time`](Self::call_time), the store is far away.
    /// If the quickest call is much shorter, the store or the network is busy.
    pub quickest_call: Option<Duration>,
    /// The time after which a check without an answer fails.
    pub deadline: Option<Duration>,
    /// The number of checks and corrections that have failed as
    /// [`Overloaded`](crate::limiter::StoreErrorKind::Overloaded) so far.
    pub shed: u64,
    /// The number of connections to the servers of Redis that were made so far. The number grows while connections are
    /// cut, or are made anew because a server is silent. Stores other than Redis do not report connections.
    pub connections: u64,
}

impl StoreLoad {
    /// Returns the load of two stores together. Counts are added. The times of calls and the deadline are those of the
    /// store that is nearer to its deadline, and the oldest wait is the longer of the two.
    pub(crate) fn with(self, other: Self) -> Self {
        let slower = if other.per_mille_of_deadline() > self.per_mille_of_deadline() { &other } else { &self };
        Self {
            waiting: self.waiting.saturating_add(other.waiting),
            oldest_wait: self.oldest_wait.max(other.oldest_wait),
            calls_in_flight: self.calls_in_flight.saturating_add(other.calls_in_flight),
            call_time: slower.call_time,
            quickest_call: slower.quickest_call,
            deadline: slower.deadline,
            shed: self.shed.saturating_add(other.shed),
            connections: self.connections.saturating_add(other.connections),
        }
    }

    /// Returns the call time or the oldest wait, whichever is longer, in thousandths of the deadline.
    pub(crate) fn per_mille_of_deadline(&self) -> Option<u128> {
        let time = self.call_time.unwrap_or_default().max(self.oldest_wait);
        (time.as_micros() * 1_000).checked_div(self.deadline?.as_micros())
    }
}

/// Reads the [load](StoreLoad) of a limiter's store at any time. A limiter passes a [`StoreLoadReader`] to its
/// observers by [`Observer::on_store`](crate::observe::Observer::on_store).
#[derive(Clone)]
pub struct StoreLoadReader(Arc<dyn Fn() -> Option<StoreLoad> + Send + Sync>);

impl StoreLoadReader {
    /// Makes a reader for your own limiter. `read` must return `None` after the limiter was dropped, so it should hold
    /// the limiter's parts by a [`Weak`](std::sync::Weak).
    #[must_use]
    pub fn new(read: impl Fn() -> Option<StoreLoad> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Returns the load now. Returns `None` if the limiter was dropped.
    #[must_use]
    pub fn read(&self) -> Option<StoreLoad> {
        (self.0)()
    }
}

impl fmt::Debug for StoreLoadReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StoreLoadReader").field(&self.read()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_of_two_stores_has_the_times_of_the_slower() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let near = StoreLoad {
            waiting: 3,
            call_time: ms(4),
            quickest_call: ms(3),
            deadline: ms(5),
            shed: 1,
            ..StoreLoad::default()
        };
        let far = StoreLoad {
            waiting: 2,
            oldest_wait: Duration::from_millis(7),
            calls_in_flight: 4,
            call_time: ms(40),
            quickest_call: ms(39),
            deadline: ms(100),
            shed: 5,
            connections: 2,
        };
        let both = StoreLoad {
            waiting: 5,
            oldest_wait: Duration::from_millis(7),
            calls_in_flight: 4,
            call_time: ms(4),
            quickest_call: ms(3),
            deadline: ms(5),
            shed: 6,
            connections: 2,
        };
        assert_eq!(near.with(far), both);
        assert_eq!(far.with(near), both);
    }

    #[test]
    fn load_without_a_deadline_is_near_to_none() {
        let known = StoreLoad { deadline: Some(Duration::ZERO), ..StoreLoad::default() };
        assert_eq!((StoreLoad::default().per_mille_of_deadline(), known.per_mille_of_deadline()), (None, None));
    }
}
