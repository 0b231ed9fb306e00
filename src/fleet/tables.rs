//! The modes, quotas, overrides and lists that the program took, which follow the operators' settings.

#[cfg(feature = "rules")]
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;
#[cfg(feature = "rules")]
use std::sync::Weak;

use super::change::{FleetEntry, FleetKind};
use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::Timestamp;
use crate::key::Key;
use crate::middleware::charge::access::{Access, AccessList};
use crate::middleware::rule::{OverrideId, Overrides, QuotaSwitch};
use crate::mode::{Mode, ModeSwitch};
use crate::quota::Quota;

/// A setting that the program took under a name, and that follows the entries of that name.
#[derive(Clone)]
pub(super) enum FleetTable {
    Mode {
        switch: ModeSwitch,
        otherwise: Mode,
    },
    Quota {
        switch: QuotaSwitch,
        otherwise: Box<Quota>,
    },
    Overrides(OwnOverrides<Quota>),
    Plans(OwnOverrides<usize>),
    Access(AccessList),
    #[cfg(feature = "rules")]
    Rules(Weak<dyn FollowFleet>),
}

/// Rules that follow what operators put in force.
#[cfg(feature = "rules")]
pub(crate) trait FollowFleet: Send + Sync {
    /// Puts a text in force, or without one the rules of the file, with the operators' settings for its rules.
    fn follow_fleet(&self, text: Option<&str>, settings: FleetRuleSettings);

    /// Returns whether operators can set something for a rule of this name.
    fn has_rule(&self, name: &str) -> bool;

    /// Returns why a text could not be put in force.
    fn check_text(&self, text: &str) -> Result<(), String>;
}

/// The settings of operators for the rules of a file.
#[cfg(feature = "rules")]
#[derive(Clone, Default)]
pub(crate) struct FleetRuleSettings {
    /// The modes, by the names of rules.
    pub(crate) modes: BTreeMap<Box<str>, Mode>,
    /// The overrides, by the names of rules. They follow by themselves.
    pub(crate) overrides: BTreeMap<Box<str>, Overrides<Quota>>,
    /// The clients that are always allowed or denied, if there are any. The list follows by itself.
    pub(crate) clients: Option<AccessList>,
}

#[cfg(feature = "rules")]
impl FleetRuleSettings {
    /// Returns whether rules that were made with the other settings can stay.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        self.modes == other.modes
            && self.overrides.keys().eq(other.overrides.keys())
            && self.clients.is_some() == other.clients.is_some()
    }
}

/// Overrides that only the fleet sets, so that it knows what it has set.
pub(super) struct OwnOverrides<T> {
    pub(super) table: Overrides<T>,
    set: Arc<Mutex<HashMap<Key, SetOverride>>>,
}

/// An override that was set.
struct SetOverride {
    value: Box<str>,
    until: Option<Timestamp>,
    id: OverrideId,
}

impl FleetTable {
    /// Returns whether entries of this kind are for this table.
    pub(super) fn is_of(&self, kind: FleetKind) -> bool {
        match self {
            Self::Mode { .. } => kind == FleetKind::Mode,
            Self::Quota { .. } => kind == FleetKind::Quota,
            Self::Overrides(_) => kind == FleetKind::Override,
            Self::Plans(_) => kind == FleetKind::Plan,
            Self::Access(_) => matches!(kind, FleetKind::Network | FleetKind::Key),
            #[cfg(feature = "rules")]
            Self::Rules(_) => kind == FleetKind::Rules,
        }
    }

    /// Makes the table follow the entries that hold. Does nothing if it already does.
    pub(super) fn follow<'a>(
        &self,
        entries: impl Iterator<Item = &'a FleetEntry> + Clone,
        now: Timestamp,
        #[cfg(feature = "rules")] settings: impl Fn() -> FleetRuleSettings,
    ) {
        let first = || entries.clone().next().map(|entry| &*entry.value);
        match self {
            Self::Mode { switch, otherwise } => {
                switch.set(first().and_then(|value| value.parse().ok()).unwrap_or(*otherwise));
            }
            Self::Quota { switch, otherwise } => {
                let quota = first().and_then(|value| value.parse().ok()).unwrap_or(**otherwise);
                if switch.get() != quota {
                    // A layer's limiter may not support it. The quota then stays as it was.
                    contained(|| drop(switch.set(quota)));
                }
            }
            Self::Overrides(overrides) => overrides.follow(entries, now),
            Self::Plans(overrides) => overrides.follow(entries, now),
            Self::Access(list) => list.replace(&access_list(entries)),
            #[cfg(feature = "rules")]
            Self::Rules(rules) => {
                if let Some(rules) = rules.upgrade() {
                    contained(|| rules.follow_fleet(first(), settings()));
                }
            }
        }
    }
}

/// Makes the access list of entries.
fn access_list<'a>(entries: impl Iterator<Item = &'a FleetEntry>) -> AccessList {
    let list = AccessList::new();
    for FleetEntry { target, value, .. } in entries {
        let Ok(access) = value.parse::<Access>() else { continue };
        match target.network() {
            Some(network) => list.set_network(network, access),
            None => list.set_key(target.key(), access),
        }
    }
    list
}

impl<T: FromStr> OwnOverrides<T> {
    pub(super) fn new() -> Self {
        Self { table: Overrides::new(), set: Arc::default() }
    }

    fn follow<'a>(&self, entries: impl Iterator<Item = &'a FleetEntry>, now: Timestamp) {
        let mut set = lock(&self.set);
        let mut before = std::mem::take(&mut *set);
        for FleetEntry { target, value, until, .. } in entries {
            let (Some(key), Ok(parsed)) = (target.key(), value.parse::<T>()) else { continue };
            match before.remove(&key) {
                Some(same) if same.value == *value && same.until == *until => drop(set.insert(key, same)),
                former => {
                    let lasting = until.map(|until| until.saturating_since(now));
                    // The table holds more entries than a fleet keeps.
                    if let Ok(id) = self.table.set(key.clone(), parsed, lasting) {
                        set.insert(key, SetOverride { value: value.clone(), until: *until, id });
                    }
                    former.map(|former| self.table.end(former.id));
                }
            }
        }
        for ended in before.into_values() {
            self.table.end(ended.id);
        }
    }
}

impl<T> Clone for OwnOverrides<T> {
    fn clone(&self) -> Self {
        Self { table: self.table.clone(), set: Arc::clone(&self.set) }
    }
}
