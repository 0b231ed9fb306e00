//! Errors of the operators' settings for all processes.

use std::error::Error;

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
    /// The store failed, or the change is not in force in this process yet. The error's text says whether the
    /// change was made, or that this is unknown. Read the settings again.
    Unavailable,
}

impl FleetError {
    /// Makes the error for a store that failed. If the cause is a `FleetError`, nothing was changed.
    pub(super) fn of_store(cause: BoxError) -> Self {
        let message = if cause.is::<Self>() { "nothing was changed" } else { "the store failed" };
        Self { source: Some(Source::of_box(cause)), ..Self::new(FleetErrorKind::Unavailable, message) }
    }

    /// Returns whether the store says that a swap changed nothing.
    pub(super) fn is_certain(&self) -> bool {
        self.source().is_some_and(|cause| cause.is::<Self>())
    }
}
