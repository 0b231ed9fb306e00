//! Bounds how many requests wait or are in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::unanswered::Unanswered;

/// The requests that wait or are in flight, of which there is a most.
pub(crate) struct Permits {
    taken: Arc<AtomicUsize>,
    most: usize,
}

/// Permits a request to wait or be in flight.
pub(crate) struct Permit(Arc<AtomicUsize>);

impl Permits {
    pub(crate) fn new(most: usize) -> Self {
        Self { taken: Arc::default(), most }
    }

    /// Returns how many requests wait or are in flight.
    pub(crate) fn taken(&self) -> usize {
        self.taken.load(Ordering::Relaxed)
    }

    /// Permits a check.
    pub(crate) fn check(&self) -> Result<Permit, Unanswered> {
        self.permit(self.most)
    }

    /// Permits a refund or a settlement. They have room of their own: the units of a lost refund would be missing until
    /// they have drained.
    pub(crate) fn correction(&self) -> Result<Permit, Unanswered> {
        self.permit(self.most.saturating_mul(2))
    }

    fn permit(&self, most: usize) -> Result<Permit, Unanswered> {
        if self.taken.fetch_add(1, Ordering::Relaxed) >= most {
            self.taken.fetch_sub(1, Ordering::Relaxed);
            return Err(Unanswered::TooMany(most));
        }
        Ok(Permit(Arc::clone(&self.taken)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
