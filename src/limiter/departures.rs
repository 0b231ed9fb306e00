//! The requests that wait in this process for their departures, in lines.
//!
//! The limiter gives each admitted request a departure of its own, a *slot*. Requests of one policy, key and cost
//! wait in one line: the first waiter has the first slot, the second waiter the second. If a waiter leaves, all
//! waiters behind it move up by one, and the last slot becomes free. So the slots of a line change only at its
//! ends.
//!
//! The limiter accepts the refund of a slot only while no later slot is taken. So the free slots of a line are
//! refunded newest first, by one thread at a time: a request that leaves meanwhile hands its slot to the thread that
//! refunds. The refunding thread does not hold the lock while it calls the limiter, because the limiter is the
//! application's code. A request that joins while the line has a free slot gets the earliest free slot, and its own
//! slot becomes free instead.
//!
//! A woken waiter releases every waiter whose slot is due, so a task that does not run delays no other request. Each
//! waiter sets its timer for the slot that it has when it joins. The foremost waiters are woken when their slots
//! become earlier than their timers, and then set their timers anew. So no request departs later than the limiter
//! said. A request that moved up departs in its new slot if the task of at least one of the foremost waiters runs.

use std::collections::{HashMap, VecDeque};
use std::task::{Context, Poll, Waker, ready};

use crate::base::number_map::NumberMap;
use crate::base::sync::{Mutex, contained, lock};
use crate::base::wait_list::{WaitList, remove_line};
use crate::base::wakers::Wakers;
use crate::clock::{Alarm, Timer, time_of};
use crate::decision::Receipt;
use crate::key::Key;

/// The policy, key and cost that a line is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DepartureKey {
    /// The fingerprint of the policy's name and quota. The fingerprint includes the quota, because a layer's
    /// rules may change while requests wait.
    pub(crate) policy: u64,
    pub(crate) key: Key,
    /// A slot fits only requests of the cost that it was made for, because a more costly request would depart too
    /// close to the next request.
    pub(crate) cost: u64,
}

/// The lines of a layer, or of a [`Ready`](super::Ready). A key has a line only while a request waits in it.
#[derive(Debug, Default)]
pub(crate) struct DepartureLines(Mutex<Departures>);

#[derive(Debug, Default)]
struct Departures {
    lines: HashMap<DepartureKey, DepartureLine>,
    turns: u64,
}

#[derive(Debug, Default)]
struct DepartureLine {
    /// The slots, sorted by departure. The first slots belong to the waiters, one to each; the other slots are
    /// free.
    slots: VecDeque<Slot>,
    waiters: WaitList<()>,
    /// The receipts of waiters that may depart but have not been polled since, keyed by turn number.
    departed: NumberMap<Option<Receipt>>,
    /// The receipts of past slots that no waiter used, keyed by turn number.
    unused: NumberMap<Receipt>,
    /// True while a thread refunds the free slots.
    is_refunding: bool,
}

#[derive(Debug)]
struct Slot {
    departs_us: u64,
    receipt: Option<Receipt>,
}

/// A waiting request's number in its line.
#[derive(Debug)]
struct DepartureTurn {
    key: DepartureKey,
    number: u64,
}

impl DepartureLines {
    /// Joins the line with the slot that the limiter gave the request.
    fn join(&self, key: DepartureKey, departs_us: u64, receipt: Option<Receipt>) -> DepartureTurn {
        let mut waiting = lock(&self.0);
        waiting.turns += 1;
        let number = waiting.turns;
        let line = waiting.lines.entry(key.clone()).or_default();
        line.add(Slot { departs_us, receipt });
        line.waiters.add(number, ());
        DepartureTurn { key, number }
    }

