//! A flight that is driven by a caller instead of a task.
//!
//! With such a flight, a lone check is polled no more often than a bare call. With a task for each flight, two
//! threads of a runtime would wake each other for each check, which takes a quarter of the check's time
//! (`benches/redis.rs`, "throughput"). As soon as another request waits for the flight, or the caller's future is
//! dropped, the flight becomes a task. So no request depends on the polling of another caller's future.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::base::sync::contained;
use crate::limiter::remote::deadline::Deadline;

type Flying = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A flight that one caller drives until it ends or becomes a task.
pub(crate) struct CallerFlight {
    state: Mutex<DriverState>,
    runtime: Handle,
}

/// The handle with which a caller waits for the flight of its request.
pub(crate) struct FlightHandle(Option<Arc<CallerFlight>>);

impl FlightHandle {
    /// Makes the handle of a flight that a task drives.
    pub(crate) fn by_task() -> Self {
        Self(None)
    }

    /// Makes the handle of a flight that this caller drives.
    pub(crate) fn by_caller(flight: Arc<CallerFlight>) -> Self {
        Self(Some(flight))
    }

    /// Waits for the answer, and drives the flight if no task does. Returns `None` if the deadline has passed.
    pub(crate) async fn wait<T>(
        &self,
        mut answer: oneshot::Receiver<T>,
        deadline: Deadline,
    ) -> Option<Result<T, oneshot::error::RecvError>> {
        let answer = poll_fn(|cx| {
            // Does not register the caller's waker for the answer while the caller drives the flight. Otherwise the
            // flight would wake the caller's task during a poll of this task, which wakes another thread.
            if self.0.as_ref().is_some_and(|flight| flight.drive(cx)) {
                return Poll::Pending;
            }
            Pin::new(&mut answer).poll(cx)
        });
        deadline.timeout(answer).await
    }
}

impl Drop for FlightHandle {
    /// Makes the flight a task, because the caller has gone, but the answer has to be handled.
    fn drop(&mut self) {
        if let Some(flight) = &self.0 {
            flight.make_task();
        }
    }
}

/// The driver of a flight.
enum DriverState {
    /// The caller polls the flight next. The waker is the caller's.
    Idle(Flying, Waker),
    /// The caller polls the flight now. If another thread wants the flight to be a task, the caller makes it a task
    /// after this poll.
    Polled { becomes_task: bool },
    /// The flight has ended, or is a task.
    Left,
}

impl CallerFlight {
    pub(crate) fn new(flight: impl Future<Output = ()> + Send + 'static, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(DriverState::Idle(Box::pin(flight), Waker::noop().clone())), runtime })
    }

    fn state(&self) -> MutexGuard<'_, DriverState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the flight out to poll it. Returns `None` if the flight is a task or has ended.
    fn take_to_poll(&self) -> Option<Flying> {
        let mut state = self.state();
        let next = match &*state {
            DriverState::Idle(..) => DriverState::Polled { becomes_task: false },
            // The flight has ended, or another thread has made it a task.
            DriverState::Polled { .. } | DriverState::Left => return None,
        };
        match std::mem::replace(&mut *state, next) {
            DriverState::Idle(flight, _) => Some(flight),
            DriverState::Polled { .. } | DriverState::Left => None,
        }
    }

    /// Drives the flight, in the caller's task and in the context of the limiter's runtime, to which the
    /// flight's timers belong. Returns whether the caller's next poll has to drive the flight. `false` means
    /// that the flight has ended or is a task.
    fn drive(&self, cx: &mut Context<'_>) -> bool {
        let Some(mut flight) = self.take_to_poll() else { return false };
        let mut has_ended = true; // also by a panic of an observer, which is kept from the caller as a task keeps it
        contained(|| {
            let _runtime = self.runtime.enter();
            has_ended = flight.as_mut().poll(cx) == Poll::Ready(());
        });
        let mut state = self.state();
        let is_driven = !has_ended && matches!(*state, DriverState::Polled { becomes_task: false });
        if is_driven {
            *state = DriverState::Idle(flight, cx.waker().clone());
            return true;
        }
        // The flight has ended, or another thread added a request during the poll, and that request waits for this
        // flight.
        *state = DriverState::Left;
        drop(state);
        if !has_ended {
            self.runtime.spawn(flight);
        }
        false
    }

    /// Makes the flight a task, unless it already is a task or has ended.
    pub(crate) fn make_task(&self) {
        let mut state = self.state();
        match &mut *state {
            // The caller polls the flight on another thread, and makes the flight a task when the poll returns.
            DriverState::Polled { becomes_task } => *becomes_task = true,
            // The caller waits to be woken, so this thread takes the flight from the caller.
            DriverState::Idle(..) => {
                if let DriverState::Idle(flight, caller) = std::mem::replace(&mut *state, DriverState::Left) {
                    drop(state);
                    self.runtime.spawn(flight); // if the runtime has ended, the flight ends here
                    // From now on the caller only waits for the answer. The caller's waker may be the application's
                    // code, and may panic.
                    contained(|| caller.wake());
                }
            }
            // The flight has ended, or another thread took the flight first.
            DriverState::Left => {}
        }
    }
}
