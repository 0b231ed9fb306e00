//! The time that `StoreLimiter` adds to a check, over a store that does nothing but keep values in a map.
//!
//! `cargo bench --bench store --features store`
//!
//! One run on two quiet processors (2026-11-27, without LTO): 2.8 µs for a token bucket and 2.9 µs for a sliding
//! window, where a check in memory takes 23 and 84 ns. At most 3 µs are aimed at. So a store's own time decides.

mod support;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use support::{Contender, Numbers, is_wanted, print_case, race};
use tokio::runtime::{Builder, Runtime};
use tower_ratelimit::limiter::store::{Change, Loaded, Store, StoreError, StoreLimiter, Swapped, Then, Value};
use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};

const KEYS: u64 = 10_000;

#[derive(Default)]
struct InMap(Mutex<HashMap<Arc<str>, Value>>);

impl Store for InMap {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        let values = self.0.lock().expect("no thread panics");
        Ok(Loaded::new(keys.iter().map(|key| values.get(key).cloned()).collect()))
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let mut values = self.0.lock().expect("no thread panics");
        let current: Vec<_> = changes.iter().map(|change| values.get(&change.key).cloned()).collect();
        if changes.iter().zip(&current).any(|(change, value)| !change.expects(value.as_ref())) {
            return Ok(Swapped::conflict(current));
        }
        for change in changes {
            match &change.then {
                Then::Keep => {}
                Then::Put(value, _) => drop(values.insert(Arc::clone(&change.key), value.clone())),
                Then::Delete => drop(values.remove(&change.key)),
            }
        }
        Ok(Swapped::done())
    }
}

fn over_map(runtime: &Runtime) -> StoreLimiter<InMap> {
    let _guard = runtime.enter();
    StoreLimiter::new(InMap::default()).expect("there is a runtime")
}

/// Checks of 10,000 keys, one after the other.
fn checks<'a>(name: &'static str, runtime: &'a Runtime, limiter: impl Limiter + 'a, quota: Quota) -> Contender<'a> {
    let policy = Policy::new("bench", quota).expect("the name is possible");
    let mut numbers = Numbers(7);
    Contender::new(name, move |times| {
        runtime.block_on(async {
            for _ in 0..times {
                let key = Key::of(numbers.below(KEYS)).expect("a number is a key");
                assert!(limiter.take(&[Charge::new(&policy, &key)]).await.is_ok_and(|decision| decision.is_allowed()));
            }
        });
    })
}

fn main() {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime is possible");
    let plenty = Quota::per_second(1_000_000_000);
    let window = Quota::sliding_window(1_000_000_000, std::time::Duration::from_secs(60)).expect("it is possible");
    for (case, quota) in [("token bucket", plenty), ("sliding window", window)] {
        if is_wanted(case) {
            let mut contenders = [
                checks("MemoryLimiter", &runtime, MemoryLimiter::new(), quota),
                checks("StoreLimiter over a map", &runtime, over_map(&runtime), quota),
            ];
            let times = race(&mut contenders);
            print_case(case, &contenders, &times);
        }
    }
}
