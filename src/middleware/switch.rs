//! Quotas that change while requests come: the layer's configuration is compiled anew, and replaced as a whole.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::charging::Shared;
use super::rule::{IntoRule, Rule};
use crate::limiter::{Limiter, UnsupportedQuota};
use crate::policy::{Policy, PolicyError};
use crate::quota::{Algorithm, Quota};

/// A [`Quota`] that can be changed while requests come, by any clone, without building a layer anew.
///
/// * A request is decided under one quota from its beginning to its end: the one in force when its layer is called. A
///   request that is on its way is settled, refunded and answered under the quota that it was charged under.
/// * The units that a key has used stay used. A key that has used more than the new quota has in all waits until enough of
///   it has expired, at the new quota's pace. To this end each quota is given the [debt](Quota::max_debt) that the largest
///   one so far needs.
/// * Headers, outcomes and [`policies`](crate::RateLimitLayer::policies) follow. The policy's name stays.
/// * A layer without a switch pays nothing for it. With one, a request costs one load more, and a change costs what building
///   the layer costs.
/// * Each process has its own switch. Over one Redis, change it in all of them.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Policy, Quota, QuotaSwitch, RateLimitLayer, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = QuotaSwitch::new(Quota::per_minute(100));
/// let client = Policy::switched("client", &quota)?;
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip());
///
/// quota.set(Quota::per_minute(20))?; // from the next request on
/// assert_eq!(layer.policies()[0].quota().limit(), 20);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct QuotaSwitch(Arc<Mutex<State>>);

struct State {
    quota: Quota,
    /// The largest capacity that the quota has had.
    largest: u64,
    layers: Vec<Weak<dyn Follow>>,
}

/// A layer whose quotas follow their switches.
pub(super) trait Follow: Send + Sync {
    /// Whether the layer's limiter supports a quota.
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota>;

    /// Compiles the layer's configuration with what its switches say now.
    fn follow(&self);
}

impl QuotaSwitch {
    /// A switch that is set to `quota`.
    #[must_use]
    pub fn new(quota: Quota) -> Self {
        Self(Arc::new(Mutex::new(State { quota, largest: quota.capacity(), layers: Vec::new() })))
    }

    /// The quota.
    #[must_use]
    pub fn get(&self) -> Quota {
        self.state().quota
    }

    /// Sets the quota for all layers that have a rule with this switch, and returns the one before.
    ///
    /// # Errors
    /// If a layer's limiter does not support the quota, or if it is a block or a meter and the one before is not, or the
    /// other way round. Then nothing is changed.
    pub fn set(&self, quota: Quota) -> Result<Quota, QuotaSwitchError> {
        let before = self.get();
        if kind(&before) != kind(&quota) {
            return Err(QuotaSwitchError {
                kind: QuotaSwitchErrorKind::Algorithm,
                message: format!(
                    "the quota \"{before}\" cannot be changed to \"{quota}\": units, strikes of a block and what a meter \
                     counts do not convert into each other; use a policy of another name"
                ),
            });
        }
        let layers: Vec<Arc<dyn Follow>> = self.state().layers.iter().filter_map(Weak::upgrade).collect();
        let compiled = quota.holding(self.state().largest);
        for layer in &layers {
            layer.supports(&compiled).map_err(|unsupported| QuotaSwitchError {
                kind: QuotaSwitchErrorKind::Unsupported,
                message: format!("the quota \"{before}\" cannot be changed: {unsupported}"),
            })?;
        }
        let (before, layers) = {
            let mut state = self.state();
            state.largest = state.largest.max(quota.capacity());
            let before = std::mem::replace(&mut state.quota, quota);
            // Layers that have come meanwhile are among them.
            let layers: Vec<Arc<dyn Follow>> = state.layers.iter().filter_map(Weak::upgrade).collect();
            (before, layers)
        };
        for layer in layers {
            layer.follow();
        }
        Ok(before)
    }

    /// The quota, as policies have it: with the debt that states under earlier quotas need.
    fn compiled(&self) -> Quota {
        let state = self.state();
        state.quota.holding(state.largest)
    }

    fn enter(&self, layer: Weak<dyn Follow>) {
        let mut state = self.state();
        state.layers.retain(|layer| layer.strong_count() > 0);
        state.layers.push(layer);
    }

    /// Different for each switch that is in use.
    fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Quotas of one kind convert into each other.
fn kind(quota: &Quota) -> Option<Algorithm> {
    Some(quota.algorithm()).filter(|algorithm| matches!(algorithm, Algorithm::Block | Algorithm::Meter))
}

impl fmt::Debug for QuotaSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QuotaSwitch").field(&self.get()).finish()
    }
}

