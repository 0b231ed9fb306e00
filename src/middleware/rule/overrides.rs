//! Plans of single keys, which replace the chosen ones.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use foldhash::quality::RandomState;

use crate::head::Head;
use crate::key::{IntoKey, Key};

/// Gives single keys a plan, instead of the one that
/// [`Rule::plans`](crate::Rule::plans) would choose. It can be changed while requests
/// are served. Clones are the same table.
///
/// * The table belongs to the process. If a service has several processes, set a key in each of them, for example
///   from a list that all of them read.
/// * An entry stays until it is removed or replaced; nothing expires. If timers remove entries, two that overlap for
///   one key end with the earlier one. So keep the end of each entry yourself, and remove a key only when its latest
///   one has passed.
///
/// ```
/// use tower_ratelimit::{key, middleware::PlanOverrides, MemoryLimiter, Quota, RateLimitLayer, Rule};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let overrides = PlanOverrides::new();
/// let quotas = [Quota::per_minute(10), Quota::per_minute(300), Quota::per_minute(5_000)];
/// let paying = |request: &tower_ratelimit::Head<'_>| usize::from(request.headers.contains_key("x-paid"));
/// let customer = Rule::plans("customer", quotas, overrides.or(key::header("x-api-key"), paying))?;
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
///
/// overrides.set("one-that-may-do-more", 2); // from the next request on
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct PlanOverrides(Arc<RwLock<HashMap<Key, usize, RandomState>>>);

impl PlanOverrides {
    /// Makes an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a key this plan, by its index among the quotas. An index that does not exist means the
    /// first plan. Returns the plan that the key was given before. A missing key (`None`) is
    /// ignored.
    pub fn set(&self, key: impl IntoKey, plan: usize) -> Option<usize> {
        let key = key.into_key()?; // not under the lock
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, plan)
    }

    /// Removes a key, which then has the plan that is chosen for it. Returns the plan that the key
    /// was given.
    pub fn remove(&self, key: impl IntoKey) -> Option<usize> {
        let key = key.into_key()?; // not under the lock
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&key)
    }

    /// Returns the plan that a key was given.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<usize> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    /// Returns the number of keys in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns whether the table is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns a closure for [`Rule::plans`](crate::Rule::plans). It returns the plan
    /// that the key of a request was given, or otherwise the one that `choose` returns. `extract`
    /// may be the extractor of the layer or another one.
    pub fn or<E, K, F, P>(
        &self,
        extract: E,
        choose: F,
    ) -> impl Fn(&Head<'_>) -> Option<usize> + Send + Sync + use<E, K, F, P>
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey + 'static,
        F: Fn(&Head<'_>) -> P + Send + Sync + 'static,
        P: Into<Option<usize>> + 'static,
    {
        let table = self.clone();
        move |head| {
            let given = if table.is_empty() { None } else { extract(head).into_key().and_then(|key| table.get(&key)) };
            given.or_else(|| choose(head).into())
        }
    }
}

impl fmt::Debug for PlanOverrides {
    /// Prints the number of keys, not the keys.
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
        assert_eq!(table.get(&Key::of(true).unwrap()), Some(1));
        assert_eq!(table.remove(Looks(table.clone())), Some(1));
    }
}
