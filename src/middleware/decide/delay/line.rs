//! The requests that wait in this process, in lines, and the departure of each.
//!
//! The limiter gives each admitted request a departure of its own, a *slot*. Requests of one policy, key and cost wait in
//! one line: the first waiter has the first slot, the second waiter the second. If a waiter leaves, all behind it move up
//! by one and the last slot becomes free. Only the ends of the line change.
//!
//! A waiter that is woken releases every waiter whose slot is due, so a task that does not run delays no other request.
//! Each waiter sets its timer for the slot that it has when it joins. The foremost waiters are woken when their slot
//! becomes earlier than their timer, and set their timers anew. So no request departs later than the limiter said, and a
//! request that moved up departs in its new slot unless the tasks of all foremost waiters do not run.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use smallvec::SmallVec;

use crate::decision::Receipt;
use crate::key::Key;

const SHARDS: usize = 16;

/// The number of foremost waiters, whose timers are set to the slots that they have now.
const FOREMOST: usize = 8;

/// A map with more capacity than this is shrunk when it has few lines.
const SPARE: usize = 64;

/// The policy, key and cost that a line is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) policy: usize,
    pub(super) key: Key,
    /// A slot fits only requests of its own cost: a more costly one would depart too close to the next.
    pub(super) cost: u64,
}

/// All lines of a layer. A place has a line only while a request waits there.
#[derive(Debug)]
pub(super) struct Lines {
    shards: Box<[Mutex<Shard>]>,
    hash: RandomState,
    turns: AtomicU64,
}

type Shard = HashMap<Place, Line>;

/// Wakers that were taken out of a line. Waking or dropping a waker runs the application's code, which may drop another
/// waiting request and so lock the shard again. Both are therefore done after the shard's lock is released.
#[derive(Default)]
struct Wakers {
    to_wake: SmallVec<[Waker; 2]>,
    to_drop: SmallVec<[Waker; 2]>,
}

impl Wakers {
    fn release(self) {
        self.to_wake.into_iter().for_each(Waker::wake);
        drop(self.to_drop);
    }
}

/// It has one slot for each waiter.
#[derive(Debug, Default)]
struct Line {
    /// Sorted by departure.
    slots: VecDeque<Slot>,
    /// By turn number, so in the order in which they joined.
    waiters: BTreeMap<u64, Waiter>,
}

#[derive(Debug)]
struct Slot {
    departs_us: u64,
    receipt: Option<Receipt>,
}

#[derive(Debug)]
struct Waiter {
    /// The instant that its timer is set to.
    armed_us: u64,
    waker: Option<Waker>,
    granted: Granted,
}

/// The receipt of the slot in which a request departs.
type Granted = Arc<Mutex<Option<Receipt>>>;

/// What a waiting request holds of its line.
#[derive(Debug)]
pub(super) struct Turn {
    place: Place,
    number: u64,
    granted: Granted,
}

impl Lines {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hash: RandomState::new(),
            turns: AtomicU64::new(0),
        }
    }

    /// Joins the line with the slot that the limiter gave.
    pub(super) fn join(&self, place: Place, departs_us: u64, receipt: Option<Receipt>) -> Turn {
        let number = self.turns.fetch_add(1, Ordering::Relaxed);
        let granted = Granted::default();
        let mut shard = self.shard(&place);
        let line = shard.entry(place.clone()).or_default();
        // Answers of a remote limiter may arrive in another order than it gave them.
        let at = line.slots.partition_point(|slot| slot.departs_us <= departs_us);
        line.slots.insert(at, Slot { departs_us, receipt });
        let waiter = Waiter { armed_us: u64::MAX, waker: None, granted: Arc::clone(&granted) };
        line.waiters.insert(number, waiter);
        Turn { place, number, granted }
    }

    /// Returns `None` if the request may depart, else the instant until which it sleeps unless it is woken before.
    pub(super) fn poll(&self, turn: &Turn, now_us: u64, waker: &Waker) -> Option<u64> {
        let mut wakers = Wakers::default();
        let waker = waker.clone();
        let until_us = self.with_line(&turn.place, |line| {
            line.release(now_us, &mut wakers);
            line.wait(turn.number, now_us, waker, &mut wakers)
        });
        wakers.release();
        until_us.flatten()
    }

    /// Returns the receipt of the slot in which a request departed.
    pub(super) fn receipt(turn: &Turn) -> Option<Receipt> {
        turn.granted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Leaves the line. Returns the receipt of the slot that becomes free: the last one, or its own if that is over.
    pub(super) fn leave(&self, turn: &Turn, now_us: u64) -> Option<Receipt> {
        let mut wakers = Wakers::default();
        let freed = self.with_line(&turn.place, |line| {
            line.release(now_us, &mut wakers);
            line.leave(turn.number, &mut wakers)
        });
        wakers.release();
        match freed.flatten() {
            Some(slot) => slot.receipt,
            None => Self::receipt(turn),
        }
    }

    fn shard(&self, place: &Place) -> MutexGuard<'_, Shard> {
        let at = self.hash.hash_one(place) as usize % SHARDS;
        // No code that could panic runs under the lock.
        self.shards[at].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_line<T>(&self, place: &Place, change: impl FnOnce(&mut Line) -> T) -> Option<T> {
        let mut shard = self.shard(place);
        let Entry::Occupied(mut line) = shard.entry(place.clone()) else { return None };
        let changed = change(line.get_mut());
        if line.get().waiters.is_empty() {
            line.remove();
            if shard.capacity() > SPARE && shard.len() < shard.capacity() / 8 {
                shard.shrink_to_fit();
            }
        }
        Some(changed)
    }
}

