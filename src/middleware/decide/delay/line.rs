//! The requests that wait in this process, in lines, and the departure of each.
//!
//! The limiter gives each admitted request a departure of its own, a *slot*. Requests of one policy, key and cost wait
//! in one line: the first waiter has the first slot, the second waiter the second. If a waiter leaves, all behind it
//! move up by one and the last slot becomes free. Only the ends of the line change.
//!
//! A waiter that is woken releases every waiter whose slot is due, so a task that does not run delays no other request.
//! Each waiter sets its timer for the slot that it has when it joins. The foremost waiters are woken when their slot
//! becomes earlier than their timer, and set their timers anew. So no request departs later than the limiter said, and
//! a request that moved up departs in its new slot unless the tasks of all foremost waiters do not run.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::task::Waker;

use smallvec::SmallVec;

use crate::decision::Receipt;
use crate::key::Key;
use crate::sync::{Mutex, lock};

/// The number of foremost waiters, whose timers are set to the slots that they have now.
const FOREMOST: usize = 8;

/// A map with more capacity than this is shrunk when it has few lines.
const SPARE: usize = 64;

/// The policy, key and cost that a line is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// The fingerprint of its name and quota: the rules of a layer may change while requests wait.
    pub(super) policy: u64,
    pub(super) key: Key,
    /// A slot fits only requests of its own cost: a more costly one would depart too close to the next.
    pub(super) cost: u64,
}

/// All lines of a layer. A place has a line only while a request waits there.
#[derive(Debug, Default)]
pub(super) struct Lines(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    lines: HashMap<Place, Line>,
    turns: u64,
}

/// Wakers that were taken out of a line. Waking or dropping a waker runs the application's code, which may drop another
/// waiting request and so lock the lines again. Both are therefore done after the lock is released.
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
    /// The receipts of the slots in which waiters depart that do not know it yet, by turn number.
    departed: BTreeMap<u64, Option<Receipt>>,
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
}

/// A waiting request's number in its line.
#[derive(Debug)]
pub(super) struct Turn {
    place: Place,
    number: u64,
}

impl Lines {
    /// Joins the line with the slot that the limiter gave.
    pub(super) fn join(&self, place: Place, departs_us: u64, receipt: Option<Receipt>) -> Turn {
        let mut waiting = lock(&self.0);
        waiting.turns += 1;
        let number = waiting.turns;
        let line = waiting.lines.entry(place.clone()).or_default();
        // Answers of a remote limiter may arrive in another order than it gave them.
        let at = line.slots.partition_point(|slot| slot.departs_us <= departs_us);
        line.slots.insert(at, Slot { departs_us, receipt });
        line.waiters.insert(number, Waiter { armed_us: u64::MAX, waker: None });
        Turn { place, number }
    }

    /// Returns the receipt of the request's slot if it may depart. Otherwise returns as an error the instant until
    /// which the request sleeps unless it is woken before.
    pub(super) fn poll(&self, turn: &Turn, now_us: u64, waker: &Waker) -> Result<Option<Receipt>, u64> {
        let waker = waker.clone();
        let polled = self.with_line(turn, now_us, |line, wakers| match line.departed.remove(&turn.number) {
            Some(receipt) => {
                wakers.to_drop.push(waker);
                Ok(receipt)
            }
            None => line.wait(turn.number, now_us, waker, wakers).map_or(Ok(None), Err),
        });
        polled.unwrap_or(Ok(None))
    }

    /// Leaves the line. Returns the receipt of the slot that becomes free: the last one, or its own if that is over.
    pub(super) fn leave(&self, turn: &Turn, now_us: u64) -> Option<Receipt> {
        let freed = self.with_line(turn, now_us, |line, wakers| {
            let departed = line.departed.remove(&turn.number);
            departed.unwrap_or_else(|| line.leave(turn.number, wakers).and_then(|slot| slot.receipt))
        });
        freed.flatten()
    }

    /// Changes a request's line, after the waiters that are due were released.
    fn with_line<T>(&self, turn: &Turn, now_us: u64, change: impl FnOnce(&mut Line, &mut Wakers) -> T) -> Option<T> {
        let mut wakers = Wakers::default();
        let mut waiting = lock(&self.0);
        let lines = &mut waiting.lines;
        let Entry::Occupied(mut entry) = lines.entry(turn.place.clone()) else { return None };
        let line = entry.get_mut();
        line.release(now_us, &mut wakers);
        let changed = change(line, &mut wakers);
        if line.waiters.is_empty() && line.departed.is_empty() {
            entry.remove();
            if lines.capacity() > SPARE && lines.len() < lines.capacity() / 8 {
                lines.shrink_to_fit();
            }
        }
        drop(waiting);
        wakers.release();
        Some(changed)
    }
}

impl Line {
    /// Releases the waiters whose slots are due.
    fn release(&mut self, now_us: u64, wakers: &mut Wakers) {
        while self.slots.front().is_some_and(|slot| slot.departs_us <= now_us) {
            let (Some(slot), Some((number, waiter))) = (self.slots.pop_front(), self.waiters.pop_first()) else {
                return;
            };
            self.departed.insert(number, slot.receipt);
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

    /// Returns the instant until which a waiter sleeps, or `None` if it has departed. The line keeps its waker; an
    /// earlier waker goes to `wakers`.
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
    use std::sync::Arc;

    #[test]
    fn line_exists_only_while_a_request_waits_and_maps_shrink() {
        let lines = Lines::default();
        let place = |caller: u64| Place { policy: 0, key: Key::of(caller).unwrap(), cost: 1 };
        let mut waiting: Vec<Turn> = (0..10_000).map(|caller| lines.join(place(caller), 100, None)).collect();
        let sizes = || lines.0.lock().unwrap().lines.len();
        let room = || lines.0.lock().unwrap().lines.capacity();
        assert_eq!(sizes(), 10_000);
        // Half of the requests leave, the other half depart.
        let departing = waiting.split_off(5_000);
        waiting.iter().for_each(|turn| assert!(lines.leave(turn, 0).is_none()));
        assert_eq!(sizes(), 5_000);
        departing.iter().for_each(|turn| assert_eq!(lines.poll(turn, 100, Waker::noop()), Ok(None)));
        assert_eq!(sizes(), 0);
        assert!(room() <= SPARE, "room for {}", room());
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
            ("polled by another task", |lines, turn| lines.poll(turn, 0, Waker::noop()).is_err()),
            ("due", |lines, turn| lines.poll(turn, 100, Waker::noop()).is_ok()),
            ("left", |lines, turn| lines.leave(turn, 0).is_none()),
            ("left when due", |lines, turn| lines.leave(turn, 100).is_none()),
        ];
        for (name, end) in ends {
            let (done, ended) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let lines = Arc::new(Lines::default());
                let place = Place { policy: 0, key: Key::global(), cost: 1 };
                let [turn, other] = [100, 200].map(|departs_us| lines.join(place.clone(), departs_us, None));
                let holder = Waker::from(Arc::new(Holder { lines: Arc::clone(&lines), turn: other }));
                let _ = lines.poll(&turn, 0, &holder);
                drop(holder);
                assert!(end(&lines, &turn), "{name}");
                let _ = lines.poll(&turn, 300, Waker::noop());
                done.send(lines.0.lock().unwrap().lines.len()).unwrap();
            });
            let left = ended.recv_timeout(std::time::Duration::from_secs(20));
            assert_eq!(left, Ok(0), "{name}: the other request has left");
        }
    }
}