impl Policy {
    /// Returns a rule whose quota is what a [`QuotaSwitch`] says.
    ///
    /// # Errors
    /// If the name is not as [`Policy::new`] wants it.
    pub fn switched(name: impl Into<String>, quota: &QuotaSwitch) -> Result<Rule, PolicyError> {
        let policy = Self::new(name, quota.compiled())?.following(quota.compiled(), quota.id());
        Ok(Rule { switch: Some(quota.clone()), ..policy.into_rule() })
    }
}

impl Rule {
    /// The rule with the quota that its switch has now.
    fn followed(&mut self) {
        if let (Some(switch), Some(policy)) = (&self.switch, self.policies.first_mut()) {
            *policy = policy.following(switch.compiled(), switch.id());
        }
    }
}

/// The configuration of a layer whose quotas can change: the one that requests are to be decided under.
pub(super) struct Live<L> {
    current: Mutex<Arc<Shared<L>>>,
    version: AtomicU64,
}

impl<L: Limiter + Clone> Live<L> {
    /// For a layer whose rules have switches.
    pub(super) fn of(shared: &Arc<Shared<L>>) -> Option<Arc<Self>> {
        let rules = || shared.settings.rules.iter().map(super::bound::BoundRule::rule);
        if rules().all(|rule| rule.switch.is_none()) {
            return None;
        }
        let live = Arc::new(Self { current: Mutex::new(Arc::clone(shared)), version: AtomicU64::new(shared.version) });
        let _ = shared.live.set(Arc::downgrade(&live));
        let follower: Weak<dyn Follow> = Arc::downgrade(&(Arc::clone(&live) as Arc<dyn Follow>));
        for switch in rules().filter_map(|rule| rule.switch.as_ref()) {
            switch.enter(Weak::clone(&follower));
        }
        // The quotas may have changed since the rules were made.
        live.follow();
        Some(live)
    }
}

impl<L> Live<L> {
    pub(super) fn current(&self) -> Arc<Shared<L>> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces a configuration that is not the current one.
    pub(super) fn catch_up(&self, shared: &mut Arc<Shared<L>>) {
        // Acquire, with the Release in `follow`: what is read under the lock is then at least as new.
        if self.version.load(Ordering::Acquire) != shared.version {
            *shared = self.current();
        }
    }
}

impl<L: Limiter + Clone> Follow for Live<L> {
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.current().limiter.supports(quota)
    }

    fn follow(&self) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let was_entered = current.entered.get().is_some();
        let mut settings = current.settings.clone();
        for bound in &mut settings.rules {
            bound.rule_mut().followed();
        }
        let policies = |rules: &[super::bound::BoundRule]| -> Vec<Policy> {
            rules.iter().flat_map(super::bound::BoundRule::policies).cloned().collect()
        };
        if policies(&settings.rules) == policies(&current.settings.rules) {
            return;
        }
        let next = Arc::new(Shared::successor(&current, settings));
        self.version.store(next.version, Ordering::Release);
        let before = std::mem::replace(&mut *current, Arc::clone(&next));
        drop(current);
        drop(before); // its place in the roster, unless requests are on their way
        if was_entered {
            next.look_at_setup();
        }
    }
}

impl<L> Shared<L> {
    /// The policy for refunding and settling what was charged. That is the one that was charged, unless its quota was
    /// replaced by a larger one: a state that is converted back would have no room for what was used meanwhile.
    pub(super) fn policy_now(&self, at: usize) -> Option<Policy> {
        let own = self.policy(at)?;
        let room = own.quota().capacity().saturating_add(own.quota().spec().debt);
        let now = self.live.get().and_then(Weak::upgrade).and_then(|live| live.current().policy(at).cloned());
        Some(now.filter(|now| now.quota().capacity() > room).unwrap_or_else(|| own.clone()))
    }
}

/// A quota was not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaSwitchError {
    kind: QuotaSwitchErrorKind,
    message: String,
}

/// Why a quota was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuotaSwitchErrorKind {
    /// A limiter does not [support](Limiter::supports) it.
    Unsupported,
    /// It is a block or a meter, and the one before is not, or the other way round.
    Algorithm,
}

impl QuotaSwitchError {
    /// Why the quota was not changed.
    #[must_use]
    pub fn kind(&self) -> QuotaSwitchErrorKind {
        self.kind
    }
}

impl fmt::Display for QuotaSwitchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for QuotaSwitchError {}
