//! The operators' settings that are in force in this process, for operators.

use std::sync::Arc;

use crate::base::time::Timestamp;

/// The revision of the operators' settings that is in force in this process. Two processes have the same
/// settings if their [`hash`](Self::hash) is equal.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetInForce {
    /// The number of the revision: how often any process has changed the settings.
    pub revision: u64,
    /// A 48-bit hash of the settings' text. A metric can hold 48 bits exactly.
    pub hash: u64,
    /// The calendar time at which the revision came into force in this process.
    pub since: Timestamp,
    /// When the store last answered. `None` if the store has never answered; then no setting is in
    /// force.
    pub read_at: Option<Timestamp>,
    /// When this process last wrote settings back that the store had lost, as after `FLUSHALL`. `None` if it never did.
    pub restored_at: Option<Timestamp>,
    /// Why the last reading failed, or `None` if it succeeded. After a failure the settings in
    /// force stay.
    pub error: Option<Arc<str>>,
}
