//! Reads and drops the rest of a refused request, before the refusal is returned.
//!
//! A server that answers before it has read the request closes the connection, or resets the stream.
//! A client or a proxy that is still sending then often sees a broken connection instead of the
//! response.
//!
//! The body is read before the answer, because nothing could read it later. Only the request's task
//! polls the body, and servers drop a response's body, with everything in it, after they have
//! written the bytes that `Content-Length` announces.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Buf;
use http::header::EXPECT;
use http::{Request, Version};
use http_body::Body;
use pin_project_lite::pin_project;

use crate::base::head::Head;
use crate::base::sync::contained;
use crate::clock::{Sleep, Timer};
use crate::refusal::Protocol;

/// The maximum that is read of a refused request's body.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DiscardBounds {
    pub(crate) max_bytes: u64,
    pub(crate) max_time: Duration,
}

impl DiscardBounds {
    /// Returns whether the layer reads no bodies.
    pub(crate) fn is_off(self) -> bool {
        self.max_bytes == 0 || self.max_time.is_zero()
    }
}

/// The default maximum number of bytes, which is the number that an axum handler accepts by
/// default.
const BYTES: u64 = 2 << 20;

/// The default maximum time, which is the time of [`BYTES`] at 8 Mbit/s.
const TIME: Duration = Duration::from_secs(2);

impl Default for DiscardBounds {
    fn default() -> Self {
        Self { max_bytes: BYTES, max_time: TIME }
    }
}

/// A frame counts as at least this many bytes, so that a client cannot make the server read a million frames.
const FRAME_MIN: u64 = 64;

/// The maximum number of frames that are read at once. Other tasks run before the next frames are
/// read.
const FRAMES_AT_ONCE: u32 = 32;

/// Reads the rest of refused requests.
pub(crate) struct Discard {
    bounds: DiscardBounds,
    timer: Arc<dyn Timer>,
    /// Whether the timer has panicked. Without a timer nothing is read, because no time would end the
    /// reading.
    has_no_timer: AtomicBool,
}

impl Discard {
    /// Returns `None` if the bounds say that nothing is read.
    pub(crate) fn new(bounds: DiscardBounds, timer: Arc<dyn Timer>) -> Option<Arc<Self>> {
        (!bounds.is_off()).then(|| Arc::new(Self { bounds, timer, has_no_timer: AtomicBool::new(false) }))
    }

    /// Returns whether the body of a request is read if the request is refused.
    pub(crate) fn reads<B: Body>(&self, request: &Request<B>) -> bool {
        !request.body().is_end_stream() && self.waits_for_the_rest(&Head::from(request))
    }

    #[cold]
    fn waits_for_the_rest(&self, head: &Head<'_>) -> bool {
        // A client that sends `Expect` sends its body only after `100 Continue`, and servers send `100 Continue` when
        // the body is polled.
        let waits_for_100 = head.headers.contains_key(EXPECT);
        // A gRPC client reads the status while it sends, and may wait for the answer before it ends its stream.
        let is_call = head.version >= Version::HTTP_2 && Protocol::of(head) == Protocol::Grpc;
        let can_sleep = !self.has_no_timer.load(Ordering::Relaxed) && self.timer.now() < Duration::MAX;
        can_sleep && !waits_for_100 && !is_call
    }
}

impl fmt::Debug for Discard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Discard").field("bounds", &self.bounds).finish_non_exhaustive()
    }
}

pin_project! {
    /// A response, and the body of its request, which is read before the response is returned.
    pub(crate) struct Discarding<B, R> {
        // `None` after the reading has ended, because the body is dropped before the response is returned.
        #[pin]
        body: Option<B>,
        response: Option<R>,
        discard: Arc<Discard>,
        left: u64,
        until: Duration,
        sleep: Option<Sleep>,
    }
}

impl<B: Body, R> Discarding<B, R> {
    pub(crate) fn new(discard: &Arc<Discard>, body: B, response: R) -> Pin<Box<Self>> {
        let DiscardBounds { max_bytes, max_time } = discard.bounds;
        Box::pin(Self {
            body: Some(body),
            response: Some(response),
            left: max_bytes,
            until: discard.timer.now().saturating_add(max_time),
            sleep: None,
            discard: Arc::clone(discard),
        })
    }

    /// Returns the response when the body has ended or a bound is reached, and `None` if an earlier poll
    /// returned it.
    pub(crate) fn poll_response(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<R>> {
        let mut this = self.project();
        let is_over = read_frames(this.body.as_mut(), this.left, cx);
        let is_over = is_over || this.discard.timer.now() >= *this.until || {
            if this.sleep.is_none() {
                // The timer is the application's code, and Tokio's timer panics in a runtime without a time
                // driver.
                contained(|| *this.sleep = Some(this.discard.timer.sleep_until(*this.until)));
            }
            match this.sleep {
                Some(sleep) => sleep.as_mut().poll(cx).is_ready(),
                None => {
                    this.discard.has_no_timer.store(true, Ordering::Relaxed);
                    true
                }
            }
        };
        if !is_over {
            return Poll::Pending;
        }
        this.body.set(None);
        Poll::Ready(this.response.take())
    }
}

/// Reads the frames that have arrived. Returns whether the body has ended, or the maximum number of
/// bytes was read.
fn read_frames<B: Body>(body: Pin<&mut Option<B>>, left: &mut u64, cx: &mut Context<'_>) -> bool {
    let Some(mut body) = body.as_pin_mut() else { return true };
    for _ in 0..FRAMES_AT_ONCE {
        match body.as_mut().poll_frame(cx) {
            Poll::Pending => return false,
            Poll::Ready(Some(Ok(frame))) => {
                let Some(data) = frame.data_ref() else { return true };
                let bytes = u64::try_from(data.remaining()).unwrap_or(u64::MAX).max(FRAME_MIN);
                *left = left.saturating_sub(bytes);
                if *left == 0 || body.is_end_stream() {
                    return true;
                }
            }
            // The client has disconnected, or the whole body was read.
            Poll::Ready(Some(Err(_)) | None) => return true,
        }
    }
    cx.waker().wake_by_ref();
    false
}
