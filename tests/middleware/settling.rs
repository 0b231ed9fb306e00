//! Costs that are known only after the response: refunds by its outcome, and settlement when its
//! body has ended.

use std::convert::Infallible;
use std::future::{Future, pending, ready};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Full, StreamBody};
use proptest::prelude::*;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::{
    Headers, Key, MemoryLimiter, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    middleware::{IntoRule, OnAborted, Usage},
    quota::{Algorithm, Oldest},
};

use crate::support::{Scripted, config, every_algorithm, memory, of_each_algorithm_but};

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;
type Boxed = tower::util::BoxCloneService<Request<String>, Response<Body>, BoxError>;

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

/// The instructions to the handler in the request's headers, and its usage.
struct Told {
    status: Option<u16>,
    fate: String,
    bill: Option<Usage>,
}

/// Does what the request's headers say. Keeps the usage of the last request, as a handler's task
/// might.
fn handler(
    bills: &Arc<Mutex<Option<Usage>>>,
) -> impl Service<Request<String>, Response = Response<Body>, Error = BoxError, Future = Answer> + Clone + Send + 'static
{
    let bills = Arc::clone(bills);
    service_fn(move |request: Request<String>| -> Answer {
        let text = |name| request.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
        let number = |name| text(name).parse::<u64>().ok();
        let told = Told {
            status: text("status").parse().ok(),
            fate: text("fate"),
            bill: request.extensions().get::<Usage>().cloned(),
        };
        if let (Some(bill), Some(units)) = (&told.bill, number("early")) {
            bill.set(units);
        }
        bills.lock().unwrap().clone_from(&told.bill);
        if told.fate == "panic in call" {
            resume_unwind(Box::new("the service panics"));
        }
        let (late, tokens, bytes) = (number("late"), text("tokens"), number("bytes").unwrap_or(0));
        let length = number("length");
        Box::pin(async move {
            match told.fate.as_str() {
                "panic" => resume_unwind(Box::new("the service panics")),
                "error" => return Err("the service fails".into()),
                "linger" => pending().await,
                _ => {}
            }
            let fails = told.fate == "body fails";
            // Two frames. A late cost is recorded between them.
            let mut said = Some((told.bill, late));
            let frames = (0..2).map(move |at| {
                if at == 1 {
                    if let Some((Some(bill), Some(units))) = said.take() {
                        bill.set(units);
                    }
                }
                let half = if at == 0 { bytes / 2 } else { bytes - bytes / 2 };
                if at == 1 && fails {
                    return Err("the body fails".into());
                }
                Ok::<_, BoxError>(Frame::data(Bytes::from(vec![b'x'; usize::try_from(half).unwrap()])))
            });
            let body = match told.fate.as_str() {
                "trailers alone" => Full::default()
                    .map_err(BoxError::from)
                    .with_trailers(ready(Some(Ok(HeaderMap::new()))))
                    .boxed_body(),
                _ => StreamBody::new(tokio_stream::iter(frames)).boxed_body(),
            };
            let mut response = Response::new(body);
            *response.status_mut() = StatusCode::from_u16(told.status.unwrap_or(200)).unwrap();
            if let Some(length) = length {
                response.headers_mut().insert("content-length", HeaderValue::from(length));
            }
            if !tokens.is_empty() {
                response.headers_mut().insert("x-tokens", HeaderValue::from_str(&tokens).unwrap());
            }
            Ok(response)
        })
    })
}

trait BoxedBody {
    fn boxed_body(self) -> Body;
}

impl<B: http_body::Body<Data = Bytes, Error = BoxError> + Send + 'static> BoxedBody for B {
    fn boxed_body(self) -> Body {
        self.boxed_unsync()
    }
}

/// A layer with one rule, its clock, and the usage of the rule's policy.
struct Bench {
    clock: ManualClock,
    limiter: MemoryLimiter,
    rule: Rule,
    service: Boxed,
    bill: Arc<Mutex<Option<Usage>>>,
}

impl Bench {
    fn new(rule: impl IntoRule) -> Self {
        let (clock, rule, bill) = (ManualClock::new(), rule.into_rule(), Arc::default());
        let limiter = memory(&clock);
        let layer = RateLimitLayer::new(limiter.clone(), rule.clone(), key::global());
        let service = BoxCloned::boxed_clone(layer.layer(handler(&bill)));
        Self { clock, limiter, rule, service, bill }
    }

    fn remaining(&self) -> u64 {
        self.limiter.peek_one(&self.rule.policies()[0], &Key::global(), 0).remaining()
    }

    fn used(&self) -> u64 {
        self.rule.policies()[0].quota().capacity() - self.remaining()
    }

    /// Returns the response. Its body is not read.
    async fn head(&self, fields: &[(&'static str, &'static str)]) -> Response<Body> {
        self.service.clone().oneshot(request(fields)).await.unwrap()
    }

    /// Sends a request and reads the whole response.
    async fn send(&self, fields: &[(&'static str, &'static str)]) -> StatusCode {
        let response = self.head(fields).await;
        let status = response.status();
        response.into_body().collect().await.unwrap();
        status
    }

    /// Calls and polls once. Returns the client's future, which still waits.
    fn call(&self, fields: &[(&'static str, &'static str)], polled: bool) -> Option<impl Future + use<>> {
        let mut service = self.service.clone();
        let asked = request(fields);
        catch_unwind(AssertUnwindSafe(move || {
            let mut context = Context::from_waker(Waker::noop());
            assert!(service.poll_ready(&mut context).is_ready());
            let mut response = Box::pin(service.call(asked));
            (!polled || response.as_mut().poll(&mut context).is_pending()).then_some(response)
        }))
        .ok()
        .flatten()
    }
}

