//! Compares the answer of a step with the expected one.

use std::time::Duration;

use serde_json::{Value, json};

/// The answer of a step, in the terms of the file.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) limit: u64,
    /// The least over all limits.
    pub(crate) remaining: u64,
    pub(crate) remaining_by_limit: Vec<(String, u64)>,
    pub(crate) denied_by: Vec<String>,
    /// The time after which the step would be allowed. Zero if it is, `None` if no wait helps.
    pub(crate) retry_after: Option<Duration>,
    pub(crate) reset: Duration,
    pub(crate) taken: u64,
    /// The time that the caller must wait before it acts.
    pub(crate) wait: Duration,
    /// The instant at which the caller may act.
    pub(crate) act_at: Duration,
    /// The units that wait ahead of this one.
    pub(crate) position: u64,
    /// The tokens before and after, negative in debt. `None` if the quota is no token bucket.
    pub(crate) tokens_before: Option<i64>,
    pub(crate) tokens: Option<i64>,
}

impl Answer {
    /// Whether the answer is what `expected` says of this field. Times may be off by `slack`, where
    /// the file says so.
    pub(crate) fn is(&self, field: &str, expected: &Value, slack: Duration) -> Result<(), String> {
        let used = self.limit - self.remaining.min(self.limit);
        let retry = self.retry_after;
        let (right, found) = match field {
            "allowed" => same(expected, self.allowed),
            "limit" => same(expected, self.limit),
            "remaining" => same(expected, self.remaining),
            "taken" => same(expected, self.taken),
            // Peers describe a window by the units counted in it.
            "count" | "weighted" => same(expected, used),
            // nginx's excess is the number of units ahead of a request.
            "excess" => same(expected, self.position),
            "available" => same(expected, self.tokens),
            "tokens_before" => same(expected, self.tokens_before),
            "denied_by" => same(expected, &self.denied_by[..]),
            "remaining_by_limit" => {
                let by_limit: Value =
                    self.remaining_by_limit.iter().cloned().map(|(name, n)| (name, json!(n))).collect();
                (*expected == by_limit, by_limit.to_string())
            }
            // Statuses differ, except 200 for a request that passed.
            "http_status" => ((*expected == json!(200)) == self.allowed, format!("allowed: {}", self.allowed)),
            "retry_after_ms" if expected == "never" => (retry.is_none() && !self.allowed, format!("{retry:?}")),
            "retry_after_ms" => (retry.is_some_and(|wait| near(expected, wait, slack)), format!("{retry:?}")),
            "retry_after_ms_min" => (retry.is_some_and(|wait| at_least(expected, wait)), format!("{retry:?}")),
            "retry_after_ms_max" => (retry.is_some_and(|wait| at_most(expected, wait)), format!("{retry:?}")),
            "reset_ms" => (near(expected, self.reset, slack), format!("{:?}", self.reset)),
            "delay_ms" | "wait_ms" => (near(expected, self.wait, slack), format!("{:?}", self.wait)),
            "delay_ms_min" => (at_least(expected, self.wait), format!("{:?}", self.wait)),
            "wait_ms_max" => (at_most(expected, self.wait), format!("{:?}", self.wait)),
            "act_at_ms" => (near(expected, self.act_at, slack), format!("{:?}", self.act_at)),
            other => return Err(format!("`{other}` is not known")),
        };
        if right { Ok(()) } else { Err(format!("expected {expected}, found {found}")) }
    }
}

fn same(expected: &Value, found: impl Into<Value>) -> (bool, String) {
    let found = found.into();
    (*expected == found, found.to_string())
}

fn micros(expected: &Value) -> Option<i128> {
    expected.as_i64().map(|ms| i128::from(ms) * 1_000)
}

fn signed(time: Duration) -> i128 {
    i128::try_from(time.as_micros()).expect("times of vectors are short")
}

fn near(expected: &Value, found: Duration, slack: Duration) -> bool {
    micros(expected).is_some_and(|expected| (expected - signed(found)).abs() <= signed(slack))
}

fn at_least(expected: &Value, found: Duration) -> bool {
    micros(expected).is_some_and(|expected| signed(found) >= expected)
}

fn at_most(expected: &Value, found: Duration) -> bool {
    micros(expected).is_some_and(|expected| signed(found) <= expected)
}
