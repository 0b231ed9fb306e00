//! Micro-batching: while requests are in flight the next ones wait, and go together when a flight
//! is back.
//!
//! A flight sends up to [`BATCH`] of a lane's waiting requests together, in the order in which they
//! came, hands out the answers, and goes on until no request waits. A request that finds fewer than
//! [`FLIGHTS`] in flight begins the next one, so it waits for no timer. A flight is a task of the
//! limiter's runtime, or driven by its caller as long as no other request waits ([`ride`]): no request
//! depends on another caller's future being polled.
//!
//! A lane is a set of keys that one call may name: all of one server, or those of one slot of a
//! cluster.

use std::collections::VecDeque;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use self::ride::{Driven, Ride};
use super::due::Due;
use super::permits::{Permit, Permits};
use super::unanswered::Unanswered;
use crate::sync::contained;

pub(crate) mod ride;

/// Calls of one lane at a time: while one is on the wire the server decides the other.
const FLIGHTS: usize = 2;

/// The most requests of one call. At 2 to 3 µs each they hold the server for no longer than 0.2 ms.
const BATCH: usize = 64;

/// The most requests that a lane without flights has memory for.
const SPARE: usize = 16;

/// The time after the deadline at which a caller stops waiting. A call that was sent at once has
/// failed before, with an error that names the server.
pub(crate) const GRACE: Duration = Duration::from_millis(5);

/// Takes requests to the store.
pub(crate) trait Dispatch: Send + Sync + 'static {
    type Request: Send + 'static;
    type Answer: Send + 'static;
    type Error: From<Unanswered> + Send + 'static;

    /// Sends requests of one lane in one call, and returns the answer to each, in order.
    fn dispatch(
        &self,
        requests: Vec<Self::Request>,
    ) -> impl Future<Output = Vec<Result<Self::Answer, Self::Error>>> + Send;
}

/// Receives the answer to a request, in the task of its flight.
pub(crate) trait Receiver<A, E>: Send {
    /// Whether the answer is not needed any more. The request is then not sent.
    fn is_gone(&self) -> bool {
        false
    }

    /// Called right before the request is sent. Returns the answer if it is known by now. The request
    /// is then not sent.
    fn known(&mut self) -> Option<A> {
        None
    }

    fn answer(self: Box<Self>, answer: Result<A, E>);
}

/// A caller that waits for the answer as it is.
impl<A: Send, E: Send> Receiver<A, E> for oneshot::Sender<Result<A, E>> {
    fn is_gone(&self) -> bool {
        self.is_closed()
    }

    fn answer(self: Box<Self>, answer: Result<A, E>) {
        drop(self.send(answer)); // the caller may have gone
    }
}

/// A function. The request is sent in any case. The function is called even if the flight ends without an answer.
pub(crate) struct Then<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)>(Option<F>, PhantomData<fn(A, E)>);

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)> Then<A, E, F> {
    pub(crate) fn new(then: F) -> Self {
        Self(Some(then), PhantomData)
    }
}

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>) + Send> Receiver<A, E> for Then<A, E, F> {
    fn answer(mut self: Box<Self>, answer: Result<A, E>) {
        if let Some(then) = self.0.take() {
            then(answer);
        }
    }
}

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)> Drop for Then<A, E, F> {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Err(Unanswered::RuntimeEnded.into()));
        }
    }
}

/// Batches requests.
pub(crate) struct Batcher<D: Dispatch> {
    lanes: Arc<Lanes<D>>,
}

struct Lanes<D: Dispatch> {
    dispatch: D,
    lanes: Box<[Mutex<Lane<D>>]>,
    deadline: Duration,
    permits: Permits,
    /// The runtime whose tasks the flights are.
    runtime: Handle,
}

struct Lane<D: Dispatch> {
    waiting: VecDeque<Waiting<D>>,
    flights: usize,
    /// A flight has begun that has taken no request yet.
    boarding: bool,
    /// How many requests have waited, and how many of them wait no longer.
    came: u64,
    went: u64,
    /// The number of flights that the store answered.
    answered: u64,
    /// How many requests the last flight took.
    boarded: usize,
    /// The flights that callers drive, each with the number of the request that began it.
    rides: Vec<(u64, Arc<Ride>)>,
}

struct Waiting<D: Dispatch> {
    request: D::Request,
    receiver: Box<dyn Receiver<D::Answer, D::Error>>,
    _permit: Permit,
}

/// The driver of a flight that a request begins.
#[derive(Clone, Copy)]
enum Driver {
    Caller,
    Task,
}

/// The state of a lane when a request came.
struct Arrival {
    number: u64,
    answered: u64,
    flight: Driven,
}

