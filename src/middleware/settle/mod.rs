//! Settling charges after the service was called: at the response's head, at its end, or after a nested
//! refusal.

mod head;
pub(crate) mod in_flight;
pub(crate) mod nested;
pub(crate) mod pending;
pub(crate) mod usage;
