//! The error of a store, and of the limiter over it.

use crate::error::kind_and_message;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{RemoteError, Unanswered};

kind_and_message! {
    /// Why a store, or the limiter over it, did not decide. [`kind`](Self::kind) says what to do about it.
    StoreError, StoreErrorKind
}

impl StoreError {
    /// Makes the error of a store. The message says what is wrong and how to fix it.
    ///
    /// The kind is [`Unavailable`](StoreErrorKind::Unavailable) if the store cannot serve now,
    /// [`Timeout`](StoreErrorKind::Timeout) if it does not answer,
    /// [`Foreign`](StoreErrorKind::Foreign) if a value is not one that this store wrote, and
    /// [`Misconfigured`](StoreErrorKind::Misconfigured) if a person has to fix something else and nothing was changed.
    #[must_use]
    pub fn of(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self::new(kind, message)
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn with_source(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.caused_by(source)
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
