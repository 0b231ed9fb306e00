//! Reading of responses by clients: the examples of the drafts, vendors' headers, and what this
//! crate's own server writes.

mod crowd;
mod drafts;
mod hostile;
mod obey;
mod pair;
mod retry;
mod round_trip;
mod shares;
mod vendors;

#[path = "../support/mod.rs"]
mod support;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue};
use tower_ratelimit::client::Advice;

/// 2024-01-16 16:00:00 UTC.
const NOW: u64 = 1_705_420_800;

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// The headers of a response, one `name: value` a line.
fn headers(lines: &str) -> HeaderMap {
    let lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
    let pairs = lines.map(|line| {
        let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("{line:?} is no header"));
        let name: HeaderName = name.parse().unwrap_or_else(|error| panic!("{name:?}: {error}"));
        (name, HeaderValue::from_bytes(value.trim().as_bytes()).unwrap_or_else(|error| panic!("{value:?}: {error}")))
    });
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(name, value);
    }
    headers
}

fn read(lines: &str) -> Advice {
    Advice::read(&headers(lines), now())
}

/// The policies in short, such as `default: 50/100 per 60s, reset 30s, unit tokens, of key`, in
/// alphabetical order. What is unknown is left out.
fn in_short(advice: &Advice) -> Vec<String> {
    let policies = advice.policies().iter().map(|policy| {
        let units = |n: Option<u64>| n.map_or("?".to_owned(), |n| n.to_string());
        let part = |word: &str, text: Option<String>| text.map_or(String::new(), |text| format!("{word}{text}"));
        format!(
            "{}{}/{}{}{}{}{}",
            part("", policy.name().map(|name| format!("{name}: "))),
            units(policy.remaining()),
            units(policy.limit()),
            part(" per ", policy.window().map(|window| format!("{window:?}"))),
            part(", reset ", policy.until_reset().map(|reset| format!("{reset:?}"))),
            part(", unit ", policy.unit().map(str::to_owned)),
            part(", of ", policy.partition().map(|key| key.escape_ascii().to_string())),
        )
    });
    let mut policies: Vec<String> = policies.collect();
    policies.sort();
    policies
}

/// Asserts what headers mean: their policies in short, and the wait in seconds.
#[track_caller]
fn means(lines: &str, policies: &[&str], wait: Option<f64>) {
    let advice = read(lines);
    assert_eq!(in_short(&advice), policies, "{lines}");
    assert_eq!(advice.wait().duration(), wait.map(seconds), "{lines}");
}
