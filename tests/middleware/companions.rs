//! Rules with blocks, which close a key after refusals, and rules with meters, which count what
//! exceeds their quota.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response, StatusCode};
use tower::{Layer, ServiceExt};
use tower_ratelimit::{
    ConfigErrorKind, Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule, Wait,
    clock::ManualClock,
    key,
    limiter::{Blocks, Limiter, Meters},
    observe::{Observer, Outcome, OutcomeKind, SetupWarning, SetupWarningKind},
};

use crate::support;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

/// The result of a request: its outcome's kind, and headers by name.
struct Told {
    kind: OutcomeKind,
    response: Response<Body>,
}

impl Told {
    fn field(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).map(|value| value.to_str().unwrap())
    }

    fn outcome(&self) -> &Outcome {
        self.response.extensions().get().unwrap()
    }
}

async fn send<L: Limiter + Clone + 'static>(layer: &RateLimitLayer<L>, user: &str) -> Told {
    let mut request = Request::new(Body::default());
    request.headers_mut().insert("x-user", HeaderValue::from_str(user).unwrap());
    let layer = layer.clone().expose_outcome(true);
    let response = layer.layer(tower::service_fn(answer)).oneshot(request).await.unwrap();
    Told { kind: response.extensions().get::<Outcome>().unwrap().kind(), response }
}

/// Collects setup warnings.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<SetupWarningKind>>>);

impl Observer for Log {
    fn on_setup_warning(&self, misuse: &SetupWarning) {
        self.0.lock().unwrap().push(misuse.kind());
    }
}

fn memory() -> (MemoryLimiter, ManualClock) {
    let clock = ManualClock::new();
    (support::memory(&clock), clock)
}

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

fn block() -> Policy {
    Policy::new("login-block", Quota::block(3, 10 * MINUTE, HOUR).unwrap()).unwrap()
}

fn login() -> Rule {
    rule("login", Quota::fixed_window(2, MINUTE).unwrap()).block(block().name(), *block().quota()).unwrap()
}

fn meter() -> Policy {
    Policy::new("api-over", Quota::meter(5, 24 * HOUR).unwrap()).unwrap()
}

fn api() -> Rule {
    rule("api", Quota::fixed_window(2, HOUR).unwrap()).overage(meter().name(), *meter().quota()).unwrap()
}

fn user_key(name: &str) -> Key {
    Key::of(HeaderValue::from_str(name).unwrap()).unwrap()
}

#[tokio::test]
async fn block_refuses_its_key_and_reports_when_it_ends() {
    use OutcomeKind::{Allowed, Blocked, Limited};
    let (limiter, clock) = memory();
    let layer = RateLimitLayer::new(limiter.clone(), login(), key::header("x-user"));
    for expected in [Allowed, Allowed, Limited, Limited, Blocked, Blocked] {
        assert_eq!(send(&layer, "eve").await.kind, expected);
    }
    assert_eq!(send(&layer, "alice").await.kind, Allowed, "nobody else's");
    clock.advance(30 * MINUTE);
    let blocked = send(&layer, "eve").await;
    assert_eq!((blocked.kind, blocked.response.status()), (Blocked, StatusCode::TOO_MANY_REQUESTS));
    assert_eq!(blocked.field("retry-after"), Some("1800"));
    assert_eq!(blocked.field("ratelimit"), Some("\"login\";r=0;t=1800"), "of the policy that it belongs to");
    assert_eq!(blocked.field("ratelimit-policy"), Some("\"login\";q=2;w=60"));
    assert_eq!(blocked.outcome().wait(), Wait::After(30 * MINUTE));
    let refusing: Vec<&str> = blocked.outcome().violated().map(|status| status.policy().name()).collect();
    assert_eq!(refusing, ["login-block"]);
    clock.advance(30 * MINUTE);
    let passed = send(&layer, "eve").await;
    assert_eq!((passed.kind, passed.field("ratelimit")), (Allowed, Some("\"login\";r=1;t=60")));
}

#[tokio::test]
async fn block_as_a_quota_states_its_length_and_its_window() {
    let (limiter, clock) = memory();
    let layer = RateLimitLayer::new(limiter, rule("failed-logins", *block().quota()), key::header("x-user"));
    let states = |told: &Told| {
        assert_eq!(told.field("ratelimit-policy"), Some("\"failed-logins\";q=3;w=3600"));
        told.field("ratelimit").unwrap().to_owned()
    };
    assert_eq!(states(&send(&layer, "eve").await), "\"failed-logins\";r=2;t=600");
    clock.advance(MINUTE);
    assert_eq!(states(&send(&layer, "eve").await), "\"failed-logins\";r=1;t=540");
    assert_eq!(states(&send(&layer, "eve").await), "\"failed-logins\";r=0;t=3600");
}

