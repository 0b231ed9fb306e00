//! The layer keeps the response body type of the service inside, or wraps it, in each kind of
//! stack.
//!
//! Each stack gets a request that passes and whose bytes are counted, and a request that is
//! refused.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::error_handling::HandleErrorLayer;
use axum::handler::Handler;
use axum::routing::get;
use axum::{BoxError, Router};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::util::{BoxCloneSyncService, option_layer};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_http::compression::CompressionLayer;
use tower_http::map_response_body::MapResponseBodyLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_ratelimit::middleware::{RateLimit, ResponseBody};
use tower_ratelimit::{Key, MemoryLimiter, Quota, RateLimitLayer, Rule, clock::ManualClock, key};

type Limit = RateLimitLayer<MemoryLimiter>;

/// Allows one request, and counts the bytes of its response.
fn limit() -> Limit {
    let limiter = MemoryLimiter::builder().clock(ManualClock::new()).build().unwrap();
    let requests = Rule::new("requests", Quota::per_hour(1)).unwrap();
    let bytes = Rule::new("bytes", Quota::per_hour(1_000)).unwrap().settle_by_body();
    Limit::new(limiter, requests, key::global()).and(bytes, key::global())
}

async fn counted(limit: &Limit) -> u64 {
    let statuses = limit.peek(&Key::global()).await.unwrap();
    let (_, bytes) = statuses.iter().find(|(policy, _)| policy.name() == "bytes").unwrap();
    bytes.limit() - bytes.remaining()
}

async fn home() -> &'static str {
    "home"
}

fn router() -> Router {
    Router::new().route("/", get(home))
}

async fn answer_full<B>(_: Request<B>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("home")))
}

/// Sends a request that passes and one that is refused.
async fn is_limited<S, B, C>(limit: &Limit, service: S)
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    S::Error: std::fmt::Debug,
    B: Default,
    C: http_body::Body<Data = Bytes>,
    C::Error: std::fmt::Debug,
{
    let passed = service.clone().oneshot(Request::new(B::default())).await.unwrap();
    assert_eq!(passed.status(), StatusCode::OK);
    assert!(passed.headers().contains_key("ratelimit"));
    assert_eq!(passed.into_body().collect().await.unwrap().to_bytes(), "home");
    assert_eq!(counted(limit).await, 4);

    let refused = service.oneshot(Request::new(B::default())).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let length = refused.body().size_hint().exact();
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    assert!(body.starts_with(b"{\"type\":"), "{body:?}");
    assert_eq!(length, Some(body.len() as u64), "for Content-Length");
    assert_eq!(counted(limit).await, 4);
}

#[tokio::test]
async fn axum_takes_the_layer_in_each_place() {
    let places: [fn(Limit) -> Router; 10] = [
        |limit| router().layer(limit),
        |limit| router().route_layer(limit),
        |limit| Router::new().route("/", get(home).layer(limit)),
        |limit| Router::new().route("/", get(home.layer(limit))),
        |limit| Router::new().nest("/nested", router()).fallback_service(limit.layer(router())),
        |limit| Router::new().fallback_service(router().layer(limit)),
        |limit| {
            let stack = ServiceBuilder::new()
                .layer(HandleErrorLayer::new(|error: BoxError| async move { error.to_string() }))
                .buffer(8)
                .layer(limit);
            router().layer(stack)
        },
        |limit| router().layer(option_layer(Some(limit))),
        |limit| router().layer(ServiceBuilder::new().option_layer(Some(limit))),
        |limit| router().layer(ServiceBuilder::new().map_response(|response: Response<Body>| response).layer(limit)),
    ];
    for place in places {
        let limit = limit();
        is_limited::<_, Body, _>(&limit, place(limit.clone())).await;
    }
}

/// The request's path inside of the nested router is `/`.
#[tokio::test]
async fn axum_takes_the_layer_on_a_nested_router() {
    let limit = limit();
    let nested = Router::new().nest("/nested", router().layer(limit.clone()));
    let nested = ServiceBuilder::new()
        .map_request(|mut request: Request<Body>| {
            *request.uri_mut() = http::Uri::from_static("/nested");
            request
        })
        .service(nested);
    is_limited(&limit, nested).await;
}

#[tokio::test]
async fn option_layer_without_the_layer_passes_everything() {
    let app = router().layer(option_layer(None::<Limit>));
    for _ in 0..2 {
        let response = app.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert!(response.headers().get("ratelimit").is_none());
    }
}

#[tokio::test]
async fn limited_service_is_boxed_as_the_service_inside() {
    fn generic<S, C>(
        limit: &Limit,
        service: S,
    ) -> impl Service<Request<Body>, Response = Response<C>, Error = Infallible> + Clone
    where
        S: Service<Request<Body>, Response = Response<C>, Error = Infallible> + Clone,
        C: ResponseBody,
    {
        limit.layer(service)
    }
    let limit1 = limit();
    is_limited(&limit1, generic(&limit1, router())).await;
    type Boxed = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;
    let limit2 = limit();
    is_limited(&limit2, Boxed::new(limit2.layer(router()))).await;
    let limit3 = limit();
    is_limited(&limit3, limit3.layer(Boxed::new(router()))).await;
    let _nameable: Option<RateLimit<Boxed, MemoryLimiter>> = None;
}

