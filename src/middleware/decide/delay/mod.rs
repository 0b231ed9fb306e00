//! Requests that wait for their departure from a leaky queue.

mod delays;
mod line;
mod wait;

pub(crate) use delays::{Counted, Delays, MOST_WAITING};
pub(crate) use wait::Delayed;
