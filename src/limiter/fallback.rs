//! A limiter that asks a second limiter while the first fails.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;

use smallvec::SmallVec;

use super::observers::Observers;
use super::{
    Arrival, Atomicity, Charge, Effect, Limiter, LimiterHooks, Occupancy, PlaceLines, PolicyRegistry, Refund, Reply,
    SharedText, StoreLoad, UnsupportedQuota, UnsupportedQuotaKind,
};
use crate::clock::Clock;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::error::WithSources;
use crate::event::LimiterEvent;
use crate::key::Key;
use crate::limiter::reply::BoxFuture;
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

/// Asks a first limiter, and a second one when the first fails: for example Redis, and memory while
/// Redis is away.
///
/// The second limiter is asked with every quota divided by the number of processes
/// ([`Quota::share`](crate::quota::Quota::share)), because each process then counts for itself. While the
/// first limiter is away, all processes together keep the bound of the quota's
/// [algorithm](crate::guide::choosing_an_algorithm), but each process admits at least one unit. This bound does not
/// include the units that the first limiter admitted before it failed.
///
/// The second limiter is also asked when a burst [overloads](Limiter::is_overload) the first. In such a burst,
/// requests may take the second limiter's share of each quota in addition to the units that the first limiter admits.
///
/// When the first limiter is back, it does not learn what the second limiter admitted. The first limiter also does
/// not learn the strikes of blocks and the units of meters that each process counted in its second limiter.
///
/// With this limiter, no request [waits in line](Quota::max_wait) for units of a concurrency limit. Units come free
/// in the limiter from which they were taken, so each line would have to be in both limiters at once. A layer reports
/// a quota with a wait in line as the setup warning `unsupported-quota`, and treats each request under that quota as
/// if the limiter had failed.
///
/// ```
/// use std::num::NonZeroU32;
/// use tower_ratelimit::{limiter::FallbackLimiter, MemoryLimiter};
/// # fn with(first: impl tower_ratelimit::limiter::Limiter + Clone) {
/// let four = NonZeroU32::new(4).unwrap();
/// let limiter = FallbackLimiter::new(first, MemoryLimiter::new(), four);
/// # }
/// ```
#[derive(Clone)]
pub struct FallbackLimiter<P, S> {
    first: P,
    second: Second<S>,
}

/// The limiter that is asked if the first fails, and the observers of the first limiter's failures.
#[derive(Clone)]
struct Second<S> {
    limiter: S,
    processes: NonZeroU32,
    observers: Arc<Observers>,
}

/// A charge that owns its policy and key.
struct OwnedCharge {
    policy: Policy,
    key: Key,
    cost: u64,
    effect: Effect,
    arrival: Arrival,
}

type BoxAnswer<T, E> = BoxFuture<'static, Result<T, E>>;

