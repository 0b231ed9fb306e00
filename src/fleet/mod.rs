//! Settings of operators for all processes at once, kept in the limiter's store.
//!
//! A [`Fleet`] returns modes, quotas, overrides and access lists, which layers accept as usual.
//! [`Fleet::change`] writes a change to the store, and each process reads it within two seconds.
//!
//! ```
//! use std::time::Duration;
//! use tower_ratelimit::fleet::{Fleet, FleetChange};
//! use tower_ratelimit::middleware::Access;
//! use tower_ratelimit::key::{self, Prefixes};
//! use tower_ratelimit::{MemoryLimiter, Mode, Quota, RateLimitLayer, Rule};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = std::env::temp_dir().join(format!("fleet-doc-{}", std::process::id()));
//! let limiter = MemoryLimiter::new();
//! // With Redis or another store: Fleet::beside(&limiter)
//! let fleet = Fleet::in_file(&file).await?;
//!
//! let client = Rule::new("client", Quota::per_minute(100))?;
//! let client = client.mode(fleet.mode("client", Mode::Shadow));
//! let layer = RateLimitLayer::new(limiter, client, key::peer_ip())
//!     .access(&fleet.access("clients"), key::peer_network(Prefixes::exact()));
//!
//! // In any process, or in a program of the operators:
//! let block = FleetChange::network("clients", "203.0.113.0/24", Access::Deny)?;
//! let hour = Duration::from_secs(3_600);
//! fleet.change("alice", "guesses passwords", [block.lasting(hour)]).await?;
//! let enforce = FleetChange::mode("client", Mode::Enforce);
//! fleet.change("alice", "the week of watching is over", [enforce]).await?;
//! # std::fs::remove_file(file)?;
//! # Ok(()) }
//! ```
//!
//! # What is kept
//!
//! The store keeps one text of at most 900 kB, with the entries, the last 100 actions, and the number of the
//! revision. A compare-and-swap replaces the text as a whole, so that no change undoes another change. Each version
//! of this crate keeps lines that it does not know, so that processes of two versions can share a fleet.
//!
//! # When the store fails
//!
//! A process that cannot read the text keeps the settings that it knows, and [says so](FleetInForce::error). The
//! store may have lost the text, or may have an older revision after a failover. A process that knows a newer
//! revision then restores the newer text, within a second after the store answers. If the store loses a change, as
//! Redis can in a failover, a process restores it. The change is lost for good only if another change is made first,
//! or if all processes that know the change end first. Each process ends entries according to its own calendar time.

mod change;
mod check_change;
mod document;
mod error;
mod file;
mod handle;
mod in_force;
mod json;
mod make_change;
mod put_in_force;
mod read;
#[cfg(feature = "status")]
mod reports;
mod state;
mod tables;
mod words;

pub use change::{FleetAction, FleetChange, FleetEntry, FleetKind, FleetRollback, FleetTarget};
pub use error::{FleetError, FleetErrorKind};
pub use handle::Fleet;
pub use in_force::FleetInForce;
#[cfg(feature = "status")]
pub use reports::FleetProcesses;
#[cfg(feature = "status")]
pub(crate) use reports::{FleetReports, ReportedFleet};
#[cfg(feature = "rules")]
pub(crate) use tables::{FleetRuleSettings, FollowFleet};
#[cfg(feature = "status")]
pub(crate) use words::{push_number, push_word, read_text, words};

#[cfg(test)]
mod tests;
