//! The handle of the operators' settings: the task that reads the settings, and the changes to them.

use std::collections::BTreeSet;
use std::fmt;
use std::future::poll_fn;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::change::{FleetAction, FleetChange, FleetEntry, FleetKind, FleetRollback, FleetTarget, invalid};
use super::document::{FleetAuthor, FleetDocument, rollback};
use super::error::{FleetError, FleetErrorKind};
use super::file::FileText;
use super::in_force::FleetInForce;
#[cfg(feature = "status")]
use super::reports::{self, FleetProcesses, FleetReports, ReportedFleet, Reporter};
#[cfg(feature = "rules")]
use super::tables::{FleetRuleSettings, FollowFleet};
use super::tables::{FleetTable, OwnAccess, OwnOverrides};
use crate::base::random;
use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::Timestamp;
use crate::clock::{CalendarClock, Clock};
use crate::error::{BoxError, WithSources};
use crate::event::FleetEvent;
use crate::limiter::{Limiter, SharedText, TextRead, VersionedText};
use crate::middleware::charge::access::AccessList;
use crate::middleware::rule::{Overrides, QuotaSwitch};
use crate::mode::{Mode, ModeSwitch};
use crate::outcome::Observer;
use crate::quota::Quota;
use crate::rules_in_force::hash;

/// The time between two readings.
const READ_EVERY: Duration = Duration::from_secs(1);

/// The longest time of a call to the store. No request waits for such a call.
const CALL: Duration = Duration::from_secs(2);

/// The maximum number of times that a change is tried if other processes change something at each
/// try.
const TRIES: usize = 50;

/// The longest time of all tries of a change together.
const CHANGE: Duration = Duration::from_secs(10);

/// The maximum number of names in a message.
const NAMES_MAX: usize = 20;

/// The maximum number of tries to make a new table follow the latest document. If a later document comes during a try,
/// another try follows.
const FOLLOWS: usize = 3;

/// The pause after a failed call.
const PAUSE: Duration = Duration::from_millis(50);

/// The settings of operators for all processes that share a store. Clones share all settings.
///
/// The [module's documentation](super) has an example.
#[derive(Clone)]
pub struct Fleet(Arc<Inner>);

struct Inner {
    text: Arc<dyn SharedText>,
    clock: Arc<dyn Clock>,
    state: Mutex<FleetState>,
}

#[derive(Default)]
struct FleetState {
    /// The latest document that this process has read or written.
    known: KnownFleet,
    /// The document that all tables follow.
    in_force: KnownFleet,
    /// Since when that document is in force.
    in_force_since: Timestamp,
    applying: Applying,
    /// The next instant at which an entry that is in force ends.
    ends: Option<Timestamp>,
    /// When the store last answered.
    read_at: Option<Timestamp>,
    error: Option<Arc<str>>,
    tables: Vec<NamedTable>,
    observers: Vec<Arc<dyn Observer>>,
    #[cfg(feature = "status")]
    reporter: Option<Arc<Reporter>>,
}

impl FleetState {
    fn in_force(&self) -> FleetInForce {
        let KnownFleet { document, hash, .. } = &self.in_force;
        FleetInForce {
            revision: document.revision,
            hash: *hash,
            since: self.in_force_since,
            read_at: self.read_at,
            error: self.error.clone(),
        }
    }

    fn in_force_event(&self) -> FleetEvent {
        FleetEvent::in_force(self.in_force.document.revision, self.in_force.hash, self.in_force_since)
    }

    /// Returns the event of the last reading, if that reading failed.
    fn unreadable(&self) -> Option<FleetEvent> {
        let error = self.error.as_deref()?;
        Some(FleetEvent::unreadable(self.read_at.map(|_| self.in_force.document.revision), error))
    }
}

/// A setting that the program got, with its name.
type NamedTable = (Box<str>, FleetTable);

/// The state of the update that makes the tables follow the latest document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Applying {
    #[default]
    No,
    Once,
    /// A thread updates the tables, and has to begin again with the latest document.
    Again,
}

/// A document, and the version and the hash of its text.
#[derive(Clone)]
struct KnownFleet {
    document: Arc<FleetDocument>,
    version: Option<u128>,
    hash: u64,
}

impl Default for KnownFleet {
    fn default() -> Self {
        Self { document: Arc::default(), version: None, hash: hash(b"") }
    }
}

impl KnownFleet {
    fn new(document: FleetDocument, text: &VersionedText) -> Self {
        Self { document: Arc::new(document), version: Some(text.version), hash: hash(text.text.as_bytes()) }
    }