/// A handler may insist on it.
#[tokio::test]
async fn uncharged_request_that_passes_has_a_usage() {
    let limiter = Scripted::new();
    let tokens = rule("tokens", Quota::per_hour(100)).cost(|_| 5).settle_by_usage();
    let bills = Arc::default();
    let layer =
        RateLimitLayer::new(limiter.clone(), tokens.when(|request| request.uri.path() != "/free"), key::global());
    let service = layer.on_error(tower_ratelimit::OnError::Allow).layer(handler(&bills));
    for (path, failing, reserved) in [("/", false, 5), ("/free", false, 0), ("/", true, 0)] {
        limiter.fail(failing);
        let request = Request::builder().uri(path).body(String::new()).unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        let bill = bills.lock().unwrap().take().expect("each request has one");
        assert_eq!((bill.reserved(), bill.set(7)), (reserved, reserved > 0), "{path}");
        drop(response);
    }
    limiter.fail(false);
    assert_eq!(limiter.used(), 7);
}

trait BoxCloned {
    fn boxed_clone(self) -> Boxed;
}

impl<S> BoxCloned for S
where
    S: Service<Request<String>, Response = Response<Body>, Error = BoxError> + Clone + Send + 'static,
    S::Future: Send,
{
    fn boxed_clone(self) -> Boxed {
        ServiceExt::<Request<String>>::boxed_clone(self)
    }
}

