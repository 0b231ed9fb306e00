//! The simulated store that compares and swaps, and a process's end of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::network::{Ended, Sent, Wire};
use crate::base::time::Timestamp;
use crate::event::StoreErrorKind;
use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped, Then, Value};

/// The values of the store, with the last microsecond in which each is there.
#[derive(Default)]
pub(super) struct Table {
    values: BTreeMap<Arc<str>, (Value, u64)>,
}

impl Table {
    fn get(&mut self, key: &Arc<str>, now_us: u64) -> Option<Value> {
        if self.values.get(key).is_some_and(|(_, until_us)| now_us > *until_us) {
            self.values.remove(key);
        }
        self.values.get(key).map(|(value, _)| value.clone())
    }

    /// Returns the number of states that are there. The value of a probe has none.
    pub(super) fn count(&self, now_us: u64) -> usize {
        let is_state = |key: &str, until_us: u64| now_us <= until_us && !key.contains(":probe:");
        self.values.iter().filter(|(key, (_, until_us))| is_state(key, *until_us)).count()
    }

    pub(super) fn load(&mut self, keys: &[Arc<str>], now_us: u64) -> Loaded {
        Loaded::new(keys.iter().map(|key| self.get(key, now_us)).collect()).at(Timestamp::from_micros(now_us))
    }

    pub(super) fn swap(&mut self, changes: &[Change], now_us: u64) -> Swapped {
        let now = Timestamp::from_micros(now_us);
        let current: Vec<_> = changes.iter().map(|change| self.get(&change.key, now_us)).collect();
        if changes.iter().zip(&current).any(|(change, value)| !change.expects(value.as_ref())) {
            return Swapped::conflict(current).at(now);
        }
        for change in changes {
            match &change.then {
                Then::Keep => {}
                Then::Put(value, time) => {
                    let until_us = now_us.saturating_add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
                    self.values.insert(Arc::clone(&change.key), (value.clone(), until_us));
                }
                Then::Delete => drop(self.values.remove(&change.key)),
            }
        }
        Swapped::done().at(now)
    }
}

/// The store, as one process sees it. A call connects first if the connection has ended.
pub(super) struct Remote(pub(super) Wire);

impl Remote {
    async fn call(&self, sent: Sent) -> Result<Ended, StoreError> {
        let away = || StoreError::new(StoreErrorKind::Unavailable, "the connection has ended");
        if !self.0.is_connected() && !self.0.connect().await {
            return Err(away());
        }
        match self.0.send(sent).await {
            Ended::NotConnected | Ended::Disconnected => Err(away()),
            ended => Ok(ended),
        }
    }
}

impl Store for Remote {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        match self.call(Sent::Load(keys.to_vec())).await? {
            Ended::Loaded(loaded) => Ok(loaded),
            other => panic!("{other:?} is no answer to a load"),
        }
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        match self.call(Sent::Swap(changes.to_vec())).await? {
            Ended::Swapped(swapped) => Ok(swapped),
            other => panic!("{other:?} is no answer to a swap"),
        }
    }

    fn name(&self) -> String {
        "the simulated store".to_owned()
    }
}
