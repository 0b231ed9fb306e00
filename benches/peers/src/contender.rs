//! A contender makes limiters for the cases that it can take part in.

use std::hint::black_box;
use std::net::IpAddr;

use axum::Router;

use crate::race::Run;

/// One of those compared. Each method makes a fresh limiter, or nothing if the contender has no such thing.
pub trait Contender: Sync {
    /// The name in tables and charts.
    fn name(&self) -> &'static str;

    /// A limiter whose keys are addresses.
    fn by_address(&self, _: &Setup) -> Option<Check<IpAddr>> {
        None
    }

    /// A limiter whose keys are texts of 24 bytes.
    fn by_text(&self, _: &Setup) -> Option<Check<String>> {
        None
    }

    /// A layer around a service that does nothing.
    fn bare(&self, _: &LayerSetup) -> Option<Run<'static>> {
        None
    }

    /// An application with a layer around it.
    fn app(&self, _: Router, _: &LayerSetup) -> Option<Router> {
        None
    }
}

/// The case that a limiter is made for.
pub struct Setup {
    /// The number of keys that come.
    pub keys: usize,
    /// Whether the quota is one in an hour, and so everything but a key's first request is denied; else it never runs
    /// dry.
    pub denied: bool,
}

/// The case that a layer is made for. Keys are the addresses of the peers.
pub struct LayerSetup {
    pub keys: usize,
    pub denied: bool,
    /// Whether responses get the headers that are the contender's default, or none.
    pub headers: bool,
}

impl LayerSetup {
    /// The units that each key has in a second, and its burst: as common quotas are if there are many keys. A hot key
    /// has more than requests can take.
    pub fn per_second(&self) -> u32 {
        (20_000_000 / self.keys.max(1) as u32).max(1_000)
    }
}

/// So many units in a second never run dry.
pub const PLENTY: u32 = 1_000_000_000;

/// Checks keys.
pub type Check<K> = Box<dyn Pass<K>>;

/// Checks keys one after the other.
pub trait Pass<K>: Send + Sync {
    /// Checks the keys at these places, and returns how many were allowed.
    fn pass(&self, keys: &[K], places: &[u32]) -> usize;
}

/// The loop is compiled for each contender, so that nothing stands between it and the check.
impl<K, F: Fn(&K) -> bool + Send + Sync> Pass<K> for F {
    fn pass(&self, keys: &[K], places: &[u32]) -> usize {
        places.iter().filter(|place| black_box(self(black_box(&keys[**place as usize])))).count()
    }
}

/// A check in its box.
pub fn check<K>(check: impl Fn(&K) -> bool + Send + Sync + 'static) -> Option<Check<K>> {
    Some(Box::new(check))
}
