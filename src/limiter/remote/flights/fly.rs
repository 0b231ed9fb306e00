//! A store as the flights see it, and the requests that it answers.

use std::future::Future;
use std::marker::PhantomData;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::limiter::remote::permits::Permit;
use crate::limiter::remote::unanswered::Unanswered;
use crate::sync::contained;

/// Takes requests to the store.
pub(crate) trait Fly: Send + Sync + Sized + 'static {
    type Request: Send + 'static;
    type Answer: Send + 'static;
    type Error: From<Unanswered> + Send + 'static;
    type Line: Line<Self>;

    /// Sends requests of one lane in one call, and answers each. At `until` the last caller stops waiting.
    fn fly(&self, riders: Vec<Rider<Self>>, until: Instant) -> impl Future<Output = Landing> + Send;

    /// Returns what the store takes at a time.
    fn most(&self) -> Most;

    /// Records that requests were not sent, because their answers would have come too late.
    fn record_unsent(&self, error: &Self::Error);
}

/// How a flight ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landing {
    /// The store answered. The next flight with the same keys waits for a while.
    Answered { rest: Duration },
    /// The store did not answer.
    Failed,
}

/// What a store takes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Most {
    /// The units of one call.
    pub(crate) units: usize,
    pub(crate) calls: Calls,
}

impl Most {
    /// Returns what a flight with this many units counts in the window. A call of a connection of
    /// its own counts as one, because its time follows from its trip and the store's disk, and
    /// hardly from its units.
    pub(super) fn counted(self, units: usize) -> u64 {
        match self.calls {
            Calls::Pipelined => units as u64,
            Calls::Separate(_) => 1,
        }
    }
}

/// The calls of a lane at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    /// They share a connection. Their number follows from what a call takes.
    Pipelined,
    /// Each takes a connection of its own, or costs the store the same as if it were sent with others.
    Separate(usize),
}

/// Requests of a lane that wait for a flight. It says which may fly together.
pub(crate) trait Line<F: Fly<Line = Self>>: Default + Send + 'static {
    /// What a flight keeps from others until it has landed.
    type Held: Send + 'static;

    fn push(&mut self, waiting: Waiting<F>);

    /// Returns how many units may fly now. A unit is the work of one request, if no others share it.
    fn ready(&self) -> usize;

    /// Returns how many units fly before a check that comes now.
    fn before_a_check(&self) -> usize;

    /// Takes out requests of at most this many units. Returns what the flight holds, and how many
    /// units it has. `None` if no request flies.
    fn board(&mut self, room: usize, boarding: &mut Boarding<F>) -> Option<(Self::Held, usize)>;

    /// Ends what a flight held. Requests whose callers have gone are moved out, to be dropped without the lock.
    fn land(&mut self, held: Self::Held, gone: &mut Vec<Waiting<F>>);

    /// Takes out all requests.
    fn take_all(&mut self) -> Vec<Waiting<F>>;

    /// Returns whether the request with this number waits.
    fn has(&self, number: u64) -> bool;

    /// Returns when the check that has waited longest came.
    fn oldest(&self) -> Option<Instant>;

    /// Gives up memory of a burst.
    fn shrink(&mut self) {}
}

/// The requests that a flight takes, and those that do not fly.
pub(crate) struct Boarding<F: Fly> {
    now: Instant,
    /// The time that a request needs for its answer.
    needed: Duration,
    /// No other flight is under way.
    is_idle: bool,
    pub(super) riders: Vec<Rider<F>>,
    /// When the time of the last of them is over. `None` if none of them has a time.
    pub(super) until: Option<Instant>,
    /// One of them has no time.
    pub(super) has_corrections: bool,
    pub(super) gone: Vec<Waiting<F>>,
    pub(super) known: Vec<(Waiting<F>, F::Answer)>,
    pub(super) late: Vec<Waiting<F>>,
}

impl<F: Fly> Boarding<F> {
    pub(super) fn new(now: Instant, needed: Duration, is_idle: bool) -> Self {
        Self {
            now,
            needed,
            is_idle,
            riders: Vec::new(),
            until: None,
            has_corrections: false,
            gone: Vec::new(),
            known: Vec::new(),
            late: Vec::new(),
        }
    }

    /// Takes a request aboard, unless its caller has gone, its answer is known by now, or would
    /// come too late. The last one of an idle lane is taken even then, because it measures how long
    /// a call takes now.
    pub(super) fn take(&mut self, mut waiting: Waiting<F>, is_last: bool) {
        if waiting.receiver.is_gone() {
            return self.gone.push(waiting);
        }
        if let Some(until) = waiting.until {
            let left = until.saturating_duration_since(self.now);
            let is_measured = self.is_idle && is_last && self.riders.is_empty();
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
        self.riders.push(waiting.board());
    }
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
pub(super) struct Then<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)>(Option<F>, PhantomData<fn(A, E)>);

impl<A, E: From<Unanswered>, F: FnOnce(Result<A, E>)> Then<A, E, F> {
    pub(super) fn new(then: F) -> Self {
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

/// A request that waits.
pub(crate) struct Waiting<F: Fly> {
    pub(super) request: F::Request,
    pub(super) receiver: Box<dyn Receiver<F::Answer, F::Error>>,
    /// The number of requests of its lane that came before.
    pub(super) number: u64,
    pub(super) since: Instant,
    /// When a check's time is over. `None` for a correction, which has no time.
    pub(super) until: Option<Instant>,
    pub(super) permit: Permit,
}

impl<F: Fly> Waiting<F> {
    fn board(self) -> Rider<F> {
        Rider { request: self.request, receiver: self.receiver, _permit: self.permit }
    }
}

/// A request in flight.
pub(crate) struct Rider<F: Fly> {
    pub(crate) request: F::Request,
    pub(crate) receiver: Box<dyn Receiver<F::Answer, F::Error>>,
    /// It is kept until the answer is there.
    _permit: Permit,
}

impl<F: Fly> Rider<F> {
    pub(crate) fn answer(self, answer: Result<F::Answer, F::Error>) {
        hand_over(self.receiver, answer);
    }
}

/// Hands an answer over. The caller's waker may be the application's code, and may panic. The
/// others get theirs anyway.
pub(super) fn hand_over<A, E>(receiver: Box<dyn Receiver<A, E>>, answer: Result<A, E>) {
    contained(|| receiver.answer(answer));
}

/// Hands out the answers to riders, in their order. Those of callers that have gone come last and in reverse order:
/// their charges are refunded, and a queue accepts the refund of its newest slot only.
pub(crate) fn hand_out<F: Fly>(
    riders: impl IntoIterator<Item = Rider<F>>,
    answers: impl IntoIterator<Item = Result<F::Answer, F::Error>>,
) {
    let (mut answers, mut gone) = (answers.into_iter(), Vec::new());
    for rider in riders {
        let answer = answers.next().unwrap_or_else(|| Err(Unanswered::LeftOut.into()));
        match rider.receiver.is_gone() {
            true => gone.push((rider, answer)),
            false => rider.answer(answer),
        }
    }
    gone.into_iter().rev().for_each(|(rider, answer)| rider.answer(answer));
}
