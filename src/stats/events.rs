//! Counts of the events of limiters and their stores, of waiting requests, and of files of rules.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use super::histogram::{Histogram, HistogramSnapshot};
use super::names::cut;
use super::newest::NewestCounts;
use crate::base::sync::{Mutex, lock};
use crate::base::time::Timestamp;
use crate::event::{FleetEvent, LayerEvent, LimiterEvent, RulesEvent, StoreErrorKind};

/// The number of kinds of store errors.
const STORE_ERRORS: usize = StoreErrorKind::ALL.len();

/// The maximum number of servers that are remembered as down.
const SERVERS_MAX: usize = 64;

/// The longest error text that is kept, in bytes.
const TEXT_MAX: usize = 4_096;

/// The longest error text of a server that is down, in bytes.
const DOWN_MAX: usize = 1_024;

/// The number of ways in which a check can end: with one of the kinds of errors, or with a decision.
const CHECK_ENDS: usize = STORE_ERRORS + 1;

/// The last reported error of each kind since checks began to fail.
#[derive(Clone, Debug, Default)]
struct StoreErrors {
    by_kind: [Option<StoreError>; STORE_ERRORS],
    /// True if checks have recovered since. The texts stay until checks fail again, because the newest counts still
    /// contain the failures.
    are_over: bool,
}

impl StoreErrors {
    /// Forgets the errors of failures from which checks have recovered, because checks fail again.
    fn begin(&mut self) {
        if self.are_over {
            *self = Self::default();
        }
    }
}

/// An error with which checks of a store fail: its text, and the time of its last report.
#[derive(Clone, Debug)]
struct StoreError {
    text: Box<str>,
    at: Timestamp,
}

pub(super) struct EventCells {
    checks: Histogram,
    errors: [AtomicU64; STORE_ERRORS],
    corrections_lost: [AtomicU64; STORE_ERRORS],
    recoveries: AtomicU64,
    store_errors: Mutex<StoreErrors>,
    newest_checks: Mutex<NewestCounts<CHECK_ENDS>>,
    scripts_forgotten: AtomicU64,
    /// The time of the last such event, in microseconds.
    scripts_forgotten_at: AtomicU64,
    local_answers: AtomicU64,
    fallbacks: AtomicU64,
    evicted: [AtomicU64; 2],
    full: AtomicU64,
    too_many_quotas: AtomicU64,
    places_forgotten: AtomicU64,
    waits_begun: AtomicU64,
    waits_ended: AtomicU64,
    rules_loaded: AtomicU64,
    rules_refused: AtomicU64,
    rules_error: Mutex<Option<Box<str>>>,
    fleet: Mutex<FleetGauges>,
    /// The servers that are down, with their errors.
    down: Mutex<BTreeMap<Box<str>, Box<str>>>,
}

/// The state of a fleet, according to its last events.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FleetGauges {
    /// The revision in force, its hash, and the time since which it is in force.
    pub(super) in_force: Option<(u64, u64, Timestamp)>,
    pub(super) is_unreadable: bool,
    /// The number of times that this process wrote back settings that the store had lost.
    pub(super) restored: u64,
}

impl EventCells {
    pub(super) fn note_fleet(&self, event: &FleetEvent) {
        let mut fleet = lock(&self.fleet);
        match event {
            FleetEvent::InForce { revision, hash, since } => fleet.in_force = Some((*revision, *hash, *since)),
            FleetEvent::Unreadable { .. } => fleet.is_unreadable = true,
            FleetEvent::Readable { .. } => fleet.is_unreadable = false,
            FleetEvent::Restored { .. } => fleet.restored = fleet.restored.saturating_add(1),
        }
    }

