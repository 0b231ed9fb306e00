//! Files of rules: read, or refused with problems that can be printed. What is read makes a layer. What is converted
//! can be read, but for the names that a program would register.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_ratelimit::MemoryLimiter;
use tower_ratelimit::key::TrustedProxies;
use tower_ratelimit::rules::{Rules, RulesErrorKind, convert_envoy};

fuzz_target!(|bytes: &[u8]| {
    let proxies = TrustedProxies::count(1).expect("one proxy is possible");
    if let Ok(native) = convert_envoy(bytes) {
        if let Err(error) = Rules::builder().trusted_proxies(proxies.clone()).read_text(&*native) {
            assert!(error.problems().iter().all(|problem| problem.kind() == RulesErrorKind::Name), "{native}\n{error}");
        }
    }
    let builder = Rules::builder().trusted_proxies(proxies).key("tenant", |_| 1).action("write", |_| true);
    match builder.read_text(bytes) {
        Ok(rules) => {
            let limiter = MemoryLimiter::builder().max_keys(64).build().expect("64 keys are possible");
            let _ = rules.layer(limiter).map(|layer| layer.policies().len());
            assert_eq!(rules.replace(bytes).ok(), Some(0), "the same rules are no new version");
        }
        Err(error) => {
            assert!(!error.problems().is_empty());
            let text = error.to_string();
            assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
        }
    }
});
