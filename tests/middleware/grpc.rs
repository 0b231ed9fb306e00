//! tonic clients understand refusals, and gRPC calls are charged and settled.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{Request, Response};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::{LayerExt as _, Routes};
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt as _;
use tonic_web::GrpcWebLayer;
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceBuilder};
use tower_ratelimit::{
    Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, Timer},
    key,
    limiter::Limiter,
    middleware::{Access, AccessList, Usage},
    observe::{Outcome, OutcomeKind},
};

use crate::support::Scripted;
use crate::support::waiting::Skipping;

/// A service that answers a text with the same text.
#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl tower::Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(async move {
            let degraded =
                request.extensions().get().is_some_and(|outcome: &Outcome| outcome.kind() == OutcomeKind::Degraded);
            let bill = request.extensions().get::<Usage>().cloned();
            if request.uri().path().ends_with("/Three") {
                let three = tower::service_fn(move |request: tonic::Request<String>| {
                    let bill = bill.clone();
                    let texts = vec![request.into_inner(); 3];
                    let stream = tokio_stream::iter(texts).map(move |text| {
                        bill.iter().for_each(|bill| {
                            bill.add(10);
                        });
                        Ok::<_, Status>(text)
                    });
                    async { Ok::<_, Status>(tonic::Response::new(stream)) }
                });
                return Ok(tonic::server::Grpc::new(ProstCodec::default()).server_streaming(three, request).await);
            }
            if request.uri().path().ends_with("/Login") {
                let login = tower::service_fn(|request: tonic::Request<String>| async move {
                    match request.into_inner().as_str() {
                        "right" => Ok(tonic::Response::new("welcome".to_owned())),
                        _ => Err(Status::unauthenticated("wrong")),
                    }
                });
                return Ok(tonic::server::Grpc::new(ProstCodec::default()).unary(login, request).await);
            }
            let echo = tower::service_fn(move |request: tonic::Request<String>| async move {
                let text = if degraded { "less".to_owned() } else { request.into_inner() };
                Ok::<_, Status>(tonic::Response::new(text))
            });
            Ok(tonic::server::Grpc::new(ProstCodec::default()).unary(echo, request).await)
        })
    }
}

async fn serve<L: Limiter + Clone>(layer: RateLimitLayer<L>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(Server::builder().layer(layer).add_service(Echo).serve_with_incoming(incoming));
    address
}

/// The layer limits one service of a server only.
#[tokio::test]
async fn limited_service_keeps_its_name_for_tonic() {
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1), key::global());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(Server::builder().add_service(layer.layer(Echo)).serve_with_incoming(incoming));
    let mut client = connect(address).await;
    assert_eq!(echo(&mut client, "first").await.unwrap(), "first");
    assert_eq!(echo(&mut client, "second").await.unwrap_err().code(), Code::ResourceExhausted);
}

/// Allows one call, and counts the bytes of its response.
fn one_call() -> RateLimitLayer<MemoryLimiter> {
    let bytes = Rule::new("bytes", Quota::per_hour(1_000)).unwrap().settle_by_body();
    RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1), key::global()).and(bytes, key::global())
}

/// The bytes that were counted: a message of a text has 5 bytes before it, and 2 within it.
async fn counted(limit: &RateLimitLayer<MemoryLimiter>) -> u64 {
    let statuses = limit.peek(&tower_ratelimit::Key::global()).await.unwrap();
    let (_, bytes) = statuses.iter().find(|(policy, _)| policy.name() == "bytes").unwrap();
    bytes.limit() - bytes.remaining()
}

async fn serve_routes(routes: Routes) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = Server::builder().accept_http1(true).layer(GrpcWebLayer::new()).add_routes(routes);
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

#[tokio::test]
async fn tonic_takes_the_layer_in_each_place() {
    let places: [fn(RateLimitLayer<MemoryLimiter>) -> Routes; 6] = [
        |limit| Routes::new(limit.layer(Echo)),
        |limit| Routes::new(limit.named_layer(Echo)),
        |limit| Routes::new(limit.wrap_body().layer(Echo)),
        |limit| Routes::new(ServiceBuilder::new().option_layer(Some(limit)).named_layer(Echo)),
        |limit| Routes::from(Routes::new(Echo).into_axum_router().layer(limit)),
        |limit| Routes::new(BoxedEcho(BoxCloneSyncService::new(limit.layer(Echo)))),
    ];
    for place in places {
        let limit = one_call();
        let mut client = connect(serve_routes(place(limit.clone())).await).await;
        assert_eq!(echo(&mut client, "hello").await.unwrap(), "hello");
        assert_eq!(counted(&limit).await, 12);
        assert_eq!(echo(&mut client, "again").await.unwrap_err().code(), Code::ResourceExhausted);
        assert_eq!(counted(&limit).await, 12);
    }
}

