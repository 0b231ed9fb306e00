//! Checks of a limiter with a remote store. The checks answer some charges themselves, send requests for the
//! others, and turn the answers into decisions. This file defines the parts of such a limiter, and makes its
//! requests.

mod corrections;
mod leasing;
mod places;
mod probe;
mod take;
mod taking;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::TryFutureExt;
use smallvec::SmallVec;
use tokio::sync::{mpsc, oneshot, watch};

use super::backend::{Answer, Backend, Intent, RemoteError};
use super::denial_cache::DenialCache;
use super::flights::Receiver;
use super::holdings::{Bid, Claim, HeldKey, Holdings};
use super::leases::Leases;
use super::set::{Indices, Pending, Set};
use super::tag::{Tag, Tags};
use super::unanswered::Unanswered;
use crate::base::sync::Mutex;
use crate::base::time::Timestamp;
use crate::clock::Clock;
use crate::event::{LimiterEvent, StoreErrorKind};
use crate::limiter::queue_refunds::QueueRefunds;
use crate::limiter::{Charge, LeftLine, PlaceLines, PolicyRegistry, Reply};
use crate::store_load::{StoreLoad, StoreLoadReader};

/// The future of an answer. The request is sent when the future is first polled, and needs no further poll.
pub(crate) type AnswerFuture<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

type CheckReply<T, B> = Reply<T, <B as Backend>::Error, AnswerFuture<T, <B as Backend>::Error>>;

/// The maximum number of charges of one set. A set of this size occupies the store for some milliseconds.
pub(crate) const CHARGES_MAX: usize = 1_000;

/// The request for the charges of a set that are in one lane.
struct LaneRequest<R> {
    lane: u16,
    request: R,
    /// The indices of its charges.
    indices: Indices,
}

type LaneRequests<B> = SmallVec<[LaneRequest<<B as Backend>::Request>; 1]>;

/// The maximum number of abandoned lines that are still to be reported to the store. The store itself forgets the
/// lines beyond this number after a while.
const LEFT_LINES: usize = 1_024;

/// The answer of a check that a probe makes, once it is there.
type ProbeAnswer<E> = watch::Receiver<Option<Result<(), E>>>;

/// The last probe. The probes of a second share one check, so clients that can reach a probe cannot cause more
/// than one check a second.
struct Probed<E> {
    /// The instant of the last check, and its answer.
    asked: Option<(Timestamp, ProbeAnswer<E>)>,
    /// The answer of the last probe that says whether the store decides.
    answer: Option<Result<(), E>>,
    /// The instant at which the store last did not decide a probe in time.
    failed_at: Option<Timestamp>,
}

impl<E> Default for Probed<E> {
    fn default() -> Self {
        Self { asked: None, answer: None, failed_at: None }
    }
}

/// The parts that the clones of a limiter share.
pub(crate) struct Checks<B: Backend> {
    backend: B,
    tags: Tags,
    denials: DenialCache,
    leases: Option<Arc<Leases>>,
    holdings: Arc<Holdings>,
    /// The requests of this process that wait in line for units.
    lines: PlaceLines,
    is_closed: AtomicBool,
    queue_refunds: QueueRefunds<Tag, oneshot::Sender<Result<(), B::Error>>>,
    registry: PolicyRegistry,
    probed: Mutex<Probed<B::Error>>,
}

impl<B: Backend> Checks<B> {
    /// Makes the checks. The checks remember at most `denials` denials, and lease at most `lease_units` units, or
    /// none if `lease_units` is 0. Held units lapse after `lapse` unless they are renewed.
    pub(crate) fn new(
        backend: B,
        denials: usize,
        lease_units: u64,
        lapse: Duration,
        clock: Arc<dyn Clock>,
    ) -> Arc<Self> {
        let (sender, left) = mpsc::channel(LEFT_LINES);
        let checks = Arc::new(Self::of(backend, denials, (lease_units, lapse), clock, sender));
        checks.start_upkeep(left);
        let shared = Arc::downgrade(&checks);
        let load = StoreLoadReader::new(move || Some(shared.upgrade()?.load()));
        checks.backend.events().offer_load(load);
        checks
    }

    fn of(
        backend: B,
        denials: usize,
        (lease_units, lapse): (u64, Duration),
        clock: Arc<dyn Clock>,
        left: mpsc::Sender<LeftLine>,
    ) -> Self {
        let tags = Tags::default();
        let leases = || Arc::new(Leases::new(lease_units, tags.clone(), Arc::clone(&clock)));
        let holdings = Holdings::new(lapse, Arc::clone(&clock));
        Self {
            backend,
            leases: (lease_units > 0).then(leases),
            denials: DenialCache::new(denials, tags.clone(), Arc::clone(&clock)),
            lines: PlaceLines::polling(clock, holdings.holder(), left),
            holdings: Arc::new(holdings),
            tags,
            is_closed: AtomicBool::new(false),
            queue_refunds: QueueRefunds::new(),
            registry: PolicyRegistry::new(),
            probed: Mutex::default(),
        }
    }

