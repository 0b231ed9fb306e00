//! One limit across many processes: states in Redis, decided there by the Lua twins of the [algorithms](crate::algorithm).

mod builder;
mod carrier;
mod denials;
mod error;
mod keys;
mod leases;
#[cfg(test)]
mod processes;
mod queue;
#[cfg(test)]
#[path = "../../../tests/support/redis.rs"]
mod redis_server;
mod set;
mod store;
mod tag;
mod value;
mod wire;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{Atomicity, Charge, Effect, Limiter, Refund, Reply, Roster};
use crate::decision::Decision;
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};

use carrier::Courier;
use denials::Denials;
use keys::KeySpace;
use leases::{Found, Leases, Wanted};
use queue::Queue;
use set::{Pending, Places, Set};
use tag::Tags;
use wire::{Answer, Ask};

pub use builder::RedisLimiterBuilder;
pub use error::{RedisError, RedisErrorKind};

/// The answer of a [`RedisLimiter`], under way.
///
/// Nothing is sent before it is first polled, except for refunds and leases, which are sent at once.
pub type RedisFuture<T> = Pin<Box<dyn Future<Output = Result<T, RedisError>> + Send>>;

/// A limiter whose states are in Redis: one limit for any number of processes.
///
/// Clones are the same limiter. One script call decides a request's whole set of charges, at the server's time. While
/// calls are in flight, the checks that come meanwhile go together in the next one.
///
/// **The connection has to be trusted, or encrypted with `rediss://`.** Whoever runs the server, or can put bytes into a
/// connection without TLS, decides what every check is answered. With one deeply nested reply it can also end the process:
/// fred reads replies by recursion, and overflows its stack.
///
/// Callers' keys are stored as hashes, since they may be secrets: see
/// [`key_secret`](RedisLimiterBuilder::key_secret) and [`readable_keys`](RedisLimiterBuilder::readable_keys).
///
/// It works in the tokio runtime in which it was connected: once that has ended, checks fail, as
/// [`Unavailable`](RedisErrorKind::Unavailable) or, when as many as may wait are never answered,
/// [`Overloaded`](RedisErrorKind::Overloaded).
#[derive(Clone)]
pub struct RedisLimiter(Arc<Inner>);

struct Inner {
    queue: Queue<Courier>,
    space: KeySpace,
    tags: Tags,
    denials: Denials,
    leases: Option<Arc<Leases>>,
    roster: Roster,
    /// Charges of one set may be in different slots.
    in_slots: bool,
}

impl RedisLimiter {
    /// A limiter on the server at `url`: `redis://`, `rediss://`, `redis-cluster://`, `redis-sentinel://`, with the
    /// default setup. See [`RedisLimiterBuilder::connect`].
    ///
    /// # Errors
    /// If the URL means nothing, or the server refuses what is needed. A server that is not up yet is no error.
    pub async fn connect(url: &str) -> Result<Self, RedisError> {
        Self::builder().connect(url).await
    }

    /// Sets up a limiter.
    pub fn builder() -> RedisLimiterBuilder {
        RedisLimiterBuilder::new()
    }

    /// Finds out, within this time, whether checks may do what they need to.
    async fn check_rights(&self, within: Duration) -> Result<(), RedisError> {
        let policy = Policy::new("rights", Quota::per_second(1));
        let Ok(policy) = policy else { return Ok(()) }; // the name is possible
        let key = self.0.space.key(&policy, &Key::global());
        self.0.queue.carrier().check_rights(&key, within).await
    }

    /// Checks that wait for an answer.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.0.queue.len()
    }

    /// Closes the connections that were opened for this limiter. Later checks fail.
    pub fn close(&self) {
        self.0.queue.carrier().store.close();
    }
}

impl Inner {
    fn lane(&self, slot: u16) -> u16 {
        if self.in_slots { slot } else { 0 }
    }

