//! Blocks and meters of several processes, counted in Redis in the same step as the refusal.

use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, Quota, RateLimitLayer, RedisLimiter, Wait,
    clock::ManualClock,
    key,
    limiter::{Blocks, Meters},
    observe::{Outcome, OutcomeKind},
};

use super::{MINUTE, policy, rule};
use crate::support::redis_server::Server;

const HOUR: Duration = Duration::from_secs(3_600);

async fn send(layer: &RateLimitLayer<RedisLimiter>, user: &str) -> Outcome {
    let service = layer
        .clone()
        .expose_outcome(true)
        .layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty())))));
    let request = Request::builder().header("x-user", user).body(Body::empty()).unwrap();
    let response = service.oneshot(request).await.unwrap();
    let outcome = response.extensions().get::<Outcome>().expect("it was asked for").clone();
    let passed = response.status() == StatusCode::OK;
    assert_eq!((passed, response.status() == StatusCode::TOO_MANY_REQUESTS), (outcome.kind().passed(), !passed));
    outcome
}

fn user_key(name: &str) -> Key {
    Key::of(http::HeaderValue::from_str(name).unwrap()).unwrap()
}

/// Two processes count the refusals of one key together, by one quota and by one of several.
pub(super) async fn refusals_close_a_key(limiters: [RedisLimiter; 2], clock: &ManualClock) {
    use OutcomeKind::{Allowed, Blocked, Limited};
    let block = policy("login-block", Quota::block(3, 10 * MINUTE, HOUR).unwrap());
    let quota = Quota::fixed_window(2, MINUTE).unwrap();
    let rules = [
        rule("login", quota).block(block.name(), *block.quota()),
        tower_ratelimit::Rule::all_of("logins", [quota, Quota::fixed_window(100, HOUR).unwrap()])
            .and_then(|rule| rule.block("logins-block", *block.quota())),
    ];
    for rule in rules {
        let rule = rule.unwrap();
        let layers = limiters.clone().map(|limiter| RateLimitLayer::new(limiter, rule.clone(), key::header("x-user")));
        for user in ["ann", "bob", "cid", "dan", "eve"] {
            for (turn, expected) in [Allowed, Allowed, Limited, Limited, Blocked, Blocked].into_iter().enumerate() {
                let outcome = send(&layers[turn % 2], user).await;
                assert_eq!(outcome.kind(), expected, "request {turn} of {user}");
                if expected == Blocked {
                    assert_eq!(outcome.wait(), Wait::After(HOUR));
                }
            }
        }
        clock.advance(HOUR - Duration::from_micros(1));
        assert_eq!(send(&layers[0], "ann").await.kind(), Blocked, "also when the quota is back");
        clock.advance(Duration::from_micros(1));
        assert_eq!(send(&layers[1], "ann").await.kind(), Allowed);
    }
    let blocks = Blocks::new(limiters[0].clone(), block).unwrap();
    blocks.block_for(&user_key("ann"), 2 * HOUR).await.unwrap();
    assert_eq!(blocks.blocked_for(&user_key("ann")).await.unwrap(), Some(2 * HOUR));
    assert_eq!(blocks.blocked_for(&user_key("bob")).await.unwrap(), None);
}

/// Requests beyond the quota pass and are metered until the meter is full.
pub(super) async fn excess_is_metered(limiters: [RedisLimiter; 2], clock: &ManualClock) {
    use OutcomeKind::{Allowed, Limited, Overage};
    let meter = policy("api-over", Quota::meter(3, 24 * HOUR).unwrap());
    let rule = rule("api", Quota::fixed_window(2, HOUR).unwrap()).overage(meter.name(), *meter.quota()).unwrap();
    let meters = Meters::new(limiters[0].clone(), meter).unwrap();
    let layers = limiters.map(|limiter| RateLimitLayer::new(limiter, rule.clone(), key::header("x-user")));
    for user in ["ann", "bob", "cid", "dan", "eve"] {
        for (turn, expected) in [Allowed, Allowed, Overage, Overage, Overage, Limited].into_iter().enumerate() {
            assert_eq!(send(&layers[turn % 2], user).await.kind(), expected, "request {turn} of {user}");
        }
        assert_eq!(meters.usage(&user_key(user)).await.unwrap(), 3);
    }
    meters.settle(&user_key("ann"), 2).await.unwrap();
    assert_eq!(send(&layers[1], "ann").await.kind(), Overage, "what is settled is free again");
    clock.advance(HOUR);
    assert_eq!(send(&layers[0], "bob").await.kind(), Allowed);
    assert_eq!(meters.usage(&user_key("bob")).await.unwrap(), 3, "kept for longer than the period");
}

async fn two(server: &Server, clock: &ManualClock) -> [RedisLimiter; 2] {
    let connect = || async { super::connected(super::patient().clock(clock.clone()), &server.url()).await };
    [connect().await, connect().await]
}

#[tokio::test]
async fn refusals_of_two_processes_block_a_key() {
    let (server, clock) = (Server::start(), ManualClock::new());
    refusals_close_a_key(two(&server, &clock).await, &clock).await;
}

#[tokio::test]
async fn meter_is_shared_by_two_processes() {
    let (server, clock) = (Server::start(), ManualClock::new());
    excess_is_metered(two(&server, &clock).await, &clock).await;
}

#[tokio::test]
async fn blocked_key_outlives_the_process_that_blocked_it() {
    let (server, clock) = (Server::start(), ManualClock::new());
    let rule = rule("login", Quota::fixed_window(1, MINUTE).unwrap())
        .block("login-block", Quota::block(2, 10 * MINUTE, HOUR).unwrap())
        .unwrap();
    let [first, _] = two(&server, &clock).await;
    let layer = RateLimitLayer::new(first, rule.clone(), key::header("x-user"));
    for expected in [OutcomeKind::Allowed, OutcomeKind::Limited, OutcomeKind::Blocked] {
        assert_eq!(send(&layer, "ann").await.kind(), expected);
    }
    drop(layer);
    clock.advance(2 * MINUTE);
    let [next, _] = two(&server, &clock).await;
    let layer = RateLimitLayer::new(next, rule, key::header("x-user"));
    assert_eq!(send(&layer, "ann").await.kind(), OutcomeKind::Blocked);
    assert_eq!(send(&layer, "bob").await.kind(), OutcomeKind::Allowed);
}
