//! No refusal of any kind and shape may be stored by a cache, and none addresses operators.

use std::convert::Infallible;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use axum::routing::get;
use base64::Engine as _;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::util::BoxCloneService;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::middleware::RefusalBody;
use tower_ratelimit::{
    Headers, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Refusals, Rule, Wait, key,
    middleware::{Access, AccessList, Refusal, ResetEncoding},
    observe::{Outcome, OutcomeKind},
};

use crate::support::Scripted;
use crate::support::waiting::Skipping;

type Stack = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

const HOUR: Duration = Duration::from_secs(3_600);

async fn served(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::default()))
}

fn named(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

fn memory() -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).build().unwrap()
}

/// A service, and the number of requests after which it refuses.
struct Way {
    name: &'static str,
    kind: OutcomeKind,
    passing: usize,
    stack: fn(Settings) -> Stack,
}

type Settings = (Refusals, Headers);

/// A layer around a service that answers everything with 200.
fn stack<L>(layer: RateLimitLayer<L>, (refusals, headers): Settings) -> Stack
where
    L: tower_ratelimit::limiter::Limiter + Clone,
{
    BoxCloneService::new(layer.refusals(refusals).headers(headers).layer(service_fn(served)))
}

fn ways() -> Vec<Way> {
    let way = |name, kind, passing, stack| Way { name, kind, passing, stack };
    vec![
        way("limited", OutcomeKind::Limited, 1, |settings| {
            stack(RateLimitLayer::new(memory(), named("client", Quota::per_hour(1)), key::global()), settings)
        }),
        way("limited, answered later", OutcomeKind::Limited, 1, |settings| {
            stack(RateLimitLayer::new(Scripted::new().later(), Quota::per_hour(1), key::global()), settings)
        }),
        way("limited by two policies", OutcomeKind::Limited, 1, |settings| {
            let rules = [Quota::per_minute(1), Quota::per_hour(1)];
            let rule = Rule::all_of("client", rules).unwrap();
            stack(RateLimitLayer::new(memory(), rule, key::global()), settings)
        }),
        way("no wait helps", OutcomeKind::Limited, 0, |settings| {
            let rule = named("client", Quota::per_hour(1)).cost(|_| 2);
            stack(RateLimitLayer::new(memory(), rule, key::global()), settings)
        }),
        way("blocked", OutcomeKind::Blocked, 2, |settings| {
            let block = Policy::new("block", Quota::block(1, HOUR, HOUR).unwrap()).unwrap();
            let rule = named("client", Quota::per_hour(1)).block(block.name(), *block.quota()).unwrap();
            stack(RateLimitLayer::new(memory(), rule, key::global()), settings)
        }),
        way("the queue is full", OutcomeKind::Limited, 2, |settings| {
            let queue = named("queue", Quota::leaky_queue(1, HOUR).unwrap().queue(1).unwrap());
            stack(RateLimitLayer::new(memory(), queue, key::global()).timer(Skipping::default()), settings)
        }),
        way("denied by a list", OutcomeKind::Denied, 0, |settings| {
            let list = AccessList::new();
            list.set_key(Key::global(), Access::Deny);
            let layer = RateLimitLayer::new(memory(), Quota::per_hour(9), key::global());
            stack(layer.access(&list, key::global()), settings)
        }),
        way("no key", OutcomeKind::KeyMissing, 0, |settings| {
            stack(RateLimitLayer::new(memory(), Quota::per_hour(9), key::header("x-api-key")), settings)
        }),
        way("no peer", OutcomeKind::KeyMissing, 0, |settings| {
            stack(RateLimitLayer::new(memory(), Quota::per_hour(9), key::peer_ip()), settings)
        }),
        way("the limiter failed", OutcomeKind::FailedClosed, 0, |settings| {
            let limiter = Scripted::new();
            limiter.fail(true);
            stack(RateLimitLayer::new(limiter, Quota::per_hour(9), key::global()), settings)
        }),
        way("the limiter failed later", OutcomeKind::FailedClosed, 0, |settings| {
            let limiter = Scripted::new().later();
            limiter.fail(true);
            stack(RateLimitLayer::new(limiter, Quota::per_hour(9), key::global()), settings)
        }),
        way("the overflow is not ready", OutcomeKind::Limited, 1, |(refusals, headers)| {
            let full = GlobalConcurrencyLimitLayer::new(0).layer(service_fn(served));
            let layer = RateLimitLayer::new(memory(), Quota::per_hour(1), key::global()).overflow(full);
            BoxCloneService::new(layer.refusals(refusals).headers(headers).layer(service_fn(served)))
        }),
    ]
}

