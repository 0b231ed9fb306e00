//! The limiter that the suite checks, with control of its time and its tasks.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::limiter::Limiter;

/// A task of the suite, which [`Subject::spawn`](Subject::spawn) runs.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A limiter to check, and control of its time.
#[expect(async_fn_in_trait, reason = "the suite awaits these futures in the caller's task, so they need no Send")]
pub trait Subject {
    /// The limiter.
    type Limiter: Limiter + Clone;

    /// Returns a limiter without states: a new one, or one with a new prefix.
    async fn limiter(&self) -> Self::Limiter;

    /// Lets time pass for all limiters of this subject: moves their clock, or waits.
    async fn advance(&self, by: Duration);

    /// Runs a task of the suite concurrently with its other tasks, by default on a separate thread.
    ///
    /// Override this if the limiter's futures need a runtime, for example with `tokio::spawn(task)`.
    /// With your own `spawn`, call the suite in a runtime with several threads, because tasks that take
    /// turns on one thread hide races.
    fn spawn(&self, task: Task) {
        spawn(task);
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a task to completion on a thread of its own.
fn spawn(mut task: Task) {
    thread::spawn(move || {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        while task.as_mut().poll(&mut context).is_pending() {
            thread::park();
        }
    });
}
