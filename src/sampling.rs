//! How many cases a test tries. Daily work tries a sample, which answers in seconds. `tests/all.sh` tries every case, and
//! `tests/campaigns.sh` many times as many.

use proptest::prelude::ProptestConfig;

/// A sample has one case of this many. A prime number, so that every second or third kind of a table is not left out.
const SAMPLE: u32 = 19;

/// Returns how many times the usual number of cases `RATELIMIT_CAMPAIGN` asks for, or `None` for a sample.
fn times() -> Option<u32> {
    std::env::var("RATELIMIT_CAMPAIGN").ok().map(|times| times.parse().expect("RATELIMIT_CAMPAIGN is a number"))
}

/// Returns the number of cases of a test that usually has this many.
pub(crate) fn cases(usual: u32) -> u32 {
    times().map_or(usual.div_ceil(SAMPLE), |times| usual * times)
}

/// Returns the settings of a property that usually has this many cases. No file of failures is written.
pub(crate) fn config(usual: u32) -> ProptestConfig {
    ProptestConfig { cases: cases(usual), failure_persistence: None, ..ProptestConfig::default() }
}

/// Returns the distance between the cases of a table that a test tries.
pub(crate) fn stride() -> usize {
    times().map_or(SAMPLE as usize, |_| 1)
}
