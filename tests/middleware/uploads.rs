//! A refusal reaches a client that still sends its request's body, within bounds on bytes and time.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode, Version};
use http_body::Frame;
use tokio::time::{Instant, Interval, interval};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::{Sleep, Timer};
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::{
    Key, MemoryLimiter, Quota, RateLimitLayer, key,
    middleware::{Access, AccessList},
};

use crate::support::Scripted;

type Stack = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

const SECOND: Duration = Duration::from_secs(1);

// Uploads ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// The bytes that the layer read of a body, and whether it dropped the body.
#[derive(Clone, Default)]
struct Seen(Arc<(AtomicU64, AtomicBool)>);

impl Seen {
    fn bytes(&self) -> u64 {
        self.0.0.load(Ordering::Relaxed)
    }

    fn is_dropped(&self) -> bool {
        self.0.1.load(Ordering::Relaxed)
    }
}

/// A body of this many frames, each of this many bytes.
struct Upload {
    frames: u64,
    frame: Bytes,
    /// The time between two frames, if they do not come at once.
    pace: Option<Interval>,
    seen: Seen,
}

impl Upload {
    fn new(frames: u64, bytes: usize) -> (Self, Seen) {
        let seen = Seen::default();
        (Self { frames, frame: vec![0; bytes].into(), pace: None, seen: seen.clone() }, seen)
    }

    fn at_pace(mut self, pace: Duration) -> Self {
        self.pace = Some(interval(pace));
        self
    }
}

impl http_body::Body for Upload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.pace.as_mut().is_some_and(|pace| pace.poll_tick(cx).is_pending()) {
            return Poll::Pending;
        }
        if self.frames == 0 {
            return Poll::Ready(None);
        }
        self.frames -= 1;
        self.seen.0.0.fetch_add(self.frame.len() as u64, Ordering::Relaxed);
        Poll::Ready(Some(Ok(Frame::data(self.frame.clone()))))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.seen.0.1.store(true, Ordering::Relaxed);
    }
}

/// A body of which nothing comes.
struct Silent;

impl http_body::Body for Silent {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

fn post(body: impl http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static) -> Request<Body> {
    Request::post("/").body(Body::new(body)).unwrap()
}

// Layers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

fn stack<L: Limiter>(layer: &RateLimitLayer<L>) -> Stack {
    let served = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    BoxCloneSyncService::new(layer.layer(served))
}

/// A layer that refuses every request with 400.
fn refusing() -> RateLimitLayer {
    RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1), key::header("x-never"))
}

async fn status(stack: &Stack, request: Request<Body>) -> StatusCode {
    stack.clone().oneshot(request).await.unwrap().status()
}

/// Sends a request through a layer that refuses it. Returns how long the layer took to answer.
async fn time_to_refuse(layer: RateLimitLayer, request: Request<Body>) -> Duration {
    let began = Instant::now();
    assert_eq!(status(&stack(&layer), request).await, StatusCode::BAD_REQUEST);
    began.elapsed()
}

#[tokio::test(start_paused = true)]
async fn refusal_of_every_kind_reads_the_upload() {
    let denying = AccessList::new();
    denying.set_key(Key::global(), Access::Deny);
    let (failing, later) = (Scripted::new(), Scripted::new().later());
    failing.fail(true);
    let quota = Quota::per_hour(1);
    let stacks = [
        (stack(&RateLimitLayer::new(MemoryLimiter::new(), quota, key::global())), StatusCode::TOO_MANY_REQUESTS),
        (stack(&RateLimitLayer::new(later, quota, key::global())), StatusCode::TOO_MANY_REQUESTS),
        (stack(&RateLimitLayer::new(failing, quota, key::global())), StatusCode::SERVICE_UNAVAILABLE),
        (
            stack(&RateLimitLayer::new(MemoryLimiter::new(), quota, key::global()).access(&denying, key::global())),
            StatusCode::FORBIDDEN,
        ),
        (stack(&refusing()), StatusCode::BAD_REQUEST),
    ];
    for (stack, expected) in stacks {
        let _ = status(&stack, Request::default()).await; // the one that passes where the limit refuses the second
        let (upload, seen) = Upload::new(100, 1_000);
        assert_eq!(status(&stack, post(upload)).await, expected);
        assert_eq!(seen.bytes(), 100_000, "{expected}");
        assert!(seen.is_dropped(), "{expected}");
    }
}

#[tokio::test(start_paused = true)]
async fn grpc_web_refusal_reads_the_upload() {
    let (upload, seen) = Upload::new(100, 1_000);
    let mut request = post(upload);
    request.headers_mut().insert("content-type", "application/grpc-web+proto".parse().unwrap());
    assert_eq!(stack(&refusing()).oneshot(request).await.unwrap().headers()["grpc-status"], "3");
    assert_eq!(seen.bytes(), 100_000);
}

