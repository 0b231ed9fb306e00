//! The lines of all keys.

use std::collections::HashMap;
use std::sync::Arc;

use super::line::KeyLine;
use crate::base::sync::{Mutex, lock};
use crate::base::wakers::Wakers;
use crate::key::Key;

/// A line that requests share. Each request that waits or is in flight holds a reference to the line.
pub(super) type SharedLine = Arc<Mutex<KeyLine>>;

/// Changes a line under its lock, and wakes tasks after that.
pub(super) fn change<T>(line: &SharedLine, with: impl FnOnce(&mut KeyLine, &mut Wakers) -> T) -> T {
    let mut wakers = Wakers::default();
    let changed = with(&mut lock(line), &mut wakers);
    wakers.release();
    changed
}

#[derive(Debug, Default)]
pub(super) struct LineTable(Mutex<HashMap<Key, SharedLine>>);

impl LineTable {
    /// Returns the line of a key, and makes a new line for a new key. If there are already `most` lines,
    /// makes room for a new key. Returns `None` if no line can be forgotten to make room.
    ///
    /// To make room, forgets the least recently used lines that are not paused and that no request holds: an eighth of
    /// all lines, and at least one. If there is no such line, forgets one line that no request holds and whose pause
    /// ends after `bound_us`.
    pub(super) fn line(
        &self,
        key: &Key,
        now_us: u64,
        bound_us: u64,
        most: usize,
        make: impl FnOnce() -> KeyLine,
    ) -> Option<SharedLine> {
        let mut lines = lock(&self.0);
        if let Some(line) = lines.get(key) {
            return Some(Arc::clone(line));
        }
        if lines.len() >= most {
            let idle = lines.iter().filter(|(_, line)| Arc::strong_count(line) == 1);
            let idle = idle.filter_map(|(key, line)| {
                let line = lock(line);
                let (is_paused, is_long) = (line.opens_us() > now_us, line.opens_us() > bound_us);
                (!is_paused || is_long).then(|| (is_paused, line.used_us(), key.clone()))
            });
            let mut idle: Vec<_> = idle.collect();
            idle.sort_unstable_by_key(|(is_paused, used_us, _)| (*is_paused, *used_us));
            let unpaused = idle.iter().take_while(|(is_paused, ..)| !is_paused).count();
            for (_, _, key) in idle.into_iter().take(unpaused.min(most / 8).max(1)) {
                lines.remove(&key);
            }
        }
        if lines.len() >= most {
            return None;
        }
        let line = Arc::new(Mutex::new(make()));
        lines.insert(key.clone(), Arc::clone(&line));
        Some(line)
    }

    /// Forgets the line of a key. Requests that hold the line still use it until they end.
    pub(super) fn forget(&self, key: &Key) {
        lock(&self.0).remove(key);
    }

    /// Returns the line of a key if the table has the line.
    pub(super) fn known(&self, key: &Key) -> Option<SharedLine> {
        lock(&self.0).get(key).cloned()
    }
}
