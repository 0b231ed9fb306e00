//! The law of time on random clocks: however a clock jumps, no more than the capacity passes while it
//! stands still, besides what each thread had begun before.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::{Clock, Timestamp},
    limiter::Charge,
    quota::{Anchor, Oldest},
};

use crate::support::{cases, of_each_algorithm_but};

const SECOND: Duration = Duration::from_secs(1);
const EDGE_US: u64 = 1_735_689_600_000_000;
const THREADS: usize = 4;
const COST_MAX: u64 = 3;
const LIMIT: u64 = 40;
const PHASES: usize = 6;

/// Returns quotas of [`LIMIT`] units per second, in every algorithm and every size of state.
fn quotas() -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(LIMIT, SECOND)?,
            Quota::token_bucket(99_999, 60 * SECOND)?.burst(LIMIT)?, // two words
            Quota::gcra(LIMIT, SECOND)?.burst(LIMIT)?,
            Quota::leaky_bucket(LIMIT, SECOND)?,
            Quota::leaky_queue(LIMIT, SECOND)?.queue(LIMIT - 1)?,
            Quota::step_bucket(LIMIT, SECOND)?,
            Quota::step_bucket(4, SECOND / 10)?.burst(LIMIT)?.anchor(Anchor::FirstRequest)?,
            Quota::fixed_window(LIMIT, SECOND)?,
            Quota::fixed_window(LIMIT, SECOND)?.anchor(Anchor::FirstRequest)?,
            Quota::sliding_window(LIMIT, SECOND)?,
            Quota::sliding_window(LIMIT, SECOND)?.oldest(Oldest::Dropped)?,
            Quota::sliding_window(LIMIT, SECOND)?.buckets(5)?.oldest(Oldest::Counted)?,
            Quota::sliding_log(LIMIT, SECOND)?,
            Quota::block(LIMIT, SECOND, SECOND)?,
            Quota::meter(LIMIT, SECOND)?,
        ])
    };
    of_each_algorithm_but(&[], each().expect("the quotas are possible"))
}

/// Returns a random number made of another number.
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 16
}

/// A clock after some of whose readings a thread sleeps, for up to as long as a phase lasts. The other threads run
/// meanwhile, and often the clock jumps.
#[derive(Debug)]
struct Jumping {
    now_us: AtomicU64,
    readings: AtomicU64,
}

impl Clock for Jumping {
    fn now(&self) -> Timestamp {
        let now = Timestamp::from_micros(self.now_us.load(Ordering::SeqCst));
        let lot = mixed(self.readings.fetch_add(1, Ordering::Relaxed));
        if lot % 16 == 0 {
            thread::sleep(Duration::from_micros(lot >> 8 & 0xff));
        }
        now
    }
}

/// Four threads use up one key while the clock jumps to random instants around an edge.
fn play(quota: Quota, seed: u64) {
    let clock = Arc::new(Jumping { now_us: AtomicU64::new(EDGE_US), readings: AtomicU64::new(seed) });
    let limiter = MemoryLimiter::builder().max_keys(10).clock(Arc::clone(&clock)).build().expect("it is possible");
    let policies = [Policy::new("p", quota), Policy::new("other", Quota::per_second(1_000_000))];
    let [policy, other] = policies.map(|policy| policy.expect("it is a name"));
    let key = Key::of("k").expect("it is short");
    let phase = AtomicUsize::new(0);
    let passed: [AtomicU64; PHASES] = Default::default();
    let done: [AtomicUsize; PHASES] = Default::default();
    let start = Barrier::new(THREADS + 1);
    thread::scope(|scope| {
        for thread in 0..THREADS as u64 {
            let (limiter, policy, other, key) = (&limiter, &policy, &other, &key);
            let (phase, passed, done, start) = (&phase, &passed, &done, &start);
            scope.spawn(move || {
                start.wait();
                for number in 0.. {
                    let lot = mixed(seed << 20 ^ thread << 12 ^ number);
                    let cost = 1 + lot % COST_MAX;
                    let charge = Charge::new(policy, key).cost(cost);
                    let allowed = match lot >> 8 & 3 {
                        0 => limiter.take_now(&[Charge::new(other, key), charge]).is_allowed(),
                        1 => limiter.take_one(policy, key, cost).is_allowed(),
                        _ => limiter.take_one(policy, key, 1).is_allowed(),
                    };
                    let units = if lot >> 8 & 3 > 1 { 1 } else { cost };
                    // A request that began in the phase before may be counted in this one.
                    let at = phase.load(Ordering::SeqCst);
                    if at >= PHASES {
                        return;
                    }
                    done[at].fetch_add(1, Ordering::SeqCst);
                    if allowed {
                        passed[at].fetch_add(units, Ordering::SeqCst);
                    }
                }
            });
        }
        start.wait();
        for (at, done) in done.iter().enumerate() {
            // Each phase is long enough to use up the quota.
            while done.load(Ordering::SeqCst) < 2 * LIMIT as usize {
                thread::sleep(Duration::from_micros(10));
            }
            let lot = mixed(seed << 8 ^ at as u64);
            let range_us = [4, 600_000, 4_000_000][(lot % 3) as usize];
            phase.store(at + 1, Ordering::SeqCst);
            clock.now_us.store(EDGE_US + 4_000_000 + (lot >> 2) % range_us - range_us / 2, Ordering::SeqCst);
        }
    });
    for (at, passed) in passed.iter().map(|passed| passed.load(Ordering::SeqCst)).enumerate() {
        let most = quota.capacity() + 2 * THREADS as u64 * COST_MAX;
        assert!(passed <= most, "{quota}: {passed} passed in phase {at} of seed {seed}, at most {most}");
    }
}

#[test]
fn standing_clock_passes_no_more_than_the_capacity() {
    for quota in quotas() {
        (0..u64::from(cases(12))).for_each(|seed| play(quota, seed));
    }
}
