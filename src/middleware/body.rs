//! Response bodies: the types that a rate-limited service can answer with.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Either};
use pin_project_lite::pin_project;

use crate::error::BoxError;
use crate::refusal::RefusalBody;

/// A response body that can hold any other body. A [`RateLimit`](super::RateLimit) can answer with
/// such a body.
///
/// A rate-limited service keeps the response body type of the inner service. The layer also sends
/// bodies of its own: refusals, and bodies whose [bytes it counts](crate::Rule::settle_by_body).
/// The layer converts these bodies into the inner service's type with
/// [`from_body`](Self::from_body).
///
/// | response body of the inner service | how to use the layer with it |
/// |---|---|
/// | `axum::body::Body` of axum 0.8 | enable the feature `axum` |
/// | `tonic::body::Body` of tonic 0.14 | enable the feature `tonic` |
/// | [`UnsyncBoxBody`] with the error `Box<dyn Error + Send + Sync>` | as it is |
/// | your own, if it can box another body | implement this trait |
/// | any other: `Full`, hyper's `Incoming`, the bodies of compression and tracing layers | end the layer with [`wrap_body`](crate::RateLimitLayer::wrap_body) |
///
/// ```
/// use std::pin::Pin;
/// use std::task::{Context, Poll};
///
/// use bytes::Bytes;
/// use http_body::{Body, Frame, SizeHint};
/// use http_body_util::{BodyExt, combinators::UnsyncBoxBody};
/// use tower_ratelimit::middleware::ResponseBody;
///
/// type BoxError = Box<dyn std::error::Error + Send + Sync>;
///
/// struct MyBody(UnsyncBoxBody<Bytes, BoxError>);
///
/// impl ResponseBody for MyBody {
///     fn from_body<B>(body: B) -> Self
///     where
///         B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
///     {
///         Self(body.map_err(Into::into).boxed_unsync())
///     }
/// }
///
/// impl Body for MyBody {
///     type Data = Bytes;
///     type Error = BoxError;
///
///     fn poll_frame(
///         mut self: Pin<&mut Self>,
///         cx: &mut Context<'_>,
///     ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
///         Pin::new(&mut self.0).poll_frame(cx)
///     }
///
///     fn is_end_stream(&self) -> bool {
///         self.0.is_end_stream()
///     }
///
///     fn size_hint(&self) -> SizeHint {
///         self.0.size_hint()
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "a rate-limited service cannot answer with the body `{Self}`",
    label = "this body cannot hold a refusal",
    note = "for axum's body, enable the feature `axum` of `tower-ratelimit`; for tonic's, the feature `tonic`",
    note = "for every other body, end the layer with `.wrap_body()`",
    note = "if the response has to keep axum's body, put `MapResponseBodyLayer::new(axum::body::Body::new)` of \
            tower-http inside of the layer"
)]
pub trait ResponseBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static {
    /// Makes a body that sends the frames of `body`.
    ///
    /// [`is_end_stream`](Body::is_end_stream) and [`size_hint`](Body::size_hint) must return the
    /// same as for `body`, because servers derive `Content-Length` from them, and gRPC clients
    /// retry a refused call only if its response has no body.
    fn from_body<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static;
}

/// Implements the trait for a framework's body, which can box any other body.
#[cfg(any(feature = "axum", feature = "tonic"))]
macro_rules! boxing {
    ($body:ty) => {
        impl ResponseBody for $body {
            fn from_body<B>(body: B) -> Self
            where
                B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
            {
                Self::new(body)
            }
        }
    };
}
#[cfg(feature = "axum")]
boxing!(axum::body::Body);
#[cfg(feature = "tonic")]
boxing!(tonic::body::Body);

impl<E> ResponseBody for UnsyncBoxBody<Bytes, E>
where
    E: From<BoxError> + Into<BoxError> + 'static,
{
    fn from_body<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        body.map_err(|error| E::from(error.into())).boxed_unsync()
    }
}

pin_project! {
    /// The inner service's body, or a body that the layer sends in place of it.
    ///
    /// This type is the response body of a service with
    /// [`wrap_body`](crate::RateLimitLayer::wrap_body). This type implements `Default` (an empty
    /// body) for every `B`, because tower-http's timeout layer requires that.
    #[derive(Debug)]
    pub struct WrappedBody<B> {
        #[pin]
        body: Either<B, RefusalBody>,
    }
}

