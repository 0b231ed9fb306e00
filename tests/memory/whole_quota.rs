//! A single key may use its whole quota, whatever the algorithm, the size of its state and the size
//! of the limiter.
//!
//! Each bound, the effect of reaching it, and the test that reaches it:
//!
//! * slots: a state is evicted, or the new key is denied (`limiter.rs`, `floods.rs`);
//! * slots that meters may take, half of all: the new meter is denied (`on_refusal.rs`);
//! * dated entries: neighbours are merged (`full_arena_refuses_and_forgets_no_key`, and the unit
//!   tests of the arena);
//! * entries of one key: the quota is not supported (`quota_that_never_fits_is_not_supported`);
//! * numbers of quotas: they are reused, and the last one is reported (`versions.rs`);
//! * the limiter's time: it stops at either end (`clock_at_either_end_of_time_never_panics`).

use std::time::Duration;

use tower_ratelimit::limiter::memory::OnFull;
use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::{Limiter, Refund, UnsupportedQuotaKind},
    quota::{Algorithm, Anchor, Oldest},
};

use crate::support::of_each_algorithm_but;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn key(n: u64) -> Key {
    Key::of(n).expect("it is short")
}

fn builder(clock: &ManualClock) -> tower_ratelimit::limiter::memory::MemoryLimiterBuilder {
    MemoryLimiter::builder().clock(clock.clone())
}

/// Returns how many of `units` single units pass, one per `step`.
fn admitted(limiter: &MemoryLimiter, clock: &ManualClock, policy: &Policy, units: u64, step: Duration) -> u64 {
    let key = key(1);
    let passes = |_: &u64| {
        clock.advance(step);
        limiter.take_one(policy, &key, 1).is_allowed()
    };
    (0..units).filter(passes).count() as u64
}

fn quotas(limit: u64) -> Vec<Quota> {
    let buckets = 3_600_u64.min(limit) as u32; // at most 3,600
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(limit, HOUR)?.burst(limit)?,
            Quota::gcra(limit, HOUR)?.burst(limit)?,
            Quota::leaky_bucket(limit, HOUR)?,
            Quota::token_bucket(99_991, HOUR)?.burst(limit)?, // two words
            Quota::step_bucket(limit, HOUR)?,
            Quota::fixed_window(limit, HOUR)?,
            Quota::fixed_window(limit, HOUR)?.anchor(Anchor::FirstRequest)?,
            Quota::sliding_window(limit, HOUR)?,
            Quota::sliding_window(limit, HOUR)?.buckets(60)?,
            Quota::sliding_window(limit, HOUR)?.buckets(buckets)?,
            Quota::sliding_window(limit, HOUR)?.buckets(buckets)?.oldest(Oldest::Counted)?,
            Quota::sliding_log(limit, HOUR)?,
            Quota::sliding_log(limit, HOUR)?.count_denied()?,
            Quota::block(limit.min(4_095), HOUR, HOUR)?,
            Quota::meter(limit, HOUR)?,
        ])
    };
    // A leaky queue counts as a leaky bucket does, and has one unit more.
    of_each_algorithm_but(&[Algorithm::LeakyQueue], each().expect("the quotas are possible"))
}

#[test]
fn client_alone_uses_its_whole_quota_at_every_capacity() {
    // A table of one shard, and one of several.
    for capacity in [1, 2, 100, 1_500, 10_000] {
        for quota in quotas(3_600) {
            let clock = ManualClock::new();
            let limiter = builder(&clock).max_keys(capacity).build().expect("the setup is possible");
            assert_eq!(limiter.supports(&quota), Ok(()), "{quota}");
            let policy = Policy::from(quota);
            let limit = quota.capacity();
            // Each unit has its own instant, within a hundredth of the period.
            let passed = admitted(&limiter, &clock, &policy, limit, Duration::from_micros(5_000));
            assert_eq!(passed, limit, "{quota}, capacity {capacity}");
        }
    }
}

#[test]
fn sliding_log_at_its_bound_admits_each_unit_as_one_expires() {
    let clock = ManualClock::new();
    let policy = Policy::from(Quota::sliding_log(10_000, SECOND).expect("the quota is possible"));
    for (capacity, entries) in [(10_000, None), (100, None), (100, Some(10_000)), (1, Some(10_000))] {
        let mut builder = builder(&clock).max_keys(capacity);
        if let Some(entries) = entries {
            builder = builder.min_entries(entries);
        }
        let limiter = builder.build().expect("the setup is possible");
        // 20,000 per second come, and exactly 10,000 per second pass.
        let step = Duration::from_micros(50);
        assert_eq!(admitted(&limiter, &clock, &policy, 20_000, step), 10_000);
        assert_eq!(admitted(&limiter, &clock, &policy, 20_000, step), 10_000, "capacity {capacity}, {entries:?}");
    }
}

