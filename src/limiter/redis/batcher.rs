//! Micro-batching: while requests are in flight the next ones wait, and go together when a flight
//! is back.
//!
//! Each flight is a task of the limiter's runtime. It sends up to [`BATCH`] of a lane's waiting
//! requests together, in the order in which they came, hands out the answers, and goes on until no
//! request waits. A request that finds fewer than [`FLIGHTS`] in flight begins the next one, so it
//! waits for no timer. A caller only waits for its answer: no request depends on another caller's
//! future being polled.
//!
//! A lane is a set of keys that one script call may name: all of one server, or those of one slot
//! of a cluster.

use std::collections::VecDeque;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::error::{RedisError, RedisErrorKind};
use super::lateness::{self, Due};

/// Calls of one lane at a time: while one is on the wire the server decides the other.
const FLIGHTS: usize = 2;

/// The most requests of one call. At 2 to 3 µs each they hold the server for no longer than 0.2 ms.
const BATCH: usize = 64;

/// The time after the deadline at which a caller stops waiting. A call that was sent at once has
/// failed before, with an error that names the server.
const GRACE: Duration = Duration::from_millis(5);

/// Takes requests to the store.
pub(super) trait Dispatch: Send + Sync + 'static {
    type Request: Send + 'static;
    type Answer: Send + 'static;

    /// Sends requests of one lane in one call, and returns the answer to each, in order.
    fn dispatch(
        &self,
        requests: Vec<Self::Request>,
    ) -> impl Future<Output = Vec<Result<Self::Answer, RedisError>>> + Send;
}

/// Receives the answer to a request, in the task of its flight.
pub(super) trait Receiver<A>: Send {
    /// Whether the answer is not needed any more. The request is then not sent.
    fn is_gone(&self) -> bool {
        false
    }

    /// Called right before the request is sent. Returns the answer if it is known by now. The request
    /// is then not sent.
    fn known(&mut self) -> Option<A> {
        None
    }

    fn answer(self: Box<Self>, answer: Result<A, RedisError>);
}

/// A caller that waits for the answer as it is.
impl<A: Send> Receiver<A> for oneshot::Sender<Result<A, RedisError>> {
    fn is_gone(&self) -> bool {
        self.is_closed()
    }

    fn answer(self: Box<Self>, answer: Result<A, RedisError>) {
        drop(self.send(answer)); // the caller may have gone
    }
}

/// A function. The request is sent in any case. The function is called also if the flight ends without an answer.
struct Then<A, F: FnOnce(Result<A, RedisError>)>(Option<F>, PhantomData<fn(A)>);

impl<A, F: FnOnce(Result<A, RedisError>) + Send> Receiver<A> for Then<A, F> {
    fn answer(mut self: Box<Self>, answer: Result<A, RedisError>) {
        if let Some(then) = self.0.take() {
            then(answer);
        }
    }
}

impl<A, F: FnOnce(Result<A, RedisError>)> Drop for Then<A, F> {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Err(ended()));
        }
    }
}

/// Batches requests.
pub(super) struct Batcher<D: Dispatch> {
    lanes: Arc<Lanes<D>>,
}

struct Lanes<D: Dispatch> {
    dispatch: D,
    lanes: Box<[Mutex<Lane<D>>]>,
    deadline: Duration,
    /// The number of requests that wait or are in flight, and the most that may.
    inside: Arc<AtomicUsize>,
    most: usize,
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
}

struct Waiting<D: Dispatch> {
    request: D::Request,
    receiver: Box<dyn Receiver<D::Answer>>,
    _place: Place,
}

/// The state of a lane when a request came.
struct Ticket {
    number: u64,
    answered: u64,
}

/// One of the places for requests that wait or are in flight.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<D: Dispatch> Batcher<D> {
    /// Makes a batcher with this many lanes and room for `most` requests. Its flights are tasks of
    /// this runtime.
    pub(super) fn new(dispatch: D, lanes: u16, most: usize, deadline: Duration, runtime: Handle) -> Self {
        let lane = || {
            let waiting = VecDeque::new();
            Mutex::new(Lane { waiting, flights: 0, boarding: false, came: 0, went: 0, answered: 0 })
        };
        let lanes = (0..lanes.max(1)).map(|_| lane()).collect();
        Self { lanes: Arc::new(Lanes { dispatch, lanes, deadline, inside: Arc::default(), most, runtime }) }
    }

    pub(super) fn dispatch(&self) -> &D {
        &self.lanes.dispatch
    }

    /// Returns how many requests wait or are in flight.
    pub(super) fn len(&self) -> usize {
        self.lanes.inside.load(Ordering::Relaxed)
    }

    /// Waits for the answer to a request, no longer than the deadline. `receiver` makes the receiver
    /// of the answer, which passes something on to this future.
    pub(super) async fn ask<T, R: Receiver<D::Answer> + 'static>(
        &self,
        lane: u16,
        request: D::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, RedisError> {
        if Handle::try_current().is_err() {
            return Err(RedisError::new(
                RedisErrorKind::Misconfigured,
                "checks on Redis have to be made within a tokio runtime, with its timers enabled",
            ));
        }
        let place = self.lanes.place(self.lanes.most)?;
        let (sender, answer) = oneshot::channel();
        let ticket = self.lanes.push(lane, request, Box::new(receiver(sender)), place);
        let due = Due::after(self.lanes.deadline + GRACE);
        match due.timeout(answer).await {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(_)) => Err(ended()),
            None => Err(self.lanes.timed_out(lane, &ticket, due)),
        }
    }

    /// Sends a request, and has its answer handed to a function.
    pub(super) fn send(
        &self,
        lane: u16,
        request: D::Request,
        then: impl FnOnce(Result<D::Answer, RedisError>) + Send + 'static,
    ) -> Result<(), RedisError> {
        // Refunds have room of their own: the units of a lost refund would be missing until they
        // have drained.
        let place = self.lanes.place(self.lanes.most.saturating_mul(2))?;
        self.lanes.push(lane, request, Box::new(Then(Some(then), PhantomData)), place);
        Ok(())
    }
}

