//! Limits of requests in flight: a request holds its place until its response has ended, and every
//! place comes back once.

use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    Headers, Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Refusals, Rule, Wait,
    clock::ManualClock,
    key,
    limiter::Place,
    middleware::{InFlight, OnAborted, QuotaSwitch, ResetEncoding, ResetMeaning, Usage},
    observe::{LimiterEvent, Observed, Observer, Outcome, OutcomeKind, SetupWarning, SetupWarningKind},
};

use crate::support::waiting::World;
use crate::support::{Scripted, memory};

type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;
type Layered = RateLimitLayer<MemoryLimiter>;

const HOUR: Duration = Duration::from_secs(3_600);

fn exports(limit: u64) -> Rule {
    Rule::new("exports", Quota::concurrent(limit)).unwrap()
}

fn policy(name: &str, limit: u64) -> Policy {
    Policy::new(name, Quota::concurrent(limit)).unwrap()
}

/// Returns how many units of a policy of this name are free.
fn free(limiter: &MemoryLimiter, name: &str, limit: u64) -> u64 {
    limiter.peek_one(&policy(name, limit), &Key::global(), 0).remaining()
}

/// A body of two frames, of which the second fails if it should.
fn body(fails: bool) -> Body {
    let frames = (0..2).map(move |at| {
        if at == 1 && fails {
            return Err("the body fails".into());
        }
        Ok::<_, BoxError>(Frame::data(Bytes::from_static(b"half ")))
    });
    StreamBody::new(tokio_stream::iter(frames)).boxed_unsync()
}

/// Does what the request's header `fate` says.
fn handler()
-> impl Service<Request<String>, Response = Response<Body>, Error = BoxError, Future = Answer> + Clone + Send {
    service_fn(|request: Request<String>| -> Answer {
        let text = |name| request.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
        let (fate, status) = (text("fate"), text("status").parse::<u16>().unwrap_or(200));
        if fate == "panic in call" {
            resume_unwind(Box::new("the service panics"));
        }
        Box::pin(async move {
            match fate.as_str() {
                "panic" => resume_unwind(Box::new("the service panics")),
                "error" => return Err("the service fails".into()),
                "linger" => pending().await,
                _ => {}
            }
            let mut response = match fate.as_str() {
                "empty" => Response::new(http_body_util::Empty::new().map_err(|never| match never {}).boxed_unsync()),
                fate => Response::new(body(fate == "body fails")),
            };
            *response.status_mut() = StatusCode::from_u16(status).unwrap();
            Ok(response)
        })
    })
}

fn request(fate: &str) -> Request<String> {
    Request::builder().header("fate", HeaderValue::from_str(fate).unwrap()).body(String::new()).unwrap()
}

fn layer(limiter: &MemoryLimiter, rule: Rule) -> Layered {
    RateLimitLayer::new(limiter.clone(), rule, key::global())
}

fn limited(
    limiter: &MemoryLimiter,
    rule: Rule,
) -> impl Service<Request<String>, Response = Response<Body>, Error = BoxError, Future: Send> + Clone {
    layer(limiter, rule).layer(handler())
}

async fn send<S>(service: &S, fate: &str) -> Response<Body>
where
    S: Service<Request<String>, Response = Response<Body>, Error = BoxError> + Clone,
{
    service.clone().oneshot(request(fate)).await.unwrap()
}

fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap())
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn request_holds_its_place_until_its_body_has_ended() {
    let limiter = memory(&ManualClock::new());
    let service = limited(&limiter, exports(2));
    let mut first = send(&service, "").await;
    let second = send(&service, "").await;
    assert_eq!((first.status(), second.status(), free(&limiter, "exports", 2)), (StatusCode::OK, StatusCode::OK, 0));
    let refused = send(&service, "").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(refused);
    assert_eq!(free(&limiter, "exports", 2), 0, "a refusal returns nothing");
    first.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(free(&limiter, "exports", 2), 0, "half of the body is to come");
    assert!(first.body_mut().frame().await.is_some() && first.body_mut().frame().await.is_none());
    assert_eq!(free(&limiter, "exports", 2), 1, "the body has ended, though it is still there");
    drop(first);
    assert_eq!(free(&limiter, "exports", 2), 1, "it is returned once");
    drop(second);
    assert_eq!(free(&limiter, "exports", 2), 2);
}

#[tokio::test]
async fn client_that_has_all_bytes_is_no_longer_in_flight() {
    let limiter = memory(&ManualClock::new());
    let full = service_fn(|_: Request<String>| async {
        let body: Body = http_body_util::Full::new(Bytes::from_static(b"all")).map_err(BoxError::from).boxed_unsync();
        Ok::<_, BoxError>(Response::new(body))
    });
    let service = layer(&limiter, exports(1)).layer(full);
    let mut response = service.oneshot(request("")).await.unwrap();
    assert_eq!(free(&limiter, "exports", 1), 0);
    response.body_mut().frame().await.unwrap().unwrap();
    assert_eq!(free(&limiter, "exports", 1), 1, "the last frame was handed out");
}

