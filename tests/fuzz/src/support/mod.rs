//! Code that several targets share.
#![allow(dead_code, reason = "each target uses its part")]

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use tokio::runtime::Runtime;
use tower_ratelimit::limiter::store::{Change, Loaded, Store, StoreError, Swapped, Then, Value};
use tower_ratelimit::{ConfigError, Quota};

pub(crate) static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    // Without the pause, each input takes a millisecond for each timer that it waits for.
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().expect("a runtime without I/O is possible")
});

const HOUR: Duration = Duration::from_secs(3_600);

/// Returns a quota of each algorithm with states that are dated.
pub(crate) fn quotas() -> Vec<Quota> {
    let quotas = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::per_hour(5),
            Quota::token_bucket(99_999, HOUR)?.burst(6)?,
            Quota::step_bucket(5, HOUR)?,
            Quota::leaky_queue(5, HOUR)?.queue(4)?,
            Quota::fixed_window(5, HOUR)?,
            Quota::sliding_window(5, HOUR)?.buckets(6)?,
            Quota::sliding_log(5, HOUR)?,
            Quota::block(1, HOUR, HOUR)?,
            Quota::meter(5, HOUR)?,
            Quota::concurrent(5),
        ])
    };
    quotas().expect("the quotas are possible")
}

/// A store that has this value for every key, until another is written.
#[derive(Clone, Default)]
pub(crate) struct InMemory(Arc<Inner>);

#[derive(Default)]
struct Inner {
    first: Option<Value>,
    values: Mutex<HashMap<Arc<str>, Value>>,
    removed: Mutex<Vec<Arc<str>>>,
}

impl InMemory {
    /// Makes a store that has this value for every key.
    pub(crate) fn with(first: Value) -> Self {
        Self(Arc::new(Inner { first: Some(first), ..Inner::default() }))
    }

    /// Returns one of the values that were written.
    pub(crate) fn any(&self) -> Option<Value> {
        self.0.values.lock().expect("no thread panics").values().next().cloned()
    }

    fn current(&self, key: &Arc<str>) -> Option<Value> {
        let removed = self.0.removed.lock().expect("no thread panics").contains(key);
        let first = self.0.first.clone().filter(|_| !removed);
        self.0.values.lock().expect("no thread panics").get(key).cloned().or(first)
    }
}

impl Store for InMemory {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        Ok(Loaded::new(keys.iter().map(|key| self.current(key)).collect()))
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let current: Vec<_> = changes.iter().map(|change| self.current(&change.key)).collect();
        if changes.iter().zip(&current).any(|(change, value)| !change.expects(value.as_ref())) {
            return Ok(Swapped::conflict(current));
        }
        for change in changes {
            let mut values = self.0.values.lock().expect("no thread panics");
            match &change.then {
                Then::Keep => {}
                Then::Put(value, _) => drop(values.insert(Arc::clone(&change.key), value.clone())),
                Then::Delete => {
                    values.remove(&change.key);
                    self.0.removed.lock().expect("no thread panics").push(Arc::clone(&change.key));
                }
            }
        }
        Ok(Swapped::done())
    }
}