    /// The asks for those charges of a set that `wanted` has, one for each lane, each with where its charges are.
    fn asks(&self, charges: &[Charge<'_>], peek: bool, wanted: impl Fn(usize) -> bool) -> SmallVec<[(Ask, Places); 1]> {
        let mut lanes: SmallVec<[(u16, Places); 1]> = SmallVec::new();
        let stored: SmallVec<[_; 2]> = charges.iter().map(|charge| self.space.key(charge.policy, charge.key)).collect();
        for (index, stored) in stored.iter().enumerate().filter(|(index, _)| wanted(*index)) {
            let lane = self.lane(stored.slot);
            match lanes.iter_mut().find(|(number, _)| *number == lane) {
                Some((_, places)) => places.push(index),
                None => lanes.push((lane, SmallVec::from_slice(&[index]))),
            }
        }
        lanes
            .into_iter()
            .map(|(_, places)| {
                let charges = places.iter().map(|index| (&charges[*index], &stored[*index]));
                let ask = if peek { Ask::peek(charges) } else { Ask::take(charges) };
                (ask, places)
            })
            .collect()
    }

    async fn answer(&self, ask: Ask) -> Result<Answer, RedisError> {
        let lane = self.lane(ask.slot());
        self.queue.ask(lane, ask).await.inspect_err(|error| self.note(error))
    }

    /// Sends a request, whose answer nobody needs to wait for.
    fn send(&self, ask: Ask, then: impl FnOnce(Result<Answer, RedisError>) + Send + 'static) -> Result<(), RedisError> {
        self.queue.send(self.lane(ask.slot()), ask, then).inspect_err(|error| self.note(error))
    }

    /// Tells the observer of what did not come to the store: too many checks wait, or wait for too long.
    fn note(&self, error: &RedisError) {
        if matches!(error.kind(), RedisErrorKind::Overloaded | RedisErrorKind::Timeout) {
            self.queue.carrier().store.failed(error);
        }
    }

    /// Has the answers of several lanes at once, and says whether all was decided in one step; or the first error, and the
    /// set has what the others took.
    async fn decisions(&self, asks: SmallVec<[(Ask, Places); 1]>, set: &mut Set) -> Result<bool, RedisError> {
        if asks.len() == 1 {
            let mut atomic = true;
            for (ask, places) in asks {
                atomic = set::answer(set, places, self.answer(ask).await)?;
            }
            return Ok(atomic);
        }
        let (asks, places): (Vec<_>, Vec<_>) = asks.into_iter().unzip();
        let answers = join_all(asks.into_iter().map(|ask| self.answer(ask))).await;
        let mut failed = None;
        for (places, answer) in places.into_iter().zip(answers) {
            failed = failed.or(set::answer(set, places, answer).err());
        }
        failed.map_or(Ok(false), Err)
    }

    async fn take(self: Arc<Self>, asks: SmallVec<[(Ask, Places); 1]>, mut owed: Owed) -> Result<Decision, RedisError> {
        let sent = self.denials.now();
        // A denial that is compensated is not remembered: another caller's charge may be given back at any moment.
        let atomic = self.decisions(asks, &mut owed.set).await?;
        for pending in &owed.set {
            let Some(decision) = pending.decision() else { continue };
            if let Some(leases) = &self.leases {
                leases.told(pending.tag, decision);
            }
            if let Some(watch) = pending.watch.filter(|_| atomic) {
                self.denials.note(watch, sent, decision);
            }
        }
        Ok(owed.decide())
    }

    /// Sends what a refused or failed set took back. If it cannot be sent, it is back when it has drained.
    fn give_back(&self, refunds: Vec<Refund>) {
        for ask in self.refund_asks(refunds) {
            let _ = self.send(ask, drop);
        }
    }

    fn refund_asks(&self, refunds: Vec<Refund>) -> Vec<Ask> {
        let mut lanes: Vec<(u16, Vec<(Refund, keys::Stored)>)> = Vec::new();
        for refund in refunds {
            self.denials.forget(self.tags.of(&refund.policy, &refund.key));
            let stored = self.space.key(&refund.policy, &refund.key);
            let lane = self.lane(stored.slot);
            match lanes.iter_mut().find(|(number, refunds)| *number == lane && refunds.len() < REFUNDS) {
                Some((_, refunds)) => refunds.push((refund, stored)),
                None => lanes.push((lane, vec![(refund, stored)])),
            }
        }
        lanes.into_iter().map(|(_, refunds)| Ask::refund(refunds)).collect()
    }

    /// Asks for a lease, by the queue's task.
    fn lease(self: &Arc<Self>, leases: &Arc<Leases>, wanted: Wanted) {
        let charge = Charge::new(&wanted.policy, &wanted.key).cost(wanted.units);
        let stored = self.space.key(charge.policy, charge.key);
        let ask = Ask::take([(&charge, &stored)].into_iter());
        let (inner, held) = (Arc::downgrade(self), Arc::clone(leases));
        let wanted = Arc::new(wanted);
        let asked = Arc::clone(&wanted);
        let sent = self.send(ask, move |answer| {
            let answer = match answer {
                Ok(Answer::Decided(decision)) => decision.into_charges().next(),
                _ => None,
            };
            if let (Some(refund), Some(inner)) = (held.came(&asked, answer), inner.upgrade()) {
                inner.give_back(vec![refund]);
            }
        });
        if sent.is_err() {
            leases.came(&wanted, None);
        }
    }
}

/// A set that is being asked for. Dropped before it is decided, it gives back what it has.
struct Owed {
    inner: Arc<Inner>,
    set: Set,
}

impl Owed {
    fn decide(mut self) -> Decision {
        let (decision, refunds) = set::decide(std::mem::take(&mut self.set));
        self.inner.give_back(refunds);
        decision
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        let refunds = set::undo(&mut self.set);
        if !refunds.is_empty() {
            self.inner.give_back(refunds);
        }
    }
}

/// Refunds that go together at most.
const REFUNDS: usize = 64;

impl Limiter for RedisLimiter {
    type Error = RedisError;
    type Future<T: Send + 'static> = RedisFuture<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        let inner = &self.0;
        if let Some(error) = not_here(charges) {
            return Reply::Now(Err(error));
        }
        let paired = is_paired(charges);
        if let Some(refusal) = (!paired).then(|| inner.denials.refusal(charges)).flatten() {
            return Reply::Now(Ok(refusal));
        }
        let mut owed = Owed { inner: Arc::clone(inner), set: SmallVec::new() };
        for charge in charges {
            let (mut granted, tag) = (None, inner.tags.charge(charge));
            if let Some(leases) = inner.leases.as_ref().filter(|_| !paired) {
                let wanted = match leases.take(charge) {
                    Found::Granted(decision, wanted) => {
                        granted = Some(decision);
                        wanted
                    }
                    Found::Ask(wanted) => wanted,
                };
                if let Some(wanted) = wanted {
                    inner.lease(leases, wanted);
                }
            }
            let watch = if granted.is_none() { inner.denials.watch(charge) } else { None };
            owed.set.push(Pending::new(charge, tag, watch, granted));
        }
        let asks = inner.asks(charges, false, |index| owed.set[index].decision().is_none());
        if asks.is_empty() {
            return Reply::Now(Ok(owed.decide()));
        }
        if let Some(error) = asks.iter().find_map(|(ask, _)| inner.queue.carrier().store.trouble(ask.slot())) {
            return Reply::Now(Err(error));
        }
        Reply::Later(Box::pin(Arc::clone(inner).take(asks, owed)))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        let inner = &self.0;
        if let Some(error) = not_here(charges) {
            return Reply::Now(Err(error));
        }
        let asks = inner.asks(charges, true, |_| true);
        let mut set: Set =
            charges.iter().map(|charge| Pending::new(charge, inner.tags.charge(charge), None, None)).collect();
        if asks.is_empty() {
            return Reply::Now(Ok(set::decide(set).0));
        }
        let inner = Arc::clone(inner);
        Reply::Later(Box::pin(async move {
            inner.decisions(asks, &mut set).await?;
            Ok(set::decide(set).0)
        }))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), RedisError, RedisFuture<()>> {
        let mut answers = Vec::new();
        for ask in self.0.refund_asks(refunds) {
            let (tell, told) = oneshot::channel();
            let sent = self.0.send(ask, |answer| {
                let _ = tell.send(answer); // nobody needs to wait for it
            });
            if let Err(error) = sent {
                return Reply::Now(Err(error));
            }
            answers.push(told);
        }
        Reply::Later(Box::pin(async move {
            for told in answers {
                done(told.await.unwrap_or_else(|_| Err(wire::nonsense())))?;
            }
            Ok(())
        }))
    }

