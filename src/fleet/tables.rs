//! The modes, quotas, overrides and access lists that the program got from the fleet, and that follow
//! the operators' settings.

#[cfg(feature = "rules")]
use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
#[cfg(feature = "rules")]
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use super::change::{FleetEntry, FleetKind};
use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::Timestamp;
#[cfg(feature = "rules")]
use crate::key::Key;
use crate::middleware::charge::access::{Access, AccessList};
use crate::middleware::rule::{OverrideId, Overrides, QuotaSwitch};
use crate::mode::{Mode, ModeSwitch};
use crate::quota::Quota;

/// A setting that the program got under a name. The setting follows the entries with that name.
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
    Access(OwnAccess),
    #[cfg(feature = "rules")]
    Rules(Weak<dyn FollowFleet>),
}

/// A setting that the program got, with its name.
pub(super) type NamedTable = (Box<str>, FleetTable);

/// Rules of a file that follow the operators' settings.
#[cfg(feature = "rules")]
pub(crate) trait FollowFleet: Send + Sync {
    /// Puts the rules that an operator pushed in force, or the rules of the file if `pushed` is `None`. Also puts the
    /// operators' settings for these rules in force.
    fn follow_fleet(&self, pushed: Option<&Arc<FleetEntry>>, settings: FleetRuleSettings);

    /// Returns the names of the rules for which operators can make entries of this kind.
    fn rule_names(&self, kind: FleetKind) -> Vec<Box<str>>;

    /// Returns whether one of the rules has this name, or had it according to its `was`.
    #[cfg(feature = "status")]
    fn has_rule(&self, name: &str) -> bool;

    /// Returns an error with the reason if an entry of this kind for a client has no effect on these
    /// rules.
    fn check_access(&self, kind: FleetKind) -> Result<(), &'static str>;

    /// Returns an error with the reason if the rule of this name never has this key. The reason does not contain the
    /// key.
    fn check_key(&self, name: &str, key: &Key) -> Result<(), String>;

    /// Returns the text of the program's own rules.
    #[cfg(feature = "status")]
    fn own_text(&self) -> Arc<[u8]>;

    /// Returns an error with the reason if a text cannot be put in force.
    fn check_text(&self, text: &str) -> Result<(), String>;
}

/// The settings of operators for the rules of a file.
#[cfg(feature = "rules")]
#[derive(Clone, Default)]
pub(crate) struct FleetRuleSettings {
    /// The mode of each rule, by the rule's name.
    pub(crate) modes: BTreeMap<Box<str>, Mode>,
    /// The overrides of each rule, by the rule's name. These overrides follow the operators' settings
    /// by themselves.
    pub(crate) overrides: BTreeMap<Box<str>, Overrides<Quota>>,
    /// The clients that are always allowed or denied, if operators have set any. The list follows the
    /// operators' settings by itself.
    pub(crate) clients: Option<AccessList>,
}

#[cfg(feature = "rules")]
impl FleetRuleSettings {
    /// Returns whether rules that were made with the settings `other` can stay unchanged.
    pub(crate) fn is_alike(&self, other: &Self) -> bool {
        self.modes == other.modes
            && self.overrides.keys().eq(other.overrides.keys())
            && self.clients.is_some() == other.clients.is_some()
    }
}

/// Overrides that only the fleet sets, so that the fleet knows all of them.
pub(super) struct OwnOverrides<T> {
    pub(super) table: Overrides<T>,
    /// The entries that are in the table, in the order of their targets.
    set: Arc<Mutex<Vec<SetOverride>>>,
    /// Whether the program has got the table. Otherwise only rules of files read it.
    is_got: Arc<AtomicBool>,
}

/// An entry that is in the table, and the override that was made from it.
type SetOverride = (Arc<FleetEntry>, OverrideId);

/// An access list that only the fleet sets.
#[derive(Clone)]
pub(super) struct OwnAccess {
    pub(super) list: AccessList,
    /// The entries that are in the list.
    set: Arc<Mutex<Vec<Arc<FleetEntry>>>>,
}

