//! The charges and headers of requests for combinations of policies, layers, limiters and outcomes,
//! as a readable table: `tests/golden/combinations.txt`. Every limiter must produce the same table.
//!
//! `REWRITE_GOLDEN=1 cargo test --test middleware combinations` writes it.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::util::BoxCloneService;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, MemoryLimiter, Mode, OnError, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, Timestamp},
    key,
    limiter::{BoxLimiter, Charge, Effect, Limiter},
    middleware::Usage,
    observe::Outcome,
};

use crate::support::waiting::Skipping;
#[cfg(feature = "_redis")]
use crate::support::{redis_limiter, redis_server::Server};

type Stack = BoxCloneService<Request<String>, Response<Answer>, Infallible>;
type Answer = http_body_util::combinators::UnsyncBoxBody<Bytes, tower::BoxError>;

/// A row of the table: its rules, the outermost first if each has its own layer, and what the
/// service does.
struct Case {
    name: &'static str,
    rules: fn() -> Vec<Rule>,
    status: u16,
    cost: Option<u64>,
    modes: Option<Modes>,
}

/// For rows in which a request over a quota may do more than be refused: the table has its outcome
/// and the counts of its blocks and meters.
#[derive(Clone, Copy, Default)]
struct Modes {
    companion: Option<fn() -> Policy>,
    overflow: bool,
    /// Units of the last policy that are used before the request.
    taken: u64,
    apart: bool,
}

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

fn everyone() -> Rule {
    rule("everyone", Quota::fixed_window(100, Duration::from_secs(3_600)).unwrap())
}

fn client() -> Rule {
    rule("client", Quota::per_hour(30))
}

fn log() -> Rule {
    rule("log", Quota::sliding_log(40, Duration::from_secs(3_600)).unwrap())
}

fn cases() -> Vec<Case> {
    let case = |name, rules, status, cost| Case { name, rules, status, cost, modes: None };
    let mut cases = vec![
        case("one policy", || vec![client()], 200, None),
        case("two policies", || vec![everyone(), client()], 200, None),
        case("three policies, the last of cost 5", || vec![everyone(), client(), log().cost(|_| 5)], 200, None),
        case(
            "two periods of one client, and everyone",
            || {
                let periods = [Quota::per_minute(20), Quota::per_hour(600)];
                vec![everyone(), Rule::all_of("client", periods).unwrap()]
            },
            200,
            None,
        ),
        case(
            "the second of three plans, and everyone",
            || {
                let quotas = [Quota::per_hour(10), Quota::per_hour(20), Quota::per_hour(50)];
                vec![everyone(), Rule::plans("plan", quotas, |_| 1).unwrap()]
            },
            200,
            None,
        ),
        case("a policy that does not apply, and one", || vec![everyone().when(|_| false), client()], 200, None),
        case("failed attempts alone, of which this is none", || vec![everyone(), failed()], 200, None),
        case("failed attempts alone, of which this is one", || vec![everyone(), failed()], 401, None),
        case("a server's error is given back", || vec![everyone().refund_when(is_error), client()], 503, None),
        case("5 reserved, and 2 used", || vec![everyone(), reserved()], 200, Some(2)),
        case("5 reserved, and 9 used", || vec![everyone(), reserved()], 200, Some(9)),
        case("5 reserved, and nothing said", || vec![everyone(), reserved()], 200, None),
    ];
    cases.extend(cases_of_modes());
    cases
}

