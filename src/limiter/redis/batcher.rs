//! Micro-batching: while requests are in flight the next ones wait, and go together when a flight
//! is back.
//!
//! A request that finds fewer than [`FLIGHTS`] in flight goes at once, alone, in its caller's task:
//! it waits for no timer and for no other task. Requests that come meanwhile wait in the lane's
//! queue. When a flight is back, the batcher's one task sends up to [`BATCH`] of them together, in
//! the order in which they came.
//!
//! A lane is a set of keys that one script call may name: all of one server, or those of one slot
//! of a cluster.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};

use super::error::{RedisError, RedisErrorKind};

/// Calls of one lane at a time: while one is on the wire the server decides the other.
const FLIGHTS: usize = 2;

/// The most requests of one call. At 2 to 3 µs each they hold the server for no longer than 0.2 ms.
const BATCH: usize = 64;

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

/// Batches requests.
pub(super) struct Batcher<D: Dispatch> {
    lanes: Arc<Lanes<D>>,
    /// Names lanes to the task that have something to send. The task ends when all senders are
    /// dropped.
    wake: mpsc::UnboundedSender<u16>,
}

struct Lanes<D: Dispatch> {
    dispatch: D,
    lanes: Box<[Mutex<Lane<D>>]>,
    deadline: Duration,
    /// The number of requests that wait or are in flight, and the most that may.
    inside: Arc<AtomicUsize>,
    most: usize,
}

struct Lane<D: Dispatch> {
    flights: usize,
    waiting: VecDeque<Waiting<D>>,
    /// The lane was named to the task, which has not handled it yet.
    named: bool,
}

struct Waiting<D: Dispatch> {
    request: D::Request,
    receiver: Receiver<D::Answer>,
    _place: Place,
}

/// The receiver of an answer.
enum Receiver<T> {
    /// A caller, which may have dropped its future.
    Caller(oneshot::Sender<Result<T, RedisError>>),
    /// A function. The request is sent in any case.
    Then(Box<dyn FnOnce(Result<T, RedisError>) + Send>),
}

impl<T> Receiver<T> {
    fn is_gone(&self) -> bool {
        matches!(self, Self::Caller(caller) if caller.is_closed())
    }

    fn answer(self, answer: Result<T, RedisError>) {
        match self {
            // A caller that dropped its future stays charged.
            Self::Caller(caller) => drop(caller.send(answer)),
            Self::Then(then) => then(answer),
        }
    }
}

