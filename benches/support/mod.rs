//! The parts that benches share: rounds in turn, medians, ratios.

#![allow(dead_code, reason = "each bench uses a part of it")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

use std::time::{Duration, Instant};

/// GCRA, as one writes it by hand: the cost and the burst in microseconds.
pub(crate) const FIVE_LINES: &str = "\
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local room = now + ARGV[2] - math.max(now, tonumber(redis.call('GET', KEYS[1]) or 0)) - ARGV[1]
if room >= 0 then redis.call('PSETEX', KEYS[1], math.ceil((ARGV[2] - room) / 1000), string.format('%.0f', now + ARGV[2] - room)) end
return math.floor(room)";

/// One way to do the thing that is measured.
pub(crate) struct Contender<'a> {
    pub(crate) name: &'static str,
    /// Does the thing so many times.
    pub(crate) run: Box<dyn FnMut(u64) + 'a>,
}

impl<'a> Contender<'a> {
    pub(crate) fn new(name: &'static str, run: impl FnMut(u64) + 'a) -> Self {
        Self { name, run: Box::new(run) }
    }
}

/// Whether only a few iterations are wanted, to see that everything runs.
pub(crate) fn is_smoke() -> bool {
    std::env::args().any(|argument| argument == "--smoke" || argument == "--test")
}

/// Whether this case is wanted: all are, unless words on the command line pick some by name.
pub(crate) fn is_wanted(case: &str) -> bool {
    let mut picks = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).peekable();
    picks.peek().is_none() || picks.any(|pick| case.contains(&pick))
}

/// Runs the contenders in turn, A B C A B C …, and returns the median time of each for one iteration, in nanoseconds.
pub(crate) fn race(contenders: &mut [Contender<'_>]) -> Vec<f64> {
    let (rounds, warm, batch) = if is_smoke() {
        (1, Duration::ZERO, Duration::ZERO)
    } else {
        (15, Duration::from_millis(900), Duration::from_millis(60))
    };
    let counts: Vec<u64> = contenders
        .iter_mut()
        .map(|contender| {
            // Warm first: every key is there, the caches are what they will be, and the count is not one of a cold
            // start.
            let started = Instant::now();
            let mut count = 64;
            while started.elapsed() < warm {
                (contender.run)(4_096);
            }
            loop {
                let started = Instant::now();
                (contender.run)(count);
                if started.elapsed() >= batch {
                    return count;
                }
                count *= 2;
            }
        })
        .collect();
    let mut times = vec![Vec::with_capacity(rounds); contenders.len()];
    for _ in 0..rounds {
        for (at, contender) in contenders.iter_mut().enumerate() {
            let started = Instant::now();
            (contender.run)(counts[at]);
            times[at].push(started.elapsed().as_nanos() as f64 / counts[at] as f64);
        }
    }
    times.into_iter().map(median).collect()
}

/// The value in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints one case: each contender's time, and its ratio to the first, which is the peer to beat.
pub(crate) fn print_case(case: &str, contenders: &[Contender<'_>], times: &[f64]) {
    println!("\n{case}");
    for (contender, time) in contenders.iter().zip(times) {
        println!("  {:<44} {time:>9.1} ns   {:>5.2}x", contender.name, time / times[0]);
    }
}

/// A fast generator of numbers, so that keys are not visited in order.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(bound)) >> 64) as u64
    }
}
