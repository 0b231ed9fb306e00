//! The reports of processes, with which the status page of each process shows all processes.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::in_force::FleetInForce;
use super::words::{push_word, read_text};
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

/// The word with which a line begins that names the rules of the process.
const RULES: &str = "rules";

/// The facts of the fleet that a report states.
pub(crate) struct ReportedFleet {
    /// The operators' settings in force.
    pub(crate) in_force: FleetInForce,
    /// The names of the rules that follow the fleet in this process.
    pub(super) rules: Vec<Box<str>>,
}

impl ReportedFleet {
    #[cfg(test)]
    pub(crate) fn of(in_force: FleetInForce, rules: &[&str]) -> Self {
        Self { in_force, rules: rules.iter().map(|name| (*name).into()).collect() }
    }

    /// Returns the lines that name the rules of the process.
    pub(crate) fn lines_of_rules(&self) -> impl Iterator<Item = String> {
        self.rules.iter().map(|name| {
            let mut line = RULES.to_owned();
            push_word(&mut line, name);
            line + "\n"
        })
    }
}

/// Makes a report.
type MakeReport = dyn Fn(&ReportedFleet) -> String + Send + Sync;

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
    pub(super) fn new(make: impl Fn(&ReportedFleet) -> String + Send + Sync + 'static) -> Self {
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

    /// Writes a report to a place that no other process uses. If all places that the write tries are used, the next
    /// write continues with the place after them.
    pub(super) async fn write(&self, text: &dyn SharedText, fleet: ReportedFleet) -> Result<(), BoxError> {
        let make = Arc::clone(&self.make);
        let report = tokio::task::spawn_blocking(move || make(&fleet)).await?;
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

/// The processes that report to the store, which are those with a [status
/// page](crate::observe::StatusPage::fleet).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetProcesses {
    /// The number of processes that reported in the last 20 seconds.
    pub count: usize,
    /// For each name of rules, the number of these processes whose rules [follow](crate::fleet) the fleet under this
    /// name.
    pub rules: BTreeMap<Arc<str>, usize>,
    /// Whether other processes may have found no place for their reports, or have reports that cannot be read.
    pub may_miss_processes: bool,
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

impl FleetReports {
    /// Counts the processes, and the names of their rules.
    pub(super) fn processes(&self) -> FleetProcesses {
        let mut rules = BTreeMap::new();
        let (unreadable, readable): (Vec<_>, Vec<_>) = self.reports.iter().partition(|(text, _)| text.is_empty());
        for (text, _) in &readable {
            let lines = text.lines().filter_map(|line| line.split_once(' '));
            let names: HashSet<Arc<str>> =
                lines.filter(|(kind, _)| *kind == RULES).filter_map(|(_, name)| read_text(name)).collect();
            names.into_iter().for_each(|name| *rules.entry(name).or_default() += 1);
        }
        let may_miss_processes = !unreadable.is_empty() || self.places >= REPORTS_MAX;
        FleetProcesses { count: readable.len(), rules, may_miss_processes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::time::Timestamp;
    use crate::limiter::{BoxFuture, TextRead};

    fn reported(names: &[&str]) -> ReportedFleet {
        let since = Timestamp::from_micros(3);
        let in_force = FleetInForce { revision: 1, hash: 2, since, read_at: None, restored_at: None, error: None };
        ReportedFleet::of(in_force, names)
    }

    /// Other processes have their reports at all places but one.
    struct OnePlace {
        free: usize,
        tried: Mutex<Vec<usize>>,
    }

    impl SharedText for OnePlace {
        fn load(&self, _: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
            unreachable!("a report is no text")
        }

        fn swap<'a>(&'a self, _: Option<u128>, _: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
            unreachable!("a report is no text")
        }

        fn put_report<'a>(
            &'a self,
            place: usize,
            report: &'a VersionedText,
            _: Duration,
        ) -> BoxFuture<'a, Result<bool, BoxError>> {
            assert!(place < REPORTS_MAX && &*report.text == "a report", "{place}: {report:?}");
            lock(&self.tried).push(place);
            Box::pin(std::future::ready(Ok(place == self.free)))
        }
    }

    #[tokio::test]
    async fn report_finds_a_place_that_no_other_process_uses() {
        for free in [0, REPORTS_MAX - 1] {
            let reporter = Reporter::new(|_| "a report".into());
            let text = OnePlace { free, tried: Mutex::default() };
            for write in 1..=REPORTS_MAX / TRIES {
                reporter.write(&text, reported(&[])).await.unwrap();
                let tried = lock(&text.tried).clone();
                assert!(tried.len() == write * TRIES || tried.last() == Some(&free), "{tried:?}");
            }
            lock(&text.tried).clear();
            reporter.write(&text, reported(&[])).await.unwrap();
            assert_eq!(*lock(&text.tried), [free], "it stays there");
        }
    }

    #[tokio::test]
    async fn report_may_have_the_most_bytes() {
        struct Any;
        impl SharedText for Any {
            fn load(&self, _: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
                unreachable!("a report is no text")
            }

            fn swap<'a>(&'a self, _: Option<u128>, _: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
                unreachable!("a report is no text")
            }
        }
        for (bytes, is_written) in [(REPORT_MAX, true), (REPORT_MAX + 1, false)] {
            let reporter = Reporter::new(move |_| "a".repeat(bytes));
            assert_eq!(reporter.write(&Any, reported(&[])).await.is_ok(), is_written, "{bytes} bytes");
        }
    }

    #[test]
    fn processes_have_identities_of_their_own() {
        let [one, other] = [(); 2].map(|()| Reporter::new(|_| String::new()).process);
        assert!(one != other && one > u128::from(u64::MAX) && other as u64 > 0, "{one} and {other}");
    }

    #[test]
    fn report_is_due_after_each_fifth_reading() {
        let reporter = Reporter::new(|_| String::new());
        let due: Vec<_> = (1..=12).filter(|_| reporter.is_due()).collect();
        assert_eq!(due, [1, 6, 11]);
    }

    /// A process that lost an answer has its report in two places.
    #[tokio::test]
    async fn process_with_two_reports_is_counted_once() {
        struct Stored(Vec<VersionedText>);
        impl SharedText for Stored {
            fn load(&self, _: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>> {
                unreachable!("a report is no text")
            }

            fn swap<'a>(&'a self, _: Option<u128>, _: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>> {
                unreachable!("a report is no text")
            }

            fn reports(&self) -> BoxFuture<'_, Result<Vec<VersionedText>, BoxError>> {
                Box::pin(std::future::ready(Ok(self.0.clone())))
            }
        }
        let own = Reporter::new(|_| String::new());
        let stored = [(own.process, "own"), (1, "other"), (own.process, "own"), (0, ""), (0, "")];
        let stored = Stored(stored.map(|(process, text)| VersionedText::new(process, text)).into());
        let found = reports(&stored, Some(&own)).await.unwrap();
        let seen: Vec<_> = found.reports.iter().map(|(text, is_own)| (&**text, *is_own)).collect();
        assert_eq!(seen, [("own", true), ("other", false), ("", false), ("", false)]);
        assert_eq!(found.places, 5);
    }

    #[test]
    fn processes_are_counted_by_the_names_of_their_rules() {
        let report = |names: &[&str]| -> (Arc<str>, bool) {
            let lines = reported(names).lines_of_rules().collect::<String>();
            (format!("process a 1 2 3 4 5 6\n{lines}").into(), false)
        };
        let reports = vec![report(&["rules", "a b%", "rules"]), report(&["rules"]), report(&[])];
        let processes =
            |reports: &[(Arc<str>, bool)], places| FleetReports { reports: reports.to_vec(), places }.processes();
        let found = processes(&reports, 3);
        let names: Vec<(&str, usize)> = found.rules.iter().map(|(name, count)| (&**name, *count)).collect();
        assert_eq!((found.count, names, found.may_miss_processes), (3, vec![("a b%", 1), ("rules", 2)], false));
        assert!(processes(&reports, REPORTS_MAX).may_miss_processes);
        let foreign = [reports, vec![("".into(), false)]].concat();
        assert!(processes(&foreign, 4).may_miss_processes);
    }
}
