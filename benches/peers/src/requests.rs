//! Requests to a layer without a network: what a layer adds is a few hundred nanoseconds, and would be lost behind one.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use http::header::{ACCEPT, HOST, USER_AGENT};
use http::{HeaderValue, Request, Response};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tower::Service;

use crate::contender::LayerSetup;
use crate::race::Run;

/// Requests that are made before they are sent. A server reads a request from memory that the network has just written.
/// With this number, requests lie outside of the first cache when they are sent.
const BATCH: u64 = 100;

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
pub fn drive_app(app: Router, setup: &LayerSetup) -> Run<'static> {
    drive::<Body, _, _>(app.with_state::<()>(()), setup)
}

/// Sends requests from `setup.keys` addresses to a service that answers at once, and reads the whole responses. The
/// first requests come from all addresses in turn, later ones from any of them. It makes sure that all pass, or that
/// all but the first of an address are refused. Some contenders refuse with an error.
pub fn drive<B, C, S>(mut service: S, setup: &LayerSetup) -> Run<'static>
where
    S: Service<Request<B>, Response = Response<C>> + 'static,
    B: Default,
    C: http_body::Body,
{
    let (keys, denied) = (setup.keys as u32, setup.denied);
    let mut fresh = 0..keys;
    let mut numbers = SmallRng::seed_from_u64(7);
    Box::new(move |count| {
        let mut context = Context::from_waker(Waker::noop());
        let (mut time, mut passed) = (Duration::ZERO, 0);
        let first = count.min(fresh.len() as u64);
        let mut left = count;
        while left > 0 {
            let now = left.min(BATCH);
            left -= now;
            let number = |_| fresh.next().unwrap_or_else(|| numbers.random_range(0..keys));
            let batch: Vec<Request<B>> = (0..now).map(number).map(request).collect();
            let started = Instant::now();
            for request in batch {
                passed += u64::from(send(&mut service, request, &mut context));
            }
            time += started.elapsed();
        }
        // A contender without keys lets only one of all first requests pass.
        let is_right = if denied { passed <= first } else { passed == count };
        assert!(is_right, "of {count} requests {passed} passed");
        time
    })
}

/// A request as a client of an API sends it.
fn request<B: Default>(number: u32) -> Request<B> {
    let mut request = Request::new(B::default());
    let headers = request.headers_mut();
    headers.insert(HOST, HeaderValue::from_static("api.example.com"));
    headers.insert(USER_AGENT, HeaderValue::from_static("example-client/1.4 (linux; x86_64)"));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    // Axum 0.8 and 0.7 have a type of their own each; the contenders for 0.7 look up the address themselves.
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number)), number as u16);
    request.extensions_mut().insert(ConnectInfo(address));
    request
}

/// Whether the service answered with success.
fn send<B, C, S>(service: &mut S, request: Request<B>, context: &mut Context<'_>) -> bool
where
    S: Service<Request<B>, Response = Response<C>>,
    C: http_body::Body,
{
    assert!(service.poll_ready(context).is_ready(), "the service is always ready");
    let mut answer = pin!(service.call(request));
    // A layer may yield before it answers.
    for _ in 0..1_000 {
        if let Poll::Ready(answer) = answer.as_mut().poll(context) {
            let Ok(response) = black_box(answer) else { return false };
            let is_success = response.status().is_success();
            let mut body = pin!(response.into_body());
            while let Poll::Ready(Some(frame)) = body.as_mut().poll_frame(context) {
                let _ = black_box(frame);
            }
            return is_success;
        }
    }
    panic!("the service does not answer without anything that comes from elsewhere")
}
