//! trypema in this process: sliding windows of sub-windows; admission is by best effort if threads race.

use trypema::local::LocalRateLimiterProvider;
use trypema::{RateLimit, RateLimitDecision, RateLimiterBuilder, WindowSize};

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub struct Trypema;

impl Contender for Trypema {
    fn name(&self) -> &'static str {
        "trypema"
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        let (window, rate) = if setup.denied {
            (WindowSize::hours_or_panic(1), RateLimit::per_hour_or_panic(1.0))
        } else {
            (WindowSize::seconds_or_panic(1), RateLimit::per_second_or_panic(f64::from(PLENTY)))
        };
        let provider = LocalRateLimiterProvider::builder().window_size(window).disable_cleanup().build();
        let provider = provider.expect("the setup is possible");
        check(move |key: &String| matches!(provider.absolute().inc(key, &rate, 1), RateLimitDecision::Allowed))
    }
}