/// The ways in which a request ends.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Read,
    HalfRead,
    BodyDropped,
    BodyFails,
    Empty,
    NeverPolled,
    Dropped,
    Error,
    Panic,
    PanicInCall,
}

const ENDS: [End; 10] = [
    End::Read,
    End::HalfRead,
    End::BodyDropped,
    End::BodyFails,
    End::Empty,
    End::NeverPolled,
    End::Dropped,
    End::Error,
    End::Panic,
    End::PanicInCall,
];

/// Sends a request that ends so. `held` checks what is held before it ends.
async fn end<S>(service: &S, end: End, held: impl Fn(&str))
where
    S: Service<Request<String>, Response = Response<Body>, Error = BoxError, Future: Send> + Clone,
{
    let mut service = service.clone();
    let fate = match end {
        End::BodyFails => "body fails",
        End::Empty => "empty",
        End::Dropped => "linger",
        End::Error => "error",
        End::Panic => "panic",
        End::PanicInCall => "panic in call",
        End::Read | End::HalfRead | End::BodyDropped | End::NeverPolled => "",
    };
    match end {
        End::Read | End::HalfRead | End::BodyDropped | End::BodyFails => {
            let response = service.oneshot(request(fate)).await.unwrap();
            held("while the body is there");
            let mut body = response.into_body();
            match end {
                End::Read => drop(body.collect().await.unwrap()),
                End::HalfRead => drop(body.frame().await),
                End::BodyFails => assert!(body.collect().await.is_err()),
                _ => drop(body),
            }
        }
        End::Empty => drop(service.oneshot(request(fate)).await.unwrap()),
        End::NeverPolled | End::Dropped => {
            let mut response = Box::pin(service.ready().await.unwrap().call(request(fate)));
            if end == End::Dropped {
                assert!(poll(&mut response).is_pending());
            }
            held("while the response is not there");
        }
        End::Error => {
            let mut response = Box::pin(service.ready().await.unwrap().call(request(fate)));
            assert!(matches!(poll(&mut response), Poll::Ready(Err(_))));
        }
        End::Panic => {
            let mut response = Box::pin(service.ready().await.unwrap().call(request(fate)));
            assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut response))).is_err());
        }
        End::PanicInCall => {
            let service = service.ready().await.unwrap();
            assert!(catch_unwind(AssertUnwindSafe(|| service.call(request(fate)))).is_err());
        }
    }
}

#[tokio::test]
async fn every_end_of_a_request_returns_its_place_once() {
    let limiter = memory(&ManualClock::new());
    let service = limited(&limiter, exports(3));
    let other = send(&service, "").await;
    for way in ENDS {
        end(&service, way, |when| assert_eq!(free(&limiter, "exports", 3), 1, "{way:?}, {when}")).await;
        assert_eq!(free(&limiter, "exports", 3), 2, "{way:?}");
    }
    drop(other);
    assert_eq!(free(&limiter, "exports", 3), 3);
}

#[tokio::test]
async fn every_end_returns_the_places_of_nested_layers() {
    let limiter = memory(&ManualClock::new());
    let inner = layer(&limiter, exports(2));
    let outer = layer(&limiter, Rule::new("outer", Quota::concurrent(5)).unwrap()).refund_nested(true);
    let service = outer.layer(inner.layer(handler()));
    let frees = || [free(&limiter, "outer", 5), free(&limiter, "exports", 2)];
    for way in ENDS {
        end(&service, way, |when| assert_eq!(frees(), [4, 1], "{way:?}, {when}")).await;
        assert_eq!(frees(), [5, 2], "{way:?}");
    }
    let held = [send(&service, "").await, send(&service, "").await];
    let refused = send(&service, "").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(refused);
    assert_eq!(frees(), [3, 0], "the outer layer's place is back when the inner one's refusal has ended");
    drop(held);
    assert_eq!(frees(), [5, 2]);
}

