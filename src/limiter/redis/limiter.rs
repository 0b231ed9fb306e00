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

use crate::decision::Decision;
use crate::event::LimiterEvent;
use crate::key::Key;
use crate::limiter::queue_refunds::{QueueRefunds, is_queue};
use crate::limiter::remote::{
    self, Batcher, DenialCache, Leases, Pending, Places, Receiver, Set, Tag, Tags, Unanswered, Wanted,
};
use crate::limiter::{Atomicity, Charge, Effect, Limiter, PolicyRegistry, Refund, Reply, supports_rates};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};
use crate::time::Timestamp;

use super::dispatch::Dispatcher;
use super::error::RedisError;
use super::keys::KeySpace;
use super::wire::{Answer, CHARGES_MAX, Request, Verb, nonsense};
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

    /// Closes the connections that were opened for this limiter. Later checks fail.
    pub fn close(&self) {
        self.0.batcher.dispatch().store.close();
    }
}

impl Inner {
    fn lane(&self, slot: u16) -> u16 {
        if self.in_slots { slot } else { 0 }
    }

    /// Makes the requests for those charges that `wanted` names: one for each lane, with the places
    /// of its charges.
    fn requests(&self, verb: Verb, charges: &[Charge<'_>], wanted: impl Fn(usize) -> bool) -> Requests {
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
            let charges = places.iter().map(|at| (&charges[*at], &stored[*at]));
            (Request::charge(verb, charges), places)
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

    /// Corrects something at once. The answer may be waited for.
    fn correct_now(
        self: &Arc<Self>,
        request: Request,
    ) -> Result<impl Future<Output = Result<Answer, RedisError>> + use<>, RedisError> {
        let (sender, answer) = oneshot::channel();
        self.correct(request, |answer| drop(sender.send(answer)))?; // the caller may have gone
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
            self.ask_for(request, move |sender| Taking { sender, owed, sent: began, repeats, is_alone })
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
            failed = failed.or(taken.err());
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
        if is_queue(refund.policy.quota()) {
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

    fn set(&self, charges: &[Charge<'_>]) -> Set {
        let pending =
            |(at, charge): (usize, &Charge<'_>)| Pending::new(at, charge, self.tags.of(charge.policy, charge.key));
        charges.iter().enumerate().map(pending).collect()
    }
}

/// The requests for a set's charges, each with the places of its charges in the set.
type Requests = SmallVec<[(Request, Places); 1]>;

/// Puts the answers to several requests of a set in their places.
///
/// # Errors
/// The first error.
fn put_together(
    mut set: Set,
    places: Vec<Places>,
    answers: Vec<Result<Answer, RedisError>>,
) -> Result<Decision, RedisError> {
    let mut whole = Set::new();
    for (places, answer) in places.into_iter().zip(answers) {
        let mut part = part(&mut set, &places);
        put_answer(&mut part, answer)?;
        whole.append(&mut part);
    }
    whole.sort_unstable_by_key(|pending| pending.at);
    Ok(remote::decide(whole).0)
}

/// Puts the answer to a request with these charges into them. Returns whether Redis decided them in
/// one step.
///
/// # Errors
/// Returns the reason why there is no answer. The set then has the receipts of the charges that
/// were taken anyway.
fn put_answer(set: &mut Set, answer: Result<Answer, RedisError>) -> Result<bool, RedisError> {
    let (decision, in_one_step, failed) = match answer? {
        Answer::Decided(decision) => (decision, true, None),
        Answer::Repeated(decision) => (decision, false, None),
        Answer::Split(decision, failed) => (decision, false, failed),
        Answer::Done | Answer::Behind | Answer::Elsewhere => return Err(nonsense()),
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
    result: Result<(), RedisError>,
}

impl Receiver<Answer, RedisError> for Taking {
    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    fn known(&mut self) -> Option<Answer> {
        let denials = &self.owed.inner.denials;
        self.sent = denials.now();
        if !self.repeats {
            return None;
        }
        let charges = self.owed.set.iter().map(|pending| (pending.watch, pending.policy()));
        denials.repeat(charges, self.sent).map(Answer::Repeated)
    }

    fn answer(self: Box<Self>, answer: Result<Answer, RedisError>) {
        let Self { sender, mut owed, sent, is_alone, .. } = *self;
        let is_repeated = matches!(answer, Ok(Answer::Repeated(_)));
        let answered = put_answer(&mut owed.set, answer);
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
        if let Some(error) = unsupported(charges) {
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
        let requests = inner.requests(Verb::Take, charges, |at| owed.set[at].decision.is_none());
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
        if let Some(error) = unsupported(charges) {
            return Reply::Now(Err(error));
        }
        let inner = Arc::clone(&self.0);
        let set = inner.set(charges);
        let (requests, places): (Vec<_>, Vec<_>) = inner.requests(Verb::Peek, charges, |_| true).into_iter().unzip();
        Reply::Later(Box::pin(async move {
            let answers = join_all(requests.into_iter().map(|request| inner.ask(request))).await;
            put_together(set, places, answers)
        }))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), RedisError, RedisFuture<()>> {
        if let Some(error) = refunds.iter().find_map(|refund| unsupported_policy(&refund.policy)) {
            return Reply::Now(Err(error));
        }
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
        if let Some(error) = unsupported(charges) {
            return Reply::Now(Err(error));
        }
        let set = self.0.set(charges);
        let (requests, places): (Vec<_>, Vec<_>) = self.0.requests(Verb::Take, charges, |_| true).into_iter().unzip();
        let answers = match all(requests.into_iter().map(|request| self.0.correct_now(request))) {
            Ok(answers) => answers,
            Err(error) => return Reply::Now(Err(error)),
        };
        Reply::Later(Box::pin(async move { put_together(set, places, join_all(answers).await) }))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), RedisError, RedisFuture<()>> {
        if let Some(error) = unsupported_policy(policy) {
            return Reply::Now(Err(error));
        }
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
    if let Some(error) = charges.iter().find_map(|charge| unsupported_policy(charge.policy)) {
        return Some(error);
    }
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

/// Returns why the states of a policy are not kept.
fn unsupported_policy(policy: &Policy) -> Option<RedisError> {
    let reason = supports_rates(policy.quota()).err()?;
    Some(RedisError::new(StoreErrorKind::Misconfigured, format!("{:?}: {reason}", policy.name())))
}

/// Sends each of some corrections, even if one cannot be sent.
fn all<T>(sent: impl Iterator<Item = Result<T, RedisError>>) -> Result<Vec<T>, RedisError> {
    let sent: Vec<_> = sent.collect();
    sent.into_iter().collect()
}

fn done(answer: Result<Answer, RedisError>) -> Result<(), RedisError> {
    match answer? {
        Answer::Done | Answer::Behind => Ok(()),
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
