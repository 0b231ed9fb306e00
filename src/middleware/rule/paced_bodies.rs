//! The bodies that a rule paces, as data.

/// The bodies that a rule paces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PacedBodies {
    Responses,
    Requests,
    Both,
}

impl PacedBodies {
    /// The words for these bodies in files of rules.
    #[cfg(feature = "rules")]
    pub(crate) const WORDS: &[(&str, Self)] =
        &[("responses", Self::Responses), ("requests", Self::Requests), ("both", Self::Both)];

    /// Returns the word for these bodies in files of rules.
    #[cfg(feature = "rules")]
    pub(crate) fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(_, bodies)| *bodies == self).map_or("", |(word, _)| word)
    }

    /// Returns whether `bodies` are among the bodies that the rule paces.
    pub(crate) fn includes(self, bodies: Self) -> bool {
        self == Self::Both || self == bodies
    }

    /// Returns these bodies together with `bodies`.
    pub(super) fn and(self, bodies: Self) -> Self {
        if self == bodies { self } else { Self::Both }
    }
}
