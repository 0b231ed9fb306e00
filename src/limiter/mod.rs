//! The seam between the middleware and what keeps the states: the [`Limiter`] trait and its contract.

mod boxed;
mod by_hand;
mod fallback;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
mod reply;
mod roster;
mod shared;
mod support;

use std::future::Future;

use crate::algorithm::How;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

pub use boxed::{BoxLimiter, LimiterError};
pub use by_hand::{Blocks, Meters};
pub use fallback::FallbackLimiter;
pub use reply::{Reply, ReplyFuture};
pub use roster::Roster;
pub(crate) use roster::{Contradiction, Entered};
pub use support::{UnsupportedQuota, UnsupportedQuotaKind};

/// What keeps the states of keys and decides about charges: `MemoryLimiter`, or a type of your own.
///
/// # Contract
///
/// * **Sharing.** A clone is the same limiter: it never makes a second allowance.
/// * **All or nothing.** [`take`](Self::take) takes all its charges or none. The decision is allowed when every
///   [enforced](Effect::Enforce) charge is. [`Atomicity`] says how strictly: `Atomic`, and no caller ever sees a charge that
///   is later given back; `Compensated`, and another caller may meanwhile be refused early, but is never admitted over.
/// * **A denied set changes nothing**, except for quotas that [count denied](crate::Quota::count_denied) ones, and for
///   charges [on refusal](Effect::OnRefusal), which are written in the same step, or where it is `Compensated` right after
///   it. Of each charge that its own quota allows it tells how that quota stands, with nothing taken.
/// * **The answer** has one [`ChargeDecision`] for each charge, in their order, and a receipt for
///   each that took something. Charges of one set are for different (policy, key) pairs: the caller sums equal ones, and
///   a limiter may answer anything to a set that breaks this, but must not panic or hang.
/// * **Cost 0** looks: it takes nothing, and is allowed unless a [block](crate::Quota::block) is in the way.
/// * **Unsupported quotas.** [`supports`](Self::supports) says which quotas a limiter can keep. A charge for another quota,
///   or with an effect that the limiter does not know, is its error; it is never ignored.
/// * **Errors** are the limiter's own trouble (a store that is away), never a refusal. The middleware's
///   [`OnError`](crate::OnError) says what becomes of the request.
/// * **Now or later.** A limiter that knows the answer returns [`Reply::Now`], and no future is made; a remote one encodes
///   the charges before it returns [`Reply::Later`], since they are borrowed for the call only.
/// * **Cancel safety.** A future of `take` that is dropped leaves at most its own charges behind. One that was never polled
///   should leave nothing.
/// * Nothing a caller does panics, hangs, or grows memory without bound.
///
/// The suite in `tower_ratelimit::conformance` (feature `conformance`) checks an implementation against all of this.
///
/// `examples/custom_limiter.rs` implements one from nothing.
pub trait Limiter: Send + Sync + 'static {
    /// The limiter's own trouble. [`Infallible`](std::convert::Infallible) if it has none.
    type Error: std::error::Error + Send + Sync + 'static;

    /// An answer that comes later: [`std::future::Ready`] if none does.
    type Future<T: Send + 'static>: Future<Output = Result<T, Self::Error>> + Send + 'static;

    /// Takes all charges or none.
    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>>;

    /// A shortcut for the usual set, that of one [enforced](Effect::Enforce) charge, for limiters that know the answer at
    /// once: the same as [`take`](Self::take) would give, without what a set and an answer that comes later need.
    ///
    /// `None`, which is what a limiter says that has no shortcut, takes nothing, and `take` is asked.
    #[inline]
    fn take_at_once(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        let _ = (policy, key, cost);
        None
    }

    /// The same for a set of enforced charges of which nobody is told more than that they were taken: their receipts are
    /// moved to `receipts`, in their order, and blank ones where nothing was taken.
    ///
    /// `false` takes nothing, also where a charge is denied, and `take` is asked. It is the middleware's own, and may change.
    #[doc(hidden)]
    #[inline]
    fn take_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool {
        let _ = (charges, receipts);
        false
    }

    /// Answers as [`take`](Self::take) would, and takes nothing.
    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>>;

    /// Gives back what each receipt still holds. Of a [leaky queue](crate::Quota::leaky_queue) that is nothing once somebody
    /// has been told a departure behind it: the spacing of departures is kept.
    ///
    /// A [`Reply::Later`] may be dropped before it is polled: who drops a request has nothing to poll it with. A remote
    /// limiter sends the refund off before it returns, and its future only waits for the answer.
    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Self::Error, Self::Future<()>>;

    /// Takes [forced](Effect::Force) charges: what a request turned out to cost above its reservation.
    ///
    /// As of [`refund`](Self::refund), a [`Reply::Later`] may be dropped before it is polled. A remote limiter, whose
    /// [`take`](Self::take) sends nothing before its future is polled, therefore has one of its own that does.
    fn settle(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.take(charges)
    }

    /// Forgets the state of a (policy, key): its whole quota is back.
    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Self::Error, Self::Future<()>>;

    /// Whether this limiter can keep the states of a quota: all of them, unless it says otherwise.
    ///
    /// The layer's `check()` reports a quota that its limiter does not support, and the conformance suite leaves it out. A
    /// limiter that is asked about such a quota all the same must not ignore it: it returns its error, or denies.
    ///
    /// # Errors
    /// If the limiter does not support the quota. The error says why, and what to use instead.
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        let _ = quota;
        Ok(())
    }

    /// How strictly a set of charges is all or nothing.
    fn atomicity(&self) -> Atomicity {
        Atomicity::Atomic
    }

    /// Where layers enter their policies, so that those which contradict each other are noticed; `None` if nowhere.
    fn roster(&self) -> Option<&Roster> {
        None
    }
}

