//! Concurrent threads neither panic nor hang the limiter, and never exceed a quota.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::{Charge, Effect, Refund},
    quota::Oldest,
};

use crate::support::cases;

const HOUR: Duration = Duration::from_secs(3_600);
const LIMIT: u64 = 50;

fn key(n: u64) -> Key {
    Key::of(n).expect("an integer makes a key")
}

/// Returns a quota of each layout, with capacity [`LIMIT`].
fn quotas() -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(LIMIT, HOUR)?,
            Quota::fixed_window(LIMIT, HOUR)?,
            Quota::sliding_window(LIMIT, HOUR)?,
            Quota::sliding_window(LIMIT, HOUR)?.buckets(6)?.oldest(Oldest::Counted)?,
            Quota::sliding_log(LIMIT, HOUR)?,
            // A state that does not fit a word. It does not refill here, since the clock stands
            // still.
            Quota::token_bucket(99_999_999, HOUR)?.burst(LIMIT)?,
        ])
    };
    each().expect("the quotas are possible")
}

fn limiter(capacity: usize) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(capacity).clock(ManualClock::new()).build().expect("the setup is possible")
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).expect("a name")
}

/// Runs a function on this number of threads. Each gets its number.
fn on_threads(count: u64, run: impl Fn(u64) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..count {
            let run = &run;
            scope.spawn(move || run(thread));
        }
    });
}

#[test]
fn single_charges_and_sets_take_exactly_the_quota_of_a_key() {
    for first in quotas() {
        for second in quotas() {
            let limiter = limiter(2_000);
            let (a, b) = (policy("a", first), policy("b", second));
            let (of_a, of_b) = (AtomicU64::new(0), AtomicU64::new(0));
            on_threads(4, |thread| {
                for n in 0..4 * LIMIT {
                    let (own, everyone) = (key(n % 2), key(7));
                    match (n + thread) % 4 {
                        0 => {
                            let taken = limiter.take_one(&a, &own, 1).is_allowed();
                            of_a.fetch_add(u64::from(taken), Ordering::Relaxed);
                        }
                        1 => {
                            let taken = limiter.take_one(&b, &everyone, 1).is_allowed();
                            of_b.fetch_add(u64::from(taken), Ordering::Relaxed);
                        }
                        // In both orders: locks in the order of the charges would deadlock.
                        turn => {
                            let mut set = [Charge::new(&a, &own), Charge::new(&b, &everyone)];
                            if turn == 2 {
                                set.reverse();
                            }
                            let taken = u64::from(limiter.take_now(&set).is_allowed());
                            of_a.fetch_add(taken, Ordering::Relaxed);
                            of_b.fetch_add(taken, Ordering::Relaxed);
                        }
                    }
                }
            });
            let left = |policy, key: &Key| limiter.peek_one(policy, key, 0).remaining();
            assert_eq!(of_a.into_inner() + left(&a, &key(0)) + left(&a, &key(1)), 2 * LIMIT, "{first} and {second}");
            assert_eq!(of_b.into_inner() + left(&b, &key(7)), LIMIT, "{first} and {second}");
        }
    }
}

#[test]
fn refunds_return_what_was_taken_under_contention() {
    for quota in quotas() {
        let limiter = limiter(2_000);
        let (a, b) = (policy("a", quota), policy("b", Quota::per_hour(1_000_000)));
        let kept = AtomicU64::new(0);
        on_threads(4, |thread| {
            for n in 0..300_u64 {
                let (one, two) = (key(1), key(thread));
                let set = [Charge::new(&a, &one).cost(2), Charge::new(&b, &two)];
                let mut decision = limiter.take_now(&set);
                let Some(receipt) = decision.take_receipts()[0].take() else { continue };
                assert_eq!(receipt.units(), 2);
                let back = if n % 8 == 0 { 1 } else { 2 };
                kept.fetch_add(2 - back, Ordering::Relaxed);
                limiter.refund_now(&[Refund::new(a.clone(), key(1), receipt.split(back))]);
            }
        });
        let left = limiter.peek_one(&a, &key(1), 0).remaining();
        assert_eq!(kept.into_inner() + left, LIMIT, "{quota}");
    }
}

#[test]
fn policy_with_two_quotas_admits_no_more_than_the_larger() {
    for first in quotas() {
        for second in quotas() {
            let limiter = limiter(2_000);
            let passed = AtomicU64::new(0);
            on_threads(4, |thread| {
                let mine = policy("a", if thread % 2 == 0 { first } else { second });
                let other = policy("b", Quota::per_hour(1_000_000));
                for n in 0..20 * LIMIT {
                    let allowed = if n % 3 == 0 {
                        let (one, two) = (key(1), key(thread));
                        limiter.take_now(&[Charge::new(&mine, &one), Charge::new(&other, &two)]).is_allowed()
                    } else {
                        limiter.take_one(&mine, &key(1), 1).is_allowed()
                    };
                    passed.fetch_add(u64::from(allowed), Ordering::Relaxed);
                }
            });
            let passed = passed.into_inner();
            assert!(passed <= LIMIT, "{passed} of {first}, then {second}");
            // Conversion rounds usage up, so that some units may be lost.
            assert!(passed >= 1, "{first}, then {second}");
        }
    }
}

