//! The line of one key: which request is sent next, and when. A line reads no clock and polls no task.
//! All instants are arguments, in microseconds of the layer's timer.
//!
//! A request has a *turn*, its position in the line. When a request is sent, it gets a *number*. The first request
//! in the line is sent when
//!
//! * the key is not paused, and the last request was sent long enough ago,
//! * and the server is expected to admit the request. A request is expected to be admitted if the last
//!   response said that units remain, or if no request is in flight. If responses do not say what
//!   remains, a request is also expected to be admitted while fewer requests than the *window* are in
//!   flight. Requests that were sent before the last pause do not count as in flight, because they may
//!   hang for long.
//!
//! So after a pause one request is sent as a probe. If the probe's response says how many units
//! remain, this number of requests follows. If responses do not say what remains, the window, which
//! is one after a pause, grows by one for each success: two requests follow, then four, then eight.
use std::task::Waker;

use super::heard::{Heard, unnamed_wait_us};
use super::rate::Rate;
use crate::base::number_map::NumberMap;
use crate::base::wait_list::WaitList;
use crate::base::wakers::Wakers;

/// If no response arrives for this time, the next request is sent anyway, so that a request that hangs
/// does not stop the other requests. In microseconds.
const PATIENCE_US: u64 = 10_000_000;

const SECOND_US: u64 = 1_000_000;

/// The shortest round trip is used only after this many round trips were measured, because the
/// first include opening connections.
const ROUND_TRIPS: u8 = 4;

/// Why a request cannot join the line. Each variant holds the least time for which the request would
/// have to wait, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CannotJoin {
    TooLong(u64),
    TooMany(u64),
}

/// The next step of a waiting request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polled {
    /// The request is sent, with this number.
    Sent(u64),
    /// The request sleeps until this instant, unless it is woken earlier.
    Sleeps(u64),
    /// The request has left the line, because it would have to wait for at least this many microseconds
    /// more, which is too long.
    TooLong(u64),
}

/// The instants between which a waiting request may be sent.
#[derive(Clone, Copy, Debug)]
struct SendWindow {
    /// The instant from which the client's own quotas allow the request. The requests behind this request wait as well.
    own_us: u64,
    deadline_us: u64,
}

#[derive(Debug)]
pub(super) struct KeyLine {
    /// The end of the pause.
    opens_us: u64,
    /// The instant from which the spacing or the rate allows the next request.
    spaced_us: u64,
    /// The time between two requests that spreads the remaining requests evenly until the reset.
    spacing_us: u64,
    /// The estimated rate that the server admits, if the layer adapts its rate.
    rate: Option<Rate>,
    /// The maximum number of requests in flight while responses do not say what remains.
    window: u32,
    /// The units that remain according to the server, minus the requests in flight.
    left: Option<u64>,
    /// The number of the latest request whose response set `left`.
    left_by: u64,
    /// The number of the first request after the last pause began. The responses to earlier requests say nothing about
    /// the time after the pause.
    paused_at: u64,
    /// The number of consecutive refusals that named no time.
    silent_refusals: u32,
    /// The number of requests that were sent after the last pause began and have no response yet.
    on_their_way: u32,
    /// The number that the next sent request gets.
    sent: u64,
    /// The instant at which the last request was sent.
    sent_us: u64,
    /// The turn of the next request that joins the line.
    turns: u64,
    waiters: WaitList<SendWindow>,
    /// The requests that have been released from the line but not polled since. The keys are the
    /// turns of these requests, and the values are the numbers that the requests got when they were
    /// released.
    granted: NumberMap<u64>,
    /// Whether requests ask the client's own quotas, one after the other, before they are sent.
    asks: bool,
    /// The turn of the request that is asking the client's own quotas.
    asking: Option<u64>,
    used_us: u64,
    /// The shortest time from the sending of a request to the head of its response.
    shortest_us: u64,
    /// The number of round trips that were measured, up to [`ROUND_TRIPS`].
    round_trips: u8,
}