    /// Sends the charges off before it returns. Forced charges go past leases, which hold back what they have.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, RedisError, RedisFuture<Decision>> {
        let inner = &self.0;
        let mut set: Set =
            charges.iter().map(|charge| Pending::new(charge, inner.tags.charge(charge), None, None)).collect();
        let mut answers = Vec::new();
        for (ask, places) in inner.asks(charges, false, |_| true) {
            let (tell, told) = oneshot::channel();
            let sent = inner.send(ask, |answer| {
                let _ = tell.send(answer); // nobody needs to wait for it
            });
            if let Err(error) = sent {
                return Reply::Now(Err(error));
            }
            answers.push((told, places));
        }
        Reply::Later(Box::pin(async move {
            for (told, places) in answers {
                set::answer(&mut set, places, told.await.unwrap_or_else(|_| Err(wire::nonsense())))?;
            }
            Ok(set::decide(set).0)
        }))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), RedisError, RedisFuture<()>> {
        let inner = Arc::clone(&self.0);
        let tag = inner.tags.of(policy, key);
        let ask = Ask::reset(policy, &inner.space.key(policy, key));
        Reply::Later(Box::pin(async move {
            if let Some(leases) = &inner.leases {
                leases.forget(tag);
            }
            let answer = inner.answer(ask).await;
            inner.denials.forget(tag);
            done(answer)
        }))
    }

    /// `Atomic` on one server without leases. Otherwise `Compensated`.
    fn atomicity(&self) -> Atomicity {
        if self.0.in_slots || self.0.leases.is_some() { Atomicity::Compensated } else { Atomicity::Atomic }
    }

    fn roster(&self) -> Option<&Roster> {
        Some(&self.0.roster)
    }
}