impl<D: Dispatch> Batcher<D> {
    /// Makes a batcher with this many lanes and room for `most` requests. Its flights are tasks of
    /// this runtime.
    pub(crate) fn new(dispatch: D, lanes: u16, most: usize, deadline: Duration, runtime: Handle) -> Self {
        let lane = || {
            let waiting = VecDeque::new();
            Mutex::new(Lane {
                waiting,
                flights: 0,
                boarding: false,
                came: 0,
                went: 0,
                answered: 0,
                boarded: 0,
                rides: Vec::new(),
            })
        };
        let lanes = (0..lanes.max(1)).map(|_| lane()).collect();
        Self { lanes: Arc::new(Lanes { dispatch, lanes, deadline, permits: Permits::new(most), runtime }) }
    }

    pub(crate) fn dispatch(&self) -> &D {
        &self.lanes.dispatch
    }

    /// Returns the runtime whose tasks the flights are.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.lanes.runtime
    }

    /// Returns how many requests wait or are in flight.
    pub(crate) fn len(&self) -> usize {
        self.lanes.permits.taken()
    }

    /// Waits for the answer to a request, no longer than the deadline. `receiver` makes the receiver
    /// of the answer, which passes something on to this future.
    pub(crate) async fn ask<T, R: Receiver<D::Answer, D::Error> + 'static>(
        &self,
        lane: u16,
        request: D::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, D::Error> {
        Ok(self.answered(lane, request, receiver).await?)
    }

    async fn answered<T, R: Receiver<D::Answer, D::Error> + 'static>(
        &self,
        lane: u16,
        request: D::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, Unanswered> {
        if Handle::try_current().is_err() {
            return Err(Unanswered::NoRuntime);
        }
        let permit = self.lanes.permits.check()?;
        let (sender, answer) = oneshot::channel();
        let arrival = self.lanes.push(lane, request, Box::new(receiver(sender)), permit, Driver::Caller);
        let due = Due::after(self.lanes.deadline + GRACE);
        match arrival.flight.wait(answer, due).await {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(_)) => Err(Unanswered::RuntimeEnded),
            None => Err(self.lanes.timed_out(lane, &arrival, due)),
        }
    }

    /// Sends a request, and has its answer handed to a function.
    pub(crate) fn send(
        &self,
        lane: u16,
        request: D::Request,
        then: impl FnOnce(Result<D::Answer, D::Error>) + Send + 'static,
    ) -> Result<(), D::Error> {
        let permit = self.lanes.permits.correction()?;
        self.lanes.push(lane, request, Box::new(Then::new(then)), permit, Driver::Task);
        Ok(())
    }
}

impl<D: Dispatch> Lanes<D> {
    fn lock(&self, number: u16) -> MutexGuard<'_, Lane<D>> {
        let index = usize::from(number) % self.lanes.len();
        self.lanes[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(
        self: &Arc<Self>,
        number: u16,
        request: D::Request,
        receiver: Box<dyn Receiver<D::Answer, D::Error>>,
        permit: Permit,
        driver: Driver,
    ) -> Arrival {
        let mut lane = self.lock(number);
        let mut arrival = Arrival { number: lane.came, answered: lane.answered, flight: Driven::by_task() };
        lane.came += 1;
        lane.waiting.push_back(Waiting { request, receiver, _permit: permit });
        if !lane.begins_flight() {
            // It waits for these flights.
            let rides = std::mem::take(&mut lane.rides);
            drop(lane);
            rides.iter().for_each(|(_, ride)| ride.make_task());
            return arrival;
        }
        match driver {
            Driver::Caller if lane.is_quiet() => {
                let ride = Ride::new(fly(self.flight(number, Some(arrival.number))), self.runtime.clone());
                lane.rides.push((arrival.number, Arc::clone(&ride)));
                arrival.flight = Driven::by_caller(ride);
            }
            _ => {
                drop(lane);
                self.begin(number);
            }
        }
        arrival
    }

    /// Begins a flight. The lane must not be locked: if the runtime has ended, the flight ends here.
    fn begin(self: &Arc<Self>, number: u16) {
        self.runtime.spawn(fly(self.flight(number, None)));
    }

    fn flight(self: &Arc<Self>, number: u16, ride: Option<u64>) -> Flight<D> {
        Flight { lanes: Arc::clone(self), number, ride, has_landed: false }
    }

    /// Returns the next requests to be sent. Requests whose callers have gone, and those whose answer
    /// is known by now, are left out.
    fn board(self: &Arc<Self>, number: u16) -> Vec<Waiting<D>> {
        let (mut batch, mut gone, mut known) = (Vec::new(), Vec::new(), Vec::new());
        let mut lane = self.lock(number);
        lane.boarding = false;
        batch.reserve_exact(lane.waiting.len().min(BATCH));
        while batch.len() < BATCH {
            let Some(mut next) = lane.waiting.pop_front() else { break };
            lane.went += 1;
            if next.receiver.is_gone() {
                gone.push(next);
                continue;
            }
            match next.receiver.known() {
                Some(answer) => known.push((next, answer)),
                None => batch.push(next),
            }
        }
        lane.boarded = batch.len();
        let begins = lane.begins_flight();
        drop(lane);
        if begins {
            self.begin(number);
        }
        for (next, answer) in known {
            hand_over(next.receiver, Ok(answer));
        }
        batch
    }

    /// Returns why there is no answer although the time is over. If the store answered others while
    /// the request waited, or this process was too busy to notice the time, it is no fault of the
    /// store.
    fn timed_out(&self, number: u16, arrival: &Arrival, due: Due) -> Unanswered {
        let (was_sent, answers) = {
            let lane = self.lock(number);
            (arrival.number < lane.went, lane.answered != arrival.answered)
        };
        if due.is_late() {
            Unanswered::TooBusy(self.deadline)
        } else if !was_sent && answers {
            Unanswered::NotSent(self.deadline)
        } else {
            Unanswered::TimedOut(self.deadline)
        }
    }
}

impl<D: Dispatch> Lane<D> {
    /// Returns whether the caller has to begin a flight, which is then counted.
    fn begins_flight(&mut self) -> bool {
        let begins = self.flights < FLIGHTS && !self.boarding && !self.waiting.is_empty();
        if begins {
            self.flights += 1;
            self.boarding = true;
        }
        begins
    }

