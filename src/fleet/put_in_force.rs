//! Puts the operators' settings in force: makes the modes, quotas, overrides, access lists and rules of this process
//! follow the latest document.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

#[cfg(feature = "rules")]
use super::change::{FleetEntry, FleetKind};
use super::document::FleetDocument;
use super::error::FleetError;
use super::state::{Applying, FleetShared, FleetState, KnownFleet, PAUSE, aside};
#[cfg(feature = "rules")]
use super::tables::{FleetRuleSettings, OwnOverrides};
use super::tables::{FleetTable, NamedTable};
use crate::base::sync::{contained, lock};
use crate::base::time::Timestamp;

/// The maximum number of tries to make a new table follow the latest document. If a later document comes during a try,
/// another try follows.
const FOLLOWS: usize = 3;

impl FleetShared {
    /// Puts a document in force, unless a later document is known. Returns when the document is in force, or when
    /// another thread is putting it in force. If later documents come meanwhile, the thread for blocking work puts them
    /// in force, too, but the caller does not wait for them.
    pub(super) async fn put_in_force(self: &Arc<Self>, next: KnownFleet) -> Result<(), FleetError> {
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

    /// Waits until this revision or a later one is in force, and the observers know. Another thread may be putting the
    /// revision in force.
    pub(super) async fn wait_until_in_force(&self, revision: u64) {
        let is_known = |state: &FleetState| state.in_force.document.revision >= revision && state.has_reported();
        while !is_known(&lock(&self.state)) {
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Makes all tables follow the latest document. Then this document counts as in force, even if a later document has
    /// come meanwhile. No lock is held meanwhile, because the tables and the observers call the application. One thread
    /// at a time updates the tables, so that no table goes back to an older document. If another thread is already
    /// updating the tables, this function returns at once, and that thread then updates them once more.
    pub(super) fn apply(&self) {
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
            {
                let mut state = lock(&self.state);
                state.ends = known.document.next_end(now);
                if state.in_force.version == known.version {
                    continue;
                }
                let (before, next) = (&state.in_force.document, &known.document);
                if before.revision == next.revision && before.entries == next.entries {
                    state.in_force = known; // only the secret is new
                    continue;
                }
                (state.in_force, state.in_force_since) = (known, now);
                let event = state.in_force_event();
                state.add_report(event);
            }
            self.report();
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
    pub(super) fn follow_at_once(&self, name: &str, table: &FleetTable) {
        for _ in 0..FOLLOWS {
            let (known, tables) = {
                #[cfg_attr(not(feature = "rules"), expect(unused_mut, reason = "only rules have overrides to enter"))]
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