    fn parse(text: &VersionedText) -> Result<Self, FleetError> {
        let document = FleetDocument::parse(&text.text).ok_or_else(|| {
            let message = "this version cannot read the text in the store: the last known settings stay in force";
            FleetError::new(FleetErrorKind::Foreign, message)
        })?;
        Ok(Self::new(document, text))
    }
}

impl Fleet {
    /// Keeps the operators' settings in the Redis or the store in which a limiter keeps its states. Reads the
    /// settings at once, and then once per second. **Keep the fleet or a clone of it**: after the last clone is
    /// dropped, all values stay as they are.
    ///
    /// If the store does not answer, no setting is in force until it answers.
    ///
    /// # Errors
    /// Returns an error if the limiter has no store, or if there is no Tokio runtime.
    pub async fn beside<L: Limiter>(limiter: &L) -> Result<Self, FleetError> {
        let Some(text) = limiter.hooks().shared_text() else {
            let message = "this limiter keeps nothing for other processes: use Fleet::in_file";
            return Err(FleetError::new(FleetErrorKind::Unsupported, message));
        };
        Self::over(text, Arc::new(CalendarClock)).await
    }

    /// Keeps the operators' settings in a file, so that they survive restarts. Only one process may use the
    /// file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or if there is no Tokio runtime.
    pub async fn in_file(path: impl AsRef<Path>) -> Result<Self, FleetError> {
        let fleet = Self::over(Arc::new(FileText::new(path.as_ref().to_owned())), Arc::new(CalendarClock)).await?;
        match fleet.in_force().error {
            Some(error) => Err(FleetError::new(FleetErrorKind::Unavailable, &*error)),
            None => Ok(fleet),
        }
    }

    /// Keeps the operators' settings in `text`.
    pub(super) async fn over(text: Arc<dyn SharedText>, clock: Arc<dyn Clock>) -> Result<Self, FleetError> {
        let Ok(runtime) = Handle::try_current() else {
            return Err(FleetError::new(FleetErrorKind::Unsupported, "a fleet must be made within a tokio runtime"));
        };
        let fleet = Self(Arc::new(Inner { text, clock, state: Mutex::default() }));
        let _ = fleet.0.read().await; // the state says so
        runtime.spawn(follow(Arc::downgrade(&fleet.0)));
        Ok(fleet)
    }

    /// Waits until the store has answered.
    ///
    /// # Errors
    /// Returns an error if the store does not answer in the time `within`. The error says why.
    pub async fn wait_until_read(&self, within: Duration) -> Result<(), FleetError> {
        let reading = async {
            while self.0.read().await.is_err() {
                tokio::time::sleep(PAUSE).await;
            }
        };
        if timeout(within, reading).await.is_err() {
            let error = self.in_force().error.unwrap_or_else(|| format!("no answer in {within:?}").into());
            return Err(FleetError::new(FleetErrorKind::Unavailable, &*error));
        }
        Ok(())
    }

