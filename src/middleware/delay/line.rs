//! Who waits in this process, and when each departs.
//!
//! The store gives each admitted request a departure of its own, a *slot*. Requests of one policy, key and cost wait in a
//! line: the first waiter has the first slot, the second the second. So when a waiter leaves, everybody behind it moves up
//! by one, and the last slot is free, without anything being moved but the ends.
//!
//! Whoever is woken lets all depart whose slots are due, so a request whose task does not run keeps nobody waiting. Each
//! waiter has a timer for the slot that it had when it came; the foremost ones are woken when they are due earlier than
//! that, to set their timers anew. So nobody departs later than the store said, and who moved up departs in its new slot
//! unless the tasks of as many before it do not run.

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

/// So many of those who are next have their timers set to the slots that they have now.
const FOREMOST: usize = 8;

/// A map this large with few lines in it is given back.
const SPARE: usize = 64;

/// Who waits for what.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub(super) policy: usize,
    pub(super) key: Key,
    /// A slot fits requests of its own cost: those of others would depart too close to the next.
    pub(super) cost: u64,
}

/// All lines of a layer. There is one for a place only while somebody waits there.
#[derive(Debug)]
pub(super) struct Lines {
    shards: Box<[Mutex<Shard>]>,
    hash: RandomState,
    tickets: AtomicU64,
}

type Shard = HashMap<Place, Line>;

/// Wakers that were taken out of a line. Waking or dropping a waker runs code of the caller, which may drop another waiting
/// request and so come back here: both are done when the lock of the shard has been released.
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

/// As many slots as waiters.
#[derive(Debug, Default)]
struct Line {
    /// In the order of their departures.
    slots: VecDeque<Slot>,
    /// In the order in which they came.
    waiters: BTreeMap<u64, Waiter>,
}

#[derive(Debug)]
struct Slot {
    departs_us: u64,
    receipt: Option<Receipt>,
}

#[derive(Debug)]
struct Waiter {
    /// What its timer is set to.
    armed_us: u64,
    waker: Option<Waker>,
    granted: Granted,
}

/// The receipt of the slot in which a request departs.
type Granted = Arc<Mutex<Option<Receipt>>>;

/// A waiter's own half.
#[derive(Debug)]
pub(super) struct Ticket {
    place: Place,
    number: u64,
    granted: Granted,
}

