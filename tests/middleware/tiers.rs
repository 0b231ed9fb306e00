//! Several quotas under one policy name: all of them together, or the one of the client's plan.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use proptest::prelude::*;
use proptest::sample::Index;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    Key, MissingKey, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::{Charge, Effect, Limiter},
    middleware::Overrides,
    observe::Outcome,
};

use crate::support::{Scripted, every_algorithm, memory};

const HOUR: Duration = Duration::from_secs(3_600);

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

async fn send<L: Limiter + 'static>(layer: &RateLimitLayer<L>, request: Request<Body>) -> Response<Body> {
    layer.layer(tower::service_fn(answer)).oneshot(request).await.unwrap()
}

fn get() -> Request<Body> {
    Request::new(Body::default())
}

fn field<'a, B>(response: &'a Response<B>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// Returns what is left of each policy, from the `RateLimit` header.
fn left<B>(response: &Response<B>) -> Vec<(String, u64)> {
    let items = field(response, "ratelimit").split(", ").map(|item| {
        let (name, rest) = item.split_once(";r=").expect("an item tells what remains");
        let remaining = rest.split(';').next().unwrap_or_default();
        (name.trim_matches('"').to_owned(), remaining.parse().expect("a number"))
    });
    items.collect()
}

fn three() -> Rule {
    Rule::all_of("client", [Quota::per_minute(3), Quota::per_hour(5), Quota::per_day(7)]).unwrap()
}

#[tokio::test]
async fn quotas_of_one_policy_are_charged_together_or_not_at_all() {
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
    // Three pass at once by the quota per minute, then two more of the five per hour, then one per
    // 720 s. The day allows seven, none of which is refilled within the hour.
    assert_eq!(passed, [0, 0, 0, 1, 1, 12, 24]);
}

