//! Outcomes and explanations of requests, events of limiters, warnings about the setup, and statistics.
//!
//! The guide has a page on [observing](crate::guide::observing).

pub use crate::event::{FleetEvent, LayerEvent, LimiterEvent, RulesEvent};
pub use crate::explanation::{Explanation, NotCharged, RuleExplanation};
pub use crate::outcome::{Observed, Observer, Outcome, OutcomeKind, PolicyStatus};
pub use crate::rules_in_force::{RulesInForce, RulesReader};
pub use crate::setup_warning::{SetupWarning, SetupWarningKind};
#[cfg(feature = "stats")]
pub use crate::stats::{
    EventCounts, HistogramSnapshot, PolicySnapshot, PolicyState, RateBucket, RecentRefusal, Stats, StatsBuilder,
    StatsSnapshot, TopKey,
};
#[cfg(feature = "status")]
pub use crate::status::{ActionKind, OperatorAction, StatusBody, StatusPage};
