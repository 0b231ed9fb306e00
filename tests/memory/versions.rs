//! The limiter numbers the quotas that it meets. It reuses numbers, and a quota that gets none is
//! still decided correctly and remembered when it changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::Blocks,
    observe::{LimiterEvent, Observer},
};

const HOUR: Duration = Duration::from_secs(3_600);

/// The number of versions.
const VERSIONS: u64 = 16_382;

#[derive(Clone, Debug, Default)]
struct Reports(Arc<AtomicU64>);

impl Observer for Reports {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.fetch_add(u64::from(*event == LimiterEvent::TooManyQuotas), Ordering::Relaxed);
    }
}

fn limiter(clock: &ManualClock, reports: &Reports) -> MemoryLimiter {
    let builder = MemoryLimiter::builder().max_keys(50_000).clock(clock.clone()).observer(reports.clone());
    builder.build().expect("the setup is possible")
}

fn key(n: u64) -> Key {
    Key::of(n).expect("it is short")
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).expect("it is a name")
}

fn bucket(limit: u64) -> Quota {
    Quota::token_bucket(limit, HOUR).expect("the quota is possible")
}

#[test]
fn quota_that_changes_without_end_keeps_what_was_used() {
    let (clock, reports) = (ManualClock::new(), Reports::default());
    let limiter = limiter(&clock, &reports);
    // A state of a version that is no longer used stays beside it.
    let other = policy("other", bucket(7));
    assert!(limiter.take_one(&other, &key(2), 7).is_allowed());
    assert!(limiter.take_one(&policy("plan", bucket(10_000)), &key(1), 5_000).is_allowed());
    for n in 0..3 * VERSIONS {
        clock.advance(Duration::from_millis(5));
        let changed = policy("plan", bucket(10_001 + n));
        let left = limiter.take_one(&changed, &key(1), 0).remaining();
        // Four minutes pass in all, so at most 4,000 units are refilled.
        assert!(left <= 10_001 + n - 1_000, "change {n}: {left} are left");
        assert!(limiter.take_one(&changed, &key(1), u64::from(n % 10 == 0)).is_allowed());
    }
    assert_eq!(reports.0.load(Ordering::Relaxed), 0, "numbers are used again");
    assert!(limiter.peek_one(&other, &key(2), 1).remaining() < 7);
    assert_eq!(limiter.take_one(&other, &key(2), 0).remaining(), limiter.peek_one(&other, &key(2), 0).remaining());
}

#[tokio::test]
async fn blocks_by_hand_take_no_number_of_their_own() {
    let (clock, reports) = (ManualClock::new(), Reports::default());
    let limiter = limiter(&clock, &reports);
    let names = ["a", "b", "c", "d", "e", "f"];
    for (at, name) in names.into_iter().enumerate() {
        let block = policy(name, Quota::block(3, HOUR, HOUR).expect("the quota is possible"));
        let blocks = Blocks::new(limiter.clone(), block.clone()).expect("it is a block");
        for n in 0..3_300_u64 {
            let lasting = match n {
                0..1_000 => Duration::from_secs(n + 1),
                1_000..2_000 => Duration::from_secs(60 * (n - 999)),
                2_000..3_000 => Duration::from_secs(3_600 * (n - 1_999)),
                _ => Duration::from_secs(86_400 * (n - 2_959)),
            };
            let key = key(at as u64 * 10_000 + n);
            let told = blocks.block_for(&key, lasting).await.expect("memory does not fail").expect("it is closed");
            assert!(told >= lasting, "{told:?} of {lasting:?}");
            assert_eq!(blocks.blocked_for(&key).await.expect("memory does not fail"), Some(told), "{name} {n}");
            assert!(!limiter.take_one(&block, &key, 1).is_allowed(), "{name} {n}");
        }
    }
    // Six blocks leave room for as many other quotas as there are numbers.
    for n in 0..VERSIONS - 6 {
        assert!(limiter.take_one(&policy("plan", bucket(100 + n)), &key(n), 1).is_allowed());
    }
    assert_eq!(reports.0.load(Ordering::Relaxed), 0);
}

#[test]
fn meter_beyond_the_last_number_can_be_evicted() {
    let (clock, reports) = (ManualClock::new(), Reports::default());
    let limiter = limiter(&clock, &reports);
    let meter = Quota::meter(10, HOUR).expect("the quota is possible");
    let [first, last] = ["first", "last"].map(|name| policy(name, meter));
    let keys = || (0..50).map(key);
    keys().for_each(|key| assert!(limiter.take_one(&first, &key, 9).is_allowed()));
    for n in 0..VERSIONS {
        assert!(limiter.take_one(&policy("plan", bucket(10 + n)), &key(n), 1).is_allowed());
    }
    keys().for_each(|key| assert!(limiter.take_one(&last, &key, 9).is_allowed()));
    assert_eq!(reports.0.load(Ordering::Relaxed), 1);
    // The table is full of keys that have no allowance left, which are worth more than the rest of a meter.
    (0..200_000).for_each(|n| _ = limiter.take_one(&policy("plan", bucket(10)), &key(1_000_000 + n), 10));
    let kept = |policy: &Policy| keys().filter(|key| limiter.peek_one(policy, key, 0).remaining() == 1).count();
    assert_eq!(kept(&first), 50, "a meter with a number is never evicted");
    assert!(kept(&last) < 50, "or the documentation may promise that it stays");
}

