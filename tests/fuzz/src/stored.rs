//! Stored values with anything in them, as another program or another version could have written them: an error that
//! says so, or a state that is charged, written and read again. A reset helps always.
#![no_main]

mod support;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::store::{StoreLimiter, StoreLimiterBuilder, Value, Version};
use tower_ratelimit::limiter::{Charge, Limiter, Refund, StoreErrorKind};
use tower_ratelimit::{Key, Policy};

use support::{InMemory, RUNTIME, quotas};

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
        store.any().expect("a value is written").bytes
    };
    POLICIES.iter().map(written).collect()
});

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
    let store = InMemory::with(Value::new(Version::from_bytes([1; 16]), value));
    RUNTIME.block_on(charge(&store, &POLICIES[at]));
});