impl Line {
    /// Releases the waiters whose slots are due.
    fn release(&mut self, now_us: u64, wakers: &mut Wakers) {
        while self.slots.front().is_some_and(|slot| slot.departs_us <= now_us) {
            let (Some(slot), Some((_, waiter))) = (self.slots.pop_front(), self.waiters.pop_first()) else { return };
            *waiter.granted.lock().unwrap_or_else(PoisonError::into_inner) = slot.receipt;
            wakers.to_wake.extend(waiter.waker);
        }
        self.wake_foremost(wakers);
    }

    /// Collects the wakers of the foremost waiters whose timers are set too late.
    fn wake_foremost(&mut self, wakers: &mut Wakers) {
        let foremost = self.slots.iter().zip(self.waiters.values_mut()).take(FOREMOST);
        for (_, waiter) in foremost.filter(|(slot, waiter)| waiter.armed_us > slot.departs_us) {
            wakers.to_wake.extend(waiter.waker.take());
        }
    }

    /// Returns the instant until which a waiter sleeps, or `None` if it has departed. The line keeps its waker; an earlier
    /// waker goes to `wakers`.
    fn wait(&mut self, number: u64, now_us: u64, waker: Waker, wakers: &mut Wakers) -> Option<u64> {
        let place = self.waiters.keys().take(FOREMOST).position(|foremost| *foremost == number);
        let slot = place.map_or_else(|| self.slots.back(), |place| self.slots.get(place));
        let (Some(slot), Some(waiter)) = (slot, self.waiters.get_mut(&number)) else {
            wakers.to_drop.push(waker);
            return None;
        };
        let slot_us = slot.departs_us;
        // A waiter further back keeps its timer unless the last slot is earlier.
        let keeps = place.is_none() && waiter.armed_us > now_us;
        let until_us = if keeps { waiter.armed_us.min(slot_us) } else { slot_us };
        waiter.armed_us = until_us;
        wakers.to_drop.extend(waiter.waker.replace(waker));
        Some(until_us)
    }

    fn leave(&mut self, number: u64, wakers: &mut Wakers) -> Option<Slot> {
        wakers.to_drop.extend(self.waiters.remove(&number)?.waker);
        let freed = self.slots.pop_back();
        self.wake_foremost(wakers);
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_exists_only_while_a_request_waits_and_maps_shrink() {
        let lines = Lines::new();
        let place = |caller: u64| Place { policy: 0, key: Key::of(caller).unwrap(), cost: 1 };
        let mut waiting: Vec<Turn> = (0..10_000).map(|caller| lines.join(place(caller), 100, None)).collect();
        let sizes = || lines.shards.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>();
        let room = || lines.shards.iter().map(|shard| shard.lock().unwrap().capacity()).sum::<usize>();
        assert_eq!(sizes(), 10_000);
        // Half of the requests leave, the other half depart.
        let departing = waiting.split_off(5_000);
        waiting.iter().for_each(|turn| assert!(lines.leave(turn, 0).is_none()));
        assert_eq!(sizes(), 5_000);
        departing.iter().for_each(|turn| assert_eq!(lines.poll(turn, 100, Waker::noop()), None));
        assert_eq!(sizes(), 0);
        assert!(room() <= SHARDS * SPARE, "room for {}", room());
    }

    /// A task that holds another request, which waits in the same line. It ends with the last of its wakers.
    struct Holder {
        lines: Arc<Lines>,
        turn: Turn,
    }

    impl std::task::Wake for Holder {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            self.lines.leave(&self.turn, 0);
        }
    }

    #[test]
    fn wakers_are_dropped_when_the_lock_is_released() {
        type End = fn(&Lines, &Turn) -> bool;
        let ends: [(&str, End); 4] = [
            ("polled by another task", |lines, turn| lines.poll(turn, 0, Waker::noop()).is_some()),
            ("due", |lines, turn| lines.poll(turn, 100, Waker::noop()).is_none()),
            ("left", |lines, turn| lines.leave(turn, 0).is_none()),
            ("left when due", |lines, turn| lines.leave(turn, 100).is_none()),
        ];
        for (name, end) in ends {
            let (done, ended) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let lines = Arc::new(Lines::new());
                let place = Place { policy: 0, key: Key::global(), cost: 1 };
                let [turn, other] = [100, 200].map(|departs_us| lines.join(place.clone(), departs_us, None));
                let holder = Waker::from(Arc::new(Holder { lines: Arc::clone(&lines), turn: other }));
                lines.poll(&turn, 0, &holder);
                drop(holder);
                assert!(end(&lines, &turn), "{name}");
                lines.poll(&turn, 300, Waker::noop());
                done.send(lines.shards.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>()).unwrap();
            });
            let left = ended.recv_timeout(std::time::Duration::from_secs(20));
            assert_eq!(left, Ok(0), "{name}: the other request has left");
        }
    }
}
