//! A sleep until an instant that may change during the sleep.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use super::timer::{Sleep, Timer};
use crate::base::time::micros_floor;

/// Returns the time of a timer in microseconds. Returns `None` if the timer cannot sleep and reports
/// `Duration::MAX`, as `TokioTimer` does outside of a runtime. Lines then take 0 as the time, so that no departure
/// of another request counts as reached.
pub(crate) fn time_of(timer: &dyn Timer) -> Option<u64> {
    Some(micros_floor(timer.now())).filter(|now_us| *now_us < u64::MAX)
}

/// Wakes a task at an instant that may change. A timer is set only if the instant changes.
#[derive(Default)]
pub(crate) struct Alarm(Option<(u64, Sleep)>);

impl Alarm {
    /// Is ready at the instant `until_us`, with the time then. The returned time is `until_us` or later
    /// even if the timer's clock is wrong, so that no task polls forever.
    pub(crate) fn poll(&mut self, timer: &dyn Timer, until_us: u64, cx: &mut Context<'_>) -> Poll<u64> {
        let sleep = match &mut self.0 {
            Some((set_us, sleep)) if *set_us == until_us => sleep,
            slot => &mut slot.insert((until_us, timer.sleep_until(Duration::from_micros(until_us)))).1,
        };
        ready!(sleep.as_mut().poll(cx));
        self.stop();
        Poll::Ready(time_of(timer).map_or(until_us, |now_us| now_us.max(until_us)))
    }

    /// Cancels the alarm, so that it no longer wakes the task.
    pub(crate) fn stop(&mut self) {
        self.0 = None;
    }
}
