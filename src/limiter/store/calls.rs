//! The calls to a store: waits for answers, also for late ones, and notices when the store is dead and when it
//! answers again.
//!
//! A call without an answer is never sent again after a timeout. If the call were sent again, the store
//! would do the same work twice, while it already has too much work. Even a late answer shows that the
//! store is not dead.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;

use super::error::StoreError;
use super::random::Random;
use super::silence::{Mark, Silence};
use super::store_time::{StoreTime, Trip};
use super::{Change, Store, Then, Value};
use crate::base::sync::{Mutex, lock};
use crate::base::time::Timestamp;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{Breaker, Deadline, Events};

/// The first and the longest pause before a probe of a store that is believed dead.
const PROBE: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// The time to live of the value that a probe writes.
const PROBED: Duration = Duration::from_secs(60);

/// The number of consecutive calls without a connection after which the store is believed dead.
const FAILURES: u32 = 5;

/// The time for which the limiter waits for a late answer.
const LISTENS: Duration = Duration::from_secs(5);

/// A store with its clock, its breaker, and the observers of its events.
pub(super) struct StoreCalls<S: Store> {
    pub(super) store: S,
    pub(super) name: String,
    pub(super) time: StoreTime,
    pub(super) breaker: Breaker,
    /// The reason why the breaker is open.
    down_because: Mutex<Option<StoreError>>,
    silence: Silence,
    pub(super) events: Events,
    pub(super) deadline: Duration,
    pub(super) random: Random,
    /// A key of this process, for probes.
    probe: Arc<str>,
    pub(super) runtime: Handle,
}

/// An answer of the store, which can be an error.
pub(super) struct Answered<T> {
    pub(super) answer: T,
    pub(super) trip: Trip,
    pub(super) took: Duration,
    pub(super) sent: SentAt,
}

/// A call whose answer has not come in time.
pub(super) struct Late<T> {
    pub(super) call: BoxFuture<'static, T>,
    pub(super) sent: SentAt,
    pub(super) error: StoreError,
}

/// The instant at which a call was sent, by this process's clock and by the runtime.
#[derive(Clone, Copy)]
pub(super) struct SentAt {
    at: Timestamp,
    mark: Mark,
}

impl<S: Store> StoreCalls<S> {
    pub(super) fn new(
        store: S,
        time: StoreTime,
        events: Events,
        deadline: Duration,
        probe: Arc<str>,
        runtime: Handle,
    ) -> Self {
        Self {
            name: store.name(),
            store,
            time,
            breaker: Breaker::new(FAILURES),
            down_because: Mutex::new(None),
            silence: Silence::new(deadline),
            events,
            deadline,
            random: Random::new(),
            probe,
            runtime,
        }
    }

