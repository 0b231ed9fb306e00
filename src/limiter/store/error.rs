//! The error of a store, and of the limiter over it.

use crate::error::kind_and_message;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{RemoteError, Unanswered, while_down};

kind_and_message! {
    /// The reason why a store, or the limiter over it, did not decide. [`kind`](Self::kind) says what to do about the
    /// error.
    ///
    /// A store returns an error of one of these kinds:
    ///
    /// * [`Unavailable`](StoreErrorKind::Unavailable) if the connection was cut or the store cannot serve now.
    /// * [`Timeout`](StoreErrorKind::Timeout) if the store does not answer.
    /// * [`Contended`](StoreErrorKind::Contended) if other callers held the key for too long and nothing was changed.
    /// * [`Foreign`](StoreErrorKind::Foreign) if the store did not write a value that it found.
    /// * [`Misconfigured`](StoreErrorKind::Misconfigured) if no other kind fits: a person has to fix something,
    ///   and nothing was changed.
    StoreError, StoreErrorKind, pub
}

impl StoreError {
    /// Adds the error that caused this error.
    #[must_use]
    pub fn with_source(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.caused_by(source)
    }

    /// Returns the error of a check that is not sent because the store is down for the reason in this error.
    pub(super) fn while_down(&self) -> Self {
        let message = while_down(&self.message).into();
        Self { kind: StoreErrorKind::Unavailable, message, source: self.source.clone() }
    }
}

impl From<Unanswered> for StoreError {
    fn from(why: Unanswered) -> Self {
        let (kind, message) = why.kind_and_message();
        Self::new(kind, message)
    }
}

impl RemoteError for StoreError {
    fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}
