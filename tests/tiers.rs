//! What a layer promises of several quotas under one name: all of them at once, or the one of a client's plan.

mod support;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use support::Scripted;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Key, Limiter, ManualClock, MemoryLimiter, MissingKey, Outcome, Policy, Quota, RateLimitLayer, Rule, key,
};

type Body = Full<Bytes>;

#[expect(clippy::needless_pass_by_value, reason = "a service takes its request")]
fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

async fn send<L: Limiter + 'static>(
    layer: &RateLimitLayer<L>,
    request: Request<Body>,
) -> Response<tower_ratelimit::middleware::Body<Body>> {
    layer.layer(tower::service_fn(answer)).oneshot(request).await.unwrap()
}

fn get() -> Request<Body> {
    Request::new(Body::default())
}

fn field<'a, B>(response: &'a Response<B>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// What is left of each policy, by its `RateLimit` field.
fn left<B>(response: &Response<B>) -> Vec<(String, u64)> {
    let items = field(response, "ratelimit").split(", ").map(|item| {
        let (name, rest) = item.split_once(";r=").expect("an item tells what remains");
        let remaining = rest.split(';').next().unwrap_or_default();
        (name.trim_matches('"').to_owned(), remaining.parse().expect("a number"))
    });
    items.collect()
}

fn memory(clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().clock(clock.clone()).build().unwrap()
}

fn three() -> Rule {
    Policy::several("client", [Quota::per_minute(3), Quota::per_hour(5), Quota::per_day(7)]).unwrap()
}

#[tokio::test]
async fn several_quotas_are_charged_together_or_not_at_all() {
    let clock = ManualClock::new();
    let layer = RateLimitLayer::new(memory(&clock), three(), key::global());
    let mut passed = Vec::new();
    for minute in 0..60 {
        for _ in 0..4 {
            if send(&layer, get()).await.status() == StatusCode::OK {
                passed.push(minute);
            }
        }
        clock.advance(Duration::from_secs(60));
    }
    // Three at once by the minute's quota, then by the hour's two more of five, then one each 720 s of it; by the day's
    // seven at most, and none comes back within the hour.
    assert_eq!(passed, [0, 0, 0, 1, 1, 12, 24]);
}

#[tokio::test]
async fn a_refused_request_takes_nothing_from_any_of_several_quotas() {
    let clock = ManualClock::new();
    let layer = RateLimitLayer::new(memory(&clock), three(), key::global());
    for _ in 0..3 {
        assert_eq!(send(&layer, get()).await.status(), StatusCode::OK);
    }
    for _ in 0..100 {
        assert_eq!(send(&layer, get()).await.status(), StatusCode::TOO_MANY_REQUESTS);
    }
    clock.advance(Duration::from_secs(60));
    let names = ["client-3-per-minute", "client-5-per-hour", "client-7-per-day"].map(str::to_owned);
    let left = left(&send(&layer, get()).await);
    assert_eq!(left, names.into_iter().zip([2, 1, 3]).collect::<Vec<_>>());
}

#[tokio::test]
async fn every_one_of_several_quotas_is_in_the_fields_and_the_outcome() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), three(), key::global());
    for remaining in (0..3).rev() {
        let passed = send(&layer, get()).await;
        assert_eq!(left(&passed).first().map(|(_, left)| *left), Some(remaining));
        let policies =
            "\"client-3-per-minute\";q=3;w=60, \"client-5-per-hour\";q=5;w=3600, \"client-7-per-day\";q=7;w=86400";
        assert_eq!(field(&passed, "ratelimit-policy"), policies);
    }
    let refused = send(&layer, get()).await;
    assert_eq!(field(&refused, "retry-after"), "20", "a third of a minute");
    let outcome = refused.extensions().get::<Outcome>().unwrap();
    assert_eq!(outcome.standings().len(), 3);
    let violated: Vec<&str> = outcome.violated().map(|standing| standing.policy().name()).collect();
    assert_eq!(violated, ["client-3-per-minute"]);
}

#[tokio::test]
async fn several_quotas_have_one_key_cost_and_condition() {
    let extracted = Arc::new(AtomicU32::new(0));
    let counted = {
        let extracted = Arc::clone(&extracted);
        move |request: &http::request::Parts| {
            extracted.fetch_add(1, Ordering::Relaxed);
            Key::of(request.headers.get("x-api-key"))
        }
    };
    let rule = three().when(|request| request.uri.path() == "/limited").cost(|_| 2).missing_key(MissingKey::Shared);
    let limiter = Scripted::new();
    let layer = RateLimitLayer::new(limiter.clone(), rule, counted);
    let request = |path: &str| Request::builder().uri(path).header("x-api-key", "k").body(Body::default()).unwrap();
    send(&layer, request("/free")).await;
    assert!(limiter.takes().is_empty());
    send(&layer, request("/limited")).await;
    assert_eq!(extracted.load(Ordering::Relaxed), 1);
    let takes = limiter.takes();
    let [charges] = takes.as_slice() else { panic!("one call for all: {takes:?}") };
    let key = Key::of("k").unwrap();
    let expected =
        ["client-3-per-minute", "client-5-per-hour", "client-7-per-day"].map(|name| (name.to_owned(), key.clone(), 2));
    assert_eq!(*charges, expected);
}

#[tokio::test]
async fn several_quotas_stand_beside_other_rules() {
    let limiter = Scripted::new();
    let everyone = Policy::new("everyone", Quota::per_second(100)).unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), everyone, key::global())
        .and(three(), key::global())
        .and(three(), key::global());
    send(&layer, get()).await;
    let names: Vec<String> = limiter.takes().concat().into_iter().map(|(name, _, _)| name).collect();
    let expected = [
        "everyone",
        "client-3-per-minute",
        "client-5-per-hour",
        "client-7-per-day",
        "client-3-per-minute-2",
        "client-5-per-hour-2",
        "client-7-per-day-2",
    ];
    assert_eq!(names, expected);
}

#[test]
fn several_quotas_that_make_no_sense_are_refused_with_a_sentence() {
    let error = |name: &str, quotas: &[Quota]| Policy::several(name, quotas.to_vec()).unwrap_err().to_string();
    assert_eq!(error("client", &[]), "\"client\" has no quota: give it at least one");
    let twice = [Quota::per_minute(60), Quota::per_hour(9), Quota::per_minute(60)];
    assert_eq!(
        error("client", &twice),
        "\"client\" has the quota \"60 per minute, token bucket\" twice, which would charge each request twice for one limit"
    );
    assert!(error("\n", &[Quota::per_minute(60)]).contains("printable ASCII"));
    // With the words of the quota it is one too many.
    let long = "n".repeat(128 - "-60-per-minute".len());
    assert!(Policy::several(&long, [Quota::per_minute(60)]).is_ok());
    assert!(error(&format!("{long}n"), &[Quota::per_minute(60)]).contains("1 to 128"));
}