/// A service whose type says nothing of the layer.
#[derive(Clone)]
struct BoxedEcho(BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>);

impl NamedService for BoxedEcho {
    const NAME: &'static str = Echo::NAME;
}

impl tower::Service<Request<Body>> for BoxedEcho {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.call(request)
    }
}

#[tokio::test]
async fn grpc_web_takes_the_layer_inside_of_it() {
    let limit = one_call();
    let address = serve_routes(Routes::new(limit.layer(Echo))).await;
    let message = bytes::Bytes::from_static(b"\0\0\0\0\x07\x0a\x05hello");
    let request = || {
        let request = Request::post("/test.Echo/Echo").header("host", "test");
        let request = request.header("content-type", "application/grpc-web+proto");
        request.body(http_body_util::Full::new(message.clone())).unwrap()
    };
    let stream = hyper_util::rt::TokioIo::new(tokio::net::TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let passed = sender.send_request(request()).await.unwrap();
    assert_eq!((passed.status(), passed.headers().get("grpc-status")), (http::StatusCode::OK, None));
    let body = http_body_util::BodyExt::collect(passed).await.unwrap().to_bytes();
    assert!(body.starts_with(&message), "{body:?}");
    assert_eq!(counted(&limit).await, 12);
    let refused = sender.send_request(request()).await.unwrap();
    assert_eq!((refused.status(), &refused.headers()["grpc-status"]), (http::StatusCode::OK, &"8".parse().unwrap()));
}

/// The layer limits what a client sends. The refusal never leaves the client.
#[tokio::test]
async fn client_channel_takes_the_layer() {
    let address = serve_routes(Routes::new(Echo)).await;
    let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let limit = one_call();
    let mut client = tonic::client::Grpc::new(limit.layer(channel));
    for expected in [None, Some(Code::ResourceExhausted)] {
        client.ready().await.unwrap();
        let path = PathAndQuery::from_static("/test.Echo/Echo");
        let codec = ProstCodec::<String, String>::default();
        let answer = client.unary(tonic::Request::new("hello".to_owned()), path, codec).await;
        assert_eq!(answer.err().map(|status| status.code()), expected);
        assert_eq!(counted(&limit).await, 12);
    }
}

async fn connect(address: SocketAddr) -> tonic::client::Grpc<Channel> {
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap().connect_timeout(Duration::from_secs(60));
    tonic::client::Grpc::new(endpoint.connect().await.unwrap())
}

async fn echo(client: &mut tonic::client::Grpc<Channel>, text: &str) -> Result<String, Status> {
    call(client, "/test.Echo/Echo", text).await
}

async fn call(client: &mut tonic::client::Grpc<Channel>, path: &'static str, text: &str) -> Result<String, Status> {
    answer(client, path, text).await.map(tonic::Response::into_inner)
}

async fn answer(
    client: &mut tonic::client::Grpc<Channel>,
    path: &'static str,
    text: &str,
) -> Result<tonic::Response<String>, Status> {
    client.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
    let path = PathAndQuery::from_static(path);
    let codec = ProstCodec::<String, String>::default();
    client.unary(tonic::Request::new(text.to_owned()), path, codec).await
}

#[tokio::test]
async fn client_gets_resource_exhausted() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        let address = serve(RateLimitLayer::new(limiter, Quota::per_minute(1), key::global())).await;
        let mut client = connect(address).await;
        assert_eq!(echo(&mut client, "hello").await.unwrap(), "hello");
        let status = echo(&mut client, "again").await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.metadata().contains_key("retry-after"));
    }
}

#[tokio::test]
async fn client_without_a_key_gets_no_retry_time() {
    let layer = RateLimitLayer::new(Scripted::new(), Quota::per_minute(1), key::header("x-api-key"));
    let mut client = connect(serve(layer).await).await;
    let status = echo(&mut client, "hello").await.unwrap_err();
    assert!(!matches!(status.code(), Code::Ok | Code::ResourceExhausted | Code::Unavailable), "{status:?}");
}

#[tokio::test]
async fn streaming_call_is_settled_when_its_stream_has_ended() {
    let limiter = Scripted::new();
    let tokens = Rule::new("tokens", Quota::per_minute(1_000)).unwrap().cost(|_| 100).settle_by_usage();
    let layer = RateLimitLayer::new(limiter.clone(), Quota::per_minute(9), key::global()).and(tokens, key::global());
    let mut client = connect(serve(layer).await).await;
    client.ready().await.unwrap();
    let path = PathAndQuery::from_static("/test.Echo/Three");
    let codec = ProstCodec::<String, String>::default();
    let stream = client.server_streaming(tonic::Request::new("hello".to_owned()), path, codec).await.unwrap();
    let mut stream = stream.into_inner();
    let mut messages = 0;
    while stream.message().await.unwrap().is_some() {
        messages += 1;
    }
    assert_eq!((messages, limiter.takes().len()), (3, 1));
    // One call and three messages of 10 tokens each. The server settles when it ends the stream, or
    // just after.
    let settled = async {
        while limiter.used() != 1 + 30 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), settled).await.unwrap();
}