/// Returns the rows of each mode, alone and beside a policy that enforces.
fn cases_of_modes() -> Vec<Case> {
    let case = |name, rules, modes| Case { name, rules, status: 200, cost: None, modes: Some(modes) };
    let none = Modes::default();
    let apart = Modes { apart: true, ..none };
    let metered = Modes { companion: Some(meter), ..none };
    let (struck, closed) = (Modes { companion: Some(second), ..none }, Modes { companion: Some(first), ..none });
    vec![
        case("shadow", || vec![client().mode(Mode::Shadow)], none),
        case("shadow beside an enforced policy", || vec![everyone(), client().mode(Mode::Shadow)], apart),
        case("degrade", || vec![client().mode(Mode::Degrade)], none),
        case("degrade beside an enforced policy", || vec![everyone(), client().mode(Mode::Degrade)], apart),
        case("near when 50 % remain", || vec![client().warn_at_percent(50)], Modes { taken: 15, ..none }),
        case("the same beside another", || vec![everyone(), client().warn_at_percent(50)], Modes { taken: 15, ..none }),
        case("overflow", || vec![client()], Modes { overflow: true, ..none }),
        case("overflow of two policies", || vec![everyone(), client()], Modes { overflow: true, ..apart }),
        case("overage", || vec![client().overage(meter().name(), *meter().quota()).unwrap()], metered),
        case(
            "overage beside another",
            || vec![everyone(), client().overage(meter().name(), *meter().quota()).unwrap()],
            metered,
        ),
        case(
            "overage, and a server's error is given back",
            || vec![everyone(), client().overage(meter().name(), *meter().quota()).unwrap().refund_when(|_| true)],
            metered,
        ),
        case(
            "a block after two refusals",
            || vec![client().block(second().name(), *second().quota()).unwrap()],
            struck,
        ),
        case("a block after one refusal", || vec![client().block(first().name(), *first().quota()).unwrap()], closed),
        case(
            "the same beside another",
            || vec![everyone(), client().block(first().name(), *first().quota()).unwrap()],
            closed,
        ),
        case(
            "the same in shadow beside another",
            || vec![everyone(), client().block(first().name(), *first().quota()).unwrap().mode(Mode::Shadow)],
            closed,
        ),
        case("a queue, behind another request", || vec![queue()], Modes { taken: 1, ..none }),
        case("the same beside another policy", || vec![everyone(), queue()], Modes { taken: 1, ..apart }),
    ]
}

fn meter() -> Policy {
    Policy::new("over", Quota::meter(1_000, Duration::from_secs(86_400)).unwrap()).unwrap()
}

fn first() -> Policy {
    Policy::new("block", Quota::block(1, Duration::from_secs(600), Duration::from_secs(900)).unwrap()).unwrap()
}

fn second() -> Policy {
    Policy::new("block", Quota::block(2, Duration::from_secs(600), Duration::from_secs(900)).unwrap()).unwrap()
}

fn queue() -> Rule {
    rule("queue", Quota::leaky_queue(60, Duration::from_secs(3_600)).unwrap().queue(3).unwrap())
}

fn is_error(response: &http::response::Parts) -> bool {
    response.status.is_server_error()
}

fn failed() -> Rule {
    rule("failed", Quota::per_hour(5)).charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
}

fn reserved() -> Rule {
    rule("tokens", Quota::per_hour(20)).cost(|_| 5).settle_by_usage()
}

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Allowed,
    FirstIsFull,
    LastIsFull,
    StoreFails,
    StoreFailsOpen,
}

const FATES: [(Fate, &str); 5] = [
    (Fate::Allowed, "allowed"),
    (Fate::FirstIsFull, "the first is full"),
    (Fate::LastIsFull, "the last is full"),
    (Fate::StoreFails, "the store fails"),
    (Fate::StoreFailsOpen, "the same, allowed"),
];

/// A limiter, and the function that makes it fail.
struct Backend {
    limiter: BoxLimiter,
    fail: Box<dyn FnOnce()>,
}

fn service(status: u16, cost: Option<u64>) -> Stack {
    service_fn(move |request: Request<String>| async move {
        if let (Some(bill), Some(cost)) = (request.extensions().get::<Usage>(), cost) {
            bill.set(cost);
        }
        let body = Full::new(Bytes::from_static(b"hello")).map_err(Into::into).boxed_unsync();
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        Ok(response)
    })
    .boxed_clone()
}

fn stack(limiter: &BoxLimiter, case: &Case, apart: bool, on_error: OnError) -> Stack {
    let layer = |rule: Rule| {
        let layer = RateLimitLayer::new(limiter.clone(), rule, key::global()).on_error(on_error);
        if case.modes.is_some() { layer.expose_outcome(true).timer(Skipping::default()) } else { layer }
    };
    let around = |layer: RateLimitLayer<BoxLimiter>, inner: Stack| -> Stack {
        let boxed = |response: Response<Answer>| response.map(BodyExt::boxed_unsync);
        match case.modes {
            Some(Modes { overflow: true, .. }) => {
                layer.overflow(service(202, None)).layer(inner).map_response(boxed).boxed_clone()
            }
            _ => layer.layer(inner).map_response(boxed).boxed_clone(),
        }
    };
    let mut rules = (case.rules)();
    let inner = service(case.status, case.cost);
    if apart {
        return rules.into_iter().rev().fold(inner, |inner, rule| around(layer(rule), inner));
    }
    let first = layer(rules.remove(0));
    around(rules.into_iter().fold(first, |layer, rule| layer.and(rule, key::global())), inner)
}

