//! The findings of a check other than problems: unregistered names, and warnings.

use super::problem::{Position, Problem};
use crate::error::labelled;

/// The findings of [`RulesBuilder::check`](super::RulesBuilder::check) about valid rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesReport {
    pub(super) unregistered: Box<[UnregisteredName]>,
    pub(super) warnings: Box<[RulesWarning]>,
}

impl RulesReport {
    /// Returns the unregistered names that the rules use, in the order of their first uses.
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

/// A warning about valid rules: a probable mistake, or a fact that the user should know.
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

    /// Returns the warning with its position and its line, as a problem. The problem's message says how to fix it.
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
        /// A rule is not applied, because it has `enabled: false`. A disabled rule is intended, so a tool should print
        /// the warning but not fail.
        Disabled = "disabled",
        /// `allow` has every IPv4 or every IPv6 address, so the rules limit none of these clients.
        ExemptsAll = "exempts-all",
        /// The quota of a rule never refuses a request, because another rule applies to all of its requests and allows
        /// no more. The warning is given only if it is certain to be true: the quotas have the same algorithm and
        /// period, and the `match` of each rule shows that the other rule also applies. In a file with very many rules
        /// not all rules are compared.
        NeverBinds = "never-binds",
        /// The list of rules is empty, or a file in Envoy's form has no limit. This may be intended, so a tool should
        /// print the warning but not fail.
        NoRules = "no-rules",
        /// Every limit of the file is in shadow mode. New rules are often only in shadow mode, so a tool should print
        /// the warning but not fail.
        ObservesOnly = "observes-only",
        /// A quota of 0 refuses each request of its rule or plan, or `deny` has every IPv4 or every IPv6 address. A
        /// quota of 0 or a complete `deny` may be intended, so a tool should print the warning but not fail. Rules in
        /// another mode than `enforce` are not reported.
        RefusesAll = "refuses-all",
        /// The period of a quota has 30 or 365 days, which is neither a month nor a year of the calendar. The warning
        /// is also given for windows of a week that are counted from 1970, because they begin on Thursdays. The quota
        /// may be intended, so a tool should print the warning but not fail.
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

/// An unregistered name that rules use. [`RulesBuilder::check`](super::RulesBuilder::check) returns
/// such names.
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

    /// Returns the name as the rules write it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the first use of the name as a problem. A program that does not register the name gets the returned
    /// problem.
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
