//! Rounds in turn, medians, ratios.

use std::time::{Duration, Instant};

/// How much is measured.
pub struct Plan {
    seconds: f64,
    smoke: bool,
    only: Vec<String>,
}

/// One of those that race: it does the thing so many times.
pub type Run<'a> = Box<dyn FnMut(u64) + 'a>;

const ROUNDS: u32 = 15;

impl Plan {
    pub fn new(seconds: f64, smoke: bool, only: Vec<String>) -> Self {
        Self { seconds: seconds.clamp(0.1, 600.0), smoke, only }
    }

    /// Whether everything is run just once, to see that it works.
    pub fn is_smoke(&self) -> bool {
        self.smoke
    }

    /// Whether all cases are run, so that the results can stand for the family.
    pub fn is_whole(&self) -> bool {
        self.only.is_empty()
    }

    pub fn is_wanted(&self, case: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|word| case.contains(word))
    }

    /// As many, or a few if it is only to be seen that it works.
    pub fn scaled(&self, count: usize) -> usize {
        if self.smoke { count.min(1_000) } else { count }
    }

    /// How long one contender runs in each of the rounds.
    pub fn round(&self) -> Duration {
        if self.smoke { Duration::ZERO } else { Duration::from_secs_f64(self.seconds / f64::from(ROUNDS)) }
    }

    pub fn rounds(&self) -> u32 {
        if self.smoke { 1 } else { ROUNDS }
    }

    /// Runs them in turn, and returns the median time of each for one iteration, in nanoseconds.
    pub fn race(&self, runs: &mut [Run<'_>]) -> Vec<f64> {
        // Warm first: every key is there, the caches are what they will be, and the count is not one of a cold start.
        let counts: Vec<u64> = runs.iter_mut().map(|run| self.count(run)).collect();
        let mut times = vec![Vec::new(); runs.len()];
        for _ in 0..self.rounds() {
            for (at, run) in runs.iter_mut().enumerate() {
                let started = Instant::now();
                run(counts[at]);
                times[at].push(started.elapsed().as_nanos() as f64 / counts[at] as f64);
            }
        }
        times.into_iter().map(median).collect()
    }

    /// How many iterations last a round.
    fn count(&self, run: &mut Run<'_>) -> u64 {
        let round = self.round();
        let mut count = 1_024;
        loop {
            let started = Instant::now();
            run(count);
            if started.elapsed() * 2 >= round {
                return (count as f64 * (round.as_secs_f64() / started.elapsed().as_secs_f64()).max(0.01)) as u64 + 1;
            }
            count *= 2;
        }
    }
}

/// The value in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