fn request(fields: &[(&'static str, &'static str)]) -> Request<String> {
    let mut request = Request::new(String::new());
    for (name, value) in fields {
        request.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    request
}

fn field<'a, B>(response: &'a Response<B>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

fn failed_logins() -> Rule {
    rule("failed", Quota::per_hour(5)).charge_when(|response| response.status == StatusCode::UNAUTHORIZED)
}

#[tokio::test]
async fn failed_attempts_alone_count() {
    let bench = Bench::new(failed_logins());
    for _ in 0..20 {
        assert_eq!(bench.send(&[]).await, StatusCode::OK);
    }
    assert_eq!(bench.used(), 0);
    for failed in 1..=5 {
        assert_eq!(bench.send(&[("status", "401")]).await, StatusCode::UNAUTHORIZED);
        assert_eq!(bench.used(), failed);
    }
    assert_eq!(bench.send(&[]).await, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn attempts_that_run_at_once_cannot_slip_through() {
    let bench = Bench::new(failed_logins());
    let waiting: Vec<_> = (0..5).map(|_| bench.call(&[("fate", "linger")], true).unwrap()).collect();
    assert_eq!(bench.send(&[("status", "401")]).await, StatusCode::TOO_MANY_REQUESTS);
    drop(waiting);
}

#[tokio::test]
async fn failed_attempt_is_not_refunded_by_disconnecting() {
    for fate in ["linger", "panic", "error", "panic in call"] {
        let bench = Bench::new(failed_logins());
        drop(bench.call(&[("fate", fate)], true));
        assert_eq!(bench.used(), 1, "{fate}");
        let bench = Bench::new(failed_logins().on_aborted(OnAborted::Refund));
        drop(bench.call(&[("fate", fate)], true));
        assert_eq!(bench.used(), 0, "{fate}");
        // Dropping the unpolled future refunds nothing either, because the service was called.
        let bench = Bench::new(failed_logins());
        drop(bench.call(&[("fate", "linger")], false));
        assert_eq!(bench.used(), 1, "{fate}");
    }
}

/// No other setting of the rule reads the response.
#[tokio::test]
async fn aborted_request_is_refunded_if_nothing_else_is_settled() {
    for fate in ["linger", "panic", "error", "panic in call"] {
        for (on_aborted, used) in [(OnAborted::Keep, 3), (OnAborted::Refund, 0)] {
            let bench = Bench::new(rule("api", Quota::per_hour(9)).cost(|_| 3).on_aborted(on_aborted));
            drop(bench.call(&[("fate", fate)], true));
            assert_eq!(bench.used(), used, "{fate}, {on_aborted:?}");
        }
    }
    let bench = Bench::new(rule("api", Quota::per_hour(9)).cost(|_| 0).on_aborted(OnAborted::Refund));
    assert_eq!(bench.send(&[("status", "500")]).await, 500);
    assert_eq!(bench.used(), 0, "nothing is reserved for a cost of 0");
    let bench = Bench::new(rule("api", Quota::per_hour(9)).on_aborted(OnAborted::Refund));
    drop(bench.head(&[("status", "500")]).await);
    assert_eq!(bench.used(), 1, "its response has a head");
}

#[tokio::test]
async fn several_predicates_refund_if_one_of_them_does() {
    let rule = rule("api", Quota::per_hour(100))
        .refund_when(|response| response.status.is_server_error())
        .refund_when(|response| response.status == StatusCode::NOT_MODIFIED)
        .charge_when(|response| response.status != StatusCode::NOT_FOUND);
    let bench = Bench::new(rule);
    for (status, used) in [("200", 1), ("503", 1), ("304", 1), ("404", 1), ("400", 2)] {
        bench.send(&[("status", status)]).await;
        assert_eq!(bench.used(), used, "{status}");
    }
}

#[tokio::test]
async fn headers_report_what_is_left_after_the_refund() {
    let bench = Bench::new(failed_logins());
    assert_eq!(field(&bench.head(&[]).await, "ratelimit"), "\"failed\";r=5;t=3600");
    assert_eq!(field(&bench.head(&[("status", "401")]).await, "ratelimit"), "\"failed\";r=4;t=2880");
    assert_eq!(field(&bench.head(&[]).await, "ratelimit"), "\"failed\";r=4;t=2880");
    // If the limiter answers later, the value is estimated.
    let limiter = Scripted::new().later();
    let layer = RateLimitLayer::new(limiter.clone(), failed_logins(), key::global());
    let service = layer.layer(handler(&Arc::default()));
    let response = service.oneshot(request(&[])).await.unwrap();
    assert!(field(&response, "ratelimit").starts_with("\"failed\";r=5"), "{response:?}");
    assert_eq!((limiter.used(), limiter.refunds().len()), (0, 1));
}

#[tokio::test]
async fn call_that_fails_at_once_is_judged_by_its_grpc_status() {
    let calls = rule("calls", Quota::per_hour(5))
        .refund_when(|response| response.headers.get("grpc-status").is_some_and(|status| status == "14"));
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), calls, key::global());
    let service = layer.layer(service_fn(|status: Request<String>| async move {
        let mut response = Response::new(axum::body::Body::empty());
        response.headers_mut().insert("grpc-status", status.into_body().parse().unwrap());
        Ok::<_, Infallible>(response)
    }));
    for (status, left) in [("14", "r=5"), ("0", "r=4"), ("14", "r=4")] {
        let response = service.clone().oneshot(Request::new(status.to_owned())).await.unwrap();
        assert!(field(&response, "ratelimit").contains(left), "{status}");
    }
}

fn tokens() -> Rule {
    rule("tokens", Quota::per_hour(1_000)).cost(|_| 100).settle_by_usage()
}

#[tokio::test]
async fn settlement_refunds_the_excess_and_charges_the_rest() {
    let bench = Bench::new(tokens());
    for (said, used) in [("30", 30), ("0", 30), ("100", 130), ("250", 380)] {
        assert_eq!(bench.send(&[("late", said)]).await, StatusCode::OK);
        assert_eq!(bench.used(), used, "{said}");
    }
    // No cost was recorded, so the reservation stays.
    bench.send(&[]).await;
    assert_eq!(bench.used(), 480);
}

#[tokio::test]
async fn cost_beyond_what_is_left_is_owed() {
    let bench = Bench::new(tokens());
    bench.send(&[("late", "1500")]).await;
    assert_eq!(bench.remaining(), 0);
    // 500 units are owed: one is free after half an hour, and 100 drain in 6 minutes.
    bench.clock.advance(Duration::from_secs(1_800 + 359));
    assert_eq!(bench.send(&[]).await, StatusCode::TOO_MANY_REQUESTS);
    bench.clock.advance(Duration::from_secs(1));
    assert_eq!(bench.send(&[]).await, StatusCode::OK);
    // Debt is bounded by one capacity.
    let bench = Bench::new(tokens());
    bench.send(&[("late", "900000")]).await;
    bench.clock.advance(Duration::from_secs(3_600 + 360));
    assert_eq!(bench.send(&[]).await, StatusCode::OK);
}

#[tokio::test]
async fn usage_is_settled_once_when_the_body_ends_or_is_dropped() {
    let bench = Bench::new(tokens());
    let mut response = bench.head(&[("late", "30")]).await;
    assert_eq!(bench.used(), 100);
    let mut frames = 0;
    while let Some(frame) = response.body_mut().frame().await {
        frame.unwrap();
        frames += 1;
        assert_eq!(bench.used(), 100, "after {frames}");
    }
    assert_eq!((bench.used(), frames), (30, 2));
    let bill = bench.bill.lock().unwrap().clone().unwrap();
    assert!(!bill.set(7), "that comes too late");
    drop(response);
    assert_eq!(bench.used(), 30);
    // The client disconnects in the middle.
    drop(bench.head(&[("early", "250")]).await);
    assert_eq!(bench.used(), 280);
}

/// The end of a request, and its cost under each rule of [`ways_of_settling`].
struct Ending {
    name: &'static str,
    method: Method,
    fields: &'static [(&'static str, &'static str)],
    polled: bool,
    /// The number of frames of the body that are read, if there is a response.
    frames: usize,
    /// The cost with `OnAborted::Keep`, and with `Refund`.
    costs: [[u64; 7]; 2],
}

/// Returns rules that reserve 100 units. The response's head states a cost of 30, and its body has
/// 60 bytes.
fn ways_of_settling(limit: u64) -> [(&'static str, Rule, Option<u64>); 7] {
    let rule = |name| rule(name, Quota::per_hour(limit)).cost(|_| 100);
    let told = |response: &http::response::Parts| response.headers.get("x-tokens")?.to_str().ok()?.parse().ok();
    [
        ("plain", rule("plain"), None),
        ("by outcome", rule("outcome").charge_when(|response| response.status == StatusCode::UNAUTHORIZED), None),
        ("by head", rule("head").settle_by_response(told), None),
        ("by a bill that says nothing", rule("unsaid").settle_by_usage(), None),
        ("by a bill that says 40", rule("less").settle_by_usage(), Some(40)),
        ("by a bill that says 250", rule("more").settle_by_usage(), Some(250)),
        ("by body", rule("bytes").settle_by_body(), None),
    ]
}

fn endings() -> Vec<Ending> {
    let ending = |name, method, fields, polled, frames, keep, refund| Ending {
        name,
        method,
        fields,
        polled,
        frames,
        costs: [keep, refund],
    };
    let get = || Method::GET;
    let unanswered = ([100, 100, 100, 100, 100, 250, 100], [0, 0, 0, 0, 40, 250, 0]);
    let unread = ([100, 0, 30, 100, 100, 250, 100], [100, 0, 30, 0, 40, 250, 0]);
    let half = ([100, 0, 30, 100, 100, 250, 100], [100, 0, 30, 0, 40, 250, 30]);
    let whole = [100, 0, 30, 100, 40, 250, 60];
    let bodiless = [100, 0, 30, 100, 40, 250, 0];
    let switched = [100, 0, 30, 100, 40, 250, 100];
    vec![
        ending("dropped before it was polled", get(), &[("fate", "linger")], false, 0, unanswered.0, unanswered.1),
        ending("dropped before its head", get(), &[("fate", "linger")], true, 0, unanswered.0, unanswered.1),
        ending("the service panics", get(), &[("fate", "panic")], true, 0, unanswered.0, unanswered.1),
        ending("the service panics in call", get(), &[("fate", "panic in call")], true, 0, unanswered.0, unanswered.1),
        ending("the service fails", get(), &[("fate", "error")], true, 0, unanswered.0, unanswered.1),
        ending("body dropped unread", get(), &[], true, 0, unread.0, unread.1),
        ending("body dropped halfway", get(), &[], true, 1, half.0, half.1),
        ending("body dropped before its end", get(), &[], true, 2, half.0, [100, 0, 30, 0, 40, 250, 60]),
        ending("body fails", get(), &[("fate", "body fails")], true, 9, half.0, half.1),
        ending("body read", get(), &[], true, 9, whole, whole),
        ending("body of known length read", get(), &[("length", "60")], true, 2, whole, whole),
        ending("body of known length dropped halfway", get(), &[("length", "60")], true, 1, half.0, half.1),
        ending("body of known length 0 unread", get(), &[("length", "0")], true, 0, bodiless, bodiless),
        ending("HEAD", Method::HEAD, &[], true, 0, bodiless, bodiless),
        ending("no content", get(), &[("status", "204")], true, 0, bodiless, bodiless),
        ending("not modified", get(), &[("status", "304")], true, 0, bodiless, bodiless),
        ending("HEAD whose body is read", Method::HEAD, &[], true, 9, bodiless, bodiless),
        ending("no content whose body is read", get(), &[("status", "204")], true, 9, bodiless, bodiless),
        ending("a WebSocket", get(), &[("status", "101")], true, 0, switched, switched),
        ending("a WebSocket whose body is read", get(), &[("status", "101")], true, 9, switched, switched),
        ending(
            "a WebSocket with trailers alone",
            get(),
            &[("status", "101"), ("fate", "trailers alone")],
            true,
            9,
            switched,
            switched,
        ),
        ending("a tunnel", Method::CONNECT, &[], true, 0, switched, switched),
        ending("a tunnel whose body is read", Method::CONNECT, &[], true, 9, switched, switched),
        ending("a refused tunnel", Method::CONNECT, &[("status", "403")], true, 9, whole, whole),
    ]
}

impl Ending {
    /// Sends a request that ends in this way.
    fn send(&self, service: &Boxed, said: Option<u64>) {
        let mut asked = request(self.fields);
        *asked.method_mut() = self.method.clone();
        asked.headers_mut().insert("tokens", HeaderValue::from_static("30"));
        asked.headers_mut().insert("bytes", HeaderValue::from_static("60"));
        said.into_iter().for_each(|units| drop(asked.headers_mut().insert("early", HeaderValue::from(units))));
        let mut service = service.clone();
        let _ = catch_unwind(AssertUnwindSafe(move || {
            let mut context = Context::from_waker(Waker::noop());
            let mut response = Box::pin(service.call(asked));
            if !self.polled {
                return;
            }
            if let Poll::Ready(Ok(response)) = response.as_mut().poll(&mut context) {
                let mut body = Box::pin(response.into_body());
                for _ in 0..self.frames {
                    let _ = body.as_mut().poll_frame(&mut context);
                }
            }
        }));
    }
}

#[test]
fn aborted_requests_cost_as_the_table_says_however_they_end() {
    for (at, on_aborted) in [OnAborted::Keep, OnAborted::Refund].into_iter().enumerate() {
        for ending in endings() {
            for ((name, rule, said), cost) in ways_of_settling(1_000_000).into_iter().zip(ending.costs[at]) {
                let bench = Bench::new(rule.on_aborted(on_aborted));
                ending.send(&bench.service, said);
                assert_eq!(bench.used(), cost, "{}, settled {name}, {on_aborted:?}", ending.name);
            }
        }
    }
}

#[test]
fn aborted_requests_are_limited_as_others_by_default() {
    // A response with a lower cost than the reservation is no abort.
    let aborted = |ending: &&Ending| ending.costs[0] != ending.costs[1];
    for ending in endings().iter().filter(aborted) {
        for ((name, rule, said), cost) in ways_of_settling(1_000).into_iter().zip(ending.costs[0]) {
            let bench = Bench::new(rule);
            let mut started = 0;
            for _ in 0..300 {
                let before = bench.used();
                ending.send(&bench.service, said);
                assert!(bench.used() >= before, "{}, settled {name}", ending.name);
                started += u64::from(bench.used() > before);
            }
            // The last request passes because its reservation of 100 is left.
            let most = 900_u64.checked_div(cost).map_or(0, |others| others + 1);
            assert_eq!(started, most, "{}, settled {name}", ending.name);
        }
    }
}

/// Returns a quota of 10 units of every algorithm that can be settled.
fn quotas_of_ten() -> Vec<Quota> {
    let hour = Duration::from_secs(3_600);
    let sliding = Quota::sliding_window(10, hour).unwrap();
    let quotas = vec![
        Quota::token_bucket(10, hour).unwrap(),
        Quota::step_bucket(10, hour).unwrap(),
        Quota::gcra(10, hour).unwrap().burst(10).unwrap(),
        Quota::leaky_bucket(10, hour).unwrap(),
        Quota::leaky_queue(10, hour).unwrap().queue(9).unwrap(),
        Quota::fixed_window(10, hour).unwrap(),
        sliding,
        sliding.buckets(6).unwrap(),
        sliding.buckets(6).unwrap().oldest(Oldest::Dropped).unwrap(),
        Quota::sliding_log(10, hour).unwrap(),
    ];
    of_each_algorithm_but(&[Algorithm::Block, Algorithm::Meter], quotas)
}

fn said_in(request: &tower_ratelimit::Head<'_>) -> u64 {
    request.headers.get("reserve").map_or(0, |units| units.to_str().unwrap().parse().unwrap())
}

#[tokio::test]
async fn settled_rule_refuses_in_debt_also_if_it_reserves_nothing() {
    let told = |response: &http::response::Parts| response.headers.get("x-tokens")?.to_str().ok()?.parse().ok();
    for quota in quotas_of_ten() {
        let rule = || rule("ten", quota).cost(said_in);
        let ways = [
            (rule().settle_by_usage(), [("late", "25")]),
            (rule().settle_by_response(told), [("tokens", "25")]),
            (rule().settle_by_body(), [("bytes", "25")]),
        ];
        for (way, (rule, fields)) in ways.into_iter().enumerate() {
            let bench = Bench::new(rule);
            assert_eq!(bench.send(&fields).await, StatusCode::OK, "{quota}, {way}");
            assert_eq!(bench.remaining(), 0, "{quota}, {way}");
            for _ in 0..20 {
                assert_eq!(bench.send(&fields).await, StatusCode::TOO_MANY_REQUESTS, "{quota}, {way}");
            }
        }
    }
}

#[tokio::test]
async fn settled_rule_without_reservation_passes_while_a_unit_is_left() {
    for quota in quotas_of_ten() {
        let bench = Bench::new(rule("ten", quota).cost(said_in).settle_by_usage());
        for used in 0..10 {
            assert_eq!(bench.send(&[("late", "0")]).await, StatusCode::OK, "{quota}");
            assert_eq!(bench.used(), used, "{quota}: what cost nothing is refunded");
            assert_eq!(bench.send(&[("late", "1")]).await, StatusCode::OK, "{quota}");
        }
        assert_eq!(bench.send(&[("late", "0")]).await, StatusCode::TOO_MANY_REQUESTS, "{quota}");
    }
    // A rule that is not settled and costs 0 still reads.
    let bench = Bench::new(rule("ten", Quota::per_hour(10)).cost(said_in).charge_when(|_| true));
    bench.send(&[("reserve", "10")]).await;
    assert_eq!((bench.send(&[]).await, bench.remaining()), (StatusCode::OK, 0));
}

#[tokio::test]
async fn late_settlement_refunds_nothing_to_the_next_window() {
    let hour = Duration::from_secs(3_600);
    let quota = Quota::fixed_window(1_000, hour).unwrap();
    let bench = Bench::new(rule("tokens", quota).cost(|_| 100).settle_by_usage());
    let mut first = bench.head(&[("late", "1")]).await;
    bench.clock.advance(hour);
    bench.send(&[]).await;
    assert_eq!(bench.used(), 100);
    while first.body_mut().frame().await.is_some() {}
    assert_eq!(bench.used(), 100, "the window that the reservation was taken from is over");
}

#[tokio::test]
async fn response_head_may_state_the_cost() {
    let rule = rule("rows", Quota::per_hour(1_000))
        .cost(|_| 100)
        .settle_by_response(|response| response.headers.get("x-tokens")?.to_str().ok()?.parse().ok());
    let bench = Bench::new(rule.clone());
    let response = bench.head(&[("tokens", "30")]).await;
    assert_eq!((bench.used(), field(&response, "ratelimit")), (30, "\"rows\";r=970;t=3492"));
    let response = bench.head(&[("tokens", "400")]).await;
    assert_eq!((bench.used(), field(&response, "ratelimit")), (430, "\"rows\";r=570;t=2052"));
    bench.head(&[]).await;
    assert_eq!(bench.used(), 530);
    // With a usage: a cost recorded after the head counts.
    let bench = Bench::new(rule.settle_by_usage());
    assert_eq!(bench.send(&[("early", "1"), ("tokens", "30")]).await, StatusCode::OK);
    assert_eq!(bench.used(), 30);
    assert_eq!(bench.send(&[("tokens", "30"), ("late", "70")]).await, StatusCode::OK);
    assert_eq!(bench.used(), 100);
}

#[tokio::test]
async fn body_bytes_are_charged_as_far_as_they_were_sent() {
    let bench = Bench::new(rule("bytes", Quota::per_hour(100_000)).cost(|_| 1_000).settle_by_body());
    bench.send(&[("bytes", "5000")]).await;
    assert_eq!(bench.used(), 5_000);
    bench.send(&[("bytes", "0")]).await;
    assert_eq!(bench.used(), 5_000);
    let mut response = bench.head(&[("bytes", "9000")]).await;
    response.body_mut().frame().await.unwrap().unwrap();
    drop(response);
    assert_eq!(bench.used(), 9_500);
}

#[tokio::test]
async fn refunded_request_is_not_settled_as_well() {
    let bench = Bench::new(tokens().refund_when(|response| response.status.is_server_error()));
    bench.send(&[("status", "500"), ("early", "700"), ("late", "700")]).await;
    assert_eq!(bench.used(), 0);
    bench.send(&[("late", "700")]).await;
    assert_eq!(bench.used(), 700);
}

#[tokio::test]
async fn settlement_covers_each_quota_of_a_rule() {
    let quotas = [Quota::per_minute(1_000), Quota::per_hour(5_000)];
    let bench = Bench::new(Rule::all_of("tokens", quotas).unwrap().cost(|_| 100).settle_by_usage());
    bench.send(&[("late", "30")]).await;
    bench.send(&[("late", "300")]).await;
    let used = bench
        .rule
        .policies()
        .iter()
        .map(|policy| policy.quota().capacity() - bench.limiter.peek_one(policy, &Key::global(), 0).remaining());
    assert_eq!(used.collect::<Vec<_>>(), [330, 330]);
}

#[tokio::test]
async fn settlement_leaves_the_rules_behind_as_they_are() {
    let limiter = memory(&ManualClock::new());
    let rarely = rule("rarely", Quota::per_hour(10)).when(|request| request.headers.contains_key("x-rare"));
    let tokens = Rule::all_of("tokens", [Quota::per_minute(1_000), Quota::per_day(5_000)]).unwrap().settle_by_usage();
    let requests = rule("requests", Quota::per_hour(1_000));
    let policies: Vec<_> =
        [&rarely, &tokens, &requests].into_iter().flat_map(|rule| rule.clone().policies().to_vec()).collect();
    let service = RateLimitLayer::new(limiter.clone(), rarely, key::global())
        .and(tokens, key::global())
        .and(requests, key::global())
        .layer(handler(&Arc::default()));
    let mut used = Vec::new();
    for fields in [&[("early", "30")][..], &[("early", "30"), ("x-rare", "")]] {
        let response = service.clone().oneshot(request(fields)).await.unwrap();
        response.into_body().collect().await.unwrap();
        used.push(
            policies
                .iter()
                .map(|policy| policy.quota().capacity() - limiter.peek_one(policy, &Key::global(), 0).remaining())
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(used, [[0, 30, 30, 1], [1, 60, 60, 2]]);
}

#[tokio::test]
async fn rules_and_layers_have_one_bill_and_each_its_own_by_name() {
    let limiter = memory(&ManualClock::new());
    let [tokens, rows, outer] =
        ["tokens", "rows", "outer"].map(|name| rule(name, Quota::per_hour(1_000)).cost(|_| 100).settle_by_usage());
    let requests = rule("requests", Quota::per_hour(1_000));
    let inner = RateLimitLayer::new(limiter.clone(), tokens, key::global()).and(requests, key::global());
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(limiter.clone(), outer, key::global()))
        .layer(inner.and(rows, key::global()))
        .service(service_fn(|request: Request<String>| async move {
            let bill: &Usage = request.extensions().get().unwrap();
            bill.set(10);
            assert!(bill.of("tokens").unwrap().set(20));
            assert!(bill.of("requests").is_none());
            Ok::<_, Infallible>(Response::new(axum::body::Body::empty()))
        }));
    service.oneshot(Request::new(String::new())).await.unwrap();
    let used = ["tokens", "rows", "outer", "requests"].map(|name| {
        1_000 - limiter.peek_one(&rule(name, Quota::per_hour(1_000)).policies()[0], &Key::global(), 0).remaining()
    });
    assert_eq!(used, [20, 10, 10, 1]);
}

#[tokio::test]
async fn outer_layer_refunds_an_inner_refusal_once_though_unsettled() {
    for first in [false, true] {
        let outer = Scripted::new();
        let inner =
            rule("inner", Quota::per_hour(2)).cost(|request| u64::from(request.headers.contains_key("dear")) * 9);
        let service = ServiceBuilder::new()
            .layer(RateLimitLayer::new(outer.clone(), tokens(), key::global()).refund_nested(true))
            .layer(RateLimitLayer::new(Scripted::new(), inner, key::global()))
            .service(handler(&Arc::default()));
        if !first {
            service.clone().oneshot(request(&[])).await.unwrap();
        }
        let before = outer.used();
        let response = service.oneshot(request(&[("dear", "")])).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!((outer.used(), outer.refunds().len()), (before, 1));
        drop(response);
        assert_eq!((outer.used(), outer.refunds().len()), (before, 1));
    }
}

#[tokio::test]
async fn head_of_an_inner_refusal_settles_nothing() {
    let outer = Scripted::new();
    let settled = rule("outer", Quota::per_hour(1_000)).cost(|_| 100).settle_by_response(|_| Some(400));
    let service = ServiceBuilder::new()
        .layer(RateLimitLayer::new(outer.clone(), settled, key::global()).refund_nested(true))
        .layer(RateLimitLayer::new(Scripted::new(), rule("inner", Quota::per_hour(1)), key::global()))
        .service(handler(&Arc::default()));
    for (expected, used) in [(200, 400), (429, 400), (429, 400)] {
        let response = service.clone().oneshot(request(&[])).await.unwrap();
        assert_eq!((response.status().as_u16(), outer.used()), (expected, used));
    }
}

#[tokio::test]
async fn remote_limiter_is_settled_without_a_wait() {
    let limiter = Scripted::new().later();
    let layer = RateLimitLayer::new(limiter.clone(), tokens(), key::global()).headers(Headers::none());
    let service = BoxCloned::boxed_clone(layer.layer(handler(&Arc::default())));
    for (said, used) in [("30", 30), ("150", 180)] {
        let response = service.clone().oneshot(request(&[("early", said)])).await.unwrap();
        response.into_body().collect().await.unwrap();
        assert_eq!(limiter.used(), used);
    }
}

#[tokio::test]
async fn settled_body_looks_like_the_services_own() {
    let bench = Bench::new(tokens());
    let layer = RateLimitLayer::new(bench.limiter.clone(), tokens(), key::global());
    let service = layer.layer(service_fn(|_: Request<String>| async {
        Ok::<_, Infallible>(Response::new(axum::body::Body::from("hello")))
    }));
    let mut body = service.oneshot(Request::new(String::new())).await.unwrap().into_body();
    assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(5), false));
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "hello");
    assert!(body.is_end_stream());
}