/// What the scripts do not know: other quotas are charged on refusal in memory only.
fn not_here(charges: &[Charge<'_>]) -> Option<RedisError> {
    let unknown = |charge: &&Charge<'_>| {
        let known = matches!(charge.policy.quota().algorithm(), Algorithm::Block | Algorithm::Meter);
        matches!(charge.effect, Effect::OnRefusal { .. }) && !known
    };
    let charge = charges.iter().find(unknown)?;
    let message = format!(
        "{:?} is charged on refusal, with the quota \"{}\": in Redis that is for blocks and meters, Quota::block and \
         Quota::meter",
        charge.policy.name(),
        charge.policy.quota()
    );
    Some(RedisError::new(RedisErrorKind::Misconfigured, message))
}

/// Whether what the set does depends on its refusals: then each of its charges is asked for together with the others.
fn is_paired(charges: &[Charge<'_>]) -> bool {
    charges.iter().any(|charge| matches!(charge.effect, Effect::OnRefusal { .. }))
}

fn done(answer: Result<Answer, RedisError>) -> Result<(), RedisError> {
    match answer? {
        Answer::Done => Ok(()),
        Answer::Failed(error) => Err(error),
        Answer::Decided(_) | Answer::Pieced(..) | Answer::Elsewhere | Answer::Again | Answer::Refused(_) => {
            Err(wire::nonsense())
        }
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
