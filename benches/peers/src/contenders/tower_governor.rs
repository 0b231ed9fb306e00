//! tower_governor: governor in a layer. Its two headers are by choice.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tower::Layer;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

use crate::contender::{Contender, LayerSetup};
use crate::race::Run;
use crate::requests::{Bare, drive};

pub struct TowerGovernor;

/// One that has the layer of this setup. Its type depends on whether there are headers.
macro_rules! with_layer {
    ($setup:expr, |$layer:ident| $made:expr) => {{
        let mut builder = GovernorConfigBuilder::default();
        if $setup.denied {
            builder.period(Duration::from_secs(3_600)).burst_size(1);
        } else {
            let units = $setup.per_second();
            builder.period(Duration::from_secs(1) / units).burst_size(units);
        }
        if $setup.headers {
            let $layer = GovernorLayer::new(Arc::new(builder.use_headers().finish().expect("the quota is possible")));
            $made
        } else {
            let $layer = GovernorLayer::new(Arc::new(builder.finish().expect("the quota is possible")));
            $made
        }
    }};
}

impl Contender for TowerGovernor {
    fn name(&self) -> &'static str {
        "tower_governor"
    }

    fn bare(&self, setup: &LayerSetup) -> Option<Run<'static>> {
        with_layer!(setup, |layer| Some(drive::<axum::body::Body, _, _>(layer.layer(Bare), setup)))
    }

    fn app(&self, router: Router, setup: &LayerSetup) -> Option<Router> {
        with_layer!(setup, |layer| Some(router.layer(layer)))
    }
}
