//! The task that reads the operators' settings from the store.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use super::error::FleetError;
#[cfg(feature = "status")]
use super::reports::ReportedFleet;
use super::state::{FleetShared, KnownFleet, aside};
#[cfg(feature = "status")]
use super::tables::NamedTable;
use crate::base::sync::lock;
use crate::error::WithSources;
use crate::event::FleetEvent;
use crate::limiter::{TextRead, VersionedText};

/// The time between two readings.
const READ_EVERY: Duration = Duration::from_secs(1);

/// Reads the settings once per second, until the fleet is dropped.
pub(super) async fn follow(shared: Weak<FleetShared>) {
    let mut ticks = interval(READ_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        let _ = shared.read().await; // the state says so
        #[cfg(feature = "status")]
        shared.write_report().await;
        let ended = lock(&shared.state).ends.is_some_and(|ends| ends <= shared.clock.now());
        if ended {
            let _ = aside(move || shared.apply()).await; // the next time, if it was cut off
        }
    }
}

impl FleetShared {
    /// Writes the report of this process if the report is due and the store answers.
    #[cfg(feature = "status")]
    async fn write_report(&self) {
        let (reporter, in_force, tables) = {
            let state = lock(&self.state);
            let reporter = state.reporter.clone().filter(|reporter| state.error.is_none() && reporter.is_due());
            let Some(reporter) = reporter else { return };
            (reporter, state.in_force(), state.tables.clone())
        };
        let fleet = ReportedFleet { in_force, rules: names_of_rules(&tables) };
        let _ = self.call(reporter.write(&*self.text, fleet)).await; // the former one ends by itself
    }

    /// Reads the text from the store, and puts it in force if it has changed.
    pub(super) async fn read(self: &Arc<Self>) -> Result<(), FleetError> {
        let read = self.read_text().await;
        let now = self.clock.now();
        {
            let mut state = lock(&self.state);
            let error = read.as_ref().err().map(|error| Arc::from(WithSources(error).to_string()));
            let had_error = state.error.is_some();
            if error.is_none() {
                state.read_at = Some(now);
            }
            state.error.clone_from(&error);
            let event = match error {
                Some(_) if !had_error => state.unreadable(),
                None if had_error => Some(FleetEvent::readable(state.in_force.document.revision)),
                _ => None,
            };
            event.into_iter().for_each(|event| state.add_report(event));
        }
        self.report();
        read
    }

    async fn read_text(self: &Arc<Self>) -> Result<(), FleetError> {
        let version = lock(&self.state).known.version;
        let TextRead::Changed(found) = self.call(self.text.load(version)).await? else {
            let written = lock(&self.state).restoring.take();
            written.into_iter().for_each(|revision| self.has_restored(revision));
            return Ok(());
        };
        let expect = found.as_ref().map(|found| found.version);
        let next = aside(move || found.as_ref().map(KnownFleet::parse).transpose()).await??;
        let known = lock(&self.state).known.clone();
        let revision = next.as_ref().map_or(0, |next| next.document.revision);
        if let Some(version) = known.version.filter(|_| next.is_none() || revision < known.document.revision) {
            // The store has lost the latest known text, or has an older one. Other processes may write the lost text
            // back at the same time, and then they report it.
            let revision = known.document.revision;
            let lost = aside(move || VersionedText::new(version, known.document.to_text())).await?;
            lock(&self.state).restoring = Some(revision);
            let is_written = self.call(self.text.swap(expect, &lost)).await?;
            lock(&self.state).restoring = None;
            if is_written {
                self.has_restored(revision);
            }
        } else if let Some(next) = next {
            self.put_in_force(next).await?;
        }
        Ok(())
    }

    /// Notes and reports that this process has written back settings that the store had lost.
    fn has_restored(&self, revision: u64) {
        {
            let mut state = lock(&self.state);
            state.restored_at = Some(self.clock.now());
            state.add_report(FleetEvent::restored(revision));
        }
        self.report();
    }
}

/// Returns the names of the tables that belong to rules of files.
#[cfg(feature = "status")]
fn names_of_rules(tables: &[NamedTable]) -> Vec<Box<str>> {
    #[cfg(feature = "rules")]
    return tables.iter().filter(|(_, table)| table.rules().is_some()).map(|(name, _)| name.clone()).collect();
    #[cfg(not(feature = "rules"))]
    {
        let _ = tables; // without files there are no such tables
        Vec::new()
    }
}
