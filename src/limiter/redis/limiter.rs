//! The limiter: it answers some charges itself, sends requests for the others, and makes decisions
//! of the answers.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use crate::algorithm::places::HELD_MAX;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::event::LimiterEvent;
use crate::key::Key;
use crate::limiter::queue_refunds::{QueueRefunds, is_queue};
use crate::limiter::remote::{
    self, Batcher, Bid, Claim, DenialCache, HeldKey, Holdings, Landed, Leases, Pending, Places, Receiver, Return,
    Returned, Set, Tag, Tags, Unanswered, Wanted,
};
use crate::limiter::{
    Atomicity, Charge, Effect, Limiter, Place, PolicyRegistry, Refund, Reply, UnsupportedQuota, supports_wait,
};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};
use crate::time::Timestamp;

use super::dispatch::Dispatcher;
use super::error::RedisError;
use super::keys::KeySpace;
use super::keys::Stored;
use super::wire::{Answer, CHARGES_MAX, Request, Verb, nonsense, notes};
use crate::event::StoreErrorKind;

/// The result of a refund.
type Refunded = Result<(), RedisError>;

/// A future of a [`RedisLimiter`]'s answer.
///
/// A request is sent when the future is first polled, and needs no further poll. If the future of a
/// `take` is dropped before it returned its answer, the limiter refunds what was charged as soon as
/// the answer arrives. Refunds and settlements are sent at once.
pub type RedisFuture<T> = Pin<Box<dyn Future<Output = Result<T, RedisError>> + Send>>;

/// A limiter whose states are in Redis: one limit for any number of processes.
///
/// Clones are one limiter. One script call decides a request's whole set of charges, at the
/// server's time. While calls are in flight, new checks wait, and go together in the next call.
///
/// **The connection has to be trusted, or encrypted with `rediss://`.** An attacker who runs the
/// server, or can put bytes into a connection without TLS, decides the answer to every check.
/// With one deeply nested reply the attacker can also end the process: the client library reads
/// replies by recursion, and overflows its stack.
///
/// Callers' keys may be secrets, so they are stored as hashes: see `key_secret` and `readable_keys`
/// of the [builder](Self::builder).
///
/// The limiter works in the tokio runtime in which it was connected, and may be used from any
/// other. Once its own has ended, checks fail as [`Unavailable`](StoreErrorKind::Unavailable). If that
/// runtime is not driven, as a current-thread runtime outside of `block_on`, checks fail after the deadline.
#[derive(Clone)]
pub struct RedisLimiter(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) batcher: Batcher<Dispatcher>,
    pub(super) space: KeySpace,
    pub(super) tags: Tags,
    pub(super) denials: DenialCache,
    pub(super) leases: Option<Arc<Leases>>,
    pub(super) holdings: Arc<Holdings>,
    /// The limiter was closed.
    pub(super) is_closed: AtomicBool,
    pub(super) queue_refunds: QueueRefunds<Tag, oneshot::Sender<Refunded>>,
    pub(super) registry: PolicyRegistry,
    /// Whether it is a cluster, where charges of one set can be in different slots.
    pub(super) in_slots: bool,
}

impl RedisLimiter {
    /// Finds out, within this time, whether checks have the rights that they need.
    pub(super) async fn check_rights(&self, within: Duration) -> Result<(), RedisError> {
        let policy = Policy::new("rights", Quota::per_second(1));
        debug_assert!(policy.is_ok(), "the name is valid");
        let Ok(policy) = policy else { return Ok(()) };
        let key = self.0.space.key(&policy, &Key::global());
        self.0.batcher.dispatch().check_rights(&key, within).await
    }

