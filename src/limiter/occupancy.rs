//! The occupancy of a limiter.

/// How full a limiter is that keeps its states in this process; see [`Limiter::occupancy`](crate::limiter::Limiter::occupancy).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    pub(crate) keys: usize,
    pub(crate) capacity: usize,
}

impl Occupancy {
    /// Makes the occupancy of a limiter of your own, which has `keys` states and room for `capacity` of them.
    #[must_use]
    pub fn new(keys: usize, capacity: usize) -> Self {
        Self { keys, capacity }
    }

    /// Returns the number of states that live now: one for each policy and key.
    #[must_use]
    pub fn keys(self) -> usize {
        self.keys
    }

    /// Returns the number of states that the limiter has room for.
    #[must_use]
    pub fn capacity(self) -> usize {
        self.capacity
    }
}
