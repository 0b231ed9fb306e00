//! A store as the flights use it, and the batches of requests that the store gets.

use std::future::Future;
use std::marker::PhantomData;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::base::sync::contained;
use crate::base::time::Timestamp;
use crate::limiter::remote::permits::Permit;
use crate::limiter::remote::unanswered::Unanswered;

/// While checks wait, at most one of this many requests is a correction.
pub(super) const SHARE: usize = 4;

/// A store that answers batches of requests.
pub(crate) trait RemoteStore: Send + Sync + Sized + 'static {
    type Request: Send + 'static;
    type Answer: Send + 'static;
    type Error: From<Unanswered> + Send + 'static;
    type Queue: LaneQueue<Self>;

    /// Sends requests of one lane in one call, and answers each. The last caller stops waiting at `until`.
    /// `store_time` is the time that the store's clock shows when the call arrives, estimated from the lane's last
    /// answer.
    fn send_batch(
        &self,
        callers: Vec<Caller<Self>>,
        until: Instant,
        store_time: Option<Timestamp>,
    ) -> impl Future<Output = CallResult> + Send;

    /// Returns the maximum load of the store.
    fn limits(&self) -> CallLimits;

    /// Returns the index of the server that has a lane. By default the store is one server.
    fn server_of(&self, lane: u16) -> u16 {
        let _ = lane;
        0
    }

    /// Records that requests were not sent, because their answers would have come too late.
    fn record_unsent(&self, error: &Self::Error);
}

/// The result of a call to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallResult {
    /// The store answered.
    Answered {
        /// The time for which the next flight with the same keys waits.
        rest: Duration,
        /// The time of the store's clock, if the store reported it.
        clock: Option<Timestamp>,
    },
    /// The store did not answer.
    Failed,
}

/// The maximum load of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallLimits {
    /// The maximum number of units of one call.
    pub(crate) units: usize,
    pub(crate) calls: Calls,
}

impl CallLimits {
    /// Returns how much of the window a flight with this number of units uses. A call over its own connection
    /// counts as one, because its duration depends on the round trip and the store's disk, and hardly on the number
    /// of units.
    pub(super) fn counted(self, units: usize) -> u64 {
        match self.calls {
            Calls::Pipelined => units as u64,
            Calls::Separate(_) => 1,
        }
    }
}

/// The maximum number of calls of a lane at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    /// The calls share a connection. The number of calls follows from the duration of a call.
    Pipelined,
    /// The maximum is this number. The calls do not share a connection, or calls that are sent together cost the
    /// store as much as calls that are sent one by one.
    Separate(usize),
}

/// The requests of a lane that wait for a flight. The queue decides which requests share a flight.
pub(crate) trait LaneQueue<F: RemoteStore<Queue = Self>>: Default + Send + 'static {
    /// The keys of a flight, which no other flight may have until that flight has ended.
    type Held: Send + 'static;

    fn push(&mut self, waiting: QueuedRequest<F>);

    /// Returns how many units may be sent now. A unit is the work of one request, unless several requests
    /// share a unit.
    fn ready(&self) -> usize;

    /// Returns the number of waiting units that are sent before a check that arrives now.
    fn before_a_check(&self) -> usize;

    /// Moves requests of at most `room` units into the batch. Returns the keys that the flight holds, and the
    /// number of the batch's units. Returns `None` if the batch is empty.
    fn take_batch(&mut self, room: usize, batch: &mut Batch<F>) -> Option<(Self::Held, usize)>;

    /// Releases what a flight held. Requests whose callers have gone are moved to `gone`, so that the requests are
    /// dropped without the lock.
    fn release(&mut self, held: Self::Held, gone: &mut Vec<QueuedRequest<F>>);

    /// Takes out all requests.
    fn take_all(&mut self) -> Vec<QueuedRequest<F>>;

    /// Returns whether the request with this number waits.
    fn has(&self, number: u64) -> bool;

    /// Returns whether a check waits, and not only corrections.
    fn has_checks(&self) -> bool;

    /// Returns the instant at which the check that has waited longest arrived.
    fn oldest(&self) -> Option<Instant>;

    /// Frees the memory that a burst needed.
    fn shrink(&mut self) {}
}

/// The requests that a flight sends, and the requests that were removed from the queue without being sent.
pub(crate) struct Batch<F: RemoteStore> {
    now: Instant,
    /// The time that a request needs for its answer.
    needed: Duration,
    /// True if no other flight is under way.
    is_idle: bool,
    pub(super) callers: Vec<Caller<F>>,
    /// The latest deadline of these requests. `None` if no request has a deadline.
    pub(super) until: Option<Instant>,
    /// True if one of these requests is a correction, which has no deadline.
    pub(super) has_corrections: bool,
    pub(super) gone: Vec<QueuedRequest<F>>,
    pub(super) known: Vec<(QueuedRequest<F>, F::Answer)>,
    pub(super) late: Vec<QueuedRequest<F>>,
}

impl<F: RemoteStore> Batch<F> {
    pub(super) fn new(now: Instant, needed: Duration, is_idle: bool) -> Self {
        Self {
            now,
            needed,
            is_idle,
            callers: Vec::new(),
            until: None,
            has_corrections: false,
            gone: Vec::new(),
            known: Vec::new(),
            late: Vec::new(),
        }
    }