/// The fate of a request.
#[derive(Clone, Debug)]
struct Fate {
    reserved: u64,
    early: Option<u64>,
    late: Option<u64>,
    bytes: u64,
    status: u16,
    fate: usize,
    /// The number of frames of the body that are read, if there is a response. 3 reads all and the end.
    read: usize,
    polled: bool,
}

/// The reservation, whatever the final cost is.
const LEAST: u64 = 1;

const FATES: [&str; 6] = ["", "", "", "linger", "panic", "error"];

fn fate() -> impl Strategy<Value = Fate> {
    let amounts = (0..50_u64, proptest::option::of(0..99_u64), proptest::option::of(0..99_u64), 0..99_u64);
    (amounts, prop_oneof![Just(200_u16), Just(500)], 0..FATES.len(), 0..4_usize, any::<bool>(), any::<bool>()).prop_map(
        |((reserved, early, late, bytes), status, fate, read, polled, also)| Fate {
            reserved,
            early,
            late,
            bytes,
            status,
            fate,
            read,
            polled: polled || also,
        },
    )
}

impl Fate {
    fn request(&self) -> Request<String> {
        let mut request = Request::new(String::new());
        let mut put = |name: &'static str, value: String| {
            request.headers_mut().insert(name, HeaderValue::from_str(&value).unwrap());
        };
        put("reserved", self.reserved.to_string());
        put("status", self.status.to_string());
        put("fate", FATES[self.fate].to_owned());
        put("bytes", self.bytes.to_string());
        self.early.into_iter().for_each(|units| put("early", units.to_string()));
        self.late.into_iter().for_each(|units| put("late", units.to_string()));
        request
    }

    /// Returns what stays charged: tokens by usage, bytes by the body, and requests unless the
    /// server failed.
    fn charges(&self, on_aborted: OnAborted) -> [u64; 3] {
        let reserved = self.reserved.max(LEAST);
        let aborted = |known: Option<u64>| match on_aborted {
            OnAborted::Refund => known.unwrap_or(0),
            _ => known.unwrap_or(0).max(reserved),
        };
        if !self.polled || !FATES[self.fate].is_empty() {
            return [aborted(self.early), aborted(None), u64::from(on_aborted == OnAborted::Keep)];
        }
        // A late cost is recorded before the second frame.
        let said = self.late.filter(|_| self.read >= 2).or(self.early);
        let sent = match self.read {
            0 => 0,
            1 => self.bytes / 2,
            _ => self.bytes,
        };
        let [tokens, bytes] =
            if self.read == 3 { [said.unwrap_or(reserved), sent] } else { [aborted(said), aborted(Some(sent))] };
        [tokens, bytes, u64::from(self.status == 200)]
    }
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn sum_of_charges_is_the_sum_of_final_costs(
        quota in prop::sample::select(every_algorithm(50_000, Duration::from_secs(86_400))),
        fates in proptest::collection::vec(fate(), 1..60),
        on_aborted in prop_oneof![Just(OnAborted::Keep), Just(OnAborted::Refund)],
    ) {
        let limiter = memory(&ManualClock::new());
        let reserved = |request: &tower_ratelimit::Head<'_>| {
            request.headers["reserved"].to_str().unwrap().parse::<u64>().unwrap()
        };
        let [tokens, bytes, requests] = ["tokens", "bytes", "requests"].map(|name| rule(name, quota));
        let [by_bill, by_body, by_outcome] = [
            tokens.clone().cost(reserved).settle_by_usage(),
            bytes.clone().cost(reserved).settle_by_body(),
            requests.clone().refund_when(|response| response.status.is_server_error()),
        ];
        let layer = RateLimitLayer::new(limiter.clone(), by_bill.on_aborted(on_aborted), key::global())
            .and(by_body.on_aborted(on_aborted), key::global())
            .and(by_outcome.on_aborted(on_aborted), key::global());
        let mut service = layer.layer(handler(&Arc::default()));
        let mut context = Context::from_waker(Waker::noop());
        let mut expected = [0, 0, 0];
        for fate in fates {
            let asked = fate.request();
            let _ = catch_unwind(AssertUnwindSafe(|| {
                let mut response = Box::pin(service.call(asked));
                if !fate.polled {
                    return;
                }
                if let Poll::Ready(Ok(response)) = response.as_mut().poll(&mut context) {
                    let mut body = Box::pin(response.into_body());
                    for _ in 0..fate.read {
                        let _ = body.as_mut().poll_frame(&mut context);
                    }
                }
            }));
            for (sum, charge) in expected.iter_mut().zip(fate.charges(on_aborted)) {
                *sum += charge;
            }
        }
        let charged = [tokens, bytes, requests]
            .map(|policy| quota.capacity() - limiter.peek_one(&policy.policies()[0], &Key::global(), 0).remaining());
        prop_assert_eq!(charged, expected, "{}", quota);
    }
}

