//! Rules in a file.
//!
//! * `document` reads bytes as a tree of values with positions.
//! * `read` reads the tree as rules.
//! * `spec` is what the file says, as plain data.
//! * `error` collects the problems of a file, and `problem` is one of them. `report` has the other findings of a check.
//! * `pattern` compares texts with patterns.
//! * `times` says at which times of the week a rule applies.
//! * `warn` finds probable mistakes in valid rules, and `contained` finds rules that never refuse a request.
//! * `tree` finds the limits of descriptors, in files of Envoy's form.
//! * `bind` makes a layer's rules of it, with the names that the program registered.
//! * `descriptors` decides about descriptors without an HTTP request.
//! * `convert` rewrites a file in Envoy's form, and `compare` says what another file would change.
//! * `store` has the rules in force, and `watch` looks for new ones.

mod bind;
mod compare;
mod contained;
mod convert;
mod descriptors;
mod document;
mod error;
mod handle;
mod names;
mod pattern;
pub(crate) mod problem;
pub(crate) mod read;
mod report;
#[cfg(all(test, ratelimit_shuttle, feature = "axum"))]
mod shuttle_tests;
pub(crate) mod spec;
mod store;
#[cfg(all(test, not(ratelimit_loom)))]
mod tests;
mod times;
mod tree;
mod warn;
mod watch;

pub use compare::{RuleChange, RuleChangeKind, compare};
pub use convert::convert_envoy;
pub use descriptors::{DescriptorAnswer, DescriptorLimits, DescriptorRequest, DescriptorStatus};
pub use error::RulesError;
pub use handle::{Rules, RulesBuilder};
pub use problem::{Problem, RulesErrorKind};
pub use report::{NameKind, RulesReport, RulesWarning, RulesWarningKind, UnregisteredName};
pub use tree::Descriptor;

/// The JSON Schema of files of rules, for editors and other tools.
///
/// It checks all that can be checked without reading quotas and names. [`RulesBuilder::check`] says everything.
pub const SCHEMA: &str = include_str!("schema.json");
