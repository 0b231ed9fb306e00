//! Bounds how many requests wait or are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::unanswered::Unanswered;

/// There is room for at least this number of corrections, because a process renews up to this number of rows at a
/// time.
const CORRECTIONS_MIN: usize = 64;

/// Bounds the number of requests that wait or are in flight.
pub(crate) struct Permits {
    checks: Arc<AtomicUsize>,
    corrections: Arc<AtomicUsize>,
    most: usize,
}

/// Permits a request to wait or be in flight.
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Permits {
    pub(crate) fn new(most: usize) -> Self {
        Self { checks: Arc::default(), corrections: Arc::default(), most }
    }

    /// Returns how many requests wait or are in flight.
    pub(crate) fn taken(&self) -> usize {
        self.checks.load(Ordering::Relaxed) + self.corrections.load(Ordering::Relaxed)
    }

    /// Permits a check.
    pub(crate) fn check(&self) -> Result<Permit, Unanswered> {
        Permit::of(&self.checks, self.most)
    }

    /// Permits a refund or a settlement. Corrections have room of their own, because the units of a lost refund would
    /// come back only with time, and no check should fail because of refunds.
    pub(crate) fn correction(&self) -> Result<Permit, Unanswered> {
        Permit::of(&self.corrections, self.most.max(CORRECTIONS_MIN))
    }
}

impl Permit {
    fn of(taken: &Arc<AtomicUsize>, most: usize) -> Result<Self, Unanswered> {
        if taken.fetch_add(1, Ordering::Relaxed) >= most {
            taken.fetch_sub(1, Ordering::Relaxed);
            return Err(Unanswered::TooMany(most));
        }
        Ok(Self(Arc::clone(taken)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
