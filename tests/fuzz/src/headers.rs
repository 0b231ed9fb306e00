//! Headers of responses: what is read is within its bounds, whatever a server sends.
#![no_main]

use std::time::{Duration, UNIX_EPOCH};

use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use tower_ratelimit::client::Advice;

const YEAR: Duration = Duration::from_secs(366 * 86_400);

fuzz_target!(|bytes: &[u8]| {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let (name, value) = (line[..colon].trim_ascii(), line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    let advice = Advice::read(&headers, UNIX_EPOCH + Duration::from_secs(1_705_420_800));
    assert!(advice.policies().len() <= 16);
    assert!(advice.wait().duration().is_none_or(|wait| !wait.is_zero() && wait <= YEAR));
    assert!(advice.retry_after().is_none_or(|wait| wait <= YEAR));
    for policy in advice.policies() {
        assert!(policy.name().is_none_or(|name| (1..=256).contains(&name.len())));
        assert!(policy.unit().is_none_or(|unit| (1..=256).contains(&unit.len())));
        assert!(policy.partition().is_none_or(|key| (1..=256).contains(&key.len())));
        assert!(policy.window().is_none_or(|window| !window.is_zero() && window <= YEAR));
        assert!(policy.until_reset().is_none_or(|reset| reset <= YEAR));
    }
});