    /// Adds the slot of a request that does not wait for its departure. A waiter may move up to this slot. Slots that
    /// are free afterwards are refunded, as when a waiter [leaves](Self::leave).
    pub(crate) fn decline(
        &self,
        key: &DepartureKey,
        departs_us: u64,
        receipt: Option<Receipt>,
        refund: impl FnMut(Vec<Receipt>),
    ) {
        let mut wakers = Wakers::default();
        let mut waiting = lock(&self.0);
        let line = waiting.lines.entry(key.clone()).or_default();
        line.add(Slot { departs_us, receipt });
        line.wake_foremost(&mut wakers);
        drop(waiting);
        wakers.release();
        self.refund_free(key, refund);
    }

    /// Returns the receipt of the request's slot if the request may depart. Otherwise returns `Err` with the instant
    /// at which the request has to poll again, if nothing wakes it earlier.
    fn poll(&self, turn: &DepartureTurn, now_us: u64, waker: &Waker) -> Result<Option<Receipt>, u64> {
        let waker = waker.clone();
        let polled = self.with_line(turn, now_us, |line, wakers| match line.departed.remove(turn.number) {
            Some(receipt) => {
                wakers.to_drop.push(waker);
                Ok(receipt)
            }
            None => line.wait(turn.number, now_us, waker, wakers).map_or(Ok(None), Err),
        });
        polled.unwrap_or(Ok(None))
    }

    /// Leaves the line. The last slot of the line becomes free, or the request's own slot if the departure of that
    /// slot is past. `refund` is called with the receipts of free slots, newest first, unless another thread refunds
    /// them.
    fn leave(&self, turn: &DepartureTurn, now_us: u64, refund: impl FnMut(Vec<Receipt>)) {
        let leave = |line: &mut DepartureLine, wakers: &mut Wakers| match line.departed.remove(turn.number) {
            Some(receipt) => receipt.into_iter().for_each(|receipt| line.unused.insert(turn.number, receipt)),
            None => line.leave(turn.number, wakers),
        };
        self.with_line(turn, now_us, leave).unwrap_or_default();
        self.refund_free(&turn.key, refund);
    }

    /// Refunds the free slots of a line until none is left. Does nothing if another thread refunds them.
    fn refund_free(&self, key: &DepartureKey, mut refund: impl FnMut(Vec<Receipt>)) {
        let mut is_mine = false;
        loop {
            let mut waiting = lock(&self.0);
            let Some(line) = waiting.lines.get_mut(key) else { return };
            if line.is_refunding && !is_mine {
                return;
            }
            let free = line.take_free();
            is_mine = !free.is_empty();
            line.is_refunding = is_mine;
            if !is_mine {
                waiting.remove_if_over(key);
                return;
            }
            drop(waiting);
            contained(|| refund(free));
        }
    }

    /// Releases the waiters of the turn's line that are due, and then calls `change` with this line.
    fn with_line<T>(
        &self,
        turn: &DepartureTurn,
        now_us: u64,
        change: impl FnOnce(&mut DepartureLine, &mut Wakers) -> T,
    ) -> Option<T> {
        let mut wakers = Wakers::default();
        let mut waiting = lock(&self.0);
        debug_assert!(waiting.lines.contains_key(&turn.key), "a line lasts as long as a request has a turn in it");
        let line = waiting.lines.get_mut(&turn.key)?;
        line.release(now_us, &mut wakers);
        let changed = change(line, &mut wakers);
        waiting.remove_if_over(&turn.key);
        drop(waiting);
        wakers.release();
        Some(changed)
    }
}

/// The turns of one request: one for each charge whose departure the request waits for.
#[derive(Default)]
pub(crate) struct DepartureTurns {
    /// Each turn comes with the index of its charge.
    turns: Vec<(usize, DepartureTurn)>,
    alarm: Alarm,
}

impl DepartureTurns {
    /// Joins a line with the slot that the limiter gave the charge with this index.
    pub(crate) fn join(
        &mut self,
        lines: &DepartureLines,
        charge: usize,
        key: DepartureKey,
        departs_us: u64,
        receipt: Option<Receipt>,
    ) {
        self.turns.push((charge, lines.join(key, departs_us, receipt)));
    }