/// Panics about every event, or about every request.
#[derive(PartialEq)]
enum Panicking {
    AboutEvents,
    AboutRequests,
}

impl tower_ratelimit::observe::Observer for Panicking {
    fn on_outcome(&self, _: &tower_ratelimit::observe::Observed<'_>) {
        assert!(*self != Self::AboutRequests, "the observer panics");
    }

    fn on_limiter_event(&self, _: &tower_ratelimit::observe::LimiterEvent) {
        assert!(*self != Self::AboutEvents, "the observer panics");
    }
}

#[test]
fn panicking_observer_loses_no_settlement_of_a_dropped_request() {
    let limiter = Scripted::new();
    let rule = |name| {
        let quotas = [Quota::per_hour(10), Quota::per_day(20)];
        Rule::all_of(name, quotas).unwrap().cost(|_| 5).settle_by_usage().on_aborted(OnAborted::Refund)
    };
    let layer = RateLimitLayer::new(limiter.clone(), rule("one"), key::global())
        .and(rule("two"), key::global())
        .observer(Panicking::AboutEvents);
    let answer = |_: Request<axum::body::Body>| pending::<Result<Response<axum::body::Body>, Infallible>>();
    let call = layer.layer(service_fn(answer)).call(Request::new(axum::body::Body::empty()));
    limiter.fail(true);
    drop(call);
    let mut refunded: Vec<String> = limiter.refunds().into_iter().map(|(name, ..)| name).collect();
    refunded.sort_unstable();
    assert_eq!(refunded, ["one-10-per-hour", "one-20-per-day", "two-10-per-hour", "two-20-per-day"]);
}