#[tokio::test]
async fn other_middleware_may_lie_on_both_sides() {
    let timeout = || TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_secs(1));
    let limit1 = limit();
    let kept = ServiceBuilder::new()
        .layer(TraceLayer::new_for_http())
        .layer(CompressionLayer::new())
        .layer(timeout())
        .layer(limit1.clone())
        .layer(timeout())
        .service(router());
    is_limited::<_, Body, _>(&limit1, kept).await;

    let limit2 = limit();
    let wrapped = ServiceBuilder::new()
        .layer(timeout())
        .layer(limit2.clone().wrap_body())
        .layer(CompressionLayer::new())
        .layer(TraceLayer::new_for_http())
        .service(router());
    is_limited::<_, Body, _>(&limit2, wrapped).await;

    let limit3 = limit();
    let mapped = ServiceBuilder::new()
        .layer(limit3.clone())
        .layer(MapResponseBodyLayer::new(Body::new))
        .layer(CompressionLayer::new())
        .layer(TraceLayer::new_for_http())
        .service(router());
    is_limited::<_, Body, Body>(&limit3, mapped).await;
}

#[tokio::test]
async fn wrapped_bodies_may_be_of_any_type() {
    let limit1 = limit();
    let full = limit1.clone().wrap_body().layer(service_fn(answer_full::<Empty<Bytes>>));
    is_limited(&limit1, full).await;

    // A proxy answers with hyper's `Incoming`.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, router()).await });
    let proxy = service_fn(move |request: Request<Body>| async move {
        let stream = TcpStream::connect(upstream).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        sender.send_request(request).await
    });
    let limit2 = limit();
    is_limited(&limit2, limit2.clone().wrap_body().layer(proxy)).await;
}

#[tokio::test]
async fn plain_hyper_serves_a_wrapped_body() {
    let limit = limit();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = limit.clone().wrap_body().layer(service_fn(answer_full::<hyper::body::Incoming>));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service.clone())).await;
        }
    });
    let mut answers = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answers.push(answer);
        assert_eq!(counted(&limit).await, 4);
    }
    assert!(answers[0].starts_with("HTTP/1.1 200 ") && answers[0].ends_with("\r\n\r\nhome"), "{}", answers[0]);
    assert!(answers[1].starts_with("HTTP/1.1 429 ") && answers[1].contains("content-length: "), "{}", answers[1]);
}

/// A user's own body: a static text, or whatever body it was made from.
enum Own {
    Text(&'static str),
    Other(UnsyncBoxBody<Bytes, BoxError>),
}

impl ResponseBody for Own {
    fn from_body<B>(body: B) -> Self
    where
        B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::Other(body.map_err(Into::into).boxed_unsync())
    }
}

impl http_body::Body for Own {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.get_mut() {
            Self::Text("") => Poll::Ready(None),
            Self::Text(text) => Poll::Ready(Some(Ok(Frame::data(Bytes::from(std::mem::take(text)))))),
            Self::Other(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => SizeHint::with_exact(text.len() as u64),
            Self::Other(body) => body.size_hint(),
        }
    }
}

#[tokio::test]
async fn users_own_body_is_kept() {
    let limit1 = limit();
    let own = service_fn(|_: Request<String>| async { Ok::<_, Infallible>(Response::new(Own::Text("home"))) });
    is_limited::<_, _, Own>(&limit1, limit1.layer(own)).await;

    type Unsync = UnsyncBoxBody<Bytes, BoxError>;
    let limit2 = limit();
    let boxed = service_fn(|_: Request<String>| async {
        Ok::<_, Infallible>(Response::new(Unsync::from_body(Full::from("home"))))
    });
    is_limited::<_, _, Unsync>(&limit2, limit2.layer(boxed)).await;
}

/// The overflow's body need not be that of the service.
#[tokio::test]
async fn overflow_may_answer_with_another_body() {
    let overflow = service_fn(answer_full::<Body>);
    let kept = limit().overflow(overflow).layer(router());
    let wrapped = limit().overflow(overflow).wrap_body().layer(service_fn(answer_full::<Body>));
    for _ in 0..2 {
        let kept: Response<Body> = kept.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        let wrapped = wrapped.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(kept.into_body().collect().await.unwrap().to_bytes(), "home");
        assert_eq!(wrapped.into_body().collect().await.unwrap().to_bytes(), "home");
    }
}

/// A server drops a body that has ended without polling it.
#[tokio::test]
async fn empty_body_is_settled_with_its_response() {
    let limit = limit();
    let empty = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let response = limit.layer(empty).oneshot(Request::new(Body::empty())).await.unwrap();
    assert!(http_body::Body::is_end_stream(response.body()));
    assert_eq!(counted(&limit).await, 0);
}
