//! Costs that are known after the response are settled on Redis, and no request waits for that.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Policy, Quota, RateLimitLayer, RedisLimiter, Rule,
    limiter::{Charge, Limiter},
    middleware::Usage,
};

use super::{connect, key, policy, rule};
use crate::support::redis_server::Server;

/// Returns the usage once every command has been answered.
async fn used(limiter: &RedisLimiter, policy: &Policy) -> u64 {
    let decision = limiter.peek(&[Charge::new(policy, &key("all")).cost(0)]).await.unwrap();
    policy.quota().capacity() - decision.charges()[0].remaining()
}

#[tokio::test]
async fn final_cost_is_refunded_or_charged() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let window = Duration::from_secs(30 * 86_400);
    let quotas = [
        Quota::fixed_window(1_000, window).unwrap(),
        Quota::token_bucket(1_000, window).unwrap(),
        Quota::sliding_window(1_000, window).unwrap().buckets(30).unwrap(),
        Quota::sliding_log(1_000, window).unwrap(),
    ];
    for (number, quota) in quotas.into_iter().enumerate() {
        let tokens = policy(&format!("tokens-{number}"), quota);
        let requests = policy(&format!("requests-{number}"), quota);
        let layer = RateLimitLayer::new(
            limiter.clone(),
            Rule::from(tokens.clone()).cost(|_| 100).settle_by_usage(),
            |_: &_| key("all"),
        )
        .and(Rule::from(requests.clone()).charge_when(|response| response.status == StatusCode::OK), |_: &_| {
            key("all")
        });
        let service = layer.layer(service_fn(|request: Request<String>| async move {
            let cost = request.body().parse().unwrap();
            let bill: &Usage = request.extensions().get().unwrap();
            assert!(bill.set(cost));
            let mut response = Response::new(axum::body::Body::from("hello"));
            if cost == 0 {
                *response.status_mut() = StatusCode::BAD_GATEWAY;
            }
            Ok::<_, Infallible>(response)
        }));
        for (cost, expected) in [(30, (30, 1)), (300, (330, 2)), (0, (330, 2)), (100, (430, 3))] {
            let response = service.clone().oneshot(Request::new(cost.to_string())).await.unwrap();
            response.into_body().collect().await.unwrap();
            assert_eq!((used(&limiter, &tokens).await, used(&limiter, &requests).await), expected, "{quota}, {cost}");
        }
        // The cost exceeds what is left. The rest is owed, and no request passes until it has
        // drained.
        let response = service.clone().oneshot(Request::new("1200".to_owned())).await.unwrap();
        drop(response);
        assert_eq!(used(&limiter, &tokens).await, 1_000, "{quota}");
        let refused = service.clone().oneshot(Request::new("1".to_owned())).await.unwrap();
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    }
}

#[tokio::test]
async fn settled_rule_refuses_in_debt_also_if_it_reserves_nothing() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let month = Duration::from_secs(30 * 86_400);
    let sliding = Quota::sliding_window(10, month).unwrap();
    let quotas = [
        Quota::token_bucket(10, month).unwrap(),
        Quota::step_bucket(10, month).unwrap(),
        Quota::gcra(10, month).unwrap().burst(10).unwrap(),
        Quota::leaky_bucket(10, month).unwrap(),
        Quota::leaky_queue(10, month).unwrap(),
        Quota::fixed_window(10, month).unwrap(),
        sliding,
        sliding.buckets(30).unwrap(),
        Quota::sliding_log(10, month).unwrap(),
    ];
    for (number, quota) in quotas.into_iter().enumerate() {
        for way in ["bill", "head", "body"] {
            let rule = rule(&format!("{way}-{number}"), quota).cost(|_| 0);
            let rule = match way {
                "bill" => rule.settle_by_usage(),
                "head" => rule.settle_by_response(|_| Some(25)),
                _ => rule.settle_by_body(),
            };
            let layer = RateLimitLayer::new(limiter.clone(), rule, |_: &_| key("all"));
            let service = layer.layer(service_fn(|request: Request<String>| async move {
                if let Some(bill) = request.extensions().get::<Usage>() {
                    bill.set(25);
                }
                Ok::<_, Infallible>(Response::new(axum::body::Body::from(Bytes::from_static(&[b'x'; 25]))))
            }));
            let mut statuses = Vec::new();
            for _ in 0..5 {
                let response = service.clone().oneshot(Request::new(String::new())).await.unwrap();
                statuses.push(response.status().as_u16());
                response.into_body().collect().await.unwrap();
            }
            assert_eq!(statuses, [200, 429, 429, 429, 429], "{quota}, settled by {way}");
        }
    }
}

#[tokio::test]
async fn right_logins_leave_a_block_open() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let quarter = Duration::from_secs(900);
    let plain = Quota::block(5, quarter, quarter).unwrap();
    for (number, quota) in [plain, plain.growing(2, 96 * quarter, quarter).unwrap()].into_iter().enumerate() {
        let failed = policy(&format!("failed-{number}"), quota);
        let rule = Rule::from(failed.clone()).charge_when(|response| response.status == StatusCode::UNAUTHORIZED);
        let entered = std::sync::Arc::new(tokio::sync::Barrier::new(5));
        let service = RateLimitLayer::new(limiter.clone(), rule, |_: &_| key("all")).layer(service_fn(
            move |request: Request<String>| {
                let entered = entered.clone();
                async move {
                    if request.body() == "at once" {
                        entered.wait().await; // all five are charged before the first is answered
                    }
                    let mut response = Response::new(axum::body::Body::empty());
                    if request.body() == "wrong" {
                        *response.status_mut() = StatusCode::UNAUTHORIZED;
                    }
                    Ok::<_, Infallible>(response)
                }
            },
        ));
        let ask = async |how: &str| service.clone().oneshot(Request::new(how.to_owned())).await.unwrap();
        let five = (0..5).map(|_| tokio::spawn(service.clone().oneshot(Request::new("at once".to_owned()))));
        for response in five.collect::<Vec<_>>() {
            assert_eq!(response.await.unwrap().unwrap().status(), StatusCode::OK);
        }
        assert_eq!(used(&limiter, &failed).await, 0, "each was refunded");
        for _ in 0..4 {
            assert_eq!(ask("wrong").await.status(), StatusCode::UNAUTHORIZED);
        }
        for _ in 0..3 {
            let right = ask("right").await;
            assert_eq!(right.status(), StatusCode::OK);
            let limit = right.headers()["ratelimit"].to_str().unwrap().to_owned();
            assert!(limit.contains(";r=1;"), "{limit}");
            assert_eq!(used(&limiter, &failed).await, 4, "the header says so, too");
        }
        assert_eq!(ask("wrong").await.status(), StatusCode::UNAUTHORIZED);
        let closed = ask("right").await;
        assert_eq!(closed.status(), StatusCode::TOO_MANY_REQUESTS);
        let wait: u64 = closed.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((800..=900).contains(&wait), "the first block, whatever was undone: {wait}");
    }
}