#[test]
fn panic_of_the_observer_is_an_abort() {
    for (on_aborted, left) in [(OnAborted::Keep, 5), (OnAborted::Refund, 10)] {
        let limiter = MemoryLimiter::new();
        let rule = Rule::new("units", Quota::per_hour(10)).unwrap().cost(|_| 5).settle_by_usage();
        let layer =
            RateLimitLayer::new(limiter, rule.on_aborted(on_aborted), key::global()).observer(Panicking::AboutRequests);
        let answer = |_: http::Request<axum::body::Body>| {
            std::future::ready(Ok::<_, Infallible>(http::Response::new(axum::body::Body::empty())))
        };
        let mut service = layer.layer(tower::service_fn(answer));
        let call = AssertUnwindSafe(|| drop(service.call(http::Request::new(axum::body::Body::empty()))));
        assert!(catch_unwind(call).is_err());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let remaining = runtime.block_on(layer.peek(&Key::global())).unwrap()[0].1.remaining();
        assert_eq!(remaining, left, "{on_aborted:?}");
    }
}

#[tokio::test]
async fn panic_of_a_closure_is_an_abort_for_any_method() {
    for method in [Method::GET, Method::HEAD] {
        let limiter = MemoryLimiter::new();
        let rule =
            Rule::new("units", Quota::per_hour(10)).unwrap().cost(|_| 5).settle_by_response(|_| panic!("closure"));
        let layer = RateLimitLayer::new(limiter, rule.on_aborted(OnAborted::Refund), key::global());
        let answer = |_: Request<axum::body::Body>| {
            std::future::ready(Ok::<_, Infallible>(Response::new(axum::body::Body::empty())))
        };
        let mut request = Request::new(axum::body::Body::empty());
        *request.method_mut() = method.clone();
        let call = layer.layer(tower::service_fn(answer)).oneshot(request);
        assert!(tokio::spawn(call).await.is_err(), "the closure panics");
        assert_eq!(layer.peek(&Key::global()).await.unwrap()[0].1.remaining(), 10, "{method}");
    }
}

