//! Requests that wait: for their departure from a leaky queue, or in line for units of a concurrency limit.

mod delays;
mod in_line;
mod wait;

pub(crate) use delays::{Counted, Delays, WaitBounds};
pub(crate) use in_line::InLine;
pub(crate) use wait::Delayed;
