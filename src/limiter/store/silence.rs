//! Detects that the store has fallen silent: calls wait, and the store answers none of them.
//!
//! A late answer counts as an answer. So a slow store is not believed dead, however many calls miss their deadline.

use std::time::Duration;

use tokio::time::Instant;

use crate::base::sync::{Mutex, lock};

/// The store may be dead if this number of calls missed their deadlines since the last answer.
const CALLS: u32 = 5;

/// The store counts as silent after [`DEADLINES`] times the deadline or [`LONGEST_CALLS`] times the longest recent
/// call, whichever is longer. A busy machine may stop a server for a tenth of a second.
const DEADLINES: u32 = 5;
const LONGEST_CALLS: u32 = 2;

/// The store counts as silent after this time at the latest, or after the deadline if that is longer.
const LONGEST: Duration = Duration::from_secs(5);

pub(super) struct Silence {
    deadline: Duration,
    state: Mutex<SilenceState>,
}

#[derive(Default)]
struct SilenceState {
    /// When the store last answered.
    heard: Option<Instant>,
    /// The duration of the longest recent call. The duration shrinks with each answer to a shorter
    /// call.
    longest: Duration,
    /// The number of calls that were sent after the last answer and missed their deadline, and the instant at which the
    /// first of them was sent.
    missed: u32,
    since: Option<Instant>,
}

/// When a call was sent.
#[derive(Clone, Copy)]
pub(super) struct Mark(Instant);

impl Mark {
    pub(super) fn now() -> Self {
        Self(Instant::now())
    }

    /// Returns the time since the call was sent.
    pub(super) fn took(self) -> Duration {
        self.0.elapsed()
    }
}

impl Silence {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, state: Mutex::default() }
    }

    /// Records an answer to a call that was sent at this instant.
    pub(super) fn end(&self, sent: Mark) {
        let took = sent.took();
        let mut state = lock(&self.state);
        let longest = took.max(state.longest - state.longest / 8);
        *state = SilenceState { heard: Some(Instant::now()), longest, missed: 0, since: None };
    }

    /// Returns the duration of the longest recent call if it took longer than the deadline.
    pub(super) fn longest_late(&self) -> Option<Duration> {
        Some(lock(&self.state).longest).filter(|longest| *longest > self.deadline)
    }

    /// Returns the time since the first unanswered call was sent.
    pub(super) fn lasts(&self) -> Duration {
        lock(&self.state).since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Records that a call that was sent at this instant has missed its deadline. Returns whether the store is silent.
    pub(super) fn is_missed(&self, sent: Mark) -> bool {
        let mut state = lock(&self.state);
        if state.heard.is_some_and(|heard| heard > sent.0) {
            return false;
        }
        state.missed = state.missed.saturating_add(1);
        let since = state.since.map_or(sent.0, |since| since.min(sent.0));
        state.since = Some(since);
        let usual = (self.deadline.saturating_mul(DEADLINES)).max(state.longest.saturating_mul(LONGEST_CALLS));
        state.missed >= CALLS && since.elapsed() >= usual.min(LONGEST.max(self.deadline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(50);

    async fn pass(milliseconds: u64) {
        tokio::time::advance(Duration::from_millis(milliseconds)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn silence_takes_five_calls_and_five_deadlines() {
        let silence = Silence::new(DEADLINE);
        let sent = Mark::now();
        pass(240).await;
        assert!((0..20).all(|_| !silence.is_missed(sent)), "many calls within a short time are no silence");
        pass(20).await;
        assert!(silence.is_missed(sent));
        let silence = Silence::new(DEADLINE);
        for missed in 1..=5 {
            let sent = Mark::now();
            pass(51).await;
            assert_eq!(silence.is_missed(sent), missed == 5);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn late_answer_ends_the_silence() {
        let silence = Silence::new(DEADLINE);
        for _ in 0..100 {
            let sent = Mark::now();
            pass(60).await;
            assert!(!silence.is_missed(sent));
            silence.end(sent);
            assert!(!silence.is_missed(sent), "the store was heard since");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn store_that_was_slow_is_waited_for_longer() {
        let silence = Silence::new(DEADLINE);
        let slow = Mark::now();
        pass(500).await;
        silence.end(slow);
        let sent = Mark::now();
        pass(990).await;
        assert!((0..20).all(|_| !silence.is_missed(sent)));
        pass(20).await;
        assert!(silence.is_missed(sent));
        // Quick answers let that fade.
        (0..40).for_each(|_| silence.end(Mark::now()));
        let sent = Mark::now();
        pass(260).await;
        (0..5).for_each(|missed| assert_eq!(silence.is_missed(sent), missed == 4));
    }
}
