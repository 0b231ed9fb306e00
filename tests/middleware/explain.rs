//! An explanation says what the layer then does with the request, and takes nothing.

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use tower::util::BoxCloneService;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::key::PeerAddr;
use tower_ratelimit::limiter::BoxLimiter;
use tower_ratelimit::middleware::{Access, AccessList};
use tower_ratelimit::observe::{
    Explanation, LayerEvent, LimiterEvent, NotCharged, Observed, Observer, Outcome, OutcomeKind, SetupWarning,
};
use tower_ratelimit::{Head, MemoryLimiter, MissingKey, Mode, OnError, Policy, Quota, RateLimitLayer, Rule, key};

use crate::support;
use crate::support::waiting::{Skipping, World};
use crate::support::{Scripted, every_algorithm};

const MINUTE: Duration = Duration::from_secs(60);

/// Records all that an observer can see.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<(Vec<Outcome>, usize)>>);

impl Observer for Log {
    fn on_outcome(&self, observed: &Observed<'_>) {
        self.0.lock().unwrap().0.push(observed.outcome().clone());
    }

    fn on_setup_warning(&self, _: &SetupWarning) {
        self.0.lock().unwrap().1 += 1;
    }

    fn on_layer_event(&self, _: &LayerEvent) {
        self.0.lock().unwrap().1 += 1;
    }

    fn on_limiter_event(&self, _: &LimiterEvent) {
        self.0.lock().unwrap().1 += 1;
    }
}

impl Log {
    fn seen(&self) -> (usize, usize) {
        let log = self.0.lock().unwrap();
        (log.0.len(), log.1)
    }
}

type Explain = Box<dyn Fn(Parts) -> Pin<Box<dyn Future<Output = Explanation>>>>;

/// A layer around a service.
struct Stack {
    explain: Explain,
    service: BoxCloneService<Request<Body>, Response<Body>, Infallible>,
    log: Log,
}

async fn served(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    drop(request);
    Ok(Response::default())
}

macro_rules! stack {
    ($layer:expr) => {{
        let log = Log::default();
        let layer = $layer.observer(log.clone());
        let explained = layer.clone();
        let explain: Explain = Box::new(move |parts| {
            let layer = explained.clone();
            Box::pin(async move { layer.explain(&parts).await })
        });
        Stack { explain, service: layer.layer(service_fn(served)).boxed_clone(), log }
    }};
}

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

fn cost(parts: &Head<'_>) -> u64 {
    parts.headers.get("cost").map_or(1, |cost| cost.to_str().unwrap().parse().unwrap())
}

fn with_rules(limiter: &BoxLimiter, rules: Vec<Rule>) -> RateLimitLayer<BoxLimiter> {
    let everyone = rule("everyone", Quota::per_minute(60)).cost(cost);
    let layer = RateLimitLayer::new(limiter.clone(), everyone, key::global());
    rules.into_iter().fold(layer, |layer, rule| layer.and(rule, key::header("user")))
}