#[tokio::test]
async fn key_is_blocked_and_unblocked_by_an_admin() {
    let (limiter, _) = memory();
    let layer = RateLimitLayer::new(limiter.clone(), login(), key::header("x-user"));
    let blocks = Blocks::new(limiter, block()).unwrap();
    blocks.block_for(&user_key("eve"), 2 * HOUR).await.unwrap();
    let blocked = send(&layer, "eve").await;
    assert_eq!((blocked.kind, blocked.field("retry-after")), (OutcomeKind::Blocked, Some("7200")));
    blocks.unblock(&user_key("eve")).await.unwrap();
    assert_eq!(send(&layer, "eve").await.kind, OutcomeKind::Allowed);
    assert_eq!(blocks.strike(&user_key("eve"), 3).await.unwrap(), Some(HOUR));
    assert_eq!(send(&layer, "eve").await.kind, OutcomeKind::Blocked);
}

#[tokio::test]
async fn layer_returns_its_blocks_and_meters_by_name() {
    let (limiter, _) = memory();
    let closing = rule("failed", *block().quota());
    let layer = RateLimitLayer::new(limiter, login(), key::header("x-user"))
        .and(api(), key::header("x-user"))
        .and(login(), key::header("x-user"))
        .and(closing, key::header("x-user"));
    let (eve, alice) = (user_key("eve"), user_key("alice"));
    // The second rule of a name gets another one, and so does its block.
    let refusals = [
        ("login-block", OutcomeKind::Blocked),
        ("login-block-2", OutcomeKind::Blocked),
        ("failed", OutcomeKind::Limited),
    ];
    for (name, refusal) in refusals {
        let blocks = layer.blocks(name).expect(name);
        assert_eq!(blocks.block(&eve).await.unwrap(), Some(HOUR), "{name}");
        assert_eq!(send(&layer, "eve").await.kind, refusal, "{name}");
        blocks.unblock(&eve).await.unwrap();
        assert!(send(&layer, "eve").await.kind.passed(), "{name}");
        layer.reset(&eve).await.unwrap();
    }
    let meters = layer.meters("api-over").expect("it is a meter");
    assert_eq!(meters.usage(&alice).await.unwrap(), 0);
    assert_eq!(meters.policy(), &meter());
    // A name of something else is none.
    assert!(layer.blocks("api-over").is_none() && layer.blocks("login").is_none() && layer.blocks("").is_none());
    assert!(layer.meters("login-block").is_none() && layer.meters("api").is_none());
}

#[tokio::test]
async fn refusal_by_one_of_several_quotas_is_one_strike() {
    let (limiter, _) = memory();
    let several = Rule::all_of("login", [Quota::per_minute(1), Quota::per_hour(1)]).unwrap();
    let layer = RateLimitLayer::new(
        limiter.clone(),
        several.block(block().name(), *block().quota()).unwrap(),
        key::header("x-user"),
    );
    let kinds = [OutcomeKind::Allowed, OutcomeKind::Limited, OutcomeKind::Limited, OutcomeKind::Blocked];
    for expected in kinds {
        assert_eq!(send(&layer, "eve").await.kind, expected);
    }
    let told = send(&layer, "eve").await;
    assert_eq!(told.field("ratelimit"), Some("\"login-1-per-minute\";r=0;t=3600, \"login-1-per-hour\";r=0;t=3600"));
}

#[tokio::test]
async fn refusal_is_one_strike_whatever_the_request_costs() {
    let (limiter, _) = memory();
    let layer = RateLimitLayer::new(limiter, login().cost(|_| 2), key::header("x-user"));
    let mut kinds = Vec::new();
    for _ in 0..4 {
        kinds.push(send(&layer, "eve").await.kind);
    }
    let limited = OutcomeKind::Limited;
    assert_eq!(kinds, [OutcomeKind::Allowed, limited, limited, OutcomeKind::Blocked]);
}