#[test]
fn sliding_log_admits_its_whole_limit_by_default() {
    let limiter = MemoryLimiter::new();
    let quota = Quota::sliding_log(200_000, HOUR).expect("the quota is possible");
    assert_eq!(limiter.supports(&quota), Ok(()));
    let (policy, key) = (Policy::from(quota), key(1));
    let admitted = (0..200_100).filter(|_| limiter.take_one(&policy, &key, 1).is_allowed()).count();
    assert_eq!(admitted, 200_000);
}

#[test]
fn sub_windows_of_the_smallest_limiter_hold_one_key() {
    for capacity in [1, 100] {
        let clock = ManualClock::new();
        let limiter = builder(&clock).max_keys(capacity).build().expect("the setup is possible");
        let quota = Quota::sliding_window(3_600, HOUR).and_then(|quota| quota.buckets(3_600));
        let policy = Policy::from(quota.expect("the quota is possible"));
        assert_eq!(admitted(&limiter, &clock, &policy, 3_600, SECOND), 3_600, "capacity {capacity}");
    }
}

#[test]
fn quota_that_never_fits_is_not_supported() {
    let limiter = MemoryLimiter::builder().max_keys(100).min_entries(1_998).build().expect("the setup is possible");
    let log = |limit| Quota::sliding_log(limit, HOUR).expect("the quota is possible");
    assert_eq!(limiter.supports(&log(1_998)), Ok(()));
    let error = limiter.supports(&log(1_999)).expect_err("one entry is missing");
    assert_eq!(error.kind(), UnsupportedQuotaKind::TooLarge);
    assert!(error.to_string().contains(".min_entries(1999)"), "{error}");
    let windows =
        Quota::sliding_window(10, HOUR).and_then(|quota| quota.buckets(2_000)).expect("the quota is possible");
    assert!(limiter.supports(&windows).is_err());
}

#[test]
fn full_arena_refuses_and_forgets_no_key() {
    for on_full in [OnFull::Evict, OnFull::Deny] {
        let clock = ManualClock::new();
        let limiter =
            builder(&clock).max_keys(1_000).min_entries(700).on_full(on_full).build().expect("the setup is possible");
        let policy = Policy::from(Quota::sliding_log(50, HOUR).expect("the quota is possible"));
        // Half as many keys as fit ask for ten times as many entries as there are.
        for unit in 0..20 {
            for n in 0..500 {
                clock.advance(Duration::from_micros(10));
                assert!(limiter.take_one(&policy, &key(n), 1).is_allowed(), "{on_full:?}: unit {unit} of key {n}");
            }
        }
        for n in 0..500 {
            assert_eq!(limiter.peek_one(&policy, &key(n), 0).remaining(), 30, "{on_full:?}: key {n}");
        }
        // A merged entry counts until the latest of its dates expires.
        clock.advance(HOUR);
        for n in 0..500 {
            assert_eq!(limiter.peek_one(&policy, &key(n), 0).remaining(), 50, "{on_full:?}: key {n}");
        }
    }
}

#[test]
fn reset_and_refund_in_a_full_arena_delay_no_other_key() {
    let clock = ManualClock::new();
    let limiter = builder(&clock).max_keys(1_000).min_entries(700).build().expect("the setup is possible");
    let policy = Policy::from(Quota::sliding_log(50, HOUR).expect("the quota is possible"));
    let mut receipts = Vec::new();
    for unit in 0..20 {
        for n in 0..1_000 {
            clock.advance(Duration::from_micros(10));
            let mut decision = limiter.take_one(&policy, &key(n), 1);
            receipts.extend(decision.take_receipt().filter(|_| unit == 19 && n < 100).map(|receipt| (n, receipt)));
        }
    }
    let waits =
        |n| -> Vec<_> { (1..=50).map(|cost| limiter.peek_one(&policy, &key(n), cost).wait().duration()).collect() };
    let before: Vec<_> = (200..1_000).map(waits).collect();
    for (n, receipt) in receipts {
        limiter.refund_now(&[Refund::new(policy.clone(), key(n), receipt)]);
    }
    (100..200).for_each(|n| limiter.reset_now(&policy, &key(n)));
    let after: Vec<_> = (200..1_000).map(waits).collect();
    assert!(before == after);
}

#[test]
fn folded_log_is_never_laxer_than_the_quota() {
    let clock = ManualClock::new();
    let limiter = builder(&clock).max_keys(10).min_entries(70).build().expect("the setup is possible");
    let policy = Policy::from(Quota::sliding_log(20, SECOND).expect("the quota is possible"));
    let mut admitted = vec![Vec::new(); 10];
    for at in 0..20_000_u64 {
        clock.advance(Duration::from_micros(777));
        let n = (at * 7 % 10) as usize;
        if limiter.take_one(&policy, &key(n as u64), 1).is_allowed() {
            admitted[n].push(at * 777);
        }
    }
    for times in admitted {
        assert!(times.len() > 100, "a log that is folded still admits: {}", times.len());
        assert!(times.windows(21).all(|window| window[20] - window[0] >= 1_000_000));
    }
}
