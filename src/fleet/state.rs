//! The state of a fleet in this process, and the calls to the store.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::document::FleetDocument;
use super::error::{FleetError, FleetErrorKind};
use super::in_force::FleetInForce;
#[cfg(feature = "status")]
use super::reports::Reporter;
use super::tables::NamedTable;
use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::Timestamp;
use crate::clock::Clock;
use crate::error::BoxError;
use crate::event::FleetEvent;
use crate::limiter::{SharedText, VersionedText};
use crate::outcome::Observer;
use crate::rules_in_force::hash;

/// The longest time of a call to the store. No request waits for such a call.
pub(super) const CALL: Duration = Duration::from_secs(2);

/// The pause after a failed call.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// The store of a fleet, and what this process knows of the fleet. All clones of a [`Fleet`](super::Fleet) share it.
pub(super) struct FleetShared {
    pub(super) text: Arc<dyn SharedText>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) state: Mutex<FleetState>,
}

impl FleetShared {
    /// Calls the store, and waits for its answer for at most [`CALL`].
    pub(super) async fn call<T>(&self, call: impl Future<Output = Result<T, BoxError>>) -> Result<T, FleetError> {
        match timeout(CALL, call).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(FleetError::of_store(error)),
            Err(_) => {
                Err(FleetError::new(FleetErrorKind::Unavailable, format!("the store did not answer in {CALL:?}")))
            }
        }
    }

    /// Makes the reports that are due, in their order, until none is left. If another thread makes reports, it makes
    /// these as well. The lock is not held while observers are called, because they may use the fleet.
    pub(super) fn report(&self) {
        let mut state = lock(&self.state);
        if state.is_reporting {
            return;
        }
        while let Some(FleetReport { event, observers, is_logged }) = state.reports.pop_front() {
            state.is_reporting = true;
            drop(state);
            if is_logged {
                contained(|| event.log());
            }
            observers.iter().for_each(|observer| contained(|| observer.on_fleet_event(&event)));
            state = lock(&self.state);
        }
        state.is_reporting = false;
    }
}

/// The documents and tables of a fleet in this process.
#[derive(Default)]
pub(super) struct FleetState {
    /// The latest document that this process has read or written.
    pub(super) known: KnownFleet,
    /// The document that all tables follow.
    pub(super) in_force: KnownFleet,
    /// Since when that document is in force.
    pub(super) in_force_since: Timestamp,
    pub(super) applying: Applying,
    /// The next instant at which an entry that is in force ends.
    pub(super) ends: Option<Timestamp>,
    /// When the store last answered.
    pub(super) read_at: Option<Timestamp>,
    /// When this process last wrote back settings that the store had lost.
    pub(super) restored_at: Option<Timestamp>,
    /// The revision that this process wrote back without an answer. If the next reading finds it in the store, it was
    /// written.
    pub(super) restoring: Option<u64>,
    pub(super) error: Option<Arc<str>>,
    pub(super) tables: Vec<NamedTable>,
    pub(super) observers: Vec<Arc<dyn Observer>>,
    /// The reports that are due. They are added together with the changes that they report, so they are in the order
    /// of the changes.
    reports: VecDeque<FleetReport>,
    /// Whether a thread makes reports now.
    is_reporting: bool,
    /// Whether the settings are in a file, which no other process uses.
    #[cfg(feature = "status")]
    pub(super) is_in_file: bool,
    #[cfg(feature = "status")]
    pub(super) reporter: Option<Arc<Reporter>>,
}

impl FleetState {
    pub(super) fn in_force(&self) -> FleetInForce {
        let KnownFleet { document, hash, .. } = &self.in_force;
        FleetInForce {
            revision: document.revision,
            hash: *hash,
            since: self.in_force_since,
            read_at: self.read_at,
            restored_at: self.restored_at,
            error: self.error.clone(),
        }
    }

    /// Returns the event of the revision in force.
    pub(super) fn in_force_event(&self) -> FleetEvent {
        FleetEvent::in_force(self.in_force.document.revision, self.in_force.hash, self.in_force_since)
    }

    /// Returns the event of the last reading, if that reading failed.
    pub(super) fn unreadable(&self) -> Option<FleetEvent> {
        let error = self.error.as_deref()?;
        Some(FleetEvent::unreadable(self.read_at.map(|_| self.in_force.document.revision), error))
    }

    /// Adds a report of an event to all observers. The caller has to make the reports once it does not hold the lock.
    pub(super) fn add_report(&mut self, event: FleetEvent) {
        self.reports.push_back(FleetReport { event, observers: self.observers.clone(), is_logged: true });
    }

    /// Adds an observer, and the reports of the present state to it.
    pub(super) fn add_observer(&mut self, observer: Arc<dyn Observer>) {
        for event in [Some(self.in_force_event()), self.unreadable()].into_iter().flatten() {
            self.reports.push_back(FleetReport { event, observers: vec![Arc::clone(&observer)], is_logged: false });
        }
        self.observers.push(observer);
    }

    /// Returns whether all observers have got all events.
    pub(super) fn has_reported(&self) -> bool {
        self.reports.is_empty() && !self.is_reporting
    }
}

/// The state of the update that makes the tables follow the latest document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Applying {
    #[default]
    No,
    Once,
    /// A thread updates the tables, and has to begin again with the latest document.
    Again,
}

/// A document, and the version and the hash of its text.
#[derive(Clone)]
pub(super) struct KnownFleet {
    pub(super) document: Arc<FleetDocument>,
    pub(super) version: Option<u128>,
    pub(super) hash: u64,
}

impl Default for KnownFleet {
    fn default() -> Self {
        Self { document: Arc::default(), version: None, hash: hash(b"") }
    }
}

impl KnownFleet {
    pub(super) fn new(document: FleetDocument, text: &VersionedText) -> Self {
        Self { document: Arc::new(document), version: Some(text.version), hash: hash(text.text.as_bytes()) }
    }

    pub(super) fn parse(text: &VersionedText) -> Result<Self, FleetError> {
        let document = FleetDocument::parse(&text.text).ok_or_else(|| {
            let message = "this version cannot read the text in the store: the last known settings stay in force";
            FleetError::new(FleetErrorKind::Foreign, message)
        })?;
        Ok(Self::new(document, text))
    }
}

/// Runs a function on one of the runtime's threads for blocking work, because the function takes milliseconds or
/// calls the application. On a worker thread, a text of 900 kB would delay other tasks.
pub(super) async fn aside<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Result<T, FleetError> {
    tokio::task::spawn_blocking(run).await.map_err(|error| {
        FleetError::new(
            FleetErrorKind::Unavailable,
            "the call was cut off, and may have taken effect: look at the settings before you make a change again",
        )
        .caused_by(error)
    })
}

/// An event, and the observers that have to get it.
struct FleetReport {
    event: FleetEvent,
    observers: Vec<Arc<dyn Observer>>,
    is_logged: bool,
}
