//! tower-ratelimit: the whole public path, that is a key, hashing, the clock, and a decision with remaining, reset and
//! retry.

use std::net::IpAddr;

use axum::Router;
use tower::Layer;
use tower_ratelimit::{Headers, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, key};

use crate::contender::{Check, Contender, LayerSetup, PLENTY, Setup, check};
use crate::requests::{Bare, Requests, drive};

pub const NAME: &str = "tower-ratelimit";
const FAST: &str = "tower-ratelimit, fast clock";

/// With its default clock, which is the system's monotonic one, or with governor's.
pub struct Ours {
    pub fast_clock: bool,
}

impl Ours {
    fn limiter(&self, keys: usize) -> MemoryLimiter {
        let builder = MemoryLimiter::builder().capacity(keys.max(1_000));
        let builder = if self.fast_clock { builder.fast_clock() } else { builder };
        builder.build().expect("the setup is possible")
    }

    fn layer(&self, setup: &LayerSetup) -> RateLimitLayer<MemoryLimiter> {
        let headers = if setup.headers { Headers::default() } else { Headers::none() };
        let quota = quota(setup.denied, setup.per_second());
        RateLimitLayer::new(self.limiter(2 * setup.keys), quota, key::peer_ip()).headers(headers)
    }
}

fn quota(denied: bool, per_second: u32) -> Quota {
    if denied { Quota::per_hour(1) } else { Quota::per_second(per_second) }
}

impl Contender for Ours {
    fn name(&self) -> &'static str {
        if self.fast_clock { FAST } else { NAME }
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        let (limiter, policy) = (self.limiter(setup.keys), Policy::from(quota(setup.denied, PLENTY)));
        check(move |address| {
            let key = Key::of(address).unwrap_or(Key::global());
            limiter.take_one(&policy, &key, 1).is_allowed()
        })
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        let (limiter, policy) = (self.limiter(setup.keys), Policy::from(quota(setup.denied, PLENTY)));
        check(move |text: &String| {
            let key = Key::of(text.as_str()).unwrap_or(Key::global());
            limiter.take_one(&policy, &key, 1).is_allowed()
        })
    }

    fn bare(&self, setup: &LayerSetup) -> Option<Requests> {
        Some(drive::<axum::body::Body, _, _>(self.layer(setup).layer(Bare), setup))
    }

    fn app(&self, router: Router, setup: &LayerSetup) -> Option<Router> {
        Some(router.layer(self.layer(setup)))
    }
}
