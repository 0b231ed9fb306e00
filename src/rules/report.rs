//! The findings of a check beside problems: names that only the program knows, and warnings.

use super::problem::{Position, Problem};
use crate::error::labelled;

/// The findings of [`RulesBuilder::check`](super::RulesBuilder::check) about valid rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesReport {
    pub(super) unregistered: Box<[UnregisteredName]>,
    pub(super) warnings: Box<[RulesWarning]>,
}

impl RulesReport {
    /// Returns the names that the rules use and that are not registered, in the order of their first uses.
    #[must_use]
    pub fn unregistered(&self) -> &[UnregisteredName] {
        &self.unregistered
    }

    /// Returns the warnings, in the order of their positions.
    #[must_use]
    pub fn warnings(&self) -> &[RulesWarning] {
        &self.warnings
    }
}

/// A part of valid rules that is probably a mistake, or that a reader should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesWarning {
    pub(super) kind: RulesWarningKind,
    pub(super) problem: Problem,
}

impl RulesWarning {
    /// Returns the kind of the warning.
    #[must_use]
    pub fn kind(&self) -> RulesWarningKind {
        self.kind
    }

    /// Returns the warning with its position and its line, as a problem. Its message says how to fix it.
    #[must_use]
    pub fn problem(&self) -> &Problem {
        &self.problem
    }
}

/// A warning, before its line is looked up.
pub(super) struct Noticed {
    pub(super) kind: RulesWarningKind,
    pub(super) position: Position,
    pub(super) message: String,
}

labelled! {
    /// The kind of a [`RulesWarning`].
    RulesWarningKind,
    /// Returns the label.
    as_str {
        /// `enabled: false` keeps a rule from being applied. That is intended, so a tool prints it and does not fail.
        Disabled = "disabled",
        /// `allow` has every IPv4 or every IPv6 address, so the rules limit none of these clients.
        ExemptsAll = "exempts-all",
        /// The quota of a rule never refuses a request, because another rule applies to all of its requests and allows
        /// no more. It is reported only if that is certain: the quotas have the same algorithm and period, and the
        /// values of both `match` show that the other rule applies, too. In a file with very many rules not all of them
        /// are compared.
        NeverBinds = "never-binds",
        /// Every limit of the file is in shadow mode. That is intended at first, so a tool prints it and does not fail.
        ObservesOnly = "observes-only",
        /// A quota of 0 refuses each request of its rule, or `deny` has every IPv4 or every IPv6 address. That may be
        /// intended, so a tool prints it and does not fail. Plans and rules that do not enforce are not reported.
        RefusesAll = "refuses-all",
        /// The period of a quota has 30 or 365 days, which is neither a month nor a year of the calendar. Or its
        /// windows are weeks that are counted from 1970, so they begin on Thursdays. That may be intended, so a tool
        /// prints it and does not fail.
        NotCalendar = "not-calendar",
        /// No rule uses a template.
        UnusedTemplate = "unused-template",
    }
}

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

#[cfg(test)]
mod tests {
    use super::super::Rules;
    use super::{NameKind, RulesWarningKind};

    /// A tool shows all three beside each other.
    #[test]
    fn check_finds_names_and_warnings_beside_problems_too() {
        let right = "  - {name: a, quota: 5 per hour, key: tenant}\n  - {name: b, quota: 6 per hour, key: tenant}\n";
        let check = |more: &str| Rules::builder().check(format!("rules:\n{right}{more}"));
        let report = check("").expect("the rules are right");
        let names: Vec<_> = report.unregistered().iter().map(|name| (name.kind(), name.name())).collect();
        let warnings: Vec<_> = report.warnings().iter().map(|warning| warning.kind()).collect();
        assert_eq!(
            (&names[..], &warnings[..]),
            (&[(NameKind::Key, "tenant")][..], &[RulesWarningKind::NeverBinds][..])
        );
        let error = check("  - {name: c, quota: often, key: tenant}\n").expect_err("a rule is wrong");
        assert_eq!((error.unregistered(), error.warnings()), (report.unregistered(), report.warnings()));
    }
}