#[tokio::test]
async fn refused_request_charges_none_of_several_quotas() {
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
async fn quotas_of_one_policy_are_all_in_headers_and_outcome() {
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
    assert_eq!(outcome.policies().len(), 3);
    let violated: Vec<&str> = outcome.violated().map(|status| status.policy().name()).collect();
    assert_eq!(violated, ["client-3-per-minute"]);
}

#[tokio::test]
async fn quotas_of_one_policy_share_key_cost_and_condition() {
    let extracted = Arc::new(AtomicU32::new(0));
    let counted = {
        let extracted = Arc::clone(&extracted);
        move |request: &tower_ratelimit::Head<'_>| {
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
async fn quotas_of_one_policy_stand_beside_other_rules() {
    let limiter = Scripted::new();
    let everyone = Rule::new("everyone", Quota::per_second(100)).unwrap();
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
fn impossible_set_of_quotas_is_refused_with_the_reason() {
    let error = |name: &str, quotas: &[Quota]| Rule::all_of(name, quotas.to_vec()).unwrap_err().to_string();
    assert_eq!(error("client", &[]), "\"client\" has no quota: give it at least one");
    let twice = [Quota::per_minute(60), Quota::per_hour(9), Quota::per_minute(60)];
    assert_eq!(
        error("client", &twice),
        "\"client\" has the quota \"60 per minute, token bucket\" twice, which would charge each request twice for one limit"
    );
    assert!(error("\n", &[Quota::per_minute(60)]).contains("printable ASCII"));
    // With the quota's text the name is too long.
    let long = "n".repeat(128 - "-60-per-minute".len());
    assert!(Rule::all_of(&long, [Quota::per_minute(60)]).is_ok());
    assert!(error(&format!("{long}n"), &[Quota::per_minute(60)]).contains("1 to 128"));
}

#[tokio::test]
async fn changed_quota_of_several_keeps_what_was_used() {
    let (clock, hour) = (ManualClock::new(), Quota::per_hour(100));
    let day = |limit| Quota::per_day(limit);
    let unnamed = |limit| Rule::all_of("client", [day(limit), hour]).unwrap();
    let named = |limit| Rule::all_of("client", [("day", day(limit)), ("hour", hour)]).unwrap();
    let turned = |limit| Rule::all_of("client", [("hour", hour), ("day", day(limit))]).unwrap();
    let three = |rule: &dyn Fn(u64) -> Rule| [rule(10), rule(6), rule(100)];
    let [old, _, _] = three(&named);
    for [old, new, raised] in [three(&unnamed), three(&named), [old, turned(6), turned(100)]] {
        let limiter = memory(&clock);
        let layer = |rule: Rule| RateLimitLayer::new(limiter.clone(), rule, key::global());
        let (old, new) = (layer(old), layer(new));
        let mut passed = 0;
        // A roll-out: both are asked in turn, and count together.
        for _ in 0..6 {
            for layer in [&old, &new] {
                passed += u64::from(send(layer, get()).await.status() == StatusCode::OK);
            }
        }
        assert!((6..=10).contains(&passed), "{passed} of 12 passed, 6 in the new quota and 10 in the old");
        // Raised later, it counts all of them.
        assert!(left(&send(&layer(raised), get()).await).iter().all(|(_, left)| *left == 99 - passed));
    }
}

#[tokio::test]
async fn rules_of_several_with_one_name_count_apart() {
    let several = |first| Rule::all_of("client", [Quota::per_minute(first), Quota::per_hour(50)]).unwrap();
    let one = Rule::new("client", Quota::per_day(40)).unwrap();
    for (first, second) in [(several(5), several(7)), (one.clone(), several(7)), (several(5), one)] {
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), first, key::global()).and(second, key::global());
        let each = layer.policies().iter().map(|policy| policy.quota().capacity() - 1).collect::<Vec<_>>();
        let response = send(&layer, get()).await;
        assert_eq!(left(&response).into_iter().map(|(_, left)| left).collect::<Vec<_>>(), each);
    }
}

#[test]
fn quotas_of_one_rule_have_names_of_their_own() {
    let rule = |parts: [(&str, Quota); 2]| Rule::all_of("api", parts);
    let named = rule([("burst", Quota::per_second(10)), ("day", Quota::per_day(900))]).unwrap();
    assert_eq!(named.policies().iter().map(Policy::name).collect::<Vec<_>>(), ["api-burst", "api-day"]);
    let twice = rule([("day", Quota::per_second(10)), ("day", Quota::per_day(900))]).unwrap_err();
    assert_eq!(
        twice.to_string(),
        "\"api\" has two quotas with the name \"api-day\": give each quota a name of its own"
    );
    assert!(rule([("", Quota::per_second(10)), ("ü", Quota::per_day(900))]).is_err());
}

/// Returns three plans, chosen by a header of the request.
fn plans() -> Rule {
    let quotas = [Quota::per_hour(2), Quota::per_hour(10), Quota::per_hour(100)];
    Rule::plans("customer", quotas, |request| {
        request.headers.get("plan").and_then(|plan| plan.to_str().ok()?.parse().ok())
    })
    .unwrap()
}

fn of_plan(plan: &str) -> Request<Body> {
    Request::builder().header("plan", plan).body(Body::default()).unwrap()
}

#[tokio::test]
async fn request_is_charged_to_the_quota_of_its_plan() {
    for (plan, limit) in [("0", 2_usize), ("1", 10), ("2", 100)] {
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), plans(), key::global());
        for remaining in (0..limit).rev() {
            let passed = send(&layer, of_plan(plan)).await;
            assert_eq!(left(&passed), [("customer".to_owned(), remaining as u64)]);
            assert_eq!(field(&passed, "ratelimit-policy"), format!("\"customer\";q={limit};w=3600"));
        }
        let refused = send(&layer, of_plan(plan)).await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(field(&refused, "ratelimit-policy"), format!("\"customer\";q={limit};w=3600"));
        let wait = 3_600_usize.div_ceil(limit);
        assert_eq!(field(&refused, "retry-after"), wait.to_string());
        let outcome = refused.extensions().get::<Outcome>().unwrap();
        let capacities: Vec<u64> = outcome.policies().iter().map(|status| status.policy().quota().capacity()).collect();
        assert_eq!(capacities, [limit as u64]);
    }
}

#[tokio::test]
async fn request_without_a_known_plan_gets_the_first_quota() {
    for plan in ["", "enterprise", "3", "-1", "18446744073709551615"] {
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), plans(), key::global());
        assert_eq!(left(&send(&layer, of_plan(plan)).await), [("customer".to_owned(), 1)], "{plan:?}");
    }
}