    /// Is ready when all departures have come. `depart` gets the receipt of the slot in which a charge
    /// departs, with the charge's index.
    pub(crate) fn poll(
        &mut self,
        lines: &DepartureLines,
        timer: &dyn Timer,
        mut depart: impl FnMut(usize, Receipt),
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let mut now_us = time_of(timer).unwrap_or(0);
        loop {
            let mut latest_us = None;
            self.turns.retain(|(charge, turn)| match lines.poll(turn, now_us, cx.waker()) {
                Err(until_us) => {
                    latest_us = latest_us.max(Some(until_us));
                    true
                }
                Ok(receipt) => {
                    receipt.into_iter().for_each(|receipt| depart(*charge, receipt));
                    false
                }
            });
            let Some(until_us) = latest_us else { return Poll::Ready(()) };
            now_us = ready!(self.alarm.poll(timer, until_us, cx));
        }
    }

    /// Leaves the lines. For each line, `refund` is called as in [`DepartureLines::decline`]. It also gets the index
    /// of the request's charge that has its turn in this line.
    pub(crate) fn leave(&mut self, lines: &DepartureLines, timer: &dyn Timer, refund: impl Fn(usize, Vec<Receipt>)) {
        let mut now_us = 0;
        contained(|| now_us = time_of(timer).unwrap_or(0)); // the timer is the application's code
        for (charge, turn) in self.turns.drain(..) {
            contained(|| lines.leave(&turn, now_us, |receipts| refund(charge, receipts)));
        }
    }
}

impl Departures {
    /// Removes a line in which no request waits and no slot is free.
    fn remove_if_over(&mut self, key: &DepartureKey) {
        if self.lines.get(key).is_some_and(DepartureLine::is_over) {
            remove_line(&mut self.lines, key);
        }
    }
}

impl DepartureLine {
    fn is_over(&self) -> bool {
        self.slots.is_empty() && self.departed.is_empty() && self.unused.is_empty() && !self.is_refunding
    }

    fn add(&mut self, slot: Slot) {
        // The answers of a remote limiter may arrive in another order than the limiter decided.
        let at = self.slots.partition_point(|earlier| earlier.departs_us <= slot.departs_us);
        self.slots.insert(at, slot);
    }

    /// Takes out the receipts of the free slots, newest first.
    fn take_free(&mut self) -> Vec<Receipt> {
        let free = self.slots.drain(self.waiters.len().min(self.slots.len())..).rev();
        let mut free: Vec<Receipt> = free.filter_map(|slot| slot.receipt).collect();
        while let Some((_, receipt)) = self.unused.pop_last() {
            free.push(receipt);
        }
        free
    }

    /// Releases the waiters whose slots are due.
    fn release(&mut self, now_us: u64, wakers: &mut Wakers) {
        while !self.waiters.is_empty() && self.slots.front().is_some_and(|slot| slot.departs_us <= now_us) {
            let (Some(slot), Some((number, ()))) = (self.slots.pop_front(), self.waiters.pop_first(wakers)) else {
                return;
            };
            self.departed.insert(number, slot.receipt);
        }
        self.wake_foremost(wakers);
    }

    /// Wakes the foremost waiters whose timers are set too late.
    fn wake_foremost(&mut self, wakers: &mut Wakers) {
        let slots = &self.slots;
        self.waiters.wake_foremost(|position, ()| slots.get(position).map(|slot| slot.departs_us), wakers);
    }

