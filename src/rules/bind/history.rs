//! The names that states are stored under, and the facts about these names from earlier files.

use std::collections::HashMap;

/// The facts about earlier files that the next file needs.
#[derive(Clone, Default)]
pub(in crate::rules) struct RulesHistory {
    /// The largest capacity that the quotas of each stored name have had. A smaller quota needs room for units that
    /// were used under a larger quota.
    largest: HashMap<Box<str>, u64>,
    /// The first name of each rule that was renamed. The states of such a rule are stored under its first name.
    first_names: HashMap<Box<str>, Box<str>>,
}

/// The stored names of one file.
pub(super) struct StoredNames {
    before: RulesHistory,
    history: RulesHistory,
    /// For each name, the line of the rule that has the name.
    lines: HashMap<Box<str>, usize>,
}

impl StoredNames {
    /// Begins a file. `before` is the history of the earlier files.
    pub(super) fn new(before: RulesHistory) -> Self {
        let history = RulesHistory { largest: before.largest.clone(), first_names: HashMap::new() };
        Self { before, history, lines: HashMap::new() }
    }

    /// Records that the rule `new` was called `old`, so that its states stay stored under `old`. If an earlier file
    /// had already renamed the rule to `old`, returns the rule's first name.
    pub(super) fn rename(&mut self, old: &str, new: &str) -> Option<&str> {
        self.history.first_names.insert(new.into(), old.into());
        self.before.first_names.get(old).map(|first| &**first)
    }

    /// Reserves a stored name for quotas whose largest capacity is `capacity`. Returns the largest capacity that
    /// quotas with this stored name have had in this file or an earlier one.
    ///
    /// # Errors
    /// Returns the line of the rule that already has the name.
    pub(super) fn take(&mut self, name: &str, capacity: u64, line: usize) -> Result<u64, usize> {
        if let Some(other) = self.lines.insert(name.into(), line) {
            return Err(other);
        }
        let largest = self.history.largest.entry(name.into()).or_default();
        *largest = capacity.max(*largest);
        Ok(*largest)
    }

    /// Ends the file. Names that no rule has any more are forgotten, because their states expire.
    pub(super) fn into_history(self) -> RulesHistory {
        let Self { mut history, lines, .. } = self;
        history.largest.retain(|name, _| lines.contains_key(name));
        history
    }
}
