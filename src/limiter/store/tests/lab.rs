//! A store in memory that fails, lies about its time, answers late, and loses answers, as a test asks for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;

use crate::base::random::mixed;
use crate::base::sync::{Mutex, lock};
use crate::clock::{Clock, ManualClock};
use crate::event::StoreErrorKind;
use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped, Then, Value};

/// The fate of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Answered,
    /// The store did not get it.
    NotSent,
    /// The store made it, and the answer is lost.
    AnswerLost,
    /// The store made it, and never answers.
    Silent,
    /// The store makes it after this time, whether or not anybody waits, and the connection is cut.
    Late(Duration),
    /// The store makes it at once, and answers after this time.
    Slow(Duration),
    /// Another process writes the same state again, with a version of its own, right before.
    Overtaken,
    /// Others write this many times after it, and the answer is lost.
    LostThenOverwritten(u8),
    /// The store made it, others remove the value and write it anew, and the answer is lost. A value that it removed
    /// itself is written as it was before.
    LostThenWrittenAnew,
    /// The answer is that of a moment ago.
    Old,
}

#[derive(Clone, Default)]
pub(in crate::limiter::store) struct Lab(pub(super) Arc<Inner>);

#[derive(Default)]
pub(super) struct Inner {
    pub(super) values: Mutex<HashMap<Arc<str>, Value>>,
    old: Mutex<HashMap<Arc<str>, Value>>,
    /// The store's clock, if it reports its time.
    pub(super) clock: Option<ManualClock>,
    /// The fates of the next calls. Later ones are answered, or have the random fates.
    pub(super) fates: Mutex<Vec<Fate>>,
    /// Fates of which each call has one, by chance.
    pub(super) random: Mutex<Vec<Fate>>,
    /// The time of a round trip.
    pub(super) trip: Duration,
    /// The swaps that one call takes, if it takes several. Then there is one call at a time.
    pub(super) joint: Option<usize>,
    /// The keys of swaps that are left out of a call of several.
    pub(super) skipped: Mutex<Vec<Arc<str>>>,
    /// The calls of several swaps.
    pub(super) joint_calls: AtomicU64,
    pub(super) loads: AtomicU64,
    pub(super) swaps: AtomicU64,
    versions: AtomicU64,
    has_failed: AtomicBool,
}

impl Lab {
    pub(super) fn with(change: impl FnOnce(&mut Inner)) -> Self {
        let mut inner = Inner::default();
        change(&mut inner);
        Self(Arc::new(inner))
    }

    /// Sets the fates of the next calls.
    pub(super) fn next(&self, fates: &[Fate]) {
        *lock(&self.0.fates) = fates.iter().rev().copied().collect();
    }

    /// Returns the numbers of loads and swaps since the last time.
    pub(super) fn calls(&self) -> (u64, u64) {
        (self.0.loads.swap(0, Ordering::Relaxed), self.0.swaps.swap(0, Ordering::Relaxed))
    }

    fn fate(&self) -> Fate {
        let random = lock(&self.0.random);
        let number = self.0.versions.fetch_add(1, Ordering::Relaxed);
        let chosen = random.get((mixed(number) % random.len().max(1) as u64) as usize).copied();
        let fate = lock(&self.0.fates).pop().or(chosen).unwrap_or(Fate::Answered);
        // By chance no two calls fail one after the other, or a limiter would give the store up.
        let is_answered = fate == Fate::Answered || random.len() < 2;
        if is_answered || !self.0.has_failed.swap(true, Ordering::Relaxed) {
            return fate;
        }
        self.0.has_failed.store(false, Ordering::Relaxed);
        Fate::Answered
    }

    fn swap_now(&self, changes: &[Change]) -> Swapped {
        let mut values = lock(&self.0.values);
        let current: Vec<_> = changes.iter().map(|change| values.get(&change.key).cloned()).collect();
        if changes.iter().zip(&current).any(|(change, value)| !change.expects(value.as_ref())) {
            return Swapped::conflict(current);
        }
        lock(&self.0.old).clone_from(&values);
        for change in changes {
            match &change.then {
                Then::Keep => {}
                Then::Put(value, _) => drop(values.insert(Arc::clone(&change.key), value.clone())),
                Then::Delete => drop(values.remove(&change.key)),
            }
        }
        Swapped::done()
    }

