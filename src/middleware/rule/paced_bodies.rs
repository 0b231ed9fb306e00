//! Which bodies a rule paces. Data.

/// The bodies that a rule paces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacedBodies {
    Responses,
    Requests,
    Both,
}

impl PacedBodies {
    /// Returns whether these bodies are among those that the rule paces.
    pub(crate) fn includes(self, bodies: Self) -> bool {
        self == Self::Both || self == bodies
    }

    /// Returns these bodies and others.
    pub(super) fn and(self, bodies: Self) -> Self {
        if self == bodies { self } else { Self::Both }
    }
}
