//! Vectors that state a bound on many calls. Each has a loop of its own.

use std::time::Duration;

use serde_json::{Value, json};
use tower_ratelimit::{Key, Policy};

use crate::mapping::quota;
use crate::replay::{limiter, replay};
use crate::vector;

/// The vectors that are replayed here.
pub(crate) const PROPERTIES: [&str; 4] =
    ["tb-xtime-long-qps", "tb-xtime-simultaneous", "gcra-redis_rate-retry-bound", "leaky-resty-throughput"];

/// The policy of a vector, and what its only step expects.
fn setup(id: &str) -> (Policy, Value) {
    let vector = vector(id);
    let params = vector["params"].as_object().expect("a vector has parameters");
    let algorithm = vector["algorithm"].as_str().expect("a vector has an algorithm");
    let quota = quota(algorithm, params, 0).expect("the quota is possible");
    (Policy::from(quota), vector["steps"][0]["expect"].clone())
}

fn whole(value: &Value) -> u64 {
    value.as_u64().expect("a whole number")
}

#[test]
fn long_run_rate_is_the_quotas() {
    let (policy, expected) = setup("tb-xtime-long-qps");
    let (limiter, clock) = limiter();
    let mut passed = 0;
    for _ in 0..2_500 {
        passed += u64::from(limiter.take_one(&policy, &Key::global(), 1).is_allowed());
        clock.advance(Duration::from_millis(2));
    }
    let bounds = whole(&expected["allowed_count_min"])..=whole(&expected["allowed_count_max"]);
    assert!(bounds.contains(&passed), "{passed}");
}

#[test]
fn simultaneous_requests_pass_exactly_up_to_the_capacity() {
    let (policy, expected) = setup("tb-xtime-simultaneous");
    let (limiter, _clock) = limiter();
    let passed: u64 = std::thread::scope(|scope| {
        let task = || u64::from(limiter.take_one(&policy, &Key::global(), 1).is_allowed());
        let tasks: Vec<_> = (0..15).map(|_| scope.spawn(task)).collect();
        tasks.into_iter().map(|task| task.join().expect("no task panics")).sum()
    });
    assert_eq!(passed, whole(&expected["allowed_count"]));
}

#[test]
fn wait_is_never_longer_than_one_interval() {
    let (policy, expected) = setup("gcra-redis_rate-retry-bound");
    let (limiter, clock) = limiter();
    let longest = Duration::from_millis(whole(&expected["retry_after_ms_max"]));
    let mut denied = 0;
    for _ in 0..1_000 {
        let decision = limiter.take_one(&policy, &Key::global(), 1);
        if !decision.is_allowed() {
            denied += 1;
            assert!(decision.wait().duration().is_some_and(|wait| wait <= longest), "{decision:?}");
        }
        clock.advance(Duration::from_micros(7));
    }
    assert!(denied > 900, "{denied}");
}

#[test]
fn requests_that_wait_their_delays_leave_at_the_rate() {
    let (policy, expected) = setup("leaky-resty-throughput");
    let (limiter, clock) = limiter();
    let mut passed = Duration::ZERO;
    for _ in 0..80 {
        let decision = limiter.take_one(&policy, &Key::global(), 1);
        assert!(decision.is_allowed());
        passed += decision.delay();
        clock.advance(decision.delay());
    }
    let bounds = whole(&expected["elapsed_ms_min"])..=whole(&expected["elapsed_ms_max"]);
    assert!(bounds.contains(&(passed.as_millis() as u64)), "{passed:?}");
}

/// The calls of `multi-symfony-compound`, which is left out, with the answers that all-or-nothing
/// must give: the limits are 4 in 1 s, 8 in 10 s and 16 in 30 s.
#[test]
fn denial_by_one_limit_is_not_charged_to_the_others() {
    let mut vector = vector("multi-symfony-compound");
    let expected = [
        json!({ "allowed": true, "remaining": 0, "remaining_by_limit": { "limit 0": 0, "limit 1": 4, "limit 2": 12 } }),
        json!({ "allowed": false, "denied_by": ["limit 0"] }),
        json!({ "allowed": true, "remaining": 1, "remaining_by_limit": { "limit 0": 1, "limit 1": 1, "limit 2": 9 } }),
        json!({ "allowed": true, "remaining": 0, "remaining_by_limit": { "limit 0": 0, "limit 1": 0, "limit 2": 8 } }),
        json!({ "allowed": false, "denied_by": ["limit 1"] }),
        json!({ "allowed": true, "remaining": 1, "remaining_by_limit": { "limit 0": 1, "limit 1": 5, "limit 2": 5 } }),
        json!({ "allowed": true, "remaining": 0, "remaining_by_limit": { "limit 0": 0, "limit 1": 4, "limit 2": 4 } }),
        json!({ "allowed": true, "remaining": 3, "remaining_by_limit": { "limit 0": 3, "limit 1": 7, "limit 2": 15 } }),
    ];
    for (step, expect) in expected.into_iter().enumerate() {
        vector["steps"][step]["expect"] = expect;
    }
    replay(&vector).expect("all charges are taken or none");
}
