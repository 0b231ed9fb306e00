//! The events of a store, for the observer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::address::Address;
use crate::limiter::redis::error::{RedisError, RedisErrorKind};
use crate::outcome::{LimiterEvent, Observer};

/// Errors of one kind are reported again after this time.
const AGAIN: Duration = Duration::from_secs(60);

/// Reports to the observer, if there is one.
pub(super) struct Events {
    observer: OnceLock<Arc<dyn Observer>>,
    /// When an error of each kind was last reported.
    reported: [Mutex<Option<Instant>>; 5],
}

impl Events {
    pub(super) fn new(observer: Option<Arc<dyn Observer>>) -> Self {
        Self { observer: observer.map_or_else(OnceLock::new, OnceLock::from), reported: Default::default() }
    }

    pub(super) fn down(&self, server: &Address, error: &RedisError) {
        self.report(|| LimiterEvent::StoreDown { server: server.to_string(), error: error.to_string() });
    }

    pub(super) fn up(&self, server: &Address) {
        self.report(|| LimiterEvent::StoreUp { server: server.to_string() });
    }

    pub(super) fn left(&self, server: &Address) {
        self.report(|| LimiterEvent::StoreLeft { server: server.to_string() });
    }

    /// Reports an error, once a minute for each kind.
    pub(super) fn failed(&self, error: &RedisError) {
        let kind = match error.kind() {
            RedisErrorKind::Unavailable => 0,
            RedisErrorKind::Timeout => 1,
            RedisErrorKind::Overloaded => 2,
            RedisErrorKind::Foreign => 3,
            RedisErrorKind::Misconfigured => 4,
        };
        if !self.is_observed() || !is_due(&self.reported[kind]) {
            return;
        }
        self.report(|| match error.kind() {
            RedisErrorKind::Misconfigured => LimiterEvent::StoreMisconfigured { error: error.to_string() },
            _ => LimiterEvent::StoreFailed { error: error.to_string() },
        });
    }

    /// Sets the observer, unless there is one.
    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        let _ = self.observer.set(Arc::clone(observer));
    }

    pub(super) fn is_observed(&self) -> bool {
        self.observer.get().is_some()
    }

    pub(super) fn report(&self, event: impl FnOnce() -> LimiterEvent) {
        if let Some(observer) = self.observer.get() {
            // The tasks that keep connections go on if it panics.
            let _ = catch_unwind(AssertUnwindSafe(|| observer.on_event(&event())));
        }
    }
}

/// Whether something is to be reported again. If so, it counts as reported now.
fn is_due(reported: &Mutex<Option<Instant>>) -> bool {
    let now = Instant::now();
    let mut reported = reported.lock().unwrap_or_else(PoisonError::into_inner);
    let due = reported.is_none_or(|last| now.duration_since(last) >= AGAIN);
    if due {
        *reported = Some(now);
    }
    due
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Count(Mutex<usize>);

    impl Observer for Count {
        fn on_event(&self, _: &LimiterEvent) {
            *self.0.lock().unwrap() += 1;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_reported_once_a_minute_for_each_kind() {
        use RedisErrorKind::{Foreign, Misconfigured, Overloaded, Timeout, Unavailable};
        let count = Arc::new(Count::default());
        let events = Events::new(Some(Arc::clone(&count) as Arc<dyn Observer>));
        for minute in 1..=2 {
            for kind in [Unavailable, Timeout, Overloaded, Foreign, Misconfigured].into_iter().cycle().take(50) {
                events.failed(&RedisError::new(kind, "wrong"));
            }
            tokio::time::advance(AGAIN - Duration::from_millis(1)).await;
            events.failed(&RedisError::new(Misconfigured, "wrong"));
            assert_eq!(*count.0.lock().unwrap(), 5 * minute);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }
}
