//! The policies that a family of headers reports.

use std::fmt;

use crate::policy::Policy;

/// The conditions that a policy has to meet to be reported by a family of headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Scope(Vec<ScopeCondition>);

/// A condition of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ScopeCondition {
    /// The policy has this name.
    Policy(String),
    /// The policy has this unit.
    Unit(String),
}

impl Scope {
    pub(super) fn add(&mut self, condition: ScopeCondition) {
        if !self.0.contains(&condition) {
            self.0.push(condition);
        }
    }

    /// Returns whether all policies are reported.
    pub(super) fn is_all(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a policy is reported.
    pub(super) fn includes(&self, policy: &Policy) -> bool {
        self.0.iter().all(|condition| condition.is_met(policy))
    }

    /// Returns for each policy whether it is reported. Returns `None` if all policies are reported.
    pub(super) fn reported(&self, policies: &[Policy]) -> Option<Box<[bool]>> {
        let reported: Box<[bool]> = policies.iter().map(|policy| self.includes(policy)).collect();
        if reported.iter().all(|is_reported| *is_reported) { None } else { Some(reported) }
    }
}

impl ScopeCondition {
    fn is_met(&self, policy: &Policy) -> bool {
        match self {
            Self::Policy(name) => policy.name() == name,
            Self::Unit(unit) => policy.unit() == unit,
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, condition) in self.0.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { " and " })?;
            match condition {
                ScopeCondition::Policy(name) => write!(f, "the name {name:?}")?,
                ScopeCondition::Unit(unit) => write!(f, "the unit {unit:?}")?,
            }
        }
        Ok(())
    }
}