#[tokio::test]
async fn plan_closure_may_return_a_plain_index() {
    let limiter = memory(&ManualClock::new());
    let everyone = Rule::new("everyone", Quota::per_hour(50)).unwrap();
    let chosen = Rule::plans("customer", [Quota::per_hour(2), Quota::per_hour(10)], |_| 1).unwrap();
    let layer =
        RateLimitLayer::new(limiter, everyone, key::global()).and(chosen, key::global()).and(plans(), key::global());
    let passed = send(&layer, of_plan("2")).await;
    let expected = [("everyone", 49), ("customer", 9), ("customer-2", 99)].map(|(name, left)| (name.to_owned(), left));
    assert_eq!(left(&passed), expected);
    let policies = "\"everyone\";q=50;w=3600, \"customer\";q=10;w=3600, \"customer-2\";q=100;w=3600";
    assert_eq!(field(&passed, "ratelimit-policy"), policies);
}

#[tokio::test]
async fn usage_under_one_plan_is_kept_under_the_next() {
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), plans(), key::global());
    let left_under = async |plan: &str| left(&send(&layer, of_plan(plan)).await).first().map(|(_, left)| *left);
    assert_eq!(left_under("1").await, Some(9));
    assert_eq!(left_under("1").await, Some(8));
    // Upgraded after two were used.
    assert_eq!(left_under("2").await, Some(97));
    // And downgraded after three.
    assert_eq!(left_under("1").await, Some(6));
    // More is used than the smallest plan allows.
    assert_eq!(send(&layer, of_plan("0")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    // That charged nothing, and no plan loses more than a unit.
    assert!(left_under("1").await >= Some(4));
}

#[test]
fn plans_that_make_no_sense_are_refused_with_a_sentence() {
    let error = Rule::plans("customer", [], |_| 0).unwrap_err();
    assert_eq!(error.to_string(), "\"customer\" has no quota: give it at least one");
    assert!(Rule::plans("", [Quota::per_hour(1)], |_| 0).is_err());
    // Two plans may be equal.
    assert!(Rule::plans("customer", [Quota::per_hour(1), Quota::per_hour(1)], |_| 0).is_ok());
}

/// Returns the quotas of these algorithms and limits.
fn quotas(plans: &[(Index, u64)]) -> Vec<Quota> {
    plans.iter().map(|(algorithm, limit)| *algorithm.get(&every_algorithm(*limit, HOUR))).collect()
}

/// Returns policies of one name, as the rule of a layer has them.
fn customer(quotas: Vec<Quota>) -> Vec<Policy> {
    Rule::plans("customer", quotas, |_| 0).unwrap().policies().to_vec()
}

proptest! {
    /// For any algorithms of the plans, no order of requests passes more than the largest plan
    /// alone.
    #[test]
    fn changing_plans_back_and_forth_gives_no_burst(
        plans in proptest::collection::vec((any::<Index>(), 1..20_u64), 2..4),
        requests in proptest::collection::vec((0..4_usize, 1..4_u64), 1..200),
        offset_ms in 0..3_600_000_u64,
    ) {
        let clock = ManualClock::new();
        clock.advance(Duration::from_millis(offset_ms));
        let limiter = memory(&clock);
        let plans = customer(quotas(&plans));
        let largest = plans.iter().map(|plan| plan.quota().capacity()).max().unwrap_or(0);
        let mut passed = 0;
        for (plan, cost) in requests {
            let plan = &plans[plan % plans.len()];
            let before = limiter.peek_one(plan, &Key::global(), 0).remaining();
            if limiter.take_one(plan, &Key::global(), cost).is_allowed() {
                passed += cost;
            } else {
                prop_assert!(before < cost, "{before} were left of {plan:?}, which refused {cost}");
            }
        }
        prop_assert!(passed <= largest, "{passed} passed at one instant under {plans:?}");
    }
}

#[test]
fn usage_beyond_a_smaller_plan_is_remembered_by_it() {
    for (from, large) in every_algorithm(1_000, HOUR).into_iter().enumerate() {
        for (to, small) in every_algorithm(10, HOUR).into_iter().enumerate() {
            let limiter = memory(&ManualClock::new());
            let plans = customer(vec![small, large]);
            let [small, large] = plans.as_slice() else { panic!("two plans") };
            assert!(limiter.take_one(large, &Key::global(), 900).is_allowed());
            assert!(!limiter.take_one(small, &Key::global(), 1).is_allowed());
            let left = limiter.peek_one(large, &Key::global(), 0).remaining();
            let unused = large.quota().capacity() - 900;
            assert!((unused - 2..=unused).contains(&left), "{left} left, from {from} to {to} and back");
        }
    }
}

/// Returns policies of one name that keep the share that was used.
fn in_proportion(quotas: Vec<Quota>) -> Vec<Policy> {
    Rule::plans_in_proportion("customer", quotas, |_| 0).unwrap().policies().to_vec()
}

#[tokio::test]
async fn share_used_under_one_plan_is_used_under_the_next() {
    let quotas = [Quota::per_hour(100), Quota::per_hour(1_000)];
    let rule = Rule::plans_in_proportion("customer", quotas, plan_of)
        .unwrap()
        .cost(|request| request.headers.get("cost").map_or(0, |cost| cost.to_str().unwrap().parse().unwrap()));
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule, key::global());
    let left_after = async |plan, cost| left(&send(&layer, with(&[("plan", plan), ("cost", cost)])).await)[0].1;
    assert_eq!(left_after("0", "60").await, 40);
    assert_eq!(left_after("1", "0").await, 400);
    assert_eq!(left_after("1", "300").await, 100);
    assert_eq!(left_after("0", "10").await, 0);
    assert_eq!(left_after("1", "0").await, 0);
}

