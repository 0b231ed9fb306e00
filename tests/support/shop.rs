//! A service behind a leaky queue, in a world whose time the test advances.
#![allow(dead_code, reason = "each test file uses its part")]

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule, key, limiter::Limiter};

use super::memory;
use super::waiting::{ManualTimer, World};

pub(crate) const MS: u64 = 1_000;

/// Returns a queue with a departure every 10 ms, in which this number of requests may wait.
pub(crate) fn queue(length: u64) -> Quota {
    Quota::leaky_queue(100, Duration::from_secs(1)).unwrap().queue(length).unwrap()
}

/// The numbers of the departed requests, with their departures in microseconds.
pub(crate) type Departures = Arc<Mutex<Vec<(usize, u64)>>>;

#[derive(Clone)]
pub(crate) struct Number(pub(crate) usize);

/// A world with a limiter, and a service that records when each request departs.
pub(crate) struct Shop {
    pub(crate) world: World<StatusCode>,
    pub(crate) limiter: MemoryLimiter,
    pub(crate) policy: Policy,
    pub(crate) departures: Departures,
}

impl Shop {
    pub(crate) fn new(quota: Quota) -> Self {
        let world = World::new();
        let limiter = memory(&world.clock);
        Self { world, limiter, policy: Policy::new("queue", quota).unwrap(), departures: Departures::default() }
    }

    pub(crate) fn layer(&self) -> RateLimitLayer<MemoryLimiter> {
        RateLimitLayer::new(self.limiter.clone(), Rule::from(self.policy.clone()), key::global())
            .timer(self.world.timer.clone())
    }

    /// Sends the next request through this layer.
    pub(crate) fn send(&mut self, layer: &RateLimitLayer<MemoryLimiter>) -> usize {
        self.send_costing(layer, 1)
    }

    pub(crate) fn send_costing(&mut self, layer: &RateLimitLayer<MemoryLimiter>, cost: u64) -> usize {
        let (number, departures) = (self.world.done.len(), Arc::clone(&self.departures));
        let timer = self.world.timer.clone();
        let mut request = Request::new(Body::default());
        request.extensions_mut().insert(Number(number));
        request.extensions_mut().insert(cost);
        self.world.spawn(through(layer, departures, timer, request))
    }

    pub(crate) fn departed(&self) -> Vec<(usize, u64)> {
        self.departures.lock().unwrap().clone()
    }

    pub(crate) fn remaining(&self) -> u64 {
        self.limiter.peek_one(&self.policy, &Key::global(), 0).remaining()
    }
}

pub(crate) fn through<L: Limiter + 'static>(
    layer: &RateLimitLayer<L>,
    departures: Departures,
    timer: ManualTimer,
    request: Request<Body>,
) -> impl Future<Output = StatusCode> + use<L> {
    let service = layer.layer(service_fn(move |request: Request<Body>| {
        let number = request.extensions().get::<Number>().map_or(0, |number| number.0);
        departures.lock().unwrap().push((number, timer.now_us()));
        std::future::ready(Ok::<_, Infallible>(Response::new(Body::default())))
    }));
    async move { service.oneshot(request).await.unwrap().status() }
}
