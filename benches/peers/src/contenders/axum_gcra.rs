//! axum_gcra, for axum 0.7. Its layer has no headers, and a refusal is an error that another layer answers.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use axum_07::async_trait;
use axum_07::extract::FromRequestParts;
use axum_gcra::RateLimitLayer;
use axum_gcra::gcra::{Quota, RateLimiter};
use http::request::Parts;
use tower::Layer;

use crate::contender::{Check, Contender, LayerSetup, PLENTY, Setup, check};
use crate::race::Run;
use crate::requests::{Bare, drive};

pub struct AxumGcra;

/// The address of the peer, where axum 0.8 puts it.
#[derive(PartialEq, Eq, Hash)]
struct Peer(IpAddr);

#[async_trait]
impl<S: Sync> FromRequestParts<S> for Peer {
    type Rejection = ();

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ()> {
        let peer = parts.extensions.get::<axum::extract::ConnectInfo<SocketAddr>>();
        peer.map(|peer| Self(peer.ip())).ok_or(())
    }
}

fn quota(denied: bool, per_second: u32) -> Quota {
    if denied {
        Quota::simple(Duration::from_secs(3_600))
    } else {
        let burst = NonZeroU64::new(u64::from(per_second)).expect("not zero");
        Quota::new(Duration::from_secs(1) / per_second, burst)
    }
}

impl Contender for AxumGcra {
    fn name(&self) -> &'static str {
        "axum_gcra"
    }

    fn by_address(&self, setup: &Setup) -> Option<Check<IpAddr>> {
        let (limiter, quota) = (RateLimiter::<IpAddr>::default(), quota(setup.denied, PLENTY));
        check(move |key: &IpAddr| limiter.req_sync(*key, quota, Instant::now()).is_ok())
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        let (limiter, quota) = (RateLimiter::<String>::default(), quota(setup.denied, PLENTY));
        check(move |key: &String| limiter.req_sync(key.clone(), quota, Instant::now()).is_ok())
    }

    fn bare(&self, setup: &LayerSetup) -> Option<Run<'static>> {
        let builder = RateLimitLayer::<Peer>::builder().with_default_quota(quota(setup.denied, setup.per_second()));
        let layer = builder.with_global_fallback(true).build();
        (!setup.headers).then(|| drive::<axum_07::body::Body, _, _>(layer.layer(Bare), setup))
    }
}
