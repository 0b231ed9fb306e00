//! Sends requests to the store: runs the script, and reads the answers.
//!
//! While a cluster moves a slot, perhaps for minutes, some of the slot's keys are on one server and some on
//! another. A call with keys of both servers runs on neither server. In this case each key gets its own call, which
//! reaches the server that has the key. So requests do not share calls meanwhile, and a request of several keys is
//! decided like a set of several slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::Instant;

use super::connection::RedisConnections;
use super::error::RedisError;
use super::keys::StoredKey;
use super::wire::{self, CallTime, RedisAnswer, SplitAnswers, WireRequest};
use crate::base::time::{Timestamp, Utc};
use crate::clock::{Clock, wall_now};
use crate::event::StoreErrorKind;
use crate::limiter::remote::{CallLimits, CallResult, Caller, Calls, Queue, RemoteStore, hand_out};

/// The maximum number of requests of one call. At 2 to 3 µs each, these requests occupy the server for at most
/// 0.2 ms.
const BATCH: usize = 64;

/// The store, and the limiter's clock if the scripts do not use the server's time.
pub(super) struct Dispatcher {
    pub(super) store: RedisConnections,
    pub(super) clock: Option<Arc<dyn Clock>>,
    /// The number of the next call.
    pub(super) calls: AtomicU64,
    /// Whether each request is split.
    #[cfg(test)]
    pub(super) splits: std::sync::atomic::AtomicBool,
}

/// The number of times that requests are sent again with the window that contains the server's time.
const WINDOW_TRIES: usize = 2;

type RequestResult = Result<RedisAnswer, RedisError>;

impl RemoteStore for Dispatcher {
    type Request = WireRequest;
    type Answer = RedisAnswer;
    type Error = RedisError;
    type Queue = Queue<Self>;

    async fn send_batch(
        &self,
        callers: Vec<Caller<Self>>,
        until: Instant,
        store_time: Option<Timestamp>,
    ) -> CallResult {
        let requests: SmallVec<[&WireRequest; 8]> = callers.iter().map(|caller| &caller.request).collect();
        let mut clock = None;
        let answers = self.take_to_store(&requests, until, store_time, &mut clock).await;
        let is_answered = answers.iter().any(Result::is_ok);
        drop(requests);
        hand_out(callers, answers);
        if is_answered { CallResult::Answered { rest: Duration::ZERO, clock } } else { CallResult::Failed }
    }

    fn limits(&self) -> CallLimits {
        CallLimits { units: BATCH, calls: Calls::Pipelined }
    }

    fn server_of(&self, slot: u16) -> u16 {
        self.store.server_of(slot)
    }

    fn record_unsent(&self, error: &RedisError) {
        self.store.record_failure(error);
    }
}

impl Dispatcher {
    /// Returns the answer to each request. `server_time` is the time that the server's clock shows when the
    /// requests arrive, according to an earlier answer. Sets `clock` to the server's time, if the answer has it.
    async fn take_to_store(
        &self,
        requests: &[&WireRequest],
        until: Instant,
        server_time: Option<Timestamp>,
        clock: &mut Option<Timestamp>,
    ) -> Vec<RequestResult> {
        let mut answers = self.answers(requests, until, server_time, clock).await;
        let is_apart = |answer: &RequestResult| matches!(answer, Ok(RedisAnswer::Elsewhere));
        if answers.iter().any(is_apart) {
            let apart = answers.iter_mut().zip(requests).filter(|(answer, _)| is_apart(answer));
            let split =
                apart.map(|(answer, request)| async move { *answer = self.split(request, until, server_time).await });
            Box::pin(join_all(split)).await;
        }
        answers
    }

    /// Returns the answer to each request. If a request named a calendar window that does not contain the server's
    /// time, the request is sent again, with the time that the server's answer leads to expect. This happens at the
    /// edge of a window, and in the first call of a process whose clock is in another window than the server's clock.
    async fn answers(
        &self,
        requests: &[&WireRequest],
        until: Instant,
        server_time: Option<Timestamp>,
        clock: &mut Option<Timestamp>,
    ) -> Vec<RequestResult> {
        let mut sent = Instant::now();
        let mut answers = self.answers_at_once(requests, self.call_time(server_time), until, clock).await;
        for _ in 0..WINDOW_TRIES {
            let mut outside = SmallVec::<[&WireRequest; 8]>::new();
            let mut told = None;
            for (answer, request) in answers.iter().zip(requests) {
                if let Ok(RedisAnswer::Outside(now)) = answer {
                    told = Some(*now);
                    outside.push(*request);
                }
            }
            let Some(told) = told else { return answers };
            let places = answers.iter_mut().filter(|answer| matches!(answer, Ok(RedisAnswer::Outside(_))));
            // If a call takes as long to arrive as the last call, the server's clock then shows this time.
            let at_arrival = CallTime::OfServer(told.saturating_add(sent.elapsed()));
            sent = Instant::now();
            let again = self.answers_at_once(&outside, at_arrival, until, clock).await;
            places.zip(again).for_each(|(place, answer)| *place = answer);
        }
        for answer in &mut answers {
            if let Ok(RedisAnswer::Outside(now)) = answer {
                let message = format!(
                    "the server's time jumps from one call to the next: the server's time is now {}",
                    Utc(*now)
                );
                *answer = Err(RedisError::new(StoreErrorKind::Unavailable, message));
            }
        }
        answers
    }