impl KeyLine {
    /// Makes a line for a key without any response so far.
    pub(super) fn new(asks: bool, adapts: bool) -> Self {
        Self {
            opens_us: 0,
            spaced_us: 0,
            spacing_us: 0,
            rate: adapts.then(Rate::default),
            window: u32::MAX,
            left: None,
            left_by: 0,
            paused_at: 0,
            silent_refusals: 0,
            on_their_way: 0,
            sent: 0,
            sent_us: 0,
            turns: 0,
            waiters: WaitList::default(),
            granted: NumberMap::default(),
            asks,
            asking: None,
            used_us: 0,
            shortest_us: u64::MAX,
            round_trips: 0,
        }
    }

    /// Returns the end of the pause.
    pub(super) fn opens_us(&self) -> u64 {
        self.opens_us
    }

    /// Returns whether the request with this number was sent after the last pause began.
    pub(super) fn is_news(&self, number: u64) -> bool {
        number >= self.paused_at
    }

    /// Returns the instant at which the last request joined the line.
    pub(super) fn used_us(&self) -> u64 {
        self.used_us
    }

    /// Sends the request or puts it at the end of the line. Returns the request's turn, and also its
    /// number if it is sent.
    pub(super) fn join(
        &mut self,
        now_us: u64,
        max_wait_us: u64,
        most: usize,
        wakers: &mut Wakers,
    ) -> Result<(u64, Option<u64>), CannotJoin> {
        self.used_us = now_us;
        self.release(now_us, wakers);
        let turn = self.turns;
        self.turns += 1;
        if self.waiters.is_empty() && self.due_us() <= now_us {
            return Ok((turn, Some(self.send(turn, now_us))));
        }
        let before = u64::try_from(self.waiters.len()).unwrap_or(u64::MAX);
        let wait_us = self.wait_us(now_us).saturating_add(self.interval_us().saturating_mul(before));
        if wait_us > max_wait_us {
            return Err(CannotJoin::TooLong(wait_us));
        }
        if self.waiters.len() >= most {
            return Err(CannotJoin::TooMany(wait_us));
        }
        self.waiters.add(turn, SendWindow { own_us: 0, deadline_us: now_us.saturating_add(max_wait_us) });
        Ok((turn, None))
    }

    /// Returns the next step of a waiting request. The foremost requests sleep until the next request
    /// is sent. The other requests sleep for ten seconds more. If the foremost requests are not
    /// polled by then, a poll of another request releases the next one.
    pub(super) fn poll(&mut self, turn: u64, now_us: u64, waker: Waker, wakers: &mut Wakers) -> Polled {
        self.release(now_us, wakers);
        if now_us == u64::MAX {
            // Sends the request at once, because the timer cannot sleep.
            if self.waiters.remove(turn, wakers).is_some() {
                let number = self.send(turn, now_us);
                self.granted.insert(turn, number);
            }
        }
        if let Some(number) = self.granted.remove(turn) {
            wakers.to_drop.push(waker);
            return Polled::Sent(number);
        }
        let is_foremost = self.waiters.position(turn).is_some();
        let due_us = self.due_us().saturating_add(if is_foremost { 0 } else { PATIENCE_US });
        match self.waiters.get_mut(turn).copied() {
            Some(SendWindow { deadline_us, .. }) if now_us < deadline_us => {
                let until_us = due_us.min(deadline_us);
                self.waiters.sleep(turn, until_us, waker, wakers);
                Polled::Sleeps(until_us)
            }
            _ => {
                wakers.to_drop.push(waker);
                self.leave(turn, wakers);
                Polled::TooLong(self.wait_us(now_us))
            }
        }
    }

    /// Removes a request that waits, or that has been released from the line but not polled since.
    pub(super) fn leave(&mut self, turn: u64, wakers: &mut Wakers) {
        self.waiters.remove(turn, wakers);
        if let Some(number) = self.granted.remove(turn) {
            self.take_back(turn, number);
        }
        self.wake_foremost(wakers);
    }