#[tokio::test]
async fn every_end_returns_the_places_of_a_limiter_that_answers_later() {
    let limiter = Scripted::new().later();
    let service = RateLimitLayer::new(limiter.clone(), exports(3), key::global()).layer(handler());
    for way in ENDS {
        // A request whose response was never polled has taken nothing, and its panic comes when it is polled.
        if !matches!(way, End::NeverPolled | End::Dropped | End::Error | End::Panic | End::PanicInCall) {
            end(&service, way, |when| assert_eq!(limiter.used(), 1, "{way:?}, {when}")).await;
        }
        assert_eq!(limiter.used(), 0, "{way:?}");
    }
    for fate in ["linger", "panic", "panic in call", "error"] {
        let mut response = Box::pin(service.clone().call(request(fate)));
        assert!(poll(&mut response).is_pending(), "the limiter answers later");
        let polled = catch_unwind(AssertUnwindSafe(|| poll(&mut response)));
        assert_eq!(limiter.used(), u64::from(fate == "linger" || fate == "panic"), "{fate}");
        drop(polled);
        drop(response);
        assert_eq!(limiter.used(), 0, "{fate}");
    }
}

#[tokio::test]
async fn service_that_fails_is_over_though_its_future_is_kept() {
    let limiter = memory(&ManualClock::new());
    let service = limited(&limiter, exports(1));
    let mut response = Box::pin(service.clone().call(request("error")));
    assert!(matches!(poll(&mut response), Poll::Ready(Err(_))));
    assert_eq!(free(&limiter, "exports", 1), 1);
}

/// Is ready once, and fails then.
#[derive(Clone)]
struct FailsLater(Arc<AtomicBool>);

impl Service<Request<String>> for FailsLater {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(if self.0.load(Ordering::Relaxed) { Err("the service fails".into()) } else { Ok(()) })
    }

    fn call(&mut self, _: Request<String>) -> Answer {
        Box::pin(pending())
    }
}

#[tokio::test]
async fn service_that_fails_after_a_wait_is_over_if_kept() {
    let mut world: World<()> = World::new();
    let limiter = memory(&world.clock);
    let queue = Quota::leaky_queue(1, Duration::from_secs(1)).unwrap().queue(5).unwrap();
    let fails = FailsLater(Arc::default());
    let mut service = layer(&limiter, exports(3))
        .and(Rule::new("queue", queue).unwrap(), key::global())
        .timer(world.timer.clone())
        .layer(fails.clone());
    let first = service.call(request(""));
    let mut second = Box::pin(service.call(request("")));
    assert!(poll(&mut second).is_pending());
    assert_eq!(free(&limiter, "exports", 3), 1);
    fails.0.store(true, Ordering::Relaxed);
    world.pass(1_000_000);
    assert!(matches!(poll(&mut second), Poll::Ready(Err(_))));
    assert_eq!(free(&limiter, "exports", 3), 2);
    drop(first);
}

#[tokio::test]
async fn layer_that_is_dropped_loses_no_place() {
    let limiter = memory(&ManualClock::new());
    let service = limited(&limiter, exports(2));
    let (body, lingering) = (send(&service, "").await, service.clone().call(request("linger")));
    drop(service);
    assert_eq!(free(&limiter, "exports", 2), 0);
    drop(body);
    drop(lingering);
    assert_eq!(free(&limiter, "exports", 2), 2);
}

#[tokio::test]
async fn request_that_another_rule_refuses_holds_nothing() {
    let limiter = memory(&ManualClock::new());
    let rate = Policy::new("rate", Quota::per_hour(2)).unwrap();
    let service = layer(&limiter, exports(1)).and(Rule::from(rate.clone()), key::global()).layer(handler());
    let first = send(&service, "").await;
    let refused = send(&service, "").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(limiter.peek_one(&rate, &Key::global(), 0).remaining(), 1, "the place refused, and the rate is kept");
    drop(first);
    drop(send(&service, "").await);
    assert_eq!(send(&service, "").await.status(), StatusCode::TOO_MANY_REQUESTS, "the rate refuses");
    assert_eq!(free(&limiter, "exports", 1), 1);
}