#[test]
fn share_is_kept_between_all_algorithms_and_seen_by_a_peek() {
    for (from, small) in every_algorithm(100, HOUR).into_iter().enumerate() {
        for (to, large) in every_algorithm(1_000, HOUR).into_iter().enumerate() {
            let limiter = memory(&ManualClock::new());
            let plans = in_proportion(vec![small, large]);
            let [small, large] = plans.as_slice() else { panic!("two plans") };
            assert!(limiter.take_one(small, &Key::global(), 60).is_allowed());
            // The capacity of a queue is its length and one.
            let used = (60 * large.quota().capacity()).div_ceil(small.quota().capacity());
            let left = large.quota().capacity() - used;
            assert_eq!(limiter.peek_one(large, &Key::global(), 0).remaining(), left, "from {from} to {to}");
            assert!(!limiter.take_one(large, &Key::global(), left + 1).is_allowed(), "from {from} to {to}");
            assert!(limiter.take_one(large, &Key::global(), left).is_allowed(), "from {from} to {to}");
            assert!(!limiter.take_one(small, &Key::global(), 1).is_allowed(), "nothing is left of any");
        }
    }
}

#[test]
fn debt_is_kept_as_a_share_that_each_plan_can_hold() {
    let owing = Quota::per_hour(10).max_debt(40).unwrap();
    let plans = in_proportion(vec![owing, Quota::per_hour(1_000), Quota::per_hour(3)]);
    let limiter = memory(&ManualClock::new());
    let everyone = Key::global();
    let forced = Charge::new(&plans[0], &everyone).cost(50).effect(Effect::Force);
    assert!(limiter.take_now(&[forced]).is_allowed());
    // Each has five times its capacity used, so all of it is refilled after five hours.
    for plan in plans.iter().chain(&plans) {
        let reset = limiter.take_one(plan, &Key::global(), 1).reset_after();
        assert_eq!(reset, Some(Duration::from_secs(5 * 3_600)), "of {plan:?}");
    }
}

#[test]
fn block_and_meter_in_proportion_are_refused_with_the_reason() {
    let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    for quota in [Quota::block(3, minute, hour).unwrap(), Quota::meter(3, hour).unwrap()] {
        let error = Rule::plans_in_proportion("customer", [Quota::per_hour(1), quota], |_| 0).unwrap_err();
        assert!(error.to_string().contains("cannot keep the share that is used"), "{error}");
        assert!(error.to_string().contains(&quota.to_string()), "{error}");
        assert!(quota.in_proportion().is_err());
    }
    assert!(Rule::plans_in_proportion("customer", [], |_| 0).is_err());
}

/// A sliding window counts its last sub-window in part and rounds down. A smaller plan must not round down once more.
#[test]
fn sliding_windows_in_proportion_pass_at_most_one_whole() {
    let clock = ManualClock::new();
    clock.advance(Duration::from_millis(2_828_572));
    let limiter = memory(&clock);
    let window = |limit| Quota::sliding_window(limit, HOUR).unwrap();
    let strict = Quota::gcra(14, HOUR).and_then(|quota| quota.burst(14)).unwrap();
    let plans = in_proportion(vec![window(4), window(9), strict]);
    let mut passed = 0;
    for (plan, cost) in [(2, 1), (2, 1), (2, 1), (1, 1), (0, 1), (0, 1), (2, 2), (2, 1)] {
        if limiter.take_one(&plans[plan], &Key::global(), cost).is_allowed() {
            passed += 504 / plans[plan].quota().capacity() * cost;
        }
    }
    assert!(passed <= 504, "{passed} of 504 passed at one instant");
}

