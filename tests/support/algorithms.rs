//! Lists of quotas that name every algorithm whose units come back with time.

use tower_ratelimit::Quota;
use tower_ratelimit::quota::Algorithm;

/// Returns these quotas, which must have one of each algorithm except those that the test cannot use. A concurrency
/// limit has no clock, and tests of its own.
#[track_caller]
pub(crate) fn of_each_algorithm_but(left_out: &[Algorithm], quotas: Vec<Quota>) -> Vec<Quota> {
    let has = |algorithm: &Algorithm| quotas.iter().any(|quota| quota.algorithm() == *algorithm);
    for algorithm in Algorithm::ALL.iter().filter(|algorithm| **algorithm != Algorithm::Concurrency) {
        let is_left_out = left_out.contains(algorithm);
        assert!(
            has(algorithm) != is_left_out,
            "add a quota to the list at this line, or leave the algorithm out there: {algorithm}"
        );
    }
    quotas
}