#[tokio::test]
async fn all_of_a_rules_quotas_are_held_or_taken() {
    let limiter = memory(&ManualClock::new());
    let rule = Rule::all_of("api", [Quota::per_hour(100), Quota::concurrent(1)]).unwrap();
    assert_eq!(rule.policies()[1].name(), "api-1-at-once");
    let service = limited(&limiter, rule);
    let first = send(&service, "").await;
    assert_eq!(
        header(first.headers(), "ratelimit-policy"),
        Some("\"api-100-per-hour\";q=100;w=3600, \"api-1-at-once\";q=1;qu=\"concurrent-requests\"")
    );
    assert_eq!(send(&service, "").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(text(first).await, "half half ");
    assert_eq!(send(&service, "").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn overflow_holds_no_place() {
    let limiter = memory(&ManualClock::new());
    let later = service_fn(|_: Request<String>| async {
        let body = http_body_util::Full::new(Bytes::from_static(b"later"));
        Ok::<_, BoxError>(Response::new(body))
    });
    let service = layer(&limiter, exports(1)).overflow(later).layer(handler());
    let first = send(&service, "").await;
    let overflowed = send(&service, "").await;
    assert_eq!(overflowed.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Overflowed);
    drop(first);
    assert_eq!(free(&limiter, "exports", 1), 1);
    drop(overflowed);
    assert_eq!(free(&limiter, "exports", 1), 1);
}

#[tokio::test]
async fn mode_that_does_not_refuse_holds_only_what_is_free() {
    for mode in [Mode::Shadow, Mode::Degrade] {
        let limiter = memory(&ManualClock::new());
        let service = layer(&limiter, exports(1).mode(mode)).expose_outcome(true).layer(handler());
        let (first, second) = (send(&service, "").await, send(&service, "").await);
        let taken = |response: &Response<Body>| {
            response.extensions().get::<Outcome>().unwrap().policies().first().unwrap().taken()
        };
        assert_eq!((taken(&first), taken(&second)), (1, 0), "{mode:?}");
        drop(second);
        assert_eq!(free(&limiter, "exports", 1), 0, "{mode:?}: the second held nothing");
        drop(first);
        assert_eq!(free(&limiter, "exports", 1), 1, "{mode:?}");
    }
}

#[tokio::test]
async fn places_have_the_size_of_the_cost() {
    let limiter = memory(&ManualClock::new());
    let sized = exports(4).cost(|head| head.headers["fate"].to_str().unwrap().len() as u64);
    let service = limited(&limiter, sized);
    let three = send(&service, "xxx").await;
    assert_eq!((three.status(), free(&limiter, "exports", 4)), (StatusCode::OK, 1));
    let refused = send(&service, "xx").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let nothing = send(&service, "").await;
    assert_eq!((nothing.status(), free(&limiter, "exports", 4)), (StatusCode::OK, 1), "a cost of 0 looks");
    drop(nothing);
    let never = send(&service, "xxxxx").await;
    assert_eq!(never.extensions().get::<Outcome>().unwrap().wait(), Wait::Never);
    drop(three);
    assert_eq!(free(&limiter, "exports", 4), 4);
}

#[tokio::test]
async fn plans_share_what_is_held() {
    let limiter = memory(&ManualClock::new());
    let plans = [Quota::concurrent(1), Quota::concurrent(3)];
    let rule = Rule::plans("exports", plans, |head| usize::from(head.headers["fate"] == "pro")).unwrap();
    let service = limited(&limiter, rule);
    let held = [send(&service, "pro").await, send(&service, "pro").await];
    assert_eq!(send(&service, "free").await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(free(&limiter, "exports", 3), 1);
    drop(held);
    assert_eq!(send(&service, "free").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn switch_that_lowers_the_limit_refuses_until_enough_have_ended() {
    let limiter = memory(&ManualClock::new());
    let switch = QuotaSwitch::new(Quota::concurrent(3));
    let service = limited(&limiter, Rule::switched("exports", &switch).unwrap());
    let mut held = vec![send(&service, "").await, send(&service, "").await, send(&service, "").await];
    switch.set(Quota::concurrent(1)).unwrap();
    for left in [3, 2, 1] {
        assert_eq!(send(&service, "").await.status(), StatusCode::TOO_MANY_REQUESTS, "{left} are in flight");
        held.pop();
    }
    held.push(send(&service, "").await);
    assert_eq!(held[0].status(), StatusCode::OK);
    switch.set(Quota::concurrent(2)).unwrap();
    held.push(send(&service, "").await);
    assert_eq!((held[1].status(), free(&limiter, "exports", 2)), (StatusCode::OK, 0));
    let error = switch.set(Quota::per_minute(5)).unwrap_err();
    assert!(error.to_string().contains("5 per minute"), "places do not become usage: {error}");
    drop(held);
    assert_eq!(free(&limiter, "exports", 2), 2);
}

#[tokio::test]
async fn request_of_before_a_reset_returns_nobody_elses_place() {
    let limiter = memory(&ManualClock::new());
    let layer = layer(&limiter, exports(1));
    let service = layer.clone().layer(handler());
    let old = send(&service, "").await;
    layer.reset(&Key::global()).await.unwrap();
    let new = send(&service, "").await;
    assert_eq!(new.status(), StatusCode::OK, "an operator freed the key");
    drop(old);
    assert_eq!(send(&service, "").await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(new);
    assert_eq!(free(&limiter, "exports", 1), 1);
}

#[tokio::test]
async fn clients_learn_what_is_in_progress_and_no_time() {
    let limiter = memory(&ManualClock::new());
    let service = limited(&limiter, exports(2));
    let (first, second) = (send(&service, "").await, send(&service, "").await);
    assert_eq!(
        header(first.headers(), "ratelimit-policy"),
        Some("\"exports\";q=2;qu=\"concurrent-requests\""),
        "a quota without a window"
    );
    assert_eq!(header(first.headers(), "ratelimit"), Some("\"exports\";r=1"));
    assert_eq!(header(second.headers(), "ratelimit"), Some("\"exports\";r=0"));
    let refused = send(&service, "").await;
    assert_eq!(header(refused.headers(), "ratelimit"), Some("\"exports\";r=0"));
    assert_eq!(header(refused.headers(), "retry-after"), None, "nobody knows when a place is free");
    assert_eq!(refused.extensions().get::<Outcome>().unwrap().wait(), Wait::Unknown);
    let problem = text(refused).await;
    assert!(problem.contains("\"detail\":\"2 of 2 requests are in progress\""), "{problem}");
    assert!(problem.contains("\"violated-policies\":[\"exports\"]"), "{problem}");
}

#[tokio::test]
async fn refusal_says_what_is_in_use_in_the_units_of_the_rule() {
    let limiter = memory(&ManualClock::new());
    let gpus = Rule::new("gpus", Quota::concurrent(8)).unwrap().unit("gpus").unwrap().cost(|_| 3);
    let service = layer(&limiter, gpus).refusals(Refusals::text()).layer(handler());
    let held = [send(&service, "").await, send(&service, "").await];
    assert!(text(send(&service, "").await).await.ends_with(": 6 of 8 gpus are in use\n"));
    assert_eq!(header(held[0].headers(), "ratelimit-policy"), Some("\"gpus\";q=8;qu=\"gpus\""));
}

#[tokio::test]
async fn older_headers_report_no_reset() {
    for format in [
        Headers::draft_07(),
        Headers::draft_06(),
        Headers::github(),
        Headers::x_rate_limit(ResetEncoding::DeltaSeconds),
        Headers::legacy(tower_ratelimit::middleware::LegacyHeaders::new().remaining("x-left").reset(
            "x-reset",
            ResetEncoding::EpochSeconds,
            ResetMeaning::NextUnit,
        ))
        .unwrap(),
    ] {
        let limiter = memory(&ManualClock::new());
        let service = layer(&limiter, exports(1)).headers(format.clone()).layer(handler());
        let (passed, refused) = (send(&service, "").await, send(&service, "").await);
        for response in [&passed, &refused] {
            let all: Vec<String> =
                response.headers().iter().map(|(name, value)| format!("{name}: {value:?}")).collect();
            assert!(!all.iter().any(|line| line.contains("reset") || line.starts_with("retry-after")), "{all:?}");
            let remaining = all.iter().any(|line| line.contains("remaining") || line.starts_with("x-left"));
            assert!(remaining, "{all:?}");
        }
    }
}

#[tokio::test]
async fn grpc_client_gets_no_time_to_wait() {
    use tonic_types::StatusExt;
    let limiter = memory(&ManualClock::new());
    let service = limited(&limiter, exports(1));
    let held = send(&service, "").await;
    let call = Request::post("/shop.Shop/Export").version(http::Version::HTTP_2);
    let call = call.header("content-type", "application/grpc").header("te", "trailers").header("fate", "");
    let refused = service.clone().oneshot(call.body(String::new()).unwrap()).await.unwrap();
    assert_eq!(header(refused.headers(), "grpc-retry-pushback-ms"), None);
    let status = tonic::Status::from_header_map(refused.headers()).unwrap();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    let details = status.get_error_details();
    assert!(details.retry_info().is_none(), "{details:?}");
    let violation = &details.quota_failure().unwrap().violations[0];
    assert_eq!((&*violation.subject, &*violation.description), ("policy:exports", "1 concurrent-requests exceeded"));
    drop(held);
}

#[tokio::test]
async fn place_until_the_head_is_free_while_the_body_is_sent() {
    let limiter = memory(&ManualClock::new());
    let service = layer(&limiter, exports(1).until_head())
        .and(Rule::new("whole", Quota::concurrent(5)).unwrap(), key::global())
        .layer(handler());
    let frees = || [free(&limiter, "exports", 1), free(&limiter, "whole", 5)];
    let lingering = service.clone().call(request("linger"));
    assert_eq!(frees(), [0, 4]);
    drop(lingering);
    let response = send(&service, "").await;
    assert_eq!(frees(), [1, 4], "the other rule holds until the end");
    drop(response);
    assert_eq!(frees(), [1, 5]);
}

/// A handler that takes its place and keeps it.
fn keeps(
    kept: &Arc<Mutex<Vec<Option<Place>>>>,
    status: u16,
) -> impl Service<Request<String>, Response = Response<Body>, Error = BoxError, Future: Send> + Clone + Send + use<> {
    let kept = Arc::clone(kept);
    service_fn(move |request: Request<String>| {
        let in_flight = request.extensions().get::<InFlight>().expect("each request has it");
        kept.lock().unwrap().push(in_flight.hold());
        let mut response = Response::new(body(false));
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        async move { Ok::<_, BoxError>(response) }
    })
}

#[tokio::test]
async fn place_that_a_handler_takes_outlives_the_response() {
    let limiter = memory(&ManualClock::new());
    for (rule, status, sending) in [(exports(1), 202, 0), (exports(1).until_head(), 202, 1), (exports(1), 101, 1)] {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let service = layer(&limiter, rule).layer(keeps(&kept, status));
        assert_eq!(text(send(&service, "").await).await, "half half ");
        assert_eq!(free(&limiter, "exports", 1), 0, "{status}: the handler goes on");
        assert_eq!(send(&service, "").await.status(), StatusCode::TOO_MANY_REQUESTS);
        kept.lock().unwrap().clear();
        assert_eq!(free(&limiter, "exports", 1), 1, "{status}");
        let response = send(&service, "").await;
        kept.lock().unwrap().clear();
        assert_eq!(free(&limiter, "exports", 1), sending, "{status}: the response is sent");
        drop(response);
        assert_eq!(free(&limiter, "exports", 1), 1);
    }
}

#[tokio::test]
async fn handle_of_a_request_holds_nothing_by_itself() {
    let limiter = memory(&ManualClock::new());
    let handles: Arc<Mutex<Vec<InFlight>>> = Arc::default();
    let seen = Arc::clone(&handles);
    let service = layer(&limiter, exports(1)).layer(service_fn(move |request: Request<String>| {
        seen.lock().unwrap().push(request.extensions().get::<InFlight>().unwrap().clone());
        async { Ok::<_, BoxError>(Response::new(body(false))) }
    }));
    drop(service.oneshot(request("")).await.unwrap());
    assert_eq!(free(&limiter, "exports", 1), 1);
    assert!(handles.lock().unwrap()[0].hold().is_none(), "the request has ended");
    assert_eq!(free(&limiter, "exports", 1), 1);
}

#[tokio::test]
async fn place_of_nested_layers_holds_for_all_of_them() {
    let limiter = memory(&ManualClock::new());
    let kept = Arc::new(Mutex::new(Vec::new()));
    let outer = layer(&limiter, Rule::new("outer", Quota::concurrent(1)).unwrap());
    let service = outer.layer(layer(&limiter, exports(1)).layer(keeps(&kept, 200)));
    drop(send(&service, "").await);
    assert_eq!([free(&limiter, "outer", 1), free(&limiter, "exports", 1)], [0, 0]);
    kept.lock().unwrap().clear();
    assert_eq!([free(&limiter, "outer", 1), free(&limiter, "exports", 1)], [1, 1]);
}

#[tokio::test]
async fn exempt_request_has_a_handle_that_holds_nothing() {
    let limiter = memory(&ManualClock::new());
    let kept = Arc::new(Mutex::new(Vec::new()));
    let service = layer(&limiter, exports(1).when(|_| false)).layer(keeps(&kept, 200));
    assert_eq!(send(&service, "").await.status(), StatusCode::OK);
    assert!(kept.lock().unwrap()[0].is_none());
}

#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<SetupWarning>>>);

impl Warnings {
    fn kinds(&self) -> Vec<SetupWarningKind> {
        self.0.lock().unwrap().iter().map(SetupWarning::kind).collect()
    }
}

impl Observer for Warnings {
    fn on_setup_warning(&self, setup_warning: &SetupWarning) {
        self.0.lock().unwrap().push(setup_warning.clone());
    }
}

#[tokio::test]
async fn connection_that_no_place_holds_is_released_with_a_warning() {
    for (method, status, switches) in [
        (Method::GET, 101, true),
        (Method::CONNECT, 200, true),
        (Method::CONNECT, 407, false),
        (Method::GET, 200, false),
    ] {
        let (limiter, warnings) = (memory(&ManualClock::new()), Warnings::default());
        let service = layer(&limiter, exports(2)).observer(warnings.clone()).layer(handler());
        for _ in 0..2 {
            let mut request = request("");
            *request.method_mut() = method.clone();
            request.headers_mut().insert("status", HeaderValue::from(status));
            let response = service.clone().oneshot(request).await.unwrap();
            assert_eq!(free(&limiter, "exports", 2), if switches { 2 } else { 1 }, "{method} {status}");
            drop(response);
        }
        let expected: &[SetupWarningKind] = if switches { &[SetupWarningKind::NotHeld] } else { &[] };
        assert_eq!(warnings.kinds(), expected, "{method} {status}");
        assert_eq!(free(&limiter, "exports", 2), 2, "{method} {status}");
    }
    let warnings = Warnings::default();
    let limiter = memory(&ManualClock::new());
    let service = layer(&limiter, exports(2).until_head()).observer(warnings.clone()).layer(handler());
    let mut request = request("");
    request.headers_mut().insert("status", HeaderValue::from(101));
    drop(service.oneshot(request).await.unwrap());
    assert_eq!(warnings.kinds(), [], "it was not meant to count");
}

#[test]
fn settings_without_effect_are_reported() {
    let limiter = memory(&ManualClock::new());
    let warned = |rule: Rule| layer(&limiter, rule).check().err().map(|setup_warning| setup_warning.kind());
    let both = || Rule::all_of("api", [Quota::per_hour(100), Quota::concurrent(1)]).unwrap();
    for (rule, expected) in [
        (exports(3), false),
        (exports(3).until_head(), false),
        (both(), false),
        (exports(3).charge_when(|_| true), true),
        (exports(3).refund_when(|_| true), true),
        (exports(3).settle_by_response(|_| Some(1)), true),
        (exports(3).settle_by_usage(), true),
        (exports(3).settle_by_body(), true),
        (both().refund_when(|_| true), false), // for the rate
        (both().settle_by_usage(), true),
        (exports(3).on_aborted(OnAborted::Refund), true),
        (both().on_aborted(OnAborted::Refund), false),
        (Rule::new("rate", Quota::per_hour(1)).unwrap().until_head(), true),
        (Rule::quota_from("own", |_| Quota::per_hour(1)).unwrap(), false),
        (Rule::from(Rule::quota_from("own", |_| Quota::per_hour(1)).unwrap().policies()[0].clone()), true),
    ] {
        let kind = warned(rule.clone());
        assert_eq!(kind, expected.then_some(SetupWarningKind::NoEffect), "{rule:?}");
    }
    for bounded in [RateLimitLayer::max_waiting, RateLimitLayer::max_in_line] {
        let bounded = bounded(layer(&limiter, Rule::from(Quota::per_hour(1))), 5);
        assert_eq!(bounded.check().unwrap_err().kind(), SetupWarningKind::NoEffect);
    }
}

#[tokio::test]
async fn correction_after_the_response_changes_no_place() {
    let limiter = memory(&ManualClock::new());
    let rate = |name: &str| limiter.peek_one(&Policy::new(name, Quota::per_hour(100)).unwrap(), &Key::global(), 0);
    let rule = Rule::all_of("api", [("rate", Quota::per_hour(100)), ("places", Quota::concurrent(5))]).unwrap();
    let service = limited(&limiter, rule.refund_when(|_| true));
    let response = send(&service, "").await;
    assert_eq!(rate("api-rate").remaining(), 100, "the head refunds the rate");
    assert_eq!(free(&limiter, "api-places", 5), 4, "and not the place");
    drop(response);
    assert_eq!(free(&limiter, "api-places", 5), 5);
    let settled =
        layer(&limiter, exports(5).settle_by_usage().cost(|_| 2)).layer(service_fn(|request: Request<String>| {
            if let Some(usage) = request.extensions().get::<Usage>() {
                usage.set(1);
            }
            async { Ok::<_, BoxError>(Response::new(body(false))) }
        }));
    let response = settled.oneshot(request("")).await.unwrap();
    assert_eq!(free(&limiter, "exports", 5), 3);
    drop(response);
    assert_eq!(free(&limiter, "exports", 5), 5);
}

/// Panics whenever it is told something.
struct Panics;

impl Observer for Panics {
    fn on_outcome(&self, _: &Observed<'_>) {
        resume_unwind(Box::new("the observer panics"));
    }

    fn on_limiter_event(&self, _: &LimiterEvent) {
        resume_unwind(Box::new("the observer panics"));
    }
}

#[tokio::test]
async fn observer_that_panics_loses_no_place() {
    let limiter = memory(&ManualClock::new());
    let service = layer(&limiter, exports(1)).observer(Panics).layer(handler());
    for _ in 0..3 {
        let mut service = service.clone();
        assert!(catch_unwind(AssertUnwindSafe(|| service.call(request("")))).is_err());
        assert_eq!(free(&limiter, "exports", 1), 1);
    }
}

#[tokio::test]
async fn request_that_waits_for_its_departure_holds_its_place() {
    let mut world: World<StatusCode> = World::new();
    let limiter = memory(&world.clock);
    let queue = Quota::leaky_queue(1, Duration::from_secs(1)).unwrap().queue(5).unwrap();
    let service = layer(&limiter, exports(3))
        .and(Rule::new("queue", queue).unwrap(), key::global())
        .timer(world.timer.clone())
        .layer(handler());
    let start = |world: &mut World<StatusCode>| {
        let service = service.clone();
        world.spawn(async move { send(&service, "").await.status() })
    };
    let first = start(&mut world);
    assert_eq!(world.done[first], Some(StatusCode::OK));
    assert_eq!(free(&limiter, "exports", 3), 3, "its response was dropped");
    let [second, third] = [start(&mut world), start(&mut world)];
    assert_eq!(free(&limiter, "exports", 3), 1, "two wait");
    world.cancel(third);
    assert_eq!(free(&limiter, "exports", 3), 2, "one has left");
    world.pass(1_000_000);
    assert_eq!(world.done[second], Some(StatusCode::OK));
    assert_eq!(free(&limiter, "exports", 3), 3);
}

#[tokio::test]
async fn request_that_may_not_wait_holds_no_place() {
    let world: World<StatusCode> = World::new();
    let limiter = memory(&world.clock);
    let queue = Quota::leaky_queue(1, Duration::from_secs(1)).unwrap().queue(5).unwrap();
    let service = layer(&limiter, exports(3))
        .and(Rule::new("queue", queue).unwrap(), key::global())
        .timer(world.timer.clone())
        .max_waiting(0)
        .layer(handler());
    let first = send(&service, "").await;
    let refused = send(&service, "").await;
    assert_eq!((first.status(), refused.status()), (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS));
    assert_eq!(free(&limiter, "exports", 3), 2);
    let status = refused.extensions().get::<Outcome>().unwrap().policies()[0].clone();
    assert_eq!((status.decision().remaining(), status.taken()), (2, 0), "it is reported as it stands");
}

#[tokio::test]
async fn admission_holds_its_place_until_it_ends() {
    let limiter = memory(&ManualClock::new());
    let layer = layer(&limiter, exports(2));
    let (head, _) = request("").into_parts();
    let [kept, refunded] = [layer.admit(&head).await.unwrap(), layer.admit(&head).await.unwrap()];
    let refused = layer.admit(&head).await.unwrap_err();
    assert_eq!(refused.outcome().wait(), Wait::Unknown);
    kept.keep();
    assert_eq!(free(&limiter, "exports", 2), 1, "a place is not kept");
    refunded.refund();
    assert_eq!(free(&limiter, "exports", 2), 2);
    let response = layer.admit(&head).await.unwrap().finish(Response::new(body(false)));
    assert_eq!(header(response.headers(), "ratelimit"), Some("\"exports\";r=1"));
    assert_eq!(free(&limiter, "exports", 2), 1);
    drop(response);
    assert_eq!(free(&limiter, "exports", 2), 2);
    drop(layer.admit(&head).await.unwrap());
    assert_eq!(free(&limiter, "exports", 2), 2);
    let call = tonic::Request::new(String::new());
    let admission = layer.admit_call(&call).await.unwrap();
    assert_eq!(free(&limiter, "exports", 2), 1);
    drop(admission);
    assert_eq!(free(&limiter, "exports", 2), 2);
}

#[tokio::test]
async fn block_of_a_rule_counts_its_refusals() {
    let limiter = memory(&ManualClock::new());
    let rule = exports(1).block("exports-block", Quota::block(2, HOUR, HOUR).unwrap()).unwrap();
    let service = limited(&limiter, rule);
    let held = send(&service, "").await;
    assert_eq!(send(&service, "").await.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Limited);
    assert_eq!(send(&service, "").await.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Blocked);
    drop(held);
    let blocked = send(&service, "").await;
    assert_eq!(blocked.extensions().get::<Outcome>().unwrap().kind(), OutcomeKind::Blocked);
    assert_eq!(header(blocked.headers(), "retry-after"), Some("3600"), "a block has a time");
    assert_eq!(free(&limiter, "exports", 1), 1, "a blocked request holds nothing");
}

/// A block that does not enforce lets the request pass, but its rule goes on as if it had been turned away.
#[tokio::test]
async fn closed_block_takes_no_place_in_any_mode() {
    let in_mode = async |mode: Mode| {
        let limiter = memory(&ManualClock::new());
        let rule = exports(1).block("exports-block", Quota::block(2, HOUR, HOUR).unwrap()).unwrap().mode(mode);
        let service = layer(&limiter, rule).expose_outcome(true).layer(handler());
        let held = send(&service, "").await;
        for _ in 0..2 {
            drop(send(&service, "").await);
        }
        drop(held);
        let last = send(&service, "").await;
        assert_eq!(free(&limiter, "exports", 1), 1, "{mode:?}");
        let outcome = last.extensions().get::<Outcome>().unwrap();
        outcome.policies().iter().map(|status| format!("{:?}", status.decision())).collect::<Vec<_>>()
    };
    let enforced = in_mode(Mode::Enforce).await;
    assert_eq!(in_mode(Mode::Shadow).await, enforced);
    assert_eq!(in_mode(Mode::Degrade).await, enforced);
}
