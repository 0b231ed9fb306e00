//! ratelimit: one bucket without keys, so it races for one key only.

use std::net::IpAddr;
use std::time::Duration;

use ratelimit::Ratelimiter;

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub struct Ratelimit;

impl Contender for Ratelimit {
    fn name(&self) -> &'static str {
        "ratelimit (no keys)"
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        if setup.keys > 1 {
            return None;
        }
        let limiter = if setup.denied {
            Ratelimiter::builder(1).period(Duration::from_secs(3_600)).max_tokens(1).initial_available(1).build()
        } else {
            let plenty = u64::from(PLENTY);
            Ratelimiter::builder(plenty).max_tokens(plenty).initial_available(plenty).build()
        };
        let limiter = limiter.expect("the quota is possible");
        check(move |_: &IpAddr| limiter.try_wait().is_ok())
    }
}