/// One of the places for requests that wait or are in flight.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<D: Dispatch> Batcher<D> {
    /// Makes a batcher with this many lanes and room for `most` requests. Must be called within a
    /// tokio runtime, where its task runs.
    pub(super) fn new(dispatch: D, lanes: u16, most: usize, deadline: Duration) -> Self {
        let lane = || Mutex::new(Lane { flights: 0, waiting: VecDeque::new(), named: false });
        let lanes = (0..lanes.max(1)).map(|_| lane()).collect();
        let lanes = Arc::new(Lanes { dispatch, lanes, deadline, inside: Arc::default(), most });
        let (wake, woken) = mpsc::unbounded_channel();
        tokio::spawn(send_waiting(Arc::clone(&lanes), woken));
        Self { lanes, wake }
    }

    pub(super) fn dispatch(&self) -> &D {
        &self.lanes.dispatch
    }

    /// Returns how many requests wait or are in flight.
    pub(super) fn len(&self) -> usize {
        self.lanes.inside.load(Ordering::Relaxed)
    }

    /// Returns the answer to a request, no later than the deadline. A request that is dropped
    /// before it was sent is not sent.
    pub(super) async fn ask(&self, lane: u16, request: D::Request) -> Result<D::Answer, RedisError> {
        let place = self.lanes.place(self.lanes.most)?;
        let waiting = {
            let mut queue = self.lanes.lock(lane);
            if queue.flights < FLIGHTS && queue.waiting.is_empty() {
                queue.flights += 1;
                Err(request)
            } else {
                let (caller, answer) = oneshot::channel();
                queue.waiting.push_back(Waiting { request, receiver: Receiver::Caller(caller), _place: place });
                self.rouse(&mut queue, lane);
                Ok(answer)
            }
        };
        match waiting {
            Err(request) => {
                let _flight = Flight { batcher: self, lane };
                self.lanes.dispatch.dispatch(vec![request]).await.pop().unwrap_or_else(|| Err(no_answer()))
            }
            Ok(answer) => match tokio::time::timeout(self.lanes.deadline, answer).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(RedisError::new(RedisErrorKind::Unavailable, "the task that sends checks has ended")),
                Err(_) => Err(RedisError::new(
                    RedisErrorKind::Timeout,
                    format!("no answer within {:?}, the wait behind earlier checks included", self.lanes.deadline),
                )),
            },
        }
    }

    /// Sends a request by the batcher's task, which calls `then` with the answer.
    pub(super) fn send(
        &self,
        lane: u16,
        request: D::Request,
        then: impl FnOnce(Result<D::Answer, RedisError>) + Send + 'static,
    ) -> Result<(), RedisError> {
        // Refunds have room of their own: the units of a lost refund would be missing until they
        // have drained.
        let place = self.lanes.place(self.lanes.most.saturating_mul(2))?;
        let mut queue = self.lanes.lock(lane);
        queue.waiting.push_back(Waiting { request, receiver: Receiver::Then(Box::new(then)), _place: place });
        self.rouse(&mut queue, lane);
        Ok(())
    }

    /// Names a lane to the task if it may send now. Otherwise the end of a flight does.
    fn rouse(&self, lane: &mut Lane<D>, number: u16) {
        if lane.flights < FLIGHTS && !lane.waiting.is_empty() && !lane.named {
            lane.named = self.wake.send(number).is_ok();
        }
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

    /// Returns the next requests to be sent, if a flight is free. Requests whose callers have gone
    /// are left out.
    fn board(&self, number: u16) -> Option<Vec<Waiting<D>>> {
        let mut lane = self.lock(number);
        lane.named = false;
        if lane.flights >= FLIGHTS {
            return None;
        }
        let mut batch = Vec::with_capacity(lane.waiting.len().min(BATCH));
        while batch.len() < BATCH {
            let Some(next) = lane.waiting.pop_front() else { break };
            if !next.receiver.is_gone() {
                batch.push(next);
            }
        }
        if batch.is_empty() {
            return None;
        }
        lane.flights += 1;
        Some(batch)
    }

    /// Sends a batch and hands out the answers. Returns the lane's number.
    async fn fly(&self, number: u16, batch: Vec<Waiting<D>>) -> u16 {
        // The places are kept until the answers are there.
        let (requests, receivers): (Vec<_>, Vec<_>) =
            batch.into_iter().map(|one| (one.request, (one.receiver, one._place))).unzip();
        let mut answers = self.dispatch.dispatch(requests).await.into_iter();
        for (receiver, _place) in receivers {
            receiver.answer(answers.next().unwrap_or_else(|| Err(no_answer())));
        }
        number
    }
}

/// A request that its caller sends itself. However it ends, the next ones are sent.
struct Flight<'a, D: Dispatch> {
    batcher: &'a Batcher<D>,
    lane: u16,
}

impl<D: Dispatch> Drop for Flight<'_, D> {
    fn drop(&mut self) {
        let mut lane = self.batcher.lanes.lock(self.lane);
        lane.flights -= 1;
        self.batcher.rouse(&mut lane, self.lane);
    }
}

/// The batcher's task.
async fn send_waiting<D: Dispatch>(lanes: Arc<Lanes<D>>, mut woken: mpsc::UnboundedReceiver<u16>) {
    let mut flights = FuturesUnordered::new();
    let mut open = true;
    while open || !flights.is_empty() {
        let number = tokio::select! {
            number = woken.recv(), if open => match number {
                Some(number) => number,
                None => {
                    open = false;
                    continue;
                }
            },
            Some(number) = flights.next() => {
                lanes.lock(number).flights -= 1;
                number
            }
        };
        while let Some(batch) = lanes.board(number) {
            flights.push(lanes.fly(number, batch));
        }
    }
}

fn no_answer() -> RedisError {
    RedisError::new(RedisErrorKind::Foreign, "the script answered fewer checks than it was asked")
}

#[cfg(test)]
mod tests;
