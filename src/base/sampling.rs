//! How many cases a test tries. A usual test run tries a sample, which takes seconds. `tests/all.sh` tries every
//! case, and `tests/campaigns.sh` tries many times as many cases.

use proptest::prelude::ProptestConfig;

/// A sample has one of this many cases of a test. The number is prime, so that a sample of a table does not
/// leave out every second or third kind of case.
const SAMPLE: u32 = 19;

/// Returns the factor that `RATELIMIT_CAMPAIGN` states for the number of cases, or `None` for a sample.
fn times() -> Option<u32> {
    std::env::var("RATELIMIT_CAMPAIGN").ok().map(|times| times.parse().expect("RATELIMIT_CAMPAIGN is a number"))
}

/// Returns the number of cases that a test tries in this run. `usual` is the number of all cases of the
/// test.
pub(crate) fn cases(usual: u32) -> u32 {
    times().map_or(usual.div_ceil(SAMPLE), |times| usual * times)
}

/// Returns the settings of a property test. `usual` is the number of all cases of the test. The test
/// writes no file of failures.
pub(crate) fn config(usual: u32) -> ProptestConfig {
    ProptestConfig { cases: cases(usual), failure_persistence: None, ..ProptestConfig::default() }
}

/// Returns `n` for a test that tries every `n`th case of a table.
pub(crate) fn stride() -> usize {
    times().map_or(SAMPLE as usize, |_| 1)
}

/// Runs a test under many schedules of its threads. In half of the schedules each step is random. In the other half,
/// the threads have random priorities that change three times. A schedule that fails is printed, for `shuttle::replay`.
#[cfg(ratelimit_shuttle)]
pub(crate) fn explore(usual: u32, run: impl Fn() + Send + Sync + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    let (each, mut config) = (cases(usual).div_ceil(2) as usize, shuttle::Config::new());
    config.stack_size = 1 << 18; // frames of debug builds
    config.silence_warnings = true; // about weak orderings, which loom looks at
    let (run, other) = {
        let run = std::sync::Arc::new(run);
        (std::sync::Arc::clone(&run), run)
    };
    shuttle::Runner::new(RandomScheduler::new_from_seed(1, each), config.clone()).run(move || run());
    shuttle::Runner::new(PctScheduler::new_from_seed(1, 3, each), config).run(move || other());
}