    pub(crate) fn backend(&self) -> &B {
        &self.backend
    }

    /// Returns the load of the store.
    pub(crate) fn load(&self) -> StoreLoad {
        let connections = self.backend.events().connections();
        StoreLoad { connections, ..self.backend.load() }
    }

    /// Returns whether this process takes units in advance, and so decides some charges without the store.
    pub(crate) fn has_leases(&self) -> bool {
        self.leases.is_some()
    }

    pub(crate) fn lines(&self) -> &PlaceLines {
        &self.lines
    }

    pub(crate) fn registry(&self) -> &PolicyRegistry {
        &self.registry
    }

    // Requests ────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the reason if these charges cannot be decided.
    fn refuses(&self, charges: &[Charge<'_>]) -> Option<B::Error> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Some(Unanswered::Closed.into());
        }
        if charges.len() > CHARGES_MAX {
            return Some(Unanswered::TooLarge(charges.len(), CHARGES_MAX).into());
        }
        self.backend.refuses(charges)
    }

    fn set(&self, charges: &[Charge<'_>]) -> Set {
        let pending =
            |(at, charge): (usize, &Charge<'_>)| Pending::new(at, charge, self.tags.of(charge.policy, charge.key));
        charges.iter().enumerate().map(pending).collect()
    }

    /// Makes the requests for the charges that `wanted` names, one request for each lane. `claim` returns the
    /// claim of this process for the charge at an index, if its units are held.
    fn parts(
        &self,
        intent: Intent,
        charges: &[Charge<'_>],
        wanted: impl Fn(usize) -> bool,
        mut claim: impl FnMut(usize, HeldKey) -> Claim,
    ) -> LaneRequests<B> {
        let backend = &self.backend;
        let stored: SmallVec<[_; 2]> = charges.iter().map(|charge| backend.stored(charge.policy, charge.key)).collect();
        let mut lanes: SmallVec<[(u16, Indices); 1]> = SmallVec::new();
        for (at, stored) in stored.iter().enumerate().filter(|(at, _)| wanted(*at)) {
            let lane = backend.lane(stored);
            match lanes.iter_mut().find(|(number, _)| *number == lane) {
                Some((_, indices)) => indices.push(at),
                None => lanes.push((lane, SmallVec::from_slice(&[at]))),
            }
        }
        let part = |(lane, indices): (u16, Indices)| {
            let charges = indices.iter().map(|at| {
                let (charge, stored) = (&charges[*at], &stored[*at]);
                let held = backend.held_key(charge.policy, stored);
                (charge, stored, held.map(|key| claim(*at, key)).unwrap_or_default())
            });
            LaneRequest { lane, request: backend.charge(intent, charges), indices }
        };
        lanes.into_iter().map(part).collect()
    }

    async fn ask(&self, request: B::Request) -> Result<Answer<B::Error>, B::Error> {
        self.ask_for(request, |sender: oneshot::Sender<_>| sender).await?
    }

    /// Sends a request at once, and waits for the answer.
    ///
    /// This has no `async` block, because the block's future would have room for the backend's future twice.
    fn ask_for<T: Send + 'static, R: Receiver<Answer<B::Error>, B::Error> + 'static>(
        &self,
        request: B::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R + Send,
    ) -> impl Future<Output = Result<T, B::Error>> + Send {
        self.backend.ask(request, receiver).inspect_err(|error| self.report(error))
    }

    /// Sends a request at once, and passes its answer to a function.
    fn send(
        &self,
        request: B::Request,
        then: impl FnOnce(Result<Answer<B::Error>, B::Error>) + Send + 'static,
    ) -> Result<(), B::Error> {
        self.backend.send(request, then).inspect_err(|error| self.report(error))
    }

    // Events ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reports to the observer that too many requests wait, or that a request waited too long. The backend does not
    /// see these errors.
    fn report(&self, error: &B::Error) {
        if matches!(error.kind(), StoreErrorKind::Overloaded | StoreErrorKind::Timeout) {
            self.backend.events().report_failure(error.kind(), error);
        }
    }

    /// Reports to the observer that a check has ended.
    fn report_checked(&self, duration: Duration, error: Option<&B::Error>) {
        let error = error.map(RemoteError::kind);
        self.backend.events().report(|| LimiterEvent::store_checked(duration, error));
    }

    fn report_answered_locally(&self) {
        self.backend.events().report(|| LimiterEvent::AnsweredLocally);
    }
}

/// Puts each bid into the charge at its index.
fn put_bids(set: &mut Set, bids: Vec<(usize, Box<Bid>)>) {
    bids.into_iter().for_each(|(at, bid)| set[at].bid = Some(bid));
}