    /// Writes the values of these keys again, with other versions, as another limiter does that changes nothing else.
    pub(super) fn overwrite(&self, keys: impl Iterator<Item = Arc<str>>) {
        let mut values = lock(&self.0.values);
        for key in keys {
            let Some(value) = values.get(&key).cloned() else { continue };
            let quotas = crate::limiter::store::value::Quotas::default();
            let Ok((history, state)) = quotas.read(&value, None) else { continue };
            let number = self.0.versions.fetch_add(1, Ordering::Relaxed);
            let version = super::super::Version::from_bytes(u128::from(number).to_be_bytes());
            let bytes = state.write(&history.after(value.version));
            values.insert(key, Value::new(version, bytes));
        }
    }

    /// Writes the values of these keys, or those that the last swap removed, as new ones, as another limiter does that
    /// takes the same units.
    fn write_anew(&self, keys: impl Iterator<Item = Arc<str>>) {
        let (old, mut values) = (lock(&self.0.old), lock(&self.0.values));
        for key in keys {
            let Some(value) = values.get(&key).or(old.get(&key)) else { continue };
            let quotas = crate::limiter::store::value::Quotas::default();
            let Ok((_, state)) = quotas.read(value, None) else { continue };
            let number = self.0.versions.fetch_add(1, Ordering::Relaxed);
            let version = super::super::Version::from_bytes(u128::from(number).to_be_bytes());
            values.insert(key, Value::new(version, state.write(&crate::limiter::store::value::History::fresh())));
        }
    }

    fn away() -> StoreError {
        StoreError::new(StoreErrorKind::Unavailable, "the connection was cut")
    }
}

impl Store for Lab {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        self.0.loads.fetch_add(1, Ordering::Relaxed);
        let fate = self.fate();
        tokio::time::sleep(self.0.trip).await;
        match fate {
            Fate::NotSent | Fate::AnswerLost | Fate::LostThenOverwritten(_) | Fate::LostThenWrittenAnew => {
                return Err(Self::away());
            }
            Fate::Silent => std::future::pending().await,
            Fate::Late(time) | Fate::Slow(time) => tokio::time::sleep(time).await,
            Fate::Answered | Fate::Overtaken | Fate::Old => {}
        }
        let values = lock(if fate == Fate::Old { &self.0.old } else { &self.0.values });
        let loaded = Loaded::new(keys.iter().map(|key| values.get(key).cloned()).collect());
        Ok(match &self.0.clock {
            Some(clock) => loaded.at(clock.now()),
            None => loaded,
        })
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        self.0.swaps.fetch_add(1, Ordering::Relaxed);
        let fate = self.fate();
        if let Fate::Late(time) = fate {
            let (lab, changes) = (self.clone(), changes.to_vec());
            tokio::spawn(async move {
                tokio::time::sleep(time).await;
                lab.swap_now(&changes);
            });
            return Err(Self::away());
        }
        if self.0.trip > Duration::ZERO {
            tokio::time::sleep(self.0.trip).await;
        }
        let keys = || changes.iter().map(|change| Arc::clone(&change.key));
        if fate == Fate::NotSent {
            return Err(Self::away());
        }
        if fate == Fate::Overtaken {
            self.overwrite(keys());
        }
        let mut swapped = self.swap_now(changes);
        match fate {
            Fate::AnswerLost => return Err(Self::away()),
            Fate::Silent => std::future::pending().await,
            Fate::Slow(time) => tokio::time::sleep(time).await,
            Fate::LostThenOverwritten(times) => {
                (0..times).for_each(|_| self.overwrite(keys()));
                return Err(Self::away());
            }
            Fate::LostThenWrittenAnew => {
                self.write_anew(keys());
                return Err(Self::away());
            }
            Fate::Old if !swapped.is_done() => {
                let old = lock(&self.0.old);
                swapped = Swapped::conflict(keys().map(|key| old.get(&key).cloned()).collect());
            }
            _ => {}
        }
        Ok(match &self.0.clock {
            Some(clock) => swapped.at(clock.now()),
            None => swapped,
        })
    }

    async fn swap_each(&self, swaps: &[&[Change]]) -> Vec<Result<Swapped, StoreError>> {
        self.0.joint_calls.fetch_add(1, Ordering::Relaxed);
        let is_skipped = |changes: &[Change]| lock(&self.0.skipped).contains(&changes[0].key);
        let answers = swaps.iter().map(async |changes| match is_skipped(changes) {
            true => Ok(Swapped::skipped()),
            false => self.swap(changes).await,
        });
        join_all(answers).await
    }

    fn max_swaps(&self) -> usize {
        self.0.joint.unwrap_or(1)
    }

    fn max_calls(&self) -> usize {
        if self.0.joint.is_some() { 1 } else { usize::MAX }
    }

    fn name(&self) -> String {
        "the lab".to_owned()
    }
}
