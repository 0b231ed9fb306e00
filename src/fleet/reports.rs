//! The reports of processes, with which the status page of each process shows all processes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::base::random;
use crate::base::sync::{Mutex, lock};
use crate::error::BoxError;
use crate::limiter::{REPORT_MAX, REPORTS_MAX, SharedText, VersionedText};

/// A process writes one report for this many readings of the settings. It reads the settings once per second.
const READINGS: u64 = 5;

/// How long a report is kept.
const LASTS: Duration = Duration::from_secs(20);

/// The maximum number of places in the store that one write tries for its report.
const TRIES: usize = 8;

/// Makes a report. The arguments are the revision and the hash of the operators' settings in force.
type MakeReport = dyn Fn(u64, u64) -> String + Send + Sync;

/// Writes this process's reports to the store.
pub(super) struct Reporter {
    make: Arc<MakeReport>,
    process: u128,
    state: Mutex<ReporterState>,
}

struct ReporterState {
    readings: u64,
    /// The place of the last report.
    place: usize,
}

impl Reporter {
    pub(super) fn new(make: impl Fn(u64, u64) -> String + Send + Sync + 'static) -> Self {
        let process = (u128::from(random::secret()) << 64) | u128::from(random::secret());
        let place = (process % REPORTS_MAX as u128) as usize; // below it
        Self { make: Arc::new(make), process, state: Mutex::new(ReporterState { readings: 0, place }) }
    }

    /// Counts a reading of the settings, and returns whether a report is due after it.
    pub(super) fn is_due(&self) -> bool {
        let mut state = lock(&self.state);
        state.readings += 1;
        state.readings % READINGS == 1
    }

    /// Writes a report about this revision to a place that no other process uses. If all places that the write tries
    /// are used, the next write continues with the place after them.
    pub(super) async fn write(&self, text: &dyn SharedText, revision: u64, hash: u64) -> Result<(), BoxError> {
        let make = Arc::clone(&self.make);
        let report = tokio::task::spawn_blocking(move || make(revision, hash)).await?;
        if report.len() > REPORT_MAX {
            return Err("the report is too long".into());
        }
        let report = VersionedText::new(self.process, report);
        for _ in 0..TRIES {
            let place = lock(&self.state).place;
            if text.put_report(place, &report, LASTS).await? {
                return Ok(());
            }
            lock(&self.state).place = (place + 1) % REPORTS_MAX;
        }
        Ok(())
    }
}

/// The reports of all processes.
pub(crate) struct FleetReports {
    /// One report of each process, and whether it is the report of this process.
    pub(crate) reports: Vec<(Arc<str>, bool)>,
    /// The number of places that have a report.
    pub(crate) places: usize,
}

/// Returns the reports of all processes. `own` makes those of this process.
pub(super) async fn reports(text: &dyn SharedText, own: Option<&Reporter>) -> Result<FleetReports, BoxError> {
    let mut reports = text.reports().await?;
    let places = reports.len();
    // A process that lost an answer may have a report in two places for a while.
    let mut seen = HashSet::new();
    reports.retain(|report| report.text.is_empty() || seen.insert(report.version));
    let is_own = |report: &VersionedText| own.is_some_and(|own| own.process == report.version);
    Ok(FleetReports { reports: reports.iter().map(|of| (Arc::clone(&of.text), is_own(of))).collect(), places })
}