    /// Puts a request that was released from the line back to its position, because it cannot be sent yet. The
    /// request is not sent before `own_us`. If this request leaves the line, the requests behind it need not
    /// wait for that instant.
    pub(super) fn put_back(&mut self, turn: u64, number: u64, own_us: u64, deadline_us: u64, wakers: &mut Wakers) {
        self.take_back(turn, number);
        self.waiters.add(turn, SendWindow { own_us, deadline_us });
        self.dismiss(wakers);
        self.wake_foremost(wakers);
    }

    /// Records that a request got its units of the client's own quotas. After this, the next request in
    /// the line may ask.
    pub(super) fn has_asked(&mut self, turn: u64, now_us: u64, wakers: &mut Wakers) {
        self.end_asking(turn);
        self.release(now_us, wakers);
    }

    /// Records that a released request was not sent after all, because it failed or was dropped.
    pub(super) fn withdraw(&mut self, turn: u64, number: u64, wakers: &mut Wakers) {
        self.take_back(turn, number);
        self.wake_foremost(wakers);
    }

    /// Records that a sent request gets no response, because it failed or was dropped.
    pub(super) fn lose(&mut self, number: u64, wakers: &mut Wakers) {
        self.count_off(number);
        self.wake_foremost(wakers);
    }

    /// Records the response to a sent request. `lengthen` adds jitter to a wait.
    pub(super) fn hear(
        &mut self,
        number: u64,
        now_us: u64,
        heard: &Heard,
        lengthen: impl FnOnce(u64) -> u64,
        wakers: &mut Wakers,
    ) {
        self.count_off(number);
        self.measure(heard.took_us);
        let is_news = self.is_news(number);
        match self.rate.as_mut().filter(|_| is_news) {
            Some(rate) if !heard.is_refusal => rate.grow(now_us),
            Some(rate) if heard.left.is_none() => rate.halve(now_us),
            _ => {}
        }
        match heard.wait_us {
            Some(wait_us) => {
                self.silent_refusals = 0;
                // `lengthen` adds jitter, which keeps refused clients apart. A short pause after a success is not
                // lengthened, because a longer pause would only waste quota.
                let is_short = !heard.is_refusal && wait_us < SECOND_US;
                self.pause(now_us, if is_short { self.without_travel(wait_us) } else { lengthen(wait_us) });
            }
            None if !is_news => {}
            None if heard.is_refusal => {
                let wait_us = unnamed_wait_us(self.silent_refusals);
                self.silent_refusals = self.silent_refusals.saturating_add(1);
                self.pause(now_us, lengthen(wait_us));
            }
            None => {
                self.silent_refusals = 0;
                self.window = self.window.saturating_add(1);
                self.note_left(number, heard);
            }
        }
        // A shorter interval applies from the next request on.
        self.spaced_us = self.spaced_us.min(self.sent_us.saturating_add(self.interval_us()));
        self.dismiss(wakers);
        self.release(now_us, wakers);
    }

    /// Pauses the line, like a response that names this wait.
    pub(super) fn halt(&mut self, now_us: u64, wait_us: u64, wakers: &mut Wakers) {
        self.pause(now_us, wait_us);
        self.dismiss(wakers);
    }

    fn measure(&mut self, took_us: u64) {
        self.shortest_us = self.shortest_us.min(took_us);
        self.round_trips = self.round_trips.saturating_add(1).min(ROUND_TRIPS);
    }

    /// Shortens a wait by the time that the response and the next request spend on the network. The server began
    /// to count before the response left, and the next request arrives later than it is sent.
    fn without_travel(&self, wait_us: u64) -> u64 {
        if self.round_trips < ROUND_TRIPS { wait_us } else { wait_us.saturating_sub(self.shortest_us) }
    }

    /// Updates the remaining units with what a response says.
    fn note_left(&mut self, number: u64, heard: &Heard) {
        let left = heard.left.map(|left| left.saturating_sub(u64::from(self.on_their_way)));
        if number >= self.left_by {
            (self.left, self.left_by, self.spacing_us) = (left, number, heard.spacing_us);
        } else if let (Some(known), Some(left)) = (self.left, left) {
            // Responses may arrive in another order than their requests were sent.
            self.left = Some(known.min(left));
        }
    }

