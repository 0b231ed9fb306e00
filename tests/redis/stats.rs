//! `Stats` sees through a layer what happens at Redis.

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::limiter::{FallbackLimiter, Limiter};
use tower_ratelimit::observe::{OutcomeKind, RecentRefusal, Stats, StatusPage};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, RedisLimiter, Rule, key as extract};

use super::{connect, connected, eventually, policy};
use crate::support::Events;
use crate::support::redis_server::Server;

async fn send<L: Limiter>(layer: &RateLimitLayer<L>, requests: usize) {
    let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::empty())));
    for _ in 0..requests {
        layer.layer(answer).oneshot(Request::new(String::new())).await.unwrap();
    }
}

#[tokio::test]
async fn checks_and_local_answers_are_counted() {
    let (server, stats) = (Server::start(), Stats::new());
    let limiter = connect(&server).await;
    let layer = RateLimitLayer::new(limiter, Rule::from(policy("client", Quota::per_hour(2))), extract::global());
    send(&layer.observer(stats.clone()), 10).await;
    let snapshot = stats.snapshot();
    let events = snapshot.events();
    assert_eq!(snapshot.requests(OutcomeKind::Limited), 8);
    // The first denial is remembered, for up to a second.
    assert!(events.checks().count() >= 3 && events.local_answers() > 0, "{events:?}");
    assert_eq!(events.checks().count() + events.local_answers(), 10);
    assert!(events.checks().sum() > Duration::ZERO);
    assert_eq!(events.errors().map(|(_, count)| count).sum::<u64>(), 0);
}

#[tokio::test]
async fn places_on_redis_are_counted_until_they_are_returned() {
    let (server, stats) = (Server::start(), Stats::new());
    let exports = Rule::from(policy("exports", Quota::concurrent(2)));
    let layer = RateLimitLayer::new(connect(&server).await, exports, extract::global()).observer(stats.clone());
    let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::from("slow"))));
    let send = async || layer.layer(answer).oneshot(Request::new(String::new())).await.unwrap();
    let held = [send().await, send().await, send().await];
    assert_eq!(held.each_ref().map(|response| response.status().as_u16()), [200, 200, 429]);
    let exports = || {
        let snapshot = stats.snapshot();
        (snapshot.policies()[0].held(), snapshot.policies()[0].held_for().count(), snapshot.most_held().len())
    };
    assert_eq!(exports(), (2, 0, 1));
    drop(held);
    assert_eq!(exports(), (0, 2, 0), "nobody waits for Redis");
}

#[tokio::test]
async fn every_observer_of_the_builder_gets_each_event() {
    let (server, seen) = (Server::start(), [(); 2].map(|()| Events::default()));
    let builder = RedisLimiter::builder().observer(seen[0].clone()).observer(seen[1].clone());
    let limiter = connected(builder, &server.url()).await;
    send(&RateLimitLayer::new(limiter, Rule::from(policy("client", Quota::per_hour(2))), extract::global()), 1).await;
    let [first, second] = seen.each_ref().map(|events| events.lock().clone());
    assert!(!first.is_empty());
    assert_eq!(first, second);
}

#[tokio::test]
async fn operator_is_told_that_the_server_is_away() {
    let (mut server, stats) = (Server::start(), Stats::builder().max_recent_refusals(16).build());
    let limiter = connected(RedisLimiter::builder().deadline(Duration::from_secs(1)), &server.url()).await;
    let layer = RateLimitLayer::new(limiter, Rule::from(policy("client", Quota::per_hour(1))), extract::global());
    let layer = layer.observer(stats.clone());
    let page = StatusPage::new(stats.clone()).layer("api", &layer).operators(|_| Some("alice".to_owned()), |_| {});
    while stats.snapshot().recent_refusals().iter().all(|refusal| refusal.status().is_none()) {
        send(&layer, 1).await;
    }
    let recent = stats.snapshot();
    let fingerprint = recent.recent_refusals().iter().find_map(RecentRefusal::fingerprint).unwrap();
    let post = async |fields: String| {
        let request = Request::post("/").header("content-type", "application/x-www-form-urlencoded");
        let request = request.header("accept", "application/json").body(Body::from(fields)).unwrap();
        let response = page.clone().oneshot(request).await.unwrap();
        let (status, body) = (response.status(), response.into_body().collect().await.unwrap().to_bytes());
        (status, serde_json::from_slice::<serde_json::Value>(&body).unwrap())
    };
    let explain = async || post(format!("action=explain&fingerprint={fingerprint}")).await.1[0].clone();
    let mut explained = serde_json::Value::Null;
    // On a busy machine Redis may not answer in time.
    eventually("the key is explained", async || {
        explained = explain().await;
        explained["failure"].is_null()
    })
    .await;
    assert_eq!(explained["states"][0]["remaining"], 0);
    server.kill();
    let token = explained["token"].as_str().unwrap();
    let (status, done) = post(format!("action=reset&token={token}")).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!done["actions"][0]["error"].as_str().unwrap().is_empty(), "{done}");
    let explained = explain().await;
    assert!(!explained["failure"].as_str().unwrap().is_empty(), "{explained}");
    server.restart();
    eventually("the key is reset", async || {
        let token = explain().await["token"].as_str().unwrap().to_owned();
        post(format!("action=reset&token={token}")).await.0 == StatusCode::OK
    })
    .await;
}

#[tokio::test]
async fn server_that_is_away_is_counted_until_it_is_back() {
    let (mut server, stats) = (Server::start(), Stats::new());
    // The observer of the limiter takes nothing away from that of the layer.
    let builder = || RedisLimiter::builder().deadline(Duration::from_secs(1)).observer(Events::default());
    let redis = connected(builder(), &server.url()).await;
    let limiter = FallbackLimiter::new(redis, MemoryLimiter::new(), NonZeroU32::MIN);
    let layer = RateLimitLayer::new(limiter, Rule::from(policy("client", Quota::per_hour(1_000))), extract::global());
    let layer = layer.observer(stats.clone());
    while stats.snapshot().events().checks().count() == 0 {
        send(&layer, 1).await;
    }
    let checks = stats.snapshot().events().checks().count();
    server.kill();
    while stats.snapshot().events().servers_down().count() == 0 {
        send(&layer, 1).await;
    }
    send(&layer, 10).await;
    let snapshot = stats.snapshot();
    let errors: u64 = snapshot.events().errors().map(|(_, count)| count).sum();
    assert!(errors > 10, "{snapshot:?}");
    assert_eq!(snapshot.events().fallbacks(), errors);
    assert_eq!(snapshot.requests(OutcomeKind::Allowed), checks + errors);
    assert_eq!(snapshot.events().checks().count(), checks, "checks that failed are not timed");
    let late = Stats::new();
    let _service = layer.clone().observer(late.clone()).layer(());
    assert_eq!(late.snapshot().events().servers_down().count(), 1, "a layer that is made while the server is away");
    let other = {
        let limiter = builder().connect(&server.url()).await.unwrap();
        let (stats, policy) = (Stats::new(), policy("client", Quota::per_hour(1_000)));
        let layer = RateLimitLayer::new(limiter, Rule::from(policy), extract::global()).observer(stats.clone());
        while stats.snapshot().events().servers_down().count() == 0 {
            send(&layer, 1).await;
        }
        stats
    };
    let none_is_down = |stats: &Stats| stats.snapshot().events().servers_down().count() == 0;
    eventually("its limiter was dropped", async || none_is_down(&other)).await;
    server.restart();
    eventually("the server is back", async || none_is_down(&stats) && none_is_down(&late)).await;
}
