//! Errors of settings for all processes.

use crate::error::{BoxError, Source, kind_and_message};

kind_and_message! {
    /// The reason why a change was not made, or why a fleet could not be made. [`kind`](Self::kind) says what to do
    /// about it.
    FleetError, FleetErrorKind
}

/// The kind of a [`FleetError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FleetErrorKind {
    /// The change cannot be made anywhere: its name is not known here, or its value does not fit. Nothing was changed.
    Invalid,
    /// Somebody else changed the same target since it was [seen](super::FleetChange::seen). Nothing was changed.
    Conflict,
    /// There would be more entries, or a longer text, than are kept. Nothing was changed.
    Full,
    /// The limiter has no store that keeps a text, or there is no tokio runtime.
    Unsupported,
    /// This version cannot read the stored text. Nothing was changed.
    Foreign,
    /// The store did not answer. Nobody knows whether the change was made. Read the settings again.
    Unavailable,
}

impl FleetError {
    /// Makes the error of a store that did not answer.
    pub(super) fn of_store(cause: BoxError) -> Self {
        let source = Some(Source::of_box(cause));
        Self { source, ..Self::new(FleetErrorKind::Unavailable, "the store did not answer") }
    }
}
