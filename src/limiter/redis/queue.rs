//! Micro-batching: while checks are in flight the next ones wait, and go together when one of those is back.
//!
//! A check that finds fewer than [`FLIGHTS`] in flight goes at once, by itself, in its caller's own task: no timer, no
//! other task, no added wait. Those that come meanwhile wait in the lane's queue. When a flight is back the queue's one
//! task sends up to [`BATCH`] of them together, in the order in which they came.
//!
//! A lane is a set of keys that one script call may name: all of one server, or those of one slot of a cluster.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot};

use super::error::{RedisError, RedisErrorKind};

/// Calls of one lane at a time: while one is on the wire the next is being decided.
const FLIGHTS: usize = 2;

/// Checks that one call carries at most. At 2 to 3 µs each they hold the server for no longer than 0.2 ms.
const BATCH: usize = 64;

/// Who carries checks to the store.
pub(super) trait Carrier: Send + Sync + 'static {
    type Ask: Send + 'static;
    type Answer: Send + 'static;

    /// Asks for all of them in one call, and answers each, in order.
    fn carry(
        &self,
        lane: u16,
        asks: Vec<Self::Ask>,
    ) -> impl Future<Output = Result<Vec<Self::Answer>, RedisError>> + Send;
}

/// The lanes of a store. Clones are the same.
pub(super) struct Queue<C: Carrier>(Arc<Shared<C>>);

struct Shared<C: Carrier> {
    carrier: Arc<C>,
    lanes: Arc<Lanes<C>>,
    deadline: Duration,
    /// Where the task is told of lanes that have something to send. Dropped, it ends.
    wake: mpsc::UnboundedSender<u16>,
}

struct Lanes<C: Carrier> {
    lanes: Box<[Mutex<Lane<C>>]>,
    /// Checks that wait or are in flight, and how many may.
    inside: Arc<AtomicUsize>,
    most: usize,
}

struct Lane<C: Carrier> {
    flights: usize,
    waiting: VecDeque<Waiting<C>>,
    /// The task was told of this lane and has not come yet.
    told: bool,
}

struct Waiting<C: Carrier> {
    ask: C::Ask,
    whose: Whose<C::Answer>,
    _place: Place,
}

/// To whom an answer goes.
enum Whose<T> {
    /// Closed when nobody waits any more.
    Waiter(oneshot::Sender<Result<T, RedisError>>),
    /// To be sent whoever waits.
    Then(Then<T>),
}

/// What is done with an answer that nobody waits for.
type Then<T> = Box<dyn FnOnce(Result<T, RedisError>) + Send>;

impl<T> Whose<T> {
    fn is_gone(&self) -> bool {
        matches!(self, Self::Waiter(waiter) if waiter.is_closed())
    }

    fn tell(self, answer: Result<T, RedisError>) {
        match self {
            // Who does not wait any more has the charge as its own.
            Self::Waiter(waiter) => drop(waiter.send(answer)),
            Self::Then(then) => then(answer),
        }
    }
}

/// One of the places for checks that wait or are in flight.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<C: Carrier> Queue<C> {
    /// A queue of so many lanes, and room for `most` checks; must be called within a tokio runtime, where its task runs.
    pub(super) fn new(carrier: C, lanes: u16, most: usize, deadline: Duration) -> Self {
        let lane = || Mutex::new(Lane { flights: 0, waiting: VecDeque::new(), told: false });
        let lanes =
            Lanes { lanes: (0..lanes.max(1)).map(|_| lane()).collect(), inside: Arc::new(AtomicUsize::new(0)), most };
        let (wake, woken) = mpsc::unbounded_channel();
        let shared = Shared { carrier: Arc::new(carrier), lanes: Arc::new(lanes), deadline, wake };
        tokio::spawn(send_what_waits(Arc::clone(&shared.carrier), Arc::clone(&shared.lanes), woken));
        Self(Arc::new(shared))
    }

    pub(super) fn carrier(&self) -> &C {
        &self.0.carrier
    }

    /// Checks that wait or are in flight.
    pub(super) fn len(&self) -> usize {
        self.0.lanes.inside.load(Ordering::Relaxed)
    }

    /// The answer to a check, no later than the deadline. Dropped before it was sent, it is not sent.
    pub(super) async fn ask(&self, lane: u16, ask: C::Ask) -> Result<C::Answer, RedisError> {
        let place = self.0.lanes.place(self.0.lanes.most)?;
        let waiting = {
            let mut queue = self.0.lanes.lock(lane);
            if queue.flights < FLIGHTS && queue.waiting.is_empty() {
                queue.flights += 1;
                Err(ask)
            } else {
                let (answer, answered) = oneshot::channel();
                queue.waiting.push_back(Waiting { ask, whose: Whose::Waiter(answer), _place: place });
                self.0.rouse(&mut queue, lane);
                Ok(answered)
            }
        };
        match waiting {
            Err(ask) => {
                let _flight = Flight { shared: &self.0, lane };
                self.0.carrier.carry(lane, vec![ask]).await.and_then(only)
            }
            Ok(answered) => match tokio::time::timeout(self.0.deadline, answered).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(RedisError::new(RedisErrorKind::Unavailable, "the task that sends checks has ended")),
                Err(_) => Err(RedisError::new(
                    RedisErrorKind::Timeout,
                    format!("no answer within {:?}, waiting for those before included", self.0.deadline),
                )),
            },
        }
    }

    /// Sends by the queue's task, which does with the answer what is to be done: nobody needs to wait for it.
    pub(super) fn send(
        &self,
        lane: u16,
        ask: C::Ask,
        then: impl FnOnce(Result<C::Answer, RedisError>) + Send + 'static,
    ) -> Result<(), RedisError> {
        // What is given back has room of its own: lost, it would be missing until it has drained.
        let place = self.0.lanes.place(self.0.lanes.most.saturating_mul(2))?;
        let mut queue = self.0.lanes.lock(lane);
        queue.waiting.push_back(Waiting { ask, whose: Whose::Then(Box::new(then)), _place: place });
        self.0.rouse(&mut queue, lane);
        Ok(())
    }
}