    /// Adds an observer of [events](crate::observe::FleetEvent). If several observers have one
    /// [identity](Observer::identity), only the first is added. The new observer at once gets the
    /// revision in force, and the error if the store does not answer. An observer must not wait for
    /// [`change`](Self::change), because the change waits for the observers.
    pub fn observe(&self, observer: impl Observer + 'static) {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        let (in_force, unreadable) = {
            let mut state = lock(&self.0.state);
            if state.observers.iter().any(|other| other.identity() == observer.identity()) {
                return;
            }
            state.observers.push(Arc::clone(&observer));
            (state.in_force_event(), state.unreadable())
        };
        [Some(in_force), unreadable].iter().flatten().for_each(|event| observer.on_fleet_event(event));
    }

    /// Returns the mode with this name. The mode is `otherwise` unless an operator has set another mode. Only the
    /// fleet may set this mode switch.
    pub fn mode(&self, name: impl Into<Box<str>>, otherwise: Mode) -> ModeSwitch {
        let table =
            self.table(name, FleetKind::Mode, || FleetTable::Mode { switch: ModeSwitch::new(otherwise), otherwise });
        if let FleetTable::Mode { switch, .. } = table { switch } else { ModeSwitch::new(otherwise) }
    }

    /// Returns the quota with this name. The quota is `otherwise` unless an operator has set another quota. Only
    /// the fleet may set this quota switch. The fleet ignores a quota that a layer's limiter does not support.
    pub fn quota(&self, name: impl Into<Box<str>>, otherwise: Quota) -> QuotaSwitch {
        let table = self.table(name, FleetKind::Quota, || FleetTable::Quota {
            switch: QuotaSwitch::new(otherwise),
            otherwise: Box::new(otherwise),
        });
        if let FleetTable::Quota { switch, .. } = table { switch } else { QuotaSwitch::new(otherwise) }
    }

    /// Returns the overrides with this name, for [`Rule::quota_from`](crate::Rule::quota_from). The
    /// overrides follow the operators' settings by themselves.
    pub fn overrides(&self, name: impl Into<Box<str>>) -> Overrides<Quota> {
        let table = self.table(name, FleetKind::Override, || FleetTable::Overrides(OwnOverrides::new()));
        if let FleetTable::Overrides(own) = table { own.table } else { Overrides::new() }
    }

    /// Returns the overrides with this name, for [`Rule::plans`](crate::Rule::plans). The overrides follow the
    /// operators' settings by themselves.
    pub fn plans(&self, name: impl Into<Box<str>>) -> Overrides<usize> {
        let table = self.table(name, FleetKind::Plan, || FleetTable::Plans(OwnOverrides::new()));
        if let FleetTable::Plans(own) = table { own.table } else { Overrides::new() }
    }

    /// Returns the access list with this name, for [`RateLimitLayer::access`](crate::RateLimitLayer::access). The list
    /// follows the operators' settings by itself.
    pub fn access(&self, name: impl Into<Box<str>>) -> AccessList {
        let table = self.table(name, FleetKind::Network, || FleetTable::Access(OwnAccess::new()));
        if let FleetTable::Access(own) = table { own.list } else { AccessList::new() }
    }

    /// Makes rules follow the settings that operators put in force under this name.
    #[cfg(feature = "rules")]
    pub(crate) fn follow_rules(&self, name: &str, rules: &Weak<dyn FollowFleet>) {
        self.access(name);
        let table = FleetTable::Rules(Weak::clone(rules));
        lock(&self.0.state).tables.push((name.into(), table.clone()));
        self.0.follow_at_once(name, &table);
    }

    /// Returns the table with this name. The first call for a name makes its table.
    fn table(&self, name: impl Into<Box<str>>, kind: FleetKind, make: impl FnOnce() -> FleetTable) -> FleetTable {
        let name = name.into();
        let table = {
            let mut state = lock(&self.0.state);
            let known = state.tables.iter().find(|(known, table)| *known == name && table.kinds().contains(&kind));
            if let Some((_, table)) = known {
                return table.clone();
            }
            let table = make();
            state.tables.push((name.clone(), table.clone()));
            table
        };
        self.0.follow_at_once(&name, &table);
        table
    }

    /// Makes changes in all processes, either all of them or none. Returns the revision that the changes made. When
    /// this method returns, the changes are in force in this process. In the other processes, the changes are in
    /// force a second later. The store also keeps `by` and `why`. `by` is not verified, so pass the name of an
    /// authenticated operator.
    ///
    /// If other processes change something at the same time, this method makes its changes on top of theirs. If the
    /// store does not answer, as during a failover, the method tries again. If an answer is lost, the method finds out
    /// whether the changes were made. It returns within ten seconds.
    ///
    /// A store that loses its last writes [can lose](super#when-the-store-fails) a change whose revision this method
    /// has returned.
    ///
    /// # Errors
    /// See [`FleetErrorKind`].
    pub async fn change(
        &self,
        by: &str,
        why: &str,
        changes: impl IntoIterator<Item = FleetChange>,
    ) -> Result<u64, FleetError> {
        let changes: Arc<[FleetChange]> = changes.into_iter().collect();
        let (fleet, checked) = (self.clone(), Arc::clone(&changes));
        aside(move || fleet.check(&checked)).await??;
        self.make(by, why, move |_: &FleetDocument| Ok(Arc::clone(&changes))).await
    }

    /// Restores the rules that were in force before the last push: the text of an earlier push, or the rules of the
    /// file. One step is kept. So after a rollback, or after an operator ended pushed rules, the next rollback fails
    /// until rules are pushed again. The undone text is kept until then, as
    /// [`UndoneRules`](FleetKind::UndoneRules). To restore it, push it again. A push of the text that a rollback would
    /// restore counts as a rollback.
    ///
    /// The rollback fails, too, if the rules were changed after the revision `seen`.
    ///
    /// # Errors
    /// See [`FleetErrorKind`].
    pub async fn rollback(
        &self,
        by: &str,
        why: &str,
        name: &str,
        seen: Option<u64>,
    ) -> Result<FleetRollback, FleetError> {
        let name: Arc<str> = name.into();
        let restored = Arc::new(Mutex::new(None));
        let of_last_try = Arc::clone(&restored);
        let changes = move |document: &FleetDocument| -> Result<Arc<[FleetChange]>, FleetError> {
            let (change, former) = rollback(document, &name, seen)?;
            *lock(&of_last_try) = former;
            Ok([change].into())
        };
        let revision = self.make(by, why, changes).await?;
        let restored = lock(&restored).as_deref().cloned();
        Ok(FleetRollback { revision, restored })
    }

    async fn make(&self, by: &str, why: &str, changes: impl MakeChanges) -> Result<u64, FleetError> {
        let mut tries = ChangeTries::default();
        let made = timeout(CHANGE, self.try_to_make(by, why, Arc::new(changes), &mut tries)).await;
        made.unwrap_or_else(|_| Err(tries.into_error()))
    }

    async fn try_to_make(
        &self,
        by: &str,
        why: &str,
        changes: Arc<impl MakeChanges>,
        tries: &mut ChangeTries,
    ) -> Result<u64, FleetError> {
        let shared = &self.0;
        loop {
            if let Err(error) = shared.read().await {
                if error.kind() == FleetErrorKind::Foreign && tries.unanswered.is_empty() {
                    return Err(error);
                }
                tries.failed(error).await;
                continue;
            }
            let KnownFleet { document, version, .. } = lock(&shared.state).known.clone();
            if let Some(revision) = tries.unanswered.iter().find_map(|swap| document.made(swap.tag)) {
                tries.made = Some(revision);
                shared.wait_until_in_force(revision).await;
                return Ok(revision);
            }
            if tries.unanswered.iter().any(|swap| document.has_displaced(swap.revision)) {
                let message = "it is unknown whether the change was made, because others made many changes since";
                return Err(FleetError::new(FleetErrorKind::Unavailable, message));
            }
            let long = || (u128::from(random::secret()) << 64) | u128::from(random::secret());
            let (own, secret) = (long(), long());
            let tag = own as u64; // a part of it
            let (changes, by, why, at) = (Arc::clone(&changes), by.to_owned(), why.to_owned(), shared.clock.now());
            let changed = aside(move || {
                document.changed(&changes(&document)?, FleetAuthor { by: &by, why: &why, at, tag, secret })
            });
            let (next, text) = changed.await??;
            let (revision, text) = (next.revision, VersionedText::new(own, text));
            // Without an answer, the change may have been made, or may still be made. The next try expects the same
            // version, so at most one of the two tries succeeds.
            tries.unanswered.push(SentSwap { tag, revision });
            match shared.call(shared.text.swap(version, &text)).await {
                Ok(true) => {
                    tries.made = Some(revision);
                    shared.put_in_force(KnownFleet::new(next, &text)).await?;
                    shared.wait_until_in_force(revision).await;
                    return Ok(revision);
                }
                Ok(false) => {
                    tries.unanswered.pop();
                    tries.conflicts += 1;
                    if tries.conflicts == TRIES {
                        let message =
                            "nothing was changed, because other processes changed the settings during each try";
                        return Err(FleetError::new(FleetErrorKind::Unavailable, message));
                    }
                }
                Err(error) => {
                    if error.is_certain() {
                        tries.unanswered.pop();
                        if tries.unanswered.is_empty() {
                            return Err(error);
                        }
                    }
                    tries.failed(error).await;
                }
            }
        }
    }

    /// Makes this process report to the other processes every five seconds.
    #[cfg(feature = "status")]
    pub(crate) fn report_by(&self, make: impl Fn(&ReportedFleet) -> String + Send + Sync + 'static) {
        lock(&self.0.state).reporter = Some(Arc::new(Reporter::new(make)));
    }

    /// Returns the last reports of all processes.
    #[cfg(feature = "status")]
    pub(crate) async fn reports(&self) -> Result<FleetReports, FleetError> {
        let reporter = lock(&self.0.state).reporter.clone();
        self.0.call(reports::reports(&*self.0.text, reporter.as_deref())).await
    }

    /// Returns the processes that report to the store, by the names of their rules: so the operators' program knows
    /// which processes will follow [rules](FleetChange::rules) that it pushes. Processes with a [status
    /// page](crate::observe::StatusPage::fleet) report every five seconds.
    ///
    /// # Errors
    /// Returns an error if the store does not answer.
    #[cfg(feature = "status")]
    pub async fn processes(&self) -> Result<FleetProcesses, FleetError> {
        Ok(self.reports().await?.processes())
    }

    /// Returns the secret that all processes share. The first change of the settings makes the secret.
    /// Returns `None` if the store does not answer.
    #[cfg(feature = "status")]
    pub(crate) async fn shared_secret(&self) -> Option<u128> {
        if self.secret().is_none() && self.in_force().error.is_none() {
            let making = self.make("", "", |_: &FleetDocument| Ok(Arc::default()));
            let _ = timeout(CALL, making).await; // then there is none
        }
        self.secret()
    }

    /// Returns the secret that all processes share, if this process has read it.
    #[cfg(feature = "status")]
    pub(crate) fn secret(&self) -> Option<u128> {
        lock(&self.0.state).known.document.secret
    }

    /// Returns the kinds and names of the settings that operators can change with a short value in this
    /// program, in order.
    #[cfg(feature = "status")]
    pub(crate) fn settable(&self) -> BTreeSet<(FleetKind, Box<str>)> {
        let tables = lock(&self.0.state).tables.clone();
        let mut settable = BTreeSet::new();
        for (name, table) in &tables {
            match table {
                #[cfg(feature = "rules")]
                FleetTable::Rules(rules) => {
                    for kind in [FleetKind::Mode, FleetKind::Override] {
                        let rules = rules.upgrade().map_or_else(Vec::new, |rules| rules.rule_names(kind));
                        settable.extend(rules.into_iter().map(|rule| (kind, rule)));
                    }
                }
                table => settable.extend(table.kinds().iter().map(|kind| (*kind, name.clone()))),
            }
        }
        #[cfg(feature = "rules")]
        settable.retain(|(kind, name)| check_access(&tables, *kind, name).is_ok());
        settable
    }

    /// Returns the text of the rules that this process itself has under this name.
    #[cfg(all(feature = "rules", feature = "status"))]
    pub(crate) fn own_rules(&self, name: &str) -> Option<Arc<[u8]>> {
        let tables = lock(&self.0.state).tables.clone();
        let mut named = tables.iter().filter(|(known, _)| **known == *name);
        named.find_map(|(_, table)| table.rules()).map(|rules| rules.own_text())
    }

    /// Returns an error if a change has a wrong value, or if this process has no setting with the
    /// change's name.
    fn check(&self, changes: &[FleetChange]) -> Result<(), FleetError> {
        let mut before: Option<&FleetChange> = None;
        for change in changes {
            change.check_size()?;
            // Often many changes set the same value for different keys, so the value is checked once.
            let is_alike = |before: &FleetChange| {
                let [one, other] =
                    [before, change].map(|FleetChange { target, value, .. }| (target.kind, &target.name, value));
                one == other
            };
            if !before.is_some_and(is_alike) {
                change.check_value()?;
                self.check_here(change)?;
            }
            before = Some(change);
        }
        Ok(())
    }

    /// Returns an error if this process has no setting with the change's name.
    fn check_here(&self, change: &FleetChange) -> Result<(), FleetError> {
        let FleetTarget { kind, name, .. } = &change.target;
        let mut tables = lock(&self.0.state).tables.clone();
        let mut known = BTreeSet::new();
        #[cfg(feature = "rules")]
        if matches!(kind, FleetKind::Mode | FleetKind::Override) {
            let rules = tables.iter().filter_map(|(_, table)| table.rules());
            known.extend(rules.flat_map(|rules| rules.rule_names(*kind)));
            if known.contains(&**name) {
                return Ok(());
            }
        }
        #[cfg(feature = "rules")]
        if change.value.is_some() {
            check_access(&tables, *kind, name)?;
        }
        tables.retain(|(_, table)| table.kinds().contains(kind));
        if *kind == FleetKind::Rules && tables.is_empty() {
            return Ok(()); // for the rules of other programs, which refuse what they cannot use
        }
        let mut named = tables.iter().filter(|(known, _)| **known == **name).peekable();
        if named.peek().is_none() && change.value.is_some() {
            known.extend(tables.iter().map(|(known, _)| known.clone()));
            let known = shown_names(&known);
            return Err(invalid(format!("this program has no `{kind}` of the name `{name}`; it has {known}")));
        }
        #[cfg(feature = "rules")]
        for (_, table) in named {
            if let (Some(rules), Some(text)) = (table.rules(), &change.value) {
                rules.check_text(text).map_err(invalid)?;
            }
        }
        Ok(())
    }

    /// Returns which revision is in force, since when, and whether the store answers.
    #[must_use]
    pub fn in_force(&self) -> FleetInForce {
        lock(&self.0.state).in_force()
    }

    /// Returns the entries that are in force now.
    #[must_use]
    pub fn entries(&self) -> Vec<FleetEntry> {
        let (document, now) = (Arc::clone(&lock(&self.0.state).in_force.document), self.0.clock.now());
        document.entries.values().filter(|entry| entry.holds(now)).map(|entry| FleetEntry::clone(entry)).collect()
    }

    /// Returns the last 100 actions of all processes, the latest first.
    #[must_use]
    pub fn actions(&self) -> Vec<FleetAction> {
        let document = Arc::clone(&lock(&self.0.state).in_force.document);
        document.actions.iter().cloned().collect()
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("in_force", &self.in_force()).finish_non_exhaustive()
    }
}

