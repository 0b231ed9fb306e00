//! The events of a store and its servers, for the observers.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::base::sync::contained;
use crate::error::WithSources;
use crate::event::LimiterEvent;
use crate::event::StoreErrorKind;
use crate::limiter::observers::Observers;
use crate::outcome::Observer;
use crate::store_load::StoreLoadReader;

/// The time after which an error of the same kind and for the same reason is reported again.
const AGAIN: Duration = Duration::from_secs(60);

/// The time after which the next error of the same kind is looked at: it is reported if it has another reason, and
/// renewed otherwise. A new reason why a server is down is reported after this time, too.
const ANOTHER: Duration = Duration::from_secs(5);

/// The number of reasons that are remembered for each kind of error. Checks can fail for two reasons in turn.
const REASONS_MAX: usize = 4;

/// The time without a failure after which checks count as succeeding again.
const QUIET: Duration = Duration::from_secs(5);

/// Reports events to the observers, and logs changes with `tracing`.
pub(crate) struct Events {
    observers: Observers,
    /// True if checks have failed, and have not recovered since.
    is_failing: AtomicBool,
    failures: Mutex<FailureReports>,
    servers: Mutex<Servers>,
    connections: AtomicU64,
    ended_connections: AtomicU64,
    /// Set once, when the limiter is made.
    load: OnceLock<StoreLoadReader>,
}

/// The servers that are down, for observers that are added later.
///
/// Each observer gets the changes in order, so only one thread reports them at a time. A thread that makes a change
/// meanwhile leaves the report to the reporting thread. The lock is not held while observers are called: they may
/// use the limiter.
#[derive(Default)]
struct Servers {
    down: BTreeMap<String, ReportedError>,
    changes: VecDeque<ServerChange>,
    is_reporting: bool,
}

enum ServerChange {
    Down { server: String, error: String },
    Up { server: String },
    Left { server: String },
    Observer(Arc<dyn Observer>),
}

/// An error that was reported.
struct ReportedError {
    text: String,
    at: Instant,
}

/// Returns whether two texts of errors give different reasons. Words with a digit are left out: durations, counts,
/// addresses and keys.
fn has_other_reason(one: &str, other: &str) -> bool {
    let words = |text| str::split_whitespace(text).filter(|word| !word.bytes().any(|byte| byte.is_ascii_digit()));
    !words(one).eq(words(other))
}

#[derive(Default)]
struct FailureReports {
    reported: [KindReports; StoreErrorKind::ALL.len()],
    /// The instant at which a check last failed.
    last: Option<Instant>,
}

/// The reports of errors of one kind.
#[derive(Default)]
struct KindReports {
    /// The last report of each reason, the oldest reason first.
    reasons: Vec<ReportedError>,
    /// The instant at which an error was last looked at. Errors come with each check, so their texts are not compared
    /// for each.
    looked_at: Option<Instant>,
}

impl KindReports {
    /// Returns the event for an error, if one is due.
    fn due(&mut self, now: Instant, kind: StoreErrorKind, text: impl FnOnce() -> String) -> Option<LimiterEvent> {
        if self.looked_at.is_some_and(|at| now.duration_since(at) < ANOTHER) {
            return None;
        }
        self.looked_at = Some(now);
        let text = text();
        let known = self.reasons.iter().position(|known| !has_other_reason(&known.text, &text));
        if known.is_some_and(|known| now.duration_since(self.reasons[known].at) < AGAIN) {
            return Some(LimiterEvent::still_failing(kind, text));
        }
        if known.is_some() || self.reasons.len() == REASONS_MAX {
            self.reasons.remove(known.unwrap_or(0));
        }
        self.reasons.push(ReportedError { text: text.clone(), at: now });
        Some(LimiterEvent::store_failed(kind, text))
    }
}

impl Events {
    pub(crate) fn new(first: &[Arc<dyn Observer>]) -> Self {
        let observers = Observers::default();
        for observer in first {
            observers.add(observer);
        }
        Self {
            observers,
            is_failing: AtomicBool::new(false),
            failures: Mutex::default(),
            servers: Mutex::default(),
            connections: AtomicU64::new(0),
            ended_connections: AtomicU64::new(0),
            load: OnceLock::new(),
        }
    }

    /// Offers the load of the store to the present and later observers.
    pub(crate) fn offer_load(&self, load: StoreLoadReader) {
        let load = self.load.get_or_init(|| load);
        self.observers.iter().for_each(|observer| contained(|| observer.on_store(load)));
    }