#[tokio::test]
async fn refusal_by_another_rule_is_no_strike() {
    let (limiter, _) = memory();
    let other = rule("other", Quota::fixed_window(1, HOUR).unwrap());
    let layer = RateLimitLayer::new(limiter.clone(), other, key::header("x-user")).and(login(), key::header("x-user"));
    assert_eq!(send(&layer, "eve").await.kind, OutcomeKind::Allowed);
    for _ in 0..5 {
        assert_eq!(send(&layer, "eve").await.kind, OutcomeKind::Limited);
    }
    assert_eq!(Blocks::new(limiter, block()).unwrap().blocked_for(&user_key("eve")).await.unwrap(), None);
}

#[tokio::test]
async fn meter_counts_settles_and_bounds_what_exceeds_a_quota() {
    use OutcomeKind::{Allowed, Limited, Overage};
    let (limiter, clock) = memory();
    let layer = RateLimitLayer::new(limiter.clone(), api(), key::header("x-user"));
    let meters = Meters::new(limiter, meter()).unwrap();
    let alice = user_key("alice");
    for expected in [Allowed, Allowed, Overage] {
        assert_eq!(send(&layer, "alice").await.kind, expected);
    }
    assert_eq!(meters.usage(&alice).await.unwrap(), 1);
    let over = send(&layer, "alice").await;
    assert_eq!((over.kind, over.response.status()), (Overage, StatusCode::OK));
    assert_eq!(over.field("ratelimit"), Some("\"api\";r=0;t=3600"));
    assert_eq!(over.outcome().violated().count(), 0, "nothing refused it");
    let exceeded: Vec<&str> = over.outcome().exceeded().map(|status| status.policy().name()).collect();
    assert_eq!(exceeded, ["api"]);
    for expected in [Overage, Overage, Overage, Limited] {
        assert_eq!(send(&layer, "alice").await.kind, expected);
    }
    clock.advance(10 * MINUTE);
    let full = send(&layer, "alice").await;
    assert_eq!((full.kind, full.field("retry-after")), (Limited, Some("3000")), "until the quota is back");
    assert_eq!(full.outcome().wait(), Wait::After(50 * MINUTE));
    meters.settle(&alice, 4).await.unwrap();
    assert_eq!(send(&layer, "alice").await.kind, Overage);
    assert_eq!(meters.usage(&alice).await.unwrap(), 2);
    clock.advance(50 * MINUTE);
    assert_eq!(send(&layer, "alice").await.kind, Allowed);
    assert_eq!(meters.usage(&alice).await.unwrap(), 2, "kept for longer than the period");
}

#[tokio::test]
async fn meter_counts_the_whole_cost_of_a_request() {
    let (limiter, _) = memory();
    let rule = rule("api", Quota::fixed_window(2, HOUR).unwrap())
        .cost(|_| 3)
        .overage(meter().name(), *meter().quota())
        .unwrap();
    let log = Log::default();
    let layer = RateLimitLayer::new(limiter.clone(), rule, key::header("x-user")).observer(log.clone());
    let meters = Meters::new(limiter, meter()).unwrap();
    assert_eq!(send(&layer, "alice").await.kind, OutcomeKind::Overage);
    assert_eq!(meters.usage(&user_key("alice")).await.unwrap(), 3);
    let full = send(&layer, "alice").await;
    assert_eq!(full.kind, OutcomeKind::Limited);
    assert!(full.outcome().wait() == Wait::Never && full.field("retry-after").is_none(), "the quota never has so much");
    assert_eq!(log.0.lock().unwrap().as_slice(), [], "it is meant for the meter");
    meters.settle(&user_key("alice"), 3).await.unwrap();
    assert_eq!(send(&layer, "alice").await.kind, OutcomeKind::Overage);
    // A cost above the meter's capacity never passes.
    let rule = Rule::new("api", Quota::fixed_window(2, HOUR).unwrap())
        .unwrap()
        .cost(|_| 1_000)
        .overage(meter().name(), *meter().quota())
        .unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::header("x-user")).observer(log.clone());
    let service = layer.layer(tower::service_fn(answer));
    for _ in 0..32 {
        let request = Request::builder().header("x-user", "alice").body(Body::default()).unwrap();
        assert_eq!(service.clone().oneshot(request).await.unwrap().status(), 429);
    }
    assert_eq!(log.0.lock().unwrap().as_slice(), [SetupWarningKind::NeverPasses]);
}