async fn ask(stack: &Stack) -> Response<()> {
    let (parts, body) = stack.clone().oneshot(Request::new(String::new())).await.unwrap().into_parts();
    body.collect().await.unwrap();
    Response::from_parts(parts, ())
}

/// Returns the charged policies. Plans count as the one that applies.
fn charged(case: &Case) -> Vec<Policy> {
    let plans = |rule: &Rule| rule.policies().windows(2).any(|pair| pair[0].name() == pair[1].name());
    let of = |rule: &Rule| if plans(rule) { vec![rule.policies()[1].clone()] } else { rule.policies().to_vec() };
    (case.rules)().iter().flat_map(of).collect()
}

async fn remaining(limiter: &BoxLimiter, policy: &Policy) -> u64 {
    let looked = limiter.peek(&[Charge::new(policy, &Key::global()).cost(0)]).await.unwrap();
    looked.charges()[0].remaining()
}

fn field<'a>(response: &'a Response<()>, name: &str) -> &'a str {
    response.headers().get(name).map_or("-", |value: &HeaderValue| value.to_str().unwrap())
}

async fn row(case: &Case, apart: bool, fate: Fate, backend: Backend) -> String {
    let Backend { limiter, fail } = backend;
    let on_error = if fate == Fate::StoreFailsOpen { OnError::Allow } else { OnError::Deny };
    let stack = stack(&limiter, case, apart, on_error);
    let policies = charged(case);
    let modes = case.modes.unwrap_or_default();
    let counted: Vec<Policy> = policies.iter().cloned().chain(modes.companion.map(|companion| companion())).collect();
    let full = match fate {
        Fate::FirstIsFull => policies.first(),
        Fate::LastIsFull => policies.last(),
        _ => None,
    };
    let others = policies.last().filter(|_| full.is_none()).map(|policy| (policy, modes.taken));
    if let Some((policy, cost)) = full.map(|policy| (policy, policy.quota().capacity())).or(others) {
        let key = Key::global();
        limiter.take(&[Charge::new(policy, &key).cost(cost).effect(Effect::Force)]).await.unwrap();
    }
    let mut before = Vec::new();
    for policy in &counted {
        before.push(remaining(&limiter, policy).await);
    }
    let fails = matches!(fate, Fate::StoreFails | Fate::StoreFailsOpen);
    let response = if fails {
        fail();
        ask(&stack).await
    } else {
        ask(&stack).await
    };
    let mut charges = Vec::new();
    for (policy, before) in counted.iter().zip(before).filter(|_| !fails) {
        charges.push(format!("{} {}", policy.name(), before - remaining(&limiter, policy).await));
    }
    let outcome = match response.extensions().get::<Outcome>() {
        None => "-".to_owned(),
        Some(outcome) => format!("{}{}", outcome.kind().as_str(), if outcome.is_near() { ", near" } else { "" }),
    };
    format!(
        "{} {outcome:<13} Retry-After: {:<5} charged: {}\n        RateLimit: {}\n",
        response.status().as_u16(),
        field(&response, "retry-after"),
        if fails { "unknown".to_owned() } else { charges.join(", ") },
        field(&response, "ratelimit"),
    )
}

/// Returns the whole table. Each row has a new limiter.
async fn table(mut backend: impl AsyncFnMut(ManualClock) -> Backend) -> String {
    let mut text = String::from(
        "The charges and headers of requests. Written by: REWRITE_GOLDEN=1 cargo test --test middleware combinations\n\
         An outcome of - is not in the response: the request passed.\n",
    );
    for case in cases() {
        for apart in [false, true] {
            let alone = (case.rules)().len() == 1;
            if apart && (alone || case.modes.is_some_and(|modes| !modes.apart)) {
                continue;
            }
            let layers = if apart { "each in a layer of its own" } else { "in one layer" };
            write!(text, "\n{}, {layers}\n", case.name).unwrap();
            for (fate, name) in FATES {
                let told_before = fate == Fate::StoreFailsOpen || (alone && fate == Fate::FirstIsFull);
                if case.modes.is_some() && told_before {
                    continue;
                }
                let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
                let row = row(&case, apart, fate, backend(clock).await).await;
                write!(text, "    {name:<18} {row}").unwrap();
            }
        }
    }
    text
}

