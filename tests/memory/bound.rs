//! The limiter's memory stays within its documented bound under an endless stream of fresh keys.
//!
//! The test runs itself as a process of its own, so that no other test changes the memory that the
//! system reports. Daily work takes a table of two fifths, and `RATELIMIT_CAMPAIGN=5` five times the keys.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    observe::{LimiterEvent, Observer},
};

use crate::support::{cases, resident};

/// Set in the child process, which measures.
const CHILD: &str = "RATELIMIT_BOUND_CHILD";

/// The most keys of the limiters.
fn capacity() -> usize {
    if std::env::var_os("RATELIMIT_CAMPAIGN").is_some() { 50_000 } else { 20_000 }
}

const HOUR: Duration = Duration::from_secs(3_600);

/// Counts the forgotten keys.
#[derive(Clone, Default)]
struct Forgotten(Arc<AtomicU64>);

impl Observer for Forgotten {
    fn on_limiter_event(&self, _: &LimiterEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bounds of one stream of fresh keys.
struct Bounds {
    /// How many times the table's capacity comes, so that the table is filled several times.
    tables: u64,
    /// Units that each key takes.
    cost: u64,
    /// The documented size of the limiter's tables.
    bytes: usize,
    /// The most keys that one call may forget.
    per_call: u64,
}

fn flood(quota: Quota, bounds: &Bounds) {
    let before = resident();
    assert_eq!(before.is_some(), cfg!(target_os = "linux"), "Linux tells what is in memory");
    let forgotten = Forgotten::default();
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder()
        .max_keys(capacity())
        .clock(clock.clone())
        .observer(forgotten.clone())
        .build()
        .expect("the setup is possible");
    let policy = Policy::from(quota);
    let mut seen = 0;
    let mut most = 0;
    for n in 0..bounds.tables * capacity() as u64 {
        if n % 1_000 == 0 {
            clock.advance(Duration::from_millis(1));
        }
        let key = Key::of(n).expect("an integer makes a key");
        assert!(limiter.take_one(&policy, &key, bounds.cost).is_allowed(), "{quota}: a full table evicts");
        let now = forgotten.0.load(Ordering::Relaxed);
        most = most.max(now - seen);
        seen = now;
    }
    assert!(seen > capacity() as u64 / 2, "{quota}: the stream was larger than the table, and {seen} were forgotten");
    assert!(most <= bounds.per_call, "{quota}: one call forgot {most}");
    assert!(limiter.bytes() <= bounds.bytes, "{quota}: {} bytes", limiter.bytes());
    if let (Some(before), Some(after)) = (before, resident()) {
        // A megabyte beside the tables is for stripes, the registry and the allocator.
        let grown = after.saturating_sub(before);
        assert!(grown <= bounds.bytes as u64 + (1 << 20), "{quota}: {grown} bytes more, of {}", bounds.bytes);
        println!("{quota}: {grown} bytes more in memory, of {}; {seen} forgotten, {most} in a call", bounds.bytes);
    }
}

/// Each key lives for a quarter of a second, in which a quarter of a million come.
fn flood_words(tables: u64) {
    // A word's slots: one set is two lines of four, and one of them goes.
    flood(Quota::per_second(4), &Bounds { tables, cost: 1, bytes: of_words(), per_call: 1 });
}

/// Returns the documented size for states of one word, and one cache line of alignment.
fn of_words() -> usize {
    40 * capacity() + 128
}

/// Returns the documented sum for any states, and the block that stands for none.
fn of_all() -> usize {
    of_words() + 320 * capacity() + 128
}

/// Runs a test of this file in a process of its own; `false` in that process.
fn run_alone(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return false;
    }
    let output = Command::new(std::env::current_exe().expect("the test knows its own file"))
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("the test starts itself");
    let written = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert!(output.status.success() && written.contains("1 passed"), "{written}");
    println!("{written}");
    true
}

#[test]
fn few_keys_take_little_memory_whatever_the_capacity() {
    if run_alone("bound::few_keys_take_little_memory_whatever_the_capacity") {
        return;
    }
    let before = resident();
    let limiter = MemoryLimiter::builder().max_keys(10_000_000).build().expect("the setup is possible");
    let policy = Policy::from(Quota::per_hour(10));
    let keys = 10_000;
    for n in 0..keys {
        assert!(limiter.take_one(&policy, &Key::of(n).expect("an integer makes a key"), 1).is_allowed());
    }
    if let (Some(before), Some(after)) = (before, resident()) {
        let each = after.saturating_sub(before) / keys;
        assert!(each <= 100, "{each} bytes for each key");
    }
}

#[test]
fn fresh_keys_without_end_stay_within_the_documented_memory() {
    if run_alone("bound::fresh_keys_without_end_stay_within_the_documented_memory") {
        return;
    }
    let quota = |quota: Result<Quota, tower_ratelimit::ConfigError>| quota.expect("the quota is possible");
    flood_words(u64::from(cases(20).max(5)));
    flood(quota(Quota::fixed_window(100, HOUR)), &Bounds { tables: 3, cost: 1, bytes: of_words(), per_call: 1 });
    for (quota, cost) in [
        (quota(Quota::sliding_log(100, HOUR)), 1),
        (quota(quota(Quota::sliding_window(100, HOUR)).buckets(60)), 1),
        (quota(Quota::token_bucket(99_999_999, HOUR)), 50_000_000),
    ] {
        flood(quota, &Bounds { tables: 5, cost, bytes: of_all(), per_call: 1 });
    }
}
