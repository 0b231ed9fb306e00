//! Whether a server is believed dead.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Opens after so many failures in a row. It closes when it is told to: whoever probes the server does.
#[derive(Debug)]
pub(super) struct Breaker {
    most: u32,
    failures: AtomicU32,
    open: AtomicBool,
}

impl Breaker {
    pub(super) fn new(most: u32) -> Self {
        Self { most: most.max(1), failures: AtomicU32::new(0), open: AtomicBool::new(false) }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// The server answered, be it with an error.
    pub(super) fn answered(&self) {
        // Calls that succeed share this line: it is written only when there is something to forget.
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// The server did not answer. Whether this has opened it.
    pub(super) fn failed(&self) -> bool {
        if self.is_open() {
            return false;
        }
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        failures >= self.most && !self.open.swap(true, Ordering::Relaxed)
    }

    /// Whether it was open.
    pub(super) fn close(&self) -> bool {
        self.failures.store(0, Ordering::Relaxed);
        self.open.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_failures_in_a_row_open_it_and_only_the_last_says_so() {
        let breaker = Breaker::new(3);
        assert!(!breaker.failed() && !breaker.failed() && !breaker.is_open());
        assert!(breaker.failed() && breaker.is_open());
        assert!(!breaker.failed() && breaker.is_open());
    }

    #[test]
    fn an_answer_in_between_begins_the_count_anew() {
        let breaker = Breaker::new(2);
        for _ in 0..10 {
            assert!(!breaker.failed());
            breaker.answered();
        }
        assert!(!breaker.is_open());
    }

    #[test]
    fn closed_it_takes_as_many_failures_again() {
        let breaker = Breaker::new(2);
        assert!(!breaker.close());
        assert!(!breaker.failed() && breaker.failed());
        breaker.answered();
        assert!(breaker.is_open(), "an answer that was under way does not close it");
        assert!(breaker.close() && !breaker.is_open());
        assert!(!breaker.failed() && breaker.failed());
    }
}
