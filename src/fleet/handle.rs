//! The handle of the operators' settings, for the program and its status page.

#[cfg(feature = "status")]
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
#[cfg(feature = "rules")]
use std::sync::Weak;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

#[cfg(all(feature = "rules", feature = "status"))]
use super::change::FleetTarget;
use super::change::{FleetAction, FleetChange, FleetEntry, FleetKind, FleetRollback};
use super::check_change::check;
#[cfg(all(feature = "rules", feature = "status"))]
use super::check_change::names_no_rule;
#[cfg(feature = "status")]
use super::check_change::settable;
use super::document::{FleetDocument, rollback};
use super::error::{FleetError, FleetErrorKind};
use super::file::FileText;
use super::in_force::FleetInForce;
use super::read::follow;
#[cfg(feature = "status")]
use super::reports::{self, FleetProcesses, FleetReports, ReportedFleet, Reporter};
#[cfg(feature = "status")]
use super::state::CALL;
use super::state::{FleetShared, PAUSE, aside};
#[cfg(feature = "rules")]
use super::tables::FollowFleet;
use super::tables::{FleetTable, OwnAccess, OwnOverrides};
use crate::base::sync::{Mutex, lock};
use crate::clock::{CalendarClock, Clock};
use crate::limiter::{Limiter, SharedText};
use crate::middleware::charge::access::AccessList;
use crate::middleware::rule::{Overrides, QuotaSwitch};
use crate::mode::{Mode, ModeSwitch};
use crate::outcome::Observer;
use crate::quota::Quota;

/// The settings of operators for all processes that share a store. Clones share all settings.
///
/// The [module's documentation](super) has an example.
#[derive(Clone)]
pub struct Fleet(Arc<FleetShared>);

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
        #[cfg(feature = "status")]
        {
            lock(&fleet.0.state).is_in_file = true;
        }
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
        let fleet = Self(Arc::new(FleetShared { text, clock, state: Mutex::default() }));
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
    /// [identity](Observer::identity), only the first is added. The new observer first gets the
    /// revision in force, and the error if the store does not answer. All observers get the events in order,
    /// one at a time. An observer must not wait for [`change`](Self::change), because the change waits for
    /// the observers.
    pub fn observe(&self, observer: impl Observer + 'static) {
        let observer: Arc<dyn Observer> = Arc::new(observer);
        {
            let mut state = lock(&self.0.state);
            if state.observers.iter().any(|other| other.identity() == observer.identity()) {
                return;
            }
            state.add_observer(observer);
        }
        self.0.report();
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
        if let FleetTable::Overrides(own) = table { own.get() } else { Overrides::new() }
    }

    /// Returns the overrides with this name, for [`Rule::plans`](crate::Rule::plans). The overrides follow the
    /// operators' settings by themselves.
    pub fn plans(&self, name: impl Into<Box<str>>) -> Overrides<usize> {
        let table = self.table(name, FleetKind::Plan, || FleetTable::Plans(OwnOverrides::new()));
        if let FleetTable::Plans(own) = table { own.get() } else { Overrides::new() }
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
        let (tables, checked) = (lock(&self.0.state).tables.clone(), Arc::clone(&changes));
        aside(move || check(&checked, &tables)).await??;
        self.0.make(by, why, move |_: &FleetDocument| Ok(Arc::clone(&changes))).await
    }

    /// Restores the rules that were in force before the last push: the text of an earlier push, or the rules of the
    /// file. One step is kept. So after a rollback, or after an operator ended pushed rules, the next rollback fails
    /// until rules are pushed again. The undone text is kept until then, as
    /// [`UndoneRules`](FleetKind::UndoneRules). To restore it, push it again. A push of the text that a rollback would
    /// restore counts as a rollback.
    ///
    /// Before `why`, the store keeps the words `rolled back to revision 3`, so that the history tells a rollback from a
    /// push.
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
        let revision = self.0.make(by, why, changes).await?;
        let restored = lock(&restored).as_deref().cloned();
        Ok(FleetRollback { revision, restored })
    }

    /// Makes this process report to the other processes every five seconds.
    #[cfg(feature = "status")]
    pub(crate) fn report_by(&self, make: impl Fn(&ReportedFleet) -> String + Send + Sync + 'static) {
        lock(&self.0.state).reporter = Some(Arc::new(Reporter::new(make)));
    }

    /// Returns whether the settings are in a file, which no other process uses.
    #[cfg(feature = "status")]
    pub(crate) fn is_in_file(&self) -> bool {
        lock(&self.0.state).is_in_file
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

    /// Returns the secret that all processes share, and makes it if there is none. The revision stays the same.
    /// Returns `None` if the store does not answer.
    #[cfg(feature = "status")]
    pub(crate) async fn shared_secret(&self) -> Option<u128> {
        if self.secret().is_none() && self.in_force().error.is_none() {
            let making = self.0.make("", "", |_: &FleetDocument| Ok(Arc::default()));
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
        settable(&tables)
    }

    /// Returns whether an entry has no effect, because this process has rules of files, and none of them has or had the
    /// entry's name.
    #[cfg(all(feature = "rules", feature = "status"))]
    pub(crate) fn names_no_rule(&self, target: &FleetTarget) -> bool {
        let tables = lock(&self.0.state).tables.clone();
        names_no_rule(target, &tables)
    }

    /// Returns the text of the rules that this process itself has under this name.
    #[cfg(all(feature = "rules", feature = "status"))]
    pub(crate) fn own_rules(&self, name: &str) -> Option<Arc<[u8]>> {
        let tables = lock(&self.0.state).tables.clone();
        let mut named = tables.iter().filter(|(known, _)| **known == *name);
        named.find_map(|(_, table)| table.rules()).map(|rules| rules.own_text())
    }

    /// Returns which revision is in force, since when, and whether the store answers.
    #[must_use]
    pub fn in_force(&self) -> FleetInForce {
        lock(&self.0.state).in_force()
    }

    /// Returns the entries that are in force now.
    #[must_use]
    pub fn entries(&self) -> Vec<FleetEntry> {
        self.all_in_force().1
    }

    /// Returns the last 100 actions of all processes, the latest first.
    #[must_use]
    pub fn actions(&self) -> Vec<FleetAction> {
        self.all_in_force().2
    }

    /// Returns the revision in force, its entries that hold now, and its actions, all of the same document.
    pub(crate) fn all_in_force(&self) -> (FleetInForce, Vec<FleetEntry>, Vec<FleetAction>) {
        let (in_force, document) = {
            let state = lock(&self.0.state);
            (state.in_force(), Arc::clone(&state.in_force.document))
        };
        let now = self.0.clock.now();
        let entries = document.entries.values().filter(|entry| entry.holds(now));
        (in_force, entries.map(|entry| FleetEntry::clone(entry)).collect(), document.actions.iter().cloned().collect())
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("in_force", &self.in_force()).finish_non_exhaustive()
    }
}