#[tokio::test]
async fn failed_calls_alone_can_be_counted_by_their_status() {
    let limiter = Scripted::new();
    let failed = Rule::new("failed", Quota::per_minute(2))
        .unwrap()
        .charge_when(|response| response.headers.get("grpc-status").is_some_and(|status| status == "16"));
    let mut client = connect(serve(RateLimitLayer::new(limiter.clone(), failed, key::global())).await).await;
    for (password, code, used) in [
        ("right", Code::Ok, 0),
        ("wrong", Code::Unauthenticated, 1),
        ("right", Code::Ok, 1),
        ("wrong", Code::Unauthenticated, 2),
        ("right", Code::ResourceExhausted, 2),
    ] {
        let answer = call(&mut client, "/test.Echo/Login", password).await;
        assert_eq!(answer.map_or_else(|status| status.code(), |_| Code::Ok), code, "{password}");
        assert_eq!(limiter.used(), used, "{password}");
    }
}

#[tokio::test]
async fn client_denied_by_a_list_gets_permission_denied() {
    let list = AccessList::new();
    list.set_key(Key::global(), Access::Deny);
    let layer = RateLimitLayer::new(Scripted::new(), Quota::per_minute(1), key::global()).access(&list, key::global());
    let mut client = connect(serve(layer).await).await;
    assert_eq!(echo(&mut client, "hello").await.unwrap_err().code(), Code::PermissionDenied);
}