/// Layers that use everything that changes what a request gets.
fn stacks(limiter: &BoxLimiter) -> Vec<(&'static str, Stack)> {
    let layer = |rules: Vec<Rule>| with_rules(limiter, rules);
    let client = || rule("client", Quota::per_minute(5)).cost(cost);
    let block = || Policy::new("block", Quota::block(2, MINUTE, 2 * MINUTE).unwrap()).unwrap();
    let meter = || Policy::new("over", Quota::meter(4, 3_600 * Duration::from_secs(1)).unwrap()).unwrap();
    let queue = || rule("queue", Quota::leaky_queue(10, MINUTE).unwrap().queue(3).unwrap());
    let plans = |parts: &Head<'_>| usize::from(parts.method == "POST");
    let list = AccessList::new();
    list.set_key("a", Access::Deny);
    list.set_key("b", Access::Allow);
    let blocked = |mode| client().block(block().name(), *block().quota()).unwrap().mode(mode);
    vec![
        ("one policy", stack!(RateLimitLayer::new(limiter.clone(), client(), key::header("user")))),
        ("conditions", stack!(layer(vec![client().when(|parts| parts.method == "POST")]))),
        (
            "several quotas",
            stack!(layer(vec![Rule::all_of("all", [Quota::per_minute(6), Quota::per_hour(9)]).unwrap()])),
        ),
        (
            "plans",
            stack!(layer(vec![Rule::plans("plan", [Quota::per_minute(2), Quota::per_minute(8)], plans).unwrap()])),
        ),
        ("shadow", stack!(layer(vec![client().mode(Mode::Shadow), rule("b", Quota::per_minute(9))]))),
        ("degrade", stack!(layer(vec![client().mode(Mode::Degrade).warn_at_percent(50)]))),
        ("the layer in shadow", stack!(layer(vec![client()]).mode(Mode::Shadow))),
        ("a block", stack!(layer(vec![blocked(Mode::Enforce)]))),
        ("a block in shadow", stack!(layer(vec![blocked(Mode::Shadow)]))),
        ("a block that degrades", stack!(layer(vec![blocked(Mode::Degrade), client()]))),
        ("a meter", stack!(layer(vec![client().overage(meter().name(), *meter().quota()).unwrap()]))),
        (
            "a meter in shadow",
            stack!(layer(vec![client().overage(meter().name(), *meter().quota()).unwrap().mode(Mode::Shadow)])),
        ),
        ("a queue", stack!(layer(vec![queue()]).timer(Skipping::default()))),
        (
            "a queue in which no request may wait",
            stack!(layer(vec![queue(), client()]).timer(Skipping::default()).max_waiting(0)),
        ),
        ("an overflow", stack!(layer(vec![client()]).overflow(service_fn(served)))),
        ("shared keys", stack!(layer(vec![client().missing_key(MissingKey::Shared)]))),
        ("exempt keys", stack!(layer(vec![client().missing_key(MissingKey::Exempt)]))),
        ("missing keys in shadow", stack!(layer(vec![client().mode(Mode::Shadow), client().mode(Mode::Degrade)]))),
        ("a settled cost", stack!(layer(vec![client().settle_by_response(|_| Some(3))]))),
        (
            "an access list",
            stack!(layer(vec![client()]).access(&list, |parts: &Head<'_>| parts.headers.get("user").cloned())),
        ),
        ("preflight requests", stack!(layer(vec![client()]).exempt_preflight(true))),
    ]
}

/// Returns the request of a number: of one of two users or none, of several costs.
fn request(number: u64) -> Request<Body> {
    let mut request = Request::builder().method(if number % 3 == 0 { "POST" } else { "GET" }).uri("/");
    if number % 7 != 0 {
        request = request.header("user", if number % 2 == 0 { "a" } else { "b" });
    }
    if number % 5 == 0 {
        request = request.header("cost", ["0", "2", "4", "1000"][number as usize / 5 % 4]);
    }
    request.body(Body::empty()).unwrap()
}

fn head(request: &Request<Body>) -> Parts {
    let (mut parts, ()) = Request::new(()).into_parts();
    (parts.method, parts.uri) = (request.method().clone(), request.uri().clone());
    (parts.headers, parts.extensions) = (request.headers().clone(), request.extensions().clone());
    parts
}

/// Sends requests, and returns for each the explanation before it and the outcome.
async fn compare(stack: &Stack, mut next: impl FnMut(), snapshot: impl Fn() -> Vec<u8>) -> Vec<(Explanation, Outcome)> {
    let mut all = Vec::new();
    for number in 0..120_u64 {
        let request = request(number * 7_919 % 131);
        let (before, seen) = (snapshot(), stack.log.seen());
        let explanation = (stack.explain)(head(&request)).await;
        assert_eq!((stack.explain)(head(&request)).await.passes(), explanation.passes());
        assert_eq!(snapshot(), before, "explaining {number} changed a state");
        assert_eq!(stack.log.seen(), seen, "explaining {number} was observed");
        let response = stack.service.clone().oneshot(request).await.unwrap();
        let outcome = stack.log.0.lock().unwrap().0.last().unwrap().clone();
        assert_eq!(explanation.passes(), response.status() == StatusCode::OK, "{explanation}");
        all.push((explanation, outcome));
        next();
    }
    all
}

/// Returns all of an outcome but the units that were taken.
fn decided(outcome: &Outcome) -> String {
    let mut text = format!("{outcome:?}");
    while let Some((before, after)) = text.split_once("taken: ") {
        text = format!("{before}{}", after.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    text
}

#[tokio::test]
async fn explanation_is_what_the_request_then_gets() {
    let mut kinds = Vec::new();
    for at in 0..stacks(&BoxLimiter::new(MemoryLimiter::new())).len() {
        let clock = ManualClock::new();
        let memory = support::memory(&clock);
        let (name, stack) = stacks(&BoxLimiter::new(memory.clone())).swap_remove(at);
        let mut number = 0;
        let next = || {
            number += 1;
            clock.advance(Duration::from_millis(number * 977 % 4_000));
        };
        for (explanation, outcome) in compare(&stack, next, || memory.snapshot()).await {
            assert_eq!(decided(explanation.outcome()), decided(&outcome), "{name}: {explanation}");
            kinds.push(outcome.kind());
            assert!(explanation.outcome().policies().iter().all(|status| status.taken() == 0));
            assert_is_whole(&explanation);
        }
    }
    for kind in [
        OutcomeKind::Allowed,
        OutcomeKind::Delayed,
        OutcomeKind::Limited,
        OutcomeKind::Blocked,
        OutcomeKind::Overage,
        OutcomeKind::Degraded,
        OutcomeKind::ShadowLimited,
        OutcomeKind::Overflowed,
        OutcomeKind::Exempt,
        OutcomeKind::Denied,
        OutcomeKind::KeyMissing,
    ] {
        assert!(kinds.contains(&kind), "no request was {kind:?}");
    }
}

/// Every status belongs to one rule, and the JSON says the same.
fn assert_is_whole(explanation: &Explanation) {
    let statuses: usize = explanation.rules().iter().map(|rule| rule.statuses().len()).sum();
    assert_eq!(statuses, explanation.outcome().policies().len());
    let json: serde_json::Value = serde_json::from_str(&explanation.to_json()).unwrap();
    assert_eq!(json["passes"], explanation.passes());
    assert_eq!(json["outcome"], explanation.outcome().kind().as_str());
    for (at, rule) in explanation.rules().iter().enumerate() {
        let json = &json["rules"][at];
        assert_eq!(json["key"].as_str(), rule.key_text());
        assert_eq!(json["cost"].as_u64(), rule.cost());
        assert_eq!(json["not_charged"].as_str(), rule.not_charged().map(NotCharged::as_str));
        assert_eq!(json["statuses"].as_array().unwrap().len(), rule.statuses().len());
        assert_eq!(rule.key().is_some(), rule.not_charged().is_none(), "{explanation}");
        for (at, status) in rule.statuses().iter().enumerate() {
            let json = &json["statuses"][at];
            assert_eq!(json["policy"], status.policy().name());
            assert_eq!(json["refuses"].as_bool(), status.decision().is_known().then(|| status.refuses()));
            let remaining = status.decision().is_known().then(|| status.decision().remaining());
            assert_eq!(json["remaining"].as_u64(), remaining);
        }
    }
}

#[cfg(feature = "_redis")]
#[tokio::test]
async fn explanation_on_redis_is_what_the_request_then_gets() {
    use support::redis_limiter::{connected, patient};
    let server = support::redis_server::Server::start();
    for at in 0..stacks(&BoxLimiter::new(MemoryLimiter::new())).len() {
        let clock = ManualClock::new();
        let builder = patient().prefix(format!("explain-{at}")).max_denials(0).clock(clock.clone());
        let limiter = connected(builder, &server.url()).await;
        let (name, stack) = stacks(&BoxLimiter::new(limiter)).swap_remove(at);
        let mut number = 0;
        let next = || {
            number += 1;
            clock.advance(Duration::from_millis(number * 977 % 4_000));
        };
        for (explanation, outcome) in compare(&stack, next, Vec::new).await {
            assert_eq!(decided(explanation.outcome()), decided(&outcome), "{name}: {explanation}");
        }
    }
}

#[tokio::test]
async fn explanation_is_the_same_with_every_algorithm() {
    for quota in every_algorithm(3, MINUTE) {
        let clock = ManualClock::new();
        let memory = support::memory(&clock);
        let rule = rule("client", quota).cost(cost);
        let stack = stack!(RateLimitLayer::new(BoxLimiter::new(memory.clone()), rule, key::header("user")));
        let next = || clock.advance(Duration::from_secs(7));
        for (explanation, outcome) in compare(&stack, next, || memory.snapshot()).await {
            assert_eq!(decided(explanation.outcome()), decided(&outcome), "{quota}");
        }
    }
}

#[tokio::test]
async fn limiter_that_fails_is_explained_and_not_reported() {
    for (on_error, kind) in [(OnError::Deny, OutcomeKind::FailedClosed), (OnError::Allow, OutcomeKind::FailedOpen)] {
        let log = Log::default();
        let quota = Quota::per_minute(5);
        let layer = RateLimitLayer::new(Scripted::new(), quota, key::global()).on_error(on_error).observer(log.clone());
        let (parts, ()) = Request::new(()).into_parts();
        let explanation = layer.explain(&parts).await;
        assert_eq!(
            (explanation.outcome().kind(), explanation.failure()),
            (kind, Some("the store is away: the cable is cut"))
        );
        assert_eq!(log.seen(), (0, 0));
        let text = explanation.to_string();
        assert!(text.contains("; the limiter failed: the store is away: the cable is cut\n"), "{text}");
        assert!(text.ends_with(": charges 1 to (all requests)"), "{text}");
    }
}

/// The observer hears of it when the layer serves.
#[tokio::test]
async fn quota_that_is_not_supported_is_explained() {
    let log = Log::default();
    let huge = Quota::sliding_log(1_000_000, MINUTE).unwrap();
    let layer = RateLimitLayer::new(support::memory(&ManualClock::new()), huge, key::global()).observer(log.clone());
    let (parts, ()) = Request::new(()).into_parts();
    let explanation = layer.explain(&parts).await;
    assert_eq!(explanation.outcome().kind(), OutcomeKind::FailedClosed);
    assert!(explanation.failure().unwrap().contains("MemoryLimiter::builder().min_entries"), "{explanation}");
    assert_eq!(log.seen(), (0, 0));
}

/// A layer that has explained requests warns of its first request as if it had not.
#[tokio::test]
async fn setup_warnings_count_no_explanation() {
    let log = Log::default();
    let rule = rule("never", Quota::per_minute(5)).when(|_| false);
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global()).observer(log.clone());
    let (parts, ()) = Request::new(()).into_parts();
    for _ in 0..2_000 {
        assert_eq!(layer.explain(&parts).await.outcome().kind(), OutcomeKind::Exempt);
    }
    assert_eq!(log.seen(), (0, 0));
    for _ in 0..1_000 {
        layer.admit(&parts).await.unwrap().keep();
    }
    assert_eq!(log.seen().1, 1, "the rule applies to no request");
}

#[tokio::test]
async fn request_that_is_explained_enters_no_line() {
    let mut world: World<StatusCode> = World::new();
    let limiter = support::memory(&world.clock);
    let queue = rule("queue", Quota::leaky_queue(10, MINUTE).unwrap().queue(5).unwrap());
    let layer = RateLimitLayer::new(limiter, queue, key::global()).timer(world.timer.clone());
    let send = |world: &mut World<StatusCode>| {
        let service = layer.layer(service_fn(served));
        world.spawn(async move { service.oneshot(Request::new(Body::empty())).await.unwrap().status() })
    };
    send(&mut world);
    send(&mut world);
    assert_eq!(layer.waiting(), 1);
    let (parts, ()) = Request::new(()).into_parts();
    let explanation = layer.explain(&parts).await;
    assert_eq!(explanation.outcome().kind(), OutcomeKind::Delayed);
    assert_eq!(explanation.outcome().delay(), Duration::from_secs(12));
    assert_eq!(layer.waiting(), 1);
    assert!(explanation.to_string().starts_with("passes: delayed; it departs from a queue in 12s\n"), "{explanation}");
}

#[tokio::test]
async fn explanation_names_the_reason_of_each_rule() {
    let rules = tower_ratelimit::rules::Rules::builder()
        .action("buy", |parts| parts.headers.contains_key("buys"))
        .key("tenant", |parts: &Head<'_>| parts.headers.get("tenant").cloned())
        .read_text(
            "access: {deny: 203.0.113.7}\nrules:
               - {name: path, quota: 5/min, key: peer-ip, match: {path: ['/a/{id}', '/b/{*rest}']}}
               - {name: method, quota: 5/min, key: peer-ip, match: {method: [POST, PUT]}}
               - {name: host, quota: 5/min, key: peer-ip, match: {host: '*.example.org'}}
               - {name: header, quota: 5/min, key: peer-ip, match: {header: {accept: '*', x-beta: 'y*'}}}
               - {name: agent, quota: 5/min, key: peer-ip, match: {user-agent: '*bot*'}}
               - {name: client, quota: 5/min, key: peer-ip, match: {client: 10.0.0.0/8}}
               - {name: action, quota: 5/min, key: peer-ip, match: {action: buy}}
               - {name: applies, quota: 5/min, key: [peer-ip, path], match: {path: '/{x}'}, candidate: 1/min}
               - {name: exempt, quota: 5/min, key: tenant, missing-key: exempt}
               - {name: missing, quota: 5/min, key: tenant, mode: shadow}
               - {name: refusing, quota: 5/min, key: tenant}
               - {name: after, quota: 5/min, key: peer-ip}",
        )
        .unwrap();
    let layer = rules.layer(support::memory(&ManualClock::new())).unwrap().exempt_preflight(true);
    let head = |address: &str, edit: fn(http::request::Builder) -> http::request::Builder| {
        let mut parts = edit(Request::builder().uri("/x")).body(()).unwrap().into_parts().0;
        parts.extensions.insert(PeerAddr::from(address.parse::<IpAddr>().unwrap()));
        parts
    };
    let explanation = layer.explain(&head("192.0.2.1", |request| request.header("accept", "text/html"))).await;
    assert_eq!(
        explanation.to_string(),
        "refused: key_missing
path: does not apply: the path is not /a/{any} or /b/{*rest}
method: does not apply: the method is not POST or PUT
host: applies to 192.0.2.1
header: does not apply: the request does not have the header x-beta: y*
agent: does not apply: the user agent is not *bot*
client: does not apply: the client is not in 10.0.0.0/8
action: does not apply: the action is not buy
applies: applies to 192.0.2.1, /x
applies-candidate (shadow): applies to 192.0.2.1, /x
exempt: does not apply: the request has no key
missing (shadow): charges nothing: the request has no key
refusing: refuses the request: it has no key
after: is not asked: an earlier rule refuses the request"
    );
    let reasons: Vec<&str> = explanation.rules().iter().filter_map(|rule| Some(rule.not_charged()?.as_str())).collect();
    assert_eq!(
        reasons,
        [
            "path",
            "method",
            "header",
            "user_agent",
            "client",
            "action",
            "key_exempt",
            "key_missing",
            "key_missing",
            "not_asked"
        ]
    );
    let denied = layer.explain(&head("203.0.113.7", |request| request)).await;
    assert_eq!(denied.outcome().kind(), OutcomeKind::Denied);
    assert!(denied.rules().iter().all(|rule| rule.not_charged() == Some(NotCharged::AccessList)));
    let preflight = layer
        .explain(&head("192.0.2.1", |request| {
            request.method("OPTIONS").header("origin", "x").header("access-control-request-method", "PUT")
        }))
        .await;
    assert_eq!(preflight.outcome().kind(), OutcomeKind::Exempt);
    assert!(preflight.rules().iter().all(|rule| rule.not_charged() == Some(NotCharged::Preflight)));
}

#[tokio::test]
async fn explanation_names_the_part_that_a_rule_leaves_out() {
    let left_out = [
        ("path: /x", "the path /x"),
        ("method: GET", "the method GET"),
        ("host: '*.example.org'", "the host *.example.org"),
        ("header: {x-a: '1*'}", "the header x-a: 1*"),
        ("query: {page: '9*'}", "the parameter page=9*"),
        ("user-agent: '*bot*'", "the user agent *bot*"),
        ("client: 192.0.2.0/24", "the client 192.0.2.0/24"),
        ("action: buy", "the action buy"),
    ];
    for (not, words) in left_out {
        let rules = tower_ratelimit::rules::Rules::builder()
            .action("buy", |_| true)
            .read_text(format!("rules: [{{name: a, quota: 5/min, key: peer-ip, match: {{not: {{{not}}}}}}}]"));
        let layer = rules.unwrap().layer(support::memory(&ManualClock::new())).unwrap();
        let request =
            Request::get("http://www.example.org/x?page=91").header("x-a", "12").header("user-agent", "a bot");
        let mut parts = request.body(()).unwrap().into_parts().0;
        parts.extensions.insert(PeerAddr::from("192.0.2.1".parse::<IpAddr>().unwrap()));
        let explanation = layer.explain(&parts).await.to_string();
        assert_eq!(
            explanation.lines().nth(1),
            Some(&*format!("a: does not apply: it leaves out {words}")),
            "{explanation}"
        );
    }
}

#[tokio::test]
async fn key_can_be_masked_and_is_not_in_debug_text() {
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(5), key::header("x-api-key"));
    let (parts, ()) = Request::get("/").header("x-api-key", "se\"cret").body(()).unwrap().into_parts();
    let explanation = layer.explain(&parts).await;
    assert!(explanation.to_string().contains("charges 1 to \"se\\\"cret\""), "{explanation}");
    assert!(!format!("{explanation:?}").contains("cret"));
    let masked = explanation.mask_keys(|text| format!("{} bytes", text.len()));
    assert!(masked.to_string().contains("charges 1 to 10 bytes") && !masked.to_json().contains("cret"), "{masked}");
}
