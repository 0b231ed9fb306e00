//! The names that the policies of a layer have.

use std::collections::HashMap;

/// The maximum length of a policy's name.
const NAME_MAX: usize = 128;

/// The names of the policies of rules, and the names under which their states are stored. Adding a rule takes
/// constant time.
#[derive(Clone, Default)]
pub(crate) struct TakenNames {
    /// For each name, the first number that may be free.
    names: HashMap<Box<str>, usize, foldhash::fast::RandomState>,
    policies: usize,
    #[cfg(test)]
    pub(super) looks: usize,
}

impl TakenNames {
    /// Returns how many policies the rules have, without linked policies.
    pub(super) fn policies(&self) -> usize {
        self.policies
    }

    /// Adds the names of a rule with this many policies.
    pub(super) fn add<'a>(&mut self, policies: usize, names: impl Iterator<Item = &'a str>) {
        self.policies += policies;
        for name in names {
            if !self.names.contains_key(name) {
                self.names.insert(name.into(), 2);
            }
        }
    }

    /// Returns a free name like `name`, or `None` if `name` itself is free. `own` are names that are not added yet.
    ///
    /// Skipped numbers are not tried again, because their names are taken for good, or are in `own` and will be added
    /// soon.
    pub(super) fn free(&mut self, name: &str, own: &[&str]) -> Option<String> {
        let is_taken = |names: &HashMap<_, _, _>, name: &str| names.contains_key(name) || own.contains(&name);
        if !is_taken(&self.names, name) {
            return None;
        }
        let first = self.names.get(name).copied().unwrap_or(2);
        let last = first + self.names.len() + own.len();
        // At least one number of the range is free, because the range has more numbers than there are names.
        let found = (first..=last).map(|number| (number, numbered(name, number)));
        let (number, free) = found.into_iter().find(|(_, free)| !is_taken(&self.names, free))?;
        if let Some(next) = self.names.get_mut(name) {
            *next = number; // of plans, which have one name, all get this number
        }
        #[cfg(test)]
        {
            self.looks += 1 + number - first;
        }
        Some(free)
    }
}

/// Returns a name with a number, shortened to the maximum length of a name.
fn numbered(name: &str, number: usize) -> String {
    let suffix = format!("-{number}");
    // A name is ASCII, so every index is a character boundary.
    let kept = name.len().min(NAME_MAX - suffix.len());
    format!("{}{suffix}", name.get(..kept).unwrap_or_default())
}