    /// Returns the instant until which a waiter sleeps, or `None` if it has departed. The line keeps `waker`; an
    /// earlier waker of the waiter goes to `wakers`.
    fn wait(&mut self, number: u64, now_us: u64, waker: Waker, wakers: &mut Wakers) -> Option<u64> {
        let position = self.waiters.position(number);
        let slot = self.slots.get(position.unwrap_or(self.waiters.len().saturating_sub(1)));
        let (Some(slot), Some(armed_us)) = (slot, self.waiters.armed_us(number)) else {
            debug_assert!(false, "each request that waits has a slot and is in the line");
            wakers.to_drop.push(waker);
            return None;
        };
        // A waiter that is not among the foremost does not know its slot. It keeps its timer, or sets the timer to the
        // departure of the last waiter's slot if that is earlier.
        let keeps = position.is_none() && armed_us > now_us;
        let until_us = if keeps { armed_us.min(slot.departs_us) } else { slot.departs_us };
        self.waiters.sleep(number, until_us, waker, wakers);
        Some(until_us)
    }

    fn leave(&mut self, number: u64, wakers: &mut Wakers) {
        self.waiters.remove(number, wakers);
        self.wake_foremost(wakers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::wait_list::{FOREMOST, SPARE};
    use std::sync::Arc;

    #[test]
    fn line_exists_only_while_a_request_waits_and_maps_shrink() {
        let lines = DepartureLines::default();
        let key = |caller: u64| DepartureKey { policy: 0, key: Key::of(caller).unwrap(), cost: 1 };
        let mut waiting: Vec<DepartureTurn> = (0..10_000).map(|caller| lines.join(key(caller), 100, None)).collect();
        let sizes = || lines.0.lock().unwrap().lines.len();
        let room = || lines.0.lock().unwrap().lines.capacity();
        assert_eq!(sizes(), 10_000);
        // Half of the requests leave, the other half depart.
        let departing = waiting.split_off(5_000);
        waiting.iter().for_each(|turn| lines.leave(turn, 0, drop));
        assert_eq!(sizes(), 5_000);
        departing.iter().for_each(|turn| assert_eq!(lines.poll(turn, 100, Waker::noop()), Ok(None)));
        assert_eq!(sizes(), 0);
        assert!(room() <= SPARE, "room for {}", room());
    }

    /// A task that holds another request, which waits in the same line. It ends with the last of its wakers.
    struct Holder {
        lines: Arc<DepartureLines>,
        turn: DepartureTurn,
    }

    impl std::task::Wake for Holder {
        fn wake(self: Arc<Self>) {}
    }

    impl Drop for Holder {
        fn drop(&mut self) {
            self.lines.leave(&self.turn, 0, drop);
        }
    }

    #[test]
    fn wakers_are_dropped_when_the_lock_is_released() {
        type End = fn(&DepartureLines, &DepartureTurn);
        let ends: [(&str, End); 4] = [
            ("polled by another task", |lines, turn| {
                assert!(lines.poll(turn, 0, Waker::noop()).is_err());
                assert!(lines.poll(turn, 300, Waker::noop()).is_ok());
            }),
            ("due", |lines, turn| assert!(lines.poll(turn, 100, Waker::noop()).is_ok())),
            ("left", |lines, turn| lines.leave(turn, 0, drop)),
            ("left when due", |lines, turn| lines.leave(turn, 100, drop)),
        ];
        for (name, end) in ends {
            let (done, ended) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let lines = Arc::new(DepartureLines::default());
                let key = DepartureKey { policy: 0, key: Key::global(), cost: 1 };
                let [turn, other] = [100, 200].map(|departs_us| lines.join(key.clone(), departs_us, None));
                let holder = Waker::from(Arc::new(Holder { lines: Arc::clone(&lines), turn: other }));
                let _ = lines.poll(&turn, 0, &holder);
                drop(holder);
                end(&lines, &turn);
                done.send(lines.0.lock().unwrap().lines.len()).unwrap();
            });
            let left = ended.recv_timeout(std::time::Duration::from_secs(20));
            assert_eq!(left, Ok(0), "{name}: the other request has left");
        }
    }

    /// Notes that it was woken, and panics.
    struct Panics(std::sync::atomic::AtomicBool);

