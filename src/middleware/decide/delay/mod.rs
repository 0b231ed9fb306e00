//! Requests that wait for their departure from a leaky queue.

mod delays;
mod line;
mod timer;
mod wait;

pub(crate) use delays::{Delays, MOST_WAITING};
#[cfg(feature = "tokio")]
pub use timer::TokioTimer;
pub use timer::{Sleep, Timer};
pub(crate) use wait::Delayed;