    /// Makes empty counts that begin in the short bucket `period`.
    pub(super) fn new(period: u64) -> Self {
        Self {
            newest_checks: Mutex::new(NewestCounts::new(period)),
            checks: Histogram::default(),
            errors: Default::default(),
            corrections_lost: Default::default(),
            recoveries: AtomicU64::default(),
            store_errors: Mutex::default(),
            scripts_forgotten: AtomicU64::default(),
            scripts_forgotten_at: AtomicU64::default(),
            local_answers: AtomicU64::default(),
            fallbacks: AtomicU64::default(),
            evicted: Default::default(),
            full: AtomicU64::default(),
            too_many_quotas: AtomicU64::default(),
            places_forgotten: AtomicU64::default(),
            waits_begun: AtomicU64::default(),
            waits_ended: AtomicU64::default(),
            rules_loaded: AtomicU64::default(),
            rules_refused: AtomicU64::default(),
            rules_error: Mutex::default(),
            fleet: Mutex::default(),
            down: Mutex::default(),
        }
    }

    pub(super) fn count_of_layer(&self, event: &LayerEvent) {
        match event {
            LayerEvent::WaitBegan { .. } => add(&self.waits_begun),
            LayerEvent::WaitEnded { .. } => add(&self.waits_ended),
            LayerEvent::PaceBegan { .. } | LayerEvent::PaceEnded { .. } => {}
        }
    }

    pub(super) fn count_of_rules(&self, event: &RulesEvent) {
        match event {
            RulesEvent::Loaded { .. } => {
                add(&self.rules_loaded);
                *lock(&self.rules_error) = None;
            }
            RulesEvent::Refused { error } => {
                add(&self.rules_refused);
                *lock(&self.rules_error) = Some(bounded(error));
            }
            RulesEvent::Unused { error, .. } => {
                if error.is_some() {
                    add(&self.rules_refused);
                }
                *lock(&self.rules_error) = error.as_deref().map(bounded);
            }
        }
    }

    /// Begins a short bucket.
    pub(super) fn begin_bucket(&self, period: u64) {
        let ends: [u64; CHECK_ENDS] = std::array::from_fn(|end| match self.errors.get(end) {
            Some(errors) => errors.load(Ordering::Relaxed),
            None => self.checks.snapshot().count(),
        });
        lock(&self.newest_checks).bring_up(period, ends);
    }

    /// Counts an event. `now` returns the time of the statistics' clock.
    pub(super) fn count_of_limiter(&self, event: &LimiterEvent, now: impl FnOnce() -> Timestamp) {
        match event {
            LimiterEvent::StoreChecked { duration, error: None } => self.checks.record(*duration),
            LimiterEvent::StoreChecked { error: Some(error), .. } => add(&self.errors[*error as usize]),
            LimiterEvent::CorrectionLost { charges, kind } => {
                self.corrections_lost[*kind as usize].fetch_add(*charges as u64, Ordering::Relaxed);
            }
            LimiterEvent::StoreRecovered => {
                add(&self.recoveries);
                lock(&self.store_errors).are_over = true;
            }
            LimiterEvent::StoreFailed { kind, error } | LimiterEvent::StillFailing { kind, error } => {
                let error = StoreError { text: bounded(error), at: now() };
                let mut errors = lock(&self.store_errors);
                errors.begin();
                errors.by_kind[*kind as usize] = Some(error);
            }
            LimiterEvent::ScriptsForgotten { .. } => {
                add(&self.scripts_forgotten);
                self.scripts_forgotten_at.store(now().as_micros(), Ordering::Relaxed);
            }
            LimiterEvent::AnsweredLocally => add(&self.local_answers),
            LimiterEvent::FellBack { .. } => add(&self.fallbacks),
            LimiterEvent::Evicted { throttled } => add(&self.evicted[usize::from(*throttled)]),
            LimiterEvent::Full => add(&self.full),
            LimiterEvent::TooManyQuotas => add(&self.too_many_quotas),
            LimiterEvent::StoreDown { server, error } => {
                lock(&self.store_errors).begin(); // checks fail at once now, and no error is reported for them
                let (server, error) = (bounded(server), cut(error, DOWN_MAX).into());
                let mut down = lock(&self.down);
                if down.len() < SERVERS_MAX || down.contains_key(&server) {
                    down.insert(server, error);
                }
            }
            LimiterEvent::StoreUp { server } | LimiterEvent::StoreLeft { server } => {
                lock(&self.down).remove(&bounded(server));
            }
            LimiterEvent::PlacesForgotten { units } => {
                self.places_forgotten.fetch_add(*units, Ordering::Relaxed);
            }
            // Adds nothing for these events, because the outcomes already count failures, and the durations of checks
            // show that a server is far away.
            LimiterEvent::Failed { .. } | LimiterEvent::StoreFar { .. } | LimiterEvent::MasterChanged { .. } => {}
        }
    }

