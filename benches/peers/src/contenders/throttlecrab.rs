//! throttlecrab: keys are texts, and a check needs the limiter to itself.

use std::sync::Mutex;
use std::time::SystemTime;

use throttlecrab::{AdaptiveStore, RateLimiter};

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub struct Throttlecrab;

impl Contender for Throttlecrab {
    fn name(&self) -> &'static str {
        "throttlecrab in a Mutex"
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        let store = AdaptiveStore::new();
        let limiter = Mutex::new(RateLimiter::new(store));
        // With a burst of one it lets everything pass.
        let (burst, count, period) =
            if setup.denied { (2, 1, 3_600) } else { (i64::from(PLENTY), i64::from(PLENTY), 1) };
        check(move |key: &String| {
            let mut limiter = limiter.lock().expect("no check panics");
            limiter.rate_limit(key, burst, count, period, 1, SystemTime::now()).is_ok_and(|(allowed, _)| allowed)
        })
    }
}
