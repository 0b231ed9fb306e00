//! Plans that single keys have, whatever is chosen for others.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use foldhash::quality::RandomState;
use http::request::Parts;

use crate::key::{IntoKey, Key};

/// Plans that single keys have, whatever [`Policy::choose`](crate::Policy::choose) would choose for them. It can be changed
/// while it is used: its clones are the same table.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, PlanOverrides, Policy, Quota, RateLimitLayer, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let overrides = PlanOverrides::new();
/// let quotas = [Quota::per_minute(10), Quota::per_minute(300), Quota::per_minute(5_000)];
/// let paying = |request: &http::request::Parts| usize::from(request.headers.contains_key("x-paid"));
/// let customer = Policy::choose("customer", quotas, overrides.or(key::header("x-api-key"), paying))?;
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
///
/// overrides.set("one-that-may-do-more", 2); // from the next request on
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct PlanOverrides(Arc<RwLock<HashMap<Key, usize, RandomState>>>);

impl PlanOverrides {
    /// A table of nobody.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a key this plan: its place among the quotas, from 0. A place that is not there is the first, as everywhere.
    /// Returns the plan that it was given before. A key that is missing (`None`) is given nothing.
    pub fn set(&self, key: impl IntoKey, plan: usize) -> Option<usize> {
        let key = key.into_key()?; // not under the lock
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, plan)
    }

    /// Takes a key's plan back: it has the one that is chosen for it. Returns the plan that it was given.
    pub fn remove(&self, key: impl IntoKey) -> Option<usize> {
        let key = key.into_key()?; // not under the lock
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&key)
    }

    /// The plan that a key was given.
    #[must_use]
    pub fn of(&self, key: &Key) -> Option<usize> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    /// How many keys were given a plan.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether nobody was given a plan.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What [`Policy::choose`](crate::Policy::choose) asks: the plan that the key of a request was given, or else the one
    /// that `choose` returns. `extract` is the extractor that the layer has, or another one.
    pub fn or<E, K, F, P>(
        &self,
        extract: E,
        choose: F,
    ) -> impl Fn(&Parts) -> Option<usize> + Send + Sync + use<E, K, F, P>
    where
        E: Fn(&Parts) -> K + Send + Sync + 'static,
        K: IntoKey + 'static,
        F: Fn(&Parts) -> P + Send + Sync + 'static,
        P: Into<Option<usize>> + 'static,
    {
        let table = self.clone();
        move |parts| {
            let given = if table.is_empty() { None } else { extract(parts).into_key().and_then(|key| table.of(&key)) };
            given.or_else(|| choose(parts).into())
        }
    }
}

impl fmt::Debug for PlanOverrides {
    /// How many, and not who.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlanOverrides").field("keys", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks into the table when it is made into a key.
    struct Looks(PlanOverrides);

    impl IntoKey for Looks {
        fn into_key(self) -> Option<Key> {
            Key::of(self.0.0.try_read().is_ok())
        }
    }

    #[test]
    fn keys_are_made_when_the_table_is_not_locked() {
        let table = PlanOverrides::new();
        table.set(Looks(table.clone()), 1);
        assert_eq!(table.of(&Key::of(true).unwrap()), Some(1));
        assert_eq!(table.remove(Looks(table.clone())), Some(1));
    }
}
