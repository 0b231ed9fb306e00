//! axum-governor: governor in a layer of its own, with five headers always.

use std::num::NonZeroU32;

use axum::Router;
use axum_governor::extractor::PeerIp;
use axum_governor::{GovernorConfigBuilder, GovernorLayer, Quota};
use tower::Layer;

use crate::contender::{Contender, LayerSetup};
use crate::race::Run;
use crate::requests::{Bare, drive};

pub struct AxumGovernor;

impl AxumGovernor {
    fn layer(setup: &LayerSetup) -> Option<GovernorLayer<std::net::IpAddr>> {
        if !setup.headers {
            return None;
        }
        let limit = |limit| NonZeroU32::new(limit).expect("not zero");
        let quota = if setup.denied {
            Quota::requests_per_hour(limit(1))
        } else {
            Quota::requests_per_second(limit(setup.per_second()))
        };
        let builder = GovernorConfigBuilder::default()
            .with_extractor(PeerIp::default())
            .expect_connect_info()
            .quota_default(quota);
        Some(GovernorLayer::new(builder.finish().expect("the quota is possible")))
    }
}

impl Contender for AxumGovernor {
    fn name(&self) -> &'static str {
        "axum-governor"
    }

    fn bare(&self, setup: &LayerSetup) -> Option<Run<'static>> {
        Some(drive::<axum::body::Body, _, _>(Self::layer(setup)?.layer(Bare), setup))
    }

    fn app(&self, router: Router, setup: &LayerSetup) -> Option<Router> {
        Some(router.layer(Self::layer(setup)?))
    }
}
