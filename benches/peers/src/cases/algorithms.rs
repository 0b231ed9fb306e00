//! The algorithms of tower-ratelimit, against its token bucket.

use std::hint::black_box;
use std::time::{Duration, Instant};

use tower_ratelimit::{ConfigError, Key, MemoryLimiter, Policy, Quota};

use super::{Order, addresses, places};
use crate::contender::PLENTY;
use crate::race::{Plan, Run};
use crate::report::{Better, Case};

fn quotas() -> Result<Vec<(&'static str, Quota)>, ConfigError> {
    let (second, plenty) = (Duration::from_secs(1), u64::from(PLENTY));
    Ok(vec![
        ("token bucket", Quota::token_bucket(10_000, second)?.burst(plenty)?),
        ("token bucket, interval not whole", Quota::token_bucket(7_001, second)?.burst(plenty)?),
        ("token bucket, state of two words", Quota::token_bucket(99_999, second)?.burst(plenty)?),
        ("token bucket, in steps", Quota::step_bucket(plenty, second)?),
        ("leaky queue", Quota::leaky_queue(10_000, second)?.queue(plenty)?),
        ("fixed window", Quota::fixed_window(100_000, second)?),
        ("sliding window", Quota::sliding_window(30_000, second)?),
        ("sliding window of 60 buckets", Quota::sliding_window(plenty, 60 * second)?.buckets(60)?),
        ("sliding log", Quota::sliding_log(100, second)?),
    ])
}

pub fn run(plan: &Plan) -> Vec<Case> {
    let name = "10k addresses";
    if !plan.is_wanted(name) {
        return Vec::new();
    }
    let keys = addresses(plan.scaled(10_000));
    let order = places(Order::Uniform, keys.len(), 1);
    let mut names = Vec::new();
    let mut runs: Vec<Run<'_>> = Vec::new();
    for (name, quota) in quotas().expect("the quotas are possible") {
        let limiter = MemoryLimiter::builder().max_keys(10_000).build().expect("the setup is possible");
        let policy = Policy::from(quota);
        let (keys, order) = (&keys, &order);
        names.push(name);
        runs.push(Box::new(move |count| {
            let started = Instant::now();
            for place in order.iter().cycle().take(count as usize) {
                let key = Key::of(keys[*place as usize]).unwrap_or(Key::global());
                black_box(limiter.take_one(&policy, &key, 1));
            }
            started.elapsed()
        }));
    }
    let raced = plan.race(&mut runs);
    let mut case = Case::new(name.to_owned(), "ns", Better::Lower, "token bucket", names, &raced.medians());
    case.steadiness(&raced);
    vec![case.told()]
}
