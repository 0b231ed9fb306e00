//! Why a request has no answer, if the store gave no reason.

use std::time::Duration;

use crate::event::StoreErrorKind;

/// Why a request has no answer, if the store gave no reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The caller is in no tokio runtime. The request was not sent.
    NoRuntime,
    /// This many requests wait already. The request was not sent.
    TooMany(usize),
    /// Earlier requests took longer than this deadline. The request was not sent.
    NotSent(Duration),
    /// This process had no time to read an answer within this deadline.
    TooBusy(Duration),
    /// There was no answer within this deadline.
    TimedOut(Duration),
    /// The runtime whose tasks the flights are has ended.
    RuntimeEnded,
    /// The store answered fewer requests than it was asked.
    LeftOut,
}

impl Unanswered {
    /// Returns the kind and the text of a limiter's error.
    pub(crate) fn kind_and_message(self) -> (StoreErrorKind, String) {
        match self {
            Self::NoRuntime => (
                StoreErrorKind::Misconfigured,
                "checks on a store have to be made within a tokio runtime, with its timers enabled".to_owned(),
            ),
            Self::TooMany(waiting) => (
                StoreErrorKind::Overloaded,
                format!("{waiting} checks wait for the store already: this one was not sent"),
            ),
            Self::NotSent(deadline) => (
                StoreErrorKind::Overloaded,
                format!("earlier checks took longer than {deadline:?}: this one was not sent"),
            ),
            Self::TooBusy(deadline) => (
                StoreErrorKind::Overloaded,
                format!("no answer was read within {deadline:?}: this process is too busy"),
            ),
            Self::TimedOut(deadline) => (
                StoreErrorKind::Timeout,
                format!("no answer within {deadline:?}, the wait behind earlier checks included"),
            ),
            Self::RuntimeEnded => {
                (StoreErrorKind::Unavailable, "the runtime in which the limiter was made has ended".to_owned())
            }
            Self::LeftOut => (StoreErrorKind::Foreign, "the store answered fewer checks than it was asked".to_owned()),
        }
    }
}