    /// Returns how many checks wait for an answer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.batcher.len()
    }

    /// Takes `cost` units of a [concurrency limit](Quota::concurrent), and holds them until the [`Place`] is dropped. A
    /// receipt of [`take`](Limiter::take) that is dropped instead of refunded leaves its units held.
    ///
    /// ```no_run
    /// use tower_ratelimit::{Key, Policy, Quota, RedisLimiter};
    /// # async fn render() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RedisLimiter::connect("redis://127.0.0.1:6379").await?;
    /// let renders = Policy::new("renders", Quota::concurrent(4))?;
    /// match limiter.hold(&renders, &Key::of("alice").unwrap(), 1).await? {
    ///     Ok(place) => {
    ///         // Render.
    ///         drop(place);
    ///     }
    ///     Err(denied) => println!("{} of {} are free", denied.remaining(), denied.limit()),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if Redis does not decide. Returns the decision as the inner error if the units are not free.
    pub async fn hold(
        &self,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> Result<Result<Place, ChargeDecision>, RedisError> {
        let decision = self.take(&[Charge::new(policy, key).cost(cost)]).await?;
        let mut decision = decision.into_charges().next().ok_or_else(nonsense)?;
        if !decision.is_allowed() {
            return Ok(Err(decision));
        }
        let receipt = decision.take_receipt();
        Ok(Ok(Place::new(self.clone(), receipt.map(|receipt| Refund::new(policy.clone(), key.clone(), receipt)))))
    }

    /// Returns the units that this process holds of [concurrency limits](Quota::concurrent), and closes the connections
    /// that were opened for this limiter. Later checks fail.
    ///
    /// A task of the limiter's runtime returns the units, within a check's [deadline] for each 64 keys. If the runtime
    /// ends before that, they [lapse].
    ///
    /// [deadline]: crate::limiter::redis::RedisLimiterBuilder::deadline
    /// [lapse]: crate::limiter::redis::RedisLimiterBuilder::places_lapse_after
    pub fn close(&self) {
        self.0.is_closed.store(true, Ordering::Relaxed);
        let held = self.0.holdings.give_all_back();
        let store = self.0.batcher.dispatch().store.clone();
        if held.is_empty() {
            return store.close();
        }
        let inner = Arc::clone(&self.0);
        self.0.batcher.runtime().spawn(async move {
            inner.give_back_and_wait(held).await;
            store.close();
        });
    }
}

impl Inner {
    fn lane(&self, slot: u16) -> u16 {
        if self.in_slots { slot } else { 0 }
    }

