//! Rules, with which a layer is configured: data and builders. `charge`, `decide` and `settle` act
//! on the rules.

mod bound;
pub(crate) mod definition;
mod link;
mod names;
mod overrides;
mod pace;
mod paced_bodies;
#[cfg_attr(not(feature = "rules"), allow(dead_code, reason = "only files have patterns"))]
mod path;
mod policy_cache;
mod settle_by;
mod settlement;
mod switch;

pub(crate) use bound::{BoundRule, RuleMatch};
#[cfg(feature = "rules")]
pub(crate) use definition::{Condition, Words};
pub use definition::{IntoPlan, IntoQuota, IntoRule};
pub(crate) use definition::{LinkedRole, MissingKey, Read, Rule};
pub(crate) use names::TakenNames;
pub use overrides::{OverrideId, Overrides};
pub(crate) use paced_bodies::PacedBodies;
pub(crate) use path::PathIndex;
#[cfg(feature = "rules")]
pub(crate) use path::{PathPattern, Segment};
pub(crate) use policy_cache::{Cached, PolicyCache};
pub use settlement::OnAborted;
pub(crate) use settlement::Settlement;
pub(crate) use switch::Follow;
pub use switch::QuotaSwitch;
