//! Settling charges after the service was called: by the response's head, by its end, or by a nested refusal.

mod head;
pub(crate) mod in_flight;
pub(crate) mod nested;
pub(crate) mod pending;
pub(crate) mod usage;
