//! tower-resilience's limiter: one for all, and a refusal is an error.

use std::time::Duration;

use tower::Layer;
use tower_resilience_ratelimiter::RateLimiterLayer;

use crate::contender::{Contender, LayerSetup, PLENTY};
use crate::race::Run;
use crate::requests::{Bare, drive};

pub struct TowerResilience;

impl Contender for TowerResilience {
    fn name(&self) -> &'static str {
        "tower-resilience (no keys)"
    }

    fn bare(&self, setup: &LayerSetup) -> Option<Run<'static>> {
        if setup.headers {
            return None;
        }
        let (most, seconds) = if setup.denied { (1, 3_600) } else { (PLENTY as usize, 1) };
        let builder = RateLimiterLayer::builder().limit_for_period(most).refresh_period(Duration::from_secs(seconds));
        let layer = builder.timeout_duration(Duration::ZERO).build().expect("the quota is possible");
        Some(drive::<axum::body::Body, _, _>(layer.layer(Bare), setup))
    }
}
