//! A world whose time the test advances: a timer, a limiter's clock, and tasks that run only when
//! they are woken.
#![allow(dead_code, reason = "each test file uses its part")]

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use tower_ratelimit::clock::Sleep;
use tower_ratelimit::clock::{ManualClock, Timer};

#[derive(Clone, Debug, Default)]
pub(crate) struct ManualTimer(Arc<Mutex<Timed>>);

#[derive(Debug, Default)]
struct Timed {
    now_us: u64,
    sleepers: Vec<(u64, Waker)>,
}

struct Sleeper {
    timer: ManualTimer,
    at_us: u64,
}

impl Timer for ManualTimer {
    fn now(&self) -> Duration {
        Duration::from_micros(self.now_us())
    }

    fn sleep_until(&self, at: Duration) -> Sleep {
        Box::pin(Sleeper { timer: self.clone(), at_us: at.as_micros() as u64 })
    }
}

impl Future for Sleeper {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut timed = self.timer.0.lock().unwrap();
        if timed.now_us >= self.at_us {
            return Poll::Ready(());
        }
        timed.sleepers.push((self.at_us, cx.waker().clone()));
        Poll::Pending
    }
}

impl ManualTimer {
    pub(crate) fn now_us(&self) -> u64 {
        self.0.lock().unwrap().now_us
    }

    /// Returns the next instant at which a task is woken.
    fn next_us(&self) -> Option<u64> {
        self.0.lock().unwrap().sleepers.iter().map(|(at, _)| *at).min()
    }

    fn set(&self, now_us: u64) {
        let due: Vec<Waker> = {
            let mut timed = self.0.lock().unwrap();
            timed.now_us = now_us;
            let (due, later) = std::mem::take(&mut timed.sleepers).into_iter().partition(|(at, _)| *at <= now_us);
            timed.sleepers = later;
            let due: Vec<(u64, Waker)> = due;
            due.into_iter().map(|(_, waker)| waker).collect()
        };
        due.into_iter().for_each(Waker::wake);
    }
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Task<T> {
    future: Option<Pin<Box<dyn Future<Output = T>>>>,
    woken: Arc<Flag>,
    stuck: bool,
}

/// The tasks, the timer that wakes them, and a limiter's clock of the same time.
pub(crate) struct World<T> {
    pub(crate) timer: ManualTimer,
    pub(crate) clock: ManualClock,
    tasks: Vec<Task<T>>,
    pub(crate) done: Vec<Option<T>>,
}

impl<T> World<T> {
    pub(crate) fn new() -> Self {
        Self { timer: ManualTimer::default(), clock: ManualClock::new(), tasks: Vec::new(), done: Vec::new() }
    }

    /// Starts a task, and returns its number.
    pub(crate) fn spawn(&mut self, future: impl Future<Output = T> + 'static) -> usize {
        let woken = Arc::new(Flag(AtomicBool::new(true)));
        self.tasks.push(Task { future: Some(Box::pin(future)), woken, stuck: false });
        self.done.push(None);
        self.run();
        self.tasks.len() - 1
    }

    /// Drops a task's future.
    pub(crate) fn cancel(&mut self, task: usize) {
        self.tasks[task].future = None;
        self.run();
    }

    /// The task is not polled any more, even if it is woken.
    pub(crate) fn stick(&mut self, task: usize) {
        self.tasks[task].stuck = true;
    }

    pub(crate) fn is_pending(&self, task: usize) -> bool {
        self.tasks[task].future.is_some()
    }

    /// Advances the time, and stops at every instant at which a task is woken.
    pub(crate) fn pass(&mut self, us: u64) {
        let to = self.timer.now_us() + us;
        loop {
            let next = self.timer.next_us().unwrap_or(u64::MAX).clamp(self.timer.now_us(), to);
            self.clock.advance(Duration::from_micros(next - self.timer.now_us()));
            self.timer.set(next);
            self.run();
            if next == to {
                return;
            }
        }
    }

    fn run(&mut self) {
        loop {
            let woken = |task: &Task<T>| !task.stuck && task.future.is_some() && task.woken.0.load(Ordering::Relaxed);
            let Some(at) = self.tasks.iter().position(woken) else { return };
            let task = &mut self.tasks[at];
            task.woken.0.store(false, Ordering::Relaxed);
            let waker = Waker::from(Arc::clone(&task.woken));
            if let Some(future) = &mut task.future {
                if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    task.future = None;
                    self.done[at] = Some(output);
                }
            }
        }
    }
}

/// Returns the output of a future that does not wait, such as the answer of a limiter in memory.
pub(crate) fn at_once<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future waits"),
    }
}

/// A future that is dropped after this many polls, by a panic or without one.
pub(crate) struct Polled<F> {
    future: Option<Pin<Box<F>>>,
    polls: u32,
    panics: bool,
}

impl<F> Polled<F> {
    pub(crate) fn new(future: F, polls: u32, panics: bool) -> Self {
        Self { future: Some(Box::pin(future)), polls, panics }
    }
}

impl<F: Future> Future for Polled<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(left) = self.polls.checked_sub(1) else {
            let (future, panics) = (self.future.take(), self.panics);
            let ended = catch_unwind(AssertUnwindSafe(move || {
                let _future = future;
                assert!(!panics, "a handler panics while it waits");
            }));
            assert_eq!(ended.is_err(), panics);
            return Poll::Ready(None);
        };
        self.polls = left;
        cx.waker().wake_by_ref();
        match &mut self.future {
            Some(future) => future.as_mut().poll(cx).map(Some),
            None => Poll::Ready(None),
        }
    }
}

/// A timer whose time passes when a task waits.
#[derive(Clone, Debug, Default)]
pub(crate) struct Skipping(Arc<Mutex<Duration>>);

impl Timer for Skipping {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn sleep_until(&self, at: Duration) -> Sleep {
        *self.0.lock().unwrap() = at;
        Box::pin(std::future::ready(()))
    }
}
