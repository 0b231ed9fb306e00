//! What a check finds beside problems: names that only the program knows.

use super::problem::Problem;

/// The kind of a name that a program registers for files of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NameKind {
    /// An extractor, see [`RulesBuilder::key`](super::RulesBuilder::key).
    Key,
    /// A classifier, see [`RulesBuilder::action`](super::RulesBuilder::action).
    Action,
}

/// A name that rules use and that is not registered: what
/// [`RulesBuilder::check`](super::RulesBuilder::check) returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnregisteredName {
    pub(super) kind: NameKind,
    pub(super) name: Box<str>,
    pub(super) problem: Problem,
}

impl UnregisteredName {
    /// Returns the kind of the name.
    #[must_use]
    pub fn kind(&self) -> NameKind {
        self.kind
    }

    /// Returns the name as the rules have it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the first use of the name, as the problem that it is for a program that does not register the name.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }
}
