//! Requests that were admitted, and whose end an application reports.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::middleware::Admission;

/// The most requests that are held at a time. Each takes about a kilobyte.
pub(crate) const HELD_MAX: usize = 10_000;

/// The longest time that a request is held.
pub(crate) const HOLD_MAX: Duration = Duration::from_secs(600);

/// The held requests, by their ids.
#[derive(Default)]
pub(crate) struct Held(Mutex<Table>);

#[derive(Default)]
struct Table {
    held: HashMap<String, (Admission, Instant)>,
    /// Places that were reserved for requests which are being decided.
    reserved: usize,
    random: RandomState,
    number: u64,
}

/// A place for a request that is being decided.
pub(crate) struct Place<'a>(&'a Held);

impl Held {
    /// Reserves a place, before the request is charged. Returns `None` if there is none.
    pub(crate) fn reserve(&self) -> Option<Place<'_>> {
        let mut table = self.lock();
        if table.held.len() + table.reserved >= HELD_MAX {
            return None;
        }
        table.reserved += 1;
        Some(Place(self))
    }

    /// Takes a request by its id, unless its time is over.
    pub(crate) fn take(&self, id: &str) -> Option<Admission> {
        let (admission, until) = self.lock().held.remove(id)?;
        if until > Instant::now() {
            return Some(admission);
        }
        admission.keep();
        None
    }

    /// Keeps what requests took whose time is over.
    pub(crate) fn sweep(&self) {
        let now = Instant::now();
        let ended: Vec<(Admission, Instant)> = {
            let mut table = self.lock();
            let ids: Vec<String> =
                table.held.iter().filter(|(_, (_, until))| *until <= now).map(|(id, _)| id.clone()).collect();
            ids.iter().filter_map(|id| table.held.remove(id)).collect()
        };
        ended.into_iter().for_each(|(admission, _)| admission.keep());
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place<'_> {
    /// Holds a request. Returns its id, which cannot be guessed from others.
    pub(crate) fn hold(self, admission: Admission, time: Duration) -> String {
        let mut table = self.0.lock();
        table.number += 1;
        let number = table.number;
        let id = format!("{:016x}{number:x}", table.random.hash_one(number));
        table.held.insert(id.clone(), (admission, Instant::now() + time.min(HOLD_MAX)));
        drop(table); // before the place is given back, which takes the lock
        id
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.lock().reserved -= 1;
    }
}
