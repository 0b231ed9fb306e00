//! Rounds in turn, medians, ratios.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The amount that is measured.
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

    /// The time that one contender runs in each round.
    pub fn round(&self) -> Duration {
        if self.smoke { Duration::ZERO } else { Duration::from_secs_f64(self.seconds / f64::from(ROUNDS)) }
    }

    pub fn rounds(&self) -> u32 {
        if self.smoke { 1 } else { ROUNDS }
    }

    /// Runs them in turn, and returns the time of each for one iteration, in nanoseconds.
    pub fn race(&self, runs: &mut [Run<'_>]) -> Raced {
        // Warm first: every key is there, the caches are what they will be, and the count is not one of a cold start.
        let counts: Vec<u64> = runs.iter_mut().map(|run| self.count(run)).collect();
        let mut times = vec![Vec::new(); runs.len()];
        let mut noise = Noise::default();
        for _ in 0..self.rounds() {
            noise.sample();
            for (at, run) in runs.iter_mut().enumerate() {
                let started = Instant::now();
                run(counts[at]);
                times[at].push(started.elapsed().as_nanos() as f64 / counts[at] as f64);
            }
        }
        Raced {
            spreads: times.iter().map(|times| spread(times)).collect(),
            times: times.into_iter().map(median).collect(),
            noise,
        }
    }

    /// The number of iterations of a round.
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

/// The results of a race.
pub struct Raced {
    /// The median of each.
    pub times: Vec<f64>,
    /// The spread of each.
    pub spreads: Vec<f64>,
    pub noise: Noise,
}

/// The noise of the machine: the times of a fixed piece of work, done once in each round.
#[derive(Default)]
pub struct Noise(Vec<f64>);

impl Noise {
    pub fn sample(&mut self) {
        let started = Instant::now();
        let mut number = 1_u64;
        for _ in 0..200_000 {
            number = black_box(number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(7));
        }
        self.0.push(started.elapsed().as_nanos() as f64);
    }

    /// A sentence about it.
    pub fn remark(&self) -> String {
        let most = self.0.iter().copied().fold(0.0, f64::max);
        format!("a fixed piece of work took {:.2} of its median at most", most / median(self.0.clone()))
    }
}

/// The distance of the quartiles, in percent of the median.
pub fn spread(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |quarter: usize| values[(values.len() - 1) * quarter / 4];
    (100.0 * (at(3) - at(1)) / at(2)).round()
}

/// The value in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