    fn call_time(&self, server_time: Option<Timestamp>) -> CallTime {
        match &self.clock {
            Some(clock) => CallTime::Given(clock.now()),
            None => CallTime::OfServer(server_time.unwrap_or_else(wall_now)),
        }
    }

    /// Returns the answer to each request, in one call.
    async fn answers_at_once(
        &self,
        requests: &[&WireRequest],
        time: CallTime,
        until: Instant,
        clock: &mut Option<Timestamp>,
    ) -> Vec<RequestResult> {
        #[cfg(test)]
        if requests.iter().map(|request| request.keys()).sum::<usize>() > 1 && self.splits.load(Ordering::Relaxed) {
            return requests.iter().map(|_| Ok(RedisAnswer::Elsewhere)).collect();
        }
        let failed =
            |error: RedisError| -> Vec<RequestResult> { requests.iter().map(|_| Err(error.clone())).collect() };
        let Some(slot) = requests.first().map(|request| request.slot()) else { return Vec::new() };
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let call = wire::call(requests, number, time);
        #[cfg(test)]
        super::tests::simulation::note(number, requests);
        let reply = match self.store.run(&call, slot, until).await {
            Ok(Some(reply)) => reply,
            Ok(None) => return requests.iter().map(|_| Ok(RedisAnswer::Elsewhere)).collect(),
            Err(error) => return failed(error),
        };
        let refused = |words: &str| self.store.record_refusal(slot, words);
        let answers = wire::answers(requests, number, &reply, &refused).unwrap_or_else(|error| {
            self.store.restart_garbled(slot, &error);
            failed(error)
        });
        *clock = wire::time_of(&reply).filter(|_| self.clock.is_none());
        match answers.iter().find_map(|answer| answer.as_ref().err()) {
            Some(error) => self.store.record_failure(error),
            None => self.store.record_success(),
        }
        #[cfg(test)]
        super::tests::processes::log(&reply, requests, &answers);
        answers
    }

    /// Returns the answer to a request, with one call for each of its keys, one after the other.
    async fn split(&self, request: &WireRequest, until: Instant, server_time: Option<Timestamp>) -> RequestResult {
        if request.keys() == 1 {
            return self.lone(request, until, server_time).await;
        }
        let mut split = SplitAnswers::new(request);
        while let Some((at, request)) = split.next() {
            split.answer(at, self.lone(&request, until, server_time).await);
        }
        Ok(split.together())
    }

    /// Returns the answer to a request of one key. The key cannot be on two servers, but it may
    /// have moved again.
    async fn lone(&self, request: &WireRequest, until: Instant, server_time: Option<Timestamp>) -> RequestResult {
        match self.answers(&[request], until, server_time, &mut None).await.pop() {
            None | Some(Ok(RedisAnswer::Elsewhere)) => {
                let message = "the key moved to another server of the cluster during the call";
                Err(RedisError::new(StoreErrorKind::Unavailable, message))
            }
            Some(answer) => answer,
        }
    }

    /// Finds out, within the given time, whether the user has the rights that checks need.
    ///
    /// # Errors
    /// Returns `Misconfigured` with the names of the missing rights, if there are any.
    pub(super) async fn check_rights(&self, key: &StoredKey, within: Duration) -> Result<(), RedisError> {
        let call = wire::rights(key, self.clock.is_none());
        let reply = self.store.run(&call, key.slot, Instant::now() + within).await?;
        match reply.as_deref().map(std::str::from_utf8) {
            None | Some(Ok("")) => Ok(()), // a script of one key is never apart
            Some(Ok(rights)) => {
                Err(self.store.record_refusal(key.slot, &format!("NOPERM {rights} is missing for the limiter's keys")))
            }
            Some(Err(_)) => Err(wire::nonsense()),
        }
    }
}

#[cfg(test)]
mod tests;
