//! The occupancy of a limiter.

/// The occupancy of a limiter that keeps its states in this process; see
/// [`LimiterHooks::occupancy`](crate::limiter::LimiterHooks::occupancy).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    pub(crate) keys: usize,
    pub(crate) capacity: usize,
}

impl Occupancy {
    /// Makes the occupancy of a limiter of your own that has `keys` states, and room for `capacity` states.
    #[must_use]
    pub fn new(keys: usize, capacity: usize) -> Self {
        Self { keys, capacity }
    }

    /// Returns the number of states that are live now: one for each policy and key.
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