impl Lines {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hash: RandomState::new(),
            tickets: AtomicU64::new(0),
        }
    }

    /// Joins the line with the slot that the store gave.
    pub(super) fn join(&self, place: Place, departs_us: u64, receipt: Option<Receipt>) -> Ticket {
        let number = self.tickets.fetch_add(1, Ordering::Relaxed);
        let granted = Granted::default();
        let mut shard = self.shard(&place);
        let line = shard.entry(place.clone()).or_default();
        // Answers of a store may come here in another order than they were given.
        let at = line.slots.partition_point(|slot| slot.departs_us <= departs_us);
        line.slots.insert(at, Slot { departs_us, receipt });
        let waiter = Waiter { armed_us: u64::MAX, waker: None, granted: Arc::clone(&granted) };
        line.waiters.insert(number, waiter);
        Ticket { place, number, granted }
    }

    /// Nothing if the request may depart; else until when it waits, unless it is woken before.
    pub(super) fn poll(&self, ticket: &Ticket, now_us: u64, waker: &Waker) -> Option<u64> {
        let mut wakers = Wakers::default();
        let waker = waker.clone();
        let until_us = self.with_line(&ticket.place, |line| {
            line.release(now_us, &mut wakers);
            line.wait(ticket.number, now_us, waker, &mut wakers)
        });
        wakers.release();
        until_us.flatten()
    }

    /// The receipt of the slot in which a request departed.
    pub(super) fn receipt(ticket: &Ticket) -> Option<Receipt> {
        ticket.granted.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Leaves the line, and returns the receipt of what is free by it: the last slot, or the own one if that is over.
    pub(super) fn leave(&self, ticket: &Ticket, now_us: u64) -> Option<Receipt> {
        let mut wakers = Wakers::default();
        let freed = self.with_line(&ticket.place, |line| {
            line.release(now_us, &mut wakers);
            line.leave(ticket.number, &mut wakers)
        });
        wakers.release();
        match freed.flatten() {
            Some(slot) => slot.receipt,
            None => Self::receipt(ticket),
        }
    }

    fn shard(&self, place: &Place) -> MutexGuard<'_, Shard> {
        let at = self.hash.hash_one(place) as usize % SHARDS;
        // No code that could panic runs with the lock held.
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
    /// Lets those depart whose slots are due.
    fn release(&mut self, now_us: u64, wakers: &mut Wakers) {
        while self.slots.front().is_some_and(|slot| slot.departs_us <= now_us) {
            let (Some(slot), Some((_, waiter))) = (self.slots.pop_front(), self.waiters.pop_first()) else { return };
            *waiter.granted.lock().unwrap_or_else(PoisonError::into_inner) = slot.receipt;
            wakers.to_wake.extend(waiter.waker);
        }
        self.wake_foremost(wakers);
    }

    /// Those of the foremost who sleep for longer than they have to.
    fn wake_foremost(&mut self, wakers: &mut Wakers) {
        let foremost = self.slots.iter().zip(self.waiters.values_mut()).take(FOREMOST);
        for (_, waiter) in foremost.filter(|(slot, waiter)| waiter.armed_us > slot.departs_us) {
            wakers.to_wake.extend(waiter.waker.take());
        }
    }

    /// Until when the waiter of this number waits; nothing if it has departed. Its waker stays here, and the one that was here
    /// before goes to `wakers`.
    fn wait(&mut self, number: u64, now_us: u64, waker: Waker, wakers: &mut Wakers) -> Option<u64> {
        let place = self.waiters.keys().take(FOREMOST).position(|foremost| *foremost == number);
        let slot = place.map_or_else(|| self.slots.back(), |place| self.slots.get(place));
        let (Some(slot), Some(waiter)) = (slot, self.waiters.get_mut(&number)) else {
            wakers.to_drop.push(waker);
            return None;
        };
        let slot_us = slot.departs_us;
        // One further back keeps its timer as long as that is no later than the last slot.
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
    fn a_line_is_there_only_while_somebody_waits_and_a_map_that_was_large_is_given_back() {
        let lines = Lines::new();
        let place = |caller: u64| Place { policy: 0, key: Key::of(caller).unwrap(), cost: 1 };
        let mut waiting: Vec<Ticket> = (0..10_000).map(|caller| lines.join(place(caller), 100, None)).collect();
        let sizes = || lines.shards.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>();
        let room = || lines.shards.iter().map(|shard| shard.lock().unwrap().capacity()).sum::<usize>();
        assert_eq!(sizes(), 10_000);
        // One half leaves, the other departs.
        let departing = waiting.split_off(5_000);
        waiting.iter().for_each(|ticket| assert!(lines.leave(ticket, 0).is_none()));
        assert_eq!(sizes(), 5_000);
        departing.iter().for_each(|ticket| assert_eq!(lines.poll(ticket, 100, Waker::noop()), None));
        assert_eq!(sizes(), 0);
        assert!(room() <= SHARDS * SPARE, "room for {}", room());
    }

    /// A task that holds another request, which waits in the same line. It ends with the last of its wakers.
    struct Holder {
        lines: Arc<Lines>,
        ticket: Ticket,
    }

    impl std::task::Wake for Holder {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            self.lines.leave(&self.ticket, 0);
        }
    }

    #[test]
    fn wakers_are_dropped_when_the_lock_is_released() {
        type End = fn(&Lines, &Ticket) -> bool;
        let ends: [(&str, End); 4] = [
            ("polled by another task", |lines, ticket| lines.poll(ticket, 0, Waker::noop()).is_some()),
            ("due", |lines, ticket| lines.poll(ticket, 100, Waker::noop()).is_none()),
            ("left", |lines, ticket| lines.leave(ticket, 0).is_none()),
            ("left when due", |lines, ticket| lines.leave(ticket, 100).is_none()),
        ];
        for (name, end) in ends {
            let (done, ended) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let lines = Arc::new(Lines::new());
                let place = Place { policy: 0, key: Key::global(), cost: 1 };
                let [ticket, other] = [100, 200].map(|departs_us| lines.join(place.clone(), departs_us, None));
                let holder = Waker::from(Arc::new(Holder { lines: Arc::clone(&lines), ticket: other }));
                lines.poll(&ticket, 0, &holder);
                drop(holder);
                assert!(end(&lines, &ticket), "{name}");
                lines.poll(&ticket, 300, Waker::noop());
                done.send(lines.shards.iter().map(|shard| shard.lock().unwrap().len()).sum::<usize>()).unwrap();
            });
            let left = ended.recv_timeout(std::time::Duration::from_secs(20));
            assert_eq!(left, Ok(0), "{name}: the other request has left");
        }
    }
}