    /// Makes the requests for those charges that `wanted` names: one for each lane, with the places
    /// of its charges. `claim` returns what is said of this process for the charge at a place, if its units are held.
    fn requests(
        &self,
        verb: Verb,
        charges: &[Charge<'_>],
        wanted: impl Fn(usize) -> bool,
        mut claim: impl FnMut(usize, HeldKey) -> Claim,
    ) -> Requests {
        let stored: SmallVec<[_; 2]> = charges.iter().map(|charge| self.space.key(charge.policy, charge.key)).collect();
        let mut lanes: SmallVec<[(u16, Places); 1]> = SmallVec::new();
        for (at, stored) in stored.iter().enumerate().filter(|(at, _)| wanted(*at)) {
            let lane = self.lane(stored.slot);
            match lanes.iter_mut().find(|(number, _)| *number == lane) {
                Some((_, places)) => places.push(at),
                None => lanes.push((lane, SmallVec::from_slice(&[at]))),
            }
        }
        let request = |(_, places): (u16, Places)| {
            let charges = places.iter().map(|at| {
                let (charge, stored) = (&charges[*at], &stored[*at]);
                let is_held = charge.policy.limits_in_flight();
                (charge, stored, if is_held { claim(*at, held_key(charge.policy, stored)) } else { Claim::default() })
            });
            (Request::claiming(verb, charges), places)
        };
        lanes.into_iter().map(request).collect()
    }

    async fn ask(&self, request: Request) -> Result<Answer, RedisError> {
        self.ask_for(request, |sender: oneshot::Sender<_>| sender).await?
    }

    async fn ask_for<T, R: Receiver<Answer, RedisError> + 'static>(
        &self,
        request: Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, RedisError> {
        let lane = self.lane(request.slot());
        self.batcher.ask(lane, request, receiver).await.inspect_err(|error| self.report(error))
    }

    /// Sends a request at once, and has its answer handed to a function.
    fn send(
        &self,
        request: Request,
        then: impl FnOnce(Result<Answer, RedisError>) + Send + 'static,
    ) -> Result<(), RedisError> {
        self.batcher.send(self.lane(request.slot()), request, then).inspect_err(|error| self.report(error))
    }

    /// Sends a refund or a forced charge at once, and has its answer handed to a function. If it is
    /// lost, the observer gets an event, whether or not a caller waits.
    fn correct(
        self: &Arc<Self>,
        request: Request,
        then: impl FnOnce(Result<Answer, RedisError>) + Send + 'static,
    ) -> Result<(), RedisError> {
        let (inner, charges) = (Arc::clone(self), request.keys());
        let sent = self.send(request, move |answer| {
            match &answer {
                Ok(Answer::Split(_, Some(error))) | Err(error) => inner.lost(charges, error),
                Ok(_) => {}
            }
            then(answer);
        });
        sent.inspect_err(|error| self.lost(charges, error))
    }

    /// Takes forced charges at once. The answers may be waited for.
    fn settle_now(
        self: &Arc<Self>,
        request: Request,
        mut set: Set,
    ) -> Result<impl Future<Output = Result<Set, RedisError>> + use<>, RedisError> {
        let (sender, answer) = oneshot::channel();
        set.iter_mut().filter_map(|pending| pending.bid.as_mut()).for_each(|bid| bid.record_sending());
        let inner = Arc::clone(self);
        self.correct(request, move |answer| {
            let answered = inner.put_answer(&mut set, answer).map_err(NotTaken::into_error);
            if let Err(Ok(mut set)) = sender.send(answered.map(|_| set)) {
                // The caller has gone. Nobody else can return units that are held.
                set.retain(|pending| pending.policy().limits_in_flight());
                inner.give_back(remote::undo(&mut set));
            }
        })?;
        Ok(async { answer.await.unwrap_or_else(|_| Err(Unanswered::RuntimeEnded.into())) })
    }

    /// Reports to the observer that a correction of this number of charges is lost.
    fn lost(&self, charges: usize, error: &RedisError) {
        let kind = error.kind();
        self.batcher.dispatch().store.report(|| LimiterEvent::correction_lost(charges, kind));
    }

    /// Reports to the observer that too many requests wait, or that one waited for too long. The
    /// store does not see these errors.
    fn report(&self, error: &RedisError) {
        if matches!(error.kind(), StoreErrorKind::Overloaded | StoreErrorKind::Timeout) {
            self.batcher.dispatch().store.record_failure(error);
        }
    }

    /// Reports to the observer that a check has ended.
    fn checked(&self, duration: Duration, error: Option<&RedisError>) {
        let error = error.map(RedisError::kind);
        self.batcher.dispatch().store.report(|| LimiterEvent::store_checked(duration, error));
    }

    fn answered_locally(&self) {
        self.batcher.dispatch().store.report(|| LimiterEvent::AnsweredLocally);
    }

    async fn take(self: Arc<Self>, requests: Requests, mut owed: Owed, repeats: bool) -> Result<Decision, RedisError> {
        let began = self.denials.now();
        let is_alone = requests.len() == 1;
        let answers = requests.into_iter().map(|(request, places)| {
            let owed = owed.part(&places);
            self.take_part(request, owed, Terms { sent: began, repeats, is_alone })
        });
        let answers: SmallVec<[_; 1]> = answers.collect();
        let (mut is_repeated, mut failed) = (false, None);
        for answer in join_all(answers).await {
            let taken = answer.and_then(|taken| {
                let Taken { owed: mut part, is_repeated: repeated, result } = taken;
                is_repeated |= repeated;
                owed.set.append(&mut part.set);
                result
            });
            failed = failed.or(taken.err().map(NotTaken::into_error));
        }
        let store = &self.batcher.dispatch().store;
        if is_alone && is_repeated {
            self.answered_locally();
        } else if store.is_observed() {
            self.checked(self.denials.now().saturating_since(began), failed.as_ref());
        }
        if let Some(error) = failed {
            return Err(error);
        }
        owed.set.sort_unstable_by_key(|pending| pending.at);
        Ok(owed.decide())
    }

    /// Takes charges of one lane. If a key was reset since this process held something of it, they are asked about once
    /// more.
    async fn take_part(
        self: &Arc<Self>,
        mut request: Request,
        mut owed: Owed,
        terms: Terms,
    ) -> Result<Taken, NotTaken> {
        for _ in 1..TRIES {
            let taken = self.ask_for(request, |sender| Taking { sender, owed, terms }).await?;
            if !matches!(taken.result, Err(NotTaken::Refused)) {
                return Ok(taken);
            }
            owed = taken.owed;
            request = self.request_again(&mut owed.set)?;
        }
        Ok(self.ask_for(request, |sender| Taking { sender, owed, terms }).await?)
    }

    /// Makes the request for the charges of a lane once more.
    fn request_again(self: &Arc<Self>, set: &mut Set) -> Result<Request, RedisError> {
        let mut bids = Vec::new();
        let requests = {
            let charges: SmallVec<[Charge<'_>; 2]> = set.iter().map(Pending::charge).collect();
            self.requests(Verb::Take, &charges, |_| true, |at, key| self.bid(key, &charges[at], at, &mut bids))
        };
        bids.into_iter().for_each(|(at, bid)| set[at].bid = Some(bid));
        requests.into_iter().next().map(|(request, _)| request).ok_or_else(nonsense)
    }

    /// Begins to take units that are held.
    fn bid(&self, key: HeldKey, charge: &Charge<'_>, at: usize, bids: &mut Vec<(usize, Box<Bid>)>) -> Claim {
        let is_possible = charge.effect == Effect::Force || charge.cost <= charge.policy.quota().capacity();
        let units = if is_possible { charge.cost.min(HELD_MAX) } else { 0 };
        let (claim, bid) = self.holdings.bid(key, units, self.connections());
        bids.push((at, Box::new(bid)));
        claim
    }

    fn connections(&self) -> u64 {
        self.batcher.dispatch().store.connections()
    }

    /// Puts the answer to a request with these charges into them. Returns whether Redis decided them in
    /// one step.
    ///
    /// # Errors
    /// Returns the reason why there is no answer. The set then has the receipts of the charges that
    /// were taken anyway.
    fn put_answer(self: &Arc<Self>, set: &mut Set, answer: Result<Answer, RedisError>) -> Result<bool, NotTaken> {
        if let Ok(Answer::Refused(place, row)) = answer {
            for (at, pending) in set.iter_mut().enumerate() {
                if let Some(bid) = pending.bid.take() {
                    self.record_landed(if at == place { bid.refused(row) } else { bid.land(0, false) });
                }
            }
            return Err(NotTaken::Refused);
        }
        let answered = put_decisions(set, answer);
        for pending in set.iter_mut() {
            let (Some(bid), Some(decision)) = (pending.bid.take(), &mut pending.decision) else { continue };
            let taken = decision.taken();
            // Without an answer, the outcome of the others is not known.
            if answered.is_ok() || taken > 0 {
                let is_missing = decision.receipt().at_us() & u64::from(notes::MISSING) != 0;
                let landed = bid.land(taken, is_missing);
                decision.put_receipt(Receipt::new(taken, landed.run, 0));
                self.record_landed(landed);
            }
        }
        Ok(answered?)
    }

    fn record_landed(self: &Arc<Self>, landed: Landed) {
        if let Some(surplus) = landed.surplus {
            drop(self.send_return(&surplus, |_| ())); // a loss is recorded
        }
        self.report_forgotten(landed.forgotten);
    }

    /// Reports to the observer that Redis had forgotten this number of units, which this process holds.
    fn report_forgotten(&self, units: u64) {
        if units > 0 {
            self.batcher.dispatch().store.report(|| LimiterEvent::places_forgotten(units));
        }
    }

    /// Sends units back, or renews a row, at once. Its answer is recorded, and handed to a function.
    fn send_return(
        self: &Arc<Self>,
        back: &Return,
        then: impl FnOnce(Refunded) + Send + 'static,
    ) -> Result<(), RedisError> {
        let (inner, key, request) = (Arc::clone(self), back.key.clone(), Request::give_back(back));
        let answered = move |answer: Result<Answer, RedisError>| {
            let returned = match &answer {
                Ok(Answer::Missing) => Returned::Missing,
                Ok(Answer::Refused(_, row)) => Returned::Refused(*row),
                Ok(_) => Returned::Done,
                Err(_) => Returned::Lost,
            };
            inner.report_forgotten(inner.holdings.record_return(&key, returned));
            then(done(answer));
        };
        // If it is lost, the next call for the key makes up for it. So that is no lost correction.
        self.send(request, answered).inspect_err(|_| _ = self.holdings.record_return(&back.key, Returned::Lost))
    }

    /// Sends these, a call's worth at a time, and waits for the answers.
    async fn give_back_and_wait(self: &Arc<Self>, all: Vec<Return>) {
        let mut all = all.into_iter().peekable();
        while all.peek().is_some() {
            let answers = all.by_ref().take(RENEWALS).filter_map(|back| {
                let (sender, answer) = oneshot::channel();
                self.send_return(&back, |result| drop(sender.send(result))).ok()?;
                Some(answer)
            });
            join_all(answers.collect::<Vec<_>>()).await;
        }
    }

    /// Renews and corrects the rows of what this process holds, as far as that is due.
    pub(super) async fn renew(self: &Arc<Self>) {
        let store = &self.batcher.dispatch().store;
        let mut due = self.holdings.due(self.connections()).into_iter().peekable();
        while due.peek().is_some() && !self.is_closed.load(Ordering::Relaxed) {
            let some = due.by_ref().take(RENEWALS).filter(|key| store.error_at_once(key.slot).is_none());
            let some = some.filter_map(|key| self.holdings.renew(key, self.connections()));
            self.give_back_and_wait(some.collect()).await;
        }
    }

    /// Sends the refunds of a refused or failed set. Units whose refund cannot be sent return as
    /// they drain.
    pub(super) fn give_back(self: &Arc<Self>, refunds: Vec<Refund>) {
        for refund in refunds {
            drop(self.send_refund(refund));
        }
    }

    /// Sends a refund at once, or after the earlier ones of its queue. The result may be waited for.
    fn send_refund(self: &Arc<Self>, refund: Refund) -> Result<impl Future<Output = Refunded> + use<>, RedisError> {
        let (sender, result) = oneshot::channel();
        if refund.policy.limits_in_flight() {
            self.denials.forget(self.tags.of(&refund.policy, &refund.key));
            let key = held_key(&refund.policy, &self.space.key(&refund.policy, &refund.key));
            let (run, units) = (refund.receipt.at_us(), refund.receipt.units());
            match self.holdings.give_back(key, run, units, self.connections()) {
                Some(back) => self.send_return(&back, |result| drop(sender.send(result)))?, // the caller may have gone
                None => drop(sender.send(Ok(()))),                                          // it was reset
            }
        } else if is_queue(refund.policy.quota()) {
            let tag = self.tags.queue(&refund.policy, &refund.key);
            if self.queue_refunds.add(tag, refund, sender) {
                self.send_next_refund(tag)?;
            }
        } else {
            self.correct(self.refund(&refund), |answer| drop(sender.send(done(answer))))?; // the caller may have gone
        }
        let lost = || RedisError::new(StoreErrorKind::Unavailable, "the refund was not sent");
        Ok(async move { result.await.unwrap_or_else(|_| Err(lost())) })
    }

    /// Sends the next refund of a queue. Its answer sends the one after it.
    fn send_next_refund(self: &Arc<Self>, tag: Tag) -> Result<(), RedisError> {
        let mut result = Ok(());
        while let Some((refund, callers)) = self.queue_refunds.next(tag) {
            let inner = Arc::downgrade(self);
            // The later of this loop and the answer sends the next refund. If the runtime has ended, the answer is
            // there before `correct` returns. If it sent the next refund then, this function would recurse once per refund.
            let is_later = Arc::new(AtomicBool::new(false));
            let answer_is_later = Arc::clone(&is_later);
            let sent = self.correct(self.refund(&refund), move |answer| {
                let inner = inner.upgrade();
                if let (Ok(Answer::Behind), Some(inner)) = (&answer, &inner) {
                    inner.queue_refunds.keep(tag, refund, inner.denials.now());
                }
                let refunded = done(answer);
                callers.into_iter().for_each(|caller| drop(caller.send(refunded.clone()))); // it may have gone
                if let Some(inner) = inner.filter(|_| answer_is_later.swap(true, Ordering::AcqRel)) {
                    let _ = inner.send_next_refund(tag); // the errors are reported
                }
            });
            match sent {
                Ok(()) if !is_later.swap(true, Ordering::AcqRel) => return result,
                Ok(()) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    fn refund(&self, refund: &Refund) -> Request {
        self.denials.forget(self.tags.of(&refund.policy, &refund.key));
        let stored = self.space.key(&refund.policy, &refund.key);
        Request::refund(refund, &stored)
    }

    /// Sends the request for a lease.
    fn lease(self: &Arc<Self>, leases: &Arc<Leases>, wanted: Wanted) {
        let charge = Charge::new(&wanted.policy, &wanted.key).cost(wanted.units);
        let stored = self.space.key(charge.policy, charge.key);
        let request = Request::charge(Verb::Take, [(&charge, &stored)].into_iter());
        let (inner, held) = (Arc::downgrade(self), Arc::clone(leases));
        let wanted = Arc::new(wanted);
        let asked = Arc::clone(&wanted);
        let sent = self.send(request, move |answer| {
            let answer = match answer {
                Ok(Answer::Decided(decision)) => decision.into_charges().next(),
                _ => None,
            };
            if let (Some(refund), Some(inner)) = (held.record_answer(&asked, answer), inner.upgrade()) {
                inner.give_back(vec![refund]);
            }
        });
        if sent.is_err() {
            leases.record_answer(&wanted, None);
        }
    }

    /// Returns why these charges are not decided.
    fn refuses(&self, charges: &[Charge<'_>]) -> Option<RedisError> {
        if self.is_closed.load(Ordering::Relaxed) {
            return Some(RedisError::new(StoreErrorKind::Unavailable, "this limiter was closed"));
        }
        unsupported(charges)
    }

    fn set(&self, charges: &[Charge<'_>]) -> Set {
        let pending =
            |(at, charge): (usize, &Charge<'_>)| Pending::new(at, charge, self.tags.of(charge.policy, charge.key));
        charges.iter().enumerate().map(pending).collect()
    }
}

/// The requests for a set's charges, each with the places of its charges in the set.
type Requests = SmallVec<[(Request, Places); 1]>;

/// How often charges are asked about, if the key is reset each time.
const TRIES: u32 = 3;

/// The most rows that are renewed at a time, so that checks wait for no more than one call of them.
const RENEWALS: usize = 64;

/// Puts the parts of a set together.
///
/// # Errors
/// The first error.
fn put_together(parts: Vec<Result<Set, RedisError>>) -> Result<Decision, RedisError> {
    let mut whole = Set::new();
    for part in parts {
        whole.append(&mut part?);
    }
    whole.sort_unstable_by_key(|pending| pending.at);
    Ok(remote::decide(whole).0)
}

fn held_key(policy: &Policy, stored: &Stored) -> HeldKey {
    HeldKey { bytes: stored.bytes.clone(), slot: stored.slot, policy: policy.clone() }
}

/// Why charges were not taken.
enum NotTaken {
    Failed(RedisError),
    /// A key was reset since this process held something of it, or its call was late. Nothing was taken.
    Refused,
}

impl NotTaken {
    fn into_error(self) -> RedisError {
        match self {
            Self::Failed(error) => error,
            Self::Refused => RedisError::new(
                StoreErrorKind::Unavailable,
                "the key of a concurrency limit was reset while it was asked for",
            ),
        }
    }
}

impl From<RedisError> for NotTaken {
    fn from(error: RedisError) -> Self {
        Self::Failed(error)
    }
}

/// Puts the decisions about these charges into them. Returns whether Redis decided them in one step.
fn put_decisions(set: &mut Set, answer: Result<Answer, RedisError>) -> Result<bool, RedisError> {
    let (decision, in_one_step, failed) = match answer? {
        Answer::Decided(decision) => (decision, true, None),
        Answer::Repeated(decision) => (decision, false, None),
        Answer::Split(decision, failed) => (decision, false, failed),
        Answer::Done | Answer::Behind | Answer::Elsewhere | Answer::Refused(..) | Answer::Missing => {
            return Err(nonsense());
        }
    };
    remote::fill(set, decision);
    failed.map_or(Ok(in_one_step), Err)
}

/// Takes the charges at these places out of a set. The places are in order.
fn part(set: &mut Set, places: &Places) -> Set {
    if places.len() == set.len() {
        return std::mem::take(set);
    }
    let (part, rest) = std::mem::take(set).into_iter().partition(|pending| places.binary_search(&pending.at).is_ok());
    *set = rest;
    part
}

/// The receiver of the answer about some charges of a set. It is in the flight, so whatever becomes
/// of the caller, the answer is noted.
struct Taking {
    sender: oneshot::Sender<Taken>,
    owed: Owed,
    terms: Terms,
}

/// How charges are asked about.
#[derive(Clone, Copy)]
struct Terms {
    /// When the request was sent.
    sent: Timestamp,
    /// Whether a denial of another check answers this one, too.
    repeats: bool,
    /// Whether these are all of the charges that Redis decides.
    is_alone: bool,
}

/// The answer. If the caller has gone, it is dropped, and what was taken is refunded.
struct Taken {
    owed: Owed,
    is_repeated: bool,
    result: Result<(), NotTaken>,
}

impl Receiver<Answer, RedisError> for Taking {
    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    fn known(&mut self) -> Option<Answer> {
        let denials = &self.owed.inner.denials;
        self.terms.sent = denials.now();
        let charges = self.owed.set.iter().map(|pending| (pending.watch, pending.policy()));
        let repeated = if self.terms.repeats { denials.repeat(charges, self.terms.sent) } else { None };
        if repeated.is_none() {
            let bids = self.owed.set.iter_mut().filter_map(|pending| pending.bid.as_mut());
            bids.for_each(|bid| bid.record_sending());
        }
        repeated.map(Answer::Repeated)
    }

    fn answer(self: Box<Self>, answer: Result<Answer, RedisError>) {
        let Self { sender, mut owed, terms: Terms { sent, is_alone, .. } } = *self;
        let is_repeated = matches!(answer, Ok(Answer::Repeated(_)));
        let answered = Arc::clone(&owed.inner).put_answer(&mut owed.set, answer);
        // A denial that is compensated is not remembered: another caller's charge may be refunded
        // at any moment.
        let is_noted = is_alone && matches!(answered, Ok(true));
        for pending in owed.set.iter().filter(|_| answered.is_ok()) {
            debug_assert!(pending.decision.is_some(), "a request that was answered has a decision for each charge");
            let Some(decision) = &pending.decision else { continue };
            if let Some(leases) = &owed.inner.leases {
                leases.record_remaining(pending.tag, decision);
            }
            if let Some(watch) = pending.watch.filter(|_| is_noted) {
                owed.inner.denials.note(watch, sent, decision);
            }
        }
        drop(sender.send(Taken { owed, is_repeated, result: answered.map(drop) }));
    }
}

/// A set whose requests are under way. If it is dropped before it is decided, the charges that it
/// took are refunded.
struct Owed {
    inner: Arc<Inner>,
    set: Set,
}

impl Owed {
    /// Takes out the charges at these places.
    fn part(&mut self, places: &Places) -> Self {
        Self { inner: Arc::clone(&self.inner), set: part(&mut self.set, places) }
    }

    fn decide(mut self) -> Decision {
        let (decision, refunds) = remote::decide(std::mem::take(&mut self.set));
        self.inner.give_back(refunds);
        decision
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.inner.give_back(remote::undo(&mut self.set));
    }
}

impl Limiter for RedisLimiter {
    type Error = RedisError;
    type Future<T: Send + 'static> = RedisFuture<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        let inner = &self.0;
        if let Some(error) = self.0.refuses(charges) {
            return Reply::Now(Err(error));
        }
        // All charges of a set with a charge on refusal go to Redis together, each time.
        let paired = charges.iter().any(|charge| matches!(charge.effect, Effect::OnRefusal { .. }));
        if let Some(refusal) = (!paired).then(|| inner.denials.refusal(charges)).flatten() {
            inner.answered_locally();
            return Reply::Now(Ok(refusal));
        }
        let mut owed = Owed { inner: Arc::clone(inner), set: inner.set(charges) };
        for (charge, pending) in charges.iter().zip(&mut owed.set) {
            if let Some(leases) = inner.leases.as_ref().filter(|_| !paired) {
                let (granted, wanted) = leases.take(charge);
                pending.decision = granted;
                if let Some(wanted) = wanted {
                    inner.lease(leases, wanted);
                }
            }
            if pending.decision.is_none() {
                pending.watch = inner.denials.watch(charge);
            }
        }
        let mut bids = Vec::new();
        let requests = inner.requests(
            Verb::Take,
            charges,
            |at| owed.set[at].decision.is_none(),
            |at, key| inner.bid(key, &charges[at], at, &mut bids),
        );
        bids.into_iter().for_each(|(at, bid)| owed.set[at].bid = Some(bid));
        if requests.is_empty() {
            inner.answered_locally();
            return Reply::Now(Ok(owed.decide()));
        }
        let store = &inner.batcher.dispatch().store;
        if let Some(error) = requests.iter().find_map(|(request, _)| store.error_at_once(request.slot())) {
            inner.checked(Duration::ZERO, Some(&error));
            return Reply::Now(Err(error));
        }
        let repeats = !paired && !charges.iter().any(|charge| charge.policy.quota().counts_denied());
        Reply::Later(Box::pin(Arc::clone(inner).take(requests, owed, repeats)))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        if let Some(error) = self.0.refuses(charges) {
            return Reply::Now(Err(error));
        }
        let inner = Arc::clone(&self.0);
        let mut set = inner.set(charges);
        let requests = inner.requests(Verb::Peek, charges, |_| true, |_, _| Claim::default());
        let parts: Vec<_> = requests.into_iter().map(|(request, places)| (request, part(&mut set, &places))).collect();
        Reply::Later(Box::pin(async move {
            let parts = parts.into_iter().map(async |(request, mut part)| {
                put_decisions(&mut part, inner.ask(request).await)?;
                Ok(part)
            });
            put_together(join_all(parts).await)
        }))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), RedisError, RedisFuture<()>> {
        let sent = refunds.into_iter().map(|refund| self.0.send_refund(refund));
        let answers = match all(sent) {
            Ok(answers) => answers,
            Err(error) => return Reply::Now(Err(error)),
        };
        Reply::Later(Box::pin(async move { join_all(answers).await.into_iter().collect() }))
    }

    /// Sends the charges before it returns. Forced charges do not use leases, which keep their
    /// units.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        if let Some(error) = self.0.refuses(charges) {
            return Reply::Now(Err(error));
        }
        let (mut set, mut bids) = (self.0.set(charges), Vec::new());
        let bid = |at: usize, key| self.0.bid(key, &charges[at], at, &mut bids);
        let requests = self.0.requests(Verb::Take, charges, |_| true, bid);
        bids.into_iter().for_each(|(at, bid)| set[at].bid = Some(bid));
        let sent = requests.into_iter().map(|(request, places)| self.0.settle_now(request, part(&mut set, &places)));
        let answers = match all(sent) {
            Ok(answers) => answers,
            Err(error) => return Reply::Now(Err(error)),
        };
        Reply::Later(Box::pin(async move { put_together(join_all(answers).await) }))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), RedisError, RedisFuture<()>> {
        let inner = Arc::clone(&self.0);
        let (tag, queue) = (inner.tags.of(policy, key), inner.tags.queue(policy, key));
        let request = Request::reset(policy, &inner.space.key(policy, key));
        Reply::Later(Box::pin(async move {
            if let Some(leases) = &inner.leases {
                leases.forget(tag);
            }
            let answer = inner.ask(request).await;
            inner.denials.forget(tag);
            inner.queue_refunds.forget(queue);
            done(answer)
        }))
    }

    /// Supports every quota, except a concurrency limit for which requests [wait in line](Quota::max_wait).
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supports_wait(self, quota)
    }

    /// `Atomic` on one server without leases. Otherwise `Compensated`.
    fn atomicity(&self) -> Atomicity {
        if self.0.in_slots || self.0.leases.is_some() { Atomicity::Compensated } else { Atomicity::Atomic }
    }

    fn is_overload(&self, error: &RedisError) -> bool {
        error.kind() == StoreErrorKind::Overloaded
    }

    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.0.batcher.dispatch().store.observe(observer);
    }

    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        Some(&self.0.registry)
    }
}

/// Returns why the script cannot decide a set. Only blocks and meters can be charged on refusal,
/// requests in flight are not counted, and a set has a bound.
fn unsupported(charges: &[Charge<'_>]) -> Option<RedisError> {
    let unknown = |charge: &&Charge<'_>| {
        let known = matches!(charge.policy.quota().algorithm(), Algorithm::Block | Algorithm::Meter);
        matches!(charge.effect, Effect::OnRefusal { .. }) && !known
    };
    let message = match charges.iter().find(unknown) {
        _ if charges.len() > CHARGES_MAX => {
            format!("a set of {} charges: a request to Redis has at most {CHARGES_MAX}", charges.len())
        }
        Some(charge) => format!(
            "{:?} is charged on refusal, with the quota \"{}\": in Redis that is for blocks and meters, Quota::block and \
             Quota::meter",
            charge.policy.name(),
            charge.policy.quota()
        ),
        None => return None,
    };
    Some(RedisError::new(StoreErrorKind::Misconfigured, message))
}

/// Sends each of some corrections, even if one cannot be sent.
fn all<T>(sent: impl Iterator<Item = Result<T, RedisError>>) -> Result<Vec<T>, RedisError> {
    let sent: Vec<_> = sent.collect();
    sent.into_iter().collect()
}

fn done(answer: Result<Answer, RedisError>) -> Result<(), RedisError> {
    match answer? {
        Answer::Done | Answer::Behind | Answer::Missing | Answer::Refused(..) => Ok(()),
        Answer::Decided(_) | Answer::Repeated(_) | Answer::Split(..) | Answer::Elsewhere => Err(nonsense()),
    }
}

impl fmt::Debug for RedisLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLimiter")
            .field("keys", &self.0.space)
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}
