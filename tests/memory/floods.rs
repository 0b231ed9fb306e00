//! Floods of fresh keys, each used up: the limiter forgets no exhausted state before twice as many
//! keys as its capacity have come. Closed blocks are forgotten last.
//!
//! `FLOOD_TABLE=1` continues until every state is forgotten, and prints the table in the
//! documentation of `limiter::memory`.

use std::time::Duration;

use tower_ratelimit::{ConfigError, Key, MemoryLimiter, Policy, Quota, clock::ManualClock};

use crate::support::stride;

const HOUR: Duration = Duration::from_secs(3_600);
const CAPACITY: u64 = 10_000;

/// The number of watched states of each kind.
const WATCHED: u64 = 50;

/// A kind of state, and the number of charges that use it up.
struct Kind {
    name: &'static str,
    policy: Policy,
    charges: u64,
    cost: u64,
}

fn kinds() -> Vec<Kind> {
    let kind = |name: &'static str, quota: Result<Quota, ConfigError>, charges, cost| {
        let quota = quota.expect("the quota is possible");
        Kind { name, policy: Policy::new(name, quota).expect("it is a name"), charges, cost }
    };
    vec![
        kind("bucket, one word", Quota::token_bucket(10, HOUR), 1, 10),
        kind("window, one word", Quota::fixed_window(10, HOUR), 1, 10),
        kind(
            "bucket, two words",
            Quota::token_bucket(99_991, 366 * 24 * HOUR).and_then(|quota| quota.burst(10)),
            1,
            10,
        ),
        kind("six sub-windows", Quota::sliding_window(6, HOUR).and_then(|quota| quota.buckets(6)), 6, 1),
        kind("log of 1", Quota::sliding_log(1, HOUR), 1, 1),
        kind("log of 100", Quota::sliding_log(100, HOUR), 100, 1),
        kind("block", Quota::block(10, HOUR, HOUR), 1, 10),
        kind("meter", Quota::meter(10, HOUR), 1, 10),
    ]
}

fn use_up(limiter: &MemoryLimiter, clock: &ManualClock, kind: &Kind, key: u64) -> bool {
    let key = Key::of(key).expect("it is short");
    (0..kind.charges).all(|_| {
        clock.advance(Duration::from_nanos(1)); // a microsecond: each charge of a log is an entry of its own
        limiter.take_one(&kind.policy, &key, kind.cost).is_allowed()
    })
}

/// Returns how many watched states of a kind are still exhausted.
fn held(limiter: &MemoryLimiter, kind: &Kind) -> u64 {
    let is_held = |n: &u64| {
        let key = Key::of(u64::MAX - n).expect("it is short");
        !limiter.peek_one(&kind.policy, &key, 1).is_allowed()
    };
    (0..WATCHED).filter(is_held).count() as u64
}

#[test]
fn flood_of_used_up_keys_forgets_none_before_twice_the_capacity() {
    let goes_on = std::env::var_os("FLOOD_TABLE").is_some();
    let kinds = kinds();
    for flood in kinds.iter().step_by(stride()) {
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder()
            .max_keys(CAPACITY as usize)
            .clock(clock.clone())
            .build()
            .expect("the setup is possible");
        for kind in &kinds {
            for n in 0..WATCHED {
                assert!(use_up(&limiter, &clock, kind, u64::MAX - n), "{}", kind.name);
            }
        }
        // The keys of the flood that had come, in tenths of the capacity, when its first state was forgotten, and when
        // half of its states were.
        let mut forgotten = vec![(None, None); kinds.len()];
        let tenths = if goes_on { 60 } else { 20 };
        for tenth in 1..=tenths {
            for n in 0..CAPACITY / 10 {
                let _ = use_up(&limiter, &clock, flood, tenth * CAPACITY + n);
            }
            for (kind, (first, half)) in kinds.iter().zip(&mut forgotten) {
                let held = held(&limiter, kind);
                if held < WATCHED {
                    first.get_or_insert(tenth);
                }
                if held <= WATCHED / 2 {
                    half.get_or_insert(tenth);
                }
            }
        }
        for (kind, (first, half)) in kinds.iter().zip(&forgotten) {
            if goes_on {
                println!("{} | {} | {first:?} | {half:?}", flood.name, kind.name);
            }
            assert!(first.is_none_or(|tenth| tenth > 20), "{} in a flood of {}: {first:?}", kind.name, flood.name);
            // Only blocks evict blocks.
            assert!(kind.name != "block" || flood.name == "block" || first.is_none(), "flood of {}", flood.name);
            assert!(kind.name != "meter" || first.is_none(), "a meter is never forgotten");
        }
    }
}

#[test]
fn flood_of_meters_forgets_no_used_up_key() {
    let (clock, kinds) = (ManualClock::new(), kinds());
    let limiter = MemoryLimiter::builder()
        .max_keys(CAPACITY as usize)
        .clock(clock.clone())
        .build()
        .expect("the setup is possible");
    let kind = |name| kinds.iter().find(|kind| kind.name == name).expect("it is a kind");
    let (window, meter) = (kind("window, one word"), kind("meter"));
    // Some lines have three of these keys, which are in the way of a line's second meter. Nearly always one of the
    // three can move to its other line: the chance that none can is below 1 in 100,000 for each of about seven such
    // lines, and then its other line has to be full as well.
    let watched = CAPACITY / 8;
    for n in 0..watched {
        assert!(use_up(&limiter, &clock, window, u64::MAX - n));
    }
    let denied = (0..3 * CAPACITY).filter(|n| !use_up(&limiter, &clock, meter, *n)).count();
    assert!(denied > 0, "the flood did not fill what meters may take");
    for n in 0..watched {
        let key = Key::of(u64::MAX - n).expect("it is short");
        assert!(!limiter.peek_one(&window.policy, &key, 1).is_allowed(), "{n} was forgotten");
    }
}
