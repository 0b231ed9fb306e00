//! Charges to requests, answers to decisions, and refunds.

use std::future::Future;
use std::hash::BuildHasher;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use foldhash::quality::RandomState;
use futures_util::future::join_all;
use tokio::sync::oneshot;

use super::Store;
use super::error::StoreError;
use super::groups::Groups;
use super::swapper::Swapper;
use super::value::{STATE_MAX, state_bytes_max};
use super::working_copy::{Answer, KeyedCharge, Request, Verb};
use crate::algorithm::Pair;
use crate::decision::Decision;
use crate::event::{LimiterEvent, StoreErrorKind};
use crate::key::Key;
use crate::limiter::queue_refunds::{QueueRefunds, is_queue};
use crate::limiter::remote::{self, CallerHash, DenialCache, Events, Pending, Receiver, Set, Tag, Tags, Unanswered};
use crate::limiter::{
    Charge, Effect, PolicyRegistry, Refund, Reply, UnsupportedQuota, UnsupportedQuotaKind, supports_rates,
};
use crate::policy::Policy;
use crate::quota::Quota;
use crate::time::Timestamp;

/// The most charges of a set.
const CHARGES_MAX: usize = 1_000;

/// A future of a [`StoreLimiter`](super::StoreLimiter)'s answer.
///
/// A request is sent when the future is first polled, and needs no further poll. If the future of a
/// `take` is dropped before it returned its answer, the limiter refunds what was charged as soon as
/// the answer arrives. Refunds and settlements are sent at once.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

type Answered = Result<Answer, StoreError>;

type Refunded = Result<(), StoreError>;

type StoreReply<T> = Reply<T, StoreError, StoreFuture<T>>;

/// The parts that the clones of a limiter share.
pub(super) struct Checks<S: Store> {
    pub(super) groups: Groups<Swapper<S>>,
    /// The prefix and the format's version.
    pub(super) before: Box<str>,
    pub(super) callers: CallerHash,
    pub(super) hash: RandomState,
    pub(super) tags: Tags,
    pub(super) denials: DenialCache,
    pub(super) queue_refunds: QueueRefunds<Tag, oneshot::Sender<Refunded>>,
    pub(super) registry: PolicyRegistry,
}

impl<S: Store> Checks<S> {
    pub(super) fn events(&self) -> &Events {
        self.groups.fly().events()
    }