#[tokio::test]
async fn meter_is_refunded_what_an_inner_layer_refuses() {
    let (limiter, _) = memory();
    let outer = RateLimitLayer::new(limiter.clone(), api(), key::header("x-user")).refund_nested(true);
    let inner = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(3), key::global());
    let service = outer.layer(inner.layer(tower::service_fn(answer)));
    let mut passed = 0;
    for _ in 0..6 {
        let mut request = Request::new(Body::default());
        request.headers_mut().insert("x-user", HeaderValue::from_static("alice"));
        let response = service.clone().oneshot(request).await.unwrap();
        passed += u32::from(response.status() == StatusCode::OK);
    }
    assert_eq!(passed, 3);
    let meters = Meters::new(limiter, meter()).unwrap();
    assert_eq!(meters.usage(&user_key("alice")).await.unwrap(), 1, "two within the quota, and one beyond it");
}

#[tokio::test]
async fn meter_is_refunded_what_its_rule_refunds() {
    let (limiter, _) = memory();
    let rule = api().refund_when(|_| true);
    let meters = Meters::new(limiter.clone(), meter()).unwrap();
    let within = RateLimitLayer::new(limiter.clone(), api(), key::header("x-user"));
    for expected in [OutcomeKind::Allowed, OutcomeKind::Allowed, OutcomeKind::Overage] {
        assert_eq!(send(&within, "alice").await.kind, expected);
    }
    let layer = RateLimitLayer::new(limiter, rule, key::header("x-user"));
    for _ in 0..9 {
        assert_eq!(send(&layer, "alice").await.kind, OutcomeKind::Overage);
    }
    assert_eq!(meters.usage(&user_key("alice")).await.unwrap(), 1);
}

#[tokio::test]
async fn final_cost_is_settled_where_the_request_was_charged() {
    for (reserved, used) in [(3, 1), (1, 4), (0, 2), (3, 0)] {
        let (limiter, _) = memory();
        let quota = rule("api", Quota::fixed_window(4, HOUR).unwrap().max_debt(100).unwrap());
        let settled = quota.clone().cost(move |_| reserved).settle_by_response(move |_| Some(used));
        let layer = RateLimitLayer::new(
            limiter.clone(),
            settled.overage(meter().name(), *meter().quota()).unwrap(),
            key::header("x-user"),
        );
        let meters = Meters::new(limiter.clone(), meter()).unwrap();
        let (alice, within) = (user_key("alice"), send(&layer, "alice").await);
        assert_eq!(within.kind, OutcomeKind::Allowed);
        let left = limiter.peek_one(&quota.policies()[0], &alice, 0).remaining();
        assert_eq!((4 - left, meters.usage(&alice).await.unwrap()), (used, 0), "{reserved}");
        assert!(limiter.take_one(&quota.policies()[0], &alice, left).is_allowed());
        let beyond = send(&layer, "alice").await;
        assert_eq!(beyond.kind, OutcomeKind::Overage, "a reservation of {reserved} is one of at least 1");
        assert_eq!(meters.usage(&alice).await.unwrap(), used, "{reserved}");
    }
}

/// A closed block charges nothing, also if the rule's cost is 0.
#[tokio::test]
async fn rule_with_a_block_decides_alike_in_each_mode() {
    let in_mode = async |mode: Mode| {
        let (limiter, clock) = memory();
        let layer = RateLimitLayer::new(limiter, login().mode(mode), key::header("x-user"));
        let mut told = Vec::new();
        for at in 0..300_u64 {
            let outcome = send(&layer, "eve").await.outcome().clone();
            let decisions = outcome.policies().iter().map(|status| format!("{:?}", status.decision()));
            told.push(decisions.collect::<Vec<_>>());
            clock.advance(Duration::from_secs(at * 7 % 61));
        }
        told
    };
    let enforced = in_mode(Mode::Enforce).await;
    assert_eq!(enforced, in_mode(Mode::Shadow).await);
    assert_eq!(enforced, in_mode(Mode::Degrade).await);
}