proptest! {
    /// For any algorithms of the plans and any changes between them, at most one whole passes at
    /// one instant, where each request counts as its share of its plan.
    #[test]
    fn changing_plans_in_proportion_gives_no_burst(
        plans in proptest::collection::vec((any::<Index>(), 1..20_u64), 2..4),
        requests in proptest::collection::vec((0..4_usize, 1..4_u64), 1..200),
        offset_ms in 0..3_600_000_u64,
    ) {
        let clock = ManualClock::new();
        clock.advance(Duration::from_millis(offset_ms));
        let limiter = memory(&clock);
        let plans = in_proportion(quotas(&plans));
        let whole: u64 = plans.iter().map(|plan| plan.quota().capacity()).product();
        let mut passed = 0;
        for (plan, cost) in requests {
            let plan = &plans[plan % plans.len()];
            if limiter.take_one(plan, &Key::global(), cost).is_allowed() {
                passed += whole / plan.quota().capacity() * cost;
            }
        }
        prop_assert!(passed <= whole, "{passed} of {whole} passed at one instant under {plans:?}");
    }
}

fn plan_of(request: &tower_ratelimit::Head<'_>) -> usize {
    request.headers.get("plan").map_or(0, |plan| plan.to_str().unwrap().parse().unwrap())
}

fn with(fields: &[(&'static str, &'static str)]) -> Request<Body> {
    let mut request = get();
    for (name, value) in fields {
        request.headers_mut().insert(*name, http::HeaderValue::from_static(value));
    }
    request
}

#[tokio::test]
async fn override_gives_a_single_key_its_plan_until_removed() {
    let overrides = Overrides::new();
    let quotas = [Quota::per_hour(10), Quota::per_hour(100), Quota::per_hour(1_000)];
    let rule = Rule::plans("plan", quotas, overrides.or(key::header("user"), plan_of)).unwrap();
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule, key::header("user"));
    let remaining = async |user, plan| left(&send(&layer, with(&[("user", user), ("plan", plan)])).await)[0].1;
    assert_eq!((remaining("a", "1").await, remaining("b", "1").await), (99, 99));
    overrides.set("a", 2, None).unwrap();
    // The usage is kept.
    assert_eq!((remaining("a", "1").await, remaining("b", "1").await), (998, 98));
    // An unknown plan counts as the first.
    let unknown = overrides.set("a", 7, None).unwrap();
    assert_eq!(remaining("a", "1").await, 7);
    assert!(overrides.end(unknown));
    assert_eq!(remaining("a", "1").await, 996);
    assert!(overrides.end_all("a") && !overrides.end_all("a") && overrides.is_empty());
    assert_eq!(remaining("a", "1").await, 95);
}

#[tokio::test]
async fn plan_in_the_key_keeps_the_usage_of_each_plan_apart() {
    let rule = Rule::plans("plan", [Quota::per_hour(3), Quota::per_hour(30)], plan_of).unwrap();
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule, |request: &tower_ratelimit::Head<'_>| {
        Key::of((request.headers.get("user")?, plan_of(request) as u64))
    });
    let mut passed = [0, 0];
    for _ in 0..50 {
        for (plan, passed) in ["0", "1"].into_iter().zip(&mut passed) {
            let response = send(&layer, with(&[("user", "a"), ("plan", plan)])).await;
            *passed += u32::from(response.status() == StatusCode::OK);
        }
    }
    assert_eq!(passed, [3, 30], "changing back and forth gives nothing");
}

#[test]
fn quotas_that_count_alike_are_refused() {
    let minute = Duration::from_secs(60);
    let bucket = Quota::token_bucket(5, minute).unwrap();
    let alike = [
        (bucket, bucket, "has the quota"),
        (bucket, Quota::leaky_bucket(5, minute).unwrap(), "count alike"),
        (
            Quota::leaky_queue(5, minute).unwrap(),
            Quota::leaky_queue(5, minute).unwrap().delay_after(2).unwrap(),
            "count alike",
        ),
    ];
    for (one, other, why) in alike {
        let refused = Rule::all_of("client", [one, Quota::per_hour(100), other]).unwrap_err().to_string();
        assert!(refused.contains(why) && refused.contains(&other.to_string()), "{refused}");
    }
    for other in [Quota::fixed_window(5, minute).unwrap(), bucket.burst(6).unwrap()] {
        assert!(Rule::all_of("client", [bucket, other]).is_ok(), "{other}");
    }
}