#[tokio::test(start_paused = true)]
async fn large_upload_is_read_up_to_the_bound() {
    let (upload, seen) = Upload::new(u64::MAX, 15_000);
    let _ = time_to_refuse(refusing().discard_body(100_000, SECOND), post(upload)).await;
    assert_eq!(seen.bytes(), 105_000);
    assert!(seen.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn upload_of_tiny_frames_is_not_read_for_long() {
    for bytes in [0, 1] {
        let (upload, seen) = Upload::new(u64::MAX, bytes);
        let _ = time_to_refuse(refusing().discard_body(64_000, SECOND), post(upload)).await;
        assert!(seen.bytes() <= 1_000, "{}", seen.bytes());
    }
}

#[tokio::test(start_paused = true)]
async fn other_tasks_run_while_an_upload_is_read() {
    let (upload, seen) = Upload::new(10_000, 64);
    let mut answer = std::pin::pin!(time_to_refuse(refusing(), post(upload)));
    let mut polls = 0;
    std::future::poll_fn(|cx| {
        polls += 1;
        answer.as_mut().poll(cx)
    })
    .await;
    assert_eq!(seen.bytes(), 640_000);
    assert!(polls > 100, "it was read in {polls} portions");
}

#[tokio::test(start_paused = true)]
async fn trickling_upload_is_answered_after_its_time() {
    let (upload, seen) = Upload::new(u64::MAX, 1);
    let took = time_to_refuse(refusing().discard_body(1_000, SECOND / 2), post(upload.at_pace(SECOND / 9))).await;
    assert!(took >= SECOND / 2 && took < SECOND * 6 / 10, "{took:?}");
    assert!(seen.is_dropped());
}

#[tokio::test(start_paused = true)]
async fn silent_upload_is_answered_after_its_time() {
    let took = time_to_refuse(refusing().discard_body(1_000, SECOND), post(Silent)).await;
    assert!(took >= SECOND && took < SECOND * 11 / 10, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn upload_that_ends_is_answered_at_its_end() {
    let (upload, seen) = Upload::new(10, 1_000);
    assert_eq!(time_to_refuse(refusing(), post(upload.at_pace(SECOND / 10))).await, SECOND);
    assert_eq!(seen.bytes(), 10_000);
}

#[tokio::test(start_paused = true)]
async fn client_that_waits_for_100_is_answered_at_once() {
    let (upload, seen) = Upload::new(10, 1_000);
    let mut request = post(upload);
    request.headers_mut().insert("expect", "100-continue".parse().unwrap());
    assert_eq!(time_to_refuse(refusing(), request).await, Duration::ZERO);
    // A server sends `100 Continue` when the body is polled.
    assert_eq!(seen.bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn grpc_stream_is_answered_at_once() {
    let mut request = post(Silent);
    *request.version_mut() = Version::HTTP_2;
    request.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
    request.headers_mut().insert("te", "trailers".parse().unwrap());
    let began = Instant::now();
    assert_eq!(stack(&refusing()).oneshot(request).await.unwrap().headers()["grpc-status"], "3");
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn discarding_ends_by_a_bound_of_zero() {
    for layer in [refusing().discard_body(0, SECOND), refusing().discard_body(1_000, Duration::ZERO)] {
        assert_eq!(time_to_refuse(layer, post(Silent)).await, Duration::ZERO);
    }
}

/// A timer that shows the end of time, because it cannot sleep.
#[derive(Debug)]
struct NoTime;

impl Timer for NoTime {
    fn now(&self) -> Duration {
        Duration::MAX
    }

    fn sleep_until(&self, _: Duration) -> Sleep {
        Box::pin(std::future::ready(()))
    }
}

#[tokio::test(start_paused = true)]
async fn upload_is_not_read_without_a_timer() {
    assert_eq!(time_to_refuse(refusing().timer(NoTime), post(Silent)).await, Duration::ZERO);
}

#[test]
fn upload_is_refused_in_a_runtime_without_a_timer() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let stack = stack(&refusing());
    for _ in 0..2 {
        assert_eq!(runtime.block_on(status(&stack, post(Silent))), StatusCode::BAD_REQUEST);
    }
}

#[test]
fn upload_is_refused_outside_of_a_runtime() {
    let mut answer = std::pin::pin!(stack(&refusing()).oneshot(post(Silent)));
    let mut cx = Context::from_waker(std::task::Waker::noop());
    let Poll::Ready(answer) = answer.as_mut().poll(&mut cx) else { panic!("it waits for what does not come") };
    assert_eq!(answer.unwrap().status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn upload_that_passes_is_left_to_the_service() {
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1), key::global());
    let (upload, seen) = Upload::new(10, 1_000);
    assert_eq!(status(&stack(&layer), post(upload)).await, StatusCode::OK);
    assert_eq!(seen.bytes(), 0);
}