/// Failed logins that close an account or an address: five within a quarter of an hour close it for a
/// quarter of an hour, and longer each time if it grows.
fn closing_logins(is_growing: bool) -> Rule {
    let (quarter, day) = (Duration::from_secs(900), Duration::from_secs(86_400));
    let block = Quota::block(5, quarter, quarter).unwrap();
    let block = if is_growing { block.growing(2, day, day).unwrap() } else { block };
    rule("failed-logins", block).charge_when(|response| response.status == 401)
}

fn empty() -> Body {
    StreamBody::new(tokio_stream::iter(Vec::<Result<Frame<Bytes>, BoxError>>::new())).boxed_body()
}

const RIGHT: (&str, &str) = ("status", "200");
const WRONG: (&str, &str) = ("status", "401");

#[tokio::test]
async fn right_logins_at_once_leave_a_block_open() {
    for is_growing in [false, true] {
        let bench = Bench::new(closing_logins(is_growing));
        for _ in 0..3 {
            // The service has all five before it answers the first one.
            let entered = Arc::new(tokio::sync::Barrier::new(5));
            let layer = RateLimitLayer::new(bench.limiter.clone(), bench.rule.clone(), key::global());
            let service = layer.layer(service_fn(move |_: Request<String>| {
                let entered = Arc::clone(&entered);
                async move {
                    entered.wait().await;
                    Ok::<_, BoxError>(Response::new(empty()))
                }
            }));
            let five = (0..5).map(|_| tokio::spawn(service.clone().oneshot(request(&[RIGHT]))));
            for response in five.collect::<Vec<_>>() {
                assert_eq!(response.await.unwrap().unwrap().status(), 200);
            }
            assert_eq!(bench.used(), 0);
            assert_eq!(bench.head(&[RIGHT]).await.status(), 200, "the next one");
        }
    }
}

