//! tower's own rate limit: one for all, in one place of a stack. It cannot be cloned, so it races without an
//! application.

use std::time::Duration;

use tower::Layer;
use tower::limit::RateLimitLayer;

use crate::contender::{Contender, LayerSetup, PLENTY};
use crate::race::Run;
use crate::requests::{Bare, drive};

pub struct TowerLimit;

impl Contender for TowerLimit {
    fn name(&self) -> &'static str {
        "tower::limit (no keys)"
    }

    fn bare(&self, setup: &LayerSetup) -> Option<Run<'static>> {
        // It has no headers, and it waits where others refuse.
        if setup.headers || setup.denied {
            return None;
        }
        let layer = RateLimitLayer::new(u64::from(PLENTY), Duration::from_secs(1));
        Some(drive::<axum::body::Body, _, _>(layer.layer(Bare), setup))
    }
}