    /// Whether requests come one by one. If they come together, a flight that begins a moment later takes them
    /// together.
    fn is_quiet(&self) -> bool {
        self.flights == 1 && self.boarded <= 1
    }

    /// Counts a flight no longer. A lane keeps little memory of a burst: a cluster has thousands of them.
    fn end(&mut self, ride: Option<u64>) {
        self.flights -= 1;
        if self.flights == 0 && self.waiting.capacity() > SPARE {
            self.waiting.shrink_to(SPARE);
        }
        ride.and_then(|number| self.take_ride(number));
    }

    /// Takes out a flight that its caller drives, by the number of the request that began it.
    fn take_ride(&mut self, number: u64) -> Option<Arc<Ride>> {
        let at = self.rides.iter().position(|(other, _)| *other == number)?;
        Some(self.rides.swap_remove(at).1)
    }
}

/// A flight, which is counted in its lane.
struct Flight<D: Dispatch> {
    lanes: Arc<Lanes<D>>,
    number: u16,
    /// The number of the request that began it, if its caller drives it.
    ride: Option<u64>,
    has_landed: bool,
}

impl<D: Dispatch> Flight<D> {
    /// Ends the flight if no request waits. Returns whether it has ended. Otherwise it goes on as a task: its caller
    /// has the answer, and no request waits for the caller.
    fn lands(&mut self) -> bool {
        let mut lane = self.lanes.lock(self.number);
        self.has_landed = lane.waiting.is_empty();
        if self.has_landed {
            lane.end(self.ride);
            return true;
        }
        let ride = self.ride.take().and_then(|number| lane.take_ride(number));
        drop(lane);
        if let Some(ride) = ride {
            ride.make_task();
        }
        false
    }
}

impl<D: Dispatch> Drop for Flight<D> {
    /// Fails the requests that wait for the last flight if it did not land: the runtime has ended,
    /// or a clock or an observer of the application panicked.
    fn drop(&mut self) {
        if self.has_landed {
            return;
        }
        let left = {
            let mut lane = self.lanes.lock(self.number);
            lane.end(self.ride);
            lane.boarding = false;
            let left = if lane.flights == 0 { std::mem::take(&mut lane.waiting) } else { VecDeque::new() };
            lane.went += left.len() as u64;
            left
        };
        for next in left {
            hand_over(next.receiver, Err(Unanswered::RuntimeEnded.into()));
        }
    }
}

/// Hands an answer over. The caller's waker may be the application's code, and may panic. The others get theirs anyway.
pub(crate) fn hand_over<A, E>(receiver: Box<dyn Receiver<A, E>>, answer: Result<A, E>) {
    contained(|| receiver.answer(answer));
}

/// Sends a lane's requests until none waits.
async fn fly<D: Dispatch>(mut flight: Flight<D>) {
    let lanes = Arc::clone(&flight.lanes);
    loop {
        let batch = lanes.board(flight.number);
        if !batch.is_empty() {
            // The permits are kept until the answers are there.
            let (requests, receivers): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|one| (one.request, (one.receiver, one._permit))).unzip();
            let answers = lanes.dispatch.dispatch(requests).await;
            if answers.iter().any(Result::is_ok) {
                lanes.lock(flight.number).answered += 1;
            }
            let mut answers = answers.into_iter();
            let mut gone = Vec::new();
            for (receiver, permit) in receivers {
                let answer = answers.next().unwrap_or_else(|| Err(Unanswered::LeftOut.into()));
                match receiver.is_gone() {
                    true => gone.push((receiver, permit, answer)),
                    false => hand_over(receiver, answer),
                }
            }
            // Their charges are refunded, and a queue accepts the refund of its newest slot only.
            for (receiver, _permit, answer) in gone.into_iter().rev() {
                hand_over(receiver, answer);
            }
        }
        if flight.lands() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