    pub(super) fn snapshot(&self) -> EventCounts {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let down = lock(&self.down).iter().map(|(server, error)| (server.clone(), error.clone())).collect();
        let servers_down: Vec<(Box<str>, Box<str>)> = down;
        // While a server is down, checks fail at once and their errors are not reported, so only
        // the server's error says why.
        let of_server = || {
            let (server, error) = servers_down.first()?;
            Some(bounded(&format!("{server} does not answer: {error}")))
        };
        let store_errors = lock(&self.store_errors).clone();
        // Reads the ends before the beginnings. Otherwise a wait that begins and ends between the two readings would
        // count as an end without a beginning.
        let ended = read(&self.waits_ended);
        EventCounts {
            checks: self.checks.snapshot(),
            errors: self.errors.each_ref().map(read),
            corrections_lost: self.corrections_lost.each_ref().map(read),
            recoveries: read(&self.recoveries),
            newest: lock(&self.newest_checks).sums(),
            down_error: of_server(),
            store_errors,
            scripts_forgotten: read(&self.scripts_forgotten),
            scripts_forgotten_at: Timestamp::from_micros(read(&self.scripts_forgotten_at)),
            local_answers: read(&self.local_answers),
            fallbacks: read(&self.fallbacks),
            evicted: self.evicted.each_ref().map(read),
            full: read(&self.full),
            too_many_quotas: read(&self.too_many_quotas),
            places_forgotten: read(&self.places_forgotten),
            waiting: read(&self.waits_begun).saturating_sub(ended),
            rules_loaded: read(&self.rules_loaded),
            rules_refused: read(&self.rules_refused),
            rules_error: lock(&self.rules_error).clone(),
            fleet: *lock(&self.fleet),
            servers_down,
        }
    }
}

fn add(cell: &AtomicU64) {
    cell.fetch_add(1, Ordering::Relaxed);
}

/// Returns the first 4 KiB of a text.
fn bounded(text: &str) -> Box<str> {
    cut(text, TEXT_MAX).into()
}

/// Counts of the events of [limiters](crate::observe::LimiterEvent), of waiting requests, and of rules.
#[derive(Clone, Debug, Default)]
pub struct EventCounts {
    checks: HistogramSnapshot,
    errors: [u64; STORE_ERRORS],
    corrections_lost: [u64; STORE_ERRORS],
    recoveries: u64,
    newest: [u64; CHECK_ENDS],
    store_errors: StoreErrors,
    down_error: Option<Box<str>>,
    scripts_forgotten: u64,
    scripts_forgotten_at: Timestamp,
    local_answers: u64,
    fallbacks: u64,
    evicted: [u64; 2],
    full: u64,
    too_many_quotas: u64,
    places_forgotten: u64,
    waiting: u64,
    rules_loaded: u64,
    rules_refused: u64,
    rules_error: Option<Box<str>>,
    fleet: FleetGauges,
    servers_down: Vec<(Box<str>, Box<str>)>,
}

impl EventCounts {
    pub(super) fn fleet(&self) -> FleetGauges {
        self.fleet
    }

    /// Returns the durations of the checks that a store, such as Redis, decided.
    #[must_use]
    pub fn checks(&self) -> &HistogramSnapshot {
        &self.checks
    }

    /// Iterates over the kinds of errors with which checks of a store ended, each with the number of these checks.
    pub fn errors(&self) -> impl Iterator<Item = (StoreErrorKind, u64)> {
        StoreErrorKind::ALL.iter().copied().zip(self.errors)
    }

    /// Iterates over the kinds of [`errors`](Self::errors), each with the number of charges that were not corrected
    /// after the response, because the refund or the additional charge did not reach the store.
    pub fn corrections_lost(&self) -> impl Iterator<Item = (StoreErrorKind, u64)> {
        StoreErrorKind::ALL.iter().copied().zip(self.corrections_lost)
    }