    fn pause(&mut self, now_us: u64, wait_us: u64) {
        // A timer that cannot sleep reports `Duration::MAX` as its time.
        if let Some(opens_us) = now_us.checked_add(wait_us) {
            self.opens_us = self.opens_us.max(opens_us);
        }
        (self.window, self.left, self.spacing_us) = (1, None, 0);
        (self.paused_at, self.on_their_way) = (self.sent, 0);
    }

    /// Returns the instant at which the next request is sent if no response arrives before that
    /// instant.
    fn due_us(&self) -> u64 {
        let has_room = self.left.map_or(self.on_their_way < self.window, |left| left > 0);
        let is_free = self.asking.is_none() && (has_room || self.on_their_way == 0);
        let patient_us = if is_free { 0 } else { self.sent_us.saturating_add(PATIENCE_US) };
        self.earliest_us().max(patient_us)
    }

    /// Returns the shortest time until the next request can be sent.
    fn wait_us(&self, now_us: u64) -> u64 {
        self.earliest_us().saturating_sub(now_us)
    }

    /// Returns the earliest instant at which a request may be sent, without regard to the requests in flight.
    fn earliest_us(&self) -> u64 {
        let own_us = self.waiters.first().map_or(0, |(_, waiter)| waiter.own_us);
        self.opens_us.max(self.spaced_us).max(own_us)
    }

    /// Returns the time between two requests.
    fn interval_us(&self) -> u64 {
        self.spacing_us.max(self.rate.as_ref().map_or(0, Rate::interval_us))
    }

    fn send(&mut self, turn: u64, now_us: u64) -> u64 {
        let number = self.sent;
        self.sent += 1;
        self.on_their_way = self.on_their_way.saturating_add(1);
        self.left = self.left.map(|left| left.saturating_sub(1));
        self.asking = self.asks.then_some(turn);
        // A timer that cannot sleep reports `Duration::MAX` as its time.
        if now_us < u64::MAX {
            self.sent_us = now_us;
            // A late request does not delay the next request.
            let interval_us = self.interval_us();
            self.spaced_us = self.spaced_us.max(now_us.saturating_sub(interval_us)).saturating_add(interval_us);
        }
        number
    }

    /// Undoes [`send`](Self::send) for a request that was not sent.
    fn take_back(&mut self, turn: u64, number: u64) {
        self.count_off(number);
        if self.is_news(number) {
            self.left = self.left.map(|left| left.saturating_add(1));
        }
        // If another request was sent after this one, the next request keeps its distance from that request.
        if number + 1 == self.sent {
            self.spaced_us = self.spaced_us.saturating_sub(self.interval_us());
        }
        self.end_asking(turn);
    }

    /// Records that a request is no longer in flight.
    fn count_off(&mut self, number: u64) {
        if self.is_news(number) {
            self.on_their_way = self.on_their_way.saturating_sub(1);
        }
    }

    fn end_asking(&mut self, turn: u64) {
        self.asking = self.asking.filter(|asking| *asking != turn);
    }

    /// Releases the requests that can be sent now. Releases none if the timer reports `u64::MAX`, which means that
    /// it cannot sleep.
    fn release(&mut self, now_us: u64, wakers: &mut Wakers) {
        while now_us < u64::MAX && self.due_us() <= now_us {
            let Some((turn, _)) = self.waiters.pop_first(wakers) else { return };
            let number = self.send(turn, now_us);
            self.granted.insert(turn, number);
        }
        self.wake_foremost(wakers);
    }

    /// Removes the requests that would have to wait too long. The deadlines of requests are in the
    /// order of their turns.
    fn dismiss(&mut self, wakers: &mut Wakers) {
        while self.waiters.first().is_some_and(|(_, waiter)| waiter.deadline_us < self.earliest_us()) {
            self.waiters.pop_first(wakers);
        }
    }

    /// Wakes the foremost waiters whose timers are set too late.
    fn wake_foremost(&mut self, wakers: &mut Wakers) {
        let due_us = self.due_us();
        self.waiters.wake_foremost(|_, waiter| Some(due_us.min(waiter.deadline_us)), wakers);
    }
}
