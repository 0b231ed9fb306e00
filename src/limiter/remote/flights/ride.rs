//! A flight that a caller drives.
//!
//! A lone check then takes no turn of the runtime more than the bare call does: without this, two threads of a runtime
//! woke each other for each check, which took a quarter of its time (`benches/redis.rs`, "throughput"). As soon as
//! another request waits for the flight, or the caller goes, the flight becomes a task. So no request depends on
//! another caller's future being polled.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::limiter::remote::due::Due;
use crate::sync::contained;

type Flying = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A flight that one caller drives until it ends or becomes a task.
pub(crate) struct Ride {
    state: Mutex<State>,
    runtime: Handle,
}

/// The flight of a request, as its caller sees it.
pub(crate) struct Driven(Option<Arc<Ride>>);

impl Driven {
    /// A task drives the flight.
    pub(crate) fn by_task() -> Self {
        Self(None)
    }

    pub(crate) fn by_caller(ride: Arc<Ride>) -> Self {
        Self(Some(ride))
    }

    /// Waits for the answer until then, and drives the flight if its caller does. Returns `None` if the time is over.
    pub(crate) async fn wait<T>(
        &self,
        mut answer: oneshot::Receiver<T>,
        due: Due,
    ) -> Option<Result<T, oneshot::error::RecvError>> {
        let answer = poll_fn(|cx| {
            // Its waker is not registered twice: a task that is woken while it is polled wakes another thread.
            if self.0.as_ref().is_some_and(|ride| ride.drive(cx)) {
                return Poll::Pending;
            }
            Pin::new(&mut answer).poll(cx)
        });
        due.timeout(answer).await
    }
}

impl Drop for Driven {
    /// The caller has gone, and its answer has to be handled.
    fn drop(&mut self) {
        if let Some(ride) = &self.0 {
            ride.make_task();
        }
    }
}

enum State {
    /// The caller polls it next, and is woken when it can go on, or is a task.
    Driven(Flying, Waker),
    /// The caller polls it now.
    Polled { becomes_task: bool },
    /// It has ended, or is a task.
    Left,
}

impl Ride {
    pub(crate) fn new(flight: impl Future<Output = ()> + Send + 'static, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Driven(Box::pin(flight), Waker::noop().clone())), runtime })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the flight to be polled, if it is no task and has not ended.
    fn board(&self) -> Option<Flying> {
        let mut state = self.state();
        let next = match &*state {
            State::Driven(..) => State::Polled { becomes_task: false },
            State::Polled { .. } | State::Left => return None,
        };
        match std::mem::replace(&mut *state, next) {
            State::Driven(flight, _) => Some(flight),
            State::Polled { .. } | State::Left => None,
        }
    }

    /// Drives the flight, in the caller's task and in the context of the limiter's runtime, to which its timers belong.
    /// Returns whether the caller's next poll drives it on. Otherwise it has ended, or is a task.
    fn drive(&self, cx: &mut Context<'_>) -> bool {
        let Some(mut flight) = self.board() else { return false };
        let mut has_ended = true; // also by a panic of an observer, which is kept from the caller as a task keeps it
        contained(|| {
            let _runtime = self.runtime.enter();
            has_ended = flight.as_mut().poll(cx) == Poll::Ready(());
        });
        let mut state = self.state();
        let is_driven = !has_ended && matches!(*state, State::Polled { becomes_task: false });
        if is_driven {
            *state = State::Driven(flight, cx.waker().clone());
            return true;
        }
        *state = State::Left;
        drop(state);
        if !has_ended {
            self.runtime.spawn(flight);
        }
        false
    }

    /// Makes the flight a task, unless it is one or has ended.
    pub(crate) fn make_task(&self) {
        let mut state = self.state();
        match &mut *state {
            State::Polled { becomes_task } => *becomes_task = true,
            State::Driven(..) => {
                if let State::Driven(flight, caller) = std::mem::replace(&mut *state, State::Left) {
                    drop(state);
                    self.runtime.spawn(flight); // if the runtime has ended, the flight ends here
                    // From now on it waits for the answer. Its waker may be the application's code, and may panic.
                    contained(|| caller.wake());
                }
            }
            State::Left => {}
        }
    }
}