    /// Returns how often checks of a store succeeded again after an error.
    #[must_use]
    pub fn recoveries(&self) -> u64 {
        self.recoveries
    }

    /// Returns how many checks a store decided in the last ten to fifteen seconds.
    #[must_use]
    pub fn newest_decided(&self) -> u64 {
        self.newest[STORE_ERRORS]
    }

    /// Iterates over the kinds of [`errors`](Self::errors), each with the number of checks that ended with this kind in
    /// the last ten to fifteen seconds.
    pub fn newest_errors(&self) -> impl Iterator<Item = (StoreErrorKind, u64)> {
        StoreErrorKind::ALL.iter().copied().zip(self.newest)
    }

    /// Iterates over the errors with which checks of a store failed since they last
    /// [recovered](LimiterEvent::StoreRecovered). For each kind, yields the last error that was
    /// [reported](LimiterEvent::StoreFailed) or [renewed](LimiterEvent::StillFailing), and the time of that event. The
    /// kind with which most checks ended in the last ten to fifteen seconds comes first. The text of an error is cut to
    /// 4 KiB.
    pub fn store_errors(&self) -> impl Iterator<Item = (StoreErrorKind, &str, Timestamp)> {
        self.last_store_errors().filter(|_| !self.store_errors.are_over)
    }

    /// Does what [`store_errors`](Self::store_errors) does, but yields the errors of the last failures until checks
    /// fail again, even if checks have recovered.
    pub(crate) fn last_store_errors(&self) -> impl Iterator<Item = (StoreErrorKind, &str, Timestamp)> {
        let kinds = StoreErrorKind::ALL.iter().copied().zip(&self.store_errors.by_kind);
        let mut errors: Vec<(StoreErrorKind, &StoreError)> =
            kinds.filter_map(|(kind, error)| Some((kind, error.as_ref()?))).collect();
        errors.sort_by_key(|(kind, error)| Reverse((self.newest[*kind as usize], error.at)));
        errors.into_iter().map(|(kind, error)| (kind, &*error.text, error.at))
    }

    /// Returns whether checks have recovered since they last failed.
    pub(crate) fn has_recovered(&self) -> bool {
        self.store_errors.are_over
    }

    /// Returns why checks of a store fail, or why the last checks failed: the first of
    /// [`store_errors`](Self::store_errors). If checks of a store had no errors, returns the reason
    /// why a server does not answer.
    ///
    /// Do not use the error as a readiness probe: it stays until a check succeeds, so a process that gets no requests
    /// would never be ready again.
    #[must_use]
    pub fn store_error(&self) -> Option<&str> {
        self.store_errors().next().map(|(_, text, _)| text).or(self.down_error.as_deref())
    }

    /// Returns how often a server [had forgotten](LimiterEvent::ScriptsForgotten) the limiter's scripts.
    #[must_use]
    pub fn scripts_forgotten(&self) -> u64 {
        self.scripts_forgotten
    }

    /// Returns the time of the last such event, or zero if there was none.
    pub(crate) fn scripts_forgotten_at(&self) -> Timestamp {
        self.scripts_forgotten_at
    }

    /// Returns the number of checks that a limiter answered without its store: with a remembered denial, or from leased
    /// units.
    #[must_use]
    pub fn local_answers(&self) -> u64 {
        self.local_answers
    }

    /// Returns how many requests a [`FallbackLimiter`](crate::limiter::FallbackLimiter) asked its second limiter to
    /// decide.
    #[must_use]
    pub fn fallbacks(&self) -> u64 {
        self.fallbacks
    }

