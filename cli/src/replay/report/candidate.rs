//! A limit of a curve, and the form in which a report suggests it.

use crate::replay::curve::Point;

pub(crate) struct CurveLimit {
    pub(crate) limit: u64,
    pub(crate) quota: String,
    pub(crate) all: Point,
    pub(crate) first: Point,
    pub(crate) second: Point,
    /// The refusals of each of the clients that are refused most, at most ten.
    pub(crate) worst: Vec<u64>,
}

/// The form of a suggestion: a rule of its own, or a line of a rule.
pub(crate) enum Paste {
    /// The words of the rule's `key`.
    Rule(String),
    Candidate,
    /// A rule beside that of the policy of this name.
    Beside(String),
}

impl Paste {
    /// Returns the form of a rule that holds beside that of a policy.
    pub(super) fn beside(&self, name: &str) -> Self {
        match self {
            Self::Rule(key) => Self::Rule(key.clone()),
            Self::Candidate | Self::Beside(_) => Self::Beside(name.to_owned()),
        }
    }
}
