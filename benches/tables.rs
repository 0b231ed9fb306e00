//! Two ways to keep one-word states, on one thread and on two: the table that the crate has, and the one it might have
//! had.
//!
//! `cargo bench --bench tables`
//!
//! The two bare contenders do the same work on the same key: hash, find, one decision of a token bucket in whole
//! microseconds, write. The clock is a number, so that only the tables differ. The third line is the crate's public
//! path with all that it does on top of that: versions of policies, exact fractions, receipts, every figure of the
//! decision.
//!
//! # What was found, and why the flat table was kept
//!
//! On a busy machine of two shared processors (Xeon, 2.5 GHz, rustc 1.95, LTO), three runs, the flat table's time
//! against the sharded one's:
//!
//! | | hot key | 10k keys | 1M keys |
//! |---|---|---|---|
//! | one thread | 0.93 to 1.14 | 0.94 to 1.14 | 1.05 to 1.26 |
//! | two threads | 0.54 to 0.97 | 0.83 to 1.20 | 0.99 to 1.05 |
//!
//! So time does not decide between them. The rest does. A thread that loses the processor
//! while it writes into the flat table delays only those that need the same slot; a denied key only reads; it grows a few keys at a time, so no call waits for a copy of
//! the whole; it is 40 bytes for each key at its bound whatever the key is; and an expired slot is free without being
//! removed. The sharded one never forgets a live key.

mod support;

use std::hash::BuildHasher;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashTable;
use support::{Contender, Numbers, is_wanted, print_case, race};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, clock::ManualClock};

const SHARDS: usize = 64;
const NOW_US: u64 = 1_000_000_000;
const INTERVAL_US: u64 = 1;
const CAPACITY_US: u64 = 1_000_000_000_000;

/// Shards of hashbrown under small locks: a fingerprint and an instant for each key; of what has expired up to four are
/// removed at each insertion, so that it grows by itself and needs no sweep.
struct Sharded {
    shards: Vec<Mutex<Shard>>,
    hash: foldhash::quality::RandomState,
}

#[derive(Default)]
struct Shard {
    table: HashTable<(u64, u64)>,
    hand: u64,
}

impl Sharded {
    fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hash: foldhash::quality::RandomState::default(),
        }
    }

    fn take(&self, key: &Key) -> (bool, u64) {
        let tag = self.hash.hash_one(key);
        let shard = &self.shards[(tag >> 32) as usize % SHARDS];
        let mut shard = shard.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((_, tail)) = shard.table.find_mut(tag, |(other, _)| *other == tag) {
            let after = (*tail).max(NOW_US) + INTERVAL_US;
            if after - NOW_US > CAPACITY_US {
                return (false, after - NOW_US - CAPACITY_US);
            }
            *tail = after;
            return (true, (CAPACITY_US - (after - NOW_US)) / INTERVAL_US);
        }
        for _ in 0..4 {
            shard.hand = shard.hand.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let hand = shard.hand;
            if let Ok(entry) = shard.table.find_entry(hand, |(_, tail)| *tail <= NOW_US) {
                entry.remove();
            }
        }
        shard.table.insert_unique(tag, (tag, NOW_US + INTERVAL_US), |(tag, _)| *tag);
        (true, CAPACITY_US / INTERVAL_US)
    }
}

/// Lines of four slots of a fingerprint and an instant, in two of which a key may live: the crate's design, bare. What
/// is expired is not taken over here: every key fits.
struct Flat {
    words: Vec<AtomicU64>,
    lines: usize,
    hash: foldhash::quality::RandomState,
}

impl Flat {
    fn new(keys: usize) -> Self {
        let lines = (keys / 2).max(2);
        let words = (0..(lines + 1) * 8).map(|_| AtomicU64::new(0)).collect();
        Self { words, lines, hash: foldhash::quality::RandomState::default() }
    }

    fn take(&self, key: &Key) -> (bool, u64) {
        let tag = self.hash.hash_one(key).max(1);
        let scale = |hash: u64| ((u128::from(hash) * self.lines as u128) >> 64) as usize * 8;
        let lines = [scale(tag), scale((tag ^ tag >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15))];
        loop {
            let mut at = None;
            for line in lines {
                let hit = |slot: usize| usize::from(self.words[line + 2 * slot].load(Ordering::Acquire) == tag) << slot;
                let hits = hit(0) | hit(1) | hit(2) | hit(3);
                if hits != 0 {
                    at = Some(line + 2 * hits.trailing_zeros() as usize);
                    break;
                }
            }
            let at = at.or_else(|| {
                lines
                    .into_iter()
                    .flat_map(|line| (0..4).map(move |slot| line + 2 * slot))
                    .find(|at| self.words[*at].compare_exchange(0, tag, Ordering::AcqRel, Ordering::Relaxed).is_ok())
            });
            let Some(at) = at else { return (false, 0) };
            let state = &self.words[at + 1];
            let tail = state.load(Ordering::Acquire);
            let after = tail.max(NOW_US) + INTERVAL_US;
            if after - NOW_US > CAPACITY_US {
                return (false, after - NOW_US - CAPACITY_US);
            }
            if state.compare_exchange(tail, after, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return (true, (CAPACITY_US - (after - NOW_US)) / INTERVAL_US);
            }
        }
    }
}

fn main() {
    let policy = Policy::from(
        Quota::token_bucket(1_000_000, std::time::Duration::from_secs(1))
            .and_then(|quota| quota.burst(1_000_000_000_000))
            .expect("the quota is possible"),
    );
    for (name, count, threads) in [
        ("hot key", 1, 1),
        ("10k keys", 10_000, 1),
        ("1M keys", 1_000_000, 1),
        ("hot key, two threads", 1, 2),
        ("10k keys, two threads", 10_000, 2),
        ("1M keys, two threads", 1_000_000, 2),
    ] {
        if !is_wanted(name) {
            continue;
        }
        let keys: Vec<Key> = (0..count).filter_map(|n: u64| Key::of(n)).collect();
        let sharded = Sharded::new();
        let flat = Flat::new(keys.len());
        let limiter = MemoryLimiter::builder()
            .max_keys(keys.len().max(1_000))
            .clock(ManualClock::new())
            .build()
            .expect("the setup is possible");
        let both = |n: u64, work: &(dyn Fn(&Key) + Sync)| {
            let walk = |seed: u64| {
                let mut numbers = Numbers(seed);
                (0..n).for_each(|_| work(&keys[numbers.below(count) as usize]));
            };
            std::thread::scope(|scope| {
                for thread in 1..threads {
                    let walk = &walk;
                    scope.spawn(move || walk(0x9e37_79b9 + thread));
                }
                walk(0x9e37_79b9);
            });
        };
        let mut contenders = [
            Contender::new("64 shards of hashbrown under locks, bare", |n| {
                both(n, &|key| {
                    black_box(sharded.take(key));
                });
            }),
            Contender::new("flat table of atomics, bare", |n| {
                both(n, &|key| {
                    black_box(flat.take(key));
                });
            }),
            Contender::new("the crate: flat table, whole public path", |n| {
                both(n, &|key| {
                    let decision = limiter.take_one(&policy, key, 1);
                    black_box(&decision);
                });
            }),
        ];
        let times = race(&mut contenders);
        print_case(name, &contenders, &times);
    }
}