impl<P: Limiter, S: Limiter + Clone + 'static> FallbackLimiter<P, S> {
    /// Makes a limiter that asks `second` when `first` fails. `processes` is the number of
    /// processes that share the quotas.
    #[must_use]
    pub fn new(first: P, second: S, processes: NonZeroU32) -> Self {
        Self { first, second: Second { limiter: second, processes, observers: Arc::default() } }
    }

    /// Adds an observer. The observer gets a [`FellBack`](LimiterEvent::FellBack) for each request that the second
    /// limiter decides in place of the first, and a [`Failed`](LimiterEvent::Failed) for each failed call of another
    /// kind to the first limiter: a peek, a settlement, a refund or a reset. The observers of
    /// [layers](crate::RateLimitLayer::observer) get these events anyway.
    #[must_use]
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        self.second.observers.add(&(Arc::new(observer) as Arc<dyn Observer>));
        self
    }

    /// Returns the limiter that is asked first.
    #[must_use]
    pub fn first(&self) -> &P {
        &self.first
    }

    /// Returns the limiter that is asked when the first fails.
    #[must_use]
    pub fn second(&self) -> &S {
        &self.second.limiter
    }

    fn ask(
        &self,
        charges: &[Charge<'_>],
        operation: LimiterCall,
    ) -> Reply<Decision, S::Error, BoxAnswer<Decision, S::Error>> {
        match operation.ask(&self.first, charges) {
            Reply::Now(Ok(decision)) => Reply::Now(Ok(noted(decision, false))),
            Reply::Now(Err(error)) => self.second.fall_back(charges, operation, &error),
            Reply::Later(answer) => {
                let charges: SmallVec<[OwnedCharge; 2]> = charges.iter().map(OwnedCharge::of).collect();
                let second = self.second.clone();
                Reply::Later(Box::pin(async move {
                    let error = match answer.await {
                        Ok(decision) => return Ok(noted(decision, false)),
                        Err(error) => error,
                    };
                    let reply = {
                        let charges: SmallVec<[Charge<'_>; 2]> = charges.iter().map(OwnedCharge::borrow).collect();
                        second.fall_back(&charges, operation, &error)
                    };
                    reply.await
                }))
            }
        }
    }
}

#[derive(Clone, Copy)]
enum LimiterCall {
    Take,
    Peek,
    Settle,
}

impl LimiterCall {
    fn ask<L: Limiter>(self, limiter: &L, charges: &[Charge<'_>]) -> Reply<Decision, L::Error, L::Future<Decision>> {
        match self {
            Self::Take => limiter.take(charges),
            Self::Peek => limiter.peek(charges),
            Self::Settle => limiter.settle(charges),
        }
    }
}

impl<S: Limiter> Second<S> {
    fn fall_back(
        &self,
        charges: &[Charge<'_>],
        operation: LimiterCall,
        error: &dyn std::error::Error,
    ) -> Reply<Decision, S::Error, BoxAnswer<Decision, S::Error>> {
        match operation {
            LimiterCall::Take => self.report(|| LimiterEvent::fell_back(WithSources(&error).to_string())),
            LimiterCall::Peek | LimiterCall::Settle => self.first_failed(error),
        }
        let policies: SmallVec<[Policy; 4]> = charges.iter().map(|charge| self.share(charge.policy)).collect();
        let charges: SmallVec<[Charge<'_>; 4]> =
            charges.iter().zip(&policies).map(|(charge, policy)| Charge { policy, ..*charge }).collect();
        match operation.ask(&self.limiter, &charges) {
            Reply::Now(answer) => Reply::Now(answer.map(|decision| noted(decision, true))),
            Reply::Later(answer) => {
                Reply::Later(Box::pin(async move { answer.await.map(|decision| noted(decision, true)) }))
            }
        }
    }

    /// Reports that the first limiter failed in a call that does not decide a request.
    fn first_failed(&self, error: &dyn std::error::Error) {
        self.report(|| LimiterEvent::failed(WithSources(&error).to_string()));
    }

    fn report(&self, event: impl FnOnce() -> LimiterEvent) {
        if !self.observers.is_empty() {
            self.observers.report(&event());
        }
    }

    /// Returns the policy with this process' share of the quota.
    fn share(&self, policy: &Policy) -> Policy {
        policy.with_quota(policy.quota().share(self.processes))
    }
}

impl OwnedCharge {
    fn of(charge: &Charge<'_>) -> Self {
        let Charge { policy, key, cost, effect, arrival } = *charge;
        Self { policy: policy.clone(), key: key.clone(), cost, effect, arrival }
    }

    fn borrow(&self) -> Charge<'_> {
        Charge { policy: &self.policy, key: &self.key, cost: self.cost, effect: self.effect, arrival: self.arrival }
    }
}

/// Notes in each receipt which of the two limiters made it.
fn noted(mut decision: Decision, second: bool) -> Decision {
    decision.charges_mut().iter_mut().for_each(|charge| note(charge, second));
    decision
}

fn note(charge: &mut ChargeDecision, second: bool) {
    if let Some(receipt) = charge.take_receipt() {
        charge.put_receipt(receipt.noted(second));
    }
}

#[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
impl<P: Limiter, S: Limiter + Clone + 'static> Limiter for FallbackLimiter<P, S> {
    /// The error of the second limiter. Errors of the first limiter go to the observers.
    type Error = S::Error;
    type Future<T: Send + 'static> = BoxAnswer<T, S::Error>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, S::Error, BoxAnswer<Decision, S::Error>> {
        self.ask(charges, LimiterCall::Take)
    }

    /// Uses the first limiter's shortcut, if it has one and can answer.
    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        let mut answer = self.first.try_take_one(policy, key, cost)?;
        note(&mut answer, false);
        Some(answer)
    }

    /// Uses the shortcut of the limiter that the receipt came from, if that limiter has one.
    fn try_refund_one(&self, policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), Receipt> {
        let (receipt, second) = receipt.unnoted();
        let refunded = match second {
            true => self.second.limiter.try_refund_one(&self.second.share(policy), key, receipt),
            false => self.first.try_refund_one(policy, key, receipt),
        };
        refunded.map_err(|receipt| receipt.noted(second))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, S::Error, BoxAnswer<Decision, S::Error>> {
        self.ask(charges, LimiterCall::Peek)
    }

    /// Asks the second limiter if the first fails: at once if the error is known at once, and otherwise when
    /// the future is polled.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, S::Error, BoxAnswer<Decision, S::Error>> {
        self.ask(charges, LimiterCall::Settle)
    }

    /// Sends each receipt to the limiter that made it. A refund that fails in the first limiter is reported to the
    /// observers as [`Failed`](LimiterEvent::Failed).
    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), S::Error, BoxAnswer<(), S::Error>> {
        let (mut to_first, mut to_second) = (Vec::new(), Vec::new());
        for refund in refunds {
            let (receipt, second) = refund.receipt.unnoted();
            if second {
                to_second.push(Refund { policy: self.second.share(&refund.policy), receipt, ..refund });
            } else {
                to_first.push(Refund { receipt, ..refund });
            }
        }
        let first = (!to_first.is_empty()).then(|| self.first.refund(to_first));
        let second = (!to_second.is_empty()).then(|| self.second.limiter.refund(to_second));
        self.both(first, second.unwrap_or(Reply::Now(Ok(()))))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), S::Error, BoxAnswer<(), S::Error>> {
        self.both(Some(self.first.reset(policy, key)), self.second.limiter.reset(&self.second.share(policy), key))
    }

    /// Asks the second limiter if the first cannot decide.
    fn probe(&self) -> Reply<(), S::Error, BoxAnswer<(), S::Error>> {
        let of_second = |reply| -> Reply<(), S::Error, BoxAnswer<(), S::Error>> {
            match reply {
                Reply::Now(answer) => Reply::Now(answer),
                Reply::Later(answer) => Reply::Later(Box::pin(answer)),
            }
        };
        match self.first.probe() {
            Reply::Now(Ok(())) => Reply::Now(Ok(())),
            Reply::Now(Err(_)) => of_second(self.second.limiter.probe()),
            Reply::Later(first) => {
                let second = self.second.limiter.clone();
                Reply::Later(Box::pin(async move {
                    match first.await {
                        Ok(()) => Ok(()),
                        Err(_) => of_second(second.probe()).await,
                    }
                }))
            }
        }
    }

    /// Checks that both limiters support the quota, the second one with this process' share of the quota.
    /// Supports no concurrency limit for which requests [wait in line](Quota::max_wait).
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        if !quota.wait_in_line().is_zero() {
            let reason = "no request can wait in line with a FallbackLimiter, because units are returned to the \
                          limiter that they were taken from; leave the wait out, or use MemoryLimiter or RedisLimiter \
                          without a fallback";
            return Err(UnsupportedQuota::new(UnsupportedQuotaKind::Option, quota, reason));
        }
        self.first.supports(quota)?;
        self.second.limiter.supports(&quota.share(self.second.processes))
    }

    fn is_overload(&self, error: &S::Error) -> bool {
        self.second.limiter.is_overload(error)
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self
    }
}

