//! Statistics: an observer that counts, and the forms in which its counts can be read.
//!
//! * `stats.rs` is the observer.
//! * `cells.rs`, `histogram.rs`, `rates.rs` and `sketch.rs` store counts. `policies.rs` finds the counts of a policy.
//! * `stores.rs` reads how busy stores are.
//! * `recent.rs` stores the last refusals. `holders.rs` stores the keys that hold units of concurrency limits.
//!   `names.rs` makes the fingerprint and the name of a key.
//! * `log.rs` and `span.rs` write to `tracing`, if the application chooses so.
//! * `snapshot.rs` has the snapshot that a reader gets. `series.rs` makes metrics from a snapshot, for `prometheus.rs`
//!   and `recorder.rs`.

mod cells;
mod events;
mod histogram;
mod holders;
#[cfg(feature = "tracing")]
mod log;
mod names;
mod newest;
mod policies;
mod prometheus;
mod rates;
mod recent;
#[cfg(feature = "metrics")]
mod recorder;
mod series;
mod sketch;
mod snapshot;
#[cfg(feature = "tracing")]
mod span;
mod state;
#[expect(clippy::module_inception, reason = "the file is named after its type, like the folder")]
mod stats;
mod stores;

pub use events::EventCounts;
pub use histogram::HistogramSnapshot;
#[cfg(feature = "status")]
pub(crate) use names::cut;
#[cfg(feature = "status")]
pub(crate) use newest::NEWEST;
pub use rates::RateBucket;
pub use recent::RecentRefusal;
pub use sketch::TopKey;
pub use snapshot::{PolicySnapshot, StatsSnapshot};
pub use state::PolicyState;
pub use stats::{Stats, StatsBuilder};