/// A request's method, version and headers, and whether it is gRPC's or gRPC-Web's.
#[derive(Debug)]
struct Shape {
    method: Method,
    version: Version,
    fields: Vec<(&'static str, &'static str)>,
    is_grpc: bool,
}

fn shapes() -> Vec<Shape> {
    let mut shapes = Vec::new();
    let methods =
        [Method::GET, Method::HEAD, Method::POST, Method::PUT, Method::OPTIONS, Method::from_bytes(b"GRPC").unwrap()];
    for method in methods {
        let is_post = method == Method::POST;
        for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2, Version::HTTP_3] {
            let is_new = matches!(version, Version::HTTP_2 | Version::HTTP_3);
            for te in [None, Some("trailers"), Some("gzip")] {
                for (content_types, is_grpc, is_web) in [
                    (&[][..], false, false),
                    (&["application/json"], false, false),
                    (&["application/grpc"], true, false),
                    (&["Application/gRPC+proto;a=b"], true, false),
                    (&["application/grpc-web"], false, true),
                    (&["application/grpc-web-text+proto"], false, true),
                    (&["application/grpcfoo"], false, false),
                    (&["application/grpc, text/html"], false, false),
                    (&["application/grpc", "application/grpc"], false, false),
                ] {
                    let mut fields: Vec<_> = content_types.iter().map(|kind| ("content-type", *kind)).collect();
                    fields.extend(te.map(|te| ("te", te)));
                    let is_grpc = is_post && (is_web || is_grpc && (is_new || te == Some("trailers")));
                    shapes.push(Shape { method: method.clone(), version, fields, is_grpc });
                }
            }
        }
    }
    shapes
}

impl Shape {
    fn request(&self) -> Request<Body> {
        let request = Request::builder().method(&self.method).version(self.version).uri("/app.js");
        let fields = self.fields.iter();
        fields.fold(request, |request, (name, value)| request.header(*name, *value)).body(Body::default()).unwrap()
    }
}

/// A responder whose answers a cache would like to store.
fn cacheable(refusal: &Refusal<'_>) -> Response<RefusalBody> {
    let mut response = refusal.default_response();
    response.headers_mut().append("cache-control", "public, max-age=600".parse().unwrap());
    response.headers_mut().append("cache-control", "s-maxage=600".parse().unwrap());
    response
}

/// The shapes of refusals, and whether gRPC's shape stays.
fn formats() -> Vec<(&'static str, Settings, bool)> {
    let ours = Headers::default;
    vec![
        ("problem", (Refusals::problem_json(), ours()), true),
        ("json", (Refusals::json(), ours()), true),
        ("text", (Refusals::text(), Headers::none()), true),
        ("503", (Refusals::default().status(StatusCode::SERVICE_UNAVAILABLE), Headers::draft_06()), true),
        ("older", (Refusals::default(), Headers::x_rate_limit(ResetEncoding::ImfDate)), true),
        ("bare", (Refusals::default().grpc_details(false).grpc_pushback(false), ours()), true),
        ("no gRPC", (Refusals::default().grpc(false), ours()), false),
        ("a responder", (Refusals::with(cacheable), ours()), true),
        ("a responder for all", (Refusals::with_all(cacheable), ours()), true),
    ]
}

impl Way {
    /// Returns a service that refuses every further request.
    async fn exhausted(&self, settings: Settings) -> Stack {
        let mut service = (self.stack)(settings);
        for _ in 0..self.passing {
            service.ready().await.unwrap().call(Request::new(Body::default())).await.unwrap();
        }
        service
    }

    async fn refuse(&self, service: &mut Stack, shape: &Shape) -> Response<Bytes> {
        let response = service.ready().await.unwrap().call(shape.request()).await.unwrap();
        let outcome: &Outcome = response.extensions().get().expect("a refusal carries its outcome");
        assert_eq!(outcome.kind(), self.kind, "{}", self.name);
        let (parts, body) = response.into_parts();
        Response::from_parts(parts, body.collect().await.unwrap().to_bytes())
    }
}