/// Returns names for a message, in order, at most the first [`NAMES_MAX`] of them.
fn shown_names(names: &BTreeSet<Box<str>>) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    let mut shown: Vec<String> = names.iter().take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
    if let Some(more @ 1..) = names.len().checked_sub(NAMES_MAX) {
        shown.push(format!("and {more} more"));
    }
    shown.join(", ")
}

/// Makes changes on a document.
trait MakeChanges: Fn(&FleetDocument) -> Result<Arc<[FleetChange]>, FleetError> + Send + Sync + 'static {}

impl<F: Fn(&FleetDocument) -> Result<Arc<[FleetChange]>, FleetError> + Send + Sync + 'static> MakeChanges for F {}

/// The tries of a change so far.
#[derive(Default)]
struct ChangeTries {
    /// The swaps that were not answered.
    unanswered: Vec<SentSwap>,
    /// The revision that the change made.
    made: Option<u64>,
    /// The number of swaps that were refused because another process had changed something.
    conflicts: usize,
    /// The last failure.
    failure: Option<FleetError>,
}

/// A swap that was sent to the store.
struct SentSwap {
    /// The tag of its actions.
    tag: u64,
    /// The revision that it makes.
    revision: u64,
}

impl ChangeTries {
    /// Notes a failure, and pauses before the next try.
    async fn failed(&mut self, error: FleetError) {
        self.failure = Some(error);
        tokio::time::sleep(PAUSE).await;
    }