#[tokio::test]
async fn right_login_among_wrong_ones_leaves_a_block_open() {
    for is_growing in [false, true] {
        let bench = Bench::new(closing_logins(is_growing));
        for _ in 0..4 {
            assert_eq!(bench.head(&[WRONG]).await.status(), 401);
        }
        for _ in 0..3 {
            let right = bench.head(&[RIGHT]).await;
            assert_eq!(right.status(), 200);
            let limit = right.headers()["ratelimit"].to_str().unwrap();
            assert_eq!(limit, "\"failed-logins\";r=1;t=900", "as if it had not been there");
        }
        assert_eq!(bench.head(&[WRONG]).await.status(), 401, "the fifth");
        let closed = bench.head(&[RIGHT]).await;
        assert_eq!(
            (closed.status(), closed.headers()["retry-after"].to_str().unwrap()),
            (429.try_into().unwrap(), "900")
        );
    }
}

#[tokio::test]
async fn wrong_logins_over_many_accounts_close_the_address() {
    let (clock, account) = (ManualClock::new(), |parts: &tower_ratelimit::Head<'_>| {
        parts.headers.get("account").and_then(|name| Key::of(name.as_bytes()))
    });
    let address = closing_logins(true);
    let by_account =
        rule("failed-account", Quota::block(5, Duration::from_secs(900), Duration::from_secs(900)).unwrap())
            .charge_when(|response| response.status == 401);
    let layer = RateLimitLayer::new(memory(&clock), address, key::global()).and(by_account, account);
    let service = layer.layer(handler(&Arc::default()));
    let mut refused = 0;
    for number in 0..40 {
        let mut wrong = request(&[WRONG]);
        wrong.headers_mut().insert("account", HeaderValue::from(number));
        refused += usize::from(service.clone().oneshot(wrong).await.unwrap().status() == 429);
    }
    assert_eq!(refused, 35);
}

/// A block counts a strike when a login comes, and returns it if the login is right. So logins under way may close the
/// key, and the next one passes when they end well. A client that was told the block's length would stay away.
#[tokio::test]
async fn block_by_logins_under_way_promises_no_wait() {
    let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    let block = Quota::block(2, 10 * minute, hour).unwrap();
    let rule = rule("failed-logins", block).charge_when(|response| response.status == 401);
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule, key::global());
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let service = layer.layer(service_fn({
        let gate = Arc::clone(&gate);
        move |request: Request<String>| {
            let gate = Arc::clone(&gate);
            async move {
                gate.acquire().await.unwrap().forget();
                let response = Response::builder().status(request.body().parse::<u16>().unwrap());
                Ok::<_, Infallible>(response.body(axum::body::Body::empty()).unwrap())
            }
        }
    }));
    let send = |status: u16| {
        let service = service.clone();
        tokio::spawn(async move {
            let response = service.oneshot(Request::new(status.to_string())).await.unwrap();
            let wait = response.headers().get("retry-after").map(|wait| wait.to_str().unwrap().to_owned());
            (response.status().as_u16(), wait)
        })
    };
    // Two right logins are under way, and the third is refused for no time that is known.
    let under_way = [send(200), send(200)];
    tokio::task::yield_now().await;
    assert_eq!(send(200).await.unwrap(), (429, None));
    gate.add_permits(2);
    for login in under_way {
        assert_eq!(login.await.unwrap().0, 200);
    }
    gate.add_permits(1);
    assert_eq!(send(200).await.unwrap(), (200, None));
    // One has failed, and another one is under way: it may still end well.
    gate.add_permits(1);
    assert_eq!(send(401).await.unwrap().0, 401);
    let under_way = send(401);
    tokio::task::yield_now().await;
    assert_eq!(send(200).await.unwrap(), (429, None));
    gate.add_permits(1);
    assert_eq!(under_way.await.unwrap().0, 401);
    // Now both have failed.
    assert_eq!(send(200).await.unwrap(), (429, Some("3600".into())));
    // A login that is dropped keeps its strike, and is under way no more.
    layer.reset(&Key::global()).await.unwrap();
    let dropped = [send(200), send(200)];
    tokio::task::yield_now().await;
    for login in dropped {
        login.abort();
        assert!(login.await.unwrap_err().is_cancelled());
    }
    assert_eq!(send(200).await.unwrap(), (429, Some("3600".into())));
}