fn golden() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/combinations.txt");
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Fails with the first line that differs.
fn assert_is_golden(table: &str, same: impl Fn(&str, &str) -> bool) {
    let golden = golden();
    for (number, (is, was)) in table.lines().zip(golden.lines()).enumerate() {
        assert!(
            is == was || same(is, was),
            "line {} of tests/golden/combinations.txt (REWRITE_GOLDEN=1 writes it anew) is\n{is}\nand was\n{was}",
            number + 1
        );
    }
    assert_eq!(table.lines().count(), golden.lines().count(), "the table has become longer or shorter");
}

/// Returns the line without the number behind `item`.
#[cfg(feature = "_redis")]
fn without_number(line: &str, item: &str) -> String {
    match line.split_once(item) {
        Some((before, after)) => format!("{before}{item}{}", after.trim_start_matches(|c: char| c.is_ascii_digit())),
        None => line.to_owned(),
    }
}

/// A limiter that fails on command.
mod troubled {
    use std::future::{Ready, ready};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tower_ratelimit::{
        Key, MemoryLimiter, Policy,
        limiter::{Charge, Decision, Limiter, Refund, Reply},
    };

    #[derive(Clone)]
    pub(crate) struct Troubled(pub(crate) MemoryLimiter, pub(crate) Arc<AtomicBool>);

    type Later<T> = Ready<Result<T, std::io::Error>>;

    impl Troubled {
        fn unless<T>(&self, answer: impl FnOnce(&MemoryLimiter) -> T) -> Reply<T, std::io::Error, Later<T>> {
            if self.1.load(Ordering::Relaxed) {
                return Reply::Later(ready(Err(std::io::Error::other("the store is away"))));
            }
            Reply::Now(Ok(answer(&self.0)))
        }
    }

    impl Limiter for Troubled {
        type Error = std::io::Error;
        type Future<T: Send + 'static> = Later<T>;

        fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, std::io::Error, Later<Decision>> {
            self.unless(|limiter| limiter.take_now(charges))
        }

        fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, std::io::Error, Later<Decision>> {
            self.unless(|limiter| limiter.peek_now(charges))
        }

        fn refund(&self, refunds: Vec<Refund>) -> Reply<(), std::io::Error, Later<()>> {
            self.unless(|limiter| limiter.refund_now(&refunds))
        }

        fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), std::io::Error, Later<()>> {
            self.unless(|limiter| limiter.reset_now(policy, key))
        }
    }
}

#[tokio::test]
async fn memory_does_what_the_golden_table_says() {
    let table = table(async |clock| {
        let memory = MemoryLimiter::builder().max_keys(1_000).clock(clock).build().unwrap();
        let limiter = troubled::Troubled(memory, std::sync::Arc::default());
        let failing = std::sync::Arc::clone(&limiter.1);
        let fail = Box::new(move || failing.store(true, std::sync::atomic::Ordering::Relaxed));
        Backend { limiter: BoxLimiter::new(limiter), fail }
    })
    .await;
    if std::env::var_os("REWRITE_GOLDEN").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/combinations.txt");
        std::fs::write(path, &table).unwrap();
    }
    assert_is_golden(&table, |_, _| false);
}

/// After a refund a remote limiter is not asked again, so `t` of windows is that of the charge.
#[cfg(feature = "_redis")]
#[tokio::test]
async fn redis_does_what_the_golden_table_says() {
    let server = Server::start();
    let mut number = 0;
    let table = table(async |clock| {
        number += 1;
        let builder = redis_limiter::patient().prefix(format!("row-{number}")).clock(clock).max_denials(0);
        let limiter = redis_limiter::connected(builder, &server.url()).await;
        let fail = {
            let limiter = limiter.clone();
            Box::new(move || limiter.close())
        };
        Backend { limiter: BoxLimiter::new(limiter), fail }
    })
    .await;
    let reckoned = ["\"failed\";r=5;t=", "\"everyone\";r=100;t=", "\"client\";r=30;t="];
    assert_is_golden(&table, |is, was| {
        let without = |line: &str| reckoned.iter().fold(line.to_owned(), |line, item| without_number(&line, item));
        without(is) == without(was)
    });
}
