//! Requests to a layer without a network: what a layer adds is a hundred nanoseconds, and would be lost behind one.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tower::Service;

use crate::contender::LayerSetup;

/// Sends so many requests, one after the other.
pub type Requests = Box<dyn FnMut(u64)>;

/// A service that does nothing.
#[derive(Clone)]
pub struct Bare;

impl<B: Default> Service<Request<B>> for Bare {
    type Response = Response<B>;
    type Error = Infallible;
    type Future = Ready<Result<Response<B>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        ready(Ok(Response::new(B::default())))
    }
}

/// Sends requests to an application as a server does. Axum turns the routes into services when it begins to serve; a
/// bare router would make them, and their layers, anew for each request.
pub fn drive_app(app: Router, setup: &LayerSetup) -> Requests {
    drive::<Body, _, _>(app.with_state::<()>(()), setup)
}

/// Sends requests from `setup.keys` addresses to a service that answers at once. It makes sure that all pass, or that all
/// but the first of an address are refused. Some contenders refuse with an error.
pub fn drive<B, C, S>(mut service: S, setup: &LayerSetup) -> Requests
where
    S: Service<Request<B>, Response = Response<C>> + 'static,
    B: Default,
{
    let (keys, denied) = (setup.keys, setup.denied);
    let mut first = true;
    let mut numbers = SmallRng::seed_from_u64(7);
    Box::new(move |count| {
        let mut context = Context::from_waker(Waker::noop());
        let mut passed = 0;
        for _ in 0..count {
            let mut request = Request::new(B::default());
            let number = numbers.random_range(0..keys as u32);
            // Axum 0.8 and 0.7 have a type of their own each; the contenders for 0.7 look up the address itself.
            let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number)), number as u16);
            request.extensions_mut().insert(ConnectInfo(address));
            assert!(service.poll_ready(&mut context).is_ready(), "the service is always ready");
            let mut response = pin!(service.call(request));
            // A layer may yield before it answers.
            for polls in 0.. {
                if let Poll::Ready(response) = response.as_mut().poll(&mut context) {
                    passed += u64::from(response.as_ref().is_ok_and(|response| response.status().is_success()));
                    let _ = black_box(response);
                    break;
                }
                assert!(polls < 1_000, "the service answers without anything that comes from elsewhere");
            }
        }
        let expected = if denied { 0 } else { count };
        let tolerated = if denied && first { keys as u64 } else { 0 };
        assert!(passed.abs_diff(expected) <= tolerated, "of {count} requests {passed} passed, not {expected}");
        first = false;
    })
}