    impl std::task::Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
            panic!("the executor fails");
        }
    }

    #[test]
    fn waker_that_panics_keeps_no_other_request_waiting() {
        let lines = DepartureLines::default();
        let turns = [(); 3].map(|()| lines.join(key(), 100, None));
        let wakers = [(); 2].map(|()| Arc::new(Panics(false.into())));
        for (turn, waker) in turns.iter().zip(&wakers) {
            assert_eq!(lines.poll(turn, 0, &Waker::from(Arc::clone(waker))), Err(100));
        }
        assert_eq!(lines.poll(&turns[2], 100, Waker::noop()), Ok(None));
        assert!(wakers.iter().all(|waker| waker.0.load(std::sync::atomic::Ordering::Relaxed)));
    }

    fn receipt(at_us: u64) -> Option<Receipt> {
        Some(Receipt::new(1, at_us, 0))
    }

    fn key() -> DepartureKey {
        DepartureKey { policy: 0, key: Key::global(), cost: 1 }
    }

    fn instants(receipts: &[Receipt]) -> Vec<u64> {
        receipts.iter().map(Receipt::at_us).collect()
    }

    #[test]
    fn slots_freed_during_a_refund_are_refunded_after_it() {
        let lines = DepartureLines::default();
        let turns = [1, 2, 3, 4].map(|at_us| lines.join(key(), 100 * at_us, receipt(at_us)));
        let mut refunded = Vec::new();
        lines.leave(&turns[0], 0, |slots| {
            refunded.push(instants(&slots));
            if refunded.len() == 1 {
                // Another thread leaves meanwhile. A panic of the limiter does not stop the refunds.
                lines.leave(&turns[2], 0, |_| panic!("two threads refund"));
                lines.leave(&turns[1], 0, |_| panic!("two threads refund"));
                panic!("the limiter fails");
            }
        });
        assert_eq!(refunded, [vec![4], vec![3, 2]]);
        lines.leave(&turns[3], 0, |slots| refunded.push(instants(&slots)));
        assert_eq!(refunded[2], [1]);
        assert!(lines.0.lock().unwrap().lines.is_empty());
    }

    #[test]
    fn request_that_joins_during_a_refund_uses_the_free_slot() {
        let lines = DepartureLines::default();
        let turns = [1, 2, 3].map(|at_us| lines.join(key(), 100 * at_us, receipt(at_us)));
        let (mut refunded, mut last) = (Vec::new(), None);
        lines.leave(&turns[0], 0, |slots| {
            refunded.extend(instants(&slots));
            if last.is_none() {
                lines.leave(&turns[1], 0, drop);
                last = Some(lines.join(key(), 400, receipt(4)));
            }
        });
        assert_eq!(refunded, [3, 4], "and not slot 2, behind which slot 4 is taken");
        assert_eq!(lines.poll(&turns[2], 100, Waker::noop()), Ok(receipt(1)));
        assert_eq!(lines.poll(&last.unwrap(), 200, Waker::noop()), Ok(receipt(2)));
    }

    #[test]
    fn unused_slots_are_refunded_after_later_ones() {
        let lines = DepartureLines::default();
        let turns = [1, 2, 3].map(|at_us| lines.join(key(), 100 * at_us, receipt(at_us)));
        let mut refunded = Vec::new();
        lines.leave(&turns[2], 0, |slots| {
            refunded.extend(instants(&slots));
            turns[..2].iter().for_each(|turn| lines.leave(turn, 100, drop));
        });
        assert_eq!(refunded, [3, 2, 1]);
    }
    /// Each timer that is set anew costs a wake of its task.
    #[test]
    fn waiter_further_back_keeps_its_timer_when_others_join() {
        let lines = DepartureLines::default();
        let turns = [(); FOREMOST + 1].map(|()| lines.join(key(), 100, None));
        let last = &turns[FOREMOST];
        assert_eq!(lines.poll(last, 0, Waker::noop()), Err(100));
        let _later = lines.join(key(), 200, None);
        assert_eq!(lines.poll(last, 0, Waker::noop()), Err(100), "and not the last slot, which is later");
    }
}
