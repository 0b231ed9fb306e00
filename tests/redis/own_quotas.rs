//! Quotas that requests bring, over Redis: processes share what a customer has used, whatever its quota is now.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Head, Quota, RateLimitLayer, RedisLimiter, Rule, key, quota::Anchor};

use super::{connect, connected, eventually, patient};
use crate::support::redis_server::Server;

/// Much longer than a test on a busy machine.
const MONTH: Duration = Duration::from_secs(30 * 86_400);

/// It begins with a test, and so does not end while that runs.
fn window(limit: u64) -> Quota {
    Quota::fixed_window(limit, MONTH).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

fn layer(limiter: RedisLimiter) -> RateLimitLayer<RedisLimiter> {
    let own = |request: &Head<'_>| request.extensions.get::<Quota>().copied();
    RateLimitLayer::new(limiter, Rule::quota_from("customer", own).unwrap(), key::header("customer"))
}

fn answer(_: Request<String>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::from("not over while it is not read"))))
}

/// Sends a customer's request, whose quota is in its extensions.
async fn send(layer: &RateLimitLayer<RedisLimiter>, customer: &'static str, quota: Option<Quota>) -> Response<Body> {
    let mut request = Request::builder().header("customer", customer).body(String::new()).unwrap();
    if let Some(quota) = quota {
        request.extensions_mut().insert(quota);
    }
    layer.layer(service_fn(answer)).oneshot(request).await.unwrap()
}

/// Returns the status and what is left, as the response says.
async fn left(layer: &RateLimitLayer<RedisLimiter>, customer: &'static str, quota: Quota) -> (u16, Option<u64>) {
    let response = send(layer, customer, Some(quota)).await;
    let text = response.headers().get("ratelimit").map_or("", |value| value.to_str().unwrap());
    let left = text.split(';').find_map(|part| part.strip_prefix("r=")?.parse().ok());
    (response.status().as_u16(), left)
}

#[tokio::test]
async fn own_quotas_keep_what_a_customer_has_used_in_all_processes() {
    let server = Server::start();
    let processes = [layer(connect(&server).await), layer(connect(&server).await)];
    let window =
        |limit| Quota::fixed_window(limit, MONTH).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap();
    let (log, bucket) = (|limit| Quota::sliding_log(limit, MONTH).unwrap(), |limit| Quota::token_bucket(limit, MONTH));
    for (at, (customer, quota, expected)) in [
        ("a", window(7_300), (200, Some(7_299))),
        ("b", window(2), (200, Some(1))),
        ("a", window(100), (200, Some(98))),
        ("a", log(10), (200, Some(7))),
        ("b", window(2), (200, Some(0))),
        ("b", window(2), (429, Some(0))),
        ("a", bucket(1_000).unwrap(), (200, Some(996))),
        ("b", window(3), (200, Some(0))), // at once, though a process remembers that it refused this customer
        ("a", window(5), (200, Some(0))),
        ("a", window(5), (429, Some(0))),
        ("a", window(4), (429, Some(0))),
        ("b", window(1_000_000), (200, Some(999_996))),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(left(&processes[at % 2], customer, quota).await, expected, "step {at}: {customer}, {quota}");
    }
}

#[tokio::test]
async fn own_quota_that_was_raised_passes_after_a_refusal() {
    let server = Server::start();
    let layer = layer(connected(patient().max_denials(1_000), &server.url()).await);
    for quota in [1, 2, 3, 40].map(window) {
        while left(&layer, "a", quota).await.0 == 200 {}
    }
    assert_eq!(left(&layer, "a", window(41)).await, (200, Some(0)));
    assert_eq!(left(&layer, "a", window(40)).await, (429, Some(0)));
}

#[tokio::test]
async fn unlimited_customer_passes_beside_a_refused_one() {
    let server = Server::start();
    let layer = layer(connect(&server).await);
    let small = window(1);
    assert_eq!(left(&layer, "small", small).await, (200, Some(0)));
    for _ in 0..20 {
        assert_eq!(left(&layer, "enterprise", Quota::unlimited()).await, (200, None));
        let free = send(&layer, "internal", None).await;
        assert_eq!((free.status().as_u16(), free.headers().get("ratelimit")), (200, None));
        assert_eq!(left(&layer, "small", small).await, (429, Some(0)));
    }
    // A customer without a quota was charged nothing.
    assert_eq!(left(&layer, "internal", small).await, (200, Some(0)));
    assert_eq!(layer.check(), Ok(()));
}

#[tokio::test]
async fn own_quota_of_requests_in_flight_is_held_to_the_end() {
    let server = Server::start();
    let processes = [layer(connect(&server).await), layer(connect(&server).await)];
    let send = async |at: usize, limit| send(&processes[at], "a", Some(Quota::concurrent(limit))).await;
    let held = send(0, 1).await;
    assert_eq!((held.status().as_u16(), send(1, 1).await.status().as_u16()), (200, 429));
    let more = send(1, 2).await;
    assert_eq!((more.status().as_u16(), send(0, 2).await.status().as_u16()), (200, 429));
    // A rate and a limit of requests in flight know nothing of each other.
    assert_eq!(left(&processes[0], "a", window(2)).await, (200, Some(1)));
    drop((held, more));
    eventually("the places come back", async || send(1, 1).await.status() == 200).await;
}
