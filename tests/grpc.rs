//! A gRPC client understands what the layer says.

mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{Request, Response};
use support::Scripted;
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower::{Layer, ServiceExt};
use tower_ratelimit::{Policy, Quota, RateLimitLayer, key};

/// Answers a text with itself.
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
            let echo = tower::service_fn(|request: tonic::Request<String>| async {
                Ok::<_, Status>(tonic::Response::new(request.into_inner()))
            });
            Ok(tonic::server::Grpc::new(ProstCodec::default()).unary(echo, request).await)
        })
    }
}

async fn serve(layer: RateLimitLayer<Scripted>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(Server::builder().layer(layer).add_service(Echo).serve_with_incoming(incoming));
    address
}

async fn connect(address: SocketAddr) -> tonic::client::Grpc<Channel> {
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap().connect_timeout(Duration::from_secs(5));
    tonic::client::Grpc::new(endpoint.connect().await.unwrap())
}

async fn echo(client: &mut tonic::client::Grpc<Channel>, text: &str) -> Result<String, Status> {
    client.ready().await.map_err(|error| Status::unknown(error.to_string()))?;
    let path = PathAndQuery::from_static("/test.Echo/Echo");
    let codec = ProstCodec::<String, String>::default();
    client.unary(tonic::Request::new(text.to_owned()), path, codec).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_client_sees_resource_exhausted() {
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
async fn a_client_without_a_key_is_not_told_to_come_again() {
    let layer = RateLimitLayer::new(Scripted::new(), Quota::per_minute(1), key::header("x-api-key"));
    let mut client = connect(serve(layer).await).await;
    let status = echo(&mut client, "hello").await.unwrap_err();
    assert!(!matches!(status.code(), Code::Ok | Code::ResourceExhausted | Code::Unavailable), "{status:?}");
}

#[tokio::test]
async fn a_failing_limiter_is_unavailable() {
    let limiter = Scripted::new();
    limiter.fail(true);
    let mut client = connect(serve(RateLimitLayer::new(limiter, Quota::per_minute(1), key::global())).await).await;
    assert_eq!(echo(&mut client, "hello").await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn rules_can_tell_methods_apart() {
    let other = Policy::new("other", Quota::per_minute(0)).unwrap();
    let other = other.when(|request| request.uri.path() == "/test.Echo/Other");
    let mut client = connect(serve(RateLimitLayer::new(Scripted::new(), other, key::global())).await).await;
    assert_eq!(echo(&mut client, "hello").await.unwrap(), "hello");
}

#[tokio::test]
async fn one_layer_serves_grpc_and_http_alike() {
    let limiter = Scripted::new();
    let layer = RateLimitLayer::new(limiter.clone(), Quota::per_minute(2), key::global());
    let router = axum::Router::new().route("/", axum::routing::get(|| async {})).layer(layer.clone());
    let mut client = connect(serve(layer).await).await;
    assert!(echo(&mut client, "hello").await.is_ok());
    let request = || Request::new(axum::body::Body::empty());
    assert_eq!(router.clone().oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(router.oneshot(request()).await.unwrap().status(), 429);
    assert_eq!(echo(&mut client, "again").await.unwrap_err().code(), Code::ResourceExhausted);
}

#[tokio::test]
async fn a_clients_own_limit_answers_before_the_server_is_asked() {
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