impl FleetTable {
    /// Returns the kinds of entries that this table follows.
    pub(super) fn kinds(&self) -> &'static [FleetKind] {
        match self {
            Self::Mode { .. } => &[FleetKind::Mode],
            Self::Quota { .. } => &[FleetKind::Quota],
            Self::Overrides(_) => &[FleetKind::Override],
            Self::Plans(_) => &[FleetKind::Plan],
            Self::Access(_) => &[FleetKind::Network, FleetKind::Key],
            #[cfg(feature = "rules")]
            Self::Rules(_) => &[FleetKind::Rules],
        }
    }

    /// Returns the rules of a file, if the table belongs to such rules and the rules are still in
    /// use.
    #[cfg(feature = "rules")]
    pub(super) fn rules(&self) -> Option<Arc<dyn FollowFleet>> {
        if let Self::Rules(rules) = self { rules.upgrade() } else { None }
    }

    /// Returns whether this table belongs to rules of a file, and these rules read the other table.
    #[cfg(feature = "rules")]
    pub(super) fn reads(&self, other: &Self) -> bool {
        matches!((self, other), (Self::Rules(_), Self::Overrides(_) | Self::Access(_)))
    }

    /// Updates the table to `entries`: the entries of its kinds that are in force, in the order of their targets.
    /// Does nothing if the table is up to date.
    pub(super) fn follow<'a>(
        &self,
        entries: impl Iterator<Item = &'a Arc<FleetEntry>> + Clone,
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
                    // If the limiter of a layer does not support the new quota, `set` changes nothing, and the switch
                    // keeps the former quota.
                    contained(|| drop(switch.set(quota)));
                }
            }
            Self::Overrides(overrides) => overrides.follow(entries, now),
            Self::Plans(overrides) => overrides.follow(entries, now),
            Self::Access(access) => access.follow(entries),
            #[cfg(feature = "rules")]
            Self::Rules(rules) => {
                if let Some(rules) = rules.upgrade() {
                    contained(|| rules.follow_fleet(entries.clone().next(), settings()));
                }
            }
        }
    }
}

impl OwnAccess {
    pub(super) fn new() -> Self {
        Self { list: AccessList::new(), set: Arc::default() }
    }

    fn follow<'a>(&self, entries: impl Iterator<Item = &'a Arc<FleetEntry>> + Clone) {
        let mut set = lock(&self.set);
        if set.iter().eq(entries.clone()) {
            return;
        }
        let next = AccessList::new();
        *set = entries.map(Arc::clone).collect();
        for entry in &*set {
            let Ok(access) = entry.value.parse::<Access>() else { continue };
            match entry.target.network() {
                Some(network) => next.set_network(network, access),
                None => next.set_key(entry.target.key(), access),
            }
        }
        self.list.replace(&next);
    }
}

impl<T: FromStr + Copy> OwnOverrides<T> {
    pub(super) fn new() -> Self {
        Self { table: Overrides::new(), set: Arc::default(), is_got: Arc::default() }
    }

    /// Returns the table for the program.
    pub(super) fn get(self) -> Overrides<T> {
        self.is_got.store(true, Ordering::Relaxed);
        self.table
    }

    /// Returns whether the program has got the table.
    #[cfg(feature = "rules")]
    pub(super) fn is_got(&self) -> bool {
        self.is_got.load(Ordering::Relaxed)
    }

    fn follow<'a>(&self, entries: impl Iterator<Item = &'a Arc<FleetEntry>>, now: Timestamp) {
        let mut set = lock(&self.set);
        let mut before = std::mem::take(&mut *set).into_iter().peekable();
        // Many entries have one value.
        let mut parsed: Option<(&str, T)> = None;
        for entry in entries {
            while let Some((_, ended)) = before.next_if(|(earlier, _)| earlier.target < entry.target) {
                self.table.end(ended);
            }
            let former = match before.next_if(|(earlier, _)| earlier.target == entry.target) {
                Some((same, id)) if same.value == entry.value && same.until == entry.until => {
                    set.push((Arc::clone(entry), id));
                    continue;
                }
                former => former.map(|(_, id)| id),
            };
            if parsed.is_none_or(|(text, _)| *text != *entry.value) {
                parsed = entry.value.parse().ok().map(|value| (&*entry.value, value));
            }
            if let (Some(key), Some((_, value))) = (entry.target.key(), parsed) {
                let lasting = entry.until.map(|until| until.saturating_since(now));
                // The table is never full, because it has room for more entries than a fleet keeps.
                if let Ok(id) = self.table.set(key, value, lasting) {
                    set.push((Arc::clone(entry), id));
                }
            }
            former.map(|former| self.table.end(former));
        }
        for (_, ended) in before {
            self.table.end(ended);
        }
    }
}

impl<T> Clone for OwnOverrides<T> {
    fn clone(&self) -> Self {
        Self { table: self.table.clone(), set: Arc::clone(&self.set), is_got: Arc::clone(&self.is_got) }
    }
}
