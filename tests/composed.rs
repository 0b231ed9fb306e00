//! What layers around each other promise: an outer one takes nothing for a request that an inner one refuses.

mod support;

use std::convert::Infallible;
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use proptest::prelude::*;
use support::Scripted;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, layer::layer_fn, service_fn};
use tower_ratelimit::{
    Headers, Key, ManualClock, MemoryLimiter, Policy, Quota, RateLimitLayer, ResetEncoding, Rule, key,
};

type Body = Full<Bytes>;
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;
type Boxed = tower::util::BoxCloneService<Request<Body>, Response<Body>, Infallible>;

/// What a header field of a request tells services to do.
fn told<'a>(request: &'a Request<Body>, name: &str) -> &'a str {
    request.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

fn request(fields: &[(&'static str, &'static str)]) -> Request<Body> {
    let mut request = Request::new(Body::default());
    for (name, value) in fields {
        request.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    request
}

/// Middleware that builds another response, of the same status, after it has done what the field of this name says.
fn between<S, B>(name: &'static str, inner: S) -> Boxed
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    ServiceExt::<Request<Body>>::boxed_clone(service_fn(move |mut request: Request<Body>| -> Answer {
        let mut inner = inner.clone();
        let what = told(&request, name).to_owned();
        // What its extensions carry is the only thing that stays of a request.
        request.headers_mut().remove(name);
        let again = request.clone();
        let response = inner.call(request);
        if what == "panic in call" {
            resume_unwind(Box::new("middleware panics"));
        }
        Box::pin(async move {
            let mut status = response.await?.status();
            match what.as_str() {
                "linger" => pending().await,
                "panic" => resume_unwind(Box::new("middleware panics")),
                "retry" => {
                    let mut again = again;
                    again.headers_mut().remove("dear");
                    status = inner.call(again).await?.status();
                }
                _ => {}
            }
            let mut response = Response::new(Body::default());
            *response.status_mut() = status;
            Ok(response)
        })
    }))
}

/// The innermost service counts the requests that reach it.
#[derive(Clone, Default)]
struct Handler(Arc<AtomicU64>);

impl Handler {
    fn served(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn service(&self) -> Boxed {
        let count = Arc::clone(&self.0);
        ServiceExt::<Request<Body>>::boxed_clone(service_fn(move |request: Request<Body>| -> Answer {
            let (count, what) = (Arc::clone(&count), told(&request, "handler").to_owned());
            Box::pin(async move {
                count.fetch_add(1, Ordering::Relaxed);
                match what.as_str() {
                    "linger" => pending().await,
                    "panic" => resume_unwind(Box::new("the handler panics")),
                    _ => Ok(Response::new(Body::default())),
                }
            })
        }))
    }
}

/// A rule of plenty, but for requests which are too dear for the policy of this name.
fn plenty(name: &'static str, quota: Quota) -> Rule {
    Policy::new(name, quota).unwrap().cost(move |parts| {
        let dear = parts.headers.get("dear").is_some_and(|dear| dear == name);
        if dear { 1 << 40 } else { 1 }
    })
}

fn memory() -> MemoryLimiter {
    MemoryLimiter::builder().clock(ManualClock::new()).build().unwrap()
}

fn hourly(limit: u32) -> Quota {
    Quota::per_hour(limit)
}

fn layer(limiter: &Scripted, name: &'static str) -> RateLimitLayer<Scripted> {
    RateLimitLayer::new(limiter.clone(), plenty(name, hourly(100)), key::global())
}

/// An outer and an inner layer with middleware in between, which has served one request.
async fn two(outer: &Scripted, inner: &Scripted, handler: &Handler) -> Boxed {
    let stack = ServiceBuilder::new()
        .layer(layer_fn(|inner| between("outside", inner)))
        .layer(layer(outer, "outer"))
        .layer(layer_fn(|inner| between("between", inner)))
        .layer(layer(inner, "inner"))
        .service(handler.service());
    assert_eq!(status(&stack, &[]).await, StatusCode::OK);
    stack
}

async fn status(service: &Boxed, fields: &[(&'static str, &'static str)]) -> StatusCode {
    service.clone().oneshot(request(fields)).await.unwrap().status()
}

#[tokio::test]
async fn an_outer_layer_gives_back_what_an_inner_one_refuses() {
    for [outer, inner] in [
        [Scripted::new(), Scripted::new()],
        [Scripted::new().later(), Scripted::new()],
        [Scripted::new(), Scripted::new().later()],
        [Scripted::new().later(), Scripted::new().later()],
    ] {
        let handler = Handler::default();
        let stack = two(&outer, &inner, &handler).await;
        for _ in 0..200 {
            assert_eq!(status(&stack, &[("dear", "inner")]).await, StatusCode::TOO_MANY_REQUESTS);
        }
        assert_eq!((outer.used(), outer.refunds().len()), (1, 200));
        // The limiter of the inner layer fails, and it refuses.
        inner.fail(true);
        assert_eq!(status(&stack, &[]).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(outer.used(), 1);
        inner.fail(false);
        assert_eq!(status(&stack, &[]).await, StatusCode::OK);
        assert_eq!((outer.used(), inner.used(), handler.served()), (2, 2, 2));
        // What the outer layer refuses concerns nobody further in.
        assert_eq!(status(&stack, &[("dear", "outer")]).await, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!((outer.used(), inner.used(), inner.refunds().len()), (2, 2, 0));
    }
}

#[tokio::test]
async fn a_request_without_a_key_for_an_inner_layer_takes_nothing_from_an_outer_one() {
    let outer = Scripted::new();
    let stack = ServiceBuilder::new()
        .layer(layer(&outer, "outer"))
        .layer(layer_fn(|inner| between("between", inner)))
        .layer(RateLimitLayer::new(Scripted::new(), hourly(100), key::header("x-api-key")))
        .service(Handler::default().service());
    for (number, (fields, expected)) in
        [(&[("x-api-key", "k")][..], StatusCode::OK), (&[], StatusCode::BAD_REQUEST)].into_iter().enumerate()
    {
        assert_eq!(stack.clone().oneshot(request(fields)).await.unwrap().status(), expected);
        assert_eq!((outer.used(), outer.refunds().len()), (1, number));
    }
}

/// The first request of all: the outer layer has not noticed yet that there is an inner one.
#[tokio::test]
async fn the_first_request_is_given_back_too_by_its_response() {
    let outer = Scripted::new();
    let stack = ServiceBuilder::new()
        .layer(layer(&outer, "outer"))
        .layer(layer(&Scripted::new(), "inner"))
        .service(Handler::default().service());
    assert_eq!(stack.oneshot(request(&[("dear", "inner")])).await.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!((outer.used(), outer.refunds().len()), (0, 1));
}

#[tokio::test]
async fn middleware_that_panics_or_a_client_that_goes_away_after_a_refusal_changes_nothing() {
    let [outer, inner] = [Scripted::new(), Scripted::new()];
    let stack = two(&outer, &inner, &Handler::default()).await;
    for (number, what) in ["panic in call", "panic", "linger"].into_iter().enumerate() {
        poll_once(stack.clone(), request(&[("dear", "inner"), ("between", what)]));
        assert_eq!((outer.used(), outer.refunds().len()), (1, number + 1), "{what}");
    }
    // Not refused: the service may have done all the work.
    for (number, what) in ["panic", "linger"].into_iter().enumerate() {
        poll_once(stack.clone(), request(&[("between", what)]));
        poll_once(stack.clone(), request(&[("handler", what)]));
        assert_eq!((outer.used(), outer.refunds().len()), (1 + 2 * (number as u64 + 1), 3), "{what}");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_before_an_inner_limiter_has_answered_takes_nothing() {
    let [outer, inner] = [Scripted::new(), Scripted::new().later()];
    let handler = Handler::default();
    let stack = two(&outer, &inner, &handler).await;
    poll_once(stack, request(&[]));
    assert_eq!((outer.used(), inner.used(), handler.served()), (1, 1, 1));
}

#[tokio::test]
async fn a_request_that_passes_at_its_second_attempt_is_charged() {
    let [outer, inner] = [Scripted::new(), Scripted::new()];
    let handler = Handler::default();
    let stack = two(&outer, &inner, &handler).await;
    assert_eq!(status(&stack, &[("dear", "inner"), ("between", "retry")]).await, StatusCode::OK);
    assert_eq!((outer.used(), outer.refunds().len(), handler.served()), (2, 0, 2));
}

/// A handler that asks another service through a limited client of its own, and answers 502 for what that refused.
#[tokio::test]
async fn what_a_client_within_the_handler_is_refused_stays_charged() {
    for keeps_response in [false, true] {
        let outer = Scripted::new();
        let client = layer(&Scripted::new(), "client").layer(Handler::default().service());
        let handler = service_fn(move |incoming: Request<Body>| {
            let client = client.clone();
            async move {
                let refused = incoming.headers().contains_key("refused");
                let outgoing = request(if refused { &[("dear", "client")] } else { &[] });
                let response = client.oneshot(outgoing).await?;
                if !refused {
                    return Ok::<_, Infallible>(Response::new(()));
                }
                assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
                let mut answer = if keeps_response { response.map(drop) } else { Response::new(()) };
                *answer.status_mut() = StatusCode::BAD_GATEWAY;
                Ok(answer)
            }
        });
        let stack = layer(&outer, "outer")
            .layer(handler.map_response(|response: Response<()>| response.map(|()| Body::default())));
        for number in 1..10 {
            let fields: &[_] = if number > 1 { &[("refused", "")] } else { &[] };
            let expected = if number > 1 { StatusCode::BAD_GATEWAY } else { StatusCode::OK };
            assert_eq!(stack.clone().oneshot(request(fields)).await.unwrap().status(), expected);
            assert_eq!((outer.used(), outer.refunds().len()), (number, 0));
        }
    }
}

/// The inner layer is called by another task, where an outer one cannot notice it but by a response.
#[tokio::test]
async fn an_inner_layer_in_another_task_is_noticed_by_its_first_refusal() {
    let outer = Scripted::new();
    let inner = ServiceBuilder::new()
        .buffer::<Request<Body>>(8)
        .layer(layer(&Scripted::new(), "inner"))
        .service(Handler::default().service());
    let stack = layer(&outer, "outer").layer(inner);
    for refused in 1..5 {
        let refusal = stack.clone().oneshot(request(&[("dear", "inner")])).await.unwrap();
        assert_eq!(refusal.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!((outer.used(), outer.refunds().len()), (0, refused));
    }
    assert_eq!(stack.oneshot(request(&[])).await.unwrap().status(), StatusCode::OK);
    assert_eq!(outer.used(), 1);
}

#[tokio::test]
async fn one_refused_client_does_not_use_up_what_all_share() {
    let limiter = memory();
    let everyone = Policy::new("everyone", hourly(100)).unwrap();
    let stack = ServiceBuilder::new()
        .layer(RateLimitLayer::new(limiter.clone(), everyone, key::global()))
        .layer(layer_fn(|inner| between("between", inner)))
        .layer(RateLimitLayer::new(limiter, hourly(10), key::header("client")))
        .service(Handler::default().service());
    for greedy in 0..10_000 {
        let response = stack.clone().oneshot(request(&[("client", "greedy")])).await.unwrap();
        assert_eq!(response.status() == StatusCode::OK, greedy < 10);
    }
    for client in ["a", "b", "c", "d", "e", "f", "g", "h", "i"] {
        for _ in 0..10 {
            let response = stack.clone().oneshot(request(&[("client", client)])).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
        }
    }
    let one_too_many = stack.clone().oneshot(request(&[("client", "j")])).await.unwrap();
    assert_eq!(one_too_many.status(), StatusCode::TOO_MANY_REQUESTS);
}

/// A hundred clients of 10 requests a second each, under 10 a second for each and 2,000 for all, beside one of 10,000.
#[tokio::test]
async fn clients_within_their_limit_see_no_refusal_beside_one_that_hammers() {
    let client = |request: &http::request::Parts| Key::of(request.headers.get("client"));
    for apart in [true, false] {
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().clock(clock.clone()).build().unwrap();
        let everyone = Policy::new("everyone", Quota::per_second(2_000)).unwrap();
        let each = Policy::new("each", Quota::per_second(10)).unwrap();
        let handler = Handler::default().service();
        let outer = RateLimitLayer::new(limiter.clone(), everyone, key::global());
        let boxed = |response: Response<_>| response.map(|_| Body::default());
        let stack: Boxed = if apart {
            let inner = RateLimitLayer::new(limiter, each, client);
            let layers =
                ServiceBuilder::new().layer(outer).layer(layer_fn(|inner| between("between", inner))).layer(inner);
            ServiceExt::<Request<Body>>::boxed_clone(layers.service(handler).map_response(boxed))
        } else {
            ServiceExt::<Request<Body>>::boxed_clone(outer.and(each, client).layer(handler).map_response(boxed))
        };
        let names: Vec<HeaderValue> = (0..100).map(HeaderValue::from).collect();
        let asked = |client: &HeaderValue| {
            let mut request = request(&[]);
            request.headers_mut().insert("client", client.clone());
            request
        };
        let (greedy, mut passed) = (HeaderValue::from_static("greedy"), 0);
        for millisecond in 0..3_000 {
            for _ in 0..10 {
                let response = stack.clone().oneshot(asked(&greedy)).await.unwrap();
                passed += u32::from(response.status() == StatusCode::OK);
            }
            let response = stack.clone().oneshot(asked(&names[millisecond % 100])).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK, "{millisecond} ms, apart: {apart}");
            clock.advance(Duration::from_millis(1));
        }
        // Its burst, and ten a second.
        assert_eq!(passed, 10 + 29, "apart: {apart}");
    }
}

/// Each over a limiter of its own, under one name: the field has one item for it, the stricter one.
#[tokio::test]
async fn one_name_in_two_layers_is_listed_once_as_the_stricter_stands() {
    for [outer, inner] in [[5, 50], [50, 5]] {
        let limit = |limit| {
            let policy = Policy::new("api", hourly(limit)).unwrap();
            RateLimitLayer::new(memory(), policy, key::global()).headers(Headers::draft_11().and(Headers::github()))
        };
        let stack = ServiceBuilder::new().layer(limit(outer)).layer(limit(inner)).service(Handler::default().service());
        let response = stack.oneshot(request(&[])).await.unwrap();
        let field = |name: &str| response.headers()[name].to_str().unwrap();
        assert_eq!(field("ratelimit"), "\"api\";r=4;t=2880");
        assert_eq!((field("x-ratelimit-limit"), field("x-ratelimit-remaining")), ("5", "4"));
    }
}

#[tokio::test]
async fn the_fields_of_composed_layers_are_merged() {
    let headers = || Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds));
    let limit = |name, limit| {
        let policy = Policy::new(name, hourly(limit)).unwrap();
        RateLimitLayer::new(memory(), policy, key::global()).headers(headers())
    };
    let stack = ServiceBuilder::new()
        .layer(limit("outer", 3_600))
        .layer(limit("middle", 60))
        .layer(limit("inner", 1))
        .service(Handler::default().service());
    let fields = async |expected: StatusCode| {
        let response = stack.clone().oneshot(request(&[])).await.unwrap();
        assert_eq!(response.status(), expected);
        ["ratelimit", "ratelimit-policy", "x-ratelimit-limit", "x-ratelimit-remaining", "retry-after"].map(|name| {
            let values: Vec<_> =
                response.headers().get_all(name).iter().map(|v| v.to_str().unwrap().to_owned()).collect();
            values.join(" + ")
        })
    };
    let policies = "\"inner\";q=1;w=3600, \"middle\";q=60;w=3600, \"outer\";q=3600;w=3600";
    let passed = "\"inner\";r=0;t=3600, \"middle\";r=59;t=3540, \"outer\";r=3599;t=3599";
    assert_eq!(fields(StatusCode::OK).await, [passed, policies, "1", "0", ""]);
    for _ in 0..5 {
        // What is given back is told so: as much remains as before.
        assert_eq!(fields(StatusCode::TOO_MANY_REQUESTS).await, [passed, policies, "1", "0", "3600"]);
    }
}

/// Calls and polls once; then the client is gone.
fn poll_once<S>(mut service: S, request: Request<Body>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let _ = catch_unwind(AssertUnwindSafe(move || {
        let mut context = Context::from_waker(Waker::noop());
        assert!(service.poll_ready(&mut context).is_ready());
        let mut response = Box::pin(service.call(request));
        let _ = response.as_mut().poll(&mut context);
    }));
}

/// A request, and what befalls it.
#[derive(Clone, Debug)]
struct Fate {
    /// Which layer refuses it, if one does.
    refused_by: usize,
    handler: usize,
    /// What the middleware around the inner and the middle layer does on the way out.
    between: [usize; 2],
    /// Whether it is polled at all.
    polled: bool,
    /// For how many more requests it is kept, if it is not answered, until the client goes away.
    kept: usize,
}

impl Fate {
    /// What stays taken of the outer, the middle and the inner layer.
    fn charges(&self) -> [u64; 3] {
        let panics_in_call = self.between.map(|what| BETWEEN[what] == "panic in call");
        match (self.refused_by, panics_in_call, self.polled) {
            (1.., _, _) => [0, 0, 0],
            // What called the one that panicked cannot know what it has done; what that one called was never polled.
            (0, [true, _], _) => [1, 1, 0],
            (0, [false, true], _) => [1, 0, 0],
            (0, [false, false], polled) => [u64::from(polled); 3],
        }
    }
}

const LAYERS: [&str; 4] = ["", "outer", "middle", "inner"];
const HANDLER: [&str; 3] = ["", "linger", "panic"];
const BETWEEN: [&str; 4] = ["", "linger", "panic", "panic in call"];

fn fate() -> impl Strategy<Value = Fate> {
    let numbers = (0..LAYERS.len(), 0..HANDLER.len(), 0..BETWEEN.len(), 0..BETWEEN.len());
    (numbers, any::<bool>(), any::<bool>(), 0..5_usize).prop_map(|(numbers, polled, also, kept)| Fate {
        refused_by: numbers.0,
        handler: numbers.1,
        between: [numbers.2, numbers.3],
        polled: polled || also,
        kept,
    })
}

/// Quotas of every algorithm, of plenty in a long period. But for the leaky queue, which gives nothing back once somebody
/// has come after: that one was told its departure.
fn every_algorithm() -> Vec<Quota> {
    let (limit, day) = (5_000, Duration::from_secs(86_400));
    vec![
        Quota::token_bucket(limit, day).unwrap(),
        Quota::step_bucket(limit, day).unwrap(),
        Quota::gcra(limit, day).unwrap().burst(limit).unwrap(),
        Quota::leaky_bucket(limit, day).unwrap(),
        Quota::fixed_window(limit, day).unwrap(),
        Quota::sliding_window(limit, day).unwrap(),
        Quota::sliding_window(limit, day).unwrap().buckets(24).unwrap(),
        Quota::sliding_log(limit, day).unwrap(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Three layers over one limiter, with middleware in between that builds every response anew.
    #[test]
    fn the_sum_of_charges_is_the_sum_of_what_passed(
        algorithm in 0..8_usize,
        fates in proptest::collection::vec(fate(), 1..80),
    ) {
        let quota = every_algorithm()[algorithm];
        let (limiter, handler) = (memory(), Handler::default());
        let limit = |name| RateLimitLayer::new(limiter.clone(), plenty(name, quota), key::global());
        let mut stack = ServiceBuilder::new()
            .layer(layer_fn(|inner| between("outside", inner)))
            .layer(limit("outer"))
            .layer(layer_fn(|inner| between("between-outer", inner)))
            .layer(limit("middle"))
            .layer(layer_fn(|inner| between("between-inner", inner)))
            .layer(limit("inner"))
            .service(handler.service());
        let mut context = Context::from_waker(Waker::noop());
        let mut kept: Vec<(usize, Answer)> = Vec::new();
        poll_once(stack.clone(), request(&[]));
        let mut expected = [1, 1, 1];
        for fate in fates {
            let asked = request(&[
                ("dear", LAYERS[fate.refused_by]),
                ("handler", HANDLER[fate.handler]),
                ("between-inner", BETWEEN[fate.between[0]]),
                ("between-outer", BETWEEN[fate.between[1]]),
            ]);
            let pending = catch_unwind(AssertUnwindSafe(|| {
                let mut response: Answer = Box::pin(stack.call(asked));
                (fate.polled && response.as_mut().poll(&mut context).is_pending()).then_some(response)
            }));
            kept.retain_mut(|(left, _)| {
                *left = left.saturating_sub(1);
                *left > 0
            });
            if let Ok(Some(response)) = pending {
                kept.push((fate.kept, response));
            }
            for (sum, charge) in expected.iter_mut().zip(fate.charges()) {
                *sum += charge;
            }
        }
        drop(kept);
        let charged = ["outer", "middle", "inner"].map(|name| {
            let policy = Policy::new(name, quota).unwrap();
            policy.quota().capacity() - limiter.peek_one(&policy, &Key::global(), 0).remaining()
        });
        prop_assert_eq!(charged, expected, "{}", quota);
        prop_assert_eq!(handler.served(), expected[2]);
    }
}