#[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
impl<P: Limiter, S: Limiter + Clone + 'static> LimiterHooks for FallbackLimiter<P, S> {
    fn atomicity(&self) -> Atomicity {
        match (self.first.hooks().atomicity(), self.second.limiter.hooks().atomicity()) {
            (Atomicity::Atomic, Atomicity::Atomic) => Atomicity::Atomic,
            _ => Atomicity::Compensated,
        }
    }

    /// Keeps the observer, and gives it to both limiters.
    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.second.observers.add(observer);
        self.first.hooks().observe(observer);
        self.second.limiter.hooks().observe(observer);
    }

    /// Returns the first limiter's occupancy, or the second limiter's if the first has none.
    fn occupancy(&self) -> Option<Occupancy> {
        self.first.hooks().occupancy().or_else(|| self.second.limiter.hooks().occupancy())
    }

    /// Returns the load of the first limiter's store, combined with the load of the second limiter's store if both
    /// limiters have a store.
    fn store_load(&self) -> Option<StoreLoad> {
        let loads = [self.first.hooks().store_load(), self.second.limiter.hooks().store_load()];
        loads.into_iter().flatten().reduce(StoreLoad::with)
    }

    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        self.first.hooks().policy_registry().or_else(|| self.second.limiter.hooks().policy_registry())
    }

    /// Returns the shared text of the first limiter's store, or of the second limiter's if the first has
    /// none.
    fn shared_text(&self) -> Option<Arc<dyn SharedText>> {
        self.first.hooks().shared_text().or_else(|| self.second.limiter.hooks().shared_text())
    }

    /// Returns the first limiter's clock, because that limiter usually decides.
    fn clock(&self) -> Option<Arc<dyn Clock>> {
        self.first.hooks().clock()
    }

    /// Returns `None`, because no request can wait in line: while the first limiter fails, units come free in
    /// the second one.
    fn place_lines(&self) -> Option<&PlaceLines> {
        None
    }
}

impl<P: Limiter, S: Limiter + Clone + 'static> FallbackLimiter<P, S> {
    /// Waits for both answers. An error of the first limiter is only reported to the observers. An error that
    /// is known at once is reported at once, because the caller may drop the reply.
    fn both(
        &self,
        first: Option<Reply<(), P::Error, P::Future<()>>>,
        second: Reply<(), S::Error, S::Future<()>>,
    ) -> Reply<(), S::Error, BoxAnswer<(), S::Error>> {
        let first = match first {
            Some(Reply::Later(first)) => Some(first),
            Some(Reply::Now(answer)) => {
                let _ = answer.inspect_err(|error| self.second.first_failed(error));
                None
            }
            None => None,
        };
        let second = match second {
            Reply::Now(answer) if first.is_none() => return Reply::Now(answer),
            second => second,
        };
        let of_second = self.second.clone();
        Reply::Later(Box::pin(async move {
            if let Some(first) = first {
                let _ = first.await.inspect_err(|error| of_second.first_failed(error));
            }
            second.await
        }))
    }
}

impl<P: fmt::Debug, S: fmt::Debug> fmt::Debug for FallbackLimiter<P, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FallbackLimiter")
            .field("first", &self.first)
            .field("second", &self.second.limiter)
            .field("processes", &self.second.processes)
            .finish_non_exhaustive()
    }
}
