//! A store, as the checks use it.

use std::future::Future;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::events::Events;
use super::flights::Receiver;
use super::holdings::{Claim, CurrentRow, HeldKey, Return};
use super::unanswered::Unanswered;
use crate::base::time::Timestamp;
use crate::decision::Decision;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::{Charge, Refund};
use crate::policy::Policy;
use crate::store_load::StoreLoad;

/// A store with its connections, which answers requests within the deadline.
pub(crate) trait Backend: Sized + Send + Sync + 'static {
    /// One step of the store: charges, a refund, or a reset.
    type Request: Send + 'static;
    type Error: RemoteError;
    /// A stored key.
    type Stored: Send;

    /// Returns the reason if the store cannot decide these charges.
    fn refuses(&self, charges: &[Charge<'_>]) -> Option<Self::Error>;

    /// Returns the reason if the store cannot keep states of a policy.
    fn refuses_policy(&self, _policy: &Policy) -> Option<Self::Error> {
        None
    }

    /// Returns the error if a request of this lane would fail at once, because its server is believed dead or not
    /// known.
    fn error_at_once(&self, lane: u16) -> Option<Self::Error>;

    /// Returns whether a call of this lane was answered within the deadline in the last seconds. `None` if no call was
    /// answered.
    fn answers_in_time(&self, lane: u16) -> Option<Result<(), Self::Error>>;

    fn stored(&self, policy: &Policy, key: &Key) -> Self::Stored;

    /// Returns the lane of a key. The store decides charges in one step if their keys are in one lane.
    fn lane(&self, _stored: &Self::Stored) -> u16 {
        0
    }

    /// Makes the request for charges of one lane, each with the claim of this process on units that are held.
    fn charge<'a>(
        &self,
        intent: Intent,
        charges: impl Iterator<Item = (&'a Charge<'a>, &'a Self::Stored, Claim)>,
    ) -> Self::Request;

    fn refund(&self, refund: &Refund) -> Self::Request;

    fn reset(&self, policy: &Policy, key: &Key) -> Self::Request;

    /// Returns the number of keys of a request.
    fn keys(request: &Self::Request) -> usize;

    /// Sends a request at once, and waits for the answer, no longer than the deadline. `receiver` gets the sender of
    /// the future's result, and makes the receiver of the answer.
    fn ask<T: Send + 'static, R: Receiver<Answer<Self::Error>, Self::Error> + 'static>(
        &self,
        request: Self::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R + Send,
    ) -> impl Future<Output = Result<T, Self::Error>> + Send;

    /// Sends a request at once, and passes its answer to a function.
    fn send(
        &self,
        request: Self::Request,
        then: impl FnOnce(Result<Answer<Self::Error>, Self::Error>) + Send + 'static,
    ) -> Result<(), Self::Error>;

    /// Returns how many requests wait or are in flight.
    fn waiting(&self) -> usize;

    /// Returns the load of the store, without its connections.
    fn load(&self) -> StoreLoad;

    fn events(&self) -> &Events;

    /// Returns the runtime in which the limiter works.
    fn runtime(&self) -> &Handle;

    /// Ends the connections that were opened for this limiter.
    fn close(&self) {}

    // Units that are held until they are returned ─────────────────────────────────────────────────────────────────────

    /// Returns the stored key if the units of this policy are held, and otherwise `None`.
    fn held_key(&self, policy: &Policy, stored: &Self::Stored) -> Option<HeldKey>;

    /// Makes the request that returns units, or renews the row of this process.
    fn return_units(&self, back: &Return) -> Self::Request;
}

/// The error of a limiter with a remote store.
pub(crate) trait RemoteError: std::error::Error + From<Unanswered> + Clone + Send + Sync + 'static {
    fn kind(&self) -> StoreErrorKind;
}

/// The purpose of a request for charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Intent {
    /// Take all charges or none.
    Take,
    /// Give the answer that `Take` would give, and take nothing.
    Peek,
}

/// The instant that a backend writes into a receipt of held units if the store had no row of this process. Otherwise
/// the instant is 0.
pub(crate) const ROW_MISSING: u64 = 1;

/// The answer to a request.
#[derive(Debug)]
pub(crate) enum Answer<E> {
    Decided(Decision),
    /// The set was refused without asking the store, because the store denied one of the set's charges a
    /// moment ago.
    Repeated(Decision),
    /// The set was decided key by key. If some keys failed, or the decision is a refusal, the receipts hold the
    /// units that were taken.
    Split(Decision, Option<E>),
    /// The refund or the reset is done.
    Done,
    /// The refund had no effect, because a later slot of the queue is taken.
    Behind,
    /// The keys are not all on one server. Nothing was done, and each key now gets a request of its own.
    Elsewhere,
    /// The store's time is in another window of the calendar than the request named. The value is the store's time.
    /// Nothing was done.
    Outside(Timestamp),
    /// The row of the charge at this index is of a later epoch. Nothing was done.
    Refused(usize, CurrentRow),
    /// The units were returned, or the row was renewed. There was no row before, although this process held units.
    Missing,
}
