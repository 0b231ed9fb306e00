//! tower-ratelimit: the whole public path, that is a key, hashing, the clock, and a decision with remaining, reset and
//! retry.

use std::net::IpAddr;

use axum::Router;
use tower::Layer;
use tower_ratelimit::{Headers, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, key};

use crate::contender::{Check, Contender, LayerSetup, PLENTY, Setup, check};
use crate::race::Run;
use crate::requests::{Bare, drive};

/// As it comes: `MemoryLimiter::new()`.
pub const NAME: &str = "tower-ratelimit";
/// Like for like: a table for twice the keys, as peers' tables have about as many places as keys. Both clocks read the
/// processor's counter.
pub const ALIKE: &str = "tower-ratelimit, sized";

/// The default capacity: more keys need a setting.
pub const CAPACITY: usize = 1_000_000;

pub struct Ours {
    /// With a capacity of twice the keys, and a thousand at least, instead of the default capacity, or of all keys if
    /// they are more than that.
    pub sized: bool,
}

impl Ours {
    fn limiter(&self, keys: usize) -> MemoryLimiter {
        if !self.sized && keys <= CAPACITY {
            return MemoryLimiter::new();
        }
        let capacity = if self.sized { (2 * keys).max(1_000) } else { keys };
        MemoryLimiter::builder().max_keys(capacity).build().expect("the setup is possible")
    }

    fn layer(&self, setup: &LayerSetup) -> RateLimitLayer<MemoryLimiter> {
        let headers = if setup.headers { Headers::default() } else { Headers::none() };
        let quota = quota(setup.denied, setup.per_second());
        RateLimitLayer::new(self.limiter(setup.keys), quota, key::peer_ip()).headers(headers)
    }
}

fn quota(denied: bool, per_second: u32) -> Quota {
    if denied { Quota::per_hour(1) } else { Quota::per_second(per_second.into()) }
}

impl Contender for Ours {
    fn name(&self) -> &'static str {
        if self.sized { ALIKE } else { NAME }
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

    fn bare(&self, setup: &LayerSetup) -> Option<Run<'static>> {
        Some(drive::<axum::body::Body, _, _>(self.layer(setup).layer(Bare), setup))
    }

    fn app(&self, router: Router, setup: &LayerSetup) -> Option<Router> {
        Some(router.layer(self.layer(setup)))
    }
}