/// How strictly a set of charges is all or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Atomicity {
    /// No caller ever sees a charge that is later given back.
    Atomic,
    /// What a refused set took is given back at once; meanwhile another caller may be refused early, never admitted over.
    Compensated,
}

/// One thing to be taken: a cost from the allowance that a policy gives a key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Charge<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The key.
    pub key: &'a Key,
    /// Units to take; 0 looks.
    pub cost: u64,
    /// What a denial of this charge means.
    pub effect: Effect,
}

impl<'a> Charge<'a> {
    /// An enforced charge of one unit.
    #[must_use]
    pub fn new(policy: &'a Policy, key: &'a Key) -> Self {
        Self { policy, key, cost: 1, effect: Effect::Enforce }
    }

    /// Sets the cost in units.
    #[must_use]
    pub fn cost(mut self, cost: u64) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the effect.
    #[must_use]
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }
}

/// What a charge does to the decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Effect {
    /// Its denial denies the whole set.
    #[default]
    Enforce,
    /// Decided and reported, and taken if its own quota allows it and the set is allowed; it never denies the set.
    Observe,
    /// Taken whatever is left, into debt (see [`Quota::max_debt`](crate::Quota::max_debt)), if the set is allowed.
    Force,
    /// It belongs to the `of` charges right before it in the set, its partners, which are for the same key: a block after
    /// their refusals, or a meter of what goes beyond them.
    ///
    /// If the quota of one of them denies it, this one is taken, whatever is left; only a [meter](crate::Quota::meter) that is
    /// full denies it. (It is for blocks and meters; `RedisLimiter` answers others with an error, `MemoryLimiter` takes them
    /// as [forced](Self::Force).) Else it looks, as a cost of 0 does. What is told of it is how it stands after that.
    ///
    /// It denies the set if it is denied itself, by a [block](crate::Quota::block) or a full meter; of partners that are
    /// all only observed or forced a block is only observed too. And if one of its partners is enforced, it is taken
    /// although the set is refused: that refusal is what it counts. Then it has no receipt.
    OnRefusal {
        /// How many charges right before it; with 0, or more than there are, it is one of those that are there.
        of: u8,
    },
}

/// Whether the charge at a place of its set denies the set if it is itself denied.
pub(crate) fn binds(charges: &[impl Effective], at: usize) -> bool {
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        Effect::Enforce => true,
        Effect::Observe | Effect::Force => false,
        Effect::OnRefusal { of } => {
            let partners = partners(charges, at, of);
            charge.policy().quota().algorithm() == crate::Algorithm::Meter
                || partners.is_empty()
                || partners.iter().any(|partner| partner.effect() == Effect::Enforce)
        }
    }
}

/// Whether the charge at a place of its set is to be written although the set is refused, if it is to be written at all;
/// `denied` says whether it was denied itself.
pub(crate) fn outlives_refusal(charges: &[impl Effective], at: usize, denied: bool) -> bool {
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        Effect::Enforce => denied,
        Effect::Observe | Effect::Force => false,
        Effect::OnRefusal { of } => partners(charges, at, of).iter().any(|partner| partner.effect() == Effect::Enforce),
    }
}

/// Whether the charge at a place of a refused set is told as it stands, since its own quota has nothing against it and it is
/// not written.
pub(crate) fn stands(charges: &[impl Effective], at: usize, denied: bool) -> bool {
    !denied && !outlives_refusal(charges, at, denied)
}

/// How the charge at a place of its set is taken, where `denied` says of each before it whether it was denied.
pub(crate) fn how(charges: &[impl Effective], at: usize, denied: impl Fn(usize) -> bool) -> How {
    match charges.get(at).map_or(Effect::Observe, Effective::effect) {
        Effect::Enforce | Effect::Observe => How::IfAllowed,
        Effect::Force => How::Force,
        Effect::OnRefusal { of } => {
            let first = at.saturating_sub(usize::from(of));
            How::OnRefusal { refused: (first..at).any(denied) }
        }
    }
}

fn partners<C>(charges: &[C], at: usize, of: u8) -> &[C] {
    charges.get(at.saturating_sub(usize::from(of))..at).unwrap_or_default()
}

/// A charge of a set, in whatever form it is kept.
pub(crate) trait Effective {
    fn policy(&self) -> &Policy;
    fn effect(&self) -> Effect;
}

impl Effective for Charge<'_> {
    fn policy(&self) -> &Policy {
        self.policy
    }

    fn effect(&self) -> Effect {
        self.effect
    }
}

/// What a receipt gives back, and to whom.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refund {
    /// The policy that was charged.
    pub policy: Policy,
    /// The key that was charged.
    pub key: Key,
    /// The receipt of that charge.
    pub receipt: Receipt,
}

impl Refund {
    /// Gives back what `receipt` still holds of a charge to (policy, key).
    #[must_use]
    pub fn new(policy: Policy, key: Key, receipt: Receipt) -> Self {
        Self { policy, key, receipt }
    }
}

#[cfg(test)]
mod tests;