    /// Returns the error of a change whose time is over.
    fn into_error(self) -> FleetError {
        if let Some(revision) = self.made {
            let message = format!("revision {revision} was made, but is not in force in this process yet");
            return FleetError::new(FleetErrorKind::Unavailable, message);
        }
        let message = if self.unanswered.is_empty() {
            format!("nothing was changed within {CHANGE:?}")
        } else {
            format!("after {CHANGE:?} it is still unknown whether the change was made")
        };
        let error = FleetError::new(FleetErrorKind::Unavailable, message);
        match self.failure {
            Some(failure) => error.caused_by(failure),
            None => error,
        }
    }
}

/// Runs a function on one of the runtime's threads for blocking work, because the function takes milliseconds or
/// calls the application. On a worker thread, a text of 900 kB would delay other tasks.
async fn aside<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Result<T, FleetError> {
    tokio::task::spawn_blocking(run).await.map_err(|error| {
        FleetError::new(FleetErrorKind::Unavailable, "the call was cut off, and may have taken effect").caused_by(error)
    })
}

/// Reads the settings once per second, until the fleet is dropped.
async fn follow(shared: Weak<Inner>) {
    let mut ticks = interval(READ_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let Some(shared) = shared.upgrade() else { return };
        let _ = shared.read().await; // the state says so
        #[cfg(feature = "status")]
        shared.report().await;
        let ended = lock(&shared.state).ends.is_some_and(|ends| ends <= shared.clock.now());
        if ended {
            let _ = aside(move || shared.apply()).await; // the next time, if it was cut off
        }
    }
}