impl<D: Dispatch> Lanes<D> {
    fn lock(&self, number: u16) -> MutexGuard<'_, Lane<D>> {
        let index = usize::from(number) % self.lanes.len();
        self.lanes[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, most: usize) -> Result<Place, RedisError> {
        if self.inside.fetch_add(1, Ordering::Relaxed) >= most {
            self.inside.fetch_sub(1, Ordering::Relaxed);
            return Err(RedisError::new(
                RedisErrorKind::Overloaded,
                format!("{most} checks wait for Redis already: this one was not sent"),
            ));
        }
        Ok(Place(Arc::clone(&self.inside)))
    }

    fn push(
        self: &Arc<Self>,
        number: u16,
        request: D::Request,
        receiver: Box<dyn Receiver<D::Answer>>,
        place: Place,
    ) -> Ticket {
        let mut lane = self.lock(number);
        let ticket = Ticket { number: lane.came, answered: lane.answered };
        lane.came += 1;
        lane.waiting.push_back(Waiting { request, receiver, _place: place });
        let begins = lane.begins_flight();
        drop(lane);
        if begins {
            self.begin(number);
        }
        ticket
    }

    /// Begins a flight. The lane must not be locked: if the runtime has ended, the flight ends here.
    fn begin(self: &Arc<Self>, number: u16) {
        self.runtime.spawn(fly(Flight { lanes: Arc::clone(self), number, has_landed: false }));
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
        let begins = lane.begins_flight();
        drop(lane);
        if begins {
            self.begin(number);
        }
        for (next, answer) in known {
            next.receiver.answer(Ok(answer));
        }
        batch
    }

    /// Returns why there is no answer although the time is over. If the store answered others while
    /// the request waited, or this process was too busy to notice the time, it is no fault of the
    /// store.
    fn timed_out(&self, number: u16, ticket: &Ticket, due: Due) -> RedisError {
        let (was_sent, answers) = {
            let lane = self.lock(number);
            (ticket.number < lane.went, lane.answered != ticket.answered)
        };
        let deadline = self.deadline;
        if due.is_late() {
            return lateness::error(&format!("no answer was read within {deadline:?}"));
        }
        if !was_sent && answers {
            let message = format!("earlier checks took longer than {deadline:?}: this one was not sent");
            return RedisError::new(RedisErrorKind::Overloaded, message);
        }
        let message = format!("no answer within {deadline:?}, the wait behind earlier checks included");
        RedisError::new(RedisErrorKind::Timeout, message)
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
}

/// A flight, which is counted in its lane.
struct Flight<D: Dispatch> {
    lanes: Arc<Lanes<D>>,
    number: u16,
    has_landed: bool,
}

impl<D: Dispatch> Flight<D> {
    /// Ends the flight if no request waits. Returns whether it has ended.
    fn lands(&mut self) -> bool {
        let mut lane = self.lanes.lock(self.number);
        self.has_landed = lane.waiting.is_empty();
        if self.has_landed {
            lane.flights -= 1;
        }
        self.has_landed
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
            lane.flights -= 1;
            lane.boarding = false;
            let left = if lane.flights == 0 { std::mem::take(&mut lane.waiting) } else { VecDeque::new() };
            lane.went += left.len() as u64;
            left
        };
        for next in left {
            next.receiver.answer(Err(ended()));
        }
    }
}

/// Sends a lane's requests until none waits.
async fn fly<D: Dispatch>(mut flight: Flight<D>) {
    let lanes = Arc::clone(&flight.lanes);
    loop {
        let batch = lanes.board(flight.number);
        if !batch.is_empty() {
            // The places are kept until the answers are there.
            let (requests, receivers): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|one| (one.request, (one.receiver, one._place))).unzip();
            let answers = lanes.dispatch.dispatch(requests).await;
            if answers.iter().any(Result::is_ok) {
                lanes.lock(flight.number).answered += 1;
            }
            let mut answers = answers.into_iter();
            let mut gone = Vec::new();
            for (receiver, place) in receivers {
                let answer = answers.next().unwrap_or_else(|| Err(no_answer()));
                match receiver.is_gone() {
                    true => gone.push((receiver, place, answer)),
                    false => receiver.answer(answer),
                }
            }
            // Their charges are refunded, and a queue accepts the refund of its newest slot only.
            for (receiver, _place, answer) in gone.into_iter().rev() {
                receiver.answer(answer);
            }
        }
        if flight.lands() {
            return;
        }
    }
}

fn no_answer() -> RedisError {
    RedisError::new(RedisErrorKind::Foreign, "the script answered fewer checks than it was asked")
}

pub(super) fn ended() -> RedisError {
    RedisError::new(RedisErrorKind::Unavailable, "the runtime in which the limiter was made has ended")
}

#[cfg(test)]
mod tests;
