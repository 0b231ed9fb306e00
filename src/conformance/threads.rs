//! Runs tasks concurrently, on threads.

use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use super::subject::Subject;

/// The state that concurrent tasks share. Each task holds an `Arc` of this state until the task ends,
/// even if the task panics or is dropped.
struct Crowd<T> {
    begun: AtomicUsize,
    outputs: Mutex<Vec<T>>,
}

impl<T> Crowd<T> {
    fn outputs(&self) -> MutexGuard<'_, Vec<T>> {
        self.outputs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `count` tasks concurrently with the subject's `spawn`, and returns their results.
pub(super) async fn together<S, T, F>(subject: &S, count: usize, task: impl Fn(usize) -> F) -> Result<Vec<T>, String>
where
    S: Subject,
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let crowd = Arc::new(Crowd { begun: AtomicUsize::new(0), outputs: Mutex::new(Vec::new()) });
    let tasks: Vec<_> = (0..count).map(|number| (task(number), Arc::clone(&crowd))).collect();
    for (work, crowd) in tasks {
        subject.spawn(Box::pin(async move {
            crowd.begun.fetch_add(1, Ordering::AcqRel);
            // The subject may have dropped a task before the task began.
            until(|| crowd.begun.load(Ordering::Acquire) >= Arc::strong_count(&crowd) - 1).await;
            let output = work.await;
            crowd.outputs().push(output);
        }));
    }
    until(|| Arc::strong_count(&crowd) == 1).await;
    let outputs = std::mem::take(&mut *crowd.outputs());
    match count - outputs.len() {
        0 => Ok(outputs),
        lost => Err(format!("{lost} of {count} concurrent tasks panicked or were dropped")),
    }
}

/// Waits until `is_true` returns true, by polling it repeatedly.
async fn until(is_true: impl Fn() -> bool) {
    poll_fn(|context| {
        if is_true() {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::thread::yield_now(); // the other tasks may need this processor
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::subject::Task;
    use super::*;
    use crate::limiter::memory::limiter::MemoryLimiter;

    /// Drops every second task.
    struct Careless(AtomicUsize);

    impl Subject for Careless {
        type Limiter = MemoryLimiter;

        async fn limiter(&self) -> MemoryLimiter {
            MemoryLimiter::new()
        }

        async fn advance(&self, _: Duration) {}

        fn spawn(&self, task: Task) {
            if self.0.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
                tokio::spawn(task);
            }
        }
    }

    #[tokio::test]
    async fn tasks_that_are_dropped_are_reported_and_not_awaited() {
        let outputs = together(&Careless(AtomicUsize::new(0)), 4, |number| async move { number }).await;
        assert_eq!(outputs.unwrap_err(), "2 of 4 concurrent tasks panicked or were dropped");
    }
}
