//! Tasks that run concurrently, on threads.

use std::future::{Future, poll_fn};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use super::subject::Subject;

/// The shared state of tasks that run together.
struct Crowd<T> {
    count: usize,
    /// The number of tasks that have begun, or ended before they began.
    begun: AtomicUsize,
    ended: Mutex<Ended<T>>,
}

struct Ended<T> {
    outputs: Vec<T>,
    count: usize,
    waker: Option<Waker>,
}

impl<T> Crowd<T> {
    fn ended(&self) -> MutexGuard<'_, Ended<T>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every task has begun.
    async fn begin(&self) {
        poll_fn(|context| {
            if self.begun.load(Ordering::Acquire) >= self.count {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}

/// A task's place in its crowd. Dropping it ends the task, also if the task panics or is dropped.
struct Place<T> {
    crowd: Arc<Crowd<T>>,
    has_begun: bool,
}

impl<T> Place<T> {
    fn take(&mut self) {
        self.has_begun = true;
        self.crowd.begun.fetch_add(1, Ordering::AcqRel);
    }
}

impl<T> Drop for Place<T> {
    fn drop(&mut self) {
        if !self.has_begun {
            self.take();
        }
        let waker = {
            let mut ended = self.crowd.ended();
            ended.count += 1;
            ended.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Runs `count` tasks concurrently with the subject's `spawn`, and returns their results.
pub(super) async fn together<S, T, F>(subject: &S, count: usize, task: impl Fn(usize) -> F) -> Result<Vec<T>, String>
where
    S: Subject,
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let ended = Mutex::new(Ended { outputs: Vec::new(), count: 0, waker: None });
    let crowd = Arc::new(Crowd { count, begun: AtomicUsize::new(0), ended });
    for number in 0..count {
        let (work, mut place) = (task(number), Place { crowd: Arc::clone(&crowd), has_begun: false });
        subject.spawn(Box::pin(async move {
            place.take();
            place.crowd.begin().await;
            let output = work.await;
            place.crowd.ended().outputs.push(output);
        }));
    }
    poll_fn(|context| {
        let mut ended = crowd.ended();
        if ended.count >= count {
            return Poll::Ready(());
        }
        ended.waker = Some(context.waker().clone());
        Poll::Pending
    })
    .await;
    let outputs = std::mem::take(&mut crowd.ended().outputs);
    if outputs.len() == count {
        Ok(outputs)
    } else {
        Err(format!("{} of {count} concurrent tasks panicked or were dropped", count - outputs.len()))
    }
}
