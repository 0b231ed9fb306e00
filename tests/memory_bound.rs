//! The memory of the limiter under an endless stream of fresh keys. A binary of its own, one test at a time, so that nothing else
//! moves what the system says.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::{Key, LimiterEvent, ManualClock, MemoryLimiter, Observer, Policy, Quota};

const CAPACITY: usize = 100_000;
const HOUR: Duration = Duration::from_secs(3_600);

/// Bytes of this process that are in memory, as Linux tells.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1_024)
}

/// How many keys were forgotten.
#[derive(Clone, Default)]
struct Forgotten(Arc<AtomicU64>);

impl Observer for Forgotten {
    fn on_event(&self, _: &LimiterEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bounds of one stream of fresh keys.
struct Bounds {
    keys: u64,
    /// Units of each.
    cost: u64,
    /// What the limiter's documentation says that its tables take.
    bytes: usize,
    /// How many keys one call forgets at most.
    per_call: u64,
}

fn flood(quota: Quota, bounds: &Bounds) {
    let before = resident();
    assert_eq!(before.is_some(), cfg!(target_os = "linux"), "Linux tells what is in memory");
    let forgotten = Forgotten::default();
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder()
        .capacity(CAPACITY)
        .clock(clock.clone())
        .observer(forgotten.clone())
        .build()
        .expect("the setup is possible");
    let policy = Policy::from(quota);
    let mut seen = 0;
    let mut most = 0;
    for n in 0..bounds.keys {
        if n % 1_000 == 0 {
            clock.advance(Duration::from_millis(1));
        }
        let key = Key::of(n).expect("an integer makes a key");
        assert!(limiter.take_one(&policy, &key, bounds.cost).is_allowed(), "{quota}: a full table evicts");
        let now = forgotten.0.load(Ordering::Relaxed);
        most = most.max(now - seen);
        seen = now;
    }
    assert!(seen > 50_000, "{quota}: the stream was larger than the table, and {seen} were forgotten");
    assert!(most <= bounds.per_call, "{quota}: one call forgot {most}");
    assert!(limiter.bytes() <= bounds.bytes, "{quota}: {} bytes", limiter.bytes());
    if let (Some(before), Some(after)) = (before, resident()) {
        // A megabyte beside the tables: stripes, the registry, and what the allocator keeps.
        let grown = after.saturating_sub(before);
        assert!(grown <= bounds.bytes as u64 + (1 << 20), "{quota}: {grown} bytes more, of {}", bounds.bytes);
        println!("{quota}: {grown} bytes more in memory, of {}; {seen} forgotten, {most} in a call", bounds.bytes);
    }
}

/// The documented sum, for states larger than a word, of a table that holds so many entries a key.
fn of_large_states(entries: f64) -> usize {
    let words = 40 * CAPACITY;
    words + 128 * CAPACITY + (18.3 * entries * CAPACITY as f64) as usize
}

/// Each key lives for a quarter of a second, in which a quarter of a million come.
fn flood_words(keys: u64) {
    // A word's slots: one set is two lines of four, and one of them goes.
    flood(Quota::per_second(4), &Bounds { keys, cost: 1, bytes: OF_WORDS, per_call: 1 });
}

/// The documented sum for states of one word, and the line that is lost to alignment.
const OF_WORDS: usize = 40 * CAPACITY + 128;

#[test]
fn fresh_keys_without_end_stay_within_the_documented_memory() {
    let quota = |quota: Result<Quota, tower_ratelimit::QuotaError>| quota.expect("the quota is possible");
    flood_words(10_000_000);
    flood(quota(Quota::fixed_window(100, HOUR)), &Bounds { keys: 300_000, cost: 1, bytes: OF_WORDS, per_call: 1 });
    // There are four slots of large states for each key of the capacity; one of a key's two sets goes.
    for (quota, cost) in [
        (quota(Quota::sliding_log(100, HOUR)), 1),
        (quota(quota(Quota::sliding_window(100, HOUR)).buckets(60)), 1),
        (quota(Quota::token_bucket(99_999_999, HOUR)), 50_000_000),
    ] {
        let bytes = of_large_states(8.0) + (64 << 10);
        flood(quota, &Bounds { keys: 500_000, cost, bytes, per_call: 1 });
    }
}