#[tokio::test]
async fn refusals_are_never_stored_nor_successes() {
    let (ways, shapes) = (ways(), shapes());
    for (format, settings, keeps_grpc) in formats() {
        for way in &ways {
            let mut service = way.exhausted(settings.clone()).await;
            for shape in &shapes {
                let response = way.refuse(&mut service, shape).await;
                let what = || format!("{}, {format}: {shape:?}: {response:?}", way.name);
                let cache: Vec<_> = response.headers().get_all("cache-control").iter().collect();
                assert_eq!(cache, ["no-store"], "{}", what());
                let is_grpc = shape.is_grpc && keeps_grpc;
                assert_eq!(response.status().is_success(), is_grpc, "{}", what());
                assert_eq!(response.headers().contains_key("grpc-status"), is_grpc, "{}", what());
                assert!(
                    is_grpc || response.status().is_client_error() || response.status().is_server_error(),
                    "{}",
                    what()
                );
            }
        }
    }
}

/// Words for operators and names of the stack, in lower case.
const NOT_FOR_CLIENTS: &[&str] = &[
    "axum",
    "tonic",
    "tower",
    "hyper",
    "rust",
    "crate",
    "::",
    "()",
    "connect_info",
    "make_service",
    "extractor",
    "operator",
    "missingkey",
    "feature",
    "layer",
    "limiter",
    "middleware",
    "redis",
    "memory",
    "store",
    "proxy",
    "proxies",
    "peer",
    "panic",
    "config",
];

#[tokio::test]
async fn refusals_do_not_speak_to_operators() {
    for (format, settings, _) in formats() {
        for way in &ways() {
            let mut service = way.exhausted(settings.clone()).await;
            for shape in shapes().iter().filter(|shape| shape.method == Method::POST) {
                let response = way.refuse(&mut service, shape).await;
                let mut said = String::from_utf8(response.body().to_vec()).unwrap();
                for (name, value) in response.headers() {
                    match name.as_str() {
                        "grpc-status-details-bin" => {
                            let details = base64::engine::general_purpose::STANDARD_NO_PAD.decode(value).unwrap();
                            said += &String::from_utf8_lossy(&details);
                        }
                        "cache-control" => {}
                        _ => said += value.to_str().unwrap(),
                    }
                }
                let said = said.to_lowercase();
                let found = NOT_FOR_CLIENTS.iter().find(|word| said.contains(**word));
                assert_eq!(found, None, "{}, {format}: {said}", way.name);
            }
        }
    }
}

#[tokio::test]
async fn overflow_is_stored_only_if_it_says_so() {
    for (own, expected) in [(None, "no-store"), (Some("max-age=60"), "max-age=60")] {
        let overflow = service_fn(move |_: Request<Body>| async move {
            let mut response = Response::new(Body::default());
            response.headers_mut().extend(own.map(|own| (http::header::CACHE_CONTROL, own.parse().unwrap())));
            Ok::<_, Infallible>(response)
        });
        let layer = RateLimitLayer::new(memory(), Quota::per_hour(1), key::global()).overflow(overflow);
        let service = layer.layer(service_fn(served));
        let first = service.clone().oneshot(Request::new(Body::default())).await.unwrap();
        assert!(!first.headers().contains_key("cache-control"), "the service's own answer is its own business");
        let second = service.oneshot(Request::new(Body::default())).await.unwrap();
        assert_eq!(second.headers()["cache-control"], expected);
    }
}

/// An application's own error type, as in axum.
struct AppError(u64);

impl IntoResponse for AppError {
    fn into_response(self) -> axum::response::Response {
        (StatusCode::IM_A_TEAPOT, [("x-own", "1")], format!("come back in {} s", self.0)).into_response()
    }
}

/// A responder that was moved from a limiter without gRPC answers every refusal.
#[tokio::test]
async fn responder_without_grpc_answers_every_shape() {
    let own = |_: &Refusal<'_>| {
        Response::builder().status(StatusCode::TOO_MANY_REQUESTS).body("slow down".to_owned()).unwrap()
    };
    for (refusals, answers_grpc) in [(Refusals::with(own).grpc(false), true), (Refusals::with(own), false)] {
        for shape in shapes() {
            let layer = RateLimitLayer::new(memory(), named("none", Quota::per_hour(0)), key::global());
            let service = stack(layer, (refusals.clone(), Headers::none()));
            let response = service.oneshot(shape.request()).await.unwrap();
            let is_own = response.status() == StatusCode::TOO_MANY_REQUESTS;
            assert_eq!(is_own, answers_grpc || !shape.is_grpc, "{:?} {:?}", shape.version, shape.fields);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body == "slow down", is_own);
        }
    }
}

