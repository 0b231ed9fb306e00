//! The words of a quota: refused, or read as a quota whose own words are read as the same quota.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::Quota;

fuzz_target!(|text: &str| {
    if let Ok(quota) = text.parse::<Quota>() {
        assert_eq!(quota.to_string().parse(), Ok(quota), "{quota}");
    } else if let Err(error) = text.parse::<Quota>() {
        assert!(!error.to_string().is_empty());
    }
});
