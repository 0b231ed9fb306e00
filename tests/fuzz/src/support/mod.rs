//! Code that several targets share.

use std::time::Duration;

use tower_ratelimit::Quota;
use tower_ratelimit::ConfigError;

const HOUR: Duration = Duration::from_secs(3_600);

/// Returns a quota of each algorithm with states that are dated.
pub(crate) fn quotas() -> Vec<Quota> {
    let quotas = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::per_hour(5),
            Quota::token_bucket(99_999, HOUR)?.burst(6)?,
            Quota::step_bucket(5, HOUR)?,
            Quota::leaky_queue(5, HOUR)?.queue(4)?,
            Quota::fixed_window(5, HOUR)?,
            Quota::sliding_window(5, HOUR)?.buckets(6)?,
            Quota::sliding_log(5, HOUR)?,
            Quota::block(1, HOUR, HOUR)?,
            Quota::meter(5, HOUR)?,
            Quota::concurrent(5),
        ])
    };
    quotas().expect("the quotas are possible")
}
