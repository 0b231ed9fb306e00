//! Quotas, which say how much is allowed: a limit per period, an algorithm and its options.

mod block;
pub(crate) mod builder;
mod error;
mod parse;
pub(crate) mod policy_error;
#[cfg(feature = "serde")]
mod serde;
pub(crate) mod spec;
mod split;
#[cfg(test)]
mod tests;

pub(crate) use builder::Quota;
pub use error::{QuotaError, QuotaErrorKind};
pub use policy_error::{PolicyError, PolicyErrorKind};
pub(crate) use spec::UNITS_MAX;
pub use spec::{Algorithm, Anchor, Oldest};