#[tokio::test]
async fn refusal_for_an_unknown_time_promises_no_time() {
    let limiter = Scripted::new().without_waits();
    let headers = Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds));
    let layer = RateLimitLayer::new(limiter, named("export", Quota::per_hour(1)), key::global());
    let service = stack(layer, (Refusals::default(), headers));
    let passed = service.clone().oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!((passed.status().as_u16(), &passed.headers()["ratelimit"]), (200, &"\"export\";r=0".parse().unwrap()));
    assert!(!passed.headers().contains_key("x-ratelimit-reset"));

    let refused = service.clone().oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!((refused.status().as_u16(), &refused.headers()["ratelimit"]), (429, &"\"export\";r=0".parse().unwrap()));
    for absent in ["retry-after", "x-ratelimit-reset"] {
        assert!(!refused.headers().contains_key(absent), "{absent}");
    }
    assert_eq!(refused.extensions().get::<Outcome>().unwrap().wait(), Wait::Unknown);
}

#[tokio::test]
async fn responder_is_told_that_a_time_is_unknown() {
    let own = |refusal: &Refusal<'_>| {
        Response::new(Body::from(format!("{:?}, {:?}", refusal.wait(), refusal.retry_after_seconds())))
    };
    let layer =
        RateLimitLayer::new(Scripted::new().without_waits(), named("export", Quota::per_hour(1)), key::global());
    let service = stack(layer, (Refusals::with(own), Headers::none()));
    let _ = service.clone().oneshot(Request::new(Body::empty())).await.unwrap();
    let refused = service.clone().oneshot(Request::new(Body::empty())).await.unwrap();
    assert_eq!(refused.into_body().collect().await.unwrap().to_bytes(), "Unknown, None");
}

#[tokio::test]
async fn responder_answers_with_an_axum_error_type() {
    let own = |refusal: &Refusal<'_>| AppError(refusal.retry_after_seconds().unwrap()).into_response();
    let layer = RateLimitLayer::new(memory(), Quota::per_hour(1), key::global()).refusals(Refusals::with(own));
    let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, app).await });
    let mut answers = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answers.push(answer);
    }
    assert!(answers[0].ends_with("\r\n\r\nhello"), "{}", answers[0]);
    let refusal = &answers[1];
    assert!(refusal.starts_with("HTTP/1.1 418 ") && refusal.ends_with("\r\n\r\ncome back in 3600 s"), "{refusal}");
    for field in ["x-own: 1", "retry-after: 3600", "content-length: 19", "cache-control: no-store"] {
        assert!(refusal.lines().any(|line| line == field), "{field}: {refusal}");
    }
}

#[tokio::test]
async fn own_body_keeps_status_and_headers_of_each_refusal() {
    let body = |refusal: &Refusal<'_>| format!("{} {:?}", refusal.status().as_u16(), refusal.limit());
    for way in ways() {
        let plain = Request::new(Body::default());
        let usual = way.exhausted((Refusals::json(), Headers::default())).await.oneshot(plain).await.unwrap();
        let own = Refusals::json().body(body);
        let plain = Request::new(Body::default());
        let refused = way.exhausted((own, Headers::default())).await.oneshot(plain).await.unwrap();
        assert_eq!(refused.status(), usual.status(), "{}", way.name);
        let names = |response: &Response<Body>| {
            let mut names: Vec<String> = response.headers().keys().map(ToString::to_string).collect();
            names.retain(|name| name != "content-length");
            names.sort_unstable();
            names
        };
        assert_eq!(names(&refused), names(&usual), "{}", way.name);
        assert_eq!(refused.headers()["content-type"], "application/json");
        let text = refused.into_body().collect().await.unwrap().to_bytes();
        let text = std::str::from_utf8(&text).unwrap();
        assert!(text.starts_with(usual.status().as_str()), "{}: {text}", way.name);
        let is_over = [OutcomeKind::Limited, OutcomeKind::Blocked].contains(&way.kind);
        assert_eq!(text.contains("Some"), is_over, "{}: {text}", way.name);
    }
}

#[tokio::test]
async fn limit_of_a_refusal_is_that_of_the_quota() {
    let refusals = Refusals::text().body(|refusal: &Refusal<'_>| format!("{:?}", refusal.limit()));
    let quota = Quota::per_minute(100).burst(1).unwrap();
    let layer = RateLimitLayer::new(memory(), quota, key::global());
    let mut service = stack(layer, (refusals, Headers::none()));
    service.ready().await.unwrap().call(Request::new(Body::default())).await.unwrap();
    let refused = service.ready().await.unwrap().call(Request::new(Body::default())).await.unwrap();
    assert_eq!(refused.into_body().collect().await.unwrap().to_bytes(), "Some(100)");
}