impl<C: Carrier> Clone for Queue<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C: Carrier> Shared<C> {
    /// Tells the task of a lane with something to send, if it may be sent now; else who comes back does.
    fn rouse(&self, lane: &mut Lane<C>, number: u16) {
        if lane.flights < FLIGHTS && !lane.waiting.is_empty() && !lane.told {
            lane.told = self.wake.send(number).is_ok();
        }
    }
}

impl<C: Carrier> Lanes<C> {
    fn lock(&self, number: u16) -> MutexGuard<'_, Lane<C>> {
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

    /// The next ones to be sent, if a flight is free. Those for whom nobody waits any more are left out.
    fn board(&self, number: u16) -> Option<Vec<Waiting<C>>> {
        let mut lane = self.lock(number);
        lane.told = false;
        if lane.flights >= FLIGHTS {
            return None;
        }
        let mut batch = Vec::with_capacity(lane.waiting.len().min(BATCH));
        while batch.len() < BATCH {
            let Some(next) = lane.waiting.pop_front() else { break };
            if !next.whose.is_gone() {
                batch.push(next);
            }
        }
        if batch.is_empty() {
            return None;
        }
        lane.flights += 1;
        Some(batch)
    }

    fn land(&self, number: u16) {
        self.lock(number).flights -= 1;
    }
}

/// A check that its caller carries itself. However it ends, the next are sent.
struct Flight<'a, C: Carrier> {
    shared: &'a Shared<C>,
    lane: u16,
}

impl<C: Carrier> Drop for Flight<'_, C> {
    fn drop(&mut self) {
        let mut lane = self.shared.lanes.lock(self.lane);
        lane.flights -= 1;
        self.shared.rouse(&mut lane, self.lane);
    }
}

/// The queue's task.
async fn send_what_waits<C: Carrier>(carrier: Arc<C>, lanes: Arc<Lanes<C>>, mut woken: mpsc::UnboundedReceiver<u16>) {
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
                lanes.land(number);
                number
            }
        };
        while let Some(batch) = lanes.board(number) {
            flights.push(fly(&*carrier, number, batch));
        }
    }
}

/// Carries a batch, hands out the answers, and says in which lane it was.
async fn fly<C: Carrier>(carrier: &C, lane: u16, batch: Vec<Waiting<C>>) -> u16 {
    let mut asks = Vec::with_capacity(batch.len());
    // The places are kept until the answers are there.
    let mut waiting = Vec::with_capacity(batch.len());
    for Waiting { ask, whose, _place } in batch {
        asks.push(ask);
        waiting.push((whose, _place));
    }
    match carrier.carry(lane, asks).await {
        Ok(answers) => {
            let mut answers = answers.into_iter();
            for (whose, _place) in waiting {
                whose.tell(answers.next().ok_or_else(too_few));
            }
        }
        Err(error) => waiting.into_iter().for_each(|(whose, _place)| whose.tell(Err(error.clone()))),
    }
    lane
}

fn only<T>(answers: Vec<T>) -> Result<T, RedisError> {
    answers.into_iter().next().ok_or_else(too_few)
}

fn too_few() -> RedisError {
    RedisError::new(RedisErrorKind::Foreign, "the script answered for fewer checks than it was asked for")
}

#[cfg(test)]
mod tests;
