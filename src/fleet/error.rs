//! Errors of the operators' settings for all processes.

use crate::error::{BoxError, Source, kind_and_message};

kind_and_message! {
    /// The reason why a change was not made, or why a fleet could not be made. [`kind`](Self::kind) distinguishes
    /// the cases.
    FleetError, FleetErrorKind
}

/// The kind of a [`FleetError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FleetErrorKind {
    /// The change is not valid: this process does not know its name, or its value does not fit the kind. Nothing was
    /// changed.
    Invalid,
    /// The change does not fit the settings: the target was changed after the revision that the author had
    /// [seen](super::FleetChange::seen), no such revision exists, or there is no entry to end. Nothing was changed.
    Conflict,
    /// The change would exceed the maximum number of entries or the maximum length of the text. Nothing
    /// was changed.
    Full,
    /// The limiter has no store that can keep a text, or there is no Tokio runtime.
    Unsupported,
    /// This version of the crate cannot read the stored text. Nothing was changed.
    Foreign,
    /// The store did not answer. The change may have been made, unless the error's text says that nothing was
    /// changed. Read the settings again.
    Unavailable,
}

impl FleetError {
    /// Makes the error for a store that did not answer.
    pub(super) fn of_store(cause: BoxError) -> Self {
        let source = Some(Source::of_box(cause));
        Self { source, ..Self::new(FleetErrorKind::Unavailable, "the store did not answer") }
    }
}
