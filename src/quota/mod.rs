//! Quotas, which say how much is allowed: a limit per period, an algorithm and its options.

// First, because rustdoc shows the methods of `Quota` in this order.
pub(crate) mod builder;

mod block;
mod calendar;
pub(crate) mod error;
mod parse;
#[cfg(feature = "serde")]
mod serde;
pub(crate) mod spec;
mod split;
#[cfg(all(test, not(ratelimit_loom)))]
mod tests;

pub use crate::base::calendar::Calendar;
pub(crate) use builder::Quota;
pub use calendar::Weekday;
pub(crate) use spec::UNITS_MAX;
pub use spec::{Algorithm, Anchor, Oldest};