#[tokio::test]
async fn rule_that_costs_nothing_neither_strikes_nor_meters() {
    for mode in [Mode::Shadow, Mode::Degrade] {
        let (limiter, _) = memory();
        let kind = if mode == Mode::Shadow { OutcomeKind::ShadowLimited } else { OutcomeKind::Degraded };
        let layer = RateLimitLayer::new(limiter.clone(), login().mode(mode), key::header("x-user"));
        let kinds = [OutcomeKind::Allowed, OutcomeKind::Allowed, kind, kind, kind, kind, kind];
        for expected in kinds {
            assert_eq!(send(&layer, "eve").await.kind, expected);
        }
        let blocks = Blocks::new(limiter.clone(), block()).unwrap();
        assert_eq!(blocks.blocked_for(&user_key("eve")).await.unwrap(), Some(HOUR), "it counts as it would");

        let layer = RateLimitLayer::new(limiter.clone(), api().mode(mode), key::header("x-user"));
        for expected in [OutcomeKind::Allowed, OutcomeKind::Allowed, kind, kind] {
            assert_eq!(send(&layer, "alice").await.kind, expected);
        }
        assert_eq!(Meters::new(limiter, meter()).unwrap().usage(&user_key("alice")).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn block_whose_name_is_taken_in_its_layer_is_numbered() {
    let (limiter, _) = memory();
    let layer = RateLimitLayer::new(limiter.clone(), login(), key::header("x-user"))
        .and(rule("login-block", Quota::per_hour(100)), key::header("x-user"))
        .and(login(), key::header("x-user"));
    let names: Vec<String> =
        send(&layer, "eve").await.outcome().policies().iter().map(|status| status.policy().name().to_owned()).collect();
    assert_eq!(names, ["login", "login-block", "login-block-2", "login-2", "login-block-3"]);
}

#[test]
fn impossible_combination_is_refused_with_the_reason() {
    let api = || rule("api", Quota::per_hour(1));
    let several = Rule::all_of("api", [Quota::per_minute(1), Quota::per_hour(1)]).unwrap();
    let errors = [
        (api().block(meter().name(), *meter().quota()), "take Quota::block"),
        (api().overage(block().name(), *block().quota()), "take Quota::meter"),
        (api().block("api", *block().quota()), "choose another"),
        (
            api()
                .block(block().name(), *block().quota())
                .and_then(|rule| rule.overage(meter().name(), *meter().quota())),
            "use two rules",
        ),
        (
            api()
                .overage(meter().name(), *meter().quota())
                .and_then(|rule| rule.block(block().name(), *block().quota())),
            "use two rules",
        ),
        (several.overage(meter().name(), *meter().quota()), "a rule of their own"),
    ];
    for (refused, mend) in errors {
        let message = refused.unwrap_err().to_string();
        assert!(message.contains(mend), "{message}");
    }
}

#[tokio::test]
async fn block_counts_the_refusals_of_each_of_255_quotas() {
    let quotas =
        |count: u64| (0..count).map(|at| Quota::fixed_window(1 + at, MINUTE + Duration::from_secs(at)).unwrap());
    let several = |count: u64| Rule::all_of("login", quotas(count)).unwrap().block(block().name(), *block().quota());
    let error = several(256).unwrap_err();
    assert_eq!(error.kind(), ConfigErrorKind::Combination);
    assert!(error.to_string().contains("256 quotas"), "{error}");
    // Only the first partner, the furthest from the block, refuses.
    let layer = RateLimitLayer::new(memory().0, several(255).unwrap(), key::header("x-user"));
    for expected in [OutcomeKind::Allowed, OutcomeKind::Limited, OutcomeKind::Limited, OutcomeKind::Blocked] {
        assert_eq!(send(&layer, "eve").await.kind, expected);
    }
    // A request is charged to one of the plans.
    assert!(Rule::plans("login", quotas(256), |_| 0).unwrap().block(block().name(), *block().quota()).is_ok());
}

#[tokio::test]
async fn strike_outlives_a_refund_of_its_request() {
    let (limiter, _) = memory();
    // In shadow, the rule is over its quota from the second request on, and each is a strike.
    let login = rule("login", Quota::per_hour(1)).block(block().name(), *block().quota()).unwrap().mode(Mode::Shadow);
    let layer = RateLimitLayer::new(limiter.clone(), login, key::header("x-user"));
    let mut head = Request::new(String::new()).into_parts().0;
    head.headers.insert("x-user", HeaderValue::from_static("alice"));
    for _ in 0..4 {
        let admission = layer.admit(&head).await;
        admission.unwrap_or_else(|refused| panic!("{refused}")).refund();
        // The refund gives the unit back, so take it: the next request is over the quota again.
        let _ = limiter.take_one(&rule("login", Quota::per_hour(1)).policies()[0], &Key::of("alice").unwrap(), 1);
    }
    let alice = Key::of("alice").unwrap();
    assert!(Blocks::new(limiter, block()).unwrap().blocked_for(&alice).await.unwrap().is_some());
}
