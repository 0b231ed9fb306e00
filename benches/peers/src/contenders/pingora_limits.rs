//! pingora-limits: counts by estimate, in a sketch of fixed size. Different keys may share their counts.

use std::hash::Hash;
use std::net::IpAddr;
use std::time::Duration;

use pingora_limits::rate::Rate;

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub struct PingoraLimits;

impl PingoraLimits {
    fn keyed<K: Hash + 'static>(setup: &Setup) -> Option<Check<K>> {
        let most = if setup.denied { 1 } else { PLENTY as isize };
        let rate = Rate::new(Duration::from_secs(3_600));
        check(move |key: &K| rate.observe(key, 1) <= most)
    }
}

impl Contender for PingoraLimits {
    fn name(&self) -> &'static str {
        "pingora-limits (estimates)"
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        Self::keyed(setup)
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        Self::keyed(setup)
    }
}
