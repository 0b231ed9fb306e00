//! The breaker, which says whether a server is believed dead.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A breaker that opens after `most` failures in a row, or by [`open`](Self::open). Only
/// [`close`](Self::close) closes the breaker: after the server has answered a probe, or when
/// nothing probes it any more.
#[derive(Debug)]
pub(crate) struct Breaker {
    most: u32,
    failures: AtomicU32,
    open: AtomicBool,
}

impl Breaker {
    pub(crate) fn new(most: u32) -> Self {
        Self { most: most.max(1), failures: AtomicU32::new(0), open: AtomicBool::new(false) }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Records that the server answered, perhaps with an error.
    pub(crate) fn record_answer(&self) {
        // Writes only if there are failures to forget, because all calls share this cache line.
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Records that the server did not answer. Returns whether this failure has opened the breaker.
    pub(crate) fn record_silence(&self) -> bool {
        if self.is_open() {
            return false;
        }
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        failures >= self.most && self.open()
    }

    /// Opens the breaker. Returns whether the breaker was closed.
    pub(crate) fn open(&self) -> bool {
        !self.open.swap(true, Ordering::Relaxed)
    }

    pub(crate) fn close(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.open.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breaker_opens_at_the_last_of_its_failures() {
        let breaker = Breaker::new(3);
        assert!(!breaker.record_silence() && !breaker.record_silence() && !breaker.is_open());
        assert!(breaker.record_silence() && breaker.is_open());
        assert!(!breaker.record_silence() && breaker.is_open());
    }

    #[test]
    fn answer_in_between_begins_the_count_anew() {
        let breaker = Breaker::new(2);
        for _ in 0..10 {
            assert!(!breaker.record_silence());
            breaker.record_answer();
        }
        assert!(!breaker.is_open());
    }

    #[test]
    fn closed_breaker_takes_as_many_failures_again() {
        let breaker = Breaker::new(2);
        breaker.close();
        assert!(!breaker.record_silence() && breaker.record_silence());
        breaker.record_answer();
        assert!(breaker.is_open(), "an answer that was under way does not close it");
        breaker.close();
        assert!(!breaker.is_open());
        assert!(!breaker.record_silence() && breaker.record_silence());
    }
}
