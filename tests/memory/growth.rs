//! The table grows with its keys, and no law knows of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::{Charge, Refund},
    observe::{LimiterEvent, Observer},
};

use crate::support::cases;

const HOUR: Duration = Duration::from_secs(3_600);

fn key(n: u64) -> Key {
    Key::of(n).expect("an integer makes a key")
}

/// Counts events. A table that can grow forgets nobody and refuses nobody.
#[derive(Clone, Default)]
struct Events(Arc<AtomicU64>);

impl Observer for Events {
    fn on_limiter_event(&self, _: &LimiterEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn limiter(events: &Events) -> MemoryLimiter {
    MemoryLimiter::builder()
        .max_keys(1_000_000)
        .clock(ManualClock::new())
        .observer(events.clone())
        .build()
        .expect("the setup is possible")
}

/// Plays with `usual` keys, or with a sample of them. A campaign plays again and again, because a limiter that held all
/// of its keys would forget some.
fn play(usual: u32, round: impl Fn(u64)) {
    let keys = cases(usual);
    (0..keys.div_ceil(usual)).for_each(|_| round(u64::from(keys.min(usual))));
}

#[test]
fn every_state_is_kept_while_the_table_grows() {
    play(100_000, keep_every_state);
}

fn keep_every_state(keys: u64) {
    let events = Events::default();
    let limiter = limiter(&events);
    let policies = [
        Quota::token_bucket(10, HOUR),
        Quota::token_bucket(99_991, 366 * 24 * HOUR).and_then(|quota| quota.burst(10)), // two words
        Quota::sliding_log(10, HOUR),
        Quota::meter(10, HOUR),
    ]
    .map(|quota| {
        let quota = quota.expect("the quota is possible");
        Policy::new(format!("p{}", quota.to_string().replace(' ', "-")), quota).expect("it is a name")
    });
    // Meters have room in half of the slots only, and stay where they are.
    let of = |n: u64| if n % 16 == 0 { &policies[..] } else { &policies[..3] };
    for n in 0..keys {
        for policy in of(n) {
            assert_eq!(limiter.take_one(policy, &key(n), 1 + n % 7).remaining(), 9 - n % 7);
            // One that came earlier, wherever the growth has brought it.
            let (earlier, again) = (n / 32 * 16, u64::from(n % 32 == 16));
            let held = limiter.take_one(policy, &key(earlier), again).remaining();
            assert!(held <= 9 - earlier % 7 && held >= 8 - earlier % 7, "{held}: {earlier} of {n}");
        }
    }
    for n in 0..keys {
        let left = 9 - n % 7 - u64::from(n % 16 == 0 && 2 * n + 16 < keys);
        for policy in of(n) {
            assert_eq!(limiter.peek_one(policy, &key(n), 0).remaining(), left, "{policy:?} of {n}");
        }
    }
    assert_eq!(events.0.load(Ordering::Relaxed), 0, "no key is forgotten or refused");
}

#[test]
fn charges_of_many_threads_are_exact_while_the_table_grows() {
    play(200_000, charge_in_many_threads);
}

fn charge_in_many_threads(keys: u64) {
    let events = Events::default();
    let limiter = limiter(&events);
    let bucket = Policy::new("bucket", Quota::token_bucket(1_000_000, HOUR).expect("possible")).expect("a name");
    let log = Policy::new("log", Quota::sliding_window(1_000_000, HOUR).expect("possible")).expect("a name");
    let threads = 4;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (limiter, bucket, log) = (limiter.clone(), &bucket, &log);
            scope.spawn(move || {
                for n in 0..keys {
                    // All threads make the same keys at nearly the same time, each from another place on.
                    let (one, other) = ((n + thread * 37) % keys, n % 97);
                    match n % 3 {
                        0 => assert!(limiter.take_one(bucket, &key(one), 1).is_allowed()),
                        1 => assert!(
                            limiter
                                .take_now(&[Charge::new(bucket, &key(one)), Charge::new(log, &key(other))])
                                .is_allowed()
                        ),
                        _ => {
                            let mut taken = limiter.take_one(bucket, &key(one), 2);
                            let receipt = taken.take_receipt().expect("it was taken");
                            limiter.refund_now(&[Refund::new(bucket.clone(), key(one), receipt)]);
                        }
                    }
                }
            });
        }
    });
    let (mut expected, mut logged) = (HashMap::new(), HashMap::new());
    for thread in 0..threads {
        for n in 0..keys {
            *expected.entry((n + thread * 37) % keys).or_insert(0) += u64::from(n % 3 < 2);
            *logged.entry(n % 97).or_insert(0) += u64::from(n % 3 == 1);
        }
    }
    for (policy, expected) in [(&bucket, expected), (&log, logged)] {
        for (n, used) in expected {
            assert_eq!(limiter.peek_one(policy, &key(n), 0).remaining(), 1_000_000 - used, "{policy:?} of {n}");
        }
    }
    assert_eq!(events.0.load(Ordering::Relaxed), 0, "no key is forgotten or refused");
}

#[test]
fn snapshot_has_every_state_while_the_table_grows() {
    play(300_000, take_snapshots);
}

fn take_snapshots(during: u64) {
    let events = Events::default();
    let limiter = limiter(&events);
    let policy = Policy::from(Quota::token_bucket(10, HOUR).expect("the quota is possible"));
    let before = 5_000;
    (0..before).for_each(|n| assert!(limiter.take_one(&policy, &key(n), 3).is_allowed()));
    let snapshots: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let growing = scope.spawn(|| {
            (before..before + during).for_each(|n| assert!(limiter.take_one(&policy, &key(n), 1).is_allowed()));
        });
        let mut snapshots = Vec::new();
        while !growing.is_finished() || snapshots.is_empty() {
            snapshots.push(limiter.snapshot());
        }
        snapshots
    });
    for snapshot in snapshots {
        let restored =
            MemoryLimiter::builder().clock(ManualClock::new()).restore(snapshot).build().expect("it is whole");
        for n in 0..before {
            assert_eq!(restored.peek_one(&policy, &key(n), 0).remaining(), 7, "{n}");
        }
    }
}