impl<B> WrappedBody<B> {
    pub(super) fn new(body: B) -> Self {
        Self { body: Either::Left(body) }
    }
}

impl<B> Default for WrappedBody<B> {
    fn default() -> Self {
        Self { body: Either::Right(RefusalBody::whole(Bytes::new())) }
    }
}

impl<B> ResponseBody for WrappedBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    fn from_body<T>(body: T) -> Self
    where
        T: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self { body: Either::Right(RefusalBody::own(body)) }
    }
}

impl<B> Body for WrappedBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.project().body.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::fmt;

    use super::*;
    use http::{HeaderMap, HeaderValue};

    struct NoDefault;

    impl Body for NoDefault {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"inner")))))
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(5)
        }
    }

    fn frame(body: &mut WrappedBody<NoDefault>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(body).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
    }

    fn next(body: &mut WrappedBody<NoDefault>) -> Option<Bytes> {
        match frame(body) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
            _ => None,
        }
    }

    #[test]
    fn wrapped_body_is_empty_and_ended_by_default() {
        let body: WrappedBody<NoDefault> = WrappedBody::default();
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
    }

    #[test]
    fn refusal_body_sends_its_bytes_once() {
        let mut body: WrappedBody<NoDefault> =
            WrappedBody::from_body(RefusalBody::whole(Bytes::from_static(b"too many")));
        assert_eq!(body.size_hint().exact(), Some(8));
        assert!(!body.is_end_stream());
        assert_eq!(next(&mut body).as_deref(), Some(&b"too many"[..]));
        assert!(body.is_end_stream());
        assert_eq!(next(&mut body), None);
    }

    #[test]
    fn wrapped_body_passes_the_services_on() {
        let mut body = WrappedBody::new(NoDefault);
        assert_eq!(body.size_hint().exact(), Some(5));
        assert_eq!(next(&mut body).as_deref(), Some(&b"inner"[..]));
    }

    /// Sends these frames, and then fails.
    struct Streaming(VecDeque<Poll<Frame<Bytes>>>);

    impl Body for Streaming {
        type Data = Bytes;
        type Error = fmt::Error;

        fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, fmt::Error>>> {
            self.0.pop_front().map_or(Poll::Ready(Some(Err(fmt::Error))), |next| next.map(|frame| Some(Ok(frame))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_empty()
        }

        fn size_hint(&self) -> SizeHint {
            let mut hint = SizeHint::new();
            hint.set_lower(2);
            hint.set_upper(9);
            hint
        }
    }

    #[test]
    fn refusal_body_keeps_a_responders_trailers() {
        let trailers = HeaderMap::from_iter([(http::header::ETAG, HeaderValue::from_static("x"))]);
        let piece = |text: &'static str| Poll::Ready(Frame::data(Bytes::from(text)));
        let frames = [piece("a"), Poll::Pending, piece("bc"), Poll::Ready(Frame::trailers(trailers.clone()))];
        let mut body: WrappedBody<NoDefault> = WrappedBody::from_body(RefusalBody::own(Streaming(frames.into())));
        assert_eq!((body.size_hint().lower(), body.size_hint().upper()), (2, Some(9)));
        assert_eq!(next(&mut body).as_deref(), Some(&b"a"[..]));
        assert!(frame(&mut body).is_pending());
        assert_eq!(next(&mut body).as_deref(), Some(&b"bc"[..]));
        assert!(!body.is_end_stream());
        let Poll::Ready(Some(Ok(last))) = frame(&mut body) else { panic!("no trailers") };
        assert_eq!(last.into_trailers().unwrap(), trailers);
        assert!(body.is_end_stream());
        let Poll::Ready(Some(Err(error))) = frame(&mut body) else { panic!("no error") };
        assert!(error.is::<fmt::Error>());
    }

    /// A refused gRPC call is retried only if its response has no body at all.
    fn has_ended<C: ResponseBody>() {
        let body = C::from_body(RefusalBody::whole(Bytes::new()));
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
        let body = C::from_body(RefusalBody::whole(Bytes::from_static(b"too many")));
        assert!(!body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(8));
    }

    #[test]
    fn response_bodies_know_their_end_and_length() {
        #[cfg(feature = "axum")]
        has_ended::<axum::body::Body>();
        #[cfg(feature = "tonic")]
        has_ended::<tonic::body::Body>();
        has_ended::<UnsyncBoxBody<Bytes, BoxError>>();
        has_ended::<WrappedBody<NoDefault>>();
    }
}
