//! Snapshots with changed bytes: refused, or restored to states that can be charged, copied and restored once more.
#![no_main]

mod support;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::{Key, MemoryLimiter, Policy};

use support::quotas;

static POLICIES: LazyLock<Vec<Policy>> = LazyLock::new(|| {
    quotas().into_iter().map(|quota| Policy::new(quota.to_string(), quota).expect("a name")).collect()
});

static SNAPSHOT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let limiter = restored(Vec::new()).expect("nothing is restored");
    charge(&limiter);
    limiter.snapshot()
});

fn restored(snapshot: Vec<u8>) -> Option<MemoryLimiter> {
    let builder = MemoryLimiter::builder().max_keys(64).clock(ManualClock::new());
    if snapshot.is_empty() { builder.build().ok() } else { builder.restore(snapshot).build().ok() }
}

fn charge(limiter: &MemoryLimiter) {
    for policy in &*POLICIES {
        for key in 0..3_u64 {
            let key = Key::of(key).expect("a number");
            let decision = limiter.take_one(policy, &key, 2);
            assert!(decision.remaining() <= decision.limit());
        }
    }
}

// Each three bytes change one byte of a snapshot. The first two bytes cut it.
fuzz_target!(|bytes: &[u8]| {
    let Some((cut, changes)) = bytes.split_first_chunk::<2>() else { return };
    let mut snapshot = SNAPSHOT.clone();
    for change in changes.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % snapshot.len();
        snapshot[at] ^= change[2];
    }
    snapshot.truncate(snapshot.len().saturating_sub(usize::from(u16::from_le_bytes(*cut) >> 4)).max(1));
    if let Some(limiter) = restored(snapshot) {
        charge(&limiter);
        let again = restored(limiter.snapshot()).expect("its own snapshot can be restored");
        charge(&again);
    }
});