#[tokio::test]
async fn quotas_beyond_the_last_number_hold_and_are_reported() {
    let (clock, reports) = (ManualClock::new(), Reports::default());
    let limiter = limiter(&clock, &reports);
    let all = VERSIONS + 300;
    for n in 0..all {
        assert!(limiter.take_one(&policy("plan", bucket(10 + n)), &key(n), 10 + n).is_allowed());
    }
    assert_eq!(reports.0.load(Ordering::Relaxed), 1, "once");
    for n in 0..all {
        assert!(!limiter.take_one(&policy("plan", bucket(10 + n)), &key(n), 1).is_allowed(), "quota {n}");
    }
    // A block without a number still closes its key.
    let block = policy("block", Quota::block(3, HOUR, HOUR).expect("the quota is possible"));
    let blocks = Blocks::new(limiter.clone(), block.clone()).expect("it is a block");
    let told = blocks.block_for(&key(1), 48 * HOUR).await.expect("memory does not fail");
    assert_eq!(told, Some(48 * HOUR));
    assert_eq!(blocks.blocked_for(&key(1)).await.expect("memory does not fail"), told);
    assert!(!limiter.take_one(&block, &key(1), 1).is_allowed());
    // It is reported again, at most every ten seconds.
    for (seconds, count) in [(9, 1), (2, 2), (0, 2)] {
        clock.advance(Duration::from_secs(seconds));
        let _ = limiter.take_one(&policy("plan", bucket(all)), &key(0), 0);
        let _ = limiter.take_one(&policy("plan", bucket(10 + all)), &key(0), 0);
        assert_eq!(reports.0.load(Ordering::Relaxed), count, "after {seconds} seconds more");
    }
    // Once the states have expired, numbers are free again.
    for _ in 0..3 {
        clock.advance(2 * HOUR);
        let _ = limiter.take_one(&policy("plan", bucket(1)), &key(0), 1);
    }
    let before = reports.0.load(Ordering::Relaxed);
    for n in 0..300 {
        let old = policy("late", bucket(100 + n));
        let new = policy("late", bucket(1_000 + n));
        assert!(limiter.take_one(&old, &key(n), 100 + n).is_allowed());
        assert!(limiter.take_one(&new, &key(n), 0).remaining() <= 900, "what was used is kept");
    }
    assert_eq!(reports.0.load(Ordering::Relaxed), before);
}

/// Quotas of each shape of state: a word, a pair in the arena, and dated entries.
fn shape(n: u64, limit: u64) -> Quota {
    match n % 5 {
        0 => Quota::sliding_window(limit, HOUR).expect("the quota is possible"),
        1 => Quota::sliding_log(limit, HOUR).expect("the quota is possible"),
        2 => Quota::fixed_window(limit, 2 * HOUR).expect("the quota is possible"),
        3 => Quota::token_bucket(limit, Duration::from_secs(3_601)).expect("the quota is possible"),
        _ => bucket(limit),
    }
}

#[test]
fn a_hundred_thousand_quotas_keep_usage_when_they_change() {
    const KEYS: u64 = 100_000;
    let clock = ManualClock::at(tower_ratelimit::clock::Timestamp::from_micros(1_790_000_000_000_000));
    let reports = Reports::default();
    let builder = MemoryLimiter::builder().max_keys(400_000).clock(clock.clone()).observer(reports.clone());
    let limiter = builder.build().expect("the setup is possible");
    let of = |n: u64, round: u64| policy("customer", shape(n, 1_000 + n + round * KEYS));
    let left = |n: u64, round: u64| limiter.peek_one(&of(n, round), &key(n), 0).remaining();
    for n in 0..KEYS {
        assert!(limiter.take_one(&of(n, 0), &key(n), 100).is_allowed());
    }
    assert!(reports.0.load(Ordering::Relaxed) > 0, "most have no number");
    for round in 1..4 {
        for n in 0..KEYS {
            let left = limiter.take_one(&of(n, round), &key(n), 10).remaining();
            let exact = 900 + n + round * KEYS - 10 * round;
            // A change may round up by less than a unit.
            assert!((exact - round..=exact).contains(&left), "{left} left of {n} in round {round}, and not {exact}");
        }
    }
    // One that has used all stays used up, and is forgotten only when it is reset.
    for n in 0..100 {
        let n = KEYS - 1 - n;
        assert!(limiter.take_one(&of(n, 3), &key(n), left(n, 3)).is_allowed());
        assert!(!limiter.take_one(&of(n, 3), &key(n), 1).is_allowed());
        assert!(limiter.peek_one(&of(n, 1), &key(n), 1).remaining() < 100, "a smaller one is used up, too");
        limiter.reset_now(&of(n, 0), &key(n));
        assert_eq!(left(n, 3), 1_000 + n + 3 * KEYS);
    }
    // The states expire, their numbers are used again, and blocks with them.
    clock.advance(10 * HOUR);
    for phase in 0..3 {
        clock.advance(Duration::from_secs(11));
        let _ = limiter.take_one(&of(phase, 9), &key(phase), 1);
    }
    for n in 0..KEYS {
        assert!(limiter.take_one(&of(n, 5), &key(n), 100).is_allowed());
        let (left, exact) = (limiter.take_one(&of(n, 6), &key(n), 0).remaining(), 900 + n + 6 * KEYS);
        assert!((exact - 1..=exact).contains(&left), "{left} left of {n}");
    }
}
