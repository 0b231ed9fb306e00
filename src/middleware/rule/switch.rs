//! Quotas that change while requests are served.

use std::fmt;

use crate::error::{ConfigError, ConfigErrorKind};
use std::sync::{Arc, Weak};

use crate::base::sync::{Mutex, contained, lock};
#[cfg(feature = "rules")]
use crate::event::RulesEvent;
use crate::limiter::UnsupportedQuota;
use crate::quota::{Algorithm, Quota};

/// A [`Quota`] that can be changed while requests are served, by any clone, without rebuilding a
/// layer.
///
/// * A request uses one quota from beginning to end: the quota in force when its layer is called.
///   The request is settled, refunded and answered under that quota. But a request or a message
///   that waits in line takes the quota that is in force when it is admitted.
/// * The units that a key has used stay used. A key that has used more than the new quota allows must wait until enough
///   of its usage has expired. Until a request is admitted under the new quota, usage expires at the old quota's pace.
///   The reported wait counts with the new quota's pace, so it can be far longer than needed; see [the
///   rules](crate::quota#when-a-quota-changes).
/// * Each quota gets the [debt](Quota::max_debt) that it needs to keep the usage of the largest quota
///   so far.
/// * Headers, outcomes and [`policies`](crate::RateLimitLayer::policies) follow the switch. The
///   policy's name stays.
/// * A request to a layer with a switch costs one more atomic load. A change costs as much as
///   building the layer.
/// * Each process has its own switch, also with Redis. A `fleet::Fleet` provides switches that are
///   the same in all processes.
///
/// ```
/// use tower_ratelimit::{
///     MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::QuotaSwitch,
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let quota = QuotaSwitch::new(Quota::per_minute(100));
/// let client = Rule::switched("client", &quota)?;
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip());
///
/// quota.set(Quota::per_minute(20))?; // from the next request on
/// assert_eq!(layer.policies()[0].quota().limit(), 20);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct QuotaSwitch(Arc<Mutex<SwitchState>>);

struct SwitchState {
    quota: Quota,
    /// The largest capacity that the quota has had.
    largest: u64,
    layers: Vec<Weak<dyn Follow>>,
}

/// A layer whose quotas follow switches.
pub(crate) trait Follow: Send + Sync {
    /// Checks whether the layer's limiter supports a quota.
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota>;

    /// Compiles the layer's configuration with the present quotas of its switches and the present rules of
    /// its source.
    fn follow(&self);

    /// Returns the names of the policies that the program itself gave the layer, and the names of these policies'
    /// states.
    #[cfg(feature = "rules")]
    fn own_names(&self) -> Vec<String>;

    /// Returns whether access lists decide about the clients of its requests.
    #[cfg(all(feature = "rules", feature = "fleet"))]
    fn checks_access(&self) -> bool;

    /// Reports an event to the layer's observer.
    #[cfg(feature = "rules")]
    fn report(&self, event: &RulesEvent);
}

impl QuotaSwitch {
    /// Makes a switch that is set to `quota`.
    #[must_use]
    pub fn new(quota: Quota) -> Self {
        Self(Arc::new(Mutex::new(SwitchState { quota, largest: quota.capacity_to_hold(), layers: Vec::new() })))
    }

    /// Returns the quota.
    #[must_use]
    pub fn get(&self) -> Quota {
        lock(&self.0).quota
    }

    /// Sets the quota for all layers that have a rule with this switch, and returns the previous
    /// quota.
    ///
    /// # Errors
    /// Returns an error if a layer's limiter does not support the quota. Also returns an error if the old and
    /// the new quota are not of one kind. The kinds are rates, blocks, meters and concurrency limits. After
    /// an error, the old quota stays in force.
    pub fn set(&self, quota: Quota) -> Result<Quota, ConfigError> {
        let before = self.get();
        if kind(&before) != kind(&quota) {
            return Err(ConfigError::new(
                ConfigErrorKind::Combination,
                format!(
                    "the quota \"{before}\" cannot be changed to \"{quota}\": units, strikes of a block and units of a \
                     meter do not convert into each other; use a policy of another name"
                ),
            ));
        }
        let layers: Vec<Arc<dyn Follow>> = lock(&self.0).layers.iter().filter_map(Weak::upgrade).collect();
        let compiled = quota.holding(lock(&self.0).largest);
        for layer in &layers {
            layer.supports(&compiled).map_err(|unsupported| {
                ConfigError::new(
                    ConfigErrorKind::Unsupported,
                    format!("the quota \"{before}\" cannot be changed to \"{quota}\""),
                )
                .caused_by(unsupported)
            })?;
        }
        let (before, layers) = {
            let mut state = lock(&self.0);
            state.largest = state.largest.max(quota.capacity_to_hold());
            let before = std::mem::replace(&mut state.quota, quota);
            // The list includes layers that were added after the change began.
            let layers: Vec<Arc<dyn Follow>> = state.layers.iter().filter_map(Weak::upgrade).collect();
            (before, layers)
        };
        // Calls the layers one by one, so that the other layers still get the quota if the limiter or an observer of
        // one layer panics.
        layers.iter().for_each(|layer| contained(|| layer.follow()));
        Ok(before)
    }

    /// Returns the quota with the debt that states under earlier quotas need.
    pub(crate) fn compiled(&self) -> Quota {
        let state = lock(&self.0);
        state.quota.holding(state.largest)
    }

    pub(crate) fn enter(&self, layer: Weak<dyn Follow>) {
        let mut state = lock(&self.0);
        state.layers.retain(|layer| layer.strong_count() > 0);
        state.layers.push(layer);
    }

    /// Returns a number that is different for each switch in use.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

/// Returns the kind of a quota. States convert only between quotas of one kind.
fn kind(quota: &Quota) -> Option<Algorithm> {
    Some(quota.algorithm()).filter(|algorithm| !algorithm.is_rate())
}

impl fmt::Debug for QuotaSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("QuotaSwitch").field(&self.get()).finish()
    }
}