    /// Adds a request, unless its caller has gone, or its answer is known by now or would come too late. The last
    /// request of an idle lane is sent even if it is late, because the request's call shows how long calls take now.
    pub(super) fn add(&mut self, mut waiting: QueuedRequest<F>, is_last: bool) {
        if waiting.receiver.is_gone() {
            return self.gone.push(waiting);
        }
        if let Some(until) = waiting.until {
            let left = until.saturating_duration_since(self.now);
            let is_measured = self.is_idle && is_last && self.callers.is_empty();
            if left.is_zero() || (left < self.needed && !is_measured) {
                return self.late.push(waiting);
            }
        }
        if let Some(answer) = waiting.receiver.known() {
            return self.known.push((waiting, answer));
        }
        match waiting.until {
            Some(until) => self.until = self.until.max(Some(until)),
            None => self.has_corrections = true,
        }
        self.callers.push(waiting.into_caller());
    }
}

/// Receives the answer to a request, in the task of its flight.
pub(crate) trait Receiver<A, E>: Send {
    /// Returns whether the answer is no longer needed. A request whose answer is no longer needed is not sent.
    fn is_gone(&self) -> bool {
        false
    }

    /// Returns the answer if it is known by now; the request is then not sent. This method is called right
    /// before the request would be sent.
    fn known(&mut self) -> Option<A> {
        None
    }

    fn answer(self: Box<Self>, answer: Result<A, E>);
}

/// A caller that waits for the plain answer.
impl<A: Send, E: Send> Receiver<A, E> for oneshot::Sender<Result<A, E>> {
    fn is_gone(&self) -> bool {
        self.is_closed()
    }

    fn answer(self: Box<Self>, answer: Result<A, E>) {
        drop(self.send(answer)); // the caller may have gone
    }
}

/// A function that gets the answer. The request is sent in any case, and the function is called even if the flight ends
/// without an answer.
pub(super) struct AnswerFn<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)>(Option<F>, PhantomData<fn(A, E)>);

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)> AnswerFn<A, E, F> {
    pub(super) fn new(then: F) -> Self {
        Self(Some(then), PhantomData)
    }
}

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>) + Send> Receiver<A, E> for AnswerFn<A, E, F> {
    fn answer(mut self: Box<Self>, answer: Result<A, E>) {
        if let Some(then) = self.0.take() {
            then(answer);
        }
    }
}

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)> Drop for AnswerFn<A, E, F> {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(Err(Unanswered::RuntimeEnded.into()));
        }
    }
}

/// A request that waits for a flight.
pub(crate) struct QueuedRequest<F: RemoteStore> {
    pub(super) request: F::Request,
    pub(super) receiver: Box<dyn Receiver<F::Answer, F::Error>>,
    /// The number of earlier requests of the same lane.
    pub(super) number: u64,
    pub(super) since: Instant,
    /// A check's deadline. `None` for a correction, which has no deadline.
    pub(super) until: Option<Instant>,
    pub(super) permit: Permit,
}

impl<F: RemoteStore> QueuedRequest<F> {
    pub(super) fn answer(self, answer: Result<F::Answer, F::Error>) {
        self.into_caller().answer(answer);
    }

    fn into_caller(self) -> Caller<F> {
        Caller { request: self.request, receiver: self.receiver, _permit: self.permit }
    }
}

/// The caller of a request in flight.
pub(crate) struct Caller<F: RemoteStore> {
    pub(crate) request: F::Request,
    pub(crate) receiver: Box<dyn Receiver<F::Answer, F::Error>>,
    /// Counts the request as in flight until it is answered.
    _permit: Permit,
}

impl<F: RemoteStore> Caller<F> {
    pub(crate) fn answer(self, answer: Result<F::Answer, F::Error>) {
        // The permit is returned afterwards. So the number of waiting requests is not 0 before the receiver has sent a
        // refund.
        hand_over(self.receiver, answer);
    }
}

/// Passes an answer to its receiver. The caller's waker may be the application's code. If that code panics, the
/// other callers still get their answers.
fn hand_over<A, E>(receiver: Box<dyn Receiver<A, E>>, answer: Result<A, E>) {
    contained(|| receiver.answer(answer));
}

/// Passes the answers to the callers, in the order of the callers. The answers of callers that have gone come last
/// and in reverse order, because their charges are refunded, and a leaky queue accepts only the refund of its
/// newest slot.
pub(crate) fn hand_out<F: RemoteStore>(
    callers: impl IntoIterator<Item = Caller<F>>,
    answers: impl IntoIterator<Item = Result<F::Answer, F::Error>>,
) {
    let (mut answers, mut gone) = (answers.into_iter(), Vec::new());
    for caller in callers {
        let answer = answers.next().unwrap_or_else(|| Err(Unanswered::LeftOut.into()));
        match caller.receiver.is_gone() {
            true => gone.push((caller, answer)),
            false => caller.answer(answer),
        }
    }
    gone.into_iter().rev().for_each(|(caller, answer)| caller.answer(answer));
}