    /// Records that a connection was made.
    pub(crate) fn record_connection(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Records that a connection has ended.
    pub(crate) fn record_end_of_connection(&self) {
        self.ended_connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many connections were made so far.
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Returns how many connections were made so far, plus the number of those that have ended.
    pub(crate) fn connection_changes(&self) -> u64 {
        self.connections() + self.ended_connections.load(Ordering::Relaxed)
    }

    /// Reports that a server stopped answering, or that the reason why it does not answer has changed.
    pub(crate) fn report_down(&self, server: &impl Display, error: &dyn Error) {
        self.change(ServerChange::Down { server: server.to_string(), error: WithSources(error).to_string() });
    }

    /// Reports that a server is too far for checks with this deadline.
    pub(crate) fn report_far(&self, server: &impl Display, round_trip: Duration, deadline: Duration) {
        self.report_to_all(&LimiterEvent::store_far(server.to_string(), round_trip, deadline));
    }

    /// Reports that a server does not know scripts that it had run.
    #[cfg(feature = "_redis")]
    pub(crate) fn report_scripts_forgotten(&self, server: &impl Display, reconnected: bool) {
        self.report_to_all(&LimiterEvent::scripts_forgotten(server.to_string(), reconnected));
    }

    /// Reports that sentinels named another server as master than before.
    #[cfg(feature = "_redis")]
    pub(crate) fn report_master_changed(&self, server: &impl Display, master: &impl Display) {
        self.report_to_all(&LimiterEvent::master_changed(server.to_string(), master.to_string()));
    }

    pub(crate) fn report_up(&self, server: &impl Display) {
        self.change(ServerChange::Up { server: server.to_string() });
    }

    pub(crate) fn report_left(&self, server: &impl Display) {
        self.change(ServerChange::Left { server: server.to_string() });
    }

    /// Adds an observer. A new observer gets an event for each server that is down.
    pub(crate) fn observe(&self, observer: &Arc<dyn Observer>) {
        self.change(ServerChange::Observer(Arc::clone(observer)));
    }

    /// Makes a change, and reports changes until none is left, unless another thread reports them.
    fn change(&self, change: ServerChange) {
        let mut servers = self.servers();
        servers.changes.push_back(change);
        if servers.is_reporting {
            return;
        }
        while let Some(change) = servers.changes.pop_front() {
            servers.is_reporting = true;
            let (new, events) = servers.apply(change);
            drop(servers);
            match new {
                None => events.iter().for_each(|event| self.report_to_all(event)),
                Some(new) => contained(|| {
                    if self.observers.add(&new) {
                        self.failures().reported = Default::default(); // the new one has seen no error
                        self.load.get().into_iter().for_each(|load| new.on_store(load));
                        events.iter().for_each(|event| new.on_limiter_event(event));
                    }
                }),
            }
            servers = self.servers();
        }
        servers.is_reporting = false;
    }

    fn servers(&self) -> MutexGuard<'_, Servers> {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports an error once a minute for each kind and reason, and renews it each five seconds. The error is reported
    /// earlier if checks have succeeded since, or an observer was added.
    pub(crate) fn report_failure(&self, kind: StoreErrorKind, error: &dyn Error) {
        let now = Instant::now();
        let due = {
            let mut failures = self.failures();
            self.is_failing.store(true, Ordering::Relaxed);
            failures.last = Some(now);
            debug_assert!((kind as usize) < failures.reported.len(), "each kind of error has a place");
            let reports = failures.reported.get_mut(kind as usize);
            reports.and_then(|reports| reports.due(now, kind, || WithSources(error).to_string()))
        };
        if let Some(event) = due {
            self.report_to_all(&event);
        }
    }

    /// Records that a call succeeded, and reports that checks succeed again if no check has failed for a
    /// while.
    pub(crate) fn record_success(&self) {
        if !self.is_failing.load(Ordering::Relaxed) {
            return;
        }
        let recovered = {
            let mut failures = self.failures();
            let is_quiet = failures.last.is_some_and(|last| last.elapsed() >= QUIET);
            if is_quiet {
                *failures = FailureReports::default();
                self.is_failing.store(false, Ordering::Relaxed);
            }
            is_quiet
        };
        if recovered {
            self.report_to_all(&LimiterEvent::StoreRecovered);
        }
    }

    fn failures(&self) -> MutexGuard<'_, FailureReports> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_observed(&self) -> bool {
        !self.observers.is_empty()
    }

    /// Reports an event that occurs for each check or key, if there is an observer.
    pub(crate) fn report(&self, event: impl FnOnce() -> LimiterEvent) {
        if self.is_observed() {
            self.report_to_all(&event());
        }
    }

    /// Reports an event to all observers. The tasks that keep connections go on if an observer panics.
    fn report_to_all(&self, event: &LimiterEvent) {
        event.log();
        self.observers.iter().for_each(|observer| contained(|| observer.on_limiter_event(event)));
    }
}

impl Servers {
    /// Makes a change. Returns the events to report, to a new observer if there is one, and otherwise to all
    /// observers.
    fn apply(&mut self, change: ServerChange) -> (Option<Arc<dyn Observer>>, Vec<LimiterEvent>) {
        match change {
            ServerChange::Down { server, error } => {
                let now = Instant::now();
                let is_same = |known: &mut ReportedError| {
                    now.duration_since(known.at) < ANOTHER || !has_other_reason(&known.text, &error)
                };
                if self.down.get_mut(&server).is_some_and(is_same) {
                    return (None, Vec::new());
                }
                self.down.insert(server.clone(), ReportedError { text: error.clone(), at: now });
                (None, vec![LimiterEvent::store_down(server, error)])
            }
            ServerChange::Up { server } => {
                self.down.remove(&server);
                (None, vec![LimiterEvent::store_up(server)])
            }
            ServerChange::Left { server } => {
                self.down.remove(&server);
                (None, vec![LimiterEvent::store_left(server)])
            }
            ServerChange::Observer(observer) => {
                let down = self.down.iter().map(|(server, error)| (server.clone(), error.text.clone()));
                (Some(observer), down.map(|(server, error)| LimiterEvent::store_down(server, error)).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store_load::StoreLoad;

    #[derive(Default)]
    struct Seen(Mutex<Vec<LimiterEvent>>);

    impl Observer for Seen {
        fn on_limiter_event(&self, event: &LimiterEvent) {
            self.0.lock().unwrap().push(event.clone());
        }
    }

    impl Seen {
        /// Returns the texts of the errors that were reported.
        fn failures(&self) -> Vec<String> {
            let text = |event: &LimiterEvent| match event {
                LimiterEvent::StoreFailed { error, .. } => Some(error.clone()),
                _ => None,
            };
            self.0.lock().unwrap().iter().filter_map(text).collect()
        }
    }

    fn away() -> std::io::Error {
        std::io::Error::other("away")
    }

    fn observed() -> (Arc<Seen>, Events) {
        let seen = Arc::new(Seen::default());
        (Arc::clone(&seen), Events::new(&[seen]))
    }

    #[test]
    fn late_observer_learns_which_servers_are_down() {
        let events = Events::new(&[]);
        events.report_down(&"first", &away());
        events.report_down(&"second", &away());
        events.report_up(&"first");
        let seen = Arc::new(Seen::default());
        let observer: Arc<dyn Observer> = seen.clone();
        events.observe(&observer);
        events.observe(&observer);
        let down = LimiterEvent::store_down("second".to_owned(), "away".to_owned());
        assert_eq!(*seen.0.lock().unwrap(), [down]);
    }

    #[test]
    fn observer_gets_the_load_of_a_store_once() {
        let [early, late] = [(); 2].map(|()| crate::stats::Stats::new());
        let waiting = |stats: &crate::stats::Stats| stats.snapshot().store_load().map(|load| load.waiting);
        let events = Events::new(&[Arc::new(early.clone())]);
        events.observe(&(Arc::new(early.clone()) as Arc<dyn Observer>));
        assert_eq!(waiting(&early), None);
        let load = StoreLoad { waiting: 3, ..StoreLoad::default() };
        events.offer_load(StoreLoadReader::new(move || Some(load)));
        for stats in [&late, &early, &late] {
            events.observe(&(Arc::new(stats.clone()) as Arc<dyn Observer>));
        }
        assert_eq!([waiting(&early), waiting(&late)], [Some(3), Some(3)]);
    }

    #[test]
    fn late_observer_gets_an_error_that_was_reported_before() {
        let events = Events::new(&[]);
        let seen = Arc::new(Seen::default());
        for _ in 0..2 {
            events.report_failure(StoreErrorKind::Unavailable, &away());
            events.observe(&(seen.clone() as Arc<dyn Observer>));
        }
        events.report_failure(StoreErrorKind::Unavailable, &away());
        assert_eq!(*seen.0.lock().unwrap(), [LimiterEvent::store_failed(StoreErrorKind::Unavailable, "away")]);
    }

    /// Makes a layer over the limiter at each event, as a program does that changes its rules when a server is down.
    struct Maker {
        events: std::sync::Weak<Events>,
        seen: Seen,
        new: Arc<Seen>,
    }

    impl Observer for Maker {
        fn on_limiter_event(&self, event: &LimiterEvent) {
            let (events, new) = (self.events.upgrade().unwrap(), self.new.clone() as Arc<dyn Observer>);
            if self.seen.0.lock().unwrap().is_empty() {
                events.report_up(&"here");
            }
            std::thread::spawn(move || events.observe(&new)).join().unwrap();
            self.seen.on_limiter_event(event);
        }
    }

    #[test]
    fn observer_may_add_another_when_a_server_changes() {
        let (done, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let new = Arc::new(Seen::default());
            let events = Arc::new(Events::new(&[]));
            let maker = Maker { events: Arc::downgrade(&events), seen: Seen::default(), new: Arc::clone(&new) };
            let maker = Arc::new(maker);
            events.observe(&(maker.clone() as Arc<dyn Observer>));
            events.report_down(&"here", &away());
            done.send([&maker.seen, &*new].map(|seen| seen.0.lock().unwrap().len())).unwrap();
        });
        // Down and up, of which the other observer comes after the second.
        assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Ok([2, 0]));
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_reported_once_a_minute_for_each_kind() {
        let (seen, events) = observed();
        for minute in 1..=2 {
            for kind in StoreErrorKind::ALL.iter().cycle().take(50) {
                events.report_failure(*kind, &away());
            }
            tokio::time::advance(AGAIN - ANOTHER).await;
            events.report_failure(StoreErrorKind::Misconfigured, &away());
            assert_eq!(seen.failures().len(), StoreErrorKind::ALL.len() * minute);
            tokio::time::advance(ANOTHER).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn error_for_another_reason_is_reported_five_seconds_later() {
        let (seen, events) = observed();
        let fail = |text: &str| events.report_failure(StoreErrorKind::Unavailable, &std::io::Error::other(text));
        fail("connection to 10.0.0.1:6379 closed after 3ms");
        fail("out of memory");
        tokio::time::advance(ANOTHER).await;
        fail("connection to 10.0.0.2:6379 closed after 41ms");
        tokio::time::advance(ANOTHER).await;
        (0..10).for_each(|_| fail("out of memory"));
        fail("connection to 10.0.0.1:6379 closed after 5ms");
        tokio::time::advance(ANOTHER).await;
        fail("out of memory");
        assert_eq!(seen.failures(), ["connection to 10.0.0.1:6379 closed after 3ms", "out of memory"]);
        tokio::time::advance(AGAIN - ANOTHER).await;
        fail("out of memory");
        assert_eq!(seen.failures().len(), 3, "a minute has passed");
    }

    #[tokio::test(start_paused = true)]
    async fn error_is_renewed_while_reasons_alternate() {
        let (seen, events) = observed();
        for number in 0..11 {
            let text = if number % 2 == 0 { format!("a call takes {number}ms") } else { "no answer".to_owned() };
            events.report_failure(StoreErrorKind::Timeout, &std::io::Error::other(text));
            events.report_failure(StoreErrorKind::Timeout, &std::io::Error::other("another reason at once"));
            tokio::time::advance(ANOTHER).await;
        }
        assert_eq!(seen.failures(), ["a call takes 0ms", "no answer"]);
        let seen = seen.0.lock().unwrap();
        assert_eq!(seen.len(), 11);
        assert_eq!(seen[10], LimiterEvent::still_failing(StoreErrorKind::Timeout, "a call takes 10ms"));
    }

    #[tokio::test(start_paused = true)]
    async fn server_that_is_down_for_another_reason_is_reported_again() {
        let (seen, events) = observed();
        let down = |text: &str| events.report_down(&"here", &std::io::Error::other(text));
        down("silent for 250ms");
        down("refused");
        tokio::time::advance(ANOTHER).await;
        down("silent for 300ms");
        down("refused");
        down("refused");
        events.report_up(&"here");
        down("refused");
        let expected = [("down", "silent for 250ms"), ("down", "refused"), ("up", ""), ("down", "refused")];
        let expected = expected.map(|(what, text)| match what {
            "up" => LimiterEvent::store_up("here"),
            _ => LimiterEvent::store_down("here", text),
        });
        assert_eq!(*seen.0.lock().unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn recovery_is_reported_once_after_some_quiet_seconds() {
        let (seen, events) = observed();
        let failed = LimiterEvent::store_failed(StoreErrorKind::Unavailable, "away");
        let mut expected = Vec::new();
        let is_report = |event: &&LimiterEvent| !matches!(event, LimiterEvent::StillFailing { .. });
        let reported = || seen.0.lock().unwrap().iter().filter(is_report).cloned().collect::<Vec<_>>();
        events.record_success();
        for _ in 0..2 {
            // Single successes between failures are not a recovery.
            for _ in 0..20 {
                events.report_failure(StoreErrorKind::Unavailable, &away());
                tokio::time::advance(QUIET - Duration::from_millis(1)).await;
                events.record_success();
            }
            // Twenty failures take more than one minute, and less than two.
            expected.extend([failed.clone(), failed.clone()]);
            assert_eq!(reported(), expected);
            tokio::time::advance(Duration::from_millis(1)).await;
            for _ in 0..3 {
                events.record_success();
            }
            expected.push(LimiterEvent::StoreRecovered);
            assert_eq!(reported(), expected);
        }
    }
}
