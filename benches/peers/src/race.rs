//! Rounds in turn, medians, spreads.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// The amount that is measured.
pub struct Plan {
    seconds: f64,
    smoke: bool,
    only: Vec<String>,
}

/// A contender that races: does its work this many times, and returns the time that the work took. What it prepares for
/// the work is not part of that time.
pub type Run<'a> = Box<dyn FnMut(u64) -> Duration + 'a>;

/// With 15 longer rounds the cost of a layer, a difference, varied three times as much between runs on a busy machine.
const ROUNDS: u32 = 75;

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

    /// Returns `count`, or at most 1,000 in a smoke run.
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
        self.take_turns(runs.len(), |at| run_once(&mut runs[at], counts[at]))
    }

    /// Calls `measure` once for each contender in each round. Each round begins with another contender.
    pub fn take_turns(&self, contenders: usize, mut measure: impl FnMut(usize) -> f64) -> Raced {
        let mut rounds = vec![Vec::new(); contenders];
        let mut noise = Noise::default();
        for round in 0..self.rounds() as usize {
            noise.sample();
            for at in (0..contenders).map(|at| (at + round) % contenders) {
                rounds[at].push(measure(at));
            }
        }
        Raced { rounds, noise }
    }

    /// The number of iterations of a round.
    fn count(&self, run: &mut Run<'_>) -> u64 {
        let round = self.round();
        let mut count = 1_024;
        loop {
            let took = run(count);
            if took * 2 >= round {
                return (count as f64 * (round.as_secs_f64() / took.as_secs_f64()).max(0.01)) as u64 + 1;
            }
            count *= 2;
        }
    }
}

/// Returns the nanoseconds of one iteration.
fn run_once(run: &mut Run<'_>, count: u64) -> f64 {
    run(count).as_nanos() as f64 / count as f64
}

/// The results of a race.
pub struct Raced {
    /// For each contender its figure in each round.
    rounds: Vec<Vec<f64>>,
    pub noise: Noise,
}

impl Raced {
    /// Other figures of a race, for each contender one in each round.
    pub fn of(rounds: Vec<Vec<f64>>) -> Self {
        Self { rounds, noise: Noise::default() }
    }

    pub fn medians(&self) -> Vec<f64> {
        self.rounds.iter().map(|rounds| median(rounds.clone())).collect()
    }

    /// The spread of each contender's rounds, in percent.
    pub fn spreads(&self) -> Vec<f64> {
        self.rounds.iter().map(|rounds| spread(rounds)).collect()
    }

    /// Subtracts the first contender's figure from each other's, round by round, and leaves the first contender out.
    pub fn beyond_first(self) -> Self {
        let (base, others) = self.rounds.split_first().expect("there is a first contender");
        let beyond = |rounds: &Vec<f64>| rounds.iter().zip(base).map(|(figure, base)| figure - base).collect();
        Self { rounds: others.iter().map(beyond).collect(), noise: self.noise }
    }

    /// Leaves the contenders before this one out.
    pub fn from(self, first: usize) -> Self {
        Self { rounds: self.rounds.into_iter().skip(first).collect(), ..self }
    }
}

/// The noise of the machine: the times of a fixed piece of work, done once in each round.
#[derive(Default)]
pub struct Noise(Vec<f64>);

impl Noise {
    fn sample(&mut self) {
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
fn spread(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let at = |quarter: usize| values[(values.len() - 1) * quarter / 4];
    (100.0 * (at(3) - at(1)) / at(2).abs()).round()
}

/// The value in the middle.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