impl Inner {
    /// Calls the store, and waits for its answer for at most [`CALL`].
    async fn call<T>(&self, call: impl Future<Output = Result<T, BoxError>>) -> Result<T, FleetError> {
        match timeout(CALL, call).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(FleetError::of_store(error)),
            Err(_) => {
                Err(FleetError::new(FleetErrorKind::Unavailable, format!("the store did not answer in {CALL:?}")))
            }
        }
    }

    /// Writes the report of this process if the report is due and the store answers.
    #[cfg(feature = "status")]
    async fn report(&self) {
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
    async fn read(self: &Arc<Self>) -> Result<(), FleetError> {
        let read = self.read_text().await;
        let now = self.clock.now();
        let (event, observers) = {
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
            (event, state.observers.clone())
        };
        if let Some(event) = event {
            report(&observers, &event);
        }
        read
    }

    async fn read_text(self: &Arc<Self>) -> Result<(), FleetError> {
        let version = lock(&self.state).known.version;
        let TextRead::Changed(found) = self.call(self.text.load(version)).await? else { return Ok(()) };
        let expect = found.as_ref().map(|found| found.version);
        let next = aside(move || found.as_ref().map(KnownFleet::parse).transpose()).await??;
        let known = lock(&self.state).known.clone();
        let revision = next.as_ref().map_or(0, |next| next.document.revision);
        if let Some(version) = known.version.filter(|_| revision < known.document.revision) {
            // The store has lost the latest known text, or has an older one. Other processes may write the lost text
            // back at the same time, so the result of the swap is ignored.
            let lost = aside(move || VersionedText::new(version, known.document.to_text())).await?;
            self.call(self.text.swap(expect, &lost)).await?;
        } else if let Some(next) = next {
            self.put_in_force(next).await?;
        }
        Ok(())
    }

    /// Puts a document in force, unless a later document is known. Returns when the document is in force, or when
    /// another thread is putting it in force. If later documents come meanwhile, the thread for blocking work puts them
    /// in force, too, but the caller does not wait for them.
    async fn put_in_force(self: &Arc<Self>, next: KnownFleet) -> Result<(), FleetError> {
        let (version, revision) = (next.version, next.document.revision);
        let is_in_force = |in_force: &KnownFleet| in_force.version == version || in_force.document.revision > revision;
        let mut waiting = pin!(async {
            while !is_in_force(&lock(&self.state).in_force) {
                tokio::time::sleep(PAUSE).await;
            }
        });
        let shared = Arc::clone(self);
        // If the caller is dropped, a document that is known is still put in force.
        let mut applying = pin!(aside(move || {
            shared.note(next);
            shared.apply();
        }));
        poll_fn(|context| match applying.as_mut().poll(context) {
            Poll::Pending => waiting.as_mut().poll(context).map(Ok),
            applied => applied,
        })
        .await
    }

    /// Notes a document as the latest one, unless a later document is known.
    fn note(&self, next: KnownFleet) {
        let mut state = lock(&self.state);
        if next.document.revision >= state.known.document.revision {
            state.known = next;
        }
    }

    /// Waits until this revision or a later one is in force. Another thread may be putting the revision in force.
    async fn wait_until_in_force(&self, revision: u64) {
        while lock(&self.state).in_force.document.revision < revision {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Makes all tables follow the latest document. Then this document counts as in force, even if a later document has
    /// come meanwhile. No lock is held meanwhile, because the tables and the observers call the application. One thread
    /// at a time updates the tables, so that no table goes back to an older document. If another thread is already
    /// updating the tables, this function returns at once, and that thread then updates them once more.
    fn apply(&self) {
        {
            let mut state = lock(&self.state);
            if state.applying != Applying::No {
                state.applying = Applying::Again;
                return;
            }
            state.applying = Applying::Again;
        }
        while let Some((known, tables)) = self.next_to_apply() {
            let now = self.clock.now();
            for (name, table) in &tables {
                contained(|| follow_table(&known.document, name, table, &tables, now));
            }
            let (event, observers) = {
                let mut state = lock(&self.state);
                state.ends = known.document.next_end(now);
                if state.in_force.version == known.version {
                    continue;
                }
                (state.in_force, state.in_force_since) = (known, now);
                (state.in_force_event(), state.observers.clone())
            };
            report(&observers, &event);
        }
    }

    /// Returns the latest document and the tables that have to follow it. Returns `None` if all tables follow the
    /// latest document.
    fn next_to_apply(&self) -> Option<(KnownFleet, Vec<NamedTable>)> {
        let mut state = lock(&self.state);
        if state.applying != Applying::Again {
            state.applying = Applying::No;
            return None;
        }
        state.applying = Applying::Once;
        #[cfg(feature = "rules")]
        state.enter_overrides();
        Some((state.known.clone(), state.tables.clone()))
    }

    /// Makes a new table follow the latest document, even while another thread makes all tables follow. If it is a
    /// table of rules, the tables that these rules read follow first.
    fn follow_at_once(&self, name: &str, table: &FleetTable) {
        for _ in 0..FOLLOWS {
            let (known, tables) = {
                let mut state = lock(&self.state);
                #[cfg(feature = "rules")]
                state.enter_overrides();
                (state.known.clone(), state.tables.clone())
            };
            let now = self.clock.now();
            #[cfg(feature = "rules")]
            for (read_name, read) in tables.iter().filter(|(_, read)| table.reads(read)) {
                follow_table(&known.document, read_name, read, &tables, now);
            }
            follow_table(&known.document, name, table, &tables, now);
            // If a later document has come meanwhile, another thread may have put it into the table before this thread
            // put in the older one. So this thread tries again.
            if lock(&self.state).known.version == known.version {
                break;
            }
        }
        self.apply();
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

/// Makes a table follow the entries of a document.
fn follow_table(
    document: &FleetDocument,
    name: &str,
    table: &FleetTable,
    #[cfg_attr(not(feature = "rules"), expect(unused_variables, reason = "only rules read other tables"))]
    tables: &[NamedTable],
    now: Timestamp,
) {
    let entries = table.kinds().iter().flat_map(|kind| document.entries_of(*kind, name));
    table.follow(
        entries.filter(|entry| entry.holds(now)),
        now,
        #[cfg(feature = "rules")]
        || rule_settings(document, name, tables, now),
    );
}

/// Returns an error if rules of a file have this name, and an entry of this kind for a client has no effect on these
/// rules.
#[cfg(feature = "rules")]
fn check_access(tables: &[NamedTable], kind: FleetKind, name: &str) -> Result<(), FleetError> {
    if !matches!(kind, FleetKind::Network | FleetKind::Key) {
        return Ok(());
    }
    let mut rules = tables.iter().filter(|(known, _)| **known == *name).filter_map(|(_, table)| table.rules());
    rules.try_for_each(|rules| rules.check_access(kind)).map_err(invalid)
}

#[cfg(feature = "rules")]
impl FleetState {
    /// Removes the tables of rules that the program has dropped. If the process still has rules of
    /// files, makes a table for each name with overrides that has no table yet.
    fn enter_overrides(&mut self) {
        let is_gone = |table: &FleetTable| matches!(table, FleetTable::Rules(rules) if rules.strong_count() == 0);
        self.tables.retain(|(_, table)| !is_gone(table));
        if !self.tables.iter().any(|(_, table)| matches!(table, FleetTable::Rules(_))) {
            return;
        }
        let document = Arc::clone(&self.known.document);
        let overrides = document.entries_of_kind(FleetKind::Override);
        let mut names: Vec<&str> = overrides.map(|entry| &*entry.target.name).collect();
        names.dedup();
        for name in names {
            let is_own = |(known, table): &NamedTable| **known == *name && matches!(table, FleetTable::Overrides(_));
            if !self.tables.iter().any(is_own) {
                // Inserts the table before the tables of rules, because tables are filled in their order, and the
                // rules read the overrides in this table.
                self.tables.insert(0, (name.into(), FleetTable::Overrides(OwnOverrides::new())));
            }
        }
    }
}

/// Returns the operators' settings for the rules of the file with this name.
#[cfg(feature = "rules")]
fn rule_settings(document: &FleetDocument, name: &str, tables: &[NamedTable], now: Timestamp) -> FleetRuleSettings {
    let mut settings = FleetRuleSettings::default();
    let holds = |entry: &Arc<FleetEntry>| entry.holds(now);
    for entry in document.entries_of_kind(FleetKind::Mode).filter(|entry| holds(entry)) {
        if let Ok(mode) = entry.value.parse() {
            settings.modes.insert((*entry.target.name).into(), mode);
        }
    }
    for (known, table) in tables {
        let mut entries = table.kinds().iter().flat_map(|kind| document.entries_of(*kind, known));
        match table {
            FleetTable::Overrides(own) if entries.any(holds) => {
                settings.overrides.insert(known.clone(), own.table.clone());
            }
            FleetTable::Access(own) if **known == *name && entries.any(holds) => {
                settings.clients = Some(own.list.clone());
            }
            _ => {}
        }
    }
    settings
}

fn report(observers: &[Arc<dyn Observer>], event: &FleetEvent) {
    event.log();
    observers.iter().for_each(|observer| contained(|| observer.on_fleet_event(event)));
}
