//! A limiter that answers as the test wants and records its calls.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tower_ratelimit::{
    Key, Policy, Quota, Wait,
    limiter::{Charge, ChargeDecision, Decision, Effect, Limiter, Receipt, Refund, Reply, UnsupportedQuota},
};

/// Counts units for each policy and key, up to the policy's capacity, and forgets nothing: no time
/// passes.
///
/// It is `Now` until it is set to answer later, and answers until it is set to fail. Clones are
/// the same limiter.
#[derive(Clone, Default)]
pub(crate) struct Scripted(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    used: HashMap<(String, Key), u64>,
    takes: Vec<Vec<(String, Key, u64)>>,
    refunds: Vec<(String, Key, u64)>,
    later: bool,
    failing: bool,
    overloaded: bool,
    knows_no_wait: bool,
}

#[derive(Debug)]
pub(crate) struct Trouble;

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store is away")
    }
}

impl std::error::Error for Trouble {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&Cause)
    }
}

#[derive(Debug)]
struct Cause;

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the cable is cut")
    }
}

impl std::error::Error for Cause {}

impl Scripted {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn later(self) -> Self {
        self.state().later = true;
        self
    }

    /// Makes it deny without knowing for how long.
    pub(crate) fn without_waits(self) -> Self {
        self.state().knows_no_wait = true;
        self
    }

    pub(crate) fn fail(&self, failing: bool) {
        self.state().failing = failing;
    }

    /// Makes it fail because it is overloaded.
    pub(crate) fn overload(&self) {
        let mut state = self.state();
        (state.failing, state.overloaded) = (true, true);
    }

    /// Returns the policy names, keys and costs of each call.
    pub(crate) fn takes(&self) -> Vec<Vec<(String, Key, u64)>> {
        self.state().takes.clone()
    }

    /// Returns the refunded units with their policies' names and keys.
    pub(crate) fn refunds(&self) -> Vec<(String, Key, u64)> {
        self.state().refunds.clone()
    }

    /// Returns the units that were charged and not refunded.
    pub(crate) fn used(&self) -> u64 {
        self.state().used.values().sum()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panics with the lock held")
    }

    fn decide(&self, charges: &[Charge<'_>]) -> Result<Decision, Trouble> {
        let mut state = self.state();
        state.takes.push(charges.iter().map(|c| (c.policy.name().to_owned(), c.key.clone(), c.cost)).collect());
        if state.failing {
            return Err(Trouble);
        }
        let left = |charge: &Charge<'_>, state: &State| {
            let used = state.used.get(&(charge.policy.name().to_owned(), charge.key.clone())).copied().unwrap_or(0);
            charge.policy.quota().capacity().saturating_sub(used)
        };
        let forced = |charge: &Charge<'_>| charge.effect == Effect::Force;
        let binds = |charge: &Charge<'_>| charge.effect == Effect::Enforce;
        let allowed = charges.iter().all(|charge| charge.cost <= left(charge, &state) || !binds(charge));
        let mut answers = Vec::new();
        for charge in charges {
            let capacity = charge.policy.quota().capacity();
            let before = left(charge, &state);
            if charge.cost > before && !forced(charge) {
                let wait = match charge.cost {
                    cost if cost > capacity => Wait::Never,
                    _ if state.knows_no_wait => Wait::Unknown,
                    _ => Wait::After(Duration::from_secs(3)),
                };
                answers.push(ChargeDecision::denied(capacity, before, wait));
            } else if allowed {
                *state.used.entry((charge.policy.name().to_owned(), charge.key.clone())).or_default() += charge.cost;
                let receipt = Receipt::new(charge.cost, 0, 0);
                answers
                    .push(ChargeDecision::allowed(capacity, before.saturating_sub(charge.cost)).with_receipt(receipt));
            } else {
                answers.push(ChargeDecision::allowed(capacity, before));
            }
        }
        Ok(Decision::new(allowed, answers))
    }
}

impl Limiter for Scripted {
    type Error = Trouble;
    type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = Result<T, Trouble>> + Send>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        let later = self.state().later;
        if later {
            // The contract of `Limiter`: a future that was never polled charges nothing.
            let this = self.clone();
            let owned: Vec<_> = charges.iter().map(|c| (c.policy.clone(), c.key.clone(), c.cost, c.effect)).collect();
            return Reply::Later(Box::pin(async move {
                tokio::task::yield_now().await;
                let charges: Vec<_> =
                    owned.iter().map(|(p, k, cost, effect)| Charge::new(p, k).cost(*cost).effect(*effect)).collect();
                this.decide(&charges)
            }));
        }
        Reply::Now(self.decide(charges))
    }

    fn peek(&self, _: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(Err(Trouble))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Trouble, Self::Future<()>> {
        let mut state = self.state();
        for refund in refunds {
            let name = refund.policy.name().to_owned();
            if let Some(used) = state.used.get_mut(&(name.clone(), refund.key.clone())) {
                *used = used.saturating_sub(refund.receipt.units());
            }
            state.refunds.push((name, refund.key, refund.receipt.units()));
        }
        Reply::Now(if state.failing { Err(Trouble) } else { Ok(()) })
    }

    /// Like a remote limiter: sent before it is polled.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(self.decide(charges))
    }

    fn reset(&self, _: &Policy, _: &Key) -> Reply<(), Trouble, Self::Future<()>> {
        Reply::Now(Ok(()))
    }

    /// It counts until it is refunded, so it can count what requests hold.
    fn supports(&self, _: &Quota) -> Result<(), UnsupportedQuota> {
        Ok(())
    }

    fn is_overload(&self, _: &Trouble) -> bool {
        self.state().overloaded
    }
}

/// A limiter that breaks its contract: it answers at once, with the given decision and number of
/// charges.
#[derive(Clone)]
pub(crate) struct Broken(pub(crate) bool, pub(crate) usize);

impl Limiter for Broken {
    type Error = Trouble;
    type Future<T: Send + 'static> = Ready<Result<T, Trouble>>;

    fn take(&self, _: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(Ok(Decision::new(self.0, (0..self.1).map(|_| ChargeDecision::denied(0, 0, Wait::Never)))))
    }

    fn peek(&self, _: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Later(ready(Err(Trouble)))
    }

    fn refund(&self, _: Vec<Refund>) -> Reply<(), Trouble, Self::Future<()>> {
        Reply::Now(Ok(()))
    }

    fn reset(&self, _: &Policy, _: &Key) -> Reply<(), Trouble, Self::Future<()>> {
        Reply::Now(Ok(()))
    }
}