/// All operations at once in a table that is too small. The watched keys are throttled and must not
/// be forgotten.
#[test]
fn flood_of_fresh_keys_never_hangs_nor_frees_a_throttled_key() {
    for quota in quotas() {
        let limiter = limiter(1_500);
        let (a, b) = (policy("a", quota), policy("b", Quota::per_hour(LIMIT)));
        let throttled: Vec<Key> = (0..20).map(|n| key(1_000_000 + n)).collect();
        for key in &throttled {
            assert!(limiter.take_one(&a, key, LIMIT).is_allowed());
        }
        let over = AtomicU64::new(0);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    for key in &throttled {
                        over.fetch_add(u64::from(limiter.take_one(&a, key, 1).is_allowed()), Ordering::Relaxed);
                        let set = [Charge::new(&b, key), Charge::new(&a, key)];
                        over.fetch_add(u64::from(limiter.take_now(&set).is_allowed()), Ordering::Relaxed);
                    }
                    let _ = limiter.snapshot();
                }
            });
            on_threads(3, |thread| {
                for n in 0..u64::from(cases(15_000)) {
                    let fresh = key(thread * 1_000_000_000 + n);
                    let other = key(thread * 2_000_000_000 + n);
                    match n % 4 {
                        0 => drop(limiter.take_one(&a, &fresh, 1)),
                        1 => drop(limiter.take_now(&[
                            Charge::new(&a, &fresh),
                            Charge::new(&b, &fresh),
                            Charge::new(&b, &other).effect(Effect::Observe),
                        ])),
                        2 => {
                            drop(limiter.take_now(&[Charge::new(&b, &fresh).cost(LIMIT + 1), Charge::new(&a, &other)]))
                        }
                        _ => limiter.reset_now(&a, &key(thread * 1_000_000_000 + n - 3)),
                    }
                }
            });
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(over.into_inner(), 0, "{quota}");
        let restored = MemoryLimiter::builder()
            .max_keys(1_500)
            .clock(ManualClock::new())
            .restore(limiter.snapshot())
            .build()
            .expect("the snapshot is whole");
        for key in &throttled {
            assert!(!restored.peek_one(&a, key, 1).is_allowed(), "{quota}");
        }
    }
}

#[test]
fn churn_with_refunds_never_charges_another_key() {
    // Nearly as many keys as slots: a slot changes its key within microseconds, and often gets the
    // very state that a thread has read before.
    const KEYS: u64 = 225;
    for quota in [Quota::per_hour(LIMIT), Quota::fixed_window(LIMIT, HOUR).expect("the quota is possible")] {
        let limiter = limiter(1_000);
        let policy = policy("a", quota);
        on_threads(8, |thread| {
            for n in 0..60_000 {
                let key = key(thread * KEYS + n * 7 % KEYS);
                let mut decision = limiter.take_one(&policy, &key, 1);
                assert!(decision.remaining() >= LIMIT - 1, "{quota}: somebody else's unit is on this key");
                if let Some(receipt) = decision.take_receipt() {
                    limiter.refund_now(&[Refund::new(policy.clone(), key, receipt)]);
                }
            }
        });
    }
}

#[test]
fn snapshot_has_every_state_that_lives_throughout_it() {
    let clock = ManualClock::new();
    let limiter = limiter(1_000);
    let policy = policy("a", Quota::per_hour(LIMIT));
    let (small, large) = (Quota::per_hour(LIMIT), Quota::sliding_log(LIMIT, HOUR).expect("the quota is possible"));
    let [small, large] = [small, large].map(|quota| Policy::new("moves", quota).expect("a name"));
    for n in 0..200 {
        assert!(limiter.take_one(&policy, &key(n), LIMIT).is_allowed());
    }
    assert!(limiter.take_one(&small, &key(0), 1).is_allowed());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // New keys move others to their second line, and one key moves between the tables.
        scope.spawn(|| {
            for n in 1_000.. {
                let _ = limiter.take_one(&policy, &key(n), 1);
                let changed = if n % 2 == 0 { &small } else { &large };
                let _ = limiter.take_one(changed, &key(0), 1);
                if stop.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        for _ in 0..cases(300) {
            let restored = MemoryLimiter::builder().max_keys(20_000).clock(clock.clone()).restore(limiter.snapshot());
            let restored = restored.build().expect("the snapshot is whole");
            let missing = (0..200).filter(|n| restored.peek_one(&policy, &key(*n), 1).is_allowed()).count();
            let moving = restored.peek_one(&small, &key(0), 0).remaining();
            if missing > 0 || moving == LIMIT {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!((missing, moving < LIMIT), (0, true), "states are missing");
        }
        stop.store(true, Ordering::Relaxed);
    });
}