    pub(super) fn take(self: &Arc<Self>, charges: &[Charge<'_>]) -> StoreReply<Decision> {
        if let Some(error) = unsupported(charges) {
            return Reply::Now(Err(error));
        }
        // Sets with a charge on refusal go to the store each time, because the refusal is what they count.
        let is_paired = charges.iter().any(|charge| matches!(charge.effect, Effect::OnRefusal { .. }));
        if let Some(refusal) = (!is_paired).then(|| self.denials.refusal(charges)).flatten() {
            self.events().report(|| LimiterEvent::AnsweredLocally);
            return Reply::Now(Ok(refusal));
        }
        if charges.is_empty() {
            return Reply::Now(Ok(Decision::new(true, [])));
        }
        if let Some(error) = self.groups.fly().error_at_once() {
            self.report_checked(Duration::ZERO, Some(&error));
            return Reply::Now(Err(error));
        }
        let mut owed = Owed { checks: Arc::clone(self), set: self.set(charges) };
        for (charge, pending) in charges.iter().zip(&mut owed.set) {
            pending.watch = self.denials.watch(charge);
        }
        let repeats = !is_paired && !charges.iter().any(|charge| charge.policy.quota().counts_denied());
        Reply::Later(Box::pin(Arc::clone(self).taken(self.request(Verb::Take, charges), owed, repeats)))
    }

    async fn taken(self: Arc<Self>, request: Request, owed: Owed<S>, repeats: bool) -> Result<Decision, StoreError> {
        let began = self.denials.now();
        let taking = |sender| Taking { sender, owed, sent: began, repeats };
        let taken = self.groups.ask(request, taking).await.inspect_err(|error| self.report(error));
        let (result, is_repeated) = match taken {
            Ok(Taken { owed, is_repeated, result }) => (result.map(|()| owed.decide()), is_repeated),
            Err(error) => (Err(error), false),
        };
        if is_repeated {
            self.events().report(|| LimiterEvent::AnsweredLocally);
        } else if self.events().is_observed() {
            self.report_checked(self.denials.now().saturating_since(began), result.as_ref().err());
        }
        result
    }

    pub(super) fn peek(self: &Arc<Self>, charges: &[Charge<'_>]) -> StoreReply<Decision> {
        if let Some(error) = unsupported(charges) {
            return Reply::Now(Err(error));
        }
        if charges.is_empty() {
            return Reply::Now(Ok(Decision::new(true, [])));
        }
        let (checks, request) = (Arc::clone(self), self.request(Verb::Peek, charges));
        Reply::Later(Box::pin(async move { decided(checks.ask(request).await?) }))
    }

    pub(super) fn refund_all(self: &Arc<Self>, refunds: Vec<Refund>) -> StoreReply<()> {
        if let Some(error) = refunds.iter().find_map(|refund| unsupported_policy(&refund.policy)) {
            return Reply::Now(Err(error));
        }
        // Each is sent, even if one cannot be sent.
        let sent: Vec<_> = refunds.into_iter().map(|refund| self.send_refund(refund)).collect();
        match sent.into_iter().collect::<Result<Vec<_>, _>>() {
            Ok(answers) => Reply::Later(Box::pin(async move { join_all(answers).await.into_iter().collect() })),
            Err(error) => Reply::Now(Err(error)),
        }
    }

    /// Sends the charges before it returns.
    pub(super) fn settle(self: &Arc<Self>, charges: &[Charge<'_>]) -> StoreReply<Decision> {
        if let Some(error) = unsupported(charges) {
            return Reply::Now(Err(error));
        }
        if charges.is_empty() {
            return Reply::Now(Ok(Decision::new(true, [])));
        }
        let (sender, answer) = oneshot::channel();
        let sent = self.correct(self.request(Verb::Take, charges), |answer| drop(sender.send(answer))); // it may have gone
        match sent {
            Ok(()) => Reply::Later(Box::pin(async move {
                decided(answer.await.unwrap_or_else(|_| Err(Unanswered::RuntimeEnded.into()))?)
            })),
            Err(error) => Reply::Now(Err(error)),
        }
    }

    pub(super) fn reset(self: &Arc<Self>, policy: &Policy, key: &Key) -> StoreReply<()> {
        if let Some(error) = unsupported_policy(policy) {
            return Reply::Now(Err(error));
        }
        let checks = Arc::clone(self);
        let (tag, queue) = (self.tags.of(policy, key), self.tags.queue(policy, key));
        let request = Request::of(Verb::Reset, [self.keyed(policy, key, 0, Effect::Enforce)]);
        Reply::Later(Box::pin(async move {
            let answer = checks.ask(request).await;
            checks.denials.forget(tag);
            checks.queue_refunds.forget(queue);
            answer.map(drop)
        }))
    }

    async fn ask(&self, request: Request) -> Answered {
        let asked = self.groups.ask(request, |sender: oneshot::Sender<Answered>| sender).await;
        asked.inspect_err(|error| self.report(error))?
    }

    /// Sends a refund or a forced charge at once, and has its answer handed to a function. If it is lost, the observer
    /// gets an event, whether or not a caller waits.
    fn correct(
        self: &Arc<Self>,
        request: Request,
        then: impl FnOnce(Answered) + Send + 'static,
    ) -> Result<(), StoreError> {
        let (checks, charges) = (Arc::clone(self), request.charges.len());
        let sent = self.groups.send(request, move |answer| {
            if let Err(error) = &answer {
                checks.report_lost(charges, error);
            }
            then(answer);
        });
        sent.inspect_err(|error| {
            self.report(error);
            self.report_lost(charges, error);
        })
    }

    /// Sends the refunds of a refused or failed set. Units whose refund cannot be sent return as they drain.
    fn give_back(self: &Arc<Self>, refunds: Vec<Refund>) {
        for refund in refunds {
            drop(self.send_refund(refund));
        }
    }

    /// Sends a refund at once, or after the earlier ones of its queue. The result may be waited for.
    fn send_refund(self: &Arc<Self>, refund: Refund) -> Result<impl Future<Output = Refunded> + use<S>, StoreError> {
        let (sender, result) = oneshot::channel();
        if is_queue(refund.policy.quota()) {
            let tag = self.tags.queue(&refund.policy, &refund.key);
            if self.queue_refunds.add(tag, refund, sender) {
                self.send_next_refund(tag)?;
            }
        } else {
            self.correct(self.refund(&refund), |answer| drop(sender.send(answer.map(drop))))?; // the caller may have gone
        }
        let lost = || StoreError::new(StoreErrorKind::Unavailable, "the refund was not sent");
        Ok(async move { result.await.unwrap_or_else(|_| Err(lost())) })
    }

    /// Sends the next refund of a queue. Its answer sends the one after it.
    fn send_next_refund(self: &Arc<Self>, tag: Tag) -> Result<(), StoreError> {
        let mut result = Ok(());
        while let Some((refund, callers)) = self.queue_refunds.next(tag) {
            let checks = Arc::downgrade(self);
            // The later of this loop and the answer sends the next refund: if the runtime has ended, the answer is there
            // before `correct` returns, and this function would recurse once per refund.
            let is_later = Arc::new(AtomicBool::new(false));
            let answer_is_later = Arc::clone(&is_later);
            let sent = self.correct(self.refund(&refund), move |answer| {
                let checks = checks.upgrade();
                if let (Ok(Answer::Behind), Some(checks)) = (&answer, &checks) {
                    checks.queue_refunds.keep(tag, refund, checks.denials.now());
                }
                let refunded = answer.map(drop);
                callers.into_iter().for_each(|caller| drop(caller.send(refunded.clone()))); // it may have gone
                if let Some(checks) = checks.filter(|_| answer_is_later.swap(true, Ordering::AcqRel)) {
                    let _ = checks.send_next_refund(tag); // the errors are reported
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

    // Requests ────────────────────────────────────────────────────────────────────────────────────────────────────────

    fn set(&self, charges: &[Charge<'_>]) -> Set {
        let pending =
            |(at, charge): (usize, &Charge<'_>)| Pending::new(at, charge, self.tags.of(charge.policy, charge.key));
        charges.iter().enumerate().map(pending).collect()
    }

    fn request(&self, verb: Verb, charges: &[Charge<'_>]) -> Request {
        let keyed = |charge: &Charge<'_>| self.keyed(charge.policy, charge.key, charge.cost, charge.effect);
        Request::of(verb, charges.iter().map(keyed))
    }

    fn refund(&self, Refund { policy, key, receipt }: &Refund) -> Request {
        self.denials.forget(self.tags.of(policy, key));
        let mut charge = self.keyed(policy, key, receipt.units(), Effect::Enforce);
        charge.own = Pair { at: receipt.at_us(), n: receipt.part() };
        Request::of(Verb::Refund, [charge])
    }

    fn keyed(&self, policy: &Policy, key: &Key, cost: u64, effect: Effect) -> KeyedCharge {
        let name = policy.stored_name();
        let mut text = String::with_capacity(self.before.len() + name.len() + 40);
        text.push_str(&self.before);
        text.extend(CallerHash::digits(self.callers.hash(key.as_bytes())).map(char::from));
        text.push(':');
        text.push_str(itoa::Buffer::new().format(name.len()));
        text.push(':');
        text.push_str(name);
        let hash = self.hash.hash_one(&*text);
        KeyedCharge { key: text.into(), hash, policy: policy.clone(), cost, effect, own: Pair { at: 0, n: 0 } }
    }

    // Events ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reports to the observer that a correction of this number of charges is lost.
    fn report_lost(&self, charges: usize, error: &StoreError) {
        let kind = error.kind();
        self.events().report(|| LimiterEvent::correction_lost(charges, kind));
    }

    /// Reports to the observer that too many requests wait, or that one waited for too long. The swapper does not see
    /// these errors.
    fn report(&self, error: &StoreError) {
        if matches!(error.kind(), StoreErrorKind::Overloaded | StoreErrorKind::Timeout) {
            self.events().report_failure(error.kind(), error);
        }
    }

    fn report_checked(&self, duration: Duration, error: Option<&StoreError>) {
        let error = error.map(StoreError::kind);
        self.events().report(|| LimiterEvent::store_checked(duration, error));
    }
}

/// The receiver of the answer about a set. It is in the flight, so whatever becomes of the caller, the answer is noted.
struct Taking<S: Store> {
    sender: oneshot::Sender<Taken<S>>,
    owed: Owed<S>,
    /// When the request was sent.
    sent: Timestamp,
    /// Whether a denial of another check answers this one, too.
    repeats: bool,
}

/// The answer. If the caller has gone, it is dropped, and what was taken is refunded.
struct Taken<S: Store> {
    owed: Owed<S>,
    is_repeated: bool,
    result: Result<(), StoreError>,
}

impl<S: Store> Receiver<Answer, StoreError> for Taking<S> {
    fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    fn known(&mut self) -> Option<Answer> {
        let denials = &self.owed.checks.denials;
        self.sent = denials.now();
        if !self.repeats {
            return None;
        }
        let charges = self.owed.set.iter().map(|pending| (pending.watch, pending.policy()));
        denials.repeat(charges, self.sent).map(Answer::Repeated)
    }

    fn answer(self: Box<Self>, answer: Answered) {
        let Self { sender, mut owed, sent, .. } = *self;
        let is_repeated = matches!(answer, Ok(Answer::Repeated(_)));
        let result = answer.and_then(decided).map(|decision| remote::fill(&mut owed.set, decision));
        for pending in owed.set.iter().filter(|_| !is_repeated) {
            if let (Some(watch), Some(decision)) = (pending.watch, &pending.decision) {
                owed.checks.denials.note(watch, sent, decision);
            }
        }
        drop(sender.send(Taken { owed, is_repeated, result }));
    }
}

/// A set that is under way. If it is dropped before it is decided, the charges that it took are refunded.
struct Owed<S: Store> {
    checks: Arc<Checks<S>>,
    set: Set,
}

impl<S: Store> Owed<S> {
    fn decide(mut self) -> Decision {
        let (decision, refunds) = remote::decide(std::mem::take(&mut self.set));
        self.checks.give_back(refunds);
        decision
    }
}

impl<S: Store> Drop for Owed<S> {
    fn drop(&mut self) {
        self.checks.give_back(remote::undo(&mut self.set));
    }
}

fn decided(answer: Answer) -> Result<Decision, StoreError> {
    match answer {
        Answer::Decided(decision) | Answer::Repeated(decision) => Ok(decision),
        Answer::Done | Answer::Behind => {
            debug_assert!(false, "charges are decided");
            Err(StoreError::new(StoreErrorKind::Foreign, "the answer is that to a refund"))
        }
    }
}

fn unsupported(charges: &[Charge<'_>]) -> Option<StoreError> {
    if charges.len() > CHARGES_MAX {
        let message = format!("a set of {} charges: use at most {CHARGES_MAX}", charges.len());
        return Some(StoreError::new(StoreErrorKind::Misconfigured, message));
    }
    charges.iter().find_map(|charge| unsupported_policy(charge.policy))
}

fn unsupported_policy(policy: &Policy) -> Option<StoreError> {
    let reason = supports(policy.quota()).err()?;
    Some(StoreError::new(StoreErrorKind::Misconfigured, format!("{:?}: {reason}", policy.name())))
}

/// Checks whether the states of a quota are kept.
pub(super) fn supports(quota: &Quota) -> Result<(), UnsupportedQuota> {
    supports_rates(quota)?;
    let bytes = state_bytes_max(quota);
    if bytes <= STATE_MAX as u64 {
        return Ok(());
    }
    let reason = format!(
        "a state can take {bytes} bytes, and a value has at most {STATE_MAX}; use Quota::sliding_window with fewer \
         buckets, a smaller limit or max_debt, or RedisLimiter"
    );
    Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, reason))
}
