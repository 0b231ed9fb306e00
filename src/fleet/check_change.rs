//! Finds out which settings operators can change in this process.

use std::collections::BTreeSet;

use super::change::{FleetChange, FleetKind, FleetTarget, invalid};
use super::error::FleetError;
#[cfg(feature = "rules")]
use super::tables::FleetTable;
use super::tables::NamedTable;

/// The maximum number of names in a message.
const NAMES_MAX: usize = 20;

/// Returns an error if a change has a wrong value, or if none of the tables of this process has the change's name.
pub(super) fn check(changes: &[FleetChange], tables: &[NamedTable]) -> Result<(), FleetError> {
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
            check_here(change, tables)?;
        }
        #[cfg(feature = "rules")]
        check_key(change, tables)?;
        before = Some(change);
    }
    Ok(())
}

/// Returns an error if none of the tables has the change's name.
fn check_here(change: &FleetChange, tables: &[NamedTable]) -> Result<(), FleetError> {
    let FleetTarget { kind, name, .. } = &change.target;
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
        check_access(tables, *kind, name)?;
    }
    let of_kind = tables.iter().filter(|(_, table)| table.kinds().contains(kind));
    if *kind == FleetKind::Rules && of_kind.clone().next().is_none() {
        return Ok(()); // for the rules of other programs, which refuse what they cannot use
    }
    let mut named = of_kind.clone().filter(|(known, _)| **known == **name).peekable();
    if named.peek().is_none() && change.value.is_some() {
        known.extend(of_kind.map(|(known, _)| known.clone()));
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

/// Returns an error if a change gives a quota to a key that the rule of a file with the change's name never has.
#[cfg(feature = "rules")]
fn check_key(change: &FleetChange, tables: &[NamedTable]) -> Result<(), FleetError> {
    let FleetTarget { kind: FleetKind::Override, name, .. } = &change.target else { return Ok(()) };
    let (Some(key), Some(_)) = (change.target.key(), &change.value) else { return Ok(()) };
    let is_read_otherwise =
        |(known, table): &NamedTable| matches!(table, FleetTable::Overrides(own) if own.is_got() && **known == **name);
    if tables.iter().any(is_read_otherwise) {
        return Ok(()); // the program gives the quotas to keys of its own
    }
    tables
        .iter()
        .filter_map(|(_, table)| table.rules())
        .try_for_each(|rules| rules.check_key(name, &key))
        .map_err(invalid)
}

/// Returns whether an entry has no effect, because this process has rules of files, and none of them has or had the
/// entry's name. An entry with a text of rules has the name of a file.
#[cfg(all(feature = "rules", feature = "status"))]
pub(super) fn names_no_rule(target: &FleetTarget, tables: &[NamedTable]) -> bool {
    if !matches!(target.kind, FleetKind::Mode | FleetKind::Override | FleetKind::Rules) {
        return false;
    }
    let mut has_rules = false;
    for (name, table) in tables {
        let is_used = match table {
            FleetTable::Rules(rules) => {
                has_rules = true;
                if target.kind == FleetKind::Rules {
                    **name == *target.name
                } else {
                    rules.upgrade().is_some_and(|rules| rules.has_rule(&target.name))
                }
            }
            FleetTable::Overrides(own) => own.is_got() && target.kind == FleetKind::Override && **name == *target.name,
            table => table.kinds().contains(&target.kind) && **name == *target.name,
        };
        if is_used {
            return false;
        }
    }
    has_rules
}

/// Returns the kinds and names of the settings that operators can change with a short value in this
/// program, in order.
#[cfg(feature = "status")]
pub(super) fn settable(tables: &[NamedTable]) -> BTreeSet<(FleetKind, Box<str>)> {
    let mut settable = BTreeSet::new();
    for (name, table) in tables {
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
    settable.retain(|(kind, name)| check_access(tables, *kind, name).is_ok());
    settable
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
