//! An observer that records the events of a limiter.

use std::sync::{Arc, Mutex, MutexGuard};

use tower_ratelimit::observe::{LimiterEvent, Observer};

/// Records the events of a limiter.
#[derive(Clone, Default)]
pub(crate) struct Events(Arc<Mutex<Vec<LimiterEvent>>>);

impl Events {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<LimiterEvent>> {
        self.0.lock().expect("no test panics with the lock held")
    }
}

impl Observer for Events {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.lock().push(event.clone());
    }
}
