//! What happened: outcomes of requests, events of limiters, and warnings about the setup.

pub use crate::outcome::{LimiterEvent, Observed, Observer, Outcome, OutcomeKind, PolicyStatus};
pub use crate::setup_warning::{SetupWarning, SetupWarningKind};