#[tokio::test]
async fn failing_limiter_is_unavailable() {
    let limiter = Scripted::new();
    limiter.fail(true);
    let mut client = connect(serve(RateLimitLayer::new(limiter, Quota::per_minute(1), key::global())).await).await;
    assert_eq!(echo(&mut client, "hello").await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn rules_can_tell_methods_apart() {
    let other = Rule::new("other", Quota::per_minute(0)).unwrap();
    let other = other.when(|request| request.uri.path() == "/test.Echo/Other");
    let mut client = connect(serve(RateLimitLayer::new(Scripted::new(), other, key::global())).await).await;
    assert_eq!(echo(&mut client, "hello").await.unwrap(), "hello");
}

#[tokio::test]
async fn layer_serves_tonic_and_axum_in_one_router() {
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(2), key::peer_ip());
    let router = Routes::new(Echo).into_axum_router().route("/", axum::routing::get(|| async {})).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(axum::serve(listener, service).into_future());

    let mut client = connect(address).await;
    let stream = hyper_util::rt::TokioIo::new(tokio::net::TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut get = async || {
        let request = Request::get("/").header("host", "test").body(http_body_util::Empty::<bytes::Bytes>::new());
        sender.send_request(request.unwrap()).await.unwrap()
    };
    assert_eq!(echo(&mut client, "hello").await.unwrap(), "hello");
    assert_eq!(get().await.status(), 200);
    let refused = get().await;
    assert_eq!(refused.status(), http::StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["content-type"], "application/problem+json");
    let refused = echo(&mut client, "again").await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.get_details_retry_info().is_some(), "{refused:?}");
}

#[tokio::test]
async fn client_side_layer_answers_without_calling_the_server() {
    let served = Scripted::new();
    let address = serve(RateLimitLayer::new(served.clone(), Quota::per_minute(9), key::global())).await;
    let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let layer = RateLimitLayer::new(Scripted::new(), Quota::per_minute(1), key::global());
    let mut client = tonic::client::Grpc::new(layer.layer(channel));
    let path = || PathAndQuery::from_static("/test.Echo/Echo");
    let mut codes = Vec::new();
    for _ in 0..2 {
        client.ready().await.unwrap();
        let codec = ProstCodec::<String, String>::default();
        let answer = client.unary(tonic::Request::new("hello".to_owned()), path(), codec).await;
        codes.push(answer.map_or_else(|status| status.code(), |_| Code::Ok));
    }
    assert_eq!(codes, [Code::Ok, Code::ResourceExhausted]);
    assert_eq!(served.takes().len(), 1);
}

#[cfg(feature = "tonic")]
#[tokio::test]
async fn tonics_connect_info_is_the_peer() {
    let limiter = Scripted::new();
    let layer = RateLimitLayer::new(limiter.clone(), Quota::per_minute(1), key::peer_ip());
    let mut client = connect(serve(layer).await).await;
    assert_eq!(echo(&mut client, "hello").await.unwrap(), "hello");
    let local = tower_ratelimit::Key::of(std::net::Ipv4Addr::LOCALHOST);
    assert_eq!(Some(limiter.takes()[0][0].1.clone()), local);
}

// Modes ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

const HOUR: Duration = Duration::from_secs(3_600);

fn named(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

/// One call in an hour.
fn hourly() -> Rule {
    named("client", Quota::fixed_window(1, HOUR).unwrap())
}

/// Returns the answers to calls through a layer of this rule: the text and the `RateLimit` header,
/// or the status.
struct Calls {
    client: tonic::client::Grpc<Channel>,
    clock: ManualClock,
    timer: Skipping,
}

impl Calls {
    async fn through(rule: Rule) -> Self {
        let (clock, timer) = (ManualClock::new(), Skipping::default());
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let is_queue = rule.policies()[0].quota().algorithm() == tower_ratelimit::quota::Algorithm::LeakyQueue;
        let layer = RateLimitLayer::new(limiter, rule, key::global());
        let layer = if is_queue { layer.timer(timer.clone()) } else { layer };
        Self { client: connect(serve(layer).await).await, clock, timer }
    }

    async fn next(&mut self) -> Result<(String, Option<String>), Box<Status>> {
        let answer = answer(&mut self.client, "/test.Echo/Echo", "hello").await?;
        let field = answer.metadata().get("ratelimit").map(|field| field.to_str().unwrap().to_owned());
        Ok((answer.into_inner(), field))
    }

    async fn passes(&mut self, text: &str, field: Option<&str>) {
        assert_eq!(self.next().await.unwrap(), (text.to_owned(), field.map(str::to_owned)));
    }

    /// Refused by these policies, with this number of seconds to wait.
    async fn refused(&mut self, seconds: u64, policies: &[&str]) {
        let status = self.next().await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let text = |name| status.metadata().get(name).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(text("retry-after"), Some(seconds.to_string()));
        assert_eq!(text("grpc-retry-pushback-ms"), Some((seconds * 1_000).to_string()));
        let retry = status.get_details_retry_info().unwrap();
        assert_eq!(retry.retry_delay, Some(Duration::from_secs(seconds)));
        let failure = status.get_details_quota_failure().unwrap();
        let subjects: Vec<&str> = failure.violations.iter().map(|violation| violation.subject.as_str()).collect();
        assert_eq!(subjects, policies);
    }
}

#[tokio::test]
async fn shadow_limited_call_is_served_and_not_informed() {
    let mut calls = Calls::through(hourly().mode(Mode::Shadow)).await;
    for _ in 0..3 {
        calls.passes("hello", None).await;
    }
}

#[tokio::test]
async fn degraded_call_is_served_less() {
    let mut calls = Calls::through(hourly().mode(Mode::Degrade)).await;
    let full = Some("\"client\";r=0;t=3600");
    calls.passes("hello", full).await;
    calls.passes("less", full).await;
    calls.clock.advance(HOUR);
    calls.passes("hello", full).await;
}

#[tokio::test]
async fn metered_call_is_served_while_its_meter_has_room() {
    let meter = Policy::new("over", Quota::meter(2, 24 * HOUR).unwrap()).unwrap();
    let mut calls = Calls::through(hourly().overage(meter.name(), *meter.quota()).unwrap()).await;
    for _ in 0..3 {
        calls.passes("hello", Some("\"client\";r=0;t=3600")).await;
    }
    calls.refused(3_600, &["policy:client"]).await;
}

#[tokio::test]
async fn call_of_a_blocked_key_learns_when_the_block_ends() {
    let block = Policy::new("block", Quota::block(2, HOUR, 2 * HOUR).unwrap()).unwrap();
    let mut calls = Calls::through(hourly().block(block.name(), *block.quota()).unwrap()).await;
    calls.passes("hello", Some("\"client\";r=0;t=3600")).await;
    calls.refused(3_600, &["policy:client"]).await;
    calls.refused(7_200, &["policy:client", "policy:block"]).await;
    calls.clock.advance(HOUR);
    calls.refused(3_600, &["policy:block"]).await;
    calls.clock.advance(HOUR);
    calls.passes("hello", Some("\"client\";r=0;t=3600")).await;
}

#[tokio::test]
async fn call_waits_for_its_departure_or_is_refused_by_a_full_queue() {
    let queue = Quota::leaky_queue(60, HOUR).unwrap().queue(2).unwrap();
    let mut calls = Calls::through(named("queue", queue)).await;
    for (left, departs) in [(2, 0), (1, 60), (0, 60 + 120)] {
        let answer = calls.next().await.unwrap();
        assert!(answer.1.as_ref().is_some_and(|field| field.starts_with(&format!("\"queue\";r={left}"))), "{answer:?}");
        assert_eq!(calls.timer.now(), Duration::from_secs(departs), "its own wait after that of the one before");
    }
    calls.refused(60, &["policy:queue"]).await;
}