    /// Waits for an answer of the store until the deadline.
    ///
    /// # Errors
    /// Returns the call if its answer has not come in time. [`listen`](Self::listen) goes on waiting for
    /// the answer.
    pub(super) async fn call<T: FromStore + Send + 'static>(
        self: &Arc<Self>,
        call: impl Future<Output = T> + Send + 'static,
        deadline: Deadline,
    ) -> Result<Answered<T>, Late<T>> {
        let sent = SentAt { at: self.time.own(), mark: Mark::now() };
        let mut call = call.boxed();
        if let Some(answer) = deadline.timeout(&mut call).await {
            return Ok(self.hear(answer, sent));
        }
        let error = if deadline.is_late() {
            let message = format!("no answer of {} was read in time: this process is too busy", self.name);
            StoreError::new(StoreErrorKind::Overloaded, message)
        } else {
            let (name, deadline) = (&self.name, self.deadline);
            let message = match self.silence.longest_late() {
                Some(late) => format!(
                    "answers of {name} come too late: the longest of the last calls took {late:.0?}, and the deadline \
                     is {deadline:?}"
                ),
                None => format!("no answer of {name} within {deadline:?}: it is slow or silent"),
            };
            self.record_failure(StoreError::new(StoreErrorKind::Timeout, message), sent)
        };
        Err(Late { call, sent, error })
    }

    /// Records that the store has answered.
    pub(super) fn hear<T: FromStore>(&self, answer: T, sent: SentAt) -> Answered<T> {
        if answer.is_heard() {
            self.silence.end(sent.mark);
            self.breaker.record_answer();
        }
        let trip = Trip { sent: sent.at, answered: self.time.own() };
        Answered { answer, trip, took: sent.mark.took(), sent }
    }

    /// Waits for a late answer in the background. Calls `then` with the answer, or with `None` if no answer
    /// comes within [`LISTENS`].
    pub(super) fn listen<T: FromStore + Send + 'static>(
        self: &Arc<Self>,
        late: Late<T>,
        then: impl FnOnce(Option<Answered<T>>) + Send + 'static,
    ) {
        let calls = Arc::clone(self);
        self.runtime.spawn(async move {
            let answer = Deadline::after(LISTENS).timeout(late.call).await;
            let answered = answer.map(|answer| calls.hear(answer, late.sent));
            drop(calls);
            then(answered);
        });
    }

    /// Records that the store did not decide.
    pub(super) fn record_failure(self: &Arc<Self>, error: StoreError, sent: SentAt) -> StoreError {
        let is_dead = match error.kind() {
            StoreErrorKind::Unavailable => self.breaker.record_silence(),
            StoreErrorKind::Timeout => self.silence.is_missed(sent.mark) && self.breaker.open(),
            _ => false,
        };
        if is_dead {
            let reason = if error.kind() == StoreErrorKind::Timeout { self.silent() } else { error.clone() };
            self.events.report_down(&self.name, &reason);
            *lock(&self.down_because) = Some(reason);
            self.runtime.spawn(probe(Arc::downgrade(self)));
        }
        error
    }

    /// Returns the error of a store that answers no call.
    fn silent(&self) -> StoreError {
        let message = format!("{} is silent: no call was answered for {:.0?}", self.name, self.silence.lasts());
        StoreError::new(StoreErrorKind::Unavailable, message)
    }

    /// Returns the error of a call to a store that is believed dead.
    pub(super) fn unavailable(&self) -> StoreError {
        let reason = lock(&self.down_because).clone();
        reason.unwrap_or_else(|| self.silent()).while_down()
    }
}

impl<S: Store> Drop for StoreCalls<S> {
    fn drop(&mut self) {
        if self.breaker.is_open() {
            self.events.report_left(&self.name);
        }
    }
}

/// Returns whether the call was cut off. After a cut, no answer will come, and it is unknown whether the store
/// did the work.
pub(super) fn is_cut(error: &StoreError) -> bool {
    error.kind() == StoreErrorKind::Unavailable
}

/// The result of a call to the store: an answer, or an error that replaces the answer.
pub(super) trait FromStore {
    /// Returns whether the store has answered at all.
    fn is_heard(&self) -> bool;
}

impl<T> FromStore for Result<T, StoreError> {
    fn is_heard(&self) -> bool {
        let is_silent =
            |error: &StoreError| matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout);
        !self.as_ref().is_err_and(is_silent)
    }
}

/// Probes a store that is believed dead until it answers, or the limiter is dropped. A probe writes as checks do,
/// because a store whose disk hangs still answers reads.
async fn probe<S: Store>(calls: Weak<StoreCalls<S>>) {
    let mut pause = PROBE[0];
    let mut last = None;
    loop {
        Deadline::after(pause).wait().await;
        let Some(calls) = calls.upgrade() else { return };
        let (version, mark) = (calls.random.version(), Mark::now());
        let value = Value::new(version, Vec::new());
        let changes = [Change::new(Arc::clone(&calls.probe), last, Then::Put(value, PROBED))];
        // A store that panics is asked again, like a store that fails.
        let swap = AssertUnwindSafe(async { calls.store.swap(&changes).await }).catch_unwind();
        match Deadline::after(calls.deadline.max(PROBE[1])).timeout(swap).await {
            Some(Ok(Ok(swapped))) if swapped.is_done() => {
                calls.silence.end(mark);
                calls.breaker.close();
                calls.events.report_up(&calls.name);
                let [Change { key, .. }] = changes;
                let gone = [Change::new(key, Some(version), Then::Delete)];
                let removed = AssertUnwindSafe(calls.store.swap(&gone)).catch_unwind();
                drop(Deadline::after(LISTENS).timeout(removed).await); // otherwise it expires
                return;
            }
            // An earlier probe that got no answer has written its value after all.
            Some(Ok(Ok(swapped))) => {
                last = swapped.current().and_then(|current| Some(current.first()?.as_ref()?.version));
            }
            _ => pause = (pause * 2).min(PROBE[1]),
        }
    }
}