    /// Returns the number of keys with a live state that a limiter in memory evicted to make room.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted.iter().sum()
    }

    /// Returns the number of [evicted](Self::evicted) keys that had no allowance left, so that their clients got a
    /// fresh allowance.
    #[must_use]
    pub fn evicted_throttled(&self) -> u64 {
        self.evicted[1]
    }

    /// Returns the number of new keys that were denied because the limiter's table was full.
    #[must_use]
    pub fn full(&self) -> u64 {
        self.full
    }

    /// Returns how often a limiter in memory [reported](LimiterEvent::TooManyQuotas) that it has more quotas than it
    /// can distinguish. A limiter reports too many quotas at most every ten seconds.
    #[must_use]
    pub fn too_many_quotas(&self) -> u64 {
        self.too_many_quotas
    }

    /// Returns the number of units of concurrency limits that a store had [forgotten](LimiterEvent::PlacesForgotten)
    /// while this process held them. After a store has forgotten units, requests may hold more units than the limit.
    #[must_use]
    pub fn places_forgotten(&self) -> u64 {
        self.places_forgotten
    }

    /// Returns the number of requests that now wait for their departure from a leaky queue, or in line for units of a
    /// [concurrency limit](crate::Quota::concurrent).
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Returns how often new rules of a file came into force. Each layer that uses the rules counts separately.
    #[must_use]
    pub fn rules_loaded(&self) -> u64 {
        self.rules_loaded
    }

    /// Returns how often rules of a file were refused. Each layer that would have used the rules counts separately.
    #[must_use]
    pub fn rules_refused(&self) -> u64 {
        self.rules_refused
    }

    /// Returns the reason why rules were last refused, as a text of at most 4 KiB. Returns `None` if rules have come
    /// into force since then, or were never refused.
    #[must_use]
    pub fn rules_error(&self) -> Option<&str> {
        self.rules_error.as_deref()
    }

    /// Iterates over the servers that do not answer, or do not answer steadily. Yields the host and port of each
    /// server, and its error: at most 64 servers, and 1 KiB of each error.
    pub fn servers_down(&self) -> impl Iterator<Item = (&str, &str)> {
        self.servers_down.iter().map(|(server, error)| (&**server, &**error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::Policy;
    use crate::quota::Quota;

    fn count(cells: &EventCells, event: &LimiterEvent) {
        cells.count_of_limiter(event, || Timestamp::from_micros(1));
    }

    #[test]
    fn store_errors_begin_with_the_kind_of_most_checks_now() {
        use StoreErrorKind::{Misconfigured, Overloaded, Timeout};
        let cells = EventCells::new(100);
        let fail = |kind, text: &str, us| {
            cells.count_of_limiter(&LimiterEvent::store_failed(kind, text), || Timestamp::from_micros(us));
            count(&cells, &LimiterEvent::store_checked(Duration::ZERO, Some(kind)));
        };
        fail(Timeout, "late", 1);
        fail(Misconfigured, "a wrong password", 2);
        fail(Misconfigured, "a missing right", 3);
        fail(Overloaded, "a moment", 4);
        count(&cells, &LimiterEvent::store_checked(Duration::ZERO, None));
        cells.begin_bucket(101);
        let counts = cells.snapshot();
        let kinds = counts.store_errors().map(|(kind, text, at)| (kind, text, at.as_micros())).collect::<Vec<_>>();
        assert_eq!(kinds, [(Misconfigured, "a missing right", 3), (Overloaded, "a moment", 4), (Timeout, "late", 1)]);
        assert_eq!(counts.store_error(), Some("a missing right"));
        assert_eq!(counts.newest_errors().map(|(_, count)| count).collect::<Vec<_>>(), [0, 1, 1, 0, 2, 0]);
        assert_eq!(counts.newest_decided(), 1);
        cells.begin_bucket(104);
        let counts = cells.snapshot();
        assert_eq!(counts.newest_errors().map(|(_, count)| count).sum::<u64>(), 0);
        assert_eq!(counts.store_error(), Some("a moment"), "the last one, if nothing is checked");
    }

    #[test]
    fn events_are_counted_by_what_they_say() {
        let cells = EventCells::new(100);
        let text = || "ü".repeat(5_000);
        let checked = |error| LimiterEvent::store_checked(Duration::from_millis(2), error);
        let events = [
            checked(None),
            checked(Some(StoreErrorKind::Timeout)),
            checked(Some(StoreErrorKind::Foreign)),
            LimiterEvent::correction_lost(3, StoreErrorKind::Unavailable),
            LimiterEvent::correction_lost(2, StoreErrorKind::Foreign),
            LimiterEvent::StoreRecovered,
            LimiterEvent::store_failed(StoreErrorKind::Unavailable, text()),
            LimiterEvent::store_failed(StoreErrorKind::Misconfigured, "a wrong password"),
            LimiterEvent::AnsweredLocally,
            LimiterEvent::fell_back(text()),
            LimiterEvent::evicted(true),
            LimiterEvent::Full,
            LimiterEvent::TooManyQuotas,
            LimiterEvent::places_forgotten(3),
            LimiterEvent::places_forgotten(4),
            LimiterEvent::store_down("one:6379", text()),
        ];
        for (at, event) in events.iter().enumerate() {
            cells.count_of_limiter(event, || Timestamp::from_micros(at as u64));
        }
        let queue = Policy::new("queue", Quota::per_second(1)).unwrap();
        let [first, second] = [(); 2].map(|()| LayerEvent::wait_began(queue.clone()));
        let waits = [first, second, LayerEvent::wait_ended(queue, Duration::ZERO)];
        waits.iter().for_each(|event| cells.count_of_layer(event));
        cells.count_of_rules(&RulesEvent::refused(text()));
        let counts = cells.snapshot();
        assert_eq!((counts.checks().count(), counts.local_answers(), counts.fallbacks()), (1, 1, 1));
        assert_eq!(
            counts.errors().filter(|(_, count)| *count > 0).collect::<Vec<_>>(),
            [(StoreErrorKind::Timeout, 1), (StoreErrorKind::Foreign, 1)]
        );
        let lost: Vec<_> = counts.corrections_lost().filter(|(_, count)| *count > 0).collect();
        assert_eq!(
            (lost, counts.recoveries()),
            (vec![(StoreErrorKind::Unavailable, 3), (StoreErrorKind::Foreign, 2)], 1)
        );
        assert_eq!((counts.evicted(), counts.evicted_throttled(), counts.full(), counts.waiting()), (1, 1, 1, 1));
        assert_eq!((counts.rules_refused(), counts.rules_error().map(str::len)), (1, Some(TEXT_MAX)));
        assert_eq!((counts.too_many_quotas(), counts.store_error()), (1, Some("a wrong password")));
        assert_eq!(counts.places_forgotten(), 7);
        let down = text();
        assert_eq!(counts.servers_down().collect::<Vec<_>>(), [("one:6379", &down[..DOWN_MAX])]);

        count(&cells, &LimiterEvent::store_down("left:6379", ""));
        count(&cells, &LimiterEvent::store_left("left:6379"));
        count(&cells, &LimiterEvent::store_up("one:6379"));
        count(&cells, &LimiterEvent::store_up("another:6379"));
        cells.count_of_rules(&RulesEvent::loaded(3, None, 1, ""));
        count(&cells, &LimiterEvent::StoreRecovered);
        let counts = cells.snapshot();
        assert_eq!(counts.store_error(), None);
        assert_eq!(counts.servers_down().count(), 0);
        assert_eq!((counts.rules_loaded(), counts.rules_error()), (1, None));
    }

    #[test]
    fn error_of_a_server_that_is_down_is_the_stores() {
        let cells = EventCells::new(100);
        count(&cells, &LimiterEvent::store_down("one:6379", "refused"));
        count(&cells, &LimiterEvent::store_down("one:6379", "a wrong password"));
        assert_eq!(cells.snapshot().store_error(), Some("one:6379 does not answer: a wrong password"));
        count(&cells, &LimiterEvent::store_failed(StoreErrorKind::Foreign, "foreign"));
        assert_eq!(cells.snapshot().store_error(), Some("foreign"));
        count(&cells, &LimiterEvent::StoreRecovered);
        count(&cells, &LimiterEvent::store_up("one:6379"));
        assert_eq!(cells.snapshot().store_error(), None);
    }

    #[test]
    fn servers_that_are_down_are_bounded() {
        let cells = EventCells::new(100);
        for n in 0..1_000 {
            count(&cells, &LimiterEvent::store_down(format!("server-{n}"), ""));
        }
        assert_eq!(cells.snapshot().servers_down().count(), SERVERS_MAX);
    }
}
