//! Stored values with anything in them, as another program or another version could have written them: an error that
//! says so, or a state that is charged, written and read again. A reset helps always.
#![no_main]

mod support;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tokio::runtime::Runtime;
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::store::{
    Change, Loaded, Store, StoreError, StoreLimiter, StoreLimiterBuilder, Swapped, Then, Value, Version,
};
use tower_ratelimit::limiter::{Charge, Limiter, Refund, StoreErrorKind};
use tower_ratelimit::{Key, Policy};

use support::quotas;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime without I/O is possible")
});

static POLICIES: LazyLock<Vec<Policy>> =
    LazyLock::new(|| quotas().into_iter().map(|quota| Policy::new("p", quota).expect("a name")).collect());

/// The value that each policy writes.
static WRITTEN: LazyLock<Vec<Arc<[u8]>>> = LazyLock::new(|| {
    let written = |policy: &Policy| {
        let store = InMemory::default();
        RUNTIME.block_on(async {
            let limiter = limiter(&store);
            for _ in 0..3 {
                limiter.take(&[Charge::new(policy, &Key::global())]).await.expect("the store answers");
            }
        });
        let values = store.0.values.lock().expect("no thread panics");
        Arc::clone(&values.values().next().expect("a value is written").bytes)
    };
    POLICIES.iter().map(written).collect()
});

/// A store that has this value for every key, until another is written.
#[derive(Clone, Default)]
struct InMemory(Arc<Inner>);

#[derive(Default)]
struct Inner {
    first: Option<Value>,
    values: Mutex<HashMap<Arc<str>, Value>>,
    removed: Mutex<Vec<Arc<str>>>,
}

impl InMemory {
    fn current(&self, key: &Arc<str>) -> Option<Value> {
        let removed = self.0.removed.lock().expect("no thread panics").contains(key);
        let first = self.0.first.clone().filter(|_| !removed);
        self.0.values.lock().expect("no thread panics").get(key).cloned().or(first)
    }
}

impl Store for InMemory {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        Ok(Loaded::new(keys.iter().map(|key| self.current(key)).collect()))
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let current: Vec<_> = changes.iter().map(|change| self.current(&change.key)).collect();
        if changes.iter().zip(&current).any(|(change, value)| !change.expects(value.as_ref())) {
            return Ok(Swapped::conflict(current));
        }
        for change in changes {
            let mut values = self.0.values.lock().expect("no thread panics");
            match &change.then {
                Then::Keep => {}
                Then::Put(value, _) => drop(values.insert(Arc::clone(&change.key), value.clone())),
                Then::Delete => {
                    values.remove(&change.key);
                    self.0.removed.lock().expect("no thread panics").push(Arc::clone(&change.key));
                }
            }
        }
        Ok(Swapped::done())
    }
}

fn limiter(store: &InMemory) -> StoreLimiter<InMemory> {
    let builder = StoreLimiterBuilder::new().deadline(Duration::from_secs(5)).clock(ManualClock::new());
    builder.build(store.clone()).expect("the setup is possible")
}

async fn charge(store: &InMemory, policy: &Policy) {
    let (key, limiter) = (Key::global(), limiter(store));
    for cost in [0, 2, 1] {
        match limiter.take(&[Charge::new(policy, &key).cost(cost)]).await {
            Ok(mut decision) => {
                assert!(decision.charges().iter().all(|charge| charge.remaining() <= charge.limit()), "{decision:?}");
                let receipts = decision.take_receipts();
                let refunds = receipts.into_iter().flatten().map(|it| Refund::new(policy.clone(), key.clone(), it));
                limiter.refund(refunds.collect()).await.expect("what was charged can be refunded");
            }
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Foreign, "{error}"),
        }
    }
    limiter.reset(policy, &key).await.expect("every value can be reset");
    let fresh = limiter.take(&[Charge::new(policy, &key).cost(0)]).await.expect("nothing is stored");
    assert!(fresh.charges().iter().all(|charge| charge.remaining() <= charge.limit()));
}

// The first byte is the policy. From 128 on the rest is the value; otherwise each two bytes change a byte of a good
// one.
fuzz_target!(|bytes: &[u8]| {
    let Some((which, rest)) = bytes.split_first() else { return };
    let at = usize::from(*which % 128) % POLICIES.len();
    let mut value = WRITTEN[at].to_vec();
    if *which >= 128 {
        value = rest.to_vec();
    } else {
        for change in rest.chunks_exact(2) {
            let at = usize::from(change[0]) % value.len();
            value[at] ^= change[1];
        }
    }
    let first = Some(Value::new(Version::from_bytes([1; 16]), value));
    let store = InMemory(Arc::new(Inner { first, ..Inner::default() }));
    RUNTIME.block_on(charge(&store, &POLICIES[at]));
});
