//! Rules: what a layer is configured with. Data and builders; `charge`, `decide` and `settle` act
//! on it.

mod bound;
pub(crate) mod definition;
mod link;
mod overrides;
mod settle_by;
mod settlement;
mod switch;

pub(crate) use bound::BoundRule;
pub use definition::IntoRule;
pub(crate) use definition::{LinkedRole, MissingKey, Read, Rule};
pub use overrides::PlanOverrides;
pub use settlement::OnAborted;
pub(crate) use settlement::Settlement;
pub(crate) use switch::Follow;
pub use switch::{QuotaSwitch, QuotaSwitchError, QuotaSwitchErrorKind};
